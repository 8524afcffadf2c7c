"""What all models have in common: a layer, the loss, and how language models take rows and pieces of rows."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.models.caching import DecodeCache
from bakeoff.models.checks import check_cache, check_ids, check_kind, check_targets
from bakeoff.models.generation import Generates
from bakeoff.models.initial import normal_matrices
from bakeoff.nn import MLP, HasRotaryTables, RMSNorm
from bakeoff.nn.hooks import hooked
from bakeoff.nn.initial import StartsAnew
from bakeoff.ops import linear_cross_entropy

__all__ = ["Block", "LanguageModel", "Layers"]


class Widths(Protocol):
    """What a layer reads of a model's configuration."""

    @property
    def d_model(self) -> int: ...
    @property
    def ff_dim(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def dropout(self) -> float: ...


class Block(nn.Module):
    """One layer: what mixes positions, and a gated MLP, each behind a norm. Takes and returns the stream as
    (branch, residual); their sum is the stream."""

    def __init__(self, config: Widths, **mixer: nn.Module) -> None:
        """`mixer` is one module, under the name that its weights have: ``Block(config, attention=...)``."""
        super().__init__()
        ((self.mixes, module),) = mixer.items()
        self.dropout = config.dropout
        self.add_module(f"{self.mixes}_norm", RMSNorm(config.d_model, config.norm_eps))
        self.add_module(self.mixes, module)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config.d_model, config.ff_dim)

    def forward(self, x: Tensor, residual: Tensor | None, drops: bool, *told: Any) -> tuple[Tensor, Tensor]:
        """`drops`: whether there is dropout. `told`: what the mixer takes beside its input."""
        norm, mixer = getattr(self, f"{self.mixes}_norm"), getattr(self, self.mixes)
        if residual is None:  # the first layer: nothing to add yet
            h, residual = norm(x), x
        else:
            h, residual = norm(x, residual)
        x = F.dropout(mixer(h, *told), self.dropout, drops)
        h, residual = self.mlp_norm(x, residual)
        return F.dropout(self.mlp(h), self.dropout, drops), residual


class Layers(HasRotaryTables, StartsAnew):
    """Base of the models. One has `config`, `blocks` and a last `norm`."""

    config: Any
    blocks: nn.ModuleList
    norm: RMSNorm

    def first_values(self) -> None:
        """Normal matrices of deviation 0.02; those that end a branch are divided by sqrt(2 * layers), so that
        the stream's variance does not grow with depth (Radford et al. 2019). What else a model has, as
        filters, spectra, n-grams and memories, keeps its own start."""
        normal_matrices(self, self.config.layers)
        self.fill_tables()

    def _through(self, x: Tensor, cache: Any, *told: Any, pasts: Sequence[Any] | None = None) -> Tensor:
        """x [B, T, D] through all blocks and the norm. Mixers are told `told`, and last of all what is known
        of earlier positions: each one's of `pasts`, or `cache`."""
        drops = self.training and cache is None  # decoding never drops
        residual = None
        for block, past in zip(self.blocks, pasts or [cache] * len(self.blocks), strict=True):
            x, residual = block(x, residual, drops, *told, past)
        y: Tensor = self.norm(x, residual)[0]
        return y


def _multiplies_alone(head: nn.Module) -> bool:
    """Whether a call of this module is a product with its weight and nothing else: a plain nn.Linear, maybe
    with a parametrization; not another layer in its place, nor one with hooks."""
    plain = type(head).forward is nn.Linear.forward and getattr(head, "bias", None) is None
    return plain and not hooked(head)


