"""FlexAttention by one of its back ends."""

from typing import get_args

import torch
from torch.nn.attention import flex_attention

__all__ = ["flex_refused"]


def flex_refused(backend: str, dtype: torch.dtype) -> str | None:
    """Why FlexAttention can't run by `backend` in this dtype, or None; "" is Triton."""
    if backend and backend not in get_args(getattr(flex_attention, "_Backend", None)):
        return f"this PyTorch's FlexAttention has no back end {backend}"
    return "takes float16 and bfloat16" if backend and dtype == torch.float32 else None
