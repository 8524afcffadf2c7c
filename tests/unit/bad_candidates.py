"""Candidates that are right where a quick test would look, and wrong where a model would find it.

All compute ``tanh(x) * w`` (see `zoo`), most of them in float64 and rounded once.
"""

from collections.abc import Callable
from typing import Any

import torch

from bakeoff.select import Candidate, Case, TensorMeta
from tests.unit import zoo
from tests.unit.zoo import good, product

Hook = Callable[..., Any]


def _when(condition: Callable[..., bool]) -> Hook:
    """A hook into the forward: the result is doubled where the condition holds."""
    return lambda x, w, y: y * 2 if condition(x, w) else None


# -------------------------------------------------------------------------------- layouts and memory
def _sum_backward(dy: Any, dx: Any, dw: Any) -> Any:
    return (dx * 2, dw) if dy.dim() and not any(dy.stride()) else None


def _transposed_strides(*args: Any) -> Any:
    return good(*args).mT.contiguous().mT


def _rows_at_one_distance(x: Any, w: Any, y: Any) -> None:
    rows = x.as_strided((x.numel() // x.shape[-1], x.shape[-1]), (x.stride(-2), 1))
    y.copy_((torch.tanh(rows.double()) * w).view(x.shape))


def _first_size_counts_rows(x: Any, w: Any, y: Any) -> None:
    y.view(-1, y.shape[-1])[x.shape[0] :] = 0


def _one_row_of_a_tile(x: Any, w: Any, y: Any) -> None:
    if y.numel() // y.shape[-1] % 64 == 1:
        y.view(-1, y.shape[-1])[-1] = 0


# ------------------------------------------------------------------------------------------- values
def _no_nan(x: Any, w: Any, y: Any) -> Any:
    return y.nan_to_num(0.0)


def _no_nan_gradient(dy: Any, dx: Any, dw: Any) -> Any:
    return dx.nan_to_num(0.0), dw


def _no_denormals(x: Any, w: Any, y: Any) -> Any:
    return y.masked_fill(y.abs() < torch.finfo(y.dtype).smallest_normal, 0)


def _clamped(x: Any, w: Any, y: Any) -> Any:
    return y.masked_fill(x.abs() > 2e4, 0)


def _constant_rows(x: Any, w: Any, y: Any) -> Any:
    return y.masked_fill((x == x[..., :1]).all(-1, True) & (x != 0), 0)  # as if divided by a spread of 0


def _negative_rows(x: Any, w: Any, y: Any) -> Any:
    return y * ((x.amax(-1, True) >= 0) | (w.amax() < -1e9))  # a maximum that begins at 0


def _tied(x: Any, w: Any, y: Any) -> Any:
    same = x[..., 1:] == x[..., :-1]
    return torch.cat([y[..., :1], y[..., 1:].masked_fill(same & (x[..., 1:] != 0), 0)], -1)


# ------------------------------------------------------------------------------------------- state
_ring: list[torch.Tensor] = []
_calls = [0]
_weights: dict[Any, torch.Tensor] = {}
_hoard: list[torch.Tensor] = []


def _buffers_in_turn(x: Any, w: Any, y: Any) -> Any:
    """Of a ring of 32: each result lives until 32 calls later."""
    _calls[0] += 1
    key = (y.shape, y.dtype)
    mine = [b for b in _ring if (b.shape, b.dtype) == key]
    if len(mine) < 32:
        _ring.append(y.clone())
        return _ring[-1]
    return mine[_calls[0] % 32].copy_(y)


def _weight_by_version(x: Any, w: Any, flag: Any = None) -> Any:
    known = _weights.setdefault((id(w), w.data_ptr(), w._version), w.detach().clone())
    return torch.tanh(x) * (known + (w - w.detach()))


def _hoards(x: Any, w: Any, y: Any) -> None:
    _hoard.append(torch.empty_like(x))


# ------------------------------------------------------------------------------------ side effects
def _then(effect: Callable[[Any], Any]) -> Hook:
    def call(x: Any, w: Any, flag: Any = None) -> Any:
        y = good(x, w)
        effect(x)
        return y

    return call


def _forget_grad(x: Any) -> None:
    x.grad = None


def _zero_grad(x: Any) -> None:
    if x.grad is not None:
        x.grad = torch.zeros_like(x)


# ----------------------------------------------------------------------------------------- autograd
class _Once(torch.autograd.Function):
    """Its backward gives away what its forward saved."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, flag: Any = None) -> Any:
        ctx.held = [x.detach().clone(), w.detach().clone()]
        return zoo.eager(x, w)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        if not ctx.held:
            raise RuntimeError("nothing is left of the forward")
        w, x = ctx.held.pop(), ctx.held.pop()
        return dy * w * (1 - torch.tanh(x) ** 2), (dy * torch.tanh(x)).sum(tuple(range(dy.dim() - 1))), None


class _InPlace(torch.autograd.Function):
    """Its backward computes in what its forward saved."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, flag: Any = None) -> Any:
        ctx.t, ctx.w = torch.tanh(x), w
        return ctx.t * w

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        dw = (dy * ctx.t).sum(tuple(range(dy.dim() - 1)))
        return ctx.t.square_().neg_().add_(1).mul_(ctx.w).mul(dy), dw, None


class Lazy(torch.Tensor):
    """Promises to compute once somebody looks."""


def _inference(x: Any, w: Any, flag: Any = None) -> Any:
    with torch.inference_mode():
        return good(x, w)


def _in_autocasts_dtype(*args: Any) -> Any:
    y = good(*args)
    return y.bfloat16() if torch.is_autocast_enabled("cpu") else y


def _candidate(name: str, call: Hook) -> Candidate:
    return Candidate(name, call)


WITH_GRADIENTS: dict[str, tuple[Hook, str]] = {
    "sum_backward": (product(None, _sum_backward), "gradient of x is wrong.*unusual inputs"),
    "misaligned": (
        product(_when(lambda x, w: x.data_ptr() % 16 > 0)),
        "memory that is not aligned to 16 bytes",
    ),
    "transposed_strides": (_transposed_strides, "eager's are contiguous: .view fails on it"),
    "first_size_counts_rows": (product(_first_size_counts_rows), r"output is wrong.*x \[3, 43, 48\]"),
    "one_row_of_a_tile": (product(_one_row_of_a_tile), r"output is wrong.*x \[3, 43, 48\]"),
    "version": (product(lambda x, w, y: (x.detach().add_(0), None)[1]), "bumps the version of its input x"),
    "version_of_dy": (
        product(None, lambda dy, dx, dw: (dy.detach().add_(0), None)[1] if all(dy.stride()) else None),
        "bumps the version of the gradient it is given",
    ),
    "nan": (product(_no_nan), "output is finite in item 0 where its arguments are NaN"),
    "nan_gradient": (product(None, _no_nan_gradient), "gradient of x is finite in item 0"),
    "denormal": (product(_no_denormals), "flushes denormal"),
    "beyond_2e4": (product(_clamped), "output is wrong.*unusual inputs"),
    "constant_rows": (product(_constant_rows), "output is wrong.*unusual inputs"),
    "all_negative": (product(_negative_rows), "output is wrong.*unusual inputs"),
    "tied": (product(_tied), "output is wrong.*unusual inputs"),
    "buffers_in_turn": (product(_buffers_in_turn), r"keeps \d+ bytes of a call"),
    "weight_by_version": (_weight_by_version, "remember by address"),
    "hoards": (product(_hoards), r"keeps \d+ bytes of a call"),
    "seeds": (_then(lambda x: torch.manual_seed(0)), "changes the state of the random generator"),
    "draws": (_then(lambda x: torch.rand(1)), "changes the state of the random generator"),
    "default_dtype": (_then(lambda x: torch.set_default_dtype(torch.float64)), "changes the default dtype"),
    "flush_denormal": (_then(lambda x: torch.set_flush_denormal(True)), "changes flush_denormal"),
    "grad_mode": (_then(lambda x: torch.set_grad_enabled(False)), "changes the gradient mode"),
    "threads": (
        _then(lambda x: torch.set_num_threads(torch.get_num_threads() + 1)),
        "changes the number of threads",
    ),
    "frees_grad": (_then(_forget_grad), "the .grad of an argument"),
    "zeroes_grad": (_then(_zero_grad), "the .grad of an argument"),
    "once": (_Once.apply, "its backward runs once: nothing is left"),
    "in_place_backward": (_InPlace.apply, "when its backward runs a second time, gradient of"),
    "lazy": (lambda *args: good(*args).as_subclass(Lazy), "returns a Lazy, not a Tensor"),
    "autocast": (_in_autocasts_dtype, "output is torch.bfloat16 under autocast, eager's is torch.float32"),
}
"""By name: what is called, and what the rejection says. For a case of 130 rows with gradients."""

FORWARD_ONLY: dict[str, tuple[Hook, str]] = {
    "no_grad": (product(_when(lambda x, w: not torch.is_grad_enabled())), "."),
    "inference_mode": (
        product(_when(lambda x, w: torch.is_inference_mode_enabled())),
        r"under torch.inference_mode\(\), output is wrong",
    ),
    "no_grad_of_parameters": (
        lambda x, w, flag=None: good(x, w) * (2 if w.requires_grad else 1),
        r"under torch.no_grad\(\), with arguments that require gradients, output is wrong",
    ),
    "inference_tensor": (_inference, "returns an inference tensor"),
    "requires_grad": (lambda *args: good(*args).requires_grad_(), "returns a tensor that requires grad"),
    "misaligned": (product(_when(lambda x, w: x.data_ptr() % 16 > 0)), "memory that is not aligned"),
}
"""Likewise without gradients."""

STRIDED: dict[str, tuple[Hook, str]] = {
    "rows_at_one_distance": (product(_rows_at_one_distance), "(is wrong|is nan).*with strides"),
}
"""Likewise for rows that are further apart than they are long."""


def case(*, grad: bool = True, strided: bool = False) -> Case:
    made = zoo.case(130, grad=grad)
    return made.replace(x=TensorMeta((130, 48), torch.float32, (96, 1), grad)) if strided else made
