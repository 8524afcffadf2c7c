"""From tensors to launches, worked out once for each kind of call.

A *planner* is a function that takes a `Plan` and a call's tensors and numbers, and says through the plan what
to allocate, copy and launch. That may depend on metadata alone: shapes, strides, dtypes, the device, numbers
and flags.

The first call of a kind runs the planner. The second runs it again and records what it says, written out as a
few lines of Python that fetch addresses and go to the driver; all later calls of that kind run these lines,
as a loop over arguments would take about as long as a launch. Under Triton's interpreter, and where an
address isn't aligned to 16 bytes, the planner itself runs each time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bakeoff.kernels import counter
from bakeoff.kernels.ahead import Missing, rehearsable
from bakeoff.kernels.layout import row_stride

__all__ = ["Plan", "Planned", "Planner"]

Planner = Callable[..., None]
"""planner(plan, **values): the values of a call by name; tensors that are not there are None."""

_MOST_PLANS = 4096


class Plan:
    """What one call allocates, copies and launches, done as it is said, and recorded if asked for.

    Every tensor handed to `launch` must be one of the call's, or come from this plan.
    """

    def __init__(self, values: Mapping[str, Any], *, record: bool = False) -> None:
        self.recording = record
        self.launches = 0
        self._tensors = {id(value): name for name, value in values.items() if isinstance(value, Tensor)}
        self._kept = list(values.values())  # an id is a tensor's own only while the tensor lives
        self._pointers: dict[str, str] = {}
        self._before: list[str] = []
        self._after: list[str] = []
        self._scope: dict[str, Any] = {}
        first = next(value for value in values.values() if isinstance(value, Tensor))
        self.device: torch.device = first.device

    def launch(self, kernel: Callable[..., Any], grid: tuple[int, ...], /, **named: Any) -> None:
        """Launch a `TritonKernel` or `CudaKernel`; arguments, constants and options by their names. A grid of
        no
        programs launches nothing."""
        if 0 in grid:
            return
        compiled = kernel(grid, **named)
        self.launches += 1
        if not self.recording:
            return
        if compiled is None:
            self.recording = False
            return
        runtime: Sequence[str] = kernel.runtime  # type: ignore[attr-defined]
        arguments = "".join(f"{self._word(named[name], name)}, " for name in runtime)
        line, scope = compiled.replay(
            ", ".join(map(str, (*grid, 1, 1)[:3])), arguments, f"launch{len(self._after)}_"
        )
        self._after.append(line)
        self._scope |= scope

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised workspace on the call's device."""
        return self._new(torch.empty, tuple(shape), dtype=dtype, device=self.device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Workspace of zeros on the call's device."""
        return self._new(torch.zeros, tuple(shape), dtype=dtype, device=self.device)

    def contiguous(self, t: Tensor) -> Tensor:
        """`t` itself, or a contiguous copy."""
        return t if t.is_contiguous() else self._new(Tensor.contiguous, t)

    def rows(self, t: Tensor) -> tuple[Tensor, int]:
        """`t` [..., D] with a dense last dimension and one stride between rows, and that stride; a copy if
        need be."""
        stride = row_stride(t)
        return (t, stride) if stride is not None else (self.contiguous(t), t.shape[-1])

    def narrow(self, t: Tensor, dim: int, start: int, length: int) -> Tensor:
        """Places `start` to `start + length` of a dimension of `t`, in its memory."""
        if self.recording and self._after:
            raise RuntimeError("a plan must narrow before it launches: the address is checked")
        return self._new(Tensor.narrow, t, dim, start, length)

    def reals(self, z: Tensor) -> Tensor:
        """A complex tensor as reals [..., 2], in its own memory if that is contiguous."""
        if z.is_conj():  # a mark on the tensor that no kind of call is told by
            self.recording = False
            return torch.view_as_real(z.resolve_conj().contiguous())
        if self.recording and self._after:
            raise RuntimeError("a plan must take reals before it launches: their address is checked")
        name = self._tensors.get(id(z))
        if self.recording and name is not None:
            self._before.append(f"if {name}.is_conj(): return False")
        return self._new(torch.view_as_real, self.contiguous(z))

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Call a function of PyTorch that writes into tensors it is given, in the order of the launches."""
        function(*args, **options)
        if self.recording:
            self._after.append(self._call(function, args, options))

    def derive(self, function: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        """A new tensor that a function of PyTorch makes of others, in the order of the launches."""
        tensor = function(*args, **options)
        if id(tensor) in self._tensors:  # nothing to do for this kind of call, as in a cast to the same dtype
            return tensor
        if self.recording:
            call = self._call(function, args, options)
            name = self._name(tensor)
            self._after += [f"{name} = {call}", f"p_{name} = {name}.data_ptr()"]
            self._pointers[name] = ""  # not among those that are fetched before the first launch
            self.recording = tensor.data_ptr() % 16 == 0
        return tensor

    def constant(self, t: Tensor) -> Tensor:
        """A tensor that all calls of this kind share, such as a table."""
        if self.recording:
            name = self._name(t)
            self._scope[name] = t
        return t

    def _new(self, function: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        """A new tensor, made before the first launch where nothing has been launched yet."""
        if self._after:
            return self.derive(function, *args, **options)
        tensor = function(*args, **options)
        if self.recording:
            name = self._name(tensor)
            self._before.append(f"{name} = {self._call(function, args, options)}")
        return tensor

    def _name(self, tensor: Tensor) -> str:
        name = self._tensors.get(id(tensor))
        if name is None:
            name = self._tensors[id(tensor)] = f"t{len(self._kept)}"
            self._kept.append(tensor)
        return name

    def _call(self, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> str:
        name = f"function{len(self._scope)}"
        self._scope[name] = function
        words = [self._object(a) for a in args] + [f"{key}={self._object(a)}" for key, a in options.items()]
        return f"{name}({', '.join(words)})"

    def _object(self, value: Any) -> str:
        """What stands for `value` in a call."""
        if isinstance(value, Tensor):
            return self._known(value)
        name = f"value{len(self._scope)}"
        self._scope[name] = value
        return name

    def _word(self, value: Any, argument: str) -> str:
        """What stands for `value` in a launch: an address, or the number."""
        if isinstance(value, Tensor):
            name = self._known(value, argument)
            self._pointers.setdefault(name, f"p_{name} = {name}.data_ptr()")
            return f"p_{name}"
        if value is None or type(value) in (int, bool):
            return repr(value)
        return self._object(value)

    def _known(self, tensor: Tensor, argument: str = "an argument") -> str:
        if id(tensor) not in self._tensors:
            raise RuntimeError(
                f"{argument} is a tensor that this plan doesn't know: make it by plan.empty, "
                f"plan.contiguous, plan.derive and the like"
            )
        return self._tensors[id(tensor)]

    def written_out(self, names: Sequence[str]) -> Callable[..., bool] | None:
        """A function of the call's values, in the order of `names`, that does the same without a planner; it
        returns False, having launched nothing, where it can't. None where nothing was recorded."""
        if not self.recording:
            return None
        pointers = [line for line in self._pointers.values() if line]
        misaligned = " | ".join(f"p_{name}" for name, line in self._pointers.items() if line)
        index = self.device.index
        on_gpu = self.device.type == "cuda"
        lines = [
            f"if current_device() != {index}: return False" if on_gpu else "",
            "if runtime.launch_enter_hook.calls: return False" if self.launches else "",
            *self._before,
            *pointers,
            f"if ({misaligned}) & 15: return False" if misaligned else "",
            f"stream = current_stream({index})" if on_gpu and self.launches else "",
            *self._after,
            f"count({self.launches})" if self.launches else "",
            "return True",
        ]
        scope = self._scope | (_surroundings() if self.launches or on_gpu else {})
        body = "\n ".join(filter(None, lines))
        exec(f"def replay({', '.join(names)}):\n {body}", scope)  # noqa: S102  words of this module alone
        replay: Callable[..., bool] = scope["replay"]
        return replay


class _Rehearsal(Plan):
    """Launches nothing, and writes into nothing: what it is told to launch only says which kernels are
    missing."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.missing: dict[Any, Callable[[], Any]] = {}

    def launch(self, kernel: Callable[..., Any], grid: tuple[int, ...], /, **named: Any) -> None:
        if 0 not in grid and hasattr(kernel, "missing"):
            self.missing |= kernel.missing(grid, **named)

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        pass


def _surroundings() -> dict[str, Any]:
    """What every written-out plan names."""
    from triton import knobs  # here, as plans without launches also run where there is no triton

    return {
        "count": counter.count,
        # Those behind torch.cuda's, without a look at whether CUDA is initialised; CPU builds have none.
        "current_device": getattr(torch._C, "_cuda_getDevice", None),
        "current_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
        "runtime": knobs.runtime,
    }


def _unrecordable(*_: Any) -> bool:
    return False


class Planned:
    """A planner that remembers what it has worked out."""

    def __init__(self, planner: Planner, values: Mapping[str, str], **always: Any) -> None:
        """`values` says what a call passes, by name: "Tensor", "Tensor?" (or None), "new" and "new?" for
        tensors that the caller has just allocated for this kind of call, "new? over NAME" where such a tensor
        may be the one called NAME, or "" for anything else. The planner gets those that it names, and
        `always`."""
        self.planner = planner
        self.names = tuple(values)
        self._always = always
        self._plans: dict[Any, Callable[..., bool] | None] = {}
        self._taken = [name for name in _parameters(planner) if name not in always]
        unknown = [name for name in self._taken if name not in values]
        if unknown:
            raise TypeError(f"{planner.__module__}.{planner.__name__} asks for {unknown}, not in {[*values]}")
        self.run: Callable[..., None] = self._written_out(values)
        """Does what the planner says, for a call's values in order."""

    def _written_out(self, values: Mapping[str, str]) -> Callable[..., None]:
        """A function that looks a call's kind up: every argument by what plans may depend on."""
        device = next(name for name, kind in values.items() if kind in ("Tensor", "new"))
        key = [f"{device}.get_device()"]
        for name in self._taken:
            over = values[name].removeprefix("new? over ")
            told = f"{name}.shape, {name}.dtype, {name}.is_contiguous() or {name}.stride()"
            key.append(
                {
                    "Tensor": told,
                    "Tensor?": f"{name} is not None and ({told})",
                    "new": "",
                    "new?": f"{name} is None",
                    f"new? over {over}": f"{name} is None, {name} is {over}",
                }.get(values[name], name)
            )
        names = ", ".join(values)
        body = f"""def run({names}):
 key = ({", ".join(filter(None, key))},)
 replay = plans.get(key)
 if replay is None or not replay({names}):
  first(key, replay, ({names},))"""
        scope: dict[str, Any] = {"plans": self._plans, "first": self._first}
        exec(body, scope)  # noqa: S102  names of parameters
        run: Callable[..., None] = scope["run"]
        return run

    def _first(self, key: Any, replay: Callable[..., bool] | None, values: Sequence[Any]) -> None:
        """Run the planner; record it for the second call of a kind."""
        seen = replay is None and key in self._plans
        named = dict(zip(self.names, values, strict=True))
        taken = {name: named[name] for name in self._taken}
        plan = Plan(named, record=seen)

        def rehearse() -> Missing:
            rehearsal = _Rehearsal(named)
            self.planner(rehearsal, **taken, **self._always)
            return rehearsal.missing

        with rehearsable(rehearse):
            self.planner(plan, **taken, **self._always)
        if replay is not None:
            return
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[key] = (plan.written_out(self.names) or _unrecordable) if seen else None


def _parameters(planner: Planner) -> list[str]:
    code = planner.__code__
    return [*code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]]
