"""memory_update on plain PyTorch: the definition, gradients, skipped steps, the in-place form, refusals."""

import doctest
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bakeoff.ops import memory_update, memory_update_
from bakeoff.ops.memory_update import IN_PLACE, OP
from bakeoff.ops.memory_update.op import GATES, MEMORY, MOMENTUM
from bakeoff.ops.memory_update.reference import memory_update as reference

WIDE = {"dtype": torch.float64}
LIMITS = [None, 0.3, 1e6]  # none, one that is active, one that is not
PLAIN = pytest.mark.parametrize("impl", ["eager", "manual"])


def drawn(G: int = 2, N: int = 5, D: int = 3, H: int = 4, V: int = 2, **kind: Any) -> dict[str, Tensor]:
    """All tensors of a call, with gradients."""
    kind = kind or WIDE
    shapes = ((G, H, D), (G, H), (G, V, H), (G, V))
    tensors = {"k": torch.randn(G, N, D, **kind), "v": torch.randn(G, N, V, **kind)}
    tensors |= {name: torch.randn(shape, **kind) for name, shape in zip(MEMORY, shapes, strict=True)}
    tensors |= {name: torch.randn(shape, **kind) for name, shape in zip(MOMENTUM, shapes, strict=True)}
    tensors |= {name: 0.1 + 0.8 * torch.rand(G, **kind) for name in GATES}
    tensors["row_weight"] = torch.rand(G, N, **kind)
    return {name: t.requires_grad_() for name, t in tensors.items()}


def ordered(tensors: dict[str, Tensor], max_norm: float | None, reduction: str) -> list[Any]:
    """The arguments of a candidate."""
    given: dict[str, Any] = {**tensors, "max_norm": max_norm, "reduction": reduction}
    return [given.get(name) for name in OP.params]


def public(
    tensors: dict[str, Tensor], update: Callable[..., Any] = memory_update, **options: Any
) -> tuple[Tensor, ...]:
    """A call of the public function, its results in one tuple."""
    k, v, *gates = (tensors[name] for name in ("k", "v", *GATES))
    memory, momentum = ([tensors[name] for name in names] for names in (MEMORY, MOMENTUM))
    made = update(k, v, memory, momentum, *gates, row_weight=tensors.get("row_weight"), **options)
    return made if update is memory_update_ else (*made[0], *made[1], *made[2:])


def by_autograd(tensors: dict[str, Tensor], max_norm: float | None, reduction: str) -> list[Tensor]:
    """Group after group: the loss of PyTorch, its gradient by autograd, clipping as in clip_grad_norm_."""
    groups = []
    for g in range(len(tensors["k"])):
        k, v, lr, decay, forget = (tensors[name][g].detach() for name in ("k", "v", *GATES))
        weight = [torch.nn.Parameter(tensors[name][g].detach().clone()) for name in MEMORY]
        y = torch.nn.functional.linear(torch.nn.functional.silu(k @ weight[0].T + weight[1]), *weight[2:])
        squares = (y - v).square() * tensors["row_weight"][g].detach()[:, None]
        divisor = {"mean": squares.numel(), "token_sum": len(squares), "sum": 1}[reduction]
        loss = squares.sum() / divisor
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weight, float("inf") if max_norm is None else max_norm)
        momentum = [
            decay * tensors[name][g].detach() - lr * m.grad for name, m in zip(MOMENTUM, weight, strict=True)
        ]
        memory = [(1 - forget) * m.detach() + s for m, s in zip(weight, momentum, strict=True)]
        groups.append([*memory, *momentum, loss.detach(), norm, torch.tensor(True)])
    return [torch.stack(parts) for parts in zip(*groups, strict=True)]


@pytest.mark.parametrize("reduction", ["mean", "token_sum", "sum"])
@pytest.mark.parametrize("max_norm", LIMITS)
def test_the_definition_is_a_step_of_sgd_on_the_loss(max_norm: float | None, reduction: str) -> None:
    tensors = drawn()
    exact = by_autograd(tensors, max_norm, reduction)
    for impl in (reference, OP.candidate("eager").call, OP.candidate("manual").call):
        assert impl is not None
        for mine, theirs in zip(impl(*ordered(tensors, max_norm, reduction)), exact, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("max_norm", LIMITS)
def test_gradcheck_of_the_reference(max_norm: float | None) -> None:
    tensors = drawn(N=3)

    def step(*values: Tensor) -> tuple[Tensor, ...]:
        return reference(*ordered(dict(zip(tensors, values, strict=True)), max_norm, "sum"))[:-1]

    assert torch.autograd.gradcheck(step, tuple(tensors.values()))


def gradients(
    impl: Callable[..., Any], tensors: dict[str, Tensor], max_norm: float | None, used: slice, reduction: str
) -> list[Tensor | None]:
    """Of every argument, given the same cotangents for the results in `used`."""
    made = impl(*ordered(tensors, max_norm, reduction))[:-1][used]
    generator = torch.Generator().manual_seed(1)
    arriving = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in made]
    return list(torch.autograd.grad(made, list(tensors.values()), arriving, allow_unused=True))


