"""Others' linear_cross_entropy behind this op's signature. Each library is imported on the first call.

Written against torch 2.13, liger-kernel 0.8.5, quack-kernels 0.6.5 and cut-cross-entropy 25.1.1. What the
adaptation costs counts as theirs. Their means are taken here, of sums, so that no target that counts gives 0.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bakeoff.alignment import aligned
from bakeoff.select import Case

__all__ = [
    "cut_cross_entropy",
    "cut_cross_entropy_supports",
    "liger",
    "liger_supports",
    "quack",
    "quack_supports",
    "torch_chunked",
    "torch_chunked_supports",
]

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_QUACK_CHUNK = 4096


def torch_chunked(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float | None, reduction: str,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.linear_cross_entropy in chunks. Its loss has x's dtype, one rounding too many."""
    del label_smoothing, z_loss, softcap
    options: Any = torch.nn.LinearCrossEntropyOptions(allow_retain_graph=True)
    loss = F.linear_cross_entropy(
        x.flatten(0, -2), weight, target.flatten(), linear_bias=bias, ignore_index=ignore_index,
        reduction="none" if reduction == "none" else "sum", options=options,
    )  # fmt: skip
    return _reduced(loss, target, ignore_index, reduction)


def torch_chunked_supports(case: Case) -> str | None:
    """Why PyTorch's own can't take `case`, or None."""
    if not hasattr(F, "linear_cross_entropy"):
        return f"torch {torch.__version__} has no linear_cross_entropy"
    if case.label_smoothing:
        return "torch's takes no label smoothing in chunks"
    return _plain_loss("torch's", case) or _long_target("torch's", case)


def liger(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float | None, reduction: str,
) -> Tensor:  # fmt: skip
    """Liger-Kernel's fused linear cross entropy. It waits for the device to count targets."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    each = "none" if reduction == "none" else "sum"
    loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        x.flatten(0, -2), weight, target.flatten(), bias, None, ignore_index, z_loss, label_smoothing, each,
        softcap,
    )  # fmt: skip
    return _reduced(loss, target, ignore_index, reduction)


def liger_supports(case: Case) -> str | None:
    """Why Liger-Kernel can't take `case`, or None."""
    return _common(case)


def quack(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float | None, reduction: str,
) -> Tensor:  # fmt: skip
    """quack-kernels (CuTe DSL)."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    del bias, label_smoothing, z_loss, softcap
    x, weight, target = aligned(x.flatten(0, -2)), aligned(weight), aligned(target.flatten())
    loss = chunked_linear_cross_entropy(
        x, weight, target, chunk_size=_QUACK_CHUNK, ignore_index=ignore_index, reduction="sum"
    )
    return _reduced(loss, target, ignore_index, reduction)


def quack_supports(case: Case) -> str | None:
    """Why quack can't take `case`, or None."""
    if case.x.dtype not in (torch.float16, torch.bfloat16):
        return f"quack takes float16 and bfloat16, not {case.x.dtype}"
    if case.bias is not None or case.label_smoothing or case.reduction == "none":
        return "quack takes no bias, no label smoothing and no reduction='none'"
    sizes = (case.target.numel, *case.weight.shape)
    if any(size % 8 for size in sizes):
        return f"quack takes rows, classes and features in multiples of 8, not {sizes}"
    return _plain_loss("quack", case) or _common(case)


def cut_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float | None, reduction: str,
) -> Tensor:  # fmt: skip
    """Apple's cut-cross-entropy without its filter, which leaves small gradients out."""
    import importlib

    del bias, label_smoothing, z_loss
    library = importlib.import_module("cut_cross_entropy")  # not this function
    loss = library.linear_cross_entropy(
        x.flatten(0, -2).contiguous(), weight, target.flatten().long(), ignore_index=ignore_index,
        softcap=softcap, reduction="none" if reduction == "none" else "sum", filter_eps=None, impl="cce",
    )  # fmt: skip
    return _reduced(loss, target, ignore_index, reduction)


def cut_cross_entropy_supports(case: Case) -> str | None:
    """Why cut-cross-entropy can't take `case`, or None."""
    if case.x.dtype not in (torch.float16, torch.bfloat16):
        return f"cut-cross-entropy takes float16 and bfloat16, not {case.x.dtype}"
    if case.bias is not None or case.label_smoothing or case.z_loss:
        return "cut-cross-entropy takes no bias, no label smoothing and no z_loss"
    return _common(case)


def _reduced(loss: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
    if reduction == "none":
        return loss.view(target.shape)
    return loss / (target != ignore_index).sum().clamp(min=1) if reduction == "mean" else loss


def _plain_loss(whose: str, case: Case) -> str | None:
    if case.z_loss or case.softcap is not None:
        return f"{whose} takes no z_loss and no softcap"
    return None


def _long_target(whose: str, case: Case) -> str | None:
    return None if case.target.dtype == torch.int64 else f"{whose} takes int64 targets"


def _common(case: Case) -> str | None:
    if not case.device.startswith("cuda"):
        return f"runs on CUDA, not on {case.device}"
    if case.x.dtype not in _KERNEL_DTYPES:
        return f"takes float16, bfloat16 and float32, not {case.x.dtype}"
    return "does not take empty tensors" if case.x.numel == 0 else None
