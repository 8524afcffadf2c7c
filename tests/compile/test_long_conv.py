"""Every long_conv kernel in its production tilings, built for GPUs that need not be here."""

import re
from pathlib import Path

import pytest
import torch

import bakeoff
from aot import SHARED_LIMIT, TARGETS, Built, build
from bakeoff.ops.long_conv import direct, direct_major
from bakeoff.ops.long_conv.fft import KERNELS, SOURCE
from bakeoff.ops.long_conv.kernels import pack, toeplitz
from bakeoff.ops.long_conv.op import MOST_TAPS_MAJOR
from bakeoff.ops.long_conv.plan import Plan, plan
from nvrtc import build as build_cuda

ROOT = Path(bakeoff.__file__).parent
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
MATRIX = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
TABLES = {"inner", "outer", "dh", "dskip", "skip", "h"}
SIZES = {"LAGS", "ONE", "TILES", "W8"}


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


def convolution(columns, dtype, target, *, backwards=False, parts=1) -> Built:
    how = toeplitz.convolving(columns, dtype, target == "gfx942")
    return compiled(
        toeplitz._convolve,
        dtype,
        target,
        {
            "BACKWARDS": backwards, "PARTS": parts, "COLUMNS": how.columns, "DEEP": how.deep,
            "BLOCK": toeplitz.BLOCK, "COPIES": toeplitz.COPIES, "PRECISION": how.precision,
        },
        num_warps=how.warps,
        num_stages=how.stages,
    )  # fmt: skip


@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("sm_")])
@pytest.mark.parametrize("gates", [0, 3], ids=["plain", "gated"])
@pytest.mark.parametrize("taps", [1, 4, 16, 32, 64])
def test_direct_stays_in_registers(taps, gates, target):
    """But for a few bytes of local memory a thread."""
    for kernel in direct.KERNELS:
        how = direct.tiling(kernel, taps, gates)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            given = direct.options(kernel, how, taps, gates, dtype)
            built = build_cuda(ROOT / direct.SOURCE, given, target)
            assert set(built) == {kernel}
            assert built[kernel].spills <= 128


@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("sm_")])
@pytest.mark.parametrize("gates", [0, 3], ids=["plain", "gated"])
@pytest.mark.parametrize("taps", [1, 4, 8, 16, MOST_TAPS_MAJOR])
def test_direct_along_time_stays_in_registers(taps, gates, target):
    """But for a few bytes of local memory a thread."""
    for kernel in direct.KERNELS:
        for wide in (False, True):
            how = direct_major.tiling(kernel, taps, gates, wide)
            for dtype in (torch.bfloat16, torch.float32):
                given = direct_major.options(kernel, how, 32, wide, taps, gates, dtype)
                built = build_cuda(ROOT / direct_major.SOURCE, given, target)[kernel]
                assert built.spills <= (192 if taps == MOST_TAPS_MAJOR else 128)
                stores = set(re.findall(r"st\.global\.(\S+)", built.assembly)) - {"f32", "u32"}
                assert not wide or stores == {"v4.u32"}


@pytest.mark.parametrize("lanes", [1, 8])
def test_direct_on_short_sequences(lanes):
    for kernel in direct.KERNELS:
        how = direct_major.tiling(kernel, 4, 3, True)
        given = direct_major.options(kernel, how, lanes, True, 4, 3, torch.float16)
        assert build_cuda(ROOT / direct_major.SOURCE, given, "sm_90")[kernel].spills <= 32


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
    how = toeplitz.correlating(dtype, target == "gfx942")
    constants = {"PIECE": how.piece, "WIDE": how.wide, "DEEP": how.deep, "PRECISION": how.precision}
    built = compiled(
        toeplitz._correlate, dtype, target, constants, num_warps=how.warps, num_stages=how.stages
    )
    assert built.spills == 0
    assert built.shared <= SHARED_LIMIT[target]
    if target != "gfx942" or dtype != torch.float32:
        assert MATRIX[target] in built.assembly


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("last", [False, True])
def test_packing(target, last):
    tiles = {"TIMES": 64, "CHANNELS": 64}
    built = compiled(
        pack._pack, torch.bfloat16, target, {"X_LAST": last, "G_LAST": last, **tiles}, num_warps=4
    )
    assert built.spills == 0
    sides = {"G_LAST": last, "O_LAST": last, "OUT_LAST": last}
    built = compiled(pack._unpack, torch.bfloat16, target, {**sides, **tiles}, num_warps=4)
    assert built.spills == 0


@pytest.mark.parametrize("target", TARGETS)
def test_filters_copies_and_their_gradients_sum(target):
    shift = {"BACKWARDS": False, "PARTS": 2, "BLOCK": 128, "COPIES": 8, "WIDTH": 256}
    assert compiled(toeplitz._shift, torch.bfloat16, target, shift, num_warps=4).spills == 0
    gather = {"PIECE": 64, "WIDE": 128, "SIZE": 1024}
    assert compiled(toeplitz._gather, torch.bfloat16, target, gather, num_warps=4).spills == 0


