"""adamw_ and global_norm in Triton under the interpreter, against the definition in float64."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bakeoff.kernels.variants import text
from bakeoff.ops.adamw import tables, triton
from bakeoff.ops.adamw.group import Group, Hyper, join, split
from bakeoff.ops.adamw.kernels import NormTiling, Tiling, norm_tilings, tilings
from bakeoff.ops.adamw.op import NORM, OP, norm_case, update_case
from bakeoff.ops.adamw.reference import moved
from bakeoff.ops.adamw.update import guard
from bakeoff.select import ListMeta, TensorList, TensorMeta
from bakeoff.select.contests.apart import keep_apart
from bakeoff.select.contests.verify import verify, yardsticks

SMALL = Tiling(64, 32, 4)
"""Several chunks a tensor, two blocks a chunk."""
SMALL_NORM = NormTiling(64, 32, 4, 3)
SHAPES: list[tuple[int, ...]] = [(3, 50), (7,), (), (33, 4), (0, 3), (64,), (129,)]
HOW = Hyper(1e-2, 0.9, 0.99, 1e-8, 0.1)
CANARY = -77.0


def fenced(tensor: Tensor, shift: int = 0) -> Tensor:
    """A copy between guard bands; `shift` elements past 16 bytes of alignment."""
    band = 64
    raw = torch.full((tensor.numel() + 2 * band + shift,), 1, dtype=tensor.dtype) * (
        CANARY if tensor.is_floating_point() else -77
    )
    inside = raw[band + shift : band + shift + tensor.numel()].view(tensor.shape)
    inside.copy_(tensor)
    return inside


def fences_stand(tensor: Tensor) -> bool:
    raw = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    start = tensor.storage_offset()
    outside = torch.cat([raw[:start], raw[start + tensor.numel() :]])
    return bool((outside == (CANARY if tensor.is_floating_point() else -77)).all())


def drawn(
    dtype: torch.dtype = torch.float32,
    master: str | None = None,
    shapes: list[tuple[int, ...]] = SHAPES,
    shift: int = 0,
    steps: int = 3,
) -> Group:
    param = torch.bfloat16 if master == "remainder" else dtype
    state = torch.float32 if master else dtype
    weights = [torch.randn(s) for s in shapes]
    params = [w.to(param) for w in weights]
    wider = None
    if master == "float32":
        wider = [w.clone() for w in weights]
    elif master == "remainder":
        halves = [split(w) for w in weights]
        params, wider = [h for h, _ in halves], [r for _, r in halves]
    lists = [
        params,
        [torch.randn(s).to(dtype) for s in shapes],
        [torch.randn(s).to(state) for s in shapes],
        [torch.randn(s).square().to(state) for s in shapes],
    ]
    columns = [[fenced(t, shift) for t in column] for column in lists]
    wider = None if wider is None else [fenced(t, shift) for t in wider]
    return Group(*columns, [torch.tensor(float(steps)) for _ in shapes], wider)


def update(group: Group, how: Hyper, tiling: Tiling) -> None:
    triton._take_step(*group, *how, tiling=tiling)


def exact(group: Group, how: Hyper, factor: float = 1.0, rate: float = 1.0) -> list[list[Tensor]]:
    """Weights and moments after the step, in float64."""
    results = []
    assert isinstance(how.lr, float)
    for i, (p, g, m, v) in enumerate(zip(*group[:4], strict=True)):
        weight = p
        if group.master is not None:
            weight = join(p, group.master[i]) if p.dtype == torch.bfloat16 else group.master[i]
        t = group.step[i if len(group.step) > 1 else 0].item() + 1
        results.append(
            moved(
                weight.double(), g.double() * factor, m.double(), v.double(), t, how.lr * rate,
                how.beta1, how.beta2, how.eps, how.weight_decay,
            )
        )  # fmt: skip
    return [list(column) for column in zip(*results, strict=True)]


def close(got: list[Tensor], want: list[Tensor]) -> None:
    """To a few roundings of float32 and one of the stored dtype."""
    for mine, exactly in zip(got, want, strict=True):
        if mine.numel():
            unit = torch.finfo(mine.dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps
            assert (mine.double() - exactly).abs().max() <= unit * exactly.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("maximize", [False, True])
def test_step(dtype: torch.dtype, shift: int, maximize: bool) -> None:
    group = drawn(dtype, shift=shift)
    how = HOW._replace(maximize=maximize)
    want = exact(group, how, -1.0 if maximize else 1.0)
    grads = [g.clone() for g in group.grads]
    update(group, how, SMALL)
    for column, wanted in zip((group.params, group.exp_avg, group.exp_avg_sq), want, strict=True):
        close(column, wanted)
    assert all(s.item() == 4 for s in group.step)
    assert all(torch.equal(a, b) for a, b in zip(grads, group.grads, strict=True))
    assert all(fences_stand(t) for column in group[:4] for t in column)


@pytest.mark.parametrize("master", ["float32", "remainder"])
@pytest.mark.parametrize("shift", [0, 1])
def test_step_with_wider_weights(master: str, shift: int) -> None:
    group = drawn(torch.float16, master, shift=shift)
    want = exact(group, HOW)
    update(group, HOW, SMALL)
    assert group.master is not None
    if master == "float32":
        close(group.master, want[0])
        assert all(torch.equal(p, w.half()) for p, w in zip(group.params, group.master, strict=True))
    else:
        joined = [join(p, r) for p, r in zip(group.params, group.master, strict=True)]
        close(joined, want[0])
        for p, r, w in zip(group.params, group.master, joined, strict=True):
            assert all(torch.equal(a, b) for a, b in zip((p, r), split(w), strict=True))
    close(group.exp_avg, want[1])
    close(group.exp_avg_sq, want[2])
    assert all(fences_stand(t) for column in (*group[:4], group.master) for t in column)


def test_scalars_on_the_device() -> None:
    group = drawn()
    scalars = {name: torch.tensor(value) for name, value in
               {"clip_coef": 0.5, "grad_scale": 4.0, "lr_mult": 3.0, "found_inf": 0.0}.items()}  # fmt: skip
    want = exact(group, HOW, 0.5 / 4.0, 3.0)
    update(group, HOW._replace(lr=torch.tensor(1e-2, dtype=torch.float64), **scalars), SMALL)
    close(group.params, want[0])
    close(group.exp_avg, want[1])


@pytest.mark.parametrize("master", [None, "float32", "remainder"])
def test_a_skipped_step_changes_no_bit(master: str | None) -> None:
    group = drawn(torch.float32, master)
    group.grads[0][0, 0] = math.nan
    group.grads[3][1, 1] = math.inf
    columns = [*group[:5], *([group.master] if group.master else [])]
    before = [[t.clone() for t in column] for column in columns]
    update(group, HOW._replace(found_inf=torch.tensor(1.0), clip_coef=torch.tensor(math.nan)), SMALL)
    for was, now in zip(before, columns, strict=True):
        for a, b in zip(was, now, strict=True):
            assert torch.equal(a.nan_to_num(7.0) if a.is_floating_point() else a,
                               b.nan_to_num(7.0) if b.is_floating_point() else b)  # fmt: skip


def four_sums(group: Group, how: Hyper, factor: float = 1.0) -> list[float]:
    """By the formulas of the docstring, in float64, of the moments before and after the step."""
    found = [0.0] * 4
    moved_to = exact(group, how, factor)
    for i, (p, g, m, v) in enumerate(zip(*group[:4], strict=True)):
        weight = p
        if group.master is not None:
            weight = join(p, group.master[i]) if p.dtype == torch.bfloat16 else group.master[i]
        t, scaled = group.step[i if len(group.step) > 1 else 0].item(), g.double() * factor

        def u(t: float, m: Tensor, v: Tensor) -> Tensor:
            if t == 0:
                return torch.zeros_like(m)
            root = (v / (1 - how.beta2**t)).sqrt()
            return m / (1 - how.beta1**t) / (root + how.eps)

        last, new = u(t, m.double(), v.double()), u(t + 1, moved_to[1][i], moved_to[2][i])
        pairs = ((scaled, last), (scaled, scaled), (weight.double(), weight.double()), (new, new))
        found = [total + (a * b).sum().item() for total, (a, b) in zip(found, pairs, strict=True)]
    return found


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("master", [None, "float32", "remainder"])
def test_sums(master: str | None, steps: int) -> None:
    group = drawn(torch.float32, master, shift=steps % 2, steps=steps)
    sums = fenced(torch.full((4,), math.nan))
    how = HOW._replace(sums=sums, clip_coef=torch.tensor(0.5), eps=0.0 if steps == 0 else 1e-8)
    want = four_sums(group, how, 0.5)
    plain = [[t.clone() for t in column] for column in group if column is not None]
    update(group, how, SMALL)
    assert sums.tolist() == pytest.approx(want, rel=1e-5, abs=1e-3)
    assert fences_stand(sums)
    other = Group(*plain)
    update(other, how._replace(sums=None), SMALL)
    for with_sums, without in zip(group, other, strict=True):
        pairs = zip(with_sums or [], without or [], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), "sums change no bit of the step"


def test_sums_are_zero_where_the_step_is_skipped_and_where_there_is_nothing() -> None:
    group, sums = drawn(), torch.ones(4)
    group.grads[0][0, 0] = math.nan
    update(group, HOW._replace(found_inf=torch.tensor(1.0), sums=sums), SMALL)
    assert sums.tolist() == [0.0] * 4
    sums.fill_(1.0)
    update(drawn(shapes=[(0,)]), HOW._replace(sums=sums), SMALL)
    assert sums.tolist() == [0.0] * 4


def test_one_counter_for_all() -> None:
    group = drawn(steps=0)._replace(step=[torch.zeros(())])
    want = exact(group, HOW)
    update(group, HOW, SMALL)
    close(group.params, want[0])
    assert group.step[0].item() == 1


def test_counters_that_differ() -> None:
    group = drawn()
    for i, step in enumerate(group.step):
        step.fill_(100.0 * i)
    want = exact(group, HOW)
    update(group, HOW, SMALL)
    close(group.params, want[0])
    assert [s.item() for s in group.step] == [100.0 * i + 1 for i in range(len(SHAPES))]


def test_zero_betas() -> None:
    group = drawn()
    how = HOW._replace(beta1=0.0, beta2=0.0)
    want = exact(group, how)
    update(group, how, SMALL)
    close(group.params, want[0])
    close(group.exp_avg, [g.double() for g in group.grads])


def test_only_empty_tensors() -> None:
    group = drawn(shapes=[(0,), (0, 4)])
    update(group, HOW, SMALL)
    assert [s.item() for s in group.step] == [4, 4]
    assert triton._norm(group.grads, 1.0, True, None, None, None, SMALL_NORM).norm.item() == 0


@settings(max_examples=settings.default.max_examples // 4)
@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    shift=st.integers(0, 3),
    step=st.integers(0, 10_000),
    beta2=st.sampled_from([0.9, 0.999, 0.99999]),
)
def test_any_sizes(sizes: list[int], shift: int, step: int, beta2: float) -> None:
    group = drawn(shapes=[(n,) for n in sizes], shift=shift, steps=step)
    how = HOW._replace(beta2=beta2)
    want = exact(group, how)
    update(group, how, SMALL)
    close(group.params, want[0])
    assert all(fences_stand(t) for column in group[:4] for t in column)


def test_blocks_and_chunks_change_no_bit() -> None:
    results = []
    for tiling in (SMALL, Tiling(32, 32, 4), Tiling(512, 128, 4)):
        torch.manual_seed(0)
        group = drawn()
        update(group, HOW, tiling)
        results.append(group.params)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_norm(dtype: torch.dtype, shift: int) -> None:
    grads = [fenced(torch.randn(s).to(dtype), shift) for s in SHAPES]
    want = torch.cat([g.double().flatten() for g in grads]).norm().item()
    got = triton._norm(grads, None, False, None, None, None, SMALL_NORM)
    assert got.norm.item() == pytest.approx(want, rel=1e-6)
    assert (got.clip_coef.item(), got.found_inf.item()) == (1.0, 0.0)


def test_norm_of_mixed_dtypes() -> None:
    grads = [torch.randn(100), torch.randn(100).half(), torch.randn(3), torch.randn(70).half()]
    want = torch.cat([g.double() for g in grads]).norm().item()
    by_dtype = [TensorList.of(grads[::2]), TensorList.of(grads[1::2])]
    assert guard(by_dtype, impl="triton").norm.item() == pytest.approx(want, rel=1e-6)


def test_norm_beyond_half_precision() -> None:
    assert triton.norm([torch.full((1000,), 6e4).half()]).norm.item() == pytest.approx(
        6e4 * 1000**0.5, rel=1e-3
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_guard_sees_what_is_not_finite(bad: float) -> None:
    grads = [torch.randn(s) for s in SHAPES]
    skipped = torch.tensor(5)
    assert triton._norm(grads, 1.0, True, None, None, skipped, SMALL_NORM).found_inf.item() == 0
    assert skipped.item() == 5
    grads[3][2, 1] = bad
    assert triton._norm(grads, 1.0, True, None, None, skipped, SMALL_NORM).found_inf.item() == 1
    assert skipped.item() == 6
    careless = triton._norm(grads, 1.0, False, None, None, None, SMALL_NORM)
    assert careless.found_inf.item() == 0
    expected = math.nan if math.isnan(bad) else 0.0
    assert careless.clip_coef.item() == pytest.approx(expected, nan_ok=True)


def test_guard_merges_and_unscales() -> None:
    grads = [torch.full((16,), 8.0)]
    found = triton._norm(grads, 2.0, False, torch.tensor(1.0), torch.tensor(4.0), None, SMALL_NORM)
    assert found.norm.item() == 8.0
    assert found.clip_coef.item() == pytest.approx(0.25, rel=1e-6)
    assert found.found_inf.item() == 1.0


def addresses(tensors: list[Tensor]) -> list[int]:
    return [t.data_ptr() for t in tensors]


def test_tables_follow_addresses() -> None:
    known: Any = tables.OrderedDict()
    first, second = [torch.zeros(5), torch.zeros(0)], [torch.zeros(5), torch.zeros(0)]
    table = tables.table_for((5, 0), 4, torch.device("cpu"), known, triton.fetch)
    assert tables.table_for((5, 0), 4, torch.device("cpu"), known, triton.fetch) is table
    assert table.chunks.tolist() == [[0, 0], [0, 1]]
    rows = table.rows(addresses(first))
    assert rows.tolist() == [[5, 0], [first[0].data_ptr(), first[1].data_ptr()]]
    assert table.rows(addresses(first)) is rows
    assert table.rows(addresses(second))[1, 0].item() == second[0].data_ptr()
    assert rows[1, 0].item() == first[0].data_ptr(), "a table in use is never overwritten"


def test_tables_of_more_columns_than_before() -> None:
    table = tables.Table((5, 3), 4, torch.device("cpu"), triton.fetch)
    assert table.rows([1, 2]).tolist() == [[5, 3], [1, 2]]
    assert table.rows([1, 2], [3, 4]).tolist() == [[5, 3], [1, 2], [3, 4]]
    assert table.rows([1, 2], [3, 5]).tolist() == [[5, 3], [1, 2], [3, 5]]
    assert table.rows([6, 2]).tolist() == [[5, 3], [6, 2]]


@pytest.mark.parametrize("master", [None, torch.float32, torch.int16], ids=str)
def test_passes_the_contest_verification(master: torch.dtype | None) -> None:
    """Fences around every tensor, hostile values, bitwise repetition, against the definition in float64."""
    narrow = {None: torch.float32, torch.float32: torch.float16, torch.int16: torch.bfloat16}
    case = update_case(
        4, 3001, "cpu", narrow[master], None, torch.float32, master, scaled=True, guarded=True,
        summed=master is None,
    )  # fmt: skip
    called = case.replace(
        step=ListMeta(1, 1, torch.float32),
        maximize=True,
        grad_scale=TensorMeta.dense((), torch.float32),
        lr_mult=TensorMeta.dense((), torch.float32),
    )
    verify(OP, OP.candidate("triton"), yardsticks(OP, case, called))
    keep_apart(OP, OP.candidate("triton"), next(yardsticks(OP, case)))


def test_norm_passes_the_contest_verification() -> None:
    case = norm_case(4, 3001, "cpu", torch.float32)
    scalar = TensorMeta.dense((), torch.float32)
    called = case.replace(
        max_norm=1.0,
        skip_nonfinite=True,
        found_inf=scalar,
        grad_scale=scalar,
        skipped=TensorMeta.dense((), torch.int64),
    )
    verify(NORM, NORM.candidate("triton"), yardsticks(NORM, case, called))


@pytest.mark.parametrize("bytes_of_a_moment", [2, 4])
def test_every_tiling_gives_the_same_bits(bytes_of_a_moment: int) -> None:
    dtype = torch.float32 if bytes_of_a_moment == 4 else torch.bfloat16
    case = update_case(len(SHAPES), 1000, "cpu", dtype)
    found = triton.update.variants(case)["forward"]
    assert found == tilings(bytes_of_a_moment)
    assert 6 <= len(found) <= 16
    results = []
    for tiling in (None, *found[1::4]):
        torch.manual_seed(0)
        group = drawn(dtype)
        call = triton.update if tiling is None else triton.update.bind(text({"forward": tiling}))
        call(*group, *HOW)
        results.append(group.params)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_norms_of_every_tiling() -> None:
    grads = [torch.randn(s) for s in SHAPES]
    want = torch.cat([g.double().flatten() for g in grads]).norm().item()
    for tiling in norm_tilings()[1::3]:
        norm = triton.norm.bind(text({"forward": tiling}))(grads).norm
        assert norm.item() == pytest.approx(want, rel=1e-6)


def test_fetch_reads_an_address() -> None:
    source, target = torch.arange(2500).view(2, 1250), torch.zeros(2, 1250, dtype=torch.int64)
    triton.fetch(source.data_ptr(), target.view(torch.int32))
    assert torch.equal(source, target)
