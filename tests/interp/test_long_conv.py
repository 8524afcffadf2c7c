"""long_conv's own kernels, Triton interpreted and CUDA C++ emulated, against the reference; its laws."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bakeoff import hardware
from bakeoff.channel_major import rows
from bakeoff.channel_major.rows import empty_rows, pack, result_like, unpack
from bakeoff.errors import Unsupported
from bakeoff.fft_conv import plans
from bakeoff.fft_conv.plans import FFTPlan, choose
from bakeoff.kernels import counter
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.variants import text
from bakeoff.ops.long_conv import OP, long_conv
from bakeoff.ops.long_conv.direct import channel_major
from bakeoff.ops.long_conv.op import MOST_TAPS_MAJOR
from bakeoff.ops.long_conv.reference import long_conv as reference
from bakeoff.select import TensorMeta
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks
from bakeoff.select.declare.variants import at
from tests.interp.emulated import emulate, replays

# Relative to the largest element: roundings of operands and of the result.
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
GATED, PLAIN = (True, True, True), (False, False, False)


SHIPPED = dict(rows.TILE)


@pytest.fixture(autouse=True)
def _tiles_of_few_channels(monkeypatch):
    """Tests have few channels; the interpreter takes as long for those of a tile that aren't there."""
    monkeypatch.setattr(rows, "TILE", {"TIMES": 128, "CHANNELS": 8, "num_warps": 4})


@pytest.fixture(params=["toeplitz", "fft"])
def candidate(request, monkeypatch):
    """Each candidate that takes filters of any length in turn."""
    return emulated(request.param, monkeypatch)


@pytest.fixture(params=["toeplitz", "fft", "direct"])
def every(request, monkeypatch):
    """Each candidate in turn."""
    return emulated(request.param, monkeypatch)


def emulated(name, monkeypatch):
    emulate(monkeypatch)
    return OP.by_name[name]


def tensors(B, T, C, L, dtype=torch.float32, optional=GATED, major=False, wide_filter=True):
    """Leaves: u, h, skip, gate_in, gate_out, the last three where `optional` says so."""

    def like_u():
        x = torch.randn(B, C, T).transpose(1, 2) if major else torch.randn(B, T, C)
        return x.to(dtype).requires_grad_()

    kind = torch.float32 if wide_filter else dtype
    h = (torch.randn(C, L) / L**0.5).to(kind).requires_grad_()
    skip = torch.randn(C).to(kind).requires_grad_() if optional[0] else None
    gates = [like_u() if wanted else None for wanted in optional[1:]]
    return [like_u(), h, skip, *gates]


def widened(args):
    return [None if a is None else a.detach().double().requires_grad_() for a in args]


def step(fn, args, dout):
    out = fn(*args, True)
    leaves = [a for a in args if a is not None]
    return (out, *torch.autograd.grad(out, leaves, dout.to(out.dtype)))


def check(candidate, args, dout=None):
    out_like = args[0]
    dout = torch.randn(out_like.shape).to(out_like.dtype) if dout is None else dout
    with Poison() as poison:
        got = step(candidate.implementation, args, dout)
    assert not poison.broken()
    want = step(reference, widened(args), dout)
    bound = BOUND[out_like.dtype]
    for mine, exact in zip(got, want, strict=True):
        assert mine.isfinite().all()
        scale = exact.abs().max().clamp(min=1e-30)
        assert (mine.double() - exact).abs().max() <= bound * scale


SHAPES = [(2, 1, 3, 1), (3, 5, 1, 3), (2, 127, 2, 127), (1, 128, 3, 128), (2, 129, 2, 7), (2, 300, 2, 300)]


