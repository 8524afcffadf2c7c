"""Every layer_norm kernel in its production tilings, built for GPUs that need not be here."""

import re
from typing import Any, NamedTuple

import pytest
import torch

from aot import SHARED_LIMIT, TARGETS, Built, build
from bakeoff.kernels import row_tilings as tilings
from bakeoff.ops.layer_norm import kernels
from bakeoff.select import Case, TensorMeta

SMS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Form(NamedTuple):
    """A call: x [N, D] of `dtype`, weight and residual of theirs (None: absent)."""

    N: int
    D: int
    dtype: torch.dtype = torch.bfloat16
    weight: torch.dtype | None = torch.bfloat16
    residual: torch.dtype | None = None
    align: int = 16

    def __str__(self) -> str:
        parts = [TYPES[t] if t else "-" for t in (self.dtype, self.weight, self.residual)]
        return f"{self.N}x{self.D} {'/'.join(parts)} align {self.align}"

    @property
    def read(self) -> dict[str, int]:
        """Bytes of an element of what the forward reads."""
        sizes = {"x": self.dtype.itemsize}
        return sizes if self.residual is None else sizes | {"residual": self.residual.itemsize}

    @property
    def s_dtype(self) -> torch.dtype:
        return self.dtype if self.residual is None else torch.promote_types(self.dtype, self.residual)

    @property
    def vectors(self) -> bool:
        """Whether every row starts on 16 bytes, so that accesses can be 16 bytes wide."""
        return self.D * self.dtype.itemsize % 16 == 0 and self.align * self.dtype.itemsize % 16 == 0


half, full = torch.bfloat16, torch.float32
FORMS = [
    Form(24576, 384),
    Form(2048, 512),
    Form(1000, 1000, align=8),
    Form(8192, 1024),
    Form(8192, 4096),
    Form(8192, 4096, weight=None),
    Form(8192, 4096, weight=full, residual=full),
    Form(8192, 4096, full, full),
    Form(4096, 8192),
    Form(16384, 16384),
    Form(12288, 5120),
    Form(5120, 2880),
    Form(3000, 7168, residual=half),
    Form(64, 65537, align=1),
]
# Tiled as another form is, or in between.
ALIKE = {Form(2048, 512), Form(8192, 1024), Form(5120, 2880)}

# Bytes of local memory a thread is known to need; every other form needs none.
SPILLS = {
    FORMS.index(Form(8192, 4096)): 8,  # sm_100
    FORMS.index(Form(64, 65537, align=1)): 128,  # 16 addresses each of x, weight, bias and y in 128 registers
}


def types(**tensors: torch.dtype | None) -> tuple[dict[str, str], dict[str, Any]]:
    """Triton pointer types of the tensors there are, and None for the others."""
    there = {name: f"*{TYPES[dtype]}" for name, dtype in tensors.items() if dtype is not None}
    return there, {name: None for name, dtype in tensors.items() if dtype is None}


def compiled(
    kernel: Any, tensors: tuple[dict[str, str], dict[str, Any]], numbers: dict[str, Any], target: str
) -> Built:
    """A kernel with these tensors and the numbers of its launch."""
    signature, constants = tensors
    signature |= dict.fromkeys([name for name in kernel.arg_names if name.endswith("units")], "i64")
    signature |= {"N": "i64", "eps": "fp32"}
    signature = {name: kind for name, kind in signature.items() if name in kernel.arg_names}
    own = {name: value for name, value in numbers.items() if name in kernel.arg_names}
    constants |= {name: value for name, value in own.items() if name not in signature}
    return build(kernel, signature, constants, target, num_warps=numbers["num_warps"])


def strides(form: Form, *names: str) -> dict[str, int]:
    return dict.fromkeys(names, form.D)


def forward_tiling(form: Form, target: str) -> tilings.ForwardTiling:
    size, read = form.dtype.itemsize, sum(form.read.values())
    lanes = TARGETS[target].warp_size
    return tilings.forward_tiling(form.N, form.D, read, size, SMS[target], lanes)


def forward(form: Form, target: str, tiling: tilings.ForwardTiling | None = None) -> Built:
    tiling = tiling or forward_tiling(form, target)
    passes, _, numbers = tilings.forward_launch(
        form.N, form.D, form.read, strides(form, "x", "residual"), SMS[target], tiling
    )
    numbers["ALIGN"] = form.align
    s_dtype = None if form.residual is None else form.s_dtype
    tensors = types(
        x=form.dtype, residual=form.residual, weight=form.weight, bias=form.weight, y=form.dtype, s=s_dtype,
        stats=full,
    )  # fmt: skip
    return compiled(kernels._forward if passes == 1 else kernels._forward_long, tensors, numbers, target)


