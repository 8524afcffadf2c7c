"""The words of the selector: `Op`, `Candidate`, `Case`, `Cost`.

An op is declared once. The public call, the contest, the tests, the benchmark and the docs table all
walk over the same declaration.
"""

import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import reprlib
import secrets
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.compiler import is_compiling

from bakeoff.errors import PolicyError, Unsupported
from bakeoff.select.choose import hot

__all__ = ["Candidate", "Case", "Cost", "Op", "TensorMeta", "find_op", "missing", "registry"]

registry: dict[str, "Op"] = {}
"""Every declared op by name."""

Scalar = int | float | bool | str | None


class TensorMeta(msgspec.Struct, frozen=True):
    """What selection may know of a tensor: everything but its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorMeta":
        grad = tensor.requires_grad and torch.is_grad_enabled()
        return cls(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()), grad)

    @classmethod
    def dense(cls, shape: Sequence[int], dtype: torch.dtype, *, grad: bool = False) -> "TensorMeta":
        """A contiguous tensor."""
        stride, step = [], 1
        for size in reversed(shape):
            stride.append(step)
            step *= max(size, 1)
        return cls(tuple(shape), dtype, tuple(reversed(stride)), grad)

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        return self.numel == 0 or all(
            size == 1 or mine == dense
            for size, mine, dense in zip(
                self.shape, self.stride, TensorMeta.dense(self.shape, self.dtype).stride, strict=True
            )
        )


class Case(msgspec.Struct, frozen=True):
    """One concrete input set of an op, as metadata. Arguments read as attributes: ``case.x.dtype``.

    `args` holds every argument of the op by name: tensors as `TensorMeta`, the rest as they are.
    """

    args: dict[str, TensorMeta | Scalar]
    device: str
    name: str = ""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.args[name]
        except KeyError:
            raise AttributeError(f"case has no argument {name!r}; it has {', '.join(self.args)}") from None

    @property
    def tensors(self) -> dict[str, TensorMeta]:
        return {name: value for name, value in self.args.items() if isinstance(value, TensorMeta)}

    @property
    def needs_grad(self) -> bool:
        return any(meta.requires_grad for meta in self.tensors.values())

    def said(self, name: str) -> str:
        """Argument `name` as an error shows it."""
        value = self.args[name]
        return "a tensor" if isinstance(value, TensorMeta) else reprlib.repr(value)

    def replace(self, **args: TensorMeta | Scalar) -> "Case":
        """The same case with some arguments changed."""
        return Case({**self.args, **args}, self.device, self.name)

    def without_grad(self) -> "Case":
        """The same case, forward only."""
        return self.replace(
            **{n: msgspec.structs.replace(meta, requires_grad=False) for n, meta in self.tensors.items()}
        )


class Cost(msgspec.Struct, frozen=True):
    """What a case must do at least: bytes through device memory and floating-point operations."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Candidate:
    """One implementation of an op.

    `load` is either the callable itself or ``"module:attribute"``, imported on first use, so that
    declaring an op imports neither triton nor any third party. It takes the op's arguments by position.
    """

    name: str
    load: str | Callable[..., Any]
    supports: Callable[[Case], str | None] = lambda case: None
    """Why this case can't be taken, or None."""
    requires: tuple[str, ...] = ()
    """Importable packages; the candidate is absent, with a reason, while one is missing."""
    has_backward: bool = True
    traceable: bool = True
    """Works inside torch.compile(fullgraph=True)."""
    capturable: bool = True
    """Works inside CUDA graph capture."""
    deterministic: bool = True
    baseline: bool = False
    """Measured for the record, never chosen."""
    min_capability: tuple[int, int] = (0, 0)
    """Least CUDA compute capability."""
    launches: str | Callable[[], int] | None = None
    """A counter that its own kernels advance; a candidate whose counter stands still is rejected."""
    sources: tuple[str, ...] = ()
    """Modules whose text decides what it computes, beside the module named in `load`; "package:file" names
    another file of a package."""

    @cached_property
    def call(self) -> Callable[..., Any]:
        return resolve(self.load)

    @property
    def third_party(self) -> bool:
        """Whether it runs another project's kernels."""
        return not {*self.requires} <= {"torch", "triton"}

    @cached_property
    def absent(self) -> str | None:
        """Why it can't be used on this installation at all, or None."""
        return next(filter(None, map(missing, self.requires)), None)

    @cached_property
    def unread(self) -> bool:
        """Whether it is a callable whose source can't be read: a notebook's, or a compiled one."""
        return not isinstance(self.load, str) and _source(_home(self.load)) is None

    @cached_property
    def source_hash(self) -> str:
        """Changes when the candidate's own code or a required package's version changes. Where the source is
        `unread` the hash is for this object alone, so that no verdict outlives it."""
        digest = hashlib.sha256(secrets.token_bytes() if self.unread else b"")
        own = self.load.split(":")[0] if isinstance(self.load, str) else _home(self.load)
        for source in (own, *self.sources):
            module, _, file = source.partition(":")
            text = _source(module, file)
            if text is None and module:
                text = f"{module} {package_version(module.partition('.')[0])}".encode()
            digest.update(text or b"")
        for package in self.requires:
            if package != "triton":  # its version is in the table's own stamp
                digest.update(f"{package} {package_version(package)}".encode())
        return digest.hexdigest()[:12]

    def reasons(self, case: Case) -> list[str]:
        """Every reason why this candidate can't take `case`; empty when it can."""
        if self.absent:
            return [self.absent]
        found = []
        if case.needs_grad and not self.has_backward:
            found.append("has no backward")
        if torch.are_deterministic_algorithms_enabled() and not self.deterministic:
            found.append("is not deterministic, and torch.use_deterministic_algorithms is on")
        if self.min_capability > (0, 0):
            if not case.device.startswith("cuda"):
                found.append(f"runs on CUDA, not on {case.device}")
            elif torch.cuda.get_device_capability(case.device) < self.min_capability:
                found.append(f"needs compute capability {'.'.join(map(str, self.min_capability))}")
        try:
            own = self.supports(case)
        except Exception as error:
            own = f"its supports() fails: {type(error).__name__}: {error}"
        if own:
            found.append(own)
        return found


