"""LongNetLM: a causal language model."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bakeoff.models.caching import rows_at
from bakeoff.models.checks import check_capacity, check_kind
from bakeoff.models.language import LanguageModel
from bakeoff.models.longnet.attention import Attention, blocks_of
from bakeoff.models.longnet.cache import Cache
from bakeoff.models.longnet.shape import Config
from bakeoff.nn import RMSNorm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["LongNetLM"]

_PIECE = 256  # symbols behind a cache that go at a time: their scores exist


class LongNetLM(LanguageModel):
    """A causal language model over `config.vocab` symbols, bytes by default.

    >>> model = LongNetLM(Config.sizes("tiny"))
    >>> ids = torch.randint(256, (2, 96))
    >>> logits, _ = model(ids)                     # [2, 96, 256]
    >>> _, loss = model(ids[:, :-1], ids[:, 1:])   # mean cross entropy in nats
    """

    config: Config
    kept = Cache

    def __init__(self, config: Config) -> None:
        super().__init__()
        check_kind("config", config, Config)
        self.config = config
        self.blocks = blocks_of(config, causal=True)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.embed = nn.Embedding(config.vocab, config.d_model)
        self.head = None if config.tie else nn.Linear(config.d_model, config.vocab, bias=False)
        self.make_tables(config.max_seq_len, config.head_dim, config.rope_base)
        self.first_values()
        self.rank, self.ranks = 0, 1
        """Which part of every row is this process's, and how many there are."""

    def share_rows(self, mesh: "DeviceMesh") -> None:
        """From now on each rank of `mesh` (of one dimension) takes a contiguous part of every row.

        All ranks call `forward` together with the same whole rows. It then gives the logits of this rank's
        part, and a loss whose mean over the ranks is the rows' loss; so is the mean of its gradients.
        """
        from bakeoff.parallel import dilated_attention  # imports what one process doesn't need

        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        for block in self.blocks:
            assert isinstance(block.attention, Attention)
            block.attention.attends = partial(dilated_attention, mesh=mesh)

    def decode(self, ids: Tensor, cache: Cache) -> Tensor:
        if self.ranks > 1:
            raise RuntimeError(f"{self.ranks} ranks share this model's rows: decode in one process")
        check_kind("cache", cache, Cache)
        self._check(ids, cache.length)
        found = []
        for piece in ids.split(_PIECE, dim=1) if cache.length else (ids,):
            found.append(super().decode(piece, cache))  # noqa: PERF401  a comprehension has no super()
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _check(self, ids: Tensor, held: int = 0) -> None:
        super()._check(ids, held)
        if ids.shape[1] % self.ranks:
            raise ValueError(f"{self.ranks} ranks can't share rows of {ids.shape[1]} symbols in equal parts")

    def _own(self, rows: Tensor) -> slice:
        """This rank's part of rows [B, T]."""
        length = rows.shape[1] // self.ranks
        return slice(self.rank * length, (self.rank + 1) * length)

    def _hidden(self, ids: Tensor, cache: Cache | None) -> Tensor:
        if cache is None:
            own = self._own(ids)
            ids, cos, sin = ids[:, own], self.cos[own], self.sin[own]
        else:
            cos, sin = (rows_at(table, ids.shape[1], cache) for table in (self.cos, self.sin))
        return self._through(self.embed(ids.long()), cache, cos, sin)

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        if self.ranks == 1:
            return super()._loss(x, targets)
        targets = targets.long()  # in uint8 -100 is 156, which is a byte
        own = targets[:, self._own(targets)]
        loss = self._cross_entropy(x, own, "sum")
        return loss / ((targets != -100).sum() / self.ranks)

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations of forward and backward per symbol, in rows of `length` symbols.

        6 per weight of a matrix product, and 6 * layers * d_model * segment / rate^2 for each branch.
        """
        config = self.config
        products = self._matrix_weights()
        branches = zip(config.segments, config.rates, strict=True)
        keys = sum(min(segment, length) / rate**2 for segment, rate in branches)
        return int(6 * products + 6 * config.layers * config.d_model * keys)

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for `decode`, of the same size for any number of positions."""
        check_capacity(capacity)
        return Cache(self.config)
