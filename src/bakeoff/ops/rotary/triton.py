"""The ``triton`` candidate of rotary: what its kernel is launched on, and the candidate of both forms."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from bakeoff.kernels.layout import empty_like
from bakeoff.kernels.op import KernelOp, kernel_op
from bakeoff.kernels.plan import Plan
from bakeoff.kernels.triton import TritonKernel
from bakeoff.kernels.variants import Tiling as AnyTiling
from bakeoff.kernels.variants import Tilings
from bakeoff.ops.rotary import kernels
from bakeoff.ops.rotary.kernels import Tiling, dense_strides, is_head_major, launch, tilings
from bakeoff.ops.rotary.normed.triton import normalize_rotate

__all__ = ["Rotary", "rotary", "rotate"]

_kernel = TritonKernel(kernels._rotate)

Pair = tuple[Tensor, Tensor]


def results(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, position_ids: Tensor | None,
    conjugate: bool, q_head_major: bool, k_head_major: bool,
) -> Pair:  # fmt: skip
    """Room for q' and k', dense: [B, H, T, D] seen as [B, T, H, D] where `..._head_major`."""
    del cos, sin, interleaved, position_ids, conjugate
    return _room(q, q_head_major), _room(k, k_head_major)


def _room(x: Tensor, head_major: bool) -> Tensor:
    return x.new_empty_strided(x.shape, dense_strides(x.shape, True)) if head_major else empty_like(x)


def forward(
    plan: Plan, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool,
    position_ids: Tensor | None, conjugate: bool, q_head_major: bool, k_head_major: bool,
    turned_q: Tensor, turned_k: Tensor, tiling: Tiling | None,
) -> None:  # fmt: skip
    """q and k turned by their angles, or by the opposite ones where `conjugate`: one launch."""
    if turned_q.numel() + turned_k.numel() == 0:
        return
    q, k = (x if x.stride(3) == 1 else plan.contiguous(x) for x in (q, k))
    if cos.stride(1) != 1 or sin.stride() != cos.stride():
        cos, sin = plan.contiguous(cos), plan.contiguous(sin)
    if position_ids is not None:
        position_ids = plan.contiguous(position_ids)
    grid, numbers = launch(
        q.shape, k.shape, q.stride(), k.stride(), q.element_size(), cos.shape, cos.stride(0),
        position_ids=0 if position_ids is None else position_ids.dim(), interleaved=interleaved,
        conjugate=conjugate, head_major=(q_head_major, k_head_major), tiling=tiling,
    )  # fmt: skip
    plan.launch(
        _kernel, grid, q=q, k=k, cos=cos, sin=sin, position_ids=position_ids, q_out=turned_q,
        k_out=turned_k, **numbers,
    )  # fmt: skip


def derivative(
    op: Callable[..., Pair], wanted: Sequence[str], dturned_q: Tensor | None, dturned_k: Tensor | None,
    cos: Tensor, sin: Tensor, interleaved: bool, position_ids: Tensor | None, conjugate: bool,
    q_head_major: bool, k_head_major: bool,
) -> Mapping[str, Tensor]:  # fmt: skip
    """The rotation back: rotations are linear in q and k, and the transpose of one is its inverse."""
    dq = dturned_q if "q" in wanted else None
    dk = dturned_k if "k" in wanted else None
    # The one that isn't wanted takes part with no heads.
    if dq is None:
        if dk is None:
            return {}
        _, dk = op(
            dk[:, :, :0], dk, cos, sin, interleaved, position_ids, not conjugate, q_head_major, k_head_major
        )
        return {"k": dk}
    left = dq[:, :, :0] if dk is None else dk
    dq, right = op(dq, left, cos, sin, interleaved, position_ids, not conjugate, q_head_major, k_head_major)
    return {"q": dq} if dk is None else {"q": dq, "k": right}


rotate = kernel_op(
    "rotary",
    results=results,
    forward=forward,
    derivative=derivative,
    names=("turned_q", "turned_k"),
    gradients={"q": empty_like, "k": empty_like},
    materialize=False,
    tilings={"forward": Tilings(Tiling, tilings)},
)
"""The candidate with the direction, and the order of each result and gradient in memory, as arguments.
Gradients are launched as the forward is."""


class Rotary:
    """The candidate: results lie in the order of time and heads in which the arguments do. With weights it is
    another op than without, launched by its own tilings."""

    def __init__(self, rotate: KernelOp, normalize_rotate: KernelOp) -> None:
        self.rotate, self.normalize_rotate = rotate, normalize_rotate
        self._bound: dict[str, Rotary] = {"": self}

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, position_ids: Tensor | None,
        q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 1e-6,
        offset: float = 0.0,
    ) -> Pair:  # fmt: skip
        """(q', k') for float16, bfloat16 and float32."""
        turned: Pair
        if q_weight is None:
            turned = self.rotate(
                q, k, cos, sin, interleaved, position_ids, False, is_head_major(q), is_head_major(k)
            )
        else:
            turned = self.normalize_rotate(
                q, k, cos, sin, interleaved, position_ids, q_weight, k_weight, eps, offset,
                is_head_major(q), is_head_major(k),
            )  # fmt: skip
        return turned

    def variants(self, case: Any) -> dict[str, Sequence[AnyTiling]]:
        """The tilings that each direction may be launched with for a case, the default first."""
        return (self.rotate if case.q_weight is None else self.normalize_rotate).variants(case)

    def bind(self, text: str) -> "Rotary":
        """The candidate with the variant that `text` names; one with a backward of its own is of the form
        with weights."""
        if text not in self._bound:
            plain = self.rotate if "backward(" in text else self.rotate.bind(text)
            self._bound[text] = Rotary(plain, self.normalize_rotate.bind(text))
        return self._bound[text]


rotary = Rotary(rotate, normalize_rotate)
