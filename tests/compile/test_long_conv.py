"""Every long_conv kernel in its production tilings, built for GPUs that need not be here."""

import re

import pytest
import torch

from aot import SHARED_LIMIT, TARGETS, Built, build
from bakeoff.channel_major import kernels as rows_kernels
from bakeoff.channel_major.rows import TILE
from bakeoff.fft_conv import plans
from bakeoff.fft_conv.launch import SOURCE
from bakeoff.fft_conv.plans import FFTPlan, choose
from bakeoff.kernels.cuda import options
from bakeoff.ops.long_conv.direct import channel_last, channel_major, tilings
from bakeoff.ops.long_conv.op import MOST_TAPS_MAJOR, OP
from bakeoff.ops.long_conv.toeplitz import kernels as toeplitz
from nvrtc import build as build_cuda

KERNELS = {False: "convolve", True: "differentiate"}
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
MATRIX = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
TABLES = {"inner", "outer", "dh", "dskip", "skip", "h"}
SIZES = {"LAGS", "ONE", "tiles", "spans", "W8"}


def compiled(kernel, dtype, target, constants, **options) -> Built:
    """`kernel` with data of `dtype`, float32 filters and sums."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            continue
        size = name in SIZES or (len(name) == 1 and name.isupper()) or re.search(r"_[btcl]8?$", name)
        if name == "ONE":
            signature[name] = "fp32"
        elif size:
            signature[name] = "i32"
        else:
            signature[name] = "*fp32" if name in TABLES else TYPES[dtype]
    return build(kernel, signature, constants, target, **options)


def convolution(columns, dtype, target, *, backwards=False, parts=1, tiling=None) -> Built:
    numbers = toeplitz.products(columns, dtype, tiling, target == "gfx942")
    options = {name: numbers.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"BACKWARDS": backwards, "PARTS": parts, **numbers}
    return compiled(toeplitz._convolve, dtype, target, constants, **options)


def built_direct(module, macros, target, backward) -> Built:
    """The kernel of `direct` for such data."""
    built = build_cuda(module.SOURCE, [*options(macros)], target)
    assert set(built) == {KERNELS[backward]}
    return built[KERNELS[backward]]


@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("sm_")])
@pytest.mark.parametrize("gates", [0, 3], ids=["plain", "gated"])
@pytest.mark.parametrize(
    "taps", [4, 64, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 16, 32))]
)
@pytest.mark.parametrize(
    "dtypes",
    [(torch.bfloat16, torch.float32), pytest.param((torch.float16,), marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_direct_stays_in_registers(dtypes, taps, gates, target):
    """But for a few bytes of local memory a thread."""
    for backward in (False, True):
        for dtype in dtypes:
            tiling = tilings.channel_last(taps, gates, dtype.itemsize, backward)[0]
            macros = channel_last.macros(tiling, taps, gates, dtype, backward=backward)
            built = built_direct(channel_last, macros, target, backward)
            assert built.spills <= 128
            width = {2: "u16", 4: "u32", 8: "v2.u32", 16: "v4.u32"}[tiling.channels * dtype.itemsize]
            if tiling.channels > 1:  # every value by accesses of so many channels
                stores = set(re.findall(r"st\.global\.(\S+)", built.assembly)) - {"f32"}
                assert stores - ({"u32"} if backward else set()) <= {width}
                assert re.search(rf"ld\.global\.{width}", built.assembly)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("gates", [0, 3], ids=["plain", "gated"])
def test_variants_of_direct_stay_in_registers(gates, backward):
    dtype = torch.bfloat16
    for tiling in tilings.channel_last(4, gates, dtype.itemsize, backward):
        macros = channel_last.macros(tiling, 4, gates, dtype, backward=backward)
        assert built_direct(channel_last, macros, "sm_90", backward).spills <= 32
    for tiling in tilings.channel_major(4, gates, True, backward):
        macros = channel_major.macros(tiling, 32, True, 4, gates, dtype, backward=backward)
        assert built_direct(channel_major, macros, "sm_90", backward).spills <= 32


@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("sm_")])
@pytest.mark.parametrize("gates", [0, 3], ids=["plain", "gated"])
@pytest.mark.parametrize(
    "taps", [4, MOST_TAPS_MAJOR, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 8, 16))]
)
def test_direct_along_time_stays_in_registers(taps, gates, target):
    """But for a few bytes of local memory a thread."""
    for backward in (False, True):
        for wide in (False, True):
            tiling = tilings.channel_major(taps, gates, wide, backward)[0]
            for dtype in (torch.bfloat16, torch.float32):
                macros = channel_major.macros(tiling, 32, wide, taps, gates, dtype, backward=backward)
                built = built_direct(channel_major, macros, target, backward)
                assert built.spills <= (192 if taps == MOST_TAPS_MAJOR else 128)
                stores = set(re.findall(r"st\.global\.(\S+)", built.assembly)) - {"f32", "u32"}
                assert not wide or stores == {"v4.u32"}


@pytest.mark.parametrize("lanes", [1, 8])
def test_direct_on_short_sequences(lanes):
    for backward in (False, True):
        tiling = tilings.channel_major(4, 3, True, backward)[0]
        macros = channel_major.macros(tiling, lanes, True, 4, 3, torch.float16, backward=backward)
        assert built_direct(channel_major, macros, "sm_90", backward).spills <= 32


@pytest.mark.kernel(of=lambda backwards, **_: backwards)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [16, 64, 512])
@pytest.mark.parametrize("backwards", [False, True])
def test_products_run_on_tensor_cores_from_wide_loads(columns, target, backwards):
    built = convolution(columns, torch.bfloat16, target, backwards=backwards)
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]
    assert MATRIX[target] in built.assembly
    if target.startswith("sm_"):
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*, (0x\w+|\d+),", built.assembly)
        assert copies
        assert all(int(size, 0) == 16 for size in copies)  # every row of a Toeplitz matrix, too
        assert set(built.stores) == {128}


@pytest.mark.parametrize("target", TARGETS)
def test_filters_of_a_wider_dtype(target):
    built = convolution(512, torch.bfloat16, target, parts=2)
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]


@pytest.mark.parametrize("target", TARGETS)
def test_float32(target):
    built = convolution(512, torch.float32, target)
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_filters_gradient(target, dtype):
    built = correlation(dtype, target)
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]
    if target != "gfx942" or dtype != torch.float32:
        assert MATRIX[target] in built.assembly


def correlation(dtype, target, tiling=None) -> Built:
    numbers = toeplitz.correlation(dtype, tiling, target == "gfx942")
    options = {name: numbers.pop(name) for name in ("num_warps", "num_stages")}
    return compiled(toeplitz._correlate, dtype, target, numbers, **options)


@pytest.mark.parametrize(
    ("name", "some"),
    [
        ("16x2048x768", slice(1)),
        pytest.param("16x2048x768", slice(1, None), marks=pytest.mark.exhaustive),
        *(pytest.param(name, slice(None), marks=pytest.mark.exhaustive) for name in ("64x128x768", "fp32")),
    ],
    ids=str,
)
def test_variants_of_products(name, some):
    """Of a filter in two parts where the data are narrower."""
    case = next(case for case in OP.cases() if case.name == name)
    columns, dtype = -(-case.u.shape[1] // toeplitz.BLOCK) * case.u.shape[0], case.u.dtype
    parts = 1 + (dtype != torch.float32)
    for tiling in toeplitz.tilings(case)[1::2][some]:
        built = convolution(columns, dtype, "sm_90", parts=parts, tiling=tiling)
        assert built.spills == 0
        assert built.shared <= SHARED_LIMIT["sm_90"]
    sums = {tiling[4:]: tiling for tiling in toeplitz.backward_tilings(case)}
    for tiling in [*sums.values()][1::2][some]:
        built = correlation(dtype, "sm_90", tiling)
        assert built.spills == 0
        assert built.shared <= SHARED_LIMIT["sm_90"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("last", [False, True])
def test_packing(target, last):
    tile = {name: value for name, value in TILE.items() if name.isupper()}
    sides = {"X_LAST": last, "GATE_LAST": last, **tile}
    built = compiled(rows_kernels._pack, torch.bfloat16, target, sides, num_warps=TILE["num_warps"])
    assert built.spills == 0
    sides = {"GATE_LAST": last, "FACTOR_LAST": last, "OUT_LAST": last, **tile}
    built = compiled(rows_kernels._unpack, torch.bfloat16, target, sides, num_warps=TILE["num_warps"])
    assert built.spills == 0


@pytest.mark.parametrize("target", TARGETS)
def test_filters_copies_and_their_gradients_sum(target):
    shift = {"BACKWARDS": False, "PARTS": 2, "BLOCK": 128, "COPIES": 8, "WIDTH": 256}
    assert compiled(toeplitz._shift, torch.bfloat16, target, shift, num_warps=4).spills == 0
    gather = {"PIECE": 64, "WIDE": 128, "SIZE": 1024}
    assert compiled(toeplitz._gather, torch.bfloat16, target, gather, num_warps=4).spills == 0


# Every kind of transform at its longest, where registers are scarcest, and the shortest ones.
PLANS = [
    FFTPlan(512), FFTPlan(16384), FFTPlan(256, 1, half=False, circular=True),
    FFTPlan(16384, 4, half=False, circular=True, single=True), FFTPlan(256, half=False, windows=True),
]  # fmt: skip
MORE_PLANS = [
    FFTPlan(16384, 4), FFTPlan(16384, 4, half=False, windows=True),
    FFTPlan(16384, half=False), FFTPlan(16384, 8, single=True), FFTPlan(4096, half=False, windows=True),
    FFTPlan(1024), FFTPlan(2048), FFTPlan(2048, half=False), FFTPlan(4096), FFTPlan(8192), FFTPlan(8192, 16),
    FFTPlan(8192, 4), FFTPlan(8192, 8, single=True),
    FFTPlan(8192, 4, half=False, circular=True, single=True),
    *(FFTPlan(n, m, half=False, circular=True) for n, m in [(1024, 1), (8192, 1), (16384, 4)]),
    *(FFTPlan(n, half=False, windows=True) for n in (512, 1024, 2048, 8192, 16384)),
]  # fmt: skip


def built_fft(fft, target) -> Built:
    built = build_cuda(SOURCE, [*options({**fft.macros, "DATA": 1})], target)
    assert set(built) == {KERNELS[fft.backward]}
    return built[KERNELS[fft.backward]]


@pytest.mark.kernel(of=lambda fft: fft.segment == 16384)
@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("sm_")])
@pytest.mark.parametrize(
    "fft",
    [*PLANS, *(pytest.param(fft, marks=pytest.mark.exhaustive) for fft in MORE_PLANS)],
    ids=lambda fft: "-".join(map(str, map(int, fft))),
)
def test_ffts_stay_in_registers(fft, target):
    """But for a few bytes of local memory a thread, most where rows fill more than half."""
    for backward in (False, True):
        assert built_fft(fft._replace(backward=backward), target).spills <= (32 if fft.half else 64)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_ffts_of_two_segments_stay_in_registers(target):
    """`differentiate` has these only of rows that fill more than half: it takes shorter ones for others."""
    for fft in (
        FFTPlan(16384, 2),
        FFTPlan(16384, 2, half=False),
        FFTPlan(16384, 2, half=False, windows=True),
    ):
        assert built_fft(fft, target).spills == 0
        if not fft.half:
            most = 224 if target == "sm_100" else 72
            assert built_fft(fft._replace(backward=True), target).spills <= most


@pytest.mark.exhaustive
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("T", "L"), [(8192, 1024), (1024, 1024), (8192, 16)])
def test_variants_of_ffts_stay_in_registers(T, L, backward):
    limit = SHARED_LIMIT["sm_90"]
    for tiling in plans.tilings(T, L, limit, backward=backward)[1:]:
        fft = choose(T, L, limit, backward=backward, tiling=tiling)
        if fft.segments == 1 or fft.segment == 4096:
            assert built_fft(fft, "sm_90").spills <= 64


def test_ffts_fit_into_shared_memory():
    """Of a data-centre GPU up to 16,384 values, of a consumer's, with 99 KiB, up to 8,192."""
    for T in (1, 256, 257, 4096, 8192, 100_000):
        for limit in (*(SHARED_LIMIT[name] for name in ("sm_80", "sm_90")), 99 << 10):
            for backward in (False, True):
                fft = choose(T, T, limit, backward=backward)
                assert fft.total >= 2 * T - 1
                assert fft.shared <= limit
    assert choose(8192, 8192, SHARED_LIMIT["sm_90"]) == FFTPlan(16384)
    assert choose(4096, 4096, 99 << 10) == FFTPlan(8192)
    assert choose(4096, 4096 - 23, SHARED_LIMIT["sm_90"]) == FFTPlan(8192)
    assert choose(2600, 1400, SHARED_LIMIT["sm_90"]) == FFTPlan(4096, half=False)
    assert choose(1 << 20, 1 << 20, SHARED_LIMIT["sm_90"]) is None
    assert choose(256, 256, SHARED_LIMIT["sm_90"], circular=True) == FFTPlan(256, half=False, circular=True)
    assert choose(65536, 65536, SHARED_LIMIT["sm_90"], circular=True) == FFTPlan(
        16384, 4, half=False, circular=True
    )
    for T in (128, 1000, 1 << 20):
        assert choose(T, T, SHARED_LIMIT["sm_90"], circular=True) is None


