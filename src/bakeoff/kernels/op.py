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
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from bakeoff.kernels import variants
from bakeoff.kernels.declaration import Declaration, derived, reached, twice
from bakeoff.kernels.plan import Planned, Planner
from bakeoff.kernels.traced import Traced
from bakeoff.kernels.variants import Tiling, Tilings

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
    depends: Mapping[str, Sequence[str]] | None = None,
    materialize: bool = True,
    tilings: Mapping[str, Tilings] | None = None,
) -> "KernelOp":
    """An op of kernels.

    Args:
        name: in torch.ops.bakeoff; up to the first dot also of the bakeoff op, in messages.
        results: a function of the op's arguments, each declared as Tensor, Tensor | None, float, int, bool,
            str, str | None or torch.dtype, that returns the results uninitialised: a tensor or a tuple of
            tensors. It also runs on fake tensors.
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
        depends: the arguments that a result depends on, by default all; with none that wants a gradient it is
            a constant. Without `materialize`, an argument has no gradient where nothing arrives for any
            result that depends on it.
        materialize: whether zeros arrive for a result that has no gradient, or None.
        tilings: for "forward" and "backward", what they may be launched with. The planner gets one as
        `tiling`,
            or None, which stands for its default.
    """
    return KernelOp(
        Declaration(
            name, results, forward, backward, derivative, tuple(names), keeps, tuple(kept),
            tuple(kept_for), gradients or {}, like or {}, shares or {}, depends or {}, materialize,
            tilings or {},
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
        self._fill, self._fill_gradients = _planned(declared, variant or {})
        arguments, everything = declared.arguments, (*declared.arguments, *declared.names, *declared.kept)
        self._places = tuple(arguments.index(name) for name in declared.differentiable)
        self._saved = _picker([everything.index(name) for name in declared.saved])
        self._scalars = _picker([arguments.index(name) for name in declared.scalars])
        self._unsaved = [
            (place, arguments.index(name))
            for place, name in enumerate(declared.differentiable)
            if name not in declared.saved
        ]
        self._depends = [
            (declared.names.index(name), [1 + arguments.index(argument) for argument in on])
            for name, on in declared.depends.items()
        ]
        self._likes = [
            declared.saved.index(n) if n in declared.saved else None for n in declared.differentiable
        ]
        self._gradient_like = [declared.gradient_like(name) for name in declared.differentiable]
        self._laid_out_like = [declared.laid_out_like(name) for name in declared.differentiable]
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
        if torch.is_grad_enabled():
            for place in self._places:
                argument = args[place]
                if argument is not None and argument.requires_grad:
                    if torch._C._are_functorch_transforms_active():
                        return _Differentiable.apply(self, *args)  # type: ignore[no-untyped-call]
                    return _apply(self, *args)  # type: ignore[no-untyped-call]
        return self.compute(args)

    def compute(self, args: Sequence[Any]) -> Any:
        """The results; nothing is kept for a backward."""
        made = self.declared.results(*args)
        none = (None,) * len(self.declared.kept)
        if made.__class__ is tuple:
            self._fill(*args, *made, *none)
        else:
            self._fill(*args, made, *none)
        return made

    def compute_and_keep(self, args: Sequence[Any], keep: bool = True) -> tuple[Tensor, ...]:
        """The results, and behind them what is kept for the backward, or None where nothing is."""
        made = self.declared.results(*args)
        if made.__class__ is not tuple:
            made = (made,)
        if self.declared.keeps is not None:
            made = (*made, *(self.declared.keeps(*args) if keep else (None,) * len(self.declared.kept)))
        self._fill(*args, *made)
        return made  # type: ignore[no-any-return]

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
        shared = self.shared(likes, wanted) if self.declared.shares else {}
        grads: list[Tensor | None] = [
            allocate(likes[like]) if (want and i not in shared) or i in shared.values() else None
            for i, (want, like, allocate) in enumerate(
                zip(wanted, self._laid_out_like, self._gradient_like, strict=True)
            )
        ]
        self._fill_gradients(*arriving, *saved, *scalars, *grads)
        for i, other in shared.items():
            grads[i] = grads[other]
        return grads

    def shared(self, likes: Sequence[Any], wanted: Sequence[bool]) -> dict[int, int]:
        """Which of the gradients that are wanted are another's."""
        names = self.declared.differentiable
        pairs = [(names.index(name), names.index(other)) for name, other in self.declared.shares.items()]
        return {i: other for i, other in pairs if wanted[i] and likes[i].dtype == likes[other].dtype}


def _planned(
    declared: Declaration, variant: Mapping[str, Tiling]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """What fills results, and what fills gradients."""

    def planned(axis: str, planner: Planner, values: Mapping[str, str]) -> Callable[..., None]:
        always = {"tiling": variant.get(axis)} if axis in declared.tilings else {}
        return Planned(planner, values, **always).run

    values = {name: kind if kind.startswith("Tensor") else "" for name, kind in declared.kinds.items()}
    made = {**dict.fromkeys(declared.names, "new"), **dict.fromkeys(declared.kept, "new?")}
    fill = planned("forward", declared.forward, {**values, **made})
    if declared.backward is None:
        return fill, _no_backward
    arriving = {f"d{name}": "Tensor" if declared.materialize else "Tensor?" for name in declared.names}
    kept = "Tensor?" if declared.kept_for else "Tensor"
    saved = {name: values.get(name, kept) for name in declared.saved}
    # Gradients of arguments that aren't saved are all that a backward sees of them.
    filled = {f"d{name}": "new?" if name in declared.saved else "Tensor?" for name in declared.differentiable}
    scalars = dict.fromkeys(declared.scalars, "")
    return fill, planned("backward", declared.backward, {**arriving, **saved, **scalars, **filled})


def _no_backward(*_: Any) -> None:
    raise RuntimeError("these kernels have no backward")


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that takes what stands at these places."""
    if len(places) == 1:
        (place,) = places
        return lambda values: (values[place],)
    return itemgetter(*places) if places else lambda values: ()


class _Differentiable(torch.autograd.Function):
    """A call of an op, in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, op: KernelOp, *args: Any) -> Any:
        declared = op.declared
        needs = ctx.needs_input_grad
        keep = not op.keeps_for or any(needs[place + 1] for place in op.keeps_for)
        made = op.compute_and_keep(args, keep)
        ctx.op = op
        ctx.save_for_backward(*op._saved((*args, *made)))
        ctx.scalars = op._scalars(args)
        ctx.unsaved = [(i, _Outline(args[place])) for i, place in op._unsaved if args[place] is not None]
        if not declared.materialize:
            ctx.set_materialize_grads(False)
        if op._depends:
            constant = [made[i] for i, places in op._depends if not any(needs[j] for j in places)]
            if constant:
                ctx.mark_non_differentiable(*constant)
        count = len(declared.names)
        return made[0] if count == 1 else made[:count]

    @staticmethod
    def backward(ctx: Any, *arriving: Any) -> Any:
        if not torch.is_grad_enabled():
            return _gradients(ctx, arriving)
        if ctx.op.declared.derivative is not None:
            return _gradients(ctx, arriving)
        return _Once.apply(ctx, *arriving, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


# Past Function.apply's Python half, which serves functorch transforms and setup_context: microseconds a call.
_apply = super(torch.autograd.Function, _Differentiable).apply


class _Once(torch.autograd.Function):
    """The backward as a node of its own, so that differentiating it again raises instead of giving zeros."""

    @staticmethod
    def forward(ctx: Any, node: Any, *tensors: Any) -> Any:
        ctx.name = node.op.declared.name
        return _gradients(node, tensors[: len(node.op.declared.names)])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(twice(ctx.name))


def _gradients(ctx: Any, arriving: Sequence[Any]) -> Any:
    """The gradients of a call's arguments, in their order behind the op."""
    op: KernelOp = ctx.op
    needed = ctx.needs_input_grad
    grads: list[Any] = [None] * len(needed)
    if all(dy is None for dy in arriving):
        return tuple(grads)
    saved = ctx.saved_tensors
    if op.declared.derivative is not None:
        wanted = [name for name, need in zip(op.declared.arguments, needed[1:], strict=True) if need]
        found = derived(op.declared, op, arriving, saved, ctx.scalars, wanted)
        return (None, *[found.get(name) for name in op.declared.arguments])
    likes: list[Any] = [None if place is None else saved[place] for place in op._likes]
    for i, outline in ctx.unsaved:
        likes[i] = outline
    flags = [needed[place + 1] for place in op._places]
    if op.declared.depends:
        flags = reached(op.declared, arriving, flags)
    for place, want, grad in zip(
        op._places, flags, op.differentiate(arriving, saved, ctx.scalars, likes, flags), strict=True
    ):
        if want:
            grads[place + 1] = grad
    return tuple(grads)


class _Outline:
    """Shape, dtype and device of an argument that isn't saved: all that allocating its gradient takes."""

    def __init__(self, t: Tensor) -> None:
        self.shape, self.dtype, self.device = t.shape, t.dtype, t.device

    def is_contiguous(self) -> bool:
        return False

    def new_empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)
