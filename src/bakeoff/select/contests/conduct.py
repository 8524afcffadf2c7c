"""Conduct: what a candidate does beside the numbers.

An op is a function of its arguments: it leaves the process, its arguments and their gradients as they were,
gives tensors like plain PyTorch's, keeps nothing of a call, and passes on a NaN that it is given.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from bakeoff.select.contests.copies import Rejected, tensors_in

__all__ = ["Traits", "bystanders", "check_traits", "use_deterministic"]

_SEED = 0x5EED_0DD  # not one that a candidate would set
_forks: list[int] = []
"""How many there were; empty while nobody counts."""


class Traits(NamedTuple):
    """What a caller can tell of an output beside its values."""

    kind: type
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    dense: bool
    requires_grad: bool
    inference: bool
    lazy: tuple[bool, bool]
    """Whether memory holds the negative or the conjugate."""

    @classmethod
    def of(cls, out: torch.Tensor) -> "Traits":
        return cls(
            type(out),
            tuple(out.shape),
            out.dtype,
            out.device,
            out.is_contiguous(),
            out.requires_grad,
            out.is_inference(),
            (out.is_neg(), out.is_conj()),
        )


def check_traits(
    out: Any, eager: Traits, args: list[Any], where: str, mode: str = "", *, may_alias: bool = False
) -> None:
    """Raises `Rejected` where a caller could tell `out` from eager's output; `mode` is the one it was made
    under. It may lie like one of `args` of its shape, as results of elementwise operations do. With
    `may_alias`, eager's is a view of an argument."""
    if not isinstance(out, torch.Tensor):
        raise Rejected(f"returns a {type(out).__name__}, not a tensor")
    if (tuple(out.shape), out.dtype, out.device) != (eager.shape, eager.dtype, eager.device):
        raise Rejected(
            f"returns {out.dtype}{list(out.shape)} on {out.device}, "
            f"not {eager.dtype}{list(eager.shape)} on {eager.device}"
        )
    if type(out) is not eager.kind:
        raise Rejected(f"returns a {type(out).__name__}, not a {eager.kind.__name__} ({where})")
    mine = Traits.of(out)
    if mine.lazy != eager.lazy:
        raise Rejected(f"returns a lazy negative or conjugate, unlike eager ({where})")
    if eager.dense and not mine.dense and not any(_alike(out, a) for a in tensors_in(args)):
        raise Rejected(
            f"returns strides {list(out.stride())}, eager's are contiguous: .view fails on it ({where})"
        )
    if mode and may_alias and _views(out, args):  # what autograd knows of it is what it knows of the argument
        return
    if mine.inference != (mode == "inference_mode" or eager.inference):
        raise Rejected(f"returns an inference tensor, which autograd can't take ({where})")
    if mine.requires_grad and (mode or not eager.requires_grad):
        raise Rejected(f"returns a tensor that requires grad, unlike eager ({where})")


def _views(out: torch.Tensor, args: list[Any]) -> bool:
    return any(out._base is (arg if arg._base is None else arg._base) for arg in tensors_in(args))


def _alike(out: torch.Tensor, arg: torch.Tensor) -> bool:
    return out.shape == arg.shape and out.stride() == arg.stride()


@contextlib.contextmanager
def bystanders(args: list[Any], where: str) -> Iterator[None]:
    """Raises `Rejected` at the end of the block where it has changed the process's switches, the state of a
    random generator, or the .grad of an argument."""
    tensors = [t for t in tensors_in(args) if not t.is_inference()]
    marks = {}
    for i, t in enumerate(tensors):
        if t.requires_grad and t.is_leaf and t.grad is None:  # takes no memory, and can't be written to
            t.grad = marks[i] = torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape)
    device = next((t.device for t in tensors if t.is_cuda), None)
    generators = [torch.default_generator]
    if device is not None:
        generators.append(torch.cuda.default_generators[device.index])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(_SEED)
    before, forks = _switches(device), _count_forks()
    try:
        yield
        if _count_forks() != forks:
            raise Rejected(f"forks the process ({where})")
        after = _switches(device)
        changed = [name for name, value in before.items() if not _same(value, after[name])]
        if changed:
            raise Rejected(f"changes {', '.join(changed)} of the process ({where})")
        for i, mark in marks.items():
            if tensors[i].grad is not mark:
                raise Rejected(f"frees, sets or replaces the .grad of an argument ({where})")
    except Exception:
        _restore(before)
        raise
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        for i in marks:
            tensors[i].grad = None


def _count_forks() -> int:
    """How often this process has forked since the first look."""
    if not _forks:
        _forks.append(0)
        os.register_at_fork(after_in_parent=lambda: _forks.__setitem__(0, _forks[0] + 1))
    return _forks[0]


def _switches(device: torch.device | None) -> dict[str, Any]:
    """What the process holds for everybody."""
    found: dict[str, Any] = {
        "the state of the random generator": torch.get_rng_state(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "flush_denormal": bool(torch.tensor(1e-310, dtype=torch.float64, device="cpu") * 1.0 == 0),
        "the gradient mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "the number of threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
    }
    if device is not None:
        found["the state of the GPU's random generator"] = torch.cuda.get_rng_state(device)
        found["the current device"] = torch.cuda.current_device()
        found["the current stream"] = torch.cuda.current_stream(device)
        found["autocast"] = torch.is_autocast_enabled("cuda")
    else:
        found["autocast"] = torch.is_autocast_enabled("cpu")
    return found


def use_deterministic(wanted: bool) -> None:
    """torch.use_deterministic_algorithms where it changes anything: a call imports all of the compiler."""
    if torch.are_deterministic_algorithms_enabled() != wanted:
        torch.use_deterministic_algorithms(wanted)


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def _restore(before: dict[str, Any]) -> None:
    """Put back what a candidate changed, for those after it."""
    torch.set_default_dtype(before["the default dtype"])
    device = before["the default device"]
    if torch.get_default_device() != device:
        # None rather than "cpu": a default that was set is a mode, which torch.compile would have to trace.
        torch.set_default_device(None if device.type == "cpu" else device)
    torch.set_flush_denormal(before["flush_denormal"])
    torch.set_grad_enabled(before["the gradient mode"])
    torch.autograd.set_detect_anomaly(before["anomaly detection"])
    use_deterministic(before["use_deterministic_algorithms"])
    torch.set_num_threads(before["the number of threads"])
    torch.set_float32_matmul_precision(before["float32_matmul_precision"])
    torch.backends.cudnn.benchmark = before["cudnn.benchmark"]