def test_windows_where_filters_are_short():
    def windows(n, segments=1, backward=False):
        return FFTPlan(n, segments, half=False, windows=True, backward=backward)

    limit = SHARED_LIMIT["sm_90"]
    assert choose(8192, 1024, limit) == windows(4096)
    assert choose(8192, 1024, limit, backward=True) == windows(4096, backward=True)
    assert choose(8192, 16, limit) == windows(512)
    assert choose(8192, 16, limit, backward=True) == windows(512, backward=True)
    assert choose(8192, 4096, limit) == windows(8192)
    assert choose(8192, 4097, limit) == FFTPlan(16384)
    assert choose(65536, 16384, limit) == windows(16384, 2)
    assert choose(1 << 24, 24, 99 << 10) == windows(512)  # however long
    assert choose(256, 100, limit) == FFTPlan(512)
    assert choose(1024, 600, limit, single=True) == FFTPlan(2048)
    for T, L in ((1200, 20), (5000, 77), (40_000, 9000)):
        fft = choose(T, L, limit)
        assert fft.windows
        assert fft.total - fft.valid(T, L) >= L - 1
        assert fft.total // 2 >= L
        assert fft.valid(T, L) % 32 == 0


def test_segments_of_half_the_length_where_they_are_few():
    def segments(T, **kind):
        return choose(T, T, SHARED_LIMIT["sm_90"], **kind)

    assert segments(16384) == FFTPlan(16384, 2)
    assert segments(16384, backward=True) == FFTPlan(8192, 4, backward=True)
    assert segments(16384, single=True) == FFTPlan(8192, 4, single=True)
    assert segments(32768, backward=True) == FFTPlan(16384, 4, backward=True)
    assert segments(32768, single=True) == FFTPlan(8192, 8, single=True)
    assert segments(65536, single=True) == FFTPlan(16384, 8, single=True)
    circle = {"half": False, "circular": True}
    assert segments(16384, circular=True, single=True) == FFTPlan(16384, **circle)
    assert segments(32768, circular=True, backward=True) == FFTPlan(16384, 2, **circle, backward=True)
    assert segments(32768, circular=True, single=True) == FFTPlan(8192, 4, **circle, single=True)
    assert segments(65536, circular=True, single=True) == FFTPlan(16384, 4, **circle, single=True)
