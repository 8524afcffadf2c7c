"""The ``triton`` candidate of rotary_append_: what its kernel is launched on."""

import torch
from torch import Tensor

from bakeoff.kernels.layout import alignment, tile_of
from bakeoff.kernels.triton import TritonKernel
from bakeoff.ops.rotary_append import kernels

__all__ = ["rotary_append", "sizes"]

_kernel = TritonKernel(kernels._append)
_TILE = 1 << 11
"""Elements of heads that a program has, at most."""


def rotary_append(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor, at: Tensor
) -> Tensor:
    """One launch."""
    B, T, H, D = q.shape
    K, half = k.shape[2], cos.shape[1]
    y = torch.empty((B, T, H, D), dtype=q.dtype, device=q.device)
    if B * T * (H + K) == 0:
        return y
    q, k, v = (x if x.stride(3) == 1 or D == 1 else x.contiguous() for x in (q, k, v))
    if cos.stride(1) != 1 or sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    steps = {"q": q.stride()[:3], "k": k.stride()[:3], "v": v.stride()[:3]}
    letters = {"q": "bth", "k": "bth", "v": "bth", "kc": "bhs", "vc": "bhs"}
    steps |= {"kc": k_cache.stride()[:3], "vc": v_cache.stride()[:3]}
    align = alignment(*(step for given in steps.values() for step in given))
    numbers = {
        f"{name}_{letter}": step // align
        for name, given in steps.items()
        for letter, step in zip(letters[name], given, strict=True)
    }
    cut = sizes(H, K, D, half)
    heads = cut["HEADS"]
    programs = B * T * (-(-H // heads) + 2 * -(-K // heads))
    _kernel(
        (programs,), q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, cos=cos, sin=sin, at=at, y=y, T=T,
        S=k_cache.shape[2], row=cos.stride(0), **numbers, H=H, K=K, D=D, HALF=half, ALIGN=align, **cut,
        num_warps=4 if heads * cut["WIDTH"] > 1024 else 1,
    )  # fmt: skip
    return y


def sizes(H: int, K: int, D: int, half: int) -> dict[str, int]:
    """How heads are cut, and the sizes of tiles."""
    width = tile_of(D)
    heads = max(1, min(_TILE // width, tile_of(max(H, K))))
    return {"HEADS": heads, "WIDTH": width, "BLOCK": tile_of(half), "REST": tile_of(D - 2 * half)}
