"""The op muon_ on the CPU: singular values, arguments, skipping, what contests let through and what not."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import bakeoff
from bakeoff.ops.muon import muon_, plain
from bakeoff.ops.muon.op import OP, muon_case
from bakeoff.ops.muon.plain import iterated, orthogonalised
from bakeoff.ops.muon.reference import orthogonalised as reference
from bakeoff.ops.muon.settings import arguments, size_of
from bakeoff.select import Candidate
from bakeoff.select.contests.contest import contest
from bakeoff.select.contests.draw import inputs
from bakeoff.select.contests.verify import Rejected, verify, yardsticks
from bakeoff.select.declare.key import key
from tests.cut import cut

SHAPES = [(24, 40), (40, 24), (7, 100), (16, 16), (1, 9), (9, 1)]
HOW: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}


def lists(
    shapes: list[tuple[int, int]] = SHAPES, dtype: torch.dtype = torch.float32
) -> dict[str, list[Tensor]]:
    made = {name: [torch.randn(s).to(dtype) for s in shapes] for name in ("params", "grads")}
    wide = torch.promote_types(dtype, torch.float32)
    return {**made, "momentum": [torch.randn(s).to(wide) for s in shapes]}


def copied(given: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    return {name: [t.clone() for t in column] for name, column in given.items()}


def by_svd(matrix: Tensor) -> Tensor:
    """The polynomial on the singular values: another way to the same matrix."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (s.norm() + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_definition_is_a_polynomial_of_singular_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape).double()
    torch.testing.assert_close(reference(matrix), by_svd(matrix), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(orthogonalised(matrix[None])[0], reference(matrix), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((64, 256), torch.float64), ((256, 64), torch.float32), ((40, 96), torch.bfloat16)],
    ids=str,
)
def test_singular_values_end_near_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """In bfloat16, too, which CUDA takes: in about [0.7, 1.2], in the same direction as the exact factor."""
    matrices = torch.randn(3, *shape, dtype=torch.float64)
    unit = matrices / matrices.norm(dim=(1, 2), keepdim=True)
    found = iterated(unit.to(dtype), 5).double()
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.66
    assert values.max() < 1.24
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    assert torch.cosine_similarity(found.flatten(1), (u @ v).flatten(1)).min() > 0.97


