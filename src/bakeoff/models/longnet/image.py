"""ImageLongNet: classes of images and volumes, or of each of their cells."""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.models.checks import check_device, check_kind, check_symbols, check_values
from bakeoff.models.language import Layers
from bakeoff.models.longnet.attention import blocks_of
from bakeoff.models.longnet.shape import Shape, check_sizes
from bakeoff.nn import RMSNorm
from bakeoff.token_order import TokenOrder, permute, token_order

__all__ = ["ImageConfig", "ImageLongNet"]

Order = Literal["row", "tile", "snake", "morton", "hilbert"]
Labels = Literal["image", "cell"]


class ImageConfig(
    Shape, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="image-longnet"
):
    """The shape of an `ImageLongNet`. Values that contradict each other raise ValueError, values of another
    type TypeError."""

    shape: tuple[int, ...] = (64, 64)
    """Sizes of an image or a volume, in pixels."""
    patch: int = 1
    """Pixels of a cell along each axis, which divides all sizes."""
    channels: int = 3
    """Of a pixel. 0: images hold symbols, one a pixel, as whole numbers."""
    symbols: int = 0
    """With `channels=0`: how many different symbols there are."""
    classes: int = 10
    labels: Labels = "image"
    """What has a class: the whole image, or each cell."""
    order: Order = "hilbert"
    """How cells are lined up, a kind of `bakeoff.token_order`."""
    tile: int = 0
    """With `order="tile"`: cells of a tile along each axis; 0 means the order's default."""
    segments: tuple[int, ...] = (256, 1024, 4096)
    rope_base: float = 100.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes("shape", self.shape)
        for name, kind in (("order", Order), ("labels", Labels)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(get_args(kind))}")
        for name in ("patch", "classes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if len(self.shape) not in (2, 3) or any(size % self.patch for size in self.shape):
            raise ValueError(f"shape={self.shape} must be 2 or 3 multiples of patch={self.patch}")
        if min(self.channels, self.symbols) < 0 or bool(self.channels) == bool(self.symbols):
            raise ValueError(
                f"channels={self.channels} and symbols={self.symbols}: one of them is above 0, the other is 0"
            )
        if self.symbols and self.patch > 1:
            raise ValueError(f"patch={self.patch} must be 1 where images hold symbols")
        if self.tile < 0 or (self.tile and self.order != "tile"):
            raise ValueError(f"tile={self.tile} must not be negative, and belongs to order='tile'")
        if self.head_dim < 2 * len(self.shape):
            raise ValueError(
                f"heads of {self.head_dim} are too narrow: each of {len(self.shape)} axes turns a pair; "
                f"d_model={2 * len(self.shape) * self.heads} is enough"
            )

    @property
    def grid(self) -> tuple[int, ...]:
        """Cells along each axis."""
        return tuple(size // self.patch for size in self.shape)


class ImageLongNet(Layers):
    """Classes of images or volumes, or of each of their cells.

    Cells are embedded, given a learned vector for their place on each axis, lined up once in the
    configuration's order, and put back at the end. Attention is in both directions; each axis turns pairs of
    its own of every head by rotary.

    >>> model = ImageLongNet(ImageConfig(shape=(32, 32), patch=2, d_model=48, layers=3, segments=(64, 256),
    ...                                  rates=(1, 4)))
    >>> logits, _ = model(torch.randn(2, 3, 32, 32))   # [2, 10]
    >>> logits.shape
    torch.Size([2, 10])
    """

    config: ImageConfig
    perm: Tensor
    inverse: Tensor

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        check_kind("config", config, ImageConfig)
        self.config = config
        self.blocks = blocks_of(config, causal=False)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        cells, grid, D = math.prod(config.grid), config.grid, config.d_model
        self.embed: nn.Embedding | nn.Linear = (
            nn.Embedding(config.symbols, D)
            if config.symbols
            else nn.Linear(config.channels * config.patch ** len(grid), D, bias=False)
        )
        self.places = nn.ParameterList(nn.Parameter(torch.empty(size, D)) for size in grid)
        self.head = nn.Linear(D, config.classes, bias=False)
        # Kept with the weights: models trained in one order are not for another.
        self.register_buffer("perm", torch.empty(cells, dtype=torch.int32))
        self.register_buffer("inverse", torch.empty(cells, dtype=torch.int32))
        axis_dim = config.head_dim // (2 * len(grid)) * 2
        self.make_tables(max(grid), axis_dim, config.rope_base)
        self.first_values()

    @torch.no_grad()
    def first_values(self) -> None:
        """As of `LongNetLM`; the tables of the order are made, too."""
        super().first_values()
        order = self.order()
        self.perm.copy_(order.perm)
        self.inverse.copy_(order.inverse)

    def order(self) -> TokenOrder:
        """The order of the cells, on the CPU."""
        return token_order(self.config.order, self.config.grid, tile=self.config.tile or None)

    def forward(
        self, images: Tensor, targets: Tensor | None = None, *, return_logits: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """(logits, loss) of images.

        Args:
            images: [B, channels, *shape], floating; of symbols [B, *shape], uint8, int32 or int64, whose
                values are not checked.
            targets: [B], or [B, *grid] with labels="cell": classes, -100 where none counts. Without them the
                loss is None.
            return_logits: give logits beside the loss, too.

        Returns:
            logits [B, classes] or [B, *grid, classes], or None with targets unless asked for; loss, the mean
            cross entropy in nats, a float32 scalar (float64 in a float64 model), or None.

        Raises:
            TypeError: images or targets of another dtype. ValueError: another shape.
        """
        self._check(images, targets)
        grid = self.config.grid
        x = self.embed(images.long() if self.config.symbols else self._patches(images))
        for axis, place in enumerate(self.places):
            x = x + place.view(*(size if i == axis else 1 for i, size in enumerate(grid)), -1).to(x.dtype)
        x = permute(x.flatten(1, -2), self.perm, self.inverse)
        x = self._through(x, None, *self._turns())
        if self.config.labels == "image":
            logits = self.head(x.mean(1))
        else:
            logits = permute(self.head(x), self.inverse, self.perm).unflatten(1, grid)
        if targets is None:
            return logits, None
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
        return (logits if return_logits else None), F.cross_entropy(exact, targets.flatten().long())

    def _patches(self, images: Tensor) -> Tensor:
        """[B, C, *shape] as the pixels of each cell, [B, *grid, C patch ...]."""
        axes, patch = len(self.config.shape), self.config.patch
        for axis in range(axes):
            images = images.unflatten(2 + 2 * axis, (-1, patch))
        order = (0, *range(2, 2 + 2 * axes, 2), 1, *range(3, 3 + 2 * axes, 2))
        return images.permute(order).flatten(1 + axes)

    def _turns(self) -> tuple[Tensor, Tensor]:
        """cos and sin [cells, pairs] of the cells in their order; each axis has pairs of its own."""
        grid, cell = self.config.grid, self.perm.long()
        at = [cell // math.prod(grid[axis + 1 :]) % size for axis, size in enumerate(grid)]
        return torch.cat([self.cos[place] for place in at], 1), torch.cat(
            [self.sin[place] for place in at], 1
        )

    def _check(self, images: Tensor, targets: Tensor | None) -> None:
        config = self.config
        if config.symbols:
            check_symbols("images", images)
        elif not isinstance(images, Tensor) or not images.is_floating_point():
            raise TypeError("images must be a floating tensor [B, channels, *shape]: call images.float()")
        want = (config.shape) if config.symbols else (config.channels, *config.shape)
        if images.ndim != 1 + len(want) or images.shape[1:] != want or not images.shape[0]:
            raise ValueError(f"images have shape {tuple(images.shape)}, expected [B, *{want}], B at least 1")
        check_device("images", images, (self.cos.device, self.embed.weight.device))
        if config.symbols:
            check_values("images", images, (images.device,), config.symbols)
        if targets is None:
            return
        check_symbols("targets", targets)
        labelled = (images.shape[0], *(config.grid if config.labels == "cell" else ()))
        if targets.shape != labelled:
            raise ValueError(f"targets have shape {tuple(targets.shape)}, expected {labelled}")
        check_values("targets", targets, (images.device,), config.classes, ignored=-100)
