"""Compiling CUDA C++ ahead of time with NVRTC, for a GPU that need not be here; see `aot` for Triton's."""

import ctypes
import functools
import re
import subprocess
import tempfile
from importlib.metadata import files
from pathlib import Path

import pytest
from triton import knobs

from aot import Built

PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
OLDEST = 75  # that CUDA 13 compiles for; CUDA 12 goes back to sm_50


@functools.cache
def _library(old: bool) -> ctypes.CDLL:
    for package in PACKAGES[old:]:
        try:
            found = {path.name: path.locate() for path in files(package) or []}
        except ImportError:
            continue
        names = [name for name in found if re.fullmatch(r"libnvrtc\.so\.\d+", name)]
        builtins = [name for name in found if re.fullmatch(r"libnvrtc-builtins\.so\.[\d.]+", name)]
        ctypes.CDLL(str(found[builtins[0]]), ctypes.RTLD_GLOBAL)  # NVRTC looks it up by name
        return ctypes.CDLL(str(found[names[0]]))
    pytest.skip(f"needs NVRTC: pip install {PACKAGES[old]}")


def build(source: Path, options: list[str], target: str) -> dict[str, Built]:
    """Every kernel of `source`, by name, compiled for `target` ("sm_90"). `shared` is static memory alone."""
    nvrtc = _library(int(re.sub(r"\D", "", target)) < OLDEST)
    program = ctypes.c_void_p()
    assert (
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), b"source.cu", 0, None, None) == 0
    )
    given = [f"--gpu-architecture={target}", "--std=c++17", f"-I{source.parent}", *options]
    pointers = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
    if nvrtc.nvrtcCompileProgram(program, len(given), pointers):
        raise RuntimeError(_text(nvrtc, program, "ProgramLog").decode())
    cubin, ptx = _text(nvrtc, program, "CUBIN"), _text(nvrtc, program, "PTX").decode().rstrip("\0")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "source.cubin"
        path.write_bytes(cubin)
        tool = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        said = subprocess.run(tool, capture_output=True, text=True, check=True)
    usage = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", said.stdout + said.stderr
    )
    return {
        name: Built(target, int(registers), max(int(stack), int(local)), int(shared), "", ptx)
        for name, registers, stack, shared, local in usage
    }


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{what}")(program, buffer) == 0
    return buffer.raw
