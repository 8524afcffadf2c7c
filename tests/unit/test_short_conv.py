"""short_conv's checks and declaration, plain PyTorch's results, and laws of the op."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bakeoff import Unsupported
from bakeoff.ops import short_conv
from bakeoff.ops.short_conv.plain import eager
from bakeoff.ops.short_conv.reference import short_conv as reference

Results = tuple[torch.Tensor, torch.Tensor]
IMPLEMENTATIONS = pytest.mark.parametrize("fn", [eager, reference], ids=["eager", "reference"])
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "one sequence": ({"x": torch.ones(5, 3)}, ValueError, r"x has shape \(5, 3\), expected .*x\[None\]"),
    "channels": ({"weight": torch.ones(4, 4)}, ValueError, r"\[C, W\] with C = 3 as of x, W >= 1"),
    "no taps": ({"weight": torch.ones(3, 0)}, ValueError, "W >= 1"),
    "Conv1d's weight": ({"weight": torch.ones(3, 1, 4)}, ValueError, r"Conv1d is weight\[:, 0\]"),
    "long": ({"weight": torch.ones(3, 9)}, ValueError, r"9 taps.*long_conv\(x, weight.flip\(1\)\)"),
    "bias": ({"bias": torch.ones(4)}, ValueError, r"bias has shape \(4,\), expected \[C\]"),
    "bias dtype": ({"bias": torch.ones(3).half()}, TypeError, "bias is torch.float16 and weight"),
    "activation": ({"activation": "relu"}, ValueError, "activation is 'relu', expected one of silu"),
    "state": ({"state": torch.ones(2, 4, 3)}, ValueError, r"expected \(2, 3, 3\): the last W-1 inputs"),
    "no state": ({"state": (1, 2)}, TypeError, "second of the two results"),
    "state dtype": ({"state": torch.ones(2, 3, 3).half()}, TypeError, "state is torch.float16 and x"),
    "rows": ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, r"x has 2 rows.*flatten\(0, 1\)\[None\]"),
    "packed floats": ({"cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, "expected int32 or int64"),
    "no sequence": (
        {"x": torch.ones(1, 5, 3), "cu_seqlens": torch.tensor([0])}, ValueError, r"expected \[N\+1\]",
    ),
    "packed state": (
        {"x": torch.ones(1, 5, 3), "cu_seqlens": torch.tensor([0, 2, 5]), "state": torch.ones(1, 3, 3)},
        ValueError, r"expected \(2, 3, 3\)",
    ),
    "integers": ({"x": torch.ones(2, 5, 3).int()}, TypeError, "x is torch.int32; convert it"),
    "candidate": ({"impl": "cuda"}, Unsupported, "no candidate 'cuda'; it has eager, compiled"),
    "CPU": ({"impl": "triton"}, Unsupported, "runs on CUDA, not on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_fix(name: str) -> None:
    args, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        short_conv(**{"x": torch.ones(2, 5, 3), "weight": torch.ones(3, 4), **args})


def one_after_another(x: Any, weight: Any, bias: Any, activation: Any, state: Any) -> Results:
    """The sum as it is written, of one sequence [T, C]."""
    (T, C), W = x.shape, weight.shape[1]
    before = x.new_zeros(W - 1, C) if state is None else state
    y = torch.zeros_like(x)
    for t in range(T):
        total = torch.zeros_like(x[0]) if bias is None else bias.clone()
        for j in range(W):
            value = x[t - j] if t >= j else before[W - 1 + t - j]
            total = total + weight[:, W - 1 - j] * value
        y[t] = total / (1 + torch.exp(-total)) if activation else total
    rows = [*before, *x]
    return y, torch.stack(rows[len(rows) - W + 1 :]) if W > 1 else before


def tensors(T: int, C: int, W: int, items: int, **options: bool) -> list[Any]:
    """weight, bias, activation and a state of so many sequences, in float64."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    return [
        random(C, W),
        random(C) if options.get("bias", True) else None,
        "silu" if options.get("silu", True) else None,
        random(items, W - 1, C) if options.get("state", True) else None,
    ]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 11), min_size=1, max_size=5),
    C=st.integers(1, 4),
    W=st.integers(1, 8),
    flags=st.tuples(*3 * [st.booleans()]),
)
@IMPLEMENTATIONS
def test_packed_sequences_are_what_each_is_alone(
    fn: Callable[..., Results], lengths: list[int], C: int, W: int, flags: tuple[bool, ...]
) -> None:
    bias, silu, state = flags
    rest = tensors(sum(lengths), C, W, len(lengths), bias=bias, silu=silu, state=state)
    x = torch.randn(1, sum(lengths), C, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    y, end = fn(x, *rest, cu_seqlens)
    for n, piece in enumerate(x[0].split(lengths)):
        first = None if rest[3] is None else rest[3][n]
        alone, last = one_after_another(piece, *rest[:3], first)
        torch.testing.assert_close(y[0, cu_seqlens[n] : cu_seqlens[n + 1]], alone)
        assert torch.equal(end[n], last)
        if fn is reference:  # the same as a row
            row, kept = fn(piece[None], *rest[:3], None if first is None else first[None], None)
            torch.testing.assert_close(row[0], alone)
            assert torch.equal(kept[0], last)


@IMPLEMENTATIONS
@pytest.mark.parametrize("T", [0, 1, 2, 3, 4, 17])
@pytest.mark.parametrize("W", [1, 2, 4, 8])
@pytest.mark.parametrize("with_state", [True, False])
def test_rows_are_the_sum_as_it_is_written(
    fn: Callable[..., Results], T: int, W: int, with_state: bool
) -> None:
    rest = tensors(T, 3, W, 2, state=with_state)
    x = torch.randn(2, T, 3, dtype=torch.float64)
    y, end = fn(x, *rest, None)
    for b in range(2):
        alone, last = one_after_another(x[b], *rest[:3], None if rest[3] is None else rest[3][b])
        torch.testing.assert_close(y[b], alone)
        assert torch.equal(end[b], last)


@IMPLEMENTATIONS
def test_pieces_equal_the_whole(fn: Callable[..., Results]) -> None:
    weight, bias, activation, state = tensors(30, 5, 4, 2)
    x = torch.randn(2, 30, 5, dtype=torch.float64)
    whole, last = fn(x, weight, bias, activation, state, None)
    found = []
    for piece in x.split([1, 1, 2, 7, 19], dim=1):
        y, state = fn(piece, weight, bias, activation, state, None)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, 1), whole)
    assert torch.equal(state, last)


