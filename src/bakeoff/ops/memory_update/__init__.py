"""One step of a neural memory, an MLP that learns while it is used: on a batch of keys and values, with
momentum, forgetting and clipping."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable, which imports all of torch._dynamo
from torch.compiler import is_compiling

from bakeoff.ops.memory_update.op import IN_PLACE, OP
from bakeoff.ops.memory_update.parts import check_parts
from bakeoff.select import call
from bakeoff.select.choose.hot import transformed
from bakeoff.select.declare.arguments import FLOATING
from bakeoff.select.declare.lists import as_list, check_apart

__all__ = ["IN_PLACE", "OP", "memory_update", "memory_update_"]


def memory_update(
    k: Tensor,
    v: Tensor,
    memory: Sequence[Tensor],
    momentum: Sequence[Tensor],
    lr: Tensor,
    decay: Tensor,
    forget: Tensor,
    *,
    max_norm: float | None = None,
    reduction: str = "mean",
    row_weight: Tensor | None = None,
    impl: str | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor, Tensor, Tensor]:
    """One gradient step of G memories, each an MLP with one hidden layer, towards mapping its keys to its
    values.

    A memory (w1, b1, w2, b2) maps a key to y = silu(k w1' + b1) w2' + b2. Its loss is the sum over rows of
    row_weight * |y - v|^2, times 1/(N V) for reduction "mean", 1/N for "token_sum" and 1 for "sum": the
    reduction rescales the learning rate by up to N V. With g the gradient of the loss with respect to all
    four tensors, and norm = |g| over all four,

        momentum' = decay * momentum - lr * min(1, max_norm / (norm + 1e-6)) * g
        memory' = (1 - forget) * memory + momentum'

    Where norm is not finite, a group's memory and momentum stay as they are, ok is False, and every gradient
    that would go through its step is zero; other groups are not affected. Keys, values and gates learn, too:
    gradients go through the step itself, clipping included. The host never waits for the device.

    Groups are independent (samples times heads). 16-bit keys and values are multiplied in their dtype with
    sums in float32, float64 ones in float64. torch.backends.cuda.matmul.allow_tf32 decides how plain PyTorch
    multiplies float32 ones; the kernels keep their precision. Where a gradient is wanted they keep, until the
    backward, four tensors [G, N, H] and one [G, N, V] in k's dtype, and g.

    Args:
        k: [G, N, D] keys, float16, bfloat16, float32 or float64.
        v: [G, N, V] values, in k's dtype.
        memory: (w1 [G, H, D], b1 [G, H], w2 [G, V, H], b2 [G, V]), float32 or float64, of one dtype.
        momentum: four tensors of the memory's shapes and dtype; zeros at the start.
        lr: [G], >= 0 and finite.
        decay: [G], what is left of the momentum, in [0, 1].
        forget: [G], how much of the memory is forgotten, in [0, 1]. The ranges of the three are checked on
            the CPU alone: on a GPU the host would have to wait for their values.
        max_norm: the norm that larger gradients are scaled down to, >= 0; None for no limit.
        reduction: "mean", "token_sum" or "sum".
        row_weight: [G, N], what each row counts; finite rows of weight 0 don't count at all. Default 1.
        impl: the candidate to run; by default the selected one.

    Returns:
        (memory', momentum', loss, norm, ok): two tuples of four tensors in the memory's dtype; loss and norm
        [G], float32 (float64 where computed so), before the step and before clipping; ok [G], bool.
        (~ok).sum() counts skipped steps on the device.

    Raises:
        ValueError: shapes that don't fit, an unknown reduction, gates outside their ranges; the message says
            what was expected.
        TypeError: dtypes that don't fit, gates that are no tensors.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Behrouz et al. 2024, Titans: Learning to Memorize at Test Time, section 3.1, for a whole chunk at
    once; clipping as in torch.nn.utils.clip_grad_norm_.

    Example:
        >>> import torch
        >>> from bakeoff.ops import memory_update
        >>> k, v, one = torch.randn(2, 10, 4), torch.randn(2, 10, 3), torch.ones(2)
        >>> memory = torch.randn(2, 8, 4), torch.zeros(2, 8), torch.randn(2, 3, 8), torch.zeros(2, 3)
        >>> momentum = tuple(torch.zeros_like(t) for t in memory)
        >>> gates = 0.05 * one, 0.9 * one, 0.0 * one
        >>> memory, momentum, loss, norm, ok = memory_update(k, v, memory, momentum, *gates)
        >>> bool((memory_update(k, v, memory, momentum, *gates)[2] < loss).all()), ok
        (True, tensor([True, True]))
    """
    _check(memory, momentum, lr, decay, forget)
    made = call(OP, k, v, *memory, *momentum, lr, decay, forget, max_norm, reduction, row_weight, impl=impl)
    return (made[:4], made[4:8], made[8], made[9], made[10])


@_disable_dynamo
def memory_update_(
    k: Tensor,
    v: Tensor,
    memory: Sequence[Tensor],
    momentum: Sequence[Tensor],
    lr: Tensor,
    decay: Tensor,
    forget: Tensor,
    *,
    max_norm: float | None = None,
    reduction: str = "mean",
    row_weight: Tensor | None = None,
    skipped: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`memory_update`, written over the memory and the momentum. It carries no gradients.

    Autograd's versions of what is written advance: a backward that saved old values raises instead of taking
    the new ones for them.

    Args:
        k, v, lr, decay, forget, max_norm, reduction, row_weight: as for `memory_update`.
        memory, momentum: as there; written in place.
        skipped: [G], int64 or int32 on the device; advanced by one where a group's step is skipped.
        impl: the candidate to run; by default the selected one.

    Returns:
        (loss, norm, ok), as `memory_update` gives them.

    Raises:
        RuntimeError: an argument wants a gradient, and gradients are recorded.
        ValueError: what is written is expanded, or two parts of it are one.
        ValueError, TypeError, bakeoff.errors.Unsupported: as `memory_update`.

    Source: as `memory_update`.

    Example:
        >>> import torch
        >>> from bakeoff.ops import memory_update_
        >>> k, v, one = torch.randn(1, 10, 4), torch.randn(1, 10, 3), torch.ones(1)
        >>> memory = torch.randn(1, 8, 4), torch.zeros(1, 8), torch.randn(1, 3, 8), torch.zeros(1, 3)
        >>> momentum, skipped = [torch.zeros_like(t) for t in memory], torch.zeros(1, dtype=torch.int64)
        >>> k[0, 3, 1] = float("nan")
        >>> memory_update_(k, v, memory, momentum, 0.1 * one, 0.9 * one, 0.0 * one, skipped=skipped)[2]
        tensor([False])
        >>> skipped
        tensor([1])
    """
    _check(memory, momentum, lr, decay, forget)
    given = (k, v, *memory, *momentum, lr, decay, forget, row_weight)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given):
        raise RuntimeError(
            "memory_update_ carries no gradients: use memory_update, or call it under torch.no_grad()"
        )
    written = [*memory, *momentum] if skipped is None else [*memory, *momentum, skipped]
    _check_written(written, memory, momentum)
    with torch.no_grad():
        loss, norm, ok = call(
            IN_PLACE, k, v, *memory, *momentum, lr, decay, forget, max_norm, reduction, row_weight, skipped,
            impl=impl,
        )  # fmt: skip
    # Autograd must refuse what was saved of old values, and knows nothing of kernels that write by address.
    torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])
    return loss, norm, ok


