"""Kernels as one op of PyTorch: differentiable by autograd, traceable by torch.compile, from one declaration.

::

    def results(x: Tensor) -> Tensor:  # the arguments by name and type; y, uninitialised
        return empty_like(x)

    def forward(plan, x, y):
        plan.launch(...)  # what fills y

    def backward(plan, x, dy, dx):
        plan.launch(...)  # what fills dx

    squared_relu = kernel_op("squared_relu", results=results, forward=forward, backward=backward)

The functions ask for values by name. In `forward` these are the op's arguments and results; in `backward`
also what arrives for a result y, called dy, and what is to be filled for an argument x, called dx (None where
nobody wants it). Tensors that `backward` names are saved for it, and nothing else is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from bakeoff.kernels import variants
from bakeoff.kernels.declaration import Declaration
from bakeoff.kernels.plan import Planned, Planner
from bakeoff.kernels.traced import Traced
from bakeoff.kernels.variants import Tiling, Tilings
from bakeoff.kernels.written import Fills, written

__all__ = ["KernelOp", "kernel_op"]


def kernel_op(
    name: str,
    *,
    results: Callable[..., Any],
    forward: Planner,
    backward: Planner | None = None,
    derivative: Callable[..., Mapping[str, Any]] | None = None,
    names: Sequence[str] = ("y",),
    keeps: Callable[..., Sequence[Tensor]] | None = None,
    kept: Sequence[str] = (),
    kept_for: Sequence[str] = (),
    gradients: Mapping[str, Callable[[Any], Tensor]] | None = None,
    like: Mapping[str, str] | None = None,
    shares: Mapping[str, str] | None = None,
    reuses: Mapping[str, str] | None = None,
    depends: Mapping[str, Sequence[str]] | None = None,
    materialize: bool = True,
    views: Mapping[str, Callable[..., Tensor]] | None = None,
    tilings: Mapping[str, Tilings] | None = None,
) -> "KernelOp":
    """An op of kernels.

    Args:
        name: in torch.ops.bakeoff; up to the first dot also of the bakeoff op, in messages.
        results: a function of the op's arguments, each declared as Tensor, Tensor | None, float, int, bool,
            str, torch.dtype, or one of float, int and str or None, that returns the results uninitialised: a
            tensor or a tuple of tensors. It also runs on fake tensors.
        forward: the planner that fills the results (see `bakeoff.kernels.plan`).
        backward: the planner that fills the gradients.
        derivative: instead of `backward`, for an op whose derivative is made of differentiable ops: a
            function that returns gradients by argument. It may ask for what a backward may, for `wanted`, the
            names of arguments whose gradients are asked for, and for `op`, this op as it is launched now. The
            arguments that have gradients are those in `gradients`.
        names: of the results, as planners call them.
        keeps: as `results`, makes tensors that forward fills for the backward alone.
        kept: their names. Forward gets None for each where no gradient is wanted.
        kept_for: the arguments whose gradients need what is kept; where none of these is wanted, nothing is
            kept, and the backward gets None or an empty tensor. By default all.
        gradients: how an argument's gradient is allocated from the argument; by default it is contiguous.
        like: {argument: other}: the gradient of `argument` is allocated from `other`, of the same shape and
            dtype.
        shares: {argument: other}: where both have one dtype, the gradient of `argument` is that of `other`.
        reuses: {argument: kept}: where the graph is gone after the backward, `kept` has the argument's shape
            and dtype, and torch.compile doesn't trace, the gradient is written over what was kept: the
            backward gets one tensor under both names, and must read each element before it writes it.
        depends: the arguments that a result depends on, by default all; with none that wants a gradient it is
            a constant. Without `materialize`, an argument has no gradient where nothing arrives for any
            result that depends on it.
        materialize: whether zeros arrive for a result that has no gradient, or None.
        views: results that are views of arguments and stand behind the others, each made by a function of the
            op's arguments. Kernels fill nothing of them, and an op of torch.library returns none, but what
            arrives for one reaches the same backward. Not with `materialize`.
        tilings: for "forward" and "backward", what they may be launched with. The planner gets one as
        `tiling`,
            or None, which stands for its default.
    """
    return KernelOp(
        Declaration(
            name, results, forward, backward, derivative, tuple(names), keeps, tuple(kept),
            tuple(kept_for), gradients or {}, like or {}, shares or {}, reuses or {}, depends or {},
            materialize, views or {}, tilings or {},
        )
    )  # fmt: skip


class KernelOp:
    """Call it with the op's arguments by position. See `kernel_op`."""

    def __init__(
        self,
        declared: Declaration,
        variant: Mapping[str, Tiling] | None = None,
        root: "KernelOp | None" = None,
    ) -> None:
        self.declared = declared
        self.variant = variants.text(variant or {})
        """The launch configuration; "" for the defaults."""
        self.__name__, self.__module__ = declared.name, declared.results.__module__
        self._root = root or self
        self._bound: dict[str, KernelOp] = {}
        self._fills = _fills(declared, variant or {})
        self._eager = written(declared, self._fills, self)
        self._call = self._eager.call
        arguments = declared.arguments
        self._places = tuple(arguments.index(name) for name in declared.differentiable)
        self.keeps_for = [arguments.index(name) for name in declared.kept_for]
        """The places of the arguments whose gradients need what is kept; none stand for all."""
        self.traced: Traced = Traced(declared, self.bind, self) if root is None else root.traced

    # Variants ----------------------------------------------------------------------------------------------

    def variants(self, case: Any) -> dict[str, Sequence[Tiling]]:
        """The tilings that each direction may be launched with for a case, the default first."""
        return {axis: tilings.of(case) for axis, tilings in self.declared.tilings.items()}

    def bind(self, text: str) -> "KernelOp":
        """This op with the variant that `text` names (see `bakeoff.kernels.variants`)."""
        root = self._root
        if text == "":
            return root
        bound = root._bound.get(text)
        if bound is None:
            kinds = {axis: tilings.kind for axis, tilings in self.declared.tilings.items()}
            bound = root._bound[text] = KernelOp(self.declared, variants.parse(text, kinds), root)
        return bound

    # A call ------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        if is_compiling():
            places = self.keeps_for or self._places
            wants = [args[place] is not None and args[place].requires_grad for place in places]
            return self.traced(args, self.variant, torch.is_grad_enabled() and any(wants))
        return self._call(*args)

    def compute(self, args: Sequence[Any]) -> Any:
        """The results; nothing is kept for a backward."""
        return self._eager.compute(*args)

    def compute_and_keep(self, args: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """The results, and behind them what is kept for the backward."""
        return self._eager.compute_and_keep(*args)

    def differentiate(
        self,
        arriving: Sequence[Tensor | None],
        saved: Sequence[Tensor | None],
        scalars: Sequence[Any],
        likes: Sequence[Any],
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:
        """The gradient of each differentiable argument that is `wanted`, given what arrives for the results.

        `likes` are tensors of these arguments' shapes and dtypes. A gradient that is shared stands twice.
        """
        if self._eager.differentiate is None:
            raise RuntimeError(f"{self.declared.name}: these kernels have no backward")
        return self._eager.differentiate(arriving, saved, scalars, likes, wanted)

    def shared(self, likes: Sequence[Any], wanted: Sequence[bool]) -> dict[int, int]:
        """Which of the gradients that are wanted are another's."""
        names = self.declared.differentiable
        pairs = [(names.index(name), names.index(other)) for name, other in self.declared.shares.items()]
        return {i: other for i, other in pairs if wanted[i] and likes[i].dtype == likes[other].dtype}


def _fills(declared: Declaration, variant: Mapping[str, Tiling]) -> Fills:
    """What fills results, and what fills gradients."""

    def planned(axis: str, planner: Planner, values: Mapping[str, str]) -> Callable[..., None]:
        always = {"tiling": variant.get(axis)} if axis in declared.tilings else {}
        return Planned(planner, values, **always).run

    values = {name: kind if kind.startswith("Tensor") else "" for name, kind in declared.kinds.items()}
    made = {**dict.fromkeys(declared.names, "new"), **dict.fromkeys(declared.kept, "new?")}
    fill = planned("forward", declared.forward, {**values, **made})
    if declared.backward is None:
        return Fills(fill, None)
    arriving = {f"d{name}": "Tensor" if declared.materialize else "Tensor?" for name in declared.returned}
    kept = "Tensor?" if declared.kept_for else "Tensor"
    saved = {name: values.get(name, kept) for name in declared.saved}
    # Gradients of arguments that aren't saved are all that a backward sees of them.
    filled = {f"d{name}": "new?" if name in declared.saved else "Tensor?" for name in declared.differentiable}
    filled |= {f"d{name}": f"new? over {other}" for name, other in declared.reuses.items()}
    scalars = dict.fromkeys(declared.scalars, "")
    return Fills(fill, planned("backward", declared.backward, {**arriving, **saved, **scalars, **filled}))