@PLAIN
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("max_norm", LIMITS)
@pytest.mark.parametrize(
    "used", [slice(0, 10), slice(0, 4), slice(4, 8), slice(8, 9), slice(9, 10), slice(2, 3)], ids=str
)
def test_gradients_are_those_of_the_reference(
    used: slice, max_norm: float | None, weighted: bool, impl: str
) -> None:
    tensors = drawn()
    if not weighted:
        del tensors["row_weight"]
    call = OP.candidate(impl).call
    assert call is not None
    for reduction in ("mean", "sum"):
        exact = gradients(reference, tensors, max_norm, used, reduction)
        got = gradients(call, tensors, max_norm, used, reduction)
        for (name, of), *pair in zip(tensors.items(), got, exact, strict=True):
            mine, theirs = (torch.zeros_like(of) if t is None else t for t in pair)
            torch.testing.assert_close(
                mine, theirs, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )


@PLAIN
def test_second_derivatives(impl: str) -> None:
    tensors = drawn(1, 2, 2, 2, 1)

    def step(*values: Tensor) -> tuple[Tensor, ...]:
        return public(dict(zip(tensors, values, strict=True)), max_norm=0.5, impl=impl)[:2]

    assert torch.autograd.gradgradcheck(step, tuple(tensors.values()))


BROKEN: dict[str, tuple[str, float | None]] = {
    "a key is NaN": ("k", float("nan")),
    "a value is infinite": ("v", float("inf")),
    "the memory is NaN": ("memory_w2", float("nan")),
    "the norm overflows": ("v", None),
}


