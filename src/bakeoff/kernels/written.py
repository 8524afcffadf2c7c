"""What a declaration amounts to in eager mode, written out as a few lines of Python.

A loop over arguments takes longer than what it does to each of them, and as long as a small kernel runs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bakeoff.kernels.declaration import Declaration, derived, parameters, twice

__all__ = ["Eager", "Fills", "written"]


class Fills(NamedTuple):
    """What fills the results and what is kept, and what fills gradients."""

    forward: Callable[..., None]
    backward: Callable[..., None] | None


class Eager(NamedTuple):
    """A kernel op's functions; all but `differentiate` take the op's arguments."""

    call: Callable[..., Any]
    """The results, differentiable where an argument asks for it."""
    compute: Callable[..., Any]
    """The results but for views; nothing is kept for a backward."""
    compute_and_keep: Callable[..., tuple[Tensor | None, ...]]
    """The results but for views, and behind them what is kept for the backward."""
    differentiate: Callable[..., list[Tensor | None]] | None
    """(what arrives, saved tensors, scalars, likes, wanted) -> the gradient of each differentiable argument
    that is wanted. `likes` are tensors of these arguments' shapes and dtypes. A gradient that is shared
    stands twice."""


def written(declared: Declaration, fills: Fills, op: Callable[..., Any]) -> Eager:
    """The functions of a declaration; `op` is how a derivative calls the op itself."""
    text = [*_forward(declared), *_backward(declared)]
    scope: dict[str, Any] = {
        "make": declared.results, "keep": declared.keeps, "fill": fills.forward,
        "fill_gradients": fills.backward, "outline": Outline, "grad_enabled": torch.is_grad_enabled,
        "transformed": torch._C._are_functorch_transforms_active, "op": op,
        "once": _once, "derive": _derive, "declared": declared, "alike": _alike,
        "graph_stays": torch._C._autograd._get_current_graph_task_keep_graph,
        **{f"allocate_{name}": declared.gradient_like(name) for name in declared.differentiable},
        **{f"view_{name}": view for name, view in declared.views.items()},
    }  # fmt: skip
    exec("\n".join(text), scope)  # noqa: S102  names of parameters
    methods = {name: staticmethod(scope[name]) for name in ("forward", "backward")}
    function: Any = type(declared.name, (torch.autograd.Function,), methods)
    scope["apply_transformed"] = function.apply
    # Past Function.apply's Python half, which serves functorch transforms and setup_context: microseconds.
    scope["apply"] = super(torch.autograd.Function, function).apply
    return Eager(scope["call"], scope["compute"], scope["compute_and_keep"], scope.get("differentiate"))


def _forward(declared: Declaration) -> list[str]:
    """`call`, `compute`, `compute_and_keep`, and `forward` of autograd's function."""
    places = {name: i for i, name in enumerate(declared.arguments)}
    given, made, kept = (", ".join(names) for names in (declared.arguments, declared.names, declared.kept))
    everything = _tuple([*declared.names, *declared.kept])
    filled = ", ".join([*declared.arguments, *declared.names, *declared.kept])
    nothing = f" {kept.replace(', ', ' = ')} = None" if kept else ""
    keeping = f" {kept}, = keep({given})" if kept else ""
    returned = ", ".join(declared.returned)
    views = [f" {name} = view_{name}({', '.join(parameters(view))})" for name, view in declared.views.items()]
    asks = [
        f"{name}.requires_grad" if declared.kinds[name] == "Tensor"
        else f"({name} is not None and {name}.requires_grad)"
        for name in declared.differentiable
    ]  # fmt: skip
    conditions = [f"needs[{places[name]}]" for name in declared.kept_for]
    if conditions:
        keeping_if_asked = [f" if {' or '.join(conditions)}:\n {keeping}", " else:", f" {nothing}"]
    else:
        keeping_if_asked = [keeping]
    unsaved = [
        f"None if {name} is None else {_outlined(name)}" if declared.kinds[name] == "Tensor?"
        else _outlined(name)
        for name in _unsaved(declared)
    ]  # fmt: skip
    depends = {
        name: " or ".join(f"needs[{places[argument]}]" for argument in on) or "False"
        for name, on in declared.depends.items()
    }
    constant = [f" if not ({needed}): constant.append({name})" for name, needed in depends.items()]
    if len(constant) == 1:
        constant = [
            f" if not ({needed}): ctx.mark_non_differentiable({name})" for name, needed in depends.items()
        ]
    elif constant:
        constant = [" constant = []", *constant, " if constant: ctx.mark_non_differentiable(*constant)"]
    lines = [
        f"def call({given}):",
        f" if grad_enabled() and ({' or '.join(asks) or 'False'}):",
        f"  return apply_transformed({given}) if transformed() else apply({given})",
        nothing, f" {made} = make({given})", f" fill({filled})", *views, f" return {returned}",
        f"def compute({given}):",
        nothing, f" {made} = make({given})", f" fill({filled})", f" return {made}",
        f"def compute_and_keep({given}):",
        f" {made} = make({given})", keeping, f" fill({filled})", f" return {everything}",
        f"def forward(ctx, {given}):",
        " needs = ctx.needs_input_grad" if conditions or constant else "",
        f" {made} = make({given})", *keeping_if_asked, f" fill({filled})",
        f" ctx.save_for_backward({', '.join(declared.saved)})",
        f" ctx.rest = {_tuple([*declared.scalars, *unsaved])}",
        "" if declared.materialize else " ctx.set_materialize_grads(False)",
        *views, *constant, f" return {returned}",
    ]  # fmt: skip
    return [line for line in lines if line.strip()]


