"""What a layer of large-chunk test-time training computes, in plain PyTorch: a yardstick for memory_scan.

The mathematics of LaCT (Zhang et al. 2025, Test-Time Training Done Right), written here: neither its authors'
code nor their Triton kernels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bakeoff.ops.muon.plain import orthogonalised

__all__ = ["large_chunk", "products"]


def large_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    rates: Tensor,
    orthogonal: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One chunk: what f(x) = down (silu(gate x) * up x) answers to q, then f after a step on all of k and v.

    The step is one of gradient descent on -sum of f(k_t) . v_t, with rates of each token and matrix, after
    which every row of a matrix has its old length.

    Args:
        q, k, v: [G, T, D], in the dtype in which products are taken.
        gate, up: [G, H, D], float32. down: [G, D, H].
        rates: [3, G, T, 1], of gate, up and down.
        orthogonal: each matrix's summed gradient is orthogonalised first, as Muon does.

    Returns:
        o [G, T, D] and the new gate, up and down.
    """
    narrow = [w.to(k.dtype).mT for w in (gate, up, down)]
    o = (F.silu(q @ narrow[0]) * (q @ narrow[1])) @ narrow[2]
    opened, carried = k @ narrow[0], k @ narrow[1]
    kept = F.silu(opened)
    back = v @ narrow[2].mT
    share = torch.sigmoid(opened)
    slopes = back * carried * share * (1 + opened * (1 - share)), back * kept, v
    seen = k, k, kept * carried
    new = []
    for w, slope, x, rate in zip((gate, up, down), slopes, seen, rates, strict=True):
        step = (slope * rate).to(k.dtype).mT @ x
        moved = w + (orthogonalised(step) if orthogonal else step)
        new.append(moved * (w.norm(dim=2, keepdim=True) / (moved.norm(dim=2, keepdim=True) + 1e-5)))
    return o, new[0], new[1], new[2]


def products(G: int, T: int, D: int, H: int, orthogonal: bool = False) -> int:
    """FLOPs of the products, forward: with tokens three to answer, three to differentiate, three sums; with
    `orthogonal` three for each of five steps of each matrix."""
    least, most = min(D, H), max(D, H)
    return 9 * 2 * G * T * D * H + orthogonal * 3 * 5 * 2 * G * least**2 * (least + 2 * most)
