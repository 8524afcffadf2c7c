"""Text from a causal model: sampling, and continuing prompts by `decode` with a cache.

Behind the prompt every symbol is one step of fixed shapes and addresses: decode, sample, store. On a CUDA
device it becomes a CUDA graph, so that the host issues one launch a symbol and waits for none.

Shapes: B batch, T time, V vocab.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from bakeoff.device import on
from bakeoff.graphs import NotCapturable, capture_step
from bakeoff.models.caching import DecodeCache
from bakeoff.models.checks import Devices, check_ids, check_sampling, check_symbols, check_values
from bakeoff.select import using

__all__ = ["Generates", "Sampling", "sample"]

log = logging.getLogger(__name__)

_COLDEST = 1e-30  # below, logits over the temperature overflow float32; sampling is greedy far above
_WORTH_CAPTURING = 64  # symbols: a capture takes about as long as so many steps issued one by one


class Sampling(TypedDict, total=False):
    """The keywords of `Generates.stream` and `Generates.generate`."""

    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    generator: torch.Generator | None
    capture: bool | None


class Draw(NamedTuple):
    """How symbols are drawn, checked."""

    temperature: float
    top_k: int
    top_p: float
    generator: torch.Generator | None
    capture: bool | None


class Generates:
    """What a model that decodes can do with a prompt. The model says how it decodes."""

    def decode(self, ids: Tensor, cache: Any) -> Tensor:
        """Logits [B, T, V] of ids [B, T] that follow what `cache` holds; the cache then holds them, too."""
        raise NotImplementedError

    def make_cache(self, capacity: int | None = None) -> Any:
        """An empty `DecodeCache` for `decode`, of up to `capacity` positions if it grows with them."""
        raise NotImplementedError

    def context(self) -> int | None:
        """How many positions `decode` sees at most, or None for any number. ValueError if it can't decode."""
        raise NotImplementedError

    @overload
    def generate(self, prompt: Tensor, max_new: int, **sampling: Unpack[Sampling]) -> Tensor: ...

    @overload
    def generate(
        self, prompt: Sequence[Tensor], max_new: int, **sampling: Unpack[Sampling]
    ) -> list[Tensor]: ...

    def generate(
        self, prompt: Tensor | Sequence[Tensor], max_new: int, **sampling: Unpack[Sampling]
    ) -> Tensor | list[Tensor]:
        """prompt [B, T] continued by `max_new` sampled symbols: [B, T + max_new], int64.

        Prompts of unequal lengths are given as a sequence of B tensors [T_b], and so is the result,
        [T_b + max_new] each. Their common part is read at once, the rest symbol by symbol beside what the
        shorter ones sample: no row is padded, and each is continued as it would be alone but for the random
        numbers, of which every step draws some for all rows.

        Keywords and errors are those of `stream`.
        """
        draw = self._checked(max_new, **sampling)
        if isinstance(prompt, Tensor):
            check_ids("prompt", prompt, *self._takes())
            new = [symbols[:, None] for symbols in self._continue([*prompt], max_new, draw)]
            return torch.cat([prompt.long(), *new], dim=1)
        _check_prompts(prompt, *self._takes())
        steps = list(self._continue(prompt, max_new, draw))
        known = [len(self._seen(row)) for row in prompt]
        text = torch.stack(steps, dim=1) if steps else prompt[0].new_empty(len(prompt), 0)
        return [
            torch.cat([row.long(), new[count - min(known) :][:max_new]])
            for row, count, new in zip(prompt, known, text.long(), strict=True)
        ]

    def stream(self, prompt: Tensor, max_new: int, **sampling: Unpack[Sampling]) -> Iterator[Tensor]:
        """Yields `max_new` times the next symbol of every row, [B] int64.

        Args:
            prompt: [B, T], T >= 1. Of a prompt longer than the model's context the end is used.
            temperature: divides the logits (default 1); 0 takes the likeliest symbol.
            top_k: only the k likeliest symbols; 0, the default, means all.
            top_p: only the likeliest symbols that together hold this probability (default 1).
            seed: makes the draw repeatable; or give a `generator` of the model's device.
            capture: whether steps become a CUDA graph, which yields the same symbols; by default on a CUDA
                device where the text is long enough to be worth it.

        When the context is full the cache is rebuilt from its last half, so that text may grow past it.
        Weights must stay as they are until the last symbol. Raises TypeError, ValueError or (on the CPU)
        IndexError for a bad prompt or setting, before anything runs; NotCapturable with ``capture=True``
        where that can't be done.
        """
        draw = self._checked(max_new, **sampling)
        check_ids("prompt", prompt, *self._takes())
        return self._continue([*prompt], max_new, draw)

    def _checked(
        self,
        max_new: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        capture: bool | None = None,
    ) -> Draw:
        self.context()
        check_sampling(max_new, temperature, top_k, top_p, seed)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(
                f"generator must be a torch.Generator, got {type(generator).__name__}: give seed=NUMBER, or "
                f"torch.Generator(device).manual_seed(NUMBER)"
            )
        if seed is not None:
            if generator is not None:
                raise ValueError("give seed or generator, not both")
            (device,), _ = self._takes()
            generator = torch.Generator(device).manual_seed(seed)
        return Draw(temperature, top_k, top_p, generator, capture)

    def _takes(self) -> tuple[Devices, int]:
        """The device of prompts, and how many symbols there are."""
        return (next(self.parameters()).device,), self.config.vocab  # type: ignore[attr-defined]

    def _seen(self, row: Tensor) -> Tensor:
        """Of one prompt [T] what the model sees, its end."""
        context = self.context()
        return row if context is None else row[-context:]

    def _continue(self, prompts: Sequence[Tensor], max_new: int, draw: Draw) -> Iterator[Tensor]:
        """Yields, from behind the shortest prompt on, the symbol of every row, [B]: of its prompt, or new."""
        if not max_new:
            return
        prompts = [self._seen(row) for row in prompts]
        known = [len(row) for row in prompts]
        begin, end = min(known), max(known) + max_new
        with torch.inference_mode(False):  # a text that begins under it may go on without
            ids = torch.zeros(len(prompts), end, dtype=torch.long, device=prompts[0].device)
            for row, prompt in zip(ids, prompts, strict=True):
                row[: len(prompt)] = prompt
            limit = torch.tensor(known, device=ids.device) if begin < max(known) else None
            text = _Text(self, ids, begin, limit, draw)
        step = _issued(text.step, draw, end - begin - 1, ids.device)
        for number in range(begin, end):
            text.next(number, step)
            yield ids[:, number]


