"""Device facts and measured ceilings."""

import contextlib
import ctypes
import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from bakeoff.timing import seconds_per_call

__all__ = [
    "Ceilings",
    "Facts",
    "capability",
    "ceilings",
    "disturbance",
    "driver_cuda",
    "facts",
    "free",
    "generation",
    "index",
    "l2_bytes",
    "limit_us",
    "matmul_tflops",
    "multiprocessors",
    "native_bf16",
    "pulse",
    "shared_memory",
    "warp_size",
    "without_triton",
]

DRIFT = 0.05  # a pulse that changes by more than this says that clocks or load moved


class Facts(msgspec.Struct, frozen=True):
    """What makes measurements comparable: another `device`, `sms` or `memory` is another machine; other
    versions make a measurement stale."""

    device: str
    sms: int
    memory: int
    torch: str
    triton: str
    cuda: str
    driver: str = ""
    python: str = ""
    overrides: str = ""
    """PyTorch's operators that run on kernels written in a DSL, not on those compiled into it."""

    @property
    def same_machine(self) -> tuple[str, int, int]:
        """The part that must be equal for a verdict to apply at all (memory in whole GiB)."""
        return self.device, self.sms, round(self.memory / 2**30)

    @property
    def same_software(self) -> tuple[str, str, str, str, str]:
        """The part whose change makes a verdict stale."""
        return self.torch, self.triton, self.cuda, self.driver, self.overrides


class Ceilings(msgspec.Struct, frozen=True):
    """Measured limits: copy bandwidth (bytes read plus written, GB/s) and matmul rate (TFLOP/s)."""

    copy_gbps: float
    matmul_tflops: float
    matmul_dtype: str


def facts(device: str = "cuda") -> Facts:
    """The facts of `device` ("cpu", "cuda" or "cuda:N"); what PyTorch overrides may change while it runs."""
    return msgspec.structs.replace(_lasting_facts(device), overrides=overrides())


def overrides() -> str:
    """The operators that PyTorch (2.13 or newer) routes to kernels in a DSL now, as by
    ``torch.backends.python_native``; "" where there are none."""
    native = getattr(torch.backends, "python_native", None)
    if native is None:
        return ""
    found = []
    try:
        for dsl in native.available_dsls:
            controller = getattr(native, dsl)
            operators = [
                name for name in native.get_dsl_operations(dsl) if not native.is_operation_disabled(name)
            ]
            if controller.enabled and operators:
                found.append(f"{dsl} {controller.version}: {' '.join(sorted(operators))}")
    except (AttributeError, ImportError, RuntimeError, TypeError) as error:  # a young interface
        return f"unknown: {type(error).__name__}"
    return "; ".join(found)