@PLAIN
@pytest.mark.parametrize("trouble", BROKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_that_is_not_finite_is_skipped(trouble: str, impl: str, dtype: torch.dtype) -> None:
    """Its state and other groups are as if there were no step of it; its gradients are zeros."""
    tensors = drawn(3, dtype=dtype)
    whole = public(tensors, impl=impl, max_norm=1.0)
    name, value = BROKEN[trouble]
    with torch.no_grad():
        tensors[name][1].view(-1)[1] = torch.finfo(dtype).max / 4 if value is None else value
    made = public(tensors, impl=impl, max_norm=1.0)
    assert made[-1].tolist() == [True, False, True]
    for i, kept in enumerate((*MEMORY, *MOMENTUM)):
        torch.testing.assert_close(made[i][1], tensors[kept][1], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(made[i][::2], whole[i][::2], rtol=0, atol=0)
    arriving = [torch.randn_like(t) for t in made[:-1]]
    slopes = dict(zip(tensors, torch.autograd.grad(made[:-1], list(tensors.values()), arriving), strict=True))
    for i, kept in enumerate((*MEMORY, *MOMENTUM)):
        assert torch.equal(slopes.pop(kept)[1], arriving[i][1])
    for slope in slopes.values():
        assert torch.isfinite(slope).all()
        assert not slope[1].any()
        assert slope[::2].any()


@PLAIN
def test_a_memory_that_already_knows_has_a_gradient_of_zero(impl: str) -> None:
    """The norm is 0, where clipping and the norm's own derivative divide by it."""
    tensors = drawn()
    with torch.no_grad():
        h = torch.nn.functional.silu(tensors["k"] @ tensors["memory_w1"].mT + tensors["memory_b1"][:, None])
        tensors["v"].copy_(torch.baddbmm(tensors["memory_b2"][:, None], h, tensors["memory_w2"].mT))
    made = public(tensors, impl=impl, max_norm=1.0)
    if made[9].any():  # another order of summation
        pytest.skip("rounding leaves an error")
    assert made[-1].all()
    for slope in torch.autograd.grad([t.sum() for t in made[:-1]], list(tensors.values())):
        assert torch.isfinite(slope).all()


@PLAIN
def test_gates_at_their_limits(impl: str) -> None:
    tensors = drawn()
    one, zero = torch.ones(2, **WIDE), torch.zeros(2, **WIDE)
    made = public({**tensors, "forget": one}, impl=impl)
    for memory, momentum in zip(made[:4], made[4:8], strict=True):
        assert torch.equal(memory, momentum)
    made = public({**tensors, "lr": zero, "decay": zero, "forget": zero}, impl=impl)
    for i, name in enumerate(MEMORY):
        assert torch.equal(made[i], tensors[name])
        assert not made[4 + i].any()


@PLAIN
@pytest.mark.parametrize("shape", [(0, 3, 2, 4, 2), (2, 0, 3, 4, 2), (2, 1, 1, 1, 1)], ids=str)
def test_nothing_to_learn_from(shape: tuple[int, ...], impl: str) -> None:
    tensors = drawn(*shape)
    made = public(tensors, impl=impl, max_norm=1.0)
    assert made[-1].all()
    if shape[1] == 0:
        assert torch.equal(made[4], tensors["decay"][:, None, None] * tensors["momentum_w1"])
        assert not made[8].any()
    for slope, of in zip(
        torch.autograd.grad([t.sum() for t in made[:-1]], list(tensors.values())),
        tensors.values(),
        strict=True,
    ):
        assert slope.shape == of.shape
        assert torch.isfinite(slope).all()


@PLAIN
def test_groups_and_the_order_of_rows_do_not_matter(impl: str) -> None:
    tensors = {name: t.detach() for name, t in drawn(4, 6).items()}
    whole = public(tensors, impl=impl, max_norm=0.5)
    order = torch.tensor([2, 0, 3, 1])
    for a, b in zip(
        public({n: t[order] for n, t in tensors.items()}, impl=impl, max_norm=0.5), whole, strict=True
    ):
        torch.testing.assert_close(a, b[order], rtol=1e-12, atol=1e-12)
    rows = torch.randperm(6)
    turned = {n: t[:, rows] if n in ("k", "v", "row_weight") else t for n, t in tensors.items()}
    for a, b in zip(public(turned, impl=impl, max_norm=0.5), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_row_of_weight_two_counts_as_two_rows() -> None:
    tensors = {name: t.detach() for name, t in drawn(2, 4).items()}
    tensors["row_weight"] = torch.ones(2, 4, **WIDE)
    doubled = {**tensors, "row_weight": torch.tensor([[2.0, 1, 1, 0]] * 2, **WIDE)}
    twice = {n: t[:, [0, 0, 1, 2]] if n in ("k", "v") else t for n, t in tensors.items()}
    for a, b in zip(public(doubled, reduction="sum"), public(twice, reduction="sum"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@PLAIN
def test_16_bit_rows_keep_a_float32_memory(impl: str, dtype: torch.dtype) -> None:
    tensors = drawn(2, 50, 16, 16, 8, dtype=torch.float32)
    narrow = {n: t.detach().to(dtype) if n in ("k", "v") else t.detach() for n, t in tensors.items()}
    made, exact = public(narrow, impl=impl), reference(*ordered(narrow, None, "mean"))
    bound = 4 * torch.finfo(dtype).eps
    for mine, theirs in zip(made[:-1], exact[:-1], strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize("impl", ["eager", "manual"])
def test_torch_compile_whole(impl: str) -> None:
    tensors = drawn()

    def step(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return public(tensors, max_norm=0.3, impl=impl)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got, want = compiled(tensors), step(tensors)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    leaves = list(tensors.values())
    pairs = zip(*[torch.autograd.grad([t.sum() for t in m[:-1]], leaves) for m in (got, want)], strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


# In place --------------------------------------------------------------------------------------------------


def test_in_place_is_the_same_step() -> None:
    tensors = {name: t.detach() for name, t in drawn(3).items()}
    tensors["k"][1, 0, 0] = float("nan")
    want = public(tensors, max_norm=0.5)
    written = {n: t.clone() for n, t in tensors.items()}
    skipped = torch.zeros(3, dtype=torch.int64)
    versions = [written[name]._version for name in (*MEMORY, *MOMENTUM)]
    got = public(written, memory_update_, max_norm=0.5, skipped=skipped)
    torch.testing.assert_close(got, want[8:], rtol=0, atol=0, equal_nan=True)
    assert skipped.tolist() == [0, 1, 0]
    for i, name in enumerate((*MEMORY, *MOMENTUM)):
        assert torch.equal(written[name], want[i])
        assert written[name]._version > versions[i]


def test_autograd_refuses_what_it_saved_of_an_overwritten_memory() -> None:
    tensors = drawn()
    state = {name: tensors[name].detach() for name in (*MEMORY, *MOMENTUM)}
    loss = public({**tensors, **state}, impl="manual")[0].sum()
    with torch.no_grad():
        public({**tensors, **state}, memory_update_)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_carries_no_gradients() -> None:
    tensors = drawn()
    with pytest.raises(RuntimeError, match=r"carries no gradients: use memory_update"):
        public(tensors, memory_update_)


def test_in_place_refuses_two_elements_at_one_address() -> None:
    tensors = {name: t.detach() for name, t in drawn().items()}
    old = tensors["memory_b1"].clone()
    one = {**tensors, "momentum_w1": tensors["memory_w1"]}
    with pytest.raises(ValueError, match=r"momentum\[0\] lies in the memory of memory\[0\]"):
        public(one, memory_update_)
    wide = {**tensors, "momentum_b2": tensors["momentum_b2"][:1].expand(tensors["momentum_b2"].shape)}
    with pytest.raises(ValueError, match="momentum is expanded: its elements share memory"):
        public(wide, memory_update_)
    assert torch.equal(tensors["memory_b1"], old)


def test_inference_mode() -> None:
    tensors = {name: t.detach() for name, t in drawn().items()}
    with torch.inference_mode():
        want = public(tensors)
        fresh = {name: t.clone() for name, t in tensors.items()}
        got = public(fresh, memory_update_)
        torch.testing.assert_close(got, want[8:])
        torch.testing.assert_close(fresh["memory_w1"], want[0])


def test_in_place_declaration() -> None:
    for case in IN_PLACE.cases():
        IN_PLACE.check(case)
        assert IN_PLACE.bucket(IN_PLACE.bucket(case)) == IN_PLACE.bucket(case)


# Refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"lr": 0.1}, TypeError, "lr must be a tensor, got 0.1; pass a tensor of one number for each group"),
        ({"lr": torch.tensor([0.1])}, ValueError, r"lr has shape \(1,\), expected \[G\] with G = 2 as of k"),
        ({"lr": torch.tensor([0.1, -0.1])}, ValueError, r"lr must be finite and >= 0, got \[0.1"),
        ({"lr": torch.tensor([0.1, float("nan")])}, ValueError, "lr must be finite and >= 0"),
        ({"lr": torch.tensor([0.1, float("inf")])}, ValueError, "lr must be finite and >= 0"),
        ({"decay": torch.tensor([0.1, 1.5])}, ValueError, r"decay must be in \[0, 1\]"),
        ({"forget": torch.tensor([float("nan"), 0.5])}, ValueError, r"forget must be in \[0, 1\]"),
        ({"v": torch.randn(2, 4, 2, **WIDE)}, ValueError, r"v has shape \(2, 4, 2\), expected .* N = 5"),
        ({"v": torch.randn(2, 5, 2)}, TypeError, "v is torch.float32 and k torch.float64: cast one of them"),
        ({"k": torch.randn(5, 3, **WIDE)}, ValueError, r"one group is k\[None\]"),
        ({"memory_w2": torch.randn(2, 2, 3, **WIDE)}, ValueError, "memory_w2 has shape .* H = 4"),
        ({"memory_w1": torch.randn(2, 4, 3).half()}, TypeError, r"expected float32: memory_w1.float\(\)"),
        ({"momentum_b2": torch.zeros(2, 4, **WIDE)}, ValueError, r"memory_b2's, \(2, 2\); start with zeros"),
        ({"row_weight": torch.ones(2, **WIDE)}, ValueError, "one number for each row"),
    ],
)  # fmt: skip
def test_refusals(change: dict[str, Any], error: type[Exception], match: str) -> None:
    tensors: dict[str, Any] = {**drawn(), **change}
    with pytest.raises(error, match=match):
        public(tensors)


def test_refused_options() -> None:
    tensors = drawn()
    with pytest.raises(ValueError, match="expected one of mean, token_sum, sum"):
        public(tensors, reduction="none")
    for wrong, text in ((-1.0, ">= 0, got -1"), (math.nan, "finite number")):
        public(tensors, max_norm=1.0)  # a kind of call that is known from here on
        with pytest.raises(ValueError, match=f"max_norm must .*{text}"):
            public(tensors, max_norm=wrong)
    with pytest.raises(ValueError, match=r"memory must be four tensors, \(w1, b1, w2, b2\)"):
        memory_update(
            tensors["k"],
            tensors["v"],
            [tensors["memory_w1"]],
            [tensors["memory_w1"]],
            *(tensors[g] for g in GATES),
        )


@pytest.mark.parametrize("function", [memory_update, memory_update_])
def test_examples(function: Callable[..., Any]) -> None:
    found = doctest.DocTestFinder().find(function, globs={})
    assert sum(len(example.examples) for example in found) > 3
    for example in found:
        assert doctest.DocTestRunner().run(example).failed == 0