def _backward(declared: Declaration) -> list[str]:
    """`differentiate`, and `backward` of autograd's function."""
    arriving = [f"d{name}" for name in declared.returned]
    none = " and ".join(f"{name} is None" for name in arriving)
    lines = [
        f"def backward(ctx, {', '.join(arriving)}):",
        f" if {none}: return {_tuple(['None'] * len(declared.arguments))}",
    ]
    if declared.derivative is not None:
        return [*lines, f" return derive(declared, op, ctx, ({', '.join(arriving)},))"]
    if not declared.differentiable:
        return [*lines, " raise RuntimeError('no argument has a gradient')"]
    filled = [*arriving, *declared.saved, *declared.scalars, *[f"d{n}" for n in declared.differentiable]]
    shares = [
        f" share_{name} = want_{name} and like_{name}.dtype == like_{other}.dtype"
        for name, other in declared.shares.items()
    ]
    rooms = []
    for name in declared.differentiable:
        users = [f"share_{sharing}" for sharing, other in declared.shares.items() if other == name]
        condition = " or ".join([f"want_{name}", *users])
        if name in declared.shares:
            condition = f"want_{name} and not share_{name}"
        like = f"like_{declared.like.get(name, name)}"
        room = f"allocate_{name}({like})"
        if name in declared.reuses:
            room = (
                f"({declared.reuses[name]} if reuse and alike({declared.reuses[name]}, {like}) else {room})"
            )
        rooms.append(f" d{name} = {room} if {condition} else None")
    body = [*shares, *rooms, f" fill_gradients({', '.join(filled)})"]
    body += [f" if share_{name}: d{name} = d{other}" for name, other in declared.shares.items()]
    grads = [f"d{name}" for name in declared.differentiable]
    lent = set(declared.shares.values())  # of which there may be a gradient that nobody wants
    returned = [
        "None" if name not in declared.differentiable
        else f"(d{name} if want_{name} else None)" if name in lent
        else f"d{name}"
        for name in declared.arguments
    ]  # fmt: skip
    wanted = [f"want_{name}" for name in declared.arguments]
    likes = [f"like_{name}" for name in declared.differentiable]
    unsaved = _unsaved(declared)
    lines = [
        "def differentiate(arriving, saved, scalars, likes, wanted):",
        " reuse = False" if declared.reuses else "",
        _unpack(arriving, "arriving"), _unpack(declared.saved, "saved"),
        _unpack(declared.scalars, "scalars"), _unpack(likes, "likes"),
        _unpack([f"want_{name}" for name in declared.differentiable], "wanted"),
        *body, f" return [{', '.join(grads)}]",
        *lines,
        f" if grad_enabled(): return once(ctx, backward, '{declared.name}', ({', '.join(arriving)},))",
        _unpack(wanted, "ctx.needs_input_grad"), *_reached(declared),
        _unpack(declared.saved, "ctx.saved_tensors"),
        _unpack([*declared.scalars, *[f"like_{name}" for name in unsaved]], "ctx.rest"),
        *[f" like_{name} = {name}" for name in declared.differentiable if name in declared.saved],
        *[f" if like_{name} is not None: like_{name} = outline(*like_{name})" for name in unsaved],
        " reuse = not graph_stays()" if declared.reuses else "",
        *body, f" return {_tuple(returned)}",
    ]  # fmt: skip
    return [line for line in lines if line]


def _reached(declared: Declaration) -> list[str]:
    """Lines by which no gradient is wanted of an argument that no result for which something arrives depends
    on."""
    lines = []
    for name in declared.differentiable:
        through = [r for r in declared.returned if r not in declared.depends or name in declared.depends[r]]
        if len(through) < len(declared.returned):
            arrives = " or ".join(f"d{result} is not None" for result in through) or "False"
            lines.append(f" want_{name} = want_{name} and ({arrives})")
    return lines


def _unsaved(declared: Declaration) -> list[str]:
    """The arguments that have gradients and aren't saved: an outline is all that allocating these takes."""
    if declared.derivative is not None:
        return []
    return [name for name in declared.differentiable if name not in declared.saved]


def _outlined(name: str) -> str:
    return f"({name}.shape, {name}.dtype, {name}.device)"


def _tuple(words: Sequence[str]) -> str:
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


def _unpack(names: Sequence[str], source: str) -> str:
    return f" {', '.join(names)}, = {source}" if names else ""


class Outline:
    """Shape, dtype and device of an argument that isn't saved: all that allocating its gradient takes."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device

    def is_contiguous(self) -> bool:
        return False

    def new_empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def _alike(kept: Tensor | None, like: Any) -> bool:
    return kept is not None and kept.shape == like.shape and kept.dtype == like.dtype


def _derive(declared: Declaration, op: Any, ctx: Any, arriving: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients of all arguments, from the op's derivative."""
    needed = zip(declared.arguments, ctx.needs_input_grad, strict=True)
    wanted = [name for name, need in needed if need]
    found = derived(declared, op, arriving, ctx.saved_tensors, ctx.rest, wanted)
    return tuple(found.get(name) for name in declared.arguments)


def _once(ctx: Any, backward: Callable[..., Any], name: str, arriving: Sequence[Any]) -> Any:
    return _Once.apply(ctx, backward, name, len(arriving), *arriving, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    """The backward as a node of its own, so that differentiating it again raises instead of giving zeros."""

    @staticmethod
    def forward(
        ctx: Any, node: Any, backward: Callable[..., Any], name: str, count: int, *tensors: Any
    ) -> Any:
        ctx.name = name
        return backward(node, *tensors[:count])  # gradients aren't recorded here

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(twice(ctx.name))
