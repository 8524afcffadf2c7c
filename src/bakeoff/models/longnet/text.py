"""LongNetLM: a causal language model."""

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.models.caching import rows_at
from bakeoff.models.checks import check_cache, check_capacity, check_ids, check_kind, check_targets
from bakeoff.models.generation import Generates
from bakeoff.models.longnet.blocks import Block, LongNet, cross_entropy
from bakeoff.models.longnet.cache import Cache
from bakeoff.models.longnet.shape import Config

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["LongNetLM"]

_PIECE = 256  # symbols behind a cache that go at a time: their scores exist


class LongNetLM(Generates, LongNet):
    """A causal language model over `config.vocab` symbols, bytes by default.

    >>> model = LongNetLM(Config.sizes("tiny"))
    >>> ids = torch.randint(256, (2, 96))
    >>> logits, _ = model(ids)                     # [2, 96, 256]
    >>> _, loss = model(ids[:, :-1], ids[:, 1:])   # mean cross entropy in nats
    """

    def __init__(self, config: Config) -> None:
        check_kind("config", config, Config)
        super().__init__(config, causal=True)
        self.config = config
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
            assert isinstance(block, Block)
            block.attention.attends = partial(dilated_attention, mesh=mesh)

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, *, return_logits: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """(logits, loss) of whole rows.

        Args:
            ids: [B, T] symbols, uint8, int32 or int64, 1 <= T <= config.max_seq_len. On a GPU their values
                are not checked, which would wait for it.
            targets: [B, T] next symbols, -100 where none counts. Without them the loss is None.
            return_logits: give logits beside the loss, too.

        Returns:
            logits [B, T, V], or None with targets unless asked for; loss, the mean cross entropy in nats, a
            float32 scalar (float64 in a float64 model), or None.

        Raises:
            TypeError: ids or targets of another dtype. ValueError: another shape or device, or T too long.
            IndexError: on the CPU, a value that is no symbol.
        """
        self._check(ids)
        if targets is not None:
            check_targets(targets, ids, self.config.vocab)
        if ids.shape[1] % self.ranks:
            raise ValueError(f"{self.ranks} ranks can't share rows of {ids.shape[1]} symbols in equal parts")
        length = ids.shape[1] // self.ranks
        own = slice(self.rank * length, (self.rank + 1) * length)
        logits = self._logits(ids[:, own], own.start)
        if targets is None:
            return logits, None
        count = None if self.ranks == 1 else (targets != -100).sum() / self.ranks
        loss = cross_entropy(logits, targets[:, own], count)
        return (logits if return_logits else None), loss

    def decode(self, ids: Tensor, cache: Cache) -> Tensor:
        """Logits [B, T, V] of ids [B, T] that follow what `cache` holds; the cache then holds them, too."""
        if self.ranks > 1:
            raise RuntimeError(f"{self.ranks} ranks share this model's rows: decode in one process")
        check_kind("cache", cache, Cache)
        self._check(ids, cache.length)
        check_cache(cache, self.config, ids)
        found = []
        for piece in ids.split(_PIECE, dim=1) if cache.length else (ids,):
            with cache.step():
                found.append(self._logits(piece, cache.length, cache))
            cache.length += piece.shape[1]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _check(self, ids: Tensor, held: int = 0) -> None:
        check_ids("ids", ids, (self.cos.device, self.embed.weight.device), self.config.vocab)
        length, limit = held + ids.shape[1], self.config.max_seq_len
        if length > limit:
            raise ValueError(
                f"a row of {length} symbols is longer than max_seq_len={limit}: cut it, or build the model "
                f"with Config(max_seq_len={length}) or more (weights do not depend on it)"
            )

    def _logits(self, ids: Tensor, start: int, cache: Cache | None = None) -> Tensor:
        length = ids.shape[1]
        if cache is None:
            cos, sin = self.cos[start : start + length], self.sin[start : start + length]
        else:
            cos, sin = rows_at(self.cos, length, cache), rows_at(self.sin, length, cache)
        x = self.run(self.embed(ids.long()), cos, sin, cache)
        return F.linear(x, self.embed.weight if self.head is None else self.head.weight)

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations of forward and backward per symbol, in rows of `length` symbols.

        6 per weight of a matrix product, and 6 * layers * d_model * segment / rate^2 for each branch.
        """
        config = self.config
        products = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        products += self.embed.weight.numel() if self.head is None else 0
        branches = zip(config.segments, config.rates, strict=True)
        keys = sum(min(segment, length) / rate**2 for segment, rate in branches)
        return int(6 * products + 6 * config.layers * config.d_model * keys)

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for `decode`, of the same size for any number of positions."""
        check_capacity(capacity)
        return Cache(self.config)

    def context(self) -> int:
        """How many positions `decode` sees at most."""
        return self.config.max_seq_len
