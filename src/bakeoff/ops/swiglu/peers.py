"""Third-party swiglu kernels behind this op's signature. Each library is imported on the first call.

Written against liger-kernel 0.8.5 and fla-core 0.6.0. quack-kernels has the activation only as the last step
of a matrix product. What the adaptation costs counts as theirs.
"""

import torch

from bakeoff.select import Case

__all__ = ["fla", "fla_supports", "liger", "liger_supports"]

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def liger(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """Liger-Kernel, one program a row. It writes its gradients over the inputs: they get copies."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    halves = _halves(gate, up)
    if torch.is_grad_enabled() and any(half.requires_grad for half in halves):
        # What isn't contiguous Liger copies itself.
        halves = [half.clone() if half.is_contiguous() else half for half in halves]
    y: torch.Tensor = LigerSiLUMulFunction.apply(*halves)
    return y


def liger_supports(case: Case) -> str | None:
    """Why Liger-Kernel can't take `case`, or None."""
    width = case.gate.shape[-1] // (2 if case.up is None else 1)
    if width > 65536:
        return f"liger takes rows of up to 65536 elements, not {width}"
    return _common(case)


def fla(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """flash-linear-attention, which reads halves of a tensor where they are."""
    from fla.modules.activations import swiglu

    y: torch.Tensor = swiglu(*_halves(gate, up))
    return y


def fla_supports(case: Case) -> str | None:
    """Why flash-linear-attention can't take `case`, or None."""
    return _common(case)


def _halves(gate: torch.Tensor, up: torch.Tensor | None) -> list[torch.Tensor]:
    return list(gate.chunk(2, dim=-1)) if up is None else [gate, up]


def _common(case: Case) -> str | None:
    if not case.device.startswith("cuda"):
        return f"runs on CUDA, not on {case.device}"
    if case.gate.dtype not in _KERNEL_DTYPES:
        return f"takes float16, bfloat16 and float32, not {case.gate.dtype}"
    return "does not take empty tensors" if case.gate.numel == 0 else None