@pytest.mark.parametrize("scale", ["match_rms", "spectral"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("impl", [None, "eager"])
def test_by_hand(impl: str | None, nesterov: bool, scale: str) -> None:
    group = lists()
    want, momenta = [], []
    for p, g, m in zip(*(t for t in group.values()), strict=True):
        new = 0.9 * m + g
        size = 0.2 * max(p.shape) ** 0.5 if scale == "match_rms" else max(1, p.shape[0] / p.shape[1]) ** 0.5
        assert size == pytest.approx(size_of(p.shape, scale))
        u = by_svd(g + 0.9 * new if nesterov else new)
        want.append(p.double() * (1 - 0.1 * 0.1) - 0.1 * size * u)
        momenta.append(new)
    grads = [g.clone() for g in group["grads"]]
    muon_(**group, momentum_decay=0.9, nesterov=nesterov, scale=scale, impl=impl, **HOW)
    for p, w in zip(group["params"], want, strict=True):
        torch.testing.assert_close(p.double(), w, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(group["momentum"], momenta)
    assert all(map(torch.equal, grads, group["grads"]))


def test_an_update_is_as_large_as_adamws() -> None:
    """With match_rms elements of an update are about 0.2, whatever the shape."""
    for shape in ((64, 64), (64, 512), (512, 64)):
        group = {name: [torch.zeros(shape)] for name in ("params", "momentum")}
        muon_(grads=[torch.randn(shape)], lr=1.0, **group)
        assert 0.15 < group["params"][0].square().mean().sqrt() < 0.25


def test_as_torch_does() -> None:
    """torch.optim.Muon, which computes in bfloat16 everywhere, and keeps the mean where we keep the sum."""
    torch.manual_seed(0)
    for adjust, scale in (("match_rms_adamw", "match_rms"), ("original", "spectral")):
        mine = [torch.randn(s) for s in SHAPES[:4]]
        theirs = [torch.nn.Parameter(p.clone()) for p in mine]
        momentum = [torch.zeros_like(p) for p in mine]
        peer = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.1, adjust_lr_fn=adjust)
        for _ in range(3):
            grads = [torch.randn_like(p) for p in mine]
            before = [p.detach().clone() for p in theirs]
            for p, q, g in zip(theirs, mine, grads, strict=True):
                p.grad = g.clone()
                q.copy_(p.detach())
            peer.step()
            muon_(mine, grads, momentum, scale=scale, **HOW)
            for ours, own, was in zip(mine, theirs, before, strict=True):
                moves = [(after.detach() - was * 0.99).flatten() for after in (ours, own)]
                assert torch.cosine_similarity(*moves, dim=0) > 0.999
                assert moves[0].norm().item() == pytest.approx(moves[1].norm().item(), rel=0.02)
        for m, p in zip(momentum, theirs, strict=True):
            torch.testing.assert_close(m * 0.05, peer.state[p]["momentum_buffer"], rtol=1e-4, atol=1e-6)


def test_torchs_function_as_a_candidate() -> None:
    group = lists([(24, 40)] * 2)
    other = copied(group)
    muon_(**group, impl="torch", grad_scale=torch.tensor(2.0), **HOW)
    muon_(**other, impl="eager", grad_scale=torch.tensor(2.0), **HOW)
    torch.testing.assert_close(group["momentum"], other["momentum"], rtol=1e-5, atol=1e-5)
    for a, b in zip(group["params"], other["params"], strict=True):
        assert (a - b).norm() < 0.03 * 0.1 * 0.2 * 40**0.5 * 24**0.5  # 3 % of an update
    for more in ({"found_inf": torch.zeros(())}, {"lr": torch.tensor(0.1)}):
        with pytest.raises(bakeoff.Unsupported, match=r"torch\.optim\.Muon"):
            muon_(**group, impl="torch", **{**HOW, **more})


@pytest.mark.parametrize("shape", [(), (1,)])
def test_scalars_on_the_device(shape: tuple[int, ...]) -> None:
    group = lists()
    want = copied(group)
    want["grads"] = [g * 0.5 / 4 for g in want["grads"]]
    muon_(**want, lr=0.3, weight_decay=0.1)
    values = {"clip_coef": 0.5, "grad_scale": 4.0, "lr_mult": 3.0, "found_inf": 0.0, "lr": 0.1}
    scalars: Any = {name: torch.full(shape, value) for name, value in values.items()}
    muon_(**group, weight_decay=0.1, **scalars)
    for name in ("params", "momentum"):
        torch.testing.assert_close(group[name], want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("found", [1.0, 2.0, math.nan, math.inf])
def test_a_skipped_step_changes_nothing(found: float) -> None:
    group = {**lists(), "direction": [torch.randn(s) for s in SHAPES]}
    group["grads"][1][0, 0] = math.nan
    before, sums = copied(group), torch.ones(4)
    muon_(**group, found_inf=torch.tensor(found), sums=sums, **HOW)
    for name in ("params", "momentum", "direction"):
        assert all(map(torch.equal, group[name], before[name]))
    assert sums.tolist() == [0.0] * 4


def test_sums_and_directions() -> None:
    group = {**lists(), "direction": [torch.zeros(s) for s in SHAPES]}
    sums = torch.zeros(4)
    muon_(**group, sums=sums, lr=0.1)
    assert sums[0] == 0
    u_prev = [d.clone() for d in group["direction"]]
    before = [p.clone() for p in group["params"]]
    muon_(**group, sums=sums, lr=0.1)
    u = [(was - p) / 0.1 for was, p in zip(before, group["params"], strict=True)]
    torch.testing.assert_close(u, group["direction"], rtol=1e-3, atol=1e-4)
    pairs = ((group["grads"], u_prev), (group["grads"],) * 2, (before,) * 2, (u, u))
    want = [sum((a * b).sum().item() for a, b in zip(*pair, strict=True)) for pair in pairs]
    assert sums.tolist() == pytest.approx(want, rel=1e-3)


def test_layouts_and_empty_matrices() -> None:
    group = lists([(24, 40), (0, 5), (5, 0), (24, 40)])
    want = copied(group)
    for name in group:
        group[name][0] = group[name][0].t().contiguous().t()
        group[name][3] = torch.randn(24, 80)[:, ::2].copy_(want[name][3])
    muon_(**group, **HOW)
    muon_(**want, **HOW)
    for name in ("params", "momentum"):
        torch.testing.assert_close(group[name], want[name])
    muon_([], [], [], **HOW)


def test_matrices_that_share_memory_go_one_after_the_other() -> None:
    memory = torch.zeros(5, 4)
    params = [memory[:3], memory[2:]]
    ones = [torch.ones_like(p) for p in params]
    muon_(params, ones, [torch.zeros_like(p) for p in params], lr=1.0, scale="spectral")
    assert memory[2, 0] == pytest.approx(memory[0, 0].item() + memory[4, 0].item(), rel=1e-5)


def test_autograd_refuses_values_saved_before_a_step() -> None:
    group = lists()
    loss = group["params"][0].requires_grad_().square().sum()
    muon_(**group, **HOW)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@settings(max_examples=settings.default.max_examples // 4, deadline=None)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), log=st.integers(-3, 3))
def test_laws(rows: int, columns: int, log: int) -> None:
    """A matrix's size doesn't matter, its transpose gives the transpose, a rotation rotates."""
    g = torch.randn(rows, columns, dtype=torch.float64)
    x = orthogonalised(g[None])[0]
    torch.testing.assert_close(orthogonalised(g[None] * 10.0**log)[0], x, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(orthogonalised(g.t()[None])[0], x.t(), rtol=1e-9, atol=1e-9)
    q = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64))[0]
    torch.testing.assert_close(orthogonalised((q @ g)[None])[0], q @ x, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grads": [torch.rand(3, 3)]}, "1 tensors in grads, expected one for each of 2"),
        ({"params": [torch.rand(3)] * 2}, r"params\[0\] has shape \(3,\), expected a matrix; step other"),
        (
            {"momentum": [torch.rand(3, 3), torch.rand(2, 3)]},
            r"momentum\[1\] has shape \(2, 3\), expected its",
        ),
        ({"grads": [torch.rand(3, 3).to_sparse(), torch.rand(3, 3)]}, "to_dense"),
        ({"params": [torch.ones(3, 3).int()] * 2}, "params are torch.int32; it takes real floating"),
        ({"momentum": [torch.rand(1, 3).expand(3, 3)] * 2}, r"momentum\[0\] is expanded"),
        ({"params": [torch.rand(3, 3)] * 2}, r"params\[1\] lies in the memory of params\[0\]"),
        ({"momentum_decay": 1.0}, r"momentum_decay must be in \[0, 1\), got 1.0"),
        ({"lr": True}, "lr is True, expected a number"),
        ({"momentum_decay": False}, "momentum_decay is False, expected a number"),
        ({"lr": None}, r"lr must be in \[0, inf\), got None"),
        ({"steps": 0}, "steps must be a whole number from 1 to 100, got 0"),
        ({"steps": 5.0}, "steps must be a whole number"),
        ({"scale": "rms"}, "scale must be one of match_rms, spectral, got 'rms'"),
        ({"nesterov": 1}, "nesterov is 1, expected True or False"),
        ({"clip_coef": torch.ones(2)}, "clip_coef must be a scalar on cpu"),
        ({"found_inf": True}, "found_inf must be a scalar tensor on cpu, got True"),
        ({"sums": torch.ones(3)}, r"sums must be float32 \[4\] on cpu"),
    ],
)
def test_errors_name_the_argument(change: dict[str, Any], message: str) -> None:
    given = {name: [torch.rand(3, 3) for _ in range(2)] for name in ("params", "grads", "momentum")}
    with pytest.raises((ValueError, TypeError), match=message):
        muon_(**{**given, **HOW, **change})


def test_one_call_takes_one_shape() -> None:
    group = lists([(3, 4), (4, 3)])
    with pytest.raises(ValueError, match="of several shapes; one call takes matrices of one shape"):
        bakeoff.select.call(
            OP, *group.values(), None, *[0.1, 0.9, True, 0.0, 5, "match_rms", False], *[None] * 5
        )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(muon_case(3, 40, 24, "cpu", torch.bfloat16, guarded=True), id="tall bf16, skip"),
        pytest.param(muon_case(2, 24, 24, "cpu", summed=True), id="sums", marks=pytest.mark.exhaustive),
        pytest.param(muon_case(3, 24, 40, "cpu"), id="wide", marks=pytest.mark.exhaustive),
        pytest.param(
            muon_case(2, 5, 30, "cpu", torch.float64, nesterov=False, scale="spectral"),
            id="float64",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_contests(case: Any) -> None:
    (verdict,) = contest(OP, case, budget_s=0.02, skip={"compiled": "takes long"})
    trials = {trial.candidate: trial for trial in verdict.trials}
    assert trials["eager"].errors is not None, trials["eager"].rejected
    assert "triton" in trials


# ------------------------------------------- what the rule is worth where the yardstick computes in bfloat16
def narrow(u: Tensor, steps: int, change: str = "") -> Tensor:
    """The iterations in bfloat16, as kernels make them: another order of roundings than eager's. `change` is
    what a wrong kernel might do."""
    a, b, c = (3.4445, -4.7, 2.0315) if change == "another b" else (3.4445, -4.7750, 2.0315)
    x = (u / (u.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(steps - (change == "one step fewer")):
        gram = (x.float() @ x.float().mT).bfloat16()
        if change == "a tile that is not mirrored":
            gram[:, :8, 8:] = 0
        poly = (b * gram.float() + c * (gram.float() @ gram.float())).bfloat16()
        x = (a * x.float() + poly.float() @ x.float()).bfloat16()
        if change == "coarser":
            x = (x.float() * 16).to(torch.float8_e4m3fn).float().div(16).bfloat16()
    return x.float() * (1.01 if change == "gain" else 1.0)


def as_candidate(change: str) -> Candidate:
    def step(*args: Any) -> None:
        matrices, how = arguments(args)
        for p, g, m in zip(matrices.params, matrices.grads, matrices.momentum, strict=True):
            m.mul_(how.momentum_decay).add_(g)
            u = m if change == "without nesterov" else g + how.momentum_decay * m
            x = narrow(u[None], how.steps, change)[0] * size_of(p.shape, how.scale)
            p.mul_(1 - how.lr * how.weight_decay).sub_(how.lr * x)  # type: ignore[operator]

    return Candidate(change or "good", step, has_backward=False, traceable=False)


@pytest.fixture(scope="module")
def sticks() -> Any:
    """Draws whose yardstick is eager in bfloat16, as on CUDA."""

    def eager(*args: Any) -> None:
        with pytest.MonkeyPatch.context() as patched:
            wide = plain.iterated
            patched.setattr(plain, "iterated", lambda x, steps: wide(x.bfloat16(), steps))
            plain.eager(*args)

    op = dataclasses.replace(OP, candidates=(Candidate("eager", eager, has_backward=False),))
    return op, list(yardsticks(op, muon_case(8, 24, 40, "cpu")))


def test_rounding_otherwise_passes(sticks: Any) -> None:
    verify(sticks[0], as_candidate(""), sticks[1])


@pytest.mark.parametrize(
    "change",
    [
        "one step fewer",
        "another b",
        "a tile that is not mirrored",
        pytest.param("coarser", marks=pytest.mark.exhaustive),
        "gain",
        pytest.param("without nesterov", marks=pytest.mark.exhaustive),
    ],
)
def test_what_is_wrong_does_not(change: str, sticks: Any) -> None:
    with pytest.raises(Rejected, match="new params is wrong"):
        verify(sticks[0], as_candidate(change), sticks[1])


def test_the_grid_is_one_of_different_keys_that_eager_computes() -> None:
    """In float64, at sizes a CPU does at once, eager and the definition agree to rounding."""
    keys = [key(OP, OP.bucket(case), "graph") for case in OP.cases()]
    assert len(set(keys)) == len(keys)
    assert "params=fp32[12 tensors of 2304x768]" in keys[0]
    for case in OP.cases():
        assert OP.bucket(OP.bucket(case)) == OP.bucket(case)
        assert OP.heuristic(case, "graph") == ("eager" if case.sums is not None else "triton")
        drawn = inputs(OP, cut(OP, case, 16, "cpu"), 0)
        args = [[t.double() for t in a] if isinstance(a, list) else a for a in drawn]
        exact = OP.reference(*args)
        plain.eager(*args)
        for place, new in zip((0, 2), exact, strict=False):
            torch.testing.assert_close(args[place], new, rtol=1e-9, atol=1e-9)


def test_cost_counts_half_of_symmetric_products() -> None:
    case = muon_case(12, 2048, 768)
    m, n = 768, 2048
    assert OP.cost(case).flops == 12 * 5 * (m * m * n + m**3 + 2 * m * m * n)
    assert OP.cost(case).bytes == 12 * m * n * 20
