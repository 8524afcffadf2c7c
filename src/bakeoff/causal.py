"""The leak guard: does any output of a sequence model see its own future?

The guard changes tokens and looks at outputs, in the forward direction only, because a hand-written backward
can hide a path and a hard decision has no gradient. It works on a private copy of the model.
"""

import contextlib
import copy
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.errors import BakeoffError

__all__ = ["CausalityError", "assert_causal"]

_Parameters = dict[str, nn.Parameter]
_ROUNDS = 4
_SCAN = 64  # passes spent on tracing a leak that was found


class CausalityError(BakeoffError, AssertionError):
    """An output depends on what it must not see.

    Attributes:
        position: the first position found leaking.
        ahead: how many positions ahead it sees, at least; 0 where the leak is not from the future (another
            row, the targets, a decode that differs from the whole pass).
        size: the largest change of an output that should have stood.
        tolerance: the change that rounding explains.
    """

    def __init__(self, message: str, *, position: int, ahead: int, size: float, tolerance: float) -> None:
        super().__init__(f"{message}: by {size:.3g}, where rounding explains {tolerance:.3g}")
        self.position, self.ahead, self.size, self.tolerance = position, ahead, size, tolerance


def assert_causal(
    model: nn.Module,
    ids: Tensor | None = None,
    *,
    vocab: int | None = None,
    length: int | None = None,
    samples: int = 4,
    perturb: bool = True,
    check_decode: bool = True,
    seed: int = 0,
) -> None:
    """Raises `CausalityError` unless output t depends on tokens 0..t of its own row alone.

    For edits of the tokens from a cut on, |f(edited)[t] - f(ids)[t]| <= tolerance for all t before the cut.
    Whole suffixes are replaced and single tokens, by uniform tokens, tokens of `ids` and one constant, at
    cuts spread over the row, so that a hard gate on the next token shows. All this in evaluation and in
    training mode, with equal random draws (dropout then drops the same elements); batch statistics in
    training mode are a leak, and found. Further: a row must not see other rows; logits must not see the
    targets, where the model returns logits beside a loss; and decoding must equal the whole pass.

    Args:
        model: ``model(ids)`` gives logits [B, T, ...], alone or first in a tuple, or as ``.logits``. It is
            taken as it is, in the caller's autocast; compiled regions run uncompiled. It is copied once,
            and then in parts: it, its gradients, its buffers and all random states stay untouched.
        ids: [B, T] integer rows of real tokens, T >= 2, B >= 1. By default drawn at random.
        vocab: tokens are 0..vocab-1; by default ``model.config.vocab``, else 256.
        length: positions used of each row; by default all of `ids`, or 64 (at most
            ``model.config.max_seq_len``) drawn. A leak inside segments needs a length of several segments.
        samples: rows used.
        perturb: add noise to the trainable parameters and, after that check, make one update (signs of the
            gradient, times 0.01) and check again: this opens gates and projections that start at zero, and
            state that begins with training. False checks the model as it is.
        check_decode: where the model has ``generate(prompt, max_new, temperature=0.0)``, the logits of its
            ``decode`` calls must equal the whole pass over the text generated (without such a method: every
            token chosen must be the whole pass's likeliest).
        seed: of all draws.

    The tolerance is 3 times what relative noise of one rounding step in the parameters does to the outputs
    (90th percentile over positions), plus 4 times the difference of two equal passes, plus a rounding step
    of the largest output, and twice that for decoding. A rounding step is that of the coarsest floating
    type among the outputs of the model's modules (tf32 for float32 matrices where it is allowed), so that
    the test is sharpest in float32.

    Raises:
        CausalityError: with the first leaking position, how far ahead it sees, the size and the tolerance.
        BakeoffError: outputs that are not finite, or that differ between two equal passes.
        TypeError, ValueError: arguments or outputs of another form; the message says what was expected.

    Example:
        >>> import torch
        >>> assert_causal(torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256)))
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    with _random_kept(model), torch.inference_mode(False), _uncompiled():
        rows, vocab = _rows(model, ids, vocab, length, samples, seed)
        guard = _Guard(model, rows, vocab, seed)
        if perturb:
            guard.perturb()
        guard.check("with perturbed parameters" if perturb else "as it is")
        if perturb and guard.trainable:
            guard.update()
            guard.check("after one update")
        if check_decode:
            guard.check_decode()


class _Guard:
    """A private copy of the model, the rows it is tried on, and the draws."""

    def __init__(self, model: nn.Module, rows: Tensor, vocab: int, seed: int) -> None:
        self.model = _copy(model)
        self.rows, self.vocab, self.seed = rows, vocab, seed
        self.draws = torch.Generator().manual_seed(seed)
        self.trainable = [p for p in self.model.parameters() if p.requires_grad and p.is_floating_point()]
        self.accepts = frozenset(inspect.signature(self.model.forward).parameters)
        self.step = _rounding_step(self.model, rows)

    # Passes

    def run(
        self,
        ids: Tensor,
        *,
        training: bool,
        targets: Tensor | None = None,
        replace: _Parameters | None = None,
    ) -> Tensor | None:
        """Logits [B, T, -1] in float64, by a twin that takes its state from before any pass.

        None only with `targets`, where the model keeps its logits to itself.
        """
        twin = _twin(self.model, replace)
        if not training:
            twin.eval()
        elif not twin.training:
            twin.train()
        self._same_draws()
        with torch.set_grad_enabled(training):
            if targets is None:
                return _logits(twin(ids), ids)
            extra = {"return_logits": True} if "return_logits" in self.accepts else {}
            out = twin(ids, targets=targets, **extra)
            return _logits(out, ids) if isinstance(out, tuple | list) and out[0] is not None else None

    def logits(self, ids: Tensor, *, training: bool, replace: _Parameters | None = None) -> Tensor:
        found = self.run(ids, training=training, replace=replace)
        assert found is not None
        return found

    def _same_draws(self) -> None:
        torch.clear_autocast_cache()  # the caller's autocast would keep casts of parameters changed since
        for generator in _generators(self.model):
            generator.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)  # noqa: NPY002 (models draw from the global state)

    def settle(self, ids: Tensor, *, training: bool) -> tuple[Tensor, float]:
        """The outputs that edits are compared with, and the change that rounding explains."""
        base = self.logits(ids, training=training)
        if base.isnan().any():
            raise BakeoffError(
                f"the outputs are not finite in {_mode(training)}, so that causality can't be judged: "
                "check the model on these rows, or pass perturb=False"
            )
        top = base[base.isfinite()].abs().max().item()
        repeat = _change(base, self.logits(ids, training=training)).max().item()
        if repeat > 0.05 * top:
            raise BakeoffError(
                f"two equal passes in {_mode(training)} differ by {repeat:.3g}, outputs reach {top:.3g}: "
                "draw random numbers from PyTorch's default generators, so that causality can be judged"
            )
        shaken = self.logits(ids, training=training, replace=self._rounded())
        rounding = torch.quantile(_change(base, shaken).flatten(), 0.9).item()
        # Four float32 steps on top: a transform over time is rounded in float32 by the whole row.
        return base, 3 * rounding + 4 * repeat + (self.step + 2.0**-21) * top

    def _rounded(self) -> dict[str, nn.Parameter]:
        """The parameters with relative noise of one rounding step."""
        moved = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            if p.is_floating_point():
                noise = torch.rand(p.shape, generator=self.draws).to(p.device).mul_(2).sub_(1)
                shaken = (p.detach() * (1 + self.step * noise)).to(p.dtype)
                moved[name] = nn.Parameter(shaken, p.requires_grad)
        return moved

    # Changes of the parameters

    @torch.no_grad()
    def perturb(self) -> None:
        """Adds noise to what trains: a quarter of its scale, and enough to open what starts at zero."""
        kept = [p.clone() for p in self.trainable]
        for strength in (1.0, 0.25, 0.05):
            for p, old in zip(self.trainable, kept, strict=True):
                finite = old[old.isfinite()]
                scale = finite.double().square().mean().sqrt().item() if finite.numel() else 0.0
                floor = 0.25 if p.ndim < 2 else 0.5 * (p.shape[0] / p.numel()) ** 0.5 if p.numel() else 0.0
                noise = torch.randn(p.shape, generator=self.draws).to(p.device, p.dtype)
                p.copy_(old + noise * (strength * max(0.25 * scale, floor)))
            if self.logits(self.rows, training=False).isfinite().any(dim=-1).all():
                return
        for p, old in zip(self.trainable, kept, strict=True):
            p.copy_(old)

    def update(self) -> None:
        """One step of training, with a loss of the model's own where it has one."""
        ids, targets = self.rows[:, :-1], self.rows[:, 1:]
        self._same_draws()
        mode = self.model.training
        self.model.train()
        with torch.enable_grad():
            if "targets" in self.accepts:
                loss = self.model(ids, targets=targets)[1]
            else:
                found = _first(self.model(ids))
                loss = F.cross_entropy(found.flatten(0, -2).float(), targets.flatten() % found.shape[-1])
            gradients = torch.autograd.grad(loss, self.trainable, allow_unused=True)
        with torch.no_grad():
            for p, gradient in zip(self.trainable, gradients, strict=True):
                if gradient is not None:
                    p.sub_(gradient.nan_to_num().sign(), alpha=0.01)
        self.model.train(mode)

    # Checks

    def check(self, stage: str) -> None:
        for training in (False, True):
            when = f"in {_mode(training)}, {stage}"
            base, tolerance = self.settle(self.rows, training=training)
            for number in range(_ROUNDS):
                edited, cuts = self._edited(number)
                change = _change(base, self.logits(edited, training=training))
                before = torch.arange(base.shape[1], device=cuts.device) < cuts[:, None]
                if (before & (change > tolerance)).any():
                    self._blame(base, edited, cuts, change, tolerance, training, when)
            self._check_rows(base, tolerance, training, when)
        if "targets" in self.accepts:
            self._check_targets(tolerance, when)

    def _check_rows(self, base: Tensor, tolerance: float, training: bool, when: str, row: int = 0) -> None:
        others = self._tokens(self.rows.shape)
        others[row] = self.rows[row]
        change = _change(base, self.logits(others, training=training))[row]
        if (change > tolerance).any():
            position = int((change > tolerance).nonzero()[0])
            raise CausalityError(
                f"{when}, output {position} of a row changes with the other rows of its batch",
                position=position, ahead=0, size=change.max().item(), tolerance=tolerance,
            )  # fmt: skip

    def _check_targets(self, tolerance: float, when: str) -> None:
        """With targets given, in training mode: logits see neither them nor the future."""
        targets = self.rows.roll(-1, 1)
        base = self.run(self.rows, training=True, targets=targets)
        if base is None:
            return
        other = self.run(self.rows, training=True, targets=self._tokens(targets.shape))
        assert other is not None
        change = _change(base, other)
        if (change > tolerance).any():
            position = int((change > tolerance).any(dim=0).nonzero()[0])
            raise CausalityError(
                f"{when}, logit {position} changes with the targets",
                position=position, ahead=0, size=change.max().item(), tolerance=tolerance,
            )  # fmt: skip
        edited, cuts = self._edited(0)
        after = self.run(edited, training=True, targets=targets)
        assert after is not None
        change = _change(base, after)
        leaking = (change > tolerance) & (torch.arange(base.shape[1], device=cuts.device) < cuts[:, None])
        if leaking.any():
            row, position = leaking.nonzero()[0].tolist()
            ahead = int(cuts[row]) - position
            raise CausalityError(
                f"{when} and given targets, output {position} sees at least {ahead} ahead",
                position=position, ahead=ahead, size=change[leaking].max().item(), tolerance=tolerance,
            )  # fmt: skip

    def check_decode(self) -> None:
        """What the model generates with its cache, against one pass over the same text."""
        twin = _twin(self.model).eval()
        half = self.rows.shape[1] // 2
        prompt, count = self.rows[:, :half], self.rows.shape[1] - half
        generate = getattr(twin, "generate", None)
        if generate is None or not _takes(generate, prompt, count, temperature=0.0):
            return
        pieces: list[Any] = []
        decode = getattr(twin, "decode", None)
        if callable(decode):
            twin.decode = _recording(decode, pieces)  # type: ignore[assignment]
        self._same_draws()
        with torch.no_grad():
            text = generate(prompt, count, temperature=0.0)
        if text.shape != self.rows.shape or not torch.equal(text[:, :half], prompt):
            raise ValueError(
                f"generate(prompt, {count}) returned {tuple(text.shape)}, expected the prompt and {count} "
                f"more tokens, {tuple(self.rows.shape)}"
            )
        whole, tolerance = self.settle(text[:, :-1], training=False)
        tolerance *= 2  # other shapes run other kernels, so that every operation rounds differently
        if pieces and all(isinstance(piece, Tensor) and piece.ndim == 3 for piece in pieces):
            change = _change(whole, torch.cat(pieces, dim=1).double())
        else:
            chosen = whole[:, half - 1 :].gather(-1, text[:, half:, None])
            change = F.pad((whole[:, half - 1 :].amax(-1, keepdim=True) - chosen)[..., 0] / 2, (half - 1, 0))
        if (change > tolerance).any():
            position = int((change > tolerance).any(dim=0).nonzero()[0])
            raise CausalityError(
                f"decoding differs from the whole pass at position {position} (prompt of {half})",
                position=position, ahead=0, size=change.max().item(), tolerance=tolerance,
            )  # fmt: skip

    # Edits

    def _tokens(self, shape: torch.Size) -> Tensor:
        return torch.randint(self.vocab, shape, generator=self.draws).to(self.rows.device)

    def _edited(self, number: int) -> tuple[Tensor, Tensor]:
        """Rows changed from their cuts [B] on, in the manner of round `number`, and the cuts."""
        rows, (count, length) = self.rows, self.rows.shape
        cuts = torch.randint(1, length, (count,), generator=self.draws)
        cuts[0] = (length - 1, 1, max(1, length // 2), max(1, length // 4))[number]
        cuts = cuts.to(rows.device)
        places = torch.arange(length, device=rows.device)
        chosen = places == cuts[:, None] if number == 1 else places >= cuts[:, None]
        new = self._tokens(rows.shape)
        if number == 2:  # what the data holds, so that a gate on a frequent token opens
            index = torch.randint(rows.numel(), rows.shape, generator=self.draws).to(rows.device)
            new = rows.flatten()[index]
        elif number == 3:
            new = torch.where(new[:, :1] < self.vocab // 2, 0, self.vocab - 1).expand_as(rows)
        edited = torch.where(chosen, new, rows)
        same = (places == cuts[:, None]) & (edited == rows)
        step = 1 + torch.randint(self.vocab - 1, rows.shape, generator=self.draws).to(rows.device)
        return torch.where(same, (rows + step) % self.vocab, edited), cuts

    def _blame(
        self,
        base: Tensor,
        edited: Tensor,
        cuts: Tensor,
        change: Tensor,
        tolerance: float,
        training: bool,
        when: str,
    ) -> None:
        """Raises, after tracing the leak: its first position and how far that position sees."""
        places = torch.arange(base.shape[1], device=cuts.device)
        leaking = (places < cuts[:, None]) & (change > tolerance)
        row = int(leaking.any(dim=1).nonzero()[0])
        new = torch.where(places < cuts[row], self._tokens(places.shape), edited[row])
        scanned = torch.linspace(1, len(places) - 1, min(_SCAN, len(places) - 1)).long().tolist()
        seen, size = {}, 0.0
        for cut in sorted({int(cuts[row]), *scanned}):
            tried = self.rows.clone()
            # At the cut that gave it away the very same edit, which may have changed one token only.
            tried[row] = edited[row] if cut == cuts[row] else torch.where(places < cut, tried[row], new)
            found = _change(base, self.logits(tried, training=training))[row]
            seen[cut] = (places < cut) & (found > tolerance)
            size = max(size, found[:cut].max().item())
        if not any(where.any() for where in seen.values()):  # no, it was another row's edit
            self._check_rows(base, tolerance, training, when, row)
            seen, size = {int(cuts[row]): leaking[row]}, change[leaking].max().item()
        first = min(int(where.nonzero()[0]) for where in seen.values() if where.any())
        ahead = max(cut for cut, where in seen.items() if where[first]) - first
        raise CausalityError(
            f"{when}, output {first} sees its future, at least {ahead} ahead, and changes",
            position=first, ahead=ahead, size=size, tolerance=tolerance,
        )  # fmt: skip


def _rows(
    model: nn.Module, ids: Tensor | None, vocab: int | None, length: int | None, samples: int, seed: int
) -> tuple[Tensor, int]:
    """The token rows [B >= 2, T] on the model's device, and the vocabulary's size."""
    config = getattr(model, "config", None)
    vocab = vocab or int(getattr(config, "vocab", 256))
    if samples < 1 or vocab < 2 or (length is not None and length < 2):
        raise ValueError(f"samples={samples}, vocab={vocab}, length={length} must be at least 1, 2 and 2")
    draws = torch.Generator().manual_seed(seed)
    if ids is None:
        length = length or min(64, int(getattr(config, "max_seq_len", 64)))
        rows = torch.randint(vocab, (samples, length), generator=draws)
    else:
        if ids.ndim != 2 or ids.is_floating_point() or ids.shape[0] < 1 or ids.shape[1] < 2:
            raise ValueError(f"ids are {ids.dtype} {tuple(ids.shape)}, expected integers [B >= 1, T >= 2]")
        rows = ids[:samples, :length].long().cpu()
        if not 0 <= int(rows.min()) <= int(rows.max()) < vocab:
            raise ValueError(f"ids hold {int(rows.max())}, outside of vocab={vocab}: pass vocab=")
    if len(rows) == 1:  # a second row, to see whether the first depends on it
        rows = torch.cat([rows, torch.randint(vocab, rows.shape, generator=draws)])
    return rows.to(_device(model)), vocab


def _copy(model: nn.Module) -> nn.Module:
    """A copy with parameters of its own and no gradients."""
    fresh = {}
    for name, p in model.named_parameters():
        fresh[name] = nn.Parameter(p.detach().clone(), p.requires_grad)
        fresh[name].__dict__.update(p.__dict__)
    return _twin(model, fresh)


def _twin(model: nn.Module, replace: _Parameters | None = None) -> nn.Module:
    """The model with the same (or the given) parameters and copies of everything else."""
    memo: dict[int, Any] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        memo.setdefault(id(p), (replace or {}).get(name, p))
    try:
        return copy.deepcopy(model, memo)
    except RuntimeError as error:
        raise TypeError(
            f"the model can't be copied ({str(error).partition('.')[0]}): keep no tensors with a gradient "
            "history as attributes; detach them"
        ) from error


def _first(out: Any) -> Tensor:
    found = out[0] if isinstance(out, tuple | list) and out else getattr(out, "logits", out)
    if not isinstance(found, Tensor):
        raise TypeError(f"model(ids) gave {type(found).__name__}, expected logits, (logits, ...) or .logits")
    return found


def _logits(out: Any, ids: Tensor) -> Tensor:
    found = _first(out)
    if found.shape[:2] != ids.shape:
        raise ValueError(f"logits have shape {tuple(found.shape)}, expected {(*ids.shape, 'vocab')}")
    return found.detach().reshape(*ids.shape, -1).double()


def _change(one: Tensor, other: Tensor) -> Tensor:
    """Largest |one - other| [B, T] of every position's outputs; a NaN in one of them counts as infinite."""
    change = torch.where(one == other, 0.0, (one - other).abs())
    return change.amax(dim=-1).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _rounding_step(model: nn.Module, rows: Tensor) -> float:
    """The coarsest relative rounding among the outputs of the model's modules."""
    seen = {torch.float64}

    def note(_module: nn.Module, _inputs: Any, out: Any) -> None:
        parts = out if isinstance(out, tuple | list) else (out,)
        seen.update(t.dtype for t in parts if isinstance(t, Tensor) and t.is_floating_point())

    twin = _twin(model).eval()
    for module in twin.modules():
        module.register_forward_hook(note)
    with torch.no_grad():
        twin(rows)
    steps = [torch.finfo(dtype).eps for dtype in seen]
    if torch.float32 in seen and rows.is_cuda and torch.get_float32_matmul_precision() != "highest":
        steps.append(2.0**-10)
    return max(steps)


def _device(model: nn.Module) -> torch.device:
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def _generators(model: nn.Module) -> list[torch.Generator]:
    """The default generators of the CPU and of the GPUs that the model is on."""
    used = {t.device.index for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in sorted(used))]


@contextlib.contextmanager
def _random_kept(model: nn.Module) -> Iterator[None]:
    """All random states are afterwards what they were."""
    generators = _generators(model)
    states, python, array = [g.get_state() for g in generators], random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(array)  # noqa: NPY002
        torch.clear_autocast_cache()


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Twins would be compiled anew, each; without a compiler loaded there is nothing to hold back."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _takes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _recording(decode: Callable[..., Any], pieces: list[Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        pieces.append(decode(*args, **kwargs))
        return pieces[-1]

    return call


def _mode(training: bool) -> str:
    return "training mode" if training else "evaluation mode"
