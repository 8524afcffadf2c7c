"""A kernel op as ops of torch.library, which torch.compile keeps whole: one forward, one for its
gradients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bakeoff.kernels.declaration import Declaration, constants, derived, reached, twice

__all__ = ["Traced"]


class Traced:
    """Registers ``bakeoff::NAME_forward`` and ``bakeoff::NAME_backward``, and calls them.

    Tensors that are absent are of no elements, as an op of torch.library returns each of its results. Views
    of arguments, which it may not return, are taken beside it.
    """

    def __init__(self, declared: Declaration, bind: Callable[[str], Any], op: Any) -> None:
        self._declared, self._bind, self._op = declared, bind, op
        own = f"bakeoff::{declared.name.replace('.', '_')}"
        arguments = ", ".join(f"{kind} {name}" for name, kind in declared.kinds.items())
        returned = _tensors(len(declared.names) + len(declared.kept))
        self.forward: Any = torch.library.custom_op(
            f"{own}_forward", self._forward, mutates_args=(),
            schema=f"({arguments}, bool keep, str variant) -> {returned}",
        )  # fmt: skip
        self.forward.register_fake(self._forward_fake)
        self.backward: Any = None
        self._joined: Any = _joined(self) if declared.views else None
        if declared.differentiable:
            self.forward.register_autograd(self._gradients, setup_context=self._save)
        if declared.backward is not None:
            takes = [f"Tensor? d{name}" for name in declared.returned]
            takes += [f"Tensor? {name}" for name in declared.saved]
            takes += [f"{declared.kinds[name]} {name}" for name in declared.scalars]
            takes += [f"Tensor? like_{name}" for name in declared.differentiable]
            self.backward = torch.library.custom_op(
                f"{own}_backward", self._backward, mutates_args=(),
                schema=f"({', '.join(takes)}, bool[] wanted, str variant) -> "
                f"{_tensors(len(declared.differentiable))}",
            )  # fmt: skip
            self.backward.register_fake(self._backward_fake)
            self.backward.register_autograd(self._refuse)

    def __call__(self, args: Sequence[Any], variant: str, keep: bool) -> Any:
        """The results; `keep`: what the backward asks for is made, too."""
        if self._joined is not None:
            results, _ = self._without_kept(self._joined(*args, keep, variant))
            return results
        made = self.forward(*args, keep, variant)
        count = len(self._declared.names)
        if count + len(self._declared.kept) == 1:
            return made
        return made[0] if count == 1 else tuple(made[:count])

    # Forward -----------------------------------------------------------------------------------------------

    def _forward(self, *args: Any) -> Any:
        *given, keep, variant = args
        op = self._bind(variant)
        return self._returned(op.compute_and_keep(given) if keep else op.compute(given), given)

    def _forward_fake(self, *args: Any) -> Any:
        *given, keep, _ = args
        made = self._declared.results(*given)
        if keep and self._declared.keeps is not None:
            made = (*(made if isinstance(made, tuple) else (made,)), *self._declared.keeps(*given))
        return self._returned(made, given)

    def _returned(self, made: Any, given: Sequence[Any]) -> Any:
        """The results and what is kept, or nothing in its place."""
        made = made if isinstance(made, tuple) else (made,)
        missing = len(self._declared.names) + len(self._declared.kept) - len(made)
        made = (*made, *[_any(given).new_empty(0) for _ in range(missing)])
        return made[0] if len(made) == 1 else made

    def _save(self, ctx: Any, inputs: Any, output: Any) -> None:
        declared = self._declared
        *given, _, ctx.variant = inputs
        made = output if isinstance(output, tuple | list) else (output,)
        values = dict(zip(declared.arguments, given, strict=True))
        values |= dict(zip((*declared.names, *declared.kept), made, strict=False))
        outlines = [
            None if name in declared.saved or declared.derivative else _outline(values[name])
            for name in declared.differentiable
        ]
        ctx.save_for_backward(*[values[name] for name in declared.saved], *outlines)
        ctx.scalars = [values[name] for name in declared.scalars]
        needed = dict(zip(declared.arguments, ctx.needs_input_grad, strict=False))
        results, kept = self._without_kept(made)
        ctx.mark_non_differentiable(*constants(declared, results, needed), *kept)
        ctx.set_materialize_grads(False)

    def _without_kept(self, made: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Results, with views if there are any, and what is kept, which stands between them."""
        count, kept = len(self._declared.names), len(self._declared.kept)
        return (*made[:count], *made[count + kept :]), made[count : count + kept]

    def _refuse(self, ctx: Any, *_: Any) -> Any:
        del ctx
        raise RuntimeError(twice(self._declared.name))

    # Gradients ---------------------------------------------------------------------------------------------

    def _gradients(self, ctx: Any, *arriving: Any) -> Any:
        declared = self._declared
        needed = dict(zip(declared.arguments, ctx.needs_input_grad, strict=False))
        found, _ = self._without_kept(arriving)
        # For views nothing arrives where the op of torch.library is called by itself.
        arriving = (*found, *(None,) * (len(declared.returned) - len(found)))
        if all(dy is None for dy in arriving):
            return (None,) * (len(needed) + 2)
        count = len(declared.saved)
        saved, outlines = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if declared.derivative is not None:
            wanted = [name for name, need in needed.items() if need]
            grads: Mapping[str, Any] = derived(
                declared, self._itself(ctx.variant), arriving, saved, ctx.scalars, wanted
            )
        else:
            known = dict(zip(declared.saved, saved, strict=True))
            likes = [
                known.get(n, outline) for n, outline in zip(declared.differentiable, outlines, strict=True)
            ]
            flags = [needed[name] for name in declared.differentiable]
            if declared.depends:
                flags = reached(declared, arriving, flags)
            made = self.backward(*arriving, *saved, *ctx.scalars, *likes, flags, ctx.variant)
            made = list(made) if isinstance(made, tuple | list) else [made]
            for i, other in self._op.shared(likes, flags).items():
                made[i] = made[other]
            grads = {
                name: grad
                for name, grad, flag in zip(declared.differentiable, made, flags, strict=True)
                if flag
            }
        return (*[grads.get(name) if need else None for name, need in needed.items()], None, None)

    def _itself(self, variant: str) -> Callable[..., Any]:
        """The op as a derivative calls it, also where no call of Python is traced."""
        return lambda *args: self(args, variant, torch.is_grad_enabled())

    def _backward(self, *args: Any) -> Any:
        arriving, saved, scalars, likes, flags, variant = self._parted(args)
        if self._declared.materialize and any(dy is None for dy in arriving):
            arriving = self._with_zeros(arriving, saved, scalars, likes)
        op = self._bind(variant)
        grads = op.differentiate(arriving, saved, scalars, likes, flags)
        for i in op.shared(likes, flags):
            grads[i] = None
        return self._placed(grads, args)

    def _backward_fake(self, *args: Any) -> Any:
        *_, likes, flags, _ = self._parted(args)
        shared = self._op.shared(likes, flags)
        grads = [
            self._declared.gradient_like(name)(likes[self._declared.laid_out_like(name)])
            if (want and i not in shared) or i in shared.values()
            else None
            for i, (name, want) in enumerate(zip(self._declared.differentiable, flags, strict=True))
        ]
        return self._placed(grads, args)

    def _parted(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """What arrives, saved tensors, scalars, what gradients are like, which are wanted, the variant."""
        declared = self._declared
        parts = []
        for group in (declared.returned, declared.saved, declared.scalars, declared.differentiable):
            parts.append(args[: len(group)])
            args = args[len(group) :]
        return (*parts, *args)

    def _placed(self, grads: Sequence[Tensor | None], args: Sequence[Any]) -> Any:
        placed = tuple(_any(args).new_empty(0) if grad is None else grad for grad in grads)
        return placed[0] if len(placed) == 1 else placed

    def _with_zeros(self, arriving: Any, saved: Any, scalars: Any, likes: Any) -> list[Tensor]:
        """Zeros for the results for which nothing arrives."""
        declared = self._declared
        values = dict(zip(declared.differentiable, likes, strict=True))
        values |= dict(zip(declared.saved, saved, strict=True)) | dict(
            zip(declared.scalars, scalars, strict=True)
        )
        made = declared.results(*[values.get(name) for name in declared.arguments])
        return [empty.zero_() if dy is None else dy for dy, empty in zip(arriving, made, strict=True)]


def _joined(op: Traced) -> Callable[..., Any]:
    """The op with its views, which no op of torch.library may return: a node of autograd around both, which
    torch.compile leaves whole."""

    class Joined(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            made = op.forward(*inputs)
            made = tuple(made) if isinstance(made, tuple | list) else (made,)
            declared = op._declared
            made = (*made, *[declared.view(name, inputs) for name in declared.views])
            op._save(ctx, inputs, made)
            return made

        @staticmethod
        def backward(ctx: Any, *arriving: Any) -> Any:
            return op._gradients(ctx, *arriving)

    def joined(*inputs: Any) -> Any:
        return Joined.apply(*inputs)  # type: ignore[no-untyped-call]

    whole: Callable[..., Any] = torch.compiler.allow_in_graph(joined)
    return whole


def _tensors(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _any(values: Sequence[Any]) -> Tensor:
    return next(value for value in values if isinstance(value, Tensor))


def _outline(t: Tensor | None) -> Tensor | None:
    """A tensor of one element with the shape, dtype and device of `t`."""
    return None if t is None else t.new_empty(()).expand(t.shape)