@functools.cache
def _lasting_facts(device: str) -> Facts:
    import importlib.metadata

    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    versions = {"torch": str(torch.__version__), "triton": triton, "python": platform.python_version()}
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        return Facts(
            properties.name,
            properties.multi_processor_count,
            properties.total_memory,
            cuda=torch.version.cuda or torch.version.hip or "none",
            driver=_driver(),
            **versions,
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return Facts(_cpu_name(), os.cpu_count() or 1, memory, cuda="none", **versions)


def free(device: str) -> int:
    """Bytes of a GPU's memory that nothing holds now; on the CPU, all that the machine has."""
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else facts(device).memory


def index(device: str) -> int:
    """The index of a GPU ("cuda" is the current one); -1 for the CPU, and where there is no GPU."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return -1
    given = torch.device(device).index
    return torch.cuda.current_device() if given is None else given


@functools.cache
def capability(device: int) -> tuple[int, int]:
    """The compute capability of the GPU of this index; (0, 0) for -1, the CPU."""
    if device < 0:
        return 0, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


def generation(device: int) -> int:
    """The first number of the compute capability of the GPU of this index; 0 for -1, the CPU."""
    return capability(device)[0]


def without_triton(device: str) -> str | None:
    """Why Triton can't compile for `device`, or None: NVIDIA's GPUs before Volta."""
    number = index(device)
    if torch.version.hip or not 0 < generation(number) < 7:
        return None
    major, minor = capability(number)
    return f"Triton needs compute capability 7.0 (Volta) or newer, this GPU has {major}.{minor}"


def native_bf16(device: str) -> bool:
    """Whether `device` is a GPU that computes in bfloat16; PyTorch emulates it on NVIDIA's before Ampere."""
    number = index(device)
    return number >= 0 and (torch.version.hip is not None or generation(number) >= 8)


def multiprocessors(device: int | str) -> int:
    """Of the GPU of this index or name; 4 for -1 and names where there is no GPU: kernels are interpreted."""
    number = index(device) if isinstance(device, str) else device
    return _multiprocessors(number) if number >= 0 else 4


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def l2_bytes(device: str) -> int:
    """The size of the last cache before memory; 0 on the CPU, where inputs are not rotated beyond it."""
    if not device.startswith("cuda"):
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


@functools.cache
def ceilings(device: str) -> Ceilings:
    """The device's measured limits (about a second; remembered for the process)."""
    count = min(2**30, free(device) // 8) if device.startswith("cuda") else 2**26
    gbps = 2 * count / _copy_seconds(count, device) / 1e9
    return Ceilings(gbps, matmul_tflops(device), str(_matmul_dtype(device)).removeprefix("torch."))


@functools.cache
def matmul_tflops(device: str) -> float:
    """The measured speed of large matrix products in bfloat16 where the device computes in it, else in
    float32; remembered for the process."""
    n = 8192 if device.startswith("cuda") else 1024
    own, dtype = _generator(device), _matmul_dtype(device)
    a, b = (torch.randn(n, n, device=device, dtype=dtype, generator=own) for _ in range(2))
    return 2 * n**3 / _best(lambda: a @ b, device) / 1e12


def _matmul_dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if native_bf16(device) else torch.float32


def _generator(device: str) -> torch.Generator:
    """One of our own, so that the caller's random state stays as it is."""
    return torch.Generator(device).manual_seed(0)


def _copy_seconds(nbytes: int, device: str) -> float:
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    source.random_(0, 255, generator=_generator(device))
    target = torch.empty_like(source)
    return _best(lambda: target.copy_(source), device)


@functools.cache
def shared_memory(device: int) -> int:
    """Bytes that one program may have on the GPU of this index; 64 KiB for -1, the CPU."""
    if device < 0:
        return 64 << 10
    properties = torch.cuda.get_device_properties(device)
    # AMD's have no more than the usual amount.
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


@functools.cache
def warp_size(device: int) -> int:
    """Threads that a warp of the GPU of this index has; 32 for -1, the CPU."""
    return torch.cuda.get_device_properties(device).warp_size if device >= 0 else 32


def limit_us(bytes_: int, flops: int, device: str) -> float:
    """The least time in microseconds that `bytes_` of traffic or `flops` of arithmetic take on `device`."""
    top = ceilings(device)
    return max(bytes_ / (top.copy_gbps * 1e3), flops / (top.matmul_tflops * 1e6))


def pulse(device: str) -> float:
    """Seconds of a small fixed piece of work, to see clocks drift or somebody else arrive; 0 on the CPU,
    whose load the spread of the times shows."""
    if not device.startswith("cuda"):
        return 0.0
    x = torch.ones(2**25, device=device)
    return _best(lambda: x.add_(1), device, repeats=10)


def disturbance(device: str, before: float = 0.0) -> str:
    """Why times taken since `before` (an earlier `pulse`) deserve little trust, or an empty text."""
    found = []
    if before:
        drift = pulse(device) / before - 1
        if abs(drift) > DRIFT:
            found.append(f"the device's speed drifted by {drift:+.0%} during the contest")
    strangers = _strangers() if device.startswith("cuda") else 0
    if strangers:
        found.append(f"{strangers} other process(es) use the GPU")
    return "; ".join(found)


def _best(call: Callable[[], object], device: str, repeats: int = 5) -> float:
    """The least seconds a call, of `repeats` measurements of four calls."""
    call()
    return min(seconds_per_call([call], 4, device) for _ in range(repeats))


def _strangers() -> int:
    """Compute processes on the GPUs other than this one, the one that started it, and workers of theirs."""
    listed = _nvidia_smi("--query-compute-apps=pid").split()
    pids = {int(pid) for pid in listed if pid.isdigit()}
    own = {os.getpid(), os.getppid()}
    own |= {child for child in _children(own) if _is_worker(child)}
    # In a container the listed numbers are the host's; then as many processes may be ours.
    return len(pids - own) if pids & own else max(0, len(pids) - len(own))


def _children(pids: set[int]) -> set[int]:
    """Processes that these started. Not every kernel lists them, so each process is asked for its parent."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that has ended
            if int(path.read_text("utf-8", "replace").rpartition(")")[2].split()[1]) in pids:
                found.add(int(path.parent.name))
    return found


def _is_worker(pid: int) -> bool:
    try:
        return b"bakeoff.select.contests.worker" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


@functools.cache
def driver_cuda() -> tuple[int, int]:
    """The version of CUDA that the driver implements; (0, 0) where there is none."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10


@functools.cache
def _driver() -> str:
    return (_nvidia_smi("--query-gpu=driver_version").split() or [""])[0]


def _nvidia_smi(query: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


@functools.cache
def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
