"""What the methods of long_conv with kernels have in common: arguments, results, what is kept."""

from collections.abc import Mapping

from torch import Tensor

from bakeoff.channel_major.rows import result_like
from bakeoff.kernels.op import KernelOp, kernel_op
from bakeoff.kernels.plan import Planner
from bakeoff.kernels.variants import Tilings

__all__ = ["long_conv_op"]


def long_conv_op(
    method: str, forward: Planner, backward: Planner, tilings: Mapping[str, Tilings]
) -> KernelOp:
    """long_conv by a method that fills `out` and, where it is there, `y`: the convolution before `gate_out`,
    which that gate's gradient needs."""
    return kernel_op(
        f"long_conv.{method}",
        results=_results,
        names=("out",),
        forward=forward,
        backward=backward,
        keeps=_kept,
        kept=("y",),
        kept_for=("gate_out",),
        gradients=dict.fromkeys(("u", "gate_in", "gate_out"), result_like),
        like={"gate_in": "u", "gate_out": "u"},
        tilings=tilings,
    )


def _results(
    u: Tensor,
    h: Tensor,
    skip: Tensor | None,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    causal: bool,
) -> Tensor:
    del h, skip, gate_in, gate_out, causal  # `supports` asks for causal filters
    return result_like(u)


def _kept(u: Tensor, *_: object) -> tuple[Tensor]:
    return (result_like(u),)