@dataclass(eq=False)
class Op:
    """A mathematical function with one definition, its `reference`, and the candidates that compute it.

    Calling it selects a candidate by metadata alone and runs it. `candidates` stand from the simplest to
    the most complex; the first is the incumbent, plain PyTorch, and takes every valid case.
    """

    name: str
    reference: Callable[..., Any]
    candidates: tuple[Candidate, ...]
    check: Callable[[Case], None]
    """Raises with the fix in the message when the arguments don't make sense."""
    bucket: Callable[[Case], Case]
    """The representative case that a contest runs for this one: row counts rounded, layout made canonical."""
    cost: Callable[[Case], Cost]
    cases: Callable[[], list[Case]]
    """The grid that tests and benchmarks walk over (on "cuda"; tests shrink it)."""
    heuristic: Callable[[Case, str], str]
    """(case, regime) -> candidate name, for a case that no table knows."""
    features: dict[str, int]
    """Per tensor argument: how many trailing dimensions are exact features; the leading ones count rows."""
    batched: frozenset[str]
    """Arguments whose dimension 0 holds independent items (so the float64 reference may run in pieces);
    every output must be batched too."""
    draw: Callable[[str, TensorMeta, torch.Generator], torch.Tensor | None] | None = None
    """An argument's own values (name, meta, generator) where random normal ones make no sense, else None."""
    prepare: Callable[[Callable[..., Any], Sequence[Any]], Callable[[], Any]] | None = None
    """(a candidate's callable, arguments) -> the call to time, for an op whose everyday call differs from the
    functional one that is verified: one that updates in place, say. None: the callable on the arguments."""
    home: str = ""
    """Where a worker process imports it: ``"module:attribute"``; empty means ``bakeoff.ops.<name>.op:OP``."""

    params: tuple[str, ...] = field(init=False)
    """Argument names in the order candidates take them."""
    by_name: dict[str, Candidate] = field(init=False)
    floats: frozenset[str] = field(init=False)
    """The arguments that the definition annotates with float."""
    traced: dict[str, Callable[..., Any]] = field(init=False, default_factory=dict)
    """Candidates' callables that torch.compile has met: a plain dict, which it can trace through."""

    def __post_init__(self) -> None:
        self.params = tuple(inspect.signature(self.reference).parameters)
        self.by_name = {candidate.name: candidate for candidate in self.candidates}
        self.floats = _floats(self.reference)
        registry[self.name] = self

    @property
    def incumbent(self) -> Candidate:
        return self.candidates[0]

    def candidate(self, name: str) -> Candidate:
        """The candidate called `name`, or an error that lists the ones there are."""
        if not isinstance(name, str) or name not in self.by_name:
            raise Unsupported(f"{self.name} has no candidate {name!r}; it has {', '.join(self.by_name)}")
        return self.by_name[name]

    def case(self, args: Sequence[Any], name: str = "") -> Case:
        """The case that a call with these arguments makes."""
        values = {
            key: TensorMeta.of(arg) if isinstance(arg, torch.Tensor) else self.scalar(key, arg)
            for key, arg in zip(self.params, args, strict=True)
        }
        device = next((str(arg.device) for arg in args if isinstance(arg, torch.Tensor)), "cpu")
        return Case(values, device, name)

    def scalar(self, name: str, value: Any) -> Any:
        """`value` of argument `name` as keys hold it: 1 for a float is 1.0, as memos take these for equal."""
        if type(value) is not int or name not in self.floats:
            return value
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf

    def __call__(self, *args: Any, impl: str | None = None) -> Any:
        """Run the candidate selected for these arguments, or `impl`.

        The hot path: a call of a kind that the current memo knows is only looked up, here, since even a
        function that does it would show.
        """
        if impl is None and not is_compiling():
            try:
                decided = hot.memo.get()
                if decided is None:
                    decided = hot.process_memo
                for guard in decided.get(self, ()):
                    call = guard(args)
                    if call is not None:
                        break
                else:
                    call = hot.known(self, args)
            except (TypeError, ValueError, AttributeError, RuntimeError):
                call = None  # no tensor, one without strides, nothing to hash: the check will name it
            if call is not None:
                return call(*args)
        from bakeoff.select.choose.dispatch import (
            dispatch,  # bound late: dispatch knows policies, an op does not
        )

        return dispatch(self, args, impl)


