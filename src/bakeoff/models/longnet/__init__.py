"""LongNet: dilated attention in place of attention, for text and for images.

Blocks are those of LLM-Med, with `bakeoff.ops.dilated_attention`: a token attends densely to its own short
segment and ever more sparsely to longer ones, so that cost grows linearly with length (Ding et al. 2023). Of
a branch with rate r, a head sees one token in r. Which one moves on from head to head and from layer to
layer, so that the layers together reach every token.

`LongNetLM` reads bytes in order. `ImageLongNet` reads grids, whose cells `bakeoff.token_order` lines up, so
that what is near in the grid shares a segment.

Shapes: B batch, T time or tokens, D d_model, H heads, K kv_heads, E = D / H, V vocab, r a rate.
"""

from bakeoff.models.longnet.cache import Cache
from bakeoff.models.longnet.image import ImageConfig, ImageLongNet
from bakeoff.models.longnet.shape import SIZES, Config
from bakeoff.models.longnet.text import LongNetLM

__all__ = ["SIZES", "Cache", "Config", "ImageConfig", "ImageLongNet", "LongNetLM"]