class LanguageModel(Generates, Layers):
    """Base of the causal models over symbols. One has an `embed` and a `head` (None: the embedding's weight),
    too, and says what goes from the one to the other."""

    kept: ClassVar[type[DecodeCache]]
    """The class of its caches."""
    length_is_free: ClassVar[str] = " (weights do not depend on it)"
    """What to say of a configuration with longer rows."""
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap); None leaves them alone."""
    embed: nn.Embedding
    head: nn.Linear | None

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, *, return_logits: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """(logits, loss) of whole rows.

        Args:
            ids: [B, T] symbols, uint8, int32 or int64, T >= 1, and at most the model's longest row. On a GPU
                their values are not checked, which would wait for it.
            targets: [B, T] next symbols, -100 where none counts. Without them the loss is None.
            return_logits: give logits beside the loss, too. They are a product of their own: the loss is
                the same without them.

        Returns:
            logits [B, T, V], or None with targets unless asked for; loss, the mean cross entropy in nats, a
            float32 scalar (float64 in a float64 model; nan where no target counts), or None.

        Raises:
            TypeError: ids or targets of another dtype. ValueError: another shape or device, or T too long.
            IndexError: on the CPU, a value that is no symbol.
        """
        self._check(ids)
        if targets is not None:
            self._check_targets(targets, ids)
        x = self._hidden(ids, None)
        logits = self._logits(x) if targets is None or return_logits else None
        return logits, None if targets is None else self._loss(x, targets)

    def decode(self, ids: Tensor, cache: Any) -> Tensor:
        """Logits [B, T, V] of ids [B, T] that follow what `cache` holds; the cache then holds them, too."""
        self.context()  # raises where a model can't decode
        check_kind("cache", cache, self.kept)
        self._check(ids, cache.length)
        check_cache(cache, self.config, ids)
        with cache.step():
            logits = self._logits(self._hidden(ids, cache))
        cache.grow(ids)
        return logits

    def longest(self) -> int | None:
        """How many symbols a row has at most; None: any number."""
        return self.config.max_seq_len  # type: ignore[no-any-return]

    def context(self) -> int | None:
        """How many positions `decode` sees at most, or None for any number. ValueError if it can't decode."""
        return self.longest()

    def _check(self, ids: Tensor, held: int = 0) -> None:
        check_ids("ids", ids, (self.cos.device, self.embed.weight.device), self.config.vocab)
        length, limit = held + ids.shape[1], self.longest()
        if limit is not None and length > limit:
            raise ValueError(
                f"a row of {length} symbols is longer than max_seq_len={limit}: cut it, or build the model "
                f"with Config(max_seq_len={length}) or more{self.length_is_free}"
            )

    def _check_targets(self, targets: Tensor, ids: Tensor) -> None:
        check_targets(targets, ids, self.config.vocab)

    def _hidden(self, ids: Tensor, cache: Any) -> Tensor:
        """What the head multiplies, [B, T, D] of ids [B, T] behind what `cache` holds."""
        raise NotImplementedError

    def _head_weight(self) -> Tensor | None:
        """[V, D]; None where logits are more than a product with it, which the head's own forward makes."""
        if self.head is None:
            return self.embed.weight
        return self.head.weight if _multiplies_alone(self.head) else None

    def _logits(self, x: Tensor) -> Tensor:
        """[..., V] of what `_hidden` gives."""
        logits = F.linear(x, self.embed.weight) if self.head is None else self.head(x)
        cap = self.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _cross_entropy(self, x: Tensor, targets: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
        """Of x's logits, which need not be there all at once; where no target counts it may be nan."""
        weight = self._head_weight()
        if weight is not None:
            return linear_cross_entropy(x, weight, targets, softcap=self.softcap, reduction=reduction)
        logits = self._logits(x).flatten(0, -2)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets.flatten(), reduction=reduction)

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy."""
        loss = self._cross_entropy(x, targets.long(), "mean")
        if targets.dtype == torch.uint8:  # which can't be -100
            return loss
        return loss / (targets != -100).any()  # nan where none counts, so that a trainer skips the step

    def _matrix_weights(self) -> int:
        """How many weights of matrix products there are, the head's included."""
        found: int = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return found + (self.embed.weight.numel() if self.head is None else 0)
