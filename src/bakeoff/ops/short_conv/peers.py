"""Third-party short convolutions behind this op's signature. Each library is imported on the first call.

Written against fla-core 0.6.0 and causal-conv1d 1.5. What the adaptation costs counts as theirs.
"""

import torch
from torch import Tensor

from bakeoff.select import Case

__all__ = ["causal_conv1d", "causal_conv1d_supports", "fla", "fla_supports"]

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def fla(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """flash-linear-attention's Triton kernels. Their state holds W inputs a channel, the first of no use."""
    from fla.modules.conv import causal_conv1d as convolve

    held = None if state is None else torch.nn.functional.pad(state, (0, 0, 1, 0)).mT.contiguous()
    y, end = convolve(
        x, weight, bias, initial_state=held, output_final_state=True, activation=activation,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return y, end[..., 1:].mT.to(x.dtype).contiguous()


def fla_supports(case: Case) -> str | None:
    """Why flash-linear-attention can't take `case`, or None."""
    if case.cu_seqlens is not None:
        return "fla lists packed sequences' chunks on the host, for which it waits for the device"
    return _common(case)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """causal-conv1d's CUDA kernels, which take channels-last data as [B, C, T] by its strides."""
    from causal_conv1d import causal_conv1d_fn

    del cu_seqlens
    y, end = causal_conv1d_fn(
        x.mT, weight, bias, initial_states=None if state is None else state.contiguous().mT,
        return_final_states=True, activation=activation,
    )  # fmt: skip
    return y.mT, end.mT.contiguous()


def causal_conv1d_supports(case: Case) -> str | None:
    """Why causal-conv1d can't take `case`, or None."""
    if not 2 <= case.weight.shape[1] <= 4:
        return f"causal-conv1d takes 2 to 4 taps, not {case.weight.shape[1]}"
    if case.cu_seqlens is not None:
        return "causal-conv1d takes no cu_seqlens, and no state with its seq_idx"
    if case.x.shape[2] % 8 or case.x.stride[2] != 1 or any(step % 8 for step in case.x.stride[:2]):
        return "causal-conv1d takes final states of data whose channels lie side by side, a multiple of 8"
    return _common(case)


def _common(case: Case) -> str | None:
    if not case.device.startswith("cuda"):
        return f"runs on CUDA, not on {case.device}"
    for name in ("x", "weight"):
        if (dtype := getattr(case, name).dtype) not in _KERNEL_DTYPES:
            return f"takes float16, bfloat16 and float32, not a {dtype} {name}"
    return "does not take empty tensors" if case.x.numel == 0 else None