def _floats(function: Callable[..., Any]) -> frozenset[str]:
    """The arguments annotated with float, or with a union that holds it."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # annotations that can't be resolved
        return frozenset()
    return frozenset(name for name, hint in hints.items() if float in (hint, *typing.get_args(hint)))


def _home(call: Callable[..., Any]) -> str:
    """The module that holds the code of `call`, behind what only wraps it; "" if nothing says so."""
    while isinstance(call, partial):
        call = call.func
    if type(call).__module__ == "torch._ops":  # torch.ops.NAMESPACE.OP, whoever registered it
        return ""
    call = getattr(call, "_init_fn", call)  # of torch.library.custom_op
    return getattr(inspect.unwrap(call), "__module__", None) or ""


def _source(module: str, file: str = "") -> bytes | None:
    """The text of a module, or of another file of that package; None where it can't be read."""
    if module == "__main__":  # a script, which has no spec
        origin, loader = getattr(sys.modules[module], "__file__", None), None
    else:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):  # no module, or one that was made by hand
            spec = None
        origin, loader = (spec.origin, spec.loader) if spec else (None, None)
    if origin is None:
        return None
    path = Path(origin).with_name(file) if file else Path(origin)
    try:
        if path.is_file():
            return path.read_bytes()
        from_archive: Callable[[str], bytes] | None = getattr(loader, "get_data", None)
        return from_archive(str(path)) if from_archive else None
    except OSError:
        return None


def find_op(name: str) -> Op:
    """The registered op called `name`, or an error that names the nearest."""
    importlib.import_module("bakeoff.ops")  # declares them all; by name, because ops stand above select
    if name not in registry:
        near = difflib.get_close_matches(name, registry, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; the ops are {', '.join(sorted(registry))}"
        raise PolicyError(f"there is no op {name!r}{hint}")
    return registry[name]


def resolve(target: str | Callable[..., Any]) -> Callable[..., Any]:
    """The object behind ``"module:attribute"``; anything else is returned as it is."""
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


def missing(package: str) -> str | None:
    """Why a package can't be used, or None."""
    try:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        if package == "triton" and torch.cuda.is_available():  # which kernels need, and torch.compile
            importlib.import_module(package)
    except Exception as error:
        return f"{package} can't be imported ({type(error).__name__}: {error})"
    return None


def package_version(package: str) -> str:
    """The installed version of an importable package, or "?"."""
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        return "?"
    for name in _distributions().get(package, [package]):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "?"


@cache
def _distributions() -> Mapping[str, list[str]]:
    """The distributions behind each importable package. Found once, as it takes a second."""
    return importlib.metadata.packages_distributions()
