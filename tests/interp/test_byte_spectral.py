"""byte_spectral's candidates against float64, interpreted where they are Triton; the op's laws and checks."""

import doctest
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bakeoff.errors import Unsupported
from bakeoff.kernels import variants
from bakeoff.kernels.counter import launches
from bakeoff.ops.byte_spectral import OP, byte_spectral, kernels
from bakeoff.ops.byte_spectral.plain import eager, loop, rfft
from bakeoff.ops.byte_spectral.reference import EPS
from bakeoff.ops.byte_spectral.reference import byte_spectral as reference
from bakeoff.ops.byte_spectral.triton import byte_spectral as triton_candidate
from bakeoff.select import Case, TensorMeta
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks

KINDS = ("magnitude", "log", "complex")


def feature_count(C, K, features):
    return C * K * (2 if features == "complex" else 1)


def arguments(B, T, *, C=1, W=9, K=5, D=6, features="magnitude", dtype=torch.float32, causal=True, bias=True):
    """The op's positional arguments with leaves that want gradients; K None is the transform's own grid."""
    ids = torch.randint(256, (B, T), dtype=torch.uint8)
    bins = (W if causal else T) // 2 + 1 if K is None else K
    F = feature_count(C, bins, features)
    tensors = {
        "table": torch.randn(256, C),
        "window": torch.randn(W) if causal else None,
        "omega": None if K is None else torch.rand(K) * math.pi,
        "weight": None if D is None else torch.randn(F, D).to(dtype),
        "bias": torch.randn(D).to(dtype) if D is not None and bias else None,
    }
    leaves = {name: t if t is None else t.requires_grad_() for name, t in tensors.items()}
    return [ids, leaves["table"], leaves["window"], leaves["omega"], features, leaves["weight"],
            leaves["bias"], causal]  # fmt: skip


def widened(args):
    return [
        a.detach().double().requires_grad_(a.requires_grad)
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in args
    ]


def results(call, args, dy):
    out = call(*args)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, leaves, dy.to(out.dtype))]