class _Text:
    """Rows of symbols that grow by one a step.

    Attributes:
        ids: [B, whole length], prompts and what is written so far.
        limit: [B], how long each row's prompt is, where these differ.
        last: [1], the place of the latest symbol, on the device.
        length: what the cache held before the step in hand.
    """

    def __init__(self, model: Any, ids: Tensor, begin: int, limit: Tensor | None, draw: Draw) -> None:
        self.model, self.ids, self.begin, self.limit, self.draw = model, ids, begin, limit, draw
        self.context = model.context() or ids.shape[1]
        self.last = torch.full((1,), begin - 1, device=ids.device)
        self.cache: DecodeCache | None = None
        self.length = 0

    def next(self, number: int, step: Callable[[], None]) -> None:
        """Writes the symbols at place `number`; `step` is `self.step`, as it is issued."""
        with torch.no_grad():  # not around a yield, where it would switch the caller's gradients off
            if self.cache is None:
                self.cache = self._read(self.ids[:, : self.begin])
            elif self.cache.length == self.context:
                self.cache.take(self._read(self.ids[:, number - max(1, self.context // 2) : number]))
            else:
                self.length = self.cache.length
                step()
                self.cache.length = self.length + 1

    def step(self) -> None:
        """One symbol more, by operations that are the same every time."""
        assert self.cache is not None
        self.cache.length = self.length  # also where a capture that failed has counted already
        symbols = self.ids.index_select(1, self.last)
        self._write(self.model.decode(symbols, self.cache)[:, -1])

    def _read(self, ids: Tensor) -> DecodeCache:
        """A settled cache that holds `ids`; the symbols behind them are written."""
        cache: DecodeCache = self.model.make_cache(min(self.context, -(-self.ids.shape[1] // 64) * 64))
        logits = self.model.decode(ids, cache)[:, -1]
        cache.settle(self.model)
        self._write(logits)
        return cache

    def _write(self, logits: Tensor) -> None:
        draw = self.draw
        new = sample(logits, draw.temperature, draw.top_k, draw.top_p, draw.generator)[:, None]
        self.last += 1
        if self.limit is not None:  # a prompt that is longer says itself what comes
            new = torch.where(self.last < self.limit[:, None], self.ids.index_select(1, self.last), new)
        self.ids.index_copy_(1, self.last, new)


def _issued(step: Callable[[], None], draw: Draw, count: int, device: torch.device) -> Callable[[], None]:
    """`step` to be called `count` times: as it is, or as a CUDA graph."""
    if draw.capture is False or (
        draw.capture is None and (device.type != "cuda" or count < _WORTH_CAPTURING)
    ):
        return step
    with on(device):
        captured = capture_step(step, generators=[draw.generator] if draw.generator is not None else [])
    plain = False

    def issue() -> None:
        nonlocal plain
        with using(regime="graph"):
            if plain:
                step()
                return
            try:
                with _uncached_autocast(device):
                    captured()
            except NotCapturable as why:
                if draw.capture:
                    raise
                log.warning("text is generated symbol by symbol without a CUDA graph: %s", why)
                plain = True
                if not why.ran:
                    step()

    return issue


def _uncached_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The caller's autocast without its cache of cast weights, which a graph would freeze."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type), cache_enabled=False)


def _check_prompts(prompts: object, devices: Devices, vocab: int) -> None:
    """Raises unless these are several rows of symbols of a model on this device."""
    if not isinstance(prompts, list | tuple):
        check_symbols("prompt", prompts)
    if not prompts:
        raise ValueError("prompt holds no rows: give at least one")
    for number, row in enumerate(prompts):  # type: ignore[arg-type, var-annotated]
        check_symbols(f"prompt[{number}]", row)
        if row.ndim != 1 or not len(row):
            raise ValueError(
                f"prompt[{number}] has shape {tuple(row.shape)}, expected [T], at least one symbol; rows of "
                f"equal length go into one tensor [B, T]"
            )
        check_values(f"prompt[{number}]", row, devices, vocab)


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One symbol per row, [B] int64, drawn from softmax(logits [B, V] / temperature).

    `top_k` keeps the k likeliest symbols, `top_p` then the fewest that hold that much probability (always
    at least one; Holtzman et al. 2020). Temperature 0 takes the likeliest.
    """
    if temperature < _COLDEST:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        likeliest, where = logits.topk(top_k)
        logits = torch.full_like(logits, -math.inf).scatter(-1, where, likeliest)
    if top_p < 1.0:
        ordered, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        surplus = ordered.cumsum(dim=-1) - ordered >= top_p  # the mass before it already suffices
        surplus[:, 0] = False  # even for a top_p that is 0 in float32
        logits = logits.masked_fill(surplus.scatter(-1, order, surplus), -math.inf)
    # As torch.multinomial, which waits for the device to check its input: the first of independent arrivals.
    waits = torch.empty_like(logits).exponential_(generator=generator)
    return (logits.softmax(dim=-1) / waits).argmax(dim=-1)