def test_the_state_is_no_view() -> None:
    """Or it would keep the whole input's memory, and change with it."""
    for fn in (eager, reference):
        x = torch.randn(2, 30, 5)
        _, state = fn(x, torch.randn(5, 4), None, None, None, None)
        assert state.untyped_storage().nbytes() == state.nbytes
        x.zero_()
        assert state.abs().min() > 0


@IMPLEMENTATIONS
def test_nothing_reaches_back_in_time_nor_into_another_sequence(fn: Callable[..., Results]) -> None:
    weight, bias, activation, _ = tensors(20, 3, 4, 1)
    x = torch.randn(1, 20, 3, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 9, 20])
    changed = x.clone()
    changed[:, 7:9] = 1e9
    for packed, first in ((None, 12), (cu_seqlens, 9)):
        was, now = (fn(t, weight, bias, activation, None, packed)[0] for t in (x, changed))
        assert torch.equal(was[:, :7], now[:, :7])
        assert torch.equal(was[:, first:], now[:, first:])
        assert not torch.equal(was[:, 7:9], now[:, 7:9])


def test_equals_conv1d() -> None:
    layer = torch.nn.Conv1d(6, 6, 4, groups=6, padding=3)
    x = torch.randn(2, 9, 6)
    want = layer(x.mT)[..., :9].mT
    y, _ = short_conv(x, layer.weight[:, 0], layer.bias)
    torch.testing.assert_close(y, want)
    y, _ = short_conv(x, layer.weight[:, 0], layer.bias, activation="silu")
    torch.testing.assert_close(y, torch.nn.functional.silu(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, state = torch.randn(2, 9, 6).to(dtype), torch.randn(2, 3, 6).to(dtype)
    weight, bias = torch.randn(6, 4).to(weight_dtype), torch.randn(6).to(weight_dtype)
    exact, _ = reference(x.double(), weight.double(), bias.double(), "silu", state.double())
    unit = max(torch.finfo(dtype).eps, 8 * torch.finfo(torch.float32).eps)
    for fn, roundings in ((reference, 0.6), (eager, 4)):
        y, end = fn(x, weight, bias, "silu", state, None)
        assert y.dtype == end.dtype == dtype
        assert ((y.double() - exact).norm() / exact.norm()).item() < roundings * unit


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_the_definition(packed: bool) -> None:
    cu_seqlens = torch.tensor([0, 2, 2, 7]) if packed else None
    x = torch.randn(1, 7, 2, dtype=torch.float64)
    weight, bias, activation, state = tensors(7, 2, 3, 3 if packed else 1)
    given = [t.requires_grad_() for t in (x, weight, bias, state)]
    assert torch.autograd.gradcheck(
        lambda x, weight, bias, state: reference(x, weight, bias, activation, state, cu_seqlens), given
    )
    for fn in (reference, eager):
        y, end = fn(x, weight, bias, activation, state, cu_seqlens)
        got = torch.autograd.grad([y, end], given, [torch.ones_like(y), torch.full_like(end, 0.5)])
        if fn is reference:
            want = got
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("packed", [False, True])
def test_torch_compile_whole_at_any_length(packed: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(short_conv, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (1, 2, 9, 20):
        x, weight = torch.randn(1, T, 6), torch.randn(6, 4)
        options: dict[str, Any] = {"activation": "silu", "state": torch.randn(2 if packed else 1, 3, 6)}
        if packed:
            options["cu_seqlens"] = torch.tensor([0, T // 2, T])
        got, want = (fn(x, weight, **options) for fn in (compiled, short_conv))
        torch.testing.assert_close(got, want)


def test_boundaries_that_nobody_checks_read_nothing_outside() -> None:
    """Boundaries beyond the last position cut sequences to nothing."""
    x = torch.randn(1, 6, 2)
    weight = torch.randn(2, 4)
    wild = torch.tensor([-5, 4, 100, 7])
    tame = torch.tensor([0, 4, 6, 6])
    for fn in (reference, eager):
        torch.testing.assert_close(
            fn(x, weight, None, None, None, wild), fn(x, weight, None, None, None, tame)
        )
