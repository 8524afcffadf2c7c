"""Compiling a ``@triton.jit`` or ``@gluon.jit`` kernel ahead of time, for a GPU that need not be here.

::

    from aot import TARGETS, build

    @pytest.mark.parametrize("target", TARGETS)
    def test_forward(target):
        built = build(
            kernel,
            {"x_ptr": "*bf16", "y_ptr": "*bf16", "N": "i32", "eps": "fp32"},
            {"BLOCK": 1024},
            target,
            num_warps=4,
        )
        assert built.spills == 0
        assert built.shared <= SHARED_LIMIT[target]
"""

import functools
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

__all__ = ["SHARED_LIMIT", "TARGETS", "Built", "build"]

TARGETS: dict[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""A100, H100 and H200, B200, MI300."""

SHARED_LIMIT: dict[str, int] = {
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
}
"""Bytes of shared memory one block may use."""


@dataclass(frozen=True)
class Built:
    """What the compiler made of one kernel in one configuration."""

    target: str
    registers: int
    """Per thread (VGPRs on AMD)."""
    spills: int
    """Bytes of local memory per thread: 0 unless registers ran out."""
    shared: int
    """Bytes of shared memory per block."""
    ttgir: str
    assembly: str
    """PTX, or AMD's assembly."""

    @property
    def loads(self) -> dict[int, int]:
        """How many global loads there are of each width in bits: ``{128: 4}`` is fully vectorised."""
        return self._accesses("load", r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)")

    @property
    def stores(self) -> dict[int, int]:
        """How many global stores there are of each width in bits."""
        return self._accesses("store", r"st\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)")

    def _accesses(self, kind: str, ptx: str) -> dict[int, int]:
        if self.target.startswith("sm_"):
            found = [int(n or 1) * int(bits) for n, bits in re.findall(ptx, self.assembly)]
        else:
            amd = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "ushort": 16, "short": 16,
                   "ubyte": 8, "byte": 8}  # fmt: skip
            names = re.findall(rf"(?:global|buffer)_{kind}_(\w+?)(?:_d16\w*)?\s", self.assembly)
            found = [amd[name] for name in names if name in amd]
        return {width: found.count(width) for width in sorted(set(found))}


def build(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    target: str,
    *,
    unaligned: frozenset[str] = frozenset(),
    **options: Any,
) -> Built:
    """Compile `kernel` for `target`, one of `TARGETS`.

    `signature` gives the runtime arguments' Triton types in any order, `constants` the constexprs (and
    arguments that are None at run time); together they name every argument. Pointers count as aligned to 16
    bytes, which is what the launcher promises, except those in `unaligned`. `options` are launch options such
    as ``num_warps`` and ``num_stages``.
    """
    names = list(kernel.arg_names)
    missing = [name for name in names if name not in signature and name not in constants]
    unknown = [name for name in (*signature, *constants) if name not in names]
    if missing or unknown:
        raise ValueError(f"{kernel.__name__} takes {names}: missing {missing}, unknown {unknown}")
    types = {name: signature.get(name, "constexpr") for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if types[name].startswith("*") and name not in unaligned
    }
    made_of = GluonASTSource if kernel.is_gluon() else ASTSource
    source = made_of(kernel, types, dict(constants), aligned)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    shared = int(compiled.metadata.shared)
    if target.startswith("sm_"):
        registers, spills = _cuda_usage(compiled.asm["cubin"])
        assembly = compiled.asm["ptx"]
    else:
        assembly = compiled.asm["amdgcn"]
        registers = int(_only(r"\.vgpr_count:\s+(\d+)", assembly))
        spills = int(_only(r"\.private_segment_fixed_size:\s+(\d+)", assembly))
    return Built(target, registers, spills, shared, compiled.asm["ttgir"], assembly)


@functools.lru_cache(maxsize=512)  # Triton's cache gives the same bytes for the same kernel
def _cuda_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and local bytes per thread, as the cubin itself declares them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True)
    usage = text.stdout + text.stderr
    return int(_only(r"\bREG:(\d+)", usage)), max(
        int(_only(r"STACK:(\d+)", usage)), int(_only(r"LOCAL:(\d+)", usage))
    )


def _only(pattern: str, text: str) -> str:
    found = re.findall(pattern, text)
    if not found:
        raise ValueError(f"no {pattern} in:\n{text[:2000]}")
    return str(found[0])