def backward(form: Form, target: str, tiling: tilings.BackwardTiling | None = None) -> list[Built]:
    s_dtype = form.s_dtype
    sizes = {"dy": form.dtype.itemsize, "s": s_dtype.itemsize}
    if form.residual:
        sizes["ds"] = s_dtype.itemsize
    passes, _, numbers = tilings.backward_launch(
        form.N,
        form.D,
        sizes,
        strides(form, "dy", "ds", "s"),
        2 * (form.weight is not None),
        SMS[target],
        tiling,
    )
    numbers["ALIGN"] = form.align
    apart = form.residual if form.residual != form.dtype else None
    total = full if form.weight else None
    given = {"dy": form.dtype, "s": s_dtype, "stats": full, "weight": form.weight}
    tensors = types(
        **given, ds=form.residual and s_dtype, dx=form.dtype, dresidual=apart, dweight=total, dbias=total
    )
    if passes == 1:
        return [compiled(kernels._backward, tensors, numbers, target)]
    there, none = tensors
    return [
        compiled(kernels._row_means, types(**given, means=full), numbers, target),
        compiled(kernels._backward_long, (there | {"means": "*fp32"}, none), numbers, target),
    ]


def check(built: Built, form: Form, spills: int = 0, vectors: bool = True) -> None:
    assert built.spills <= spills, (built.spills, built.registers)
    assert built.shared <= SHARED_LIMIT[built.target]
    if form.vectors and vectors:
        assert wide(built, "load"), "no 16-byte load"
        assert wide(built, "store"), "no 16-byte store"


def wide(built: Built, kind: str) -> bool:
    """Whether there are 16-byte accesses to global memory, with any cache hint, or asynchronous copies."""
    if built.target.startswith("sm_"):
        copies = kind == "load" and re.search(r"cp\.async\.cg\.shared\.global.*, 0x10", built.assembly)
        return bool(
            copies
            or re.search(rf"{'ld' if kind == 'load' else 'st'}\.global\S*\.(v4\.b32|v2\.b64)", built.assembly)
        )
    return bool(re.search(rf"(global|buffer)_{kind}_dwordx4", built.assembly))


FORM = pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=[pytest.mark.exhaustive] if form in ALIKE else []) for form in FORMS],
    ids=str,
)


@pytest.mark.kernel(of=lambda form: form.D >= 16384)  # rows beyond the registers have kernels of their own
@pytest.mark.parametrize("target", TARGETS)
@FORM
def test_forward(form: Form, target: str) -> None:
    tiling = forward_tiling(form, target)
    threads = tiling.warps * (32 if target.startswith("sm_") else 64)
    full_tile = tiling.rows * tiling.block * form.dtype.itemsize >= 16 * threads
    check(forward(form, target), form, SPILLS.get(FORMS.index(form), 0), vectors=full_tile)


@pytest.mark.kernel(of=lambda form: form.D >= 16384)  # rows beyond the registers have kernels of their own
@pytest.mark.parametrize("target", TARGETS)
@FORM
def test_backward(form: Form, target: str) -> None:
    sums = 2 * (form.weight is not None)
    tiling = tilings.backward_tiling(form.N, form.D, form.s_dtype.itemsize, sums, SMS[target])
    threads = tiling.warps * (32 if target.startswith("sm_") else 64)
    full_tile = tiling.rows * tiling.block * form.dtype.itemsize >= 16 * threads
    for built in backward(form, target, tiling):
        if "_row_means" in built.ttgir:
            assert built.spills == 0
        else:
            check(built, form, vectors=full_tile)


VARIED = [Form(24576, 384), Form(8192, 4096), Form(12288, 5120)]


def varied(axis: str) -> list[Any]:
    """Every sixth variant of a few forms but the default, on a GPU of 132 multiprocessors."""
    listed = []
    for form in VARIED:
        x = TensorMeta.dense((form.N, form.D), form.dtype, grad=True)
        args = {
            "x": x,
            "weight": TensorMeta.dense((form.D,), form.dtype, grad=True),
            "bias": TensorMeta.dense((form.D,), form.dtype, grad=True),
            "residual": None if form.residual is None else TensorMeta.dense(x.shape, form.residual),
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tilings, "multiprocessors", lambda _: SMS["sm_90"])
            every = getattr(tilings, f"{axis}_tilings")(Case(args, "cuda"))
        listed += [(form, tiling) for tiling in every[1::6] if tiling.passes == 1]
    return [
        pytest.param(
            *given, id=f"{given[0]} {tuple(given[1])}", marks=[pytest.mark.exhaustive] if i % 2 else []
        )
        for i, given in enumerate(listed)
    ]


@pytest.mark.parametrize(("form", "tiling"), varied("forward"))
def test_variants_of_the_forward(form: Form, tiling: tilings.ForwardTiling) -> None:
    built = forward(form, "sm_90", tiling)
    check(built, form)
    if tiling.rows == 1:  # several rows share the weight, which each thread then takes from others
        assert not re.search(r"convert_layout.*tensor<\d+x\d\d", built.ttgir)  # of more than a row's number
    assert ("cp.async" in built.assembly) == (tiling.stages > 1)


@pytest.mark.parametrize(("form", "tiling"), varied("backward"))
def test_variants_of_the_backward(form: Form, tiling: tilings.BackwardTiling) -> None:
    (built,) = backward(form, "sm_90", tiling)
    check(built, form)
