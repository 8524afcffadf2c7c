"""A Gluon kernel whose warps run three functions that share nothing.

It shows what racecheck says of warp_specialize alone; ``python -m tests.gpu.specialized`` runs
it.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def _number(out, place: gl.constexpr, warps: gl.constexpr):
    size: gl.constexpr = 32 * warps
    x = gl.arange(0, size, gl.BlockedLayout([1], [32], [warps], [0]))
    gl.store(out + place + x, x)


@gluon.jit
def _kernel(out):
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=1)
    gl.warp_specialize(
        [(_number, (out, 0, 4)), (_number, (out, 128, 4)), (_number, (out, 256, 1))],
        [4, 1],
        [24, 24],
    )


def main() -> None:
    """Fills and checks what the three write."""
    out = torch.full((288,), -1, device="cuda", dtype=torch.int32)
    for programs in (1, 7):
        _kernel[(programs,)](out, num_warps=4)
    counted = torch.arange(288, dtype=torch.int32, device="cuda")
    assert torch.equal(out, counted - counted // 128 * 128)


if __name__ == "__main__":
    main()