def assert_exact(call, args, bound=3e-6):
    """Output and gradients are float64's to `bound` of their size; inputs stay, no fence is broken."""
    dy = torch.randn(reference(*args).shape)
    before = [a.detach().clone() for a in args if isinstance(a, torch.Tensor)]
    with Poison() as poison:
        got = results(call, args, dy)
    assert not poison.broken()
    after = [a for a in args if isinstance(a, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for mine, truth in zip(got, results(reference, widened(args), dy), strict=True):
        assert mine.shape == truth.shape
        assert (mine - truth).abs().max() <= bound * truth.abs().max() + 1e-12
    return got


TINY = {"forward": kernels.ForwardTiling(16, 16, 4, 1), "backward": kernels.BackwardTiling(16, 16, 4, 1)}


@pytest.fixture(params=["production", "tiny"])
def tiled(request, monkeypatch):
    """The candidate with production tiles, and with ones so small that positions, channels and sums all have
    several."""
    if request.param == "production":
        return triton_candidate
    monkeypatch.setattr(kernels, "ROWS", 1)
    return triton_candidate.bind(variants.text(TINY))


SHAPES = [
    {"B": 2, "T": 37, "C": 2, "W": 9, "K": 5, "D": 20},
    {"B": 1, "T": 70, "W": 33, "K": 17, "D": 7},
    {"B": 2, "T": 5, "C": 3, "W": 20, "K": None, "D": 33},
    {"B": 2, "T": 40, "W": 16, "K": None, "D": None},
    {"B": 3, "T": 1, "W": 1, "K": 1, "D": 1},
]


@pytest.mark.parametrize("features", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_forward_and_every_gradient(shape, features, tiled):
    assert_exact(tiled, arguments(**shape, features=features))


@pytest.mark.parametrize(
    "features",
    [pytest.param(kind, marks=[] if kind == "log" else [pytest.mark.exhaustive]) for kind in KINDS],
)
def test_every_variant_is_as_exact_as_the_default(features):
    args = arguments(1, 70, C=2, W=20, K=7, D=70, features=features)
    axes = triton_candidate.variants(OP.case(args))
    for axis, tilings in axes.items():
        for tiling in tilings[1:]:
            assert_exact(triton_candidate.bind(variants.text({axis: tiling})), args)


@pytest.mark.parametrize("features", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_candidates(shape, features):
    args = arguments(**shape, features=features)
    for call in (eager, loop, *([rfft] if shape["K"] is None else [])):
        assert_exact(call, args, 2e-5)  # float32 transforms: their magnitudes near 0 amplify rounding


@pytest.mark.parametrize("D", [None, 6])
@pytest.mark.parametrize("K", [None, 5])
@pytest.mark.parametrize("T", [1, 12, 13])
def test_whole_row_is_the_double_sum(T, K, D):
    """Every position against every byte, and PyTorch's transform, which is of the same row backwards."""
    args = arguments(2, T, C=2, K=K, D=D, features="complex", causal=False)
    for call in (eager, *([rfft] if K is None else [])):
        assert_exact(call, args, 2e-5)
    ids, table, _, omega, _, weight, bias, _ = widened(args)
    bins = T // 2 + 1 if K is None else K
    rates = torch.arange(bins).double() * 2 * math.pi / T if omega is None else omega
    distance = (torch.arange(T)[:, None] - torch.arange(T)).double()
    turn = torch.exp(-1j * rates * distance[:, :, None])
    X = torch.einsum("tsk,bsc->btck", turn, table[ids.long()].to(torch.complex128))
    want = torch.view_as_real(X).flatten(2)
    want = want if weight is None else want @ weight + bias
    torch.testing.assert_close(reference(*widened(args)), want)
    if K is None and D is None:
        spectrum = torch.fft.rfft(table[ids.long()], dim=1).conj().transpose(1, 2)[:, None]
        torch.testing.assert_close(X, spectrum * turn[:, 0][:, None])


# Laws of the op, of every implementation that runs here.

IMPLEMENTATIONS = pytest.mark.parametrize("fn", [triton_candidate, eager, loop, reference])


@IMPLEMENTATIONS
def test_is_the_transform_of_the_last_bytes(fn):
    """An independent formulation: NumPy's way, one window cut and transformed by hand."""
    ids, table, window, _, *_ = args = arguments(1, 40, W=16, K=None, D=None, features="complex")
    out = fn(*args).detach().unflatten(-1, (9, 2))
    for t in (0, 3, 15, 39):
        strip = torch.zeros(16, dtype=torch.float64)
        past = table.detach().double()[ids[0, : t + 1].flip(0)[:16].long(), 0]
        strip[: len(past)] = past
        want = torch.view_as_real(torch.fft.rfft(strip * window.detach().double()))
        torch.testing.assert_close(out[0, t].double(), want, rtol=1e-5, atol=1e-5)


@IMPLEMENTATIONS
@pytest.mark.parametrize("features", KINDS)
def test_the_future_is_not_seen(fn, features):
    args = arguments(2, 90, W=24, K=7, D=5, features=features)
    with torch.no_grad():
        out = fn(*args)
        for t in (0, 30, 63, 64, 88):
            edited = args[0].clone()
            edited[:, t + 1 :] = torch.randint(256, edited[:, t + 1 :].shape, dtype=torch.uint8)
            again = fn(edited, *args[1:])
            assert torch.equal(again[:, : t + 1], out[:, : t + 1])
            assert not torch.equal(again, out)


@IMPLEMENTATIONS
def test_bytes_older_than_the_window_are_forgotten(fn):
    args = arguments(1, 60, W=10, K=4, D=3)
    edited = args[0].clone()
    edited[:, :20] += 1
    with torch.no_grad():
        a, b = fn(*args), fn(edited, *args[1:])
    assert (a[:, :29] != b[:, :29]).any(-1).all()
    torch.testing.assert_close(a[:, 29:], b[:, 29:], rtol=0, atol=0)


@IMPLEMENTATIONS
def test_pieces_with_their_past_equal_the_whole(fn):
    args = arguments(2, 100, W=16, K=6, D=5)
    with torch.no_grad():
        whole = fn(*args)
        piece = fn(args[0][:, 41:80], *args[1:])
    torch.testing.assert_close(piece[:, 15:], whole[:, 56:80], rtol=1e-5, atol=1e-5)


@IMPLEMENTATIONS
def test_linear_in_the_table_and_in_the_window(fn):
    args = arguments(2, 30, C=2, D=None, features="complex")
    other = torch.randn(256, 2)
    with torch.no_grad():
        both, first = fn(args[0], args[1] + 3 * other, *args[2:]), fn(*args)
        torch.testing.assert_close(both, first + 3 * fn(args[0], other, *args[2:]), rtol=1e-4, atol=1e-4)
        half = fn(args[0], args[1], args[2] / 2, *args[3:])
    torch.testing.assert_close(half, first / 2)


@IMPLEMENTATIONS
def test_every_bin_has_a_magnitude_of_its_own(fn):
    """A phase that does not vary inside the sum gives |sum of bytes| in every bin."""
    args = arguments(1, 40, W=16, K=None, D=None)
    with torch.no_grad():
        spectrum = fn(*args)[0, 15:]
    for a, b in itertools.combinations(range(9), 2):
        assert (spectrum[:, a] - spectrum[:, b]).abs().min() > 1e-5
    period = torch.tensor([list(b"abcd" * 8)], dtype=torch.uint8)
    flat = torch.arange(256.0)[:, None]
    with torch.no_grad():
        found = fn(period, flat, torch.ones(16), None, "magnitude", None, None, True)[0, -1]
    assert [k for k in range(1, 9) if found[k] > 1] == [4, 8]  # a period of 4 in a window of 16


@pytest.mark.parametrize("call", [eager, reference])
def test_positions_of_a_whole_row_differ(call):
    """A row-wide transform without its phase is the same at every position."""
    out = call(*arguments(1, 24, K=5, D=None, features="complex", causal=False)).detach()[0]
    for s, t in itertools.combinations(range(24), 2):
        assert (out[s] - out[t]).abs().max() > 1e-3
    size = out.unflatten(-1, (5, 2)).norm(dim=-1)
    torch.testing.assert_close(size, size[:1].expand_as(size), rtol=1e-4, atol=1e-4)


@IMPLEMENTATIONS
def test_magnitude_of_nothing_is_zero_and_smooth(fn):
    args = arguments(1, 20, D=None)
    args[1] = torch.zeros(256, 1, requires_grad=True)
    out = fn(*args)
    assert torch.equal(out, torch.zeros_like(out))
    gradients = torch.autograd.grad(out.sum(), (args[1], args[2], args[3]))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)
    args[1] = torch.full((256, 1), 1e-3)
    args[2] = torch.tensor([1.0])
    with torch.no_grad():
        one = fn(*args)
    torch.testing.assert_close(one, torch.full_like(one, math.sqrt(2e-6) - math.sqrt(EPS)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("fn", [triton_candidate, eager])
def test_far_angles_keep_their_digits(fn):
    """omega of thousands of turns: a phase formed in float32 would be wrong in the second decimal."""
    args = arguments(1, 70, W=64, K=8, D=None, features="complex")
    args[3] = (torch.rand(8) * 30000).requires_grad_()
    assert_exact(fn, args)


def test_gradcheck_of_the_reference():
    for features, causal in [*((kind, True) for kind in KINDS), ("complex", False)]:
        args = arguments(1, 5, C=2, W=3, K=2, D=2, features=features, causal=causal)
        args[0] = torch.tensor([[0, 1, 2, 1, 0]], dtype=torch.uint8)
        wide = widened(args)
        few = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
        rest = torch.zeros(253, 2, dtype=torch.float64)
        leaves = [few, *[a for a in wide[2:] if isinstance(a, torch.Tensor)]]

        def call(table, *others, wide=wide, rest=rest):
            given_leaves = iter(others)
            filled = [next(given_leaves) if isinstance(a, torch.Tensor) else a for a in wide[2:]]
            return reference(wide[0], torch.cat((table, rest)), *filled)

        assert torch.autograd.gradcheck(call, leaves)


# What the Triton candidate does with unusual inputs.


@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("fn", [triton_candidate, eager, reference])
def test_empty(B, T, fn):
    args = arguments(B, T)
    out = fn(*args)
    assert out.shape == (B, T, 6)
    for gradient in torch.autograd.grad(out.sum(), [args[i] for i in (1, 2, 3, 5, 6)]):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_layouts():
    args = arguments(3, 20)
    dense = results(triton_candidate, args, torch.ones(3, 20, 6))
    apart = torch.empty(3, 50, dtype=torch.uint8)
    apart[:, 7:27] = args[0]
    turned = args[0].t().contiguous().t()
    for ids in (apart[:, 7:27], turned):
        for a, b in zip(
            results(triton_candidate, [ids, *args[1:]], torch.ones(3, 20, 6)), dense, strict=True
        ):
            assert torch.equal(a, b)
    spread = [torch.stack((a, a), -1)[..., 0] if isinstance(a, torch.Tensor) else a for a in args[1:]]
    assert torch.equal(triton_candidate(args[0], *spread).detach(), dense[0])
    expanded = torch.randn(6).expand(3, 20, 6)
    for a, b in zip(
        results(triton_candidate, args, expanded),
        results(triton_candidate, args, expanded.contiguous()),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("wanted", [*itertools.combinations(range(5), 1), (0, 2), (1, 4), (0, 1, 2), (3, 4)])
def test_only_what_is_wanted_is_computed(wanted):
    args = arguments(2, 20)
    places = (1, 2, 3, 5, 6)
    for i, place in enumerate(places):
        args[place] = args[place].detach().requires_grad_(i in wanted)
    before = launches()
    assert_exact(triton_candidate, args)
    assert launches() - before == 3  # forward, partial sums, sums


def test_no_gradient_no_node():
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments(1, 9)]
    assert triton_candidate(*args).grad_fn is None
    with torch.no_grad():
        assert triton_candidate(*arguments(1, 9)).grad_fn is None


def test_differentiating_twice_names_the_way_out():
    args = arguments(1, 9)
    (slope,) = torch.autograd.grad(triton_candidate(*args).sum(), args[1], create_graph=True)
    with pytest.raises(RuntimeError, match="impl='eager'"):
        torch.autograd.grad(slope.sum(), args[2])
    (slope,) = torch.autograd.grad(byte_spectral(*args[:4], weight=args[5], impl="eager").sum(), args[1],
                                   create_graph=True)  # fmt: skip
    assert torch.autograd.grad(slope.sum(), args[2])[0].abs().sum() > 0


def test_half_precision_weight_and_table():
    args = arguments(2, 20, dtype=torch.float16)
    out = byte_spectral(*args[:4], weight=args[5], bias=args[6], impl="triton")
    assert out.dtype == torch.float16
    plain = byte_spectral(*args[:4], weight=args[5], bias=args[6], impl="eager")
    torch.testing.assert_close(out, plain, rtol=2e-3, atol=2e-2)
    out = byte_spectral(args[0], args[1].half(), *args[2:4], impl="triton")
    assert out.dtype == torch.float16
    assert byte_spectral(args[0], args[1].half(), *args[2:4], impl="eager").dtype == torch.float16


def test_autocast_casts_the_weight_and_nothing_else():
    args = arguments(2, 20)
    want = byte_spectral(*args[:4], weight=args[5].bfloat16(), bias=args[6], impl="eager")
    alone = byte_spectral(*args[:4], impl="eager")
    with torch.autocast("cpu", torch.bfloat16):
        out = byte_spectral(*args[:4], weight=args[5], bias=args[6], impl="eager")
        assert torch.equal(byte_spectral(*args[:4], impl="eager"), alone)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want)


@settings(max_examples=settings.default.max_examples // 7)
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 80),
    C=st.integers(1, 3),
    W=st.integers(1, 40),
    K=st.one_of(st.none(), st.integers(1, 20)),
    D=st.one_of(st.none(), st.integers(1, 40)),
    features=st.sampled_from(KINDS),
    bias=st.booleans(),
)
def test_any_shape(B, T, C, W, K, D, features, bias):
    assert_exact(
        triton_candidate, arguments(B, T, C=C, W=W, K=K, D=D, features=features, bias=bias), bound=1e-5
    )


# The declaration.


def shrunk(case):
    """The case on the CPU with few positions and channels, in the dtypes the interpreter knows."""
    B, T = min(case.ids.shape[0], 2), min(case.ids.shape[1], 70)
    args = dict(case.args)
    args["ids"] = TensorMeta((B, T), torch.uint8, (case.ids.stride[0] // case.ids.shape[1] * T, 1))
    for name, meta in case.tensors.items():
        if name != "ids":
            dtype = torch.float16 if meta.dtype == torch.bfloat16 else meta.dtype
            shape = (*meta.shape[:-1], min(meta.shape[-1], 40)) if name in ("weight", "bias") else meta.shape
            args[name] = TensorMeta.dense(shape, dtype, grad=meta.requires_grad)
    return Case(args, "cpu", case.name)


# Those that differ on the CPU; more channels are only more tiles, which other tests have.
SHRUNK = {str(small.args): small for small in map(shrunk, OP.cases()) if small.causal}
SHRUNK = {key: small for key, small in SHRUNK.items() if small.name not in ("4x8192 D512", "strided ids")}


# One of every kind of features and of dtypes; the others are their combinations.
FEW = ("16x1024 log", "16x1024 complex", "16x1024 fp32", "odd")


@pytest.mark.parametrize(
    "small",
    [
        pytest.param(small, id=small.name, marks=[] if small.name in FEW else [pytest.mark.exhaustive])
        for small in SHRUNK.values()
    ],
)
def test_the_grid_passes_the_contest_verification(small):
    triton = OP.candidate("triton")
    assert triton.reasons(small) == []
    _, deterministic = verify(OP, triton, yardsticks(OP, small))
    assert deterministic


GOOD = {"table": torch.zeros(256, 2), "window": torch.ones(8), "omega": torch.ones(3)}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"ids": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, r"ids\.to\(torch\.uint8\)"),
        ({"ids": torch.zeros(2, 3)}, TypeError, r"ids\.to\(torch\.uint8\)"),
        (
            {"ids": torch.zeros(3, dtype=torch.uint8)},
            ValueError,
            r"shape \(3,\), expected \[B, T\]; one row is ids\[None\]",
        ),
        ({"table": torch.zeros(255, 2)}, ValueError, r"\[256, C\] with C >= 1; one row a byte"),
        ({"table": torch.zeros(256)}, ValueError, r"\[256, C\]"),
        ({"table": torch.zeros(256, 0)}, ValueError, "with C >= 1"),
        ({"table": torch.zeros(256, 2, dtype=torch.int32)}, TypeError, "floating point"),
        ({"window": None}, ValueError, "causal form needs one"),
        ({"window": torch.zeros(0)}, ValueError, "with W >= 1"),
        ({"omega": torch.zeros(2, 2)}, ValueError, r"expected \[K\] with K >= 1"),
        ({"features": "power"}, ValueError, "one of magnitude, log, complex"),
        ({"causal": 1}, TypeError, "causal is 1"),
        ({"causal": False}, ValueError, "takes no window"),
        ({"causal": False, "window": None}, ValueError, "the same magnitudes.*features='complex'"),
        ({"bias": torch.zeros(4)}, ValueError, "weight is None"),
        ({"weight": torch.zeros(4, 6)}, ValueError, r"expected \[6, D\].*weight\.t\(\)"),
        ({"weight": torch.zeros(6, 0)}, ValueError, r"with D >= 1; weight\.t\(\)"),
        ({"weight": torch.zeros(6, 4), "bias": torch.zeros(5)}, ValueError, "with D = 4 as of weight"),
    ],
)
def test_bad_arguments_name_the_fix(change, error, text):
    call = {"ids": torch.zeros(2, 3, dtype=torch.uint8), **GOOD} | change
    with pytest.raises(error, match=text):
        byte_spectral(**call)


def test_what_others_leave_to_eager():
    ids = torch.zeros(1, 4, dtype=torch.uint8)
    with pytest.raises(Unsupported, match="omega is given"):
        byte_spectral(ids, **GOOD, impl="rfft")
    with pytest.raises(Unsupported, match="whole row is two matrix products"):
        byte_spectral(ids, GOOD["table"], None, features="complex", causal=False, impl="triton")
    with pytest.raises(Unsupported, match="up to 64, not 65 and 3"):
        byte_spectral(ids, GOOD["table"], torch.ones(65), GOOD["omega"], impl="triton")
    with pytest.raises(Unsupported, match="float64 table"):
        byte_spectral(ids, GOOD["table"].double(), *list(GOOD.values())[1:], impl="triton")
    with pytest.raises(Unsupported, match="baseline"):
        byte_spectral(ids.expand(1, 4).repeat(1, 300), **GOOD, impl="loop")
    wide = byte_spectral(ids, GOOD["table"].double(), GOOD["window"], GOOD["omega"])
    assert wide.dtype == torch.float64


def test_buckets_and_heuristic():
    case = OP.case(arguments(3, 100))
    assert OP.bucket(case).ids.shape == (3, 112)
    row = OP.case(arguments(3, 100, K=None, features="complex", causal=False))
    assert OP.bucket(row).ids.shape == (3, 100)  # F depends on T
    for case in OP.cases():
        assert OP.heuristic(case, "graph") == ("triton" if case.causal else "eager")


def test_opcheck():
    for D, K in ((6, 5), (None, None)):
        args = arguments(2, 20, D=D, K=K)
        torch.library.opcheck(triton_candidate.traced.forward, (*args, True, ""))
        ids, table, window, omega, features, weight, bias, causal = (
            a.detach() if isinstance(a, torch.Tensor) else a for a in args
        )
        dout = torch.randn(reference(*args).shape)
        saved, likes = (ids, table, window, omega, weight), (table, window, omega, weight, bias)
        wanted = [True, True, K is not None, D is not None, False]
        torch.library.opcheck(
            triton_candidate.traced.backward, (dout, *saved, features, causal, *likes, wanted, "")
        )


def test_compiles_whole_with_any_length():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=count, fullgraph=True)
    def step(ids, table, window, omega, weight, bias):
        return byte_spectral(ids, table, window, omega, weight=weight, bias=bias, impl="triton").sum()

    for length in (4, 19, 33):
        args = arguments(2, length)
        leaves = [args[i] for i in (1, 2, 3, 5, 6)]
        got = torch.autograd.grad(step(args[0], *leaves), leaves)
        want = torch.autograd.grad(triton_candidate(*args).sum(), leaves)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
    assert len(graphs) == 2  # one for the first length, one for all others


def test_documented_example():
    (example,) = doctest.DocTestFinder().find(byte_spectral, globs={"byte_spectral": byte_spectral})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
