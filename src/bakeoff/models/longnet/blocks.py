"""The layers of LongNet, which both models have."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.models.initial import normal_matrices
from bakeoff.models.longnet.attention import Attention
from bakeoff.models.longnet.cache import Cache
from bakeoff.models.longnet.shape import Shape
from bakeoff.nn import MLP, HasRotaryTables, RMSNorm
from bakeoff.nn.initial import StartsAnew

__all__ = ["LongNet", "cross_entropy"]


class Block(nn.Module):
    """One layer. Takes and returns the stream as (branch, residual); their sum is the stream."""

    def __init__(self, config: Shape, layer: int, causal: bool) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config, layer, causal)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config.d_model, config.ff_dim)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:  # the first layer: nothing to add yet
            h, residual = self.attention_norm(x), x
        else:
            h, residual = self.attention_norm(x, residual)
        drops = self.training and cache is None  # decoding never drops
        x = F.dropout(self.attention(h, cos, sin, cache), self.dropout, drops)
        h, residual = self.mlp_norm(x, residual)
        x = F.dropout(self.mlp(h), self.dropout, drops)
        return x, residual


class LongNet(HasRotaryTables, StartsAnew):
    """The blocks and the last norm, which both models have."""

    def __init__(self, config: Shape, causal: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, layer, causal) for layer in range(config.layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)

    def first_values(self) -> None:
        """Normal weights of deviation 0.02; the projections that end a branch are divided by
        sqrt(2 * layers), so that the stream's variance does not grow with depth (Radford et al. 2019)."""
        normal_matrices(self, len(self.blocks))
        self.fill_tables()

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        """x [B, T, D] through all blocks and the norm."""
        residual = None
        for block in self.blocks:
            x, residual = block(x, residual, cos, sin, cache)
        y: Tensor = self.norm(x, residual)[0]
        return y


def cross_entropy(logits: Tensor, targets: Tensor, count: Tensor | None = None) -> Tensor:
    """The cross entropy of logits [..., classes] and targets [...], at least in float32: the mean, or the sum
    divided by `count`."""
    exact = logits if logits.dtype == torch.float64 else logits.float()
    flat, wanted = exact.flatten(0, -2), targets.flatten().long()
    if count is None:
        return F.cross_entropy(flat, wanted)
    return F.cross_entropy(flat, wanted, reduction="sum") / count