# Every kind of transform at its longest, where registers are scarcest, and the shortest ones.
PLANS = [
    Plan(512, 1), Plan(16384, 1), Plan(16384, 1, half=False), Plan(16384, 4), Plan(16384, 8, alone=True),
    Plan(16384, 4, half=False, circular=True, alone=True), Plan(256, 1, half=False, circular=True),
    Plan(256, 1, half=False, windows=True), Plan(4096, 1, half=False, windows=True),
    Plan(16384, 4, half=False, windows=True),
]  # fmt: skip
MORE_PLANS = [
    Plan(1024, 1), Plan(2048, 1), Plan(2048, 1, half=False), Plan(4096, 1), Plan(8192, 1), Plan(8192, 16),
    Plan(8192, 4), Plan(8192, 8, alone=True), Plan(8192, 4, half=False, circular=True, alone=True),
    *(Plan(n, outer, half=False, circular=True) for n, outer in [(1024, 1), (8192, 1), (16384, 4)]),
    *(Plan(n, 1, half=False, windows=True) for n in (512, 1024, 2048, 8192, 16384)),
]  # fmt: skip


@pytest.mark.kernel(of=lambda how: how.n == 16384)
@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("sm_")])
@pytest.mark.parametrize(
    "how", [*PLANS, *(pytest.param(how, marks=pytest.mark.exhaustive) for how in MORE_PLANS)], ids=str
)
def test_ffts_stay_in_registers(how, target):
    """But for a few bytes of local memory a thread, most where rows fill more than half."""
    built = build_cuda(ROOT / SOURCE, [*how.options, "-DDATA=1"], target)
    assert set(built) == set(KERNELS)
    for kernel in built.values():
        assert kernel.spills <= (32 if how.half else 64)


@pytest.mark.parametrize(
    "target", ["sm_90", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("sm_80", "sm_100"))]
)
def test_ffts_of_two_segments_stay_in_registers(target):
    """`differentiate` has these only of rows that fill more than half: it takes shorter ones for others."""
    for how in (Plan(16384, 2), Plan(16384, 2, half=False), Plan(16384, 2, half=False, windows=True)):
        built = build_cuda(ROOT / SOURCE, [*how.options, "-DDATA=1"], target)
        assert built["convolve"].spills == 0
        assert how.half or built["differentiate"].spills <= (224 if target == "sm_100" else 72)


def test_ffts_fit_into_shared_memory():
    """Of a data-centre GPU up to 16,384 values, of a consumer's, with 99 KiB, up to 8,192."""
    for T in (1, 256, 257, 4096, 8192, 100_000):
        for limit in (*(SHARED_LIMIT[name] for name in ("sm_80", "sm_90")), 99 << 10):
            how = plan(T, T, limit)
            assert how.total >= 2 * T - 1
            assert max(how.shared) <= limit
    assert plan(8192, 8192, SHARED_LIMIT["sm_90"]) == Plan(16384, 1)
    assert plan(4096, 4096, 99 << 10) == Plan(8192, 1)
    assert plan(4096, 4096 - 23, SHARED_LIMIT["sm_90"]) == Plan(8192, 1)
    assert plan(2600, 1400, SHARED_LIMIT["sm_90"]) == Plan(4096, 1, half=False)
    assert plan(1 << 20, 1 << 20, SHARED_LIMIT["sm_90"]) is None
    assert plan(256, 256, SHARED_LIMIT["sm_90"], circular=True) == Plan(256, 1, half=False, circular=True)
    assert plan(65536, 65536, SHARED_LIMIT["sm_90"], circular=True) == Plan(
        16384, 4, half=False, circular=True
    )
    for T in (128, 1000, 1 << 20):
        assert plan(T, T, SHARED_LIMIT["sm_90"], circular=True) is None


def test_windows_where_filters_are_short():
    def windows(n, outer=1):
        return Plan(n, outer, half=False, windows=True)

    limit = SHARED_LIMIT["sm_90"]
    assert plan(8192, 1024, limit) == plan(8192, 1024, limit, backward=True) == windows(4096)
    assert plan(8192, 16, limit) == windows(1024)
    assert plan(8192, 16, limit, backward=True) == windows(512)
    assert plan(8192, 4096, limit) == windows(8192)
    assert plan(8192, 4097, limit) == Plan(16384, 1)
    assert plan(65536, 16384, limit) == windows(16384, 2)
    assert plan(1 << 24, 24, 99 << 10) == windows(1024)  # however long
    assert plan(256, 100, limit) == Plan(512, 1)
    assert plan(1024, 600, limit, alone=True) == Plan(2048, 1)
    for T, L in ((1200, 20), (5000, 77), (40_000, 9000)):
        how = plan(T, L, limit)
        assert how.windows
        assert how.total - how.valid(T, L) >= L - 1
        assert how.total // 2 >= L
        assert how.valid(T, L) % 32 == 0


def test_segments_of_half_the_length_where_they_are_few():
    def segments(T, **kind):
        return plan(T, T, SHARED_LIMIT["sm_90"], **kind)

    assert segments(16384) == Plan(16384, 2)
    assert segments(16384, backward=True) == Plan(8192, 4)
    assert segments(16384, alone=True) == Plan(8192, 4, alone=True)
    assert segments(32768, backward=True) == Plan(16384, 4)
    assert segments(32768, alone=True) == Plan(8192, 8, alone=True)
    assert segments(65536, alone=True) == Plan(16384, 8, alone=True)
    circle = {"half": False, "circular": True}
    assert segments(16384, circular=True, alone=True) == Plan(16384, 1, **circle)
    assert segments(32768, circular=True, backward=True) == Plan(16384, 2, **circle)
    assert segments(32768, circular=True, alone=True) == Plan(8192, 4, **circle, alone=True)
    assert segments(65536, circular=True, alone=True) == Plan(16384, 4, **circle, alone=True)
