"""Every op's public function: its defaults, and what it is inside torch.compile and torch.jit.trace."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import randn

import bakeoff
from bakeoff.ops.rotary import rotary_tables
from bakeoff.select import Op, find_op
from tests.unit.test_declarations import NAMES


def _memory() -> tuple[torch.Tensor, ...]:
    return randn(2, 8, 4) / 4, randn(2, 8) / 4, randn(2, 4, 8) / 4, randn(2, 4) / 4


ARGS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "attention": lambda T: (randn(2, T, 2, 8), randn(2, T, 2, 8), randn(2, T, 2, 8)),
    "byte_spectral": lambda T: (torch.randint(256, (2, T), dtype=torch.uint8), randn(256, 1), torch.ones(4)),
    "dilated_attention": lambda T: (randn(2, T, 2, 8), randn(2, T, 2, 8), randn(2, T, 2, 8)),
    "linear_cross_entropy": lambda T: (randn(2, T, 8), randn(50, 8), torch.randint(50, (2, T))),
    "fp8_linear": lambda T: (randn(2, T, 8), randn(5, 8)),
    "layer_norm": lambda T: (randn(2, T, 8), randn(8), randn(8)),
    "long_conv": lambda T: (randn(2, T, 8), randn(8, 16)),
    "memory_scan": lambda T: (
        randn(2, T, 4),
        randn(2, T, 4),
        randn(2, T, 4),
        _memory(),
        _memory(),
        *(torch.rand(2, T) / 8 for _ in range(3)),
    ),
    "memory_update": lambda T: (randn(2, T, 4), randn(2, T, 4), _memory(), _memory(), *torch.rand(3, 2)),
    "norm_linear": lambda T: (randn(2, T, 8), randn(5, 8)),
    "pole_scan": lambda T: (randn(2, T, 8), -torch.rand(8, 3), randn(8, 3), randn(8, 3) + 0j),
    "qkv_rotary": lambda T: (randn(2, T, 6, 8), *rotary_tables(T, 8)),
    "rms_norm": lambda T: (randn(2, T, 8), randn(8)),
    "rotary": lambda T: (randn(2, T, 2, 8), randn(2, T, 2, 8), *rotary_tables(T, 8)),
    "short_conv": lambda T: (randn(2, T, 8), randn(8, 4)),
    "spectral_filter": lambda T: (randn(2, T, 8), randn(4, 8) + 0j),
    "swiglu": lambda T: (randn(2, T, 8),),
}
"""A call's tensors at length T."""


def public(name: str) -> Callable[..., Any]:
    """The public function as a function of tensors alone."""
    if name == "dilated_attention":
        return lambda q, k, v: bakeoff.ops.dilated_attention(q, k, v, (8, 16), (1, 2))
    function: Callable[..., Any] = getattr(bakeoff.ops, name)
    return function


@pytest.fixture(params=NAMES)
def op(request: pytest.FixtureRequest) -> Op:
    return find_op(request.param)


def test_public_function_and_reference_share_their_defaults(op: Op) -> None:
    public = inspect.signature(getattr(bakeoff.ops, op.name)).parameters
    reference = inspect.signature(op.reference).parameters
    given = {name: p.default for name, p in public.items() if name != "impl" and p.default is not p.empty}
    assert given == {name: p.default for name, p in reference.items() if p.default is not p.empty}


# None begins with a graph for one length alone, and then makes one that leaves it open, as True does at once.
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_torch_compile_leaves_the_length_open(op: Op, dynamic: bool | None) -> None:
    """A few graphs for all lengths: after eight torch.compile gives up."""
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    plain = public(op.name)
    compiled = torch.compile(plain, fullgraph=True, dynamic=dynamic, backend=count)
    for T in (20, 21, 22, 24, 26, 28, 30, 32, 33, 34):
        args = ARGS[op.name](T)
        torch.testing.assert_close(compiled(*args), plain(*args))
    assert len(graphs) <= 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", sorted(ARGS.keys() - {"memory_scan"}))  # its trace holds for one T
def test_torch_jit_trace_gives_the_same_at_any_length(name: str) -> None:
    plain = public(name)
    traced = torch.jit.trace(plain, ARGS[name](20))
    for T in (20, 7, 100):
        args = ARGS[name](T)
        torch.testing.assert_close(traced(*args), plain(*args))


@pytest.mark.parametrize(
    "given", [None, 3, randn(4), iter([randn(2, 2)])], ids=lambda given: type(given).__name__
)
def test_what_is_no_list_is_refused_by_name(given: Any) -> None:
    """Also a generator, such as model.parameters()."""
    ops, one = bakeoff.ops, [randn(2, 2)]
    step = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "step": torch.zeros(())}
    tokens, rate = randn(1, 3, 4), torch.ones(1, 3)
    calls: dict[str, Callable[[], Any]] = {
        "adamw_: params must be a list": lambda: ops.adamw_(given, one, one, one, **step),
        "adamw_: grads must be a list": lambda: ops.adamw_(one, given, one, one, **step),
        "global_norm: grads must be a list": lambda: ops.global_norm(given),
        "muon_: params must be a list": lambda: ops.muon_(given, one, one, lr=0.1),
        "muon_: momentum must be a list": lambda: ops.muon_(one, one, given, lr=0.1),
    }
    for message, call in calls.items():
        with pytest.raises(TypeError, match=message):
            call()
    memory: Any = _memory()
    with pytest.raises(ValueError, match="memory_scan: momentum must be four tensors"):
        ops.memory_scan(tokens, tokens, tokens, memory, given, rate, rate, rate)
    with pytest.raises(ValueError, match="memory_update: memory must be four tensors"):
        ops.memory_update(tokens, tokens, given, memory, *rate.T)


def test_a_flag_is_no_number() -> None:
    x = randn(3, 4)
    for name in ("eps", "offset"):
        with pytest.raises(TypeError, match=f"rms_norm: {name} is True, expected a number"):
            bakeoff.ops.rms_norm(x, x[0], **{name: True})


def test_gates_of_other_dtypes_are_refused_by_name() -> None:
    tokens, memory, gate = randn(2, 3, 4), _memory(), torch.ones(2)
    with pytest.raises(TypeError, match=r"memory_update: decay is torch\.complex64"):
        bakeoff.ops.memory_update(tokens, tokens, memory, memory, gate, gate.to(torch.complex64), gate)