def _check_written(written: list[Any], memory: Any, momentum: Any) -> None:
    """Raises ValueError where two elements that are written lie at one address."""
    if transformed() or not all(isinstance(t, Tensor) for t in written):  # no addresses, or refused by a rule
        return
    if not any(0 in t.stride() for t in written) and len({t.data_ptr() for t in written}) == len(written):
        return
    columns = {"memory": memory, "momentum": momentum}
    if written[8:]:
        columns["skipped"] = written[8:]
    for name, parts in columns.items():
        if any(step == 0 and size > 1 for t in parts for step, size in zip(t.stride(), t.shape, strict=True)):
            raise ValueError(
                f"memory_update_: {name} is expanded: its elements share memory; pass a .clone()"
            )
    check_apart({name: as_list(parts, name) for name, parts in columns.items()}, "memory_update_")


def _check(memory: Any, momentum: Any, *gates: Any) -> None:
    """What the rules of the op's single arguments can't say."""
    check_parts("memory_update", memory, momentum)
    if is_compiling() or transformed():  # there values can't be looked at
        return
    for name, gate, most in zip(("lr", "decay", "forget"), gates, (None, 1.0, 1.0), strict=True):
        if not isinstance(gate, Tensor) or gate.device.type != "cpu" or gate.layout != torch.strided:
            continue
        if not FLOATING.allow(gate.dtype):
            continue
        if not bool(((gate >= 0) & (gate.isfinite() if most is None else gate <= most)).all()):
            limits = "finite and >= 0" if most is None else f"in [0, {most:g}] and no NaN"
            raise ValueError(f"memory_update: {name} must be {limits}, got {gate.tolist()}")