@pytest.mark.parametrize("major", [False, True], ids=["last", "major"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_gradient(candidate, shape, major):
    check(candidate, tensors(*shape, major=major))


@pytest.mark.parametrize("optional", [PLAIN, (1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=str)
@pytest.mark.parametrize("major", [False, True], ids=["last", "major"])
def test_every_form(candidate, optional, major):
    check(candidate, tensors(2, 256, 2, 130, optional=optional, major=major))


@pytest.mark.parametrize("wide_filter", [True, False])
def test_half_precision(candidate, wide_filter):
    check(candidate, tensors(3, 260, 3, 260, torch.float16, wide_filter=wide_filter))


@pytest.mark.parametrize("candidate", ["fft"], indirect=True)
def test_bfloat16(candidate):
    """Of rows that need no packing, which Triton's interpreter could not do."""
    check(candidate, tensors(3, 256, 2, 200, torch.bfloat16, PLAIN, major=True))


def test_more_taps_than_positions(candidate):
    args = tensors(2, 20, 3, 300)
    check(candidate, args)
    dh = step(candidate.implementation, args, torch.ones(2, 20, 3))[2]
    assert not dh[:, 20:].any()


def test_more_columns_than_a_tile(candidate):
    check(candidate, tensors(40, 257, 1, 200, optional=PLAIN))


@pytest.mark.parametrize("candidate", ["fft"], indirect=True)
@pytest.mark.parametrize(
    ("T", "L"),
    [
        (512, 513),
        (1000, 900),
        (2048, 2000),
        *(pytest.param(n, n, marks=pytest.mark.exhaustive) for n in (4096, 8192)),
    ],
)
def test_every_plan(candidate, T, L):
    check(candidate, tensors(3, T, 1, L, optional=(True, False, False)))


@pytest.mark.parametrize("candidate", ["fft"], indirect=True)
@pytest.mark.parametrize(
    ("T", "L"), [(300, 300), (1000, 24), (1100, 1100), pytest.param(2100, 2048, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("B", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_rows_longer_than_the_chip_holds(candidate, monkeypatch, B, T, L, dtype):
    """With shared memory for 512 values: 2, 4 and 8 parts, of one row alone some of them."""
    shared = FFTPlan(512, backward=True).shared
    emulate(monkeypatch, shared=shared)
    monkeypatch.setattr(plans, "_PASSES", {n: plans._PASSES[n] for n in (512, 1024)})
    plans._ranked.cache_clear()
    assert choose(T, L, shared).segments > 1 or choose(T, L, shared).windows
    check(candidate, tensors(B, T, 2, L, dtype, optional=(True, False, False), wide_filter=False))


WINDOWS = {
    "256": (1000, 24, 256, 1),
    "256, half of which a filter reaches": (1000, 128, 256, 1),
    "one alone that isn't full": (100, 20, 256, 1),
    "full to the last value": (960, 17, 256, 1),
    "one tap": (600, 1, 256, 1),
    "4096": (4600, 900, 4096, 1),
    "in two segments": (3000, 512, 512, 2),
    "in four segments": (3000, 400, 256, 4),
}
LONG_WINDOWS = ("4096", "in four segments")


@pytest.mark.parametrize("candidate", ["fft"], indirect=True)
@pytest.mark.parametrize(
    ("T", "L", "n", "outer"),
    [
        pytest.param(*plan, id=name, marks=[pytest.mark.exhaustive] if name in LONG_WINDOWS else [])
        for name, plan in WINDOWS.items()
    ],
)
@pytest.mark.parametrize("B", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_windows(candidate, monkeypatch, T, L, n, outer, B):
    def windows(*_, backward=False, **__):
        return FFTPlan(n, outer, half=False, windows=True, backward=backward)

    monkeypatch.setattr(plans, "choose", windows)
    check(candidate, tensors(B, T, 2, L, optional=(True, False, False)))
    check(candidate, tensors(B, T, 2, L, torch.float16, wide_filter=False))
    args = tensors(B, T, 2, L, optional=PLAIN)
    (mine,) = torch.autograd.grad(
        candidate.implementation(*args, True).sum(), args[0]
    )  # h's gradient isn't wanted
    (exact,) = torch.autograd.grad(reference(*args, True).sum(), args[0])
    torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("candidate", ["fft"], indirect=True)
@pytest.mark.parametrize("trouble", [1e30, float("inf"), float("nan")])
def test_windows_do_not_touch_each_other(candidate, trouble):
    """Bit for bit, whatever is in one of them, of an even number: its pair's other row is another window."""
    u, h, *_ = tensors(2, 3000, 2, 100, optional=PLAIN)
    u = u.detach()
    fft = choose(3000, 100, 227 << 10, single=True)
    valid = fft.valid(3000, 100)
    assert fft.windows
    assert 3 * valid < 3000
    other = u.clone()
    other[0, 2 * valid + 5] = trouble
    before, after = (candidate.implementation(x, h, None, None, None, True) for x in (u, other))
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[0, :valid], after[0, :valid])
    assert torch.equal(before[0, 4 * valid :], after[0, 4 * valid :])
    assert (before - after)[0, : 2 * valid].abs().max() <= 2e-6 * before.abs().max()
    assert (abs(trouble) < float("inf")) == bool(after[0, 2 * valid + 5].isfinite().all())


@pytest.mark.parametrize("candidate", ["fft"], indirect=True)
@pytest.mark.parametrize(("T", "L"), [(300, 300), (257, 7), (20, 300), (1, 1)])
def test_rows_longer_than_the_device_takes(candidate, monkeypatch, T, L):
    """Which a graph of torch.compile for every length brings: PyTorch's FFTs run."""
    emulate(monkeypatch, shared=1 << 10)
    assert choose(T, L, 1 << 10) is None
    check(candidate, tensors(3, T, 2, L))
    check(candidate, tensors(3, T, 2, L, torch.float16, optional=(True, False, False)))


@pytest.mark.parametrize("candidate", ["fft"], indirect=True)
def test_a_graph_for_any_length_takes_rows_longer_than_the_device_does(candidate, monkeypatch):
    shared = FFTPlan(256, backward=True).shared
    emulate(monkeypatch, shared=shared)
    assert choose(100, 4200, shared)
    assert choose(4200, 4200, shared) is None
    compiled = torch.compile(
        lambda *given: long_conv(*given[:2], skip=given[2], impl="fft"), dynamic=True, backend="aot_eager"
    )
    for T, stance in ((100, "default"), (4200, "fail_on_recompile")):
        args = tensors(2, T, 2, 4200, optional=(True, False, False))[:3]
        with torch.compiler.set_stance(stance):
            found = step(lambda *given: compiled(*given[:3]), args, torch.ones(2, T, 2))
        want = step(lambda *given: reference(*given[:3]), widened(args), torch.ones(2, T, 2))
        for mine, exact in zip(found, want, strict=True):
            assert (mine - exact).abs().max() <= 2e-6 * exact.abs().max()
    torch._dynamo.reset()


@pytest.mark.parametrize("candidate", ["fft"], indirect=True)
@pytest.mark.parametrize("outer", [1, 4])
@pytest.mark.parametrize("keeps", [False, True], ids=["anew", "kept"])
def test_pairs_with_and_without_the_stored_filter(monkeypatch, candidate, outer, keeps):
    """With more channels than blocks fit, so that a block has several pairs."""
    passes = FFTPlan(512).passes._replace(blocks=(1, 1), stores_spectrum=keeps)
    monkeypatch.setattr(plans, "_PASSES", {512: passes})
    plans._ranked.cache_clear()
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 2)
    check(candidate, tensors(5, 256 * outer, 5, 256 * outer, optional=(True, False, False)))
    plans._ranked.cache_clear()


def test_gradients_that_are_expanded_or_transposed(candidate):
    args = tensors(2, 130, 3, 50)
    check(candidate, args, torch.randn(3).expand(2, 130, 3))
    check(candidate, args, torch.randn(2, 3, 130).transpose(1, 2))
    check(candidate, args, torch.randn(130, 3, 2).permute(2, 0, 1))


def test_inputs_of_any_strides(candidate):
    u = torch.randn(130, 6, 2).permute(2, 0, 1)[..., ::2].requires_grad_()
    h = torch.randn(50, 3).t().requires_grad_()
    check(candidate, [u, h, None, u.detach().clone().requires_grad_(), None])


@settings(max_examples=settings.default.max_examples // 8)
@given(
    B=st.integers(1, 5), T=st.integers(1, 280), C=st.integers(1, 4), L=st.integers(1, 300),
    optional=st.tuples(st.booleans(), st.booleans(), st.booleans()), major=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)  # fmt: skip
def test_shapes(candidate, B, T, C, L, optional, major, dtype):
    check(candidate, tensors(B, T, C, L, dtype, optional, major))


def test_only_the_gradients_that_are_wanted(candidate):
    args = tensors(2, 130, 3, 50)
    for wanted in range(5):
        leaves = [a.detach().requires_grad_(i == wanted) for i, a in enumerate(args)]
        out = candidate.implementation(*leaves, True)
        (mine,) = torch.autograd.grad(out.sum(), leaves[wanted])
        (exact,) = torch.autograd.grad(reference(*args, True).sum(), args[wanted])
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4)


def test_the_future_leaves_the_past_alone(candidate):
    """Bit for bit where blocks of time are apart; an FFT's roundings are everywhere."""
    u, h, *_ = tensors(2, 300, 2, 300, torch.float32, PLAIN)
    later = u.detach().clone()
    later[:, 170:] = 1000.0
    before, after = (candidate.implementation(x, h, None, None, None, True)[:, :170] for x in (u, later))
    assert (before - after).abs().max() <= (0.0 if candidate.name == "toeplitz" else 1e-6 * 1000 * 300**0.5)


def test_sequences_and_channels_do_not_touch_each_other(candidate):
    """However loud one is; a NaN or an infinity ends only its own row, from its block of time on."""
    u, h, *_ = tensors(4, 300, 3, 20, optional=PLAIN)
    u = u.detach()
    want = candidate.implementation(u, h, None, None, None, True)
    for trouble in (1e30, float("inf"), float("nan")):
        other = u.clone()
        other[1, 200, 0] = trouble
        got = candidate.implementation(other, h, None, None, None, True)
        assert (got[[0, 2, 3]] - want[[0, 2, 3]]).abs().max() < 2e-6 * want.abs().max()
        assert torch.equal(got[1, :, 1:], want[1, :, 1:])
        assert (abs(trouble) < float("inf")) == bool(got[1, 200, 0].isfinite())
        if candidate.name == "toeplitz":
            assert torch.equal(got[1, :128], want[1, :128])


def test_an_impulse_returns_the_filter(candidate):
    h = torch.randn(3, 200)
    click = torch.zeros(1, 200, 3)
    click[0, 0] = 1.0
    out = candidate.implementation(click, h, None, None, None, True)[0]
    assert (out - h.t()).abs().max() <= (0.0 if candidate.name == "toeplitz" else 1e-6)


def test_repeats_itself_bit_for_bit(candidate):
    args = tensors(2, 260, 3, 260, torch.float16)
    dout = torch.randn(2, 260, 3).half()
    for first, second in zip(
        step(candidate.implementation, args, dout), step(candidate.implementation, args, dout), strict=True
    ):
        assert torch.equal(first, second)


@pytest.mark.parametrize("tile", [SHIPPED, {"TIMES": 128, "CHANNELS": 8, "num_warps": 4}], ids=str)
def test_packing_and_unpacking_are_inverse(candidate, monkeypatch, tile):
    monkeypatch.setattr(rows, "TILE", tile)
    for x in (torch.randn(3, 70, 5), torch.randn(3, 5, 70).transpose(1, 2), torch.randn(2, 128, 1)):
        plan = Plan({"x": x})
        packed = pack(plan, x)
        values = packed.view()
        assert torch.equal(values[:, :, : x.shape[1]], x.transpose(1, 2))
        assert not values[:, :, x.shape[1] :].any()
        back, square = result_like(x), result_like(x)
        unpack(plan, packed, back, product=square, factor=x)
        assert torch.equal(back, x)
        assert torch.equal(square, x * x)
        assert back.stride() == x.stride()
        square.zero_()
        unpack(plan, packed, None, product=square, factor=x)
        assert torch.equal(square, x * x)


def test_rows_are_not_copied(candidate):
    x = torch.randn(2, 3, 256).transpose(1, 2)
    plan = Plan({"x": x})
    packed = pack(plan, x)
    assert packed.data is x
    assert torch.equal(packed.view(), x.mT)
    assert not plan.launches
    assert empty_rows(plan, x).shape == packed.shape


FEW_THREADS = "forward(channels=8,reads=8,threads=8,blocks=1,pieces=2) "
FEW_THREADS += "backward(channels=2,reads=8,threads=8,blocks=1,pieces=2)"


@pytest.fixture
def direct(monkeypatch):
    """The candidate for few taps, with room for few blocks, so that they have several pieces each."""
    monkeypatch.setattr(channel_major, "_WARP", 4)
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 1)
    return at(emulated("direct", monkeypatch), FEW_THREADS)


@pytest.mark.parametrize("major", [False, True], ids=["last", "major"])
@pytest.mark.parametrize(
    "optional", [pytest.param(PLAIN, marks=pytest.mark.exhaustive), GATED], ids=["plain", "gated"]
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.exhaustive)])
def test_recorded_calls_are_replayed(every, optional, dtype, major):
    """From the third call of a kind on, each way: launches and PyTorch's calls between them, in their order;
    by the planner again where an address isn't aligned."""
    launched = []
    for _ in range(4):
        before = counter.launches()
        check(every, tensors(2, 136, 8, 4, dtype, optional, major, wide_filter=dtype == torch.float32))
        launched.append(counter.launches() - before)
    assert len(set(launched)) == 1
    assert launched[0] > 0
    assert replays(every.implementation) == [True, True]
    args = tensors(2, 136, 8, 4, dtype, optional, major, wide_filter=dtype == torch.float32)
    args[0] = misaligned(args[0].detach()).requires_grad_()
    check(every, args)


def misaligned(x):
    """x one element further on in memory."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].as_strided(x.shape, x.stride())
    return moved.copy_(x)


VARIANTS = [
    ("direct", 4, False), ("direct", 4, True), ("direct", 20, False), ("toeplitz", 70, True),
    ("fft", 24, True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "L", "major"), VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "some", [slice(1, 3), pytest.param(slice(3, None), marks=pytest.mark.exhaustive)], ids=["first", "others"]
)
def test_every_variant(monkeypatch, name, L, major, dtype, some):
    """Also at a length, of channels and of rows, that it wasn't made for."""
    candidate = emulated(name, monkeypatch)
    shapes = [(2, 600, 8, L), (1, 77, 3, L)]
    made_for = tensors(*shapes[0], dtype, major=major)
    found = candidate.implementation.variants(OP.case([*made_for, True]))
    assert min(map(len, found.values())) > 4
    for forward, backward in itertools.zip_longest(found["forward"][some], found["backward"][some]):
        axes = {"forward": forward, "backward": backward}
        bound = at(candidate, text({axis: x for axis, x in axes.items() if x is not None}))
        for shape in shapes:
            check(bound, tensors(*shape, dtype, optional=(1, 0, 1), major=major, wide_filter=False))


def test_the_default_comes_first(every):
    """Bit for bit: what a call without a variant does."""
    args, dout = tensors(2, 150, 8, 4), torch.randn(2, 150, 8)
    found = every.implementation.variants(OP.case([*args, True]))
    first = at(every, text({axis: tilings[0] for axis, tilings in found.items()}))
    for a, b in zip(
        step(every.implementation, args, dout), step(first.implementation, args, dout), strict=True
    ):
        assert torch.equal(a, b)


def few(B, T, C, L, dtype=torch.float32, **kind):
    """`tensors` with as many taps as `direct` can take."""
    return tensors(B, T, C, min(L, MOST_TAPS_MAJOR) if kind["major"] else L, dtype, **kind)


either = pytest.mark.parametrize("major", [False, True], ids=["last", "major"])

DIRECT_SHAPES = [
    (1, 1, 1, 1), (2, 3, 4, 4), (3, 70, 5, 4), (2, 64, 36, 2), (1, 130, 12, 3), (2, 150, 10, 11),
    (2, 100, 3, 64), (9, 64, 24, 17), (1, 33, 2, 50),
]  # fmt: skip


# Every shape with skip and gates, one also without them and with each alone.
DIRECT_FORMS = [
    pytest.param(shape, optional, marks=[] if i == 2 or optional == GATED else [pytest.mark.exhaustive])
    for i, shape in enumerate(DIRECT_SHAPES)
    for optional in (PLAIN, GATED, (1, 0, 0), (0, 1, 0), (0, 0, 1))
]


@pytest.mark.parametrize(("shape", "optional"), DIRECT_FORMS, ids=str)
@either
def test_direct(direct, shape, optional, major):
    check(direct, few(*shape, optional=optional, major=major))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 70, 6, 4), (2, 96, 4, 12), (2, 90, 3, 33)], ids=str)
@either
def test_direct_in_half_precision(direct, shape, dtype, major):
    check(direct, few(*shape, dtype, major=major, wide_filter=dtype == torch.bfloat16))


@pytest.mark.parametrize("wanted", range(5))
@either
def test_direct_gives_each_gradient_alone(direct, wanted, major):
    args = tensors(2, 70, 6, 4, major=major)
    dout = torch.randn(2, 70, 6)
    all_of_them = step(direct.implementation, args, dout)[1:]
    alone = [a.detach().requires_grad_(i == wanted) for i, a in enumerate(args)]
    (found,) = torch.autograd.grad(direct.implementation(*alone, True), alone[wanted], dout)
    assert torch.equal(found, all_of_them[wanted])


def test_direct_on_slices_and_mixed_layouts(direct):
    u, gate_in, gate_out = torch.randn(2, 70, 24).chunk(3, -1)
    args = [u, torch.randn(3, 8).t(), None, gate_in.mT.contiguous().mT, gate_out]
    check(direct, [None if a is None else a.detach().requires_grad_() for a in args])
    check(direct, tensors(2, 70, 6, 5), torch.randn(6).expand(2, 70, 6))
    check(direct, tensors(2, 70, 6, 5), torch.randn(2, 6, 70).mT)
    check(direct, [torch.randn(70, 2, 6).transpose(0, 1).requires_grad_(), *tensors(2, 70, 6, 5)[1:]])


def test_direct_along_rows_as_on_a_gpu(monkeypatch):
    """With whole warps."""
    check(emulated("direct", monkeypatch), tensors(2, 264, 3, 4, major=True))


def padded(B, C, T, row, first, dtype):
    """[B, T, C] whose rows of positions lie `row` values apart, from the value `first` on."""
    x = torch.randn(B * C * row + first).to(dtype)
    return x[first:].view(B, C, row)[..., :T].mT.requires_grad_()


@pytest.mark.parametrize("T", [70, 72])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_direct_along_rows_of_any_alignment(direct, T, dtype):
    for row, first in ((T, 0), (80, 0), (80, 1), (T + 1, 0)):
        u, gate = (padded(2, 5, T, row, first, dtype) for _ in range(2))
        assert (u.stride(2), u.data_ptr() % 16) == (row, first * dtype.itemsize)
        check(direct, [u, *tensors(2, T, 5, 4, major=True)[1:3], None, gate])


def test_direct_along_rows_in_any_order(direct):
    rest = tensors(2, 72, 6, 5, major=True)[1:]
    for u in (
        torch.randn(6, 2, 72).permute(1, 2, 0),  # batches inside
        torch.randn(6, 72).t().expand(2, 72, 6),
        torch.randn(2, 72, 1).expand(2, 72, 6),
        torch.randn(4, 18, 72).mT[::2, :, ::3],
    ):
        assert 1 in u.stride()[1:]
        check(direct, [u.detach().requires_grad_(), *rest])
    one = torch.randn(2, 72, 1)
    check(direct, [one.requires_grad_(), *tensors(2, 72, 1, 5, major=True)[1:]])


def test_direct_along_rows_of_mixed_layouts(direct):
    args = tensors(2, 72, 6, 5, major=True)
    args[3] = torch.randn(2, 72, 6).requires_grad_()
    for dout in (None, torch.randn(6).expand(2, 72, 6), torch.randn(2, 72, 1).expand(2, 72, 6)):
        check(direct, args, dout)


def test_direct_returns_the_layout_it_is_given(direct):
    for x in (torch.randn(2, 16, 3), torch.randn(2, 3, 16).mT, torch.randn(3, 2, 16).permute(1, 2, 0)):
        assert direct.implementation(x, torch.randn(3, 4), None, None, None, True).stride() == x.stride()


@either
def test_direct_keeps_what_is_not_finite_within_its_taps(direct, major):
    u = torch.randn(2, 3, 90).mT if major else torch.randn(2, 90, 3)
    h = torch.randn(3, 7)
    want = direct.implementation(u, h, None, None, None, True)
    for trouble in (float("inf"), float("nan")):
        other = u.clone()
        other[1, 40, 0] = trouble
        got = direct.implementation(other, h, None, None, None, True)
        touched = torch.zeros(2, 90, 3, dtype=torch.bool)
        touched[1, 40:47, 0] = True
        assert torch.equal(got.isfinite(), ~touched)
        assert torch.equal(got[~touched], want[~touched])


@pytest.mark.parametrize(
    "optional",
    [GATED, (0, 0, 1), *(pytest.param(some, marks=pytest.mark.exhaustive) for some in (PLAIN, (0, 1, 0)))],
    ids=str,
)
def test_compiled_calls_equal_eager_ones(every, optional):
    """Each gradient alone, too: what isn't kept or wanted is an empty tensor inside a graph."""
    args = tensors(2, 40, 6, 4, optional=optional)
    places = [i for i, a in enumerate(args) if a is not None]
    compiled = torch.compile(lambda *given: every.implementation(*given, True), backend="aot_eager")
    for wanted in [places, *([place] for place in places)]:
        found = []
        for fn in (lambda *given: every.implementation(*given, True), compiled):
            given = [
                None if a is None else a.detach().requires_grad_(i in wanted) for i, a in enumerate(args)
            ]
            out = fn(*given)
            found.append((out, *torch.autograd.grad(out.square().sum(), [given[i] for i in wanted])))
        for mine, theirs in zip(*found, strict=True):
            assert torch.equal(mine, theirs)
    torch._dynamo.reset()


def test_direct_on_overlapping_windows(direct):
    """Whose strides a result can't have."""
    u = torch.randn(2, 32).unfold(1, 24, 1)
    check(direct, [u.detach().requires_grad_(), *tensors(2, 9, 24, 4)[1:]])


def test_results_whose_offsets_fit_into_an_int():
    batch_inside = torch.empty(1 << 15, 64, 512, device="meta").transpose(0, 1)
    assert result_like(batch_inside).stride() == (512, 1 << 15, 1)
    batch_inside = torch.empty(1 << 15, 128, 512, device="meta").transpose(0, 1)
    assert result_like(batch_inside).is_contiguous()


def test_taps_beyond_the_sequence_have_no_effect(every):
    u, h = torch.randn(1, 3, 2), torch.randn(2, 12)
    want = reference(u, h)
    h[:, 3:] = float("inf")
    for method in (every, OP.by_name["eager"]):
        for taps in (12, 6):
            got = method.implementation(u, h[:, :taps], None, None, None, True)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@either
def test_direct_passes_the_contest_verification(direct, major):
    for args in (tensors(9, 70, 8, 4, torch.float16, major=major), few(9, 140, 8, 50, major=major)):
        case = OP.case([*args, True])
        _, deterministic = verify(OP, direct, list(yardsticks(OP, case)))
        assert deterministic


def test_direct_leaves_to_others_what_it_has_no_kernel_for(direct):
    with pytest.raises(Unsupported, match="channels or positions side by side"):
        long_conv(torch.randn(1, 80, 4)[..., ::2], torch.randn(2, 4), impl="direct")
    with pytest.raises(Unsupported, match="at most 64 taps, not 65"):
        long_conv(torch.randn(1, 80, 2), torch.randn(2, 65), impl="direct")
    with pytest.raises(Unsupported, match="at most 32 taps where positions lie side by side, not 33"):
        long_conv(torch.randn(1, 2, 80).mT, torch.randn(2, 33), impl="direct")
    T, C = 1 << 16, 1 << 15
    last, many = TensorMeta.dense((1, T, C), torch.bfloat16), 1 << 15
    batches_inside = TensorMeta((many, T, 2), torch.bfloat16, (T, 1, many * T))
    for huge in (last, batches_inside):
        h = TensorMeta.dense((huge.shape[2], 4), torch.float32)
        assert direct.reasons(OP.cases()[0].replace(u=huge, h=h)) == ["the sequences are too large"]


@pytest.mark.parametrize(
    "args",
    [
        tensors(9, 256, 8, 256, torch.float16, PLAIN, major=True, wide_filter=False),
        pytest.param(tensors(9, 256, 8, 256, torch.float16, PLAIN), marks=pytest.mark.exhaustive),
        tensors(9, 140, 8, 50),
    ],
    ids=["major", "wide filter", "gated float32"],
)
def test_passes_the_contest_verification(candidate, args):
    """Against eager's own error, on ordinary and hostile inputs."""
    case = OP.case([*args, True])
    _, deterministic = verify(OP, candidate, list(yardsticks(OP, case)))
    assert deterministic


def test_says_what_it_can_not_do(candidate):
    u, h = torch.randn(1, 8, 2), torch.randn(2, 3)
    with pytest.raises(Unsupported, match="only causal filters"):
        long_conv(u, h, causal=False, impl=candidate.name)
    with pytest.raises(Unsupported, match="no float64"):
        long_conv(u.double(), h, impl=candidate.name)
    with pytest.raises(Unsupported, match="gates must have u's dtype"):
        long_conv(u.half(), h.half(), gate_in=u, impl=candidate.name)


def test_differentiating_twice_is_refused(candidate):
    args = tensors(1, 9, 2, 4)
    out = candidate.implementation(*args, True)
    (du,) = torch.autograd.grad(out.sum(), args[0], create_graph=True)
    with pytest.raises(RuntimeError, match="can't be differentiated twice"):
        du.sum().backward()
