"""The ``compiled`` candidate: torch.compile of a plain PyTorch formula."""

import functools
import itertools
import logging
import os
import re
import shutil
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bakeoff import hardware
from bakeoff.modes import watched
from bakeoff.select.declare.candidate import Candidate
from bakeoff.select.declare.case import Case, TensorMeta
from bakeoff.select.declare.installed import missing

__all__ = ["compiled", "compiled_candidate", "compiler_missing", "unlinkable"]

log = logging.getLogger("bakeoff")
_STATIC = 8
_serial = itertools.count()


def compiled(formula: Callable[..., Any], options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """`formula` under torch.compile: exact shapes get code of their own, until there are too many of them.
    `options` are inductor's.

    The first `_STATIC` shapes of each set of dtypes, flags and feature sizes are compiled for themselves,
    which is the fastest torch.compile does; later ones share code with dynamic shapes, so that changing
    lengths don't compile forever. Where torch.compile refuses to compile once more, `formula` runs as it is;
    so it does while a dispatch mode looks at calls.
    """
    backend = functools.partial(_inductor, patches=dict(options)) if options else _inductor
    units: dict[tuple[Any, ...], Callable[..., Any]] = {}
    shapes: dict[tuple[Any, ...], set[Any]] = {}

    def call(*args: Any) -> Any:
        if watched():  # torch.compile runs what it first meets there uncompiled forever
            return formula(*args)
        recorded = torch.is_grad_enabled()
        family = tuple(
            (a.shape[-1:], a.dim(), a.dtype, a.device, a.requires_grad and recorded)
            if isinstance(a, torch.Tensor)
            else a
            for a in args
        )
        shape = tuple(a.shape for a in args if isinstance(a, torch.Tensor))
        known = shapes.setdefault(family, set())
        if len(known) < _STATIC:
            known.add(shape)
        static = shape in known
        unit = (family, shape) if static else (family,)
        program = units.get(unit)
        if program is None:
            program = units[unit] = torch.compile(
                _twin(formula), fullgraph=True, dynamic=False if static else None, backend=backend
            )
        try:
            if not torch._C._len_torch_function_stack():
                return program(*args)
            with torch._C.DisableTorchFunction():  # Dynamo can't always trace torch.set_default_device
                return program(*args)
        except Exception as error:
            if type(error).__name__ != "FailOnRecompileLimitHit":
                raise
            if formula not in units.values():
                log.warning(
                    "%s.%s: torch.compile reached torch._dynamo.config.recompile_limit; these calls run "
                    "uncompiled", formula.__module__, formula.__name__,
                )  # fmt: skip
            units[unit] = formula
            return formula(*args)

    call.__doc__ = f"torch.compile of {formula.__module__}.{formula.__name__}"
    call.__module__ = formula.__module__
    return call


def _inductor(graph: Any, inputs: Any, patches: dict[str, Any] | None = None) -> Any:
    """torch.compile's own backend, with a backward that may run twice.

    By default its backward writes over what the forward saved, and `backward(retain_graph=True)` raises.
    Whoever calls an op doesn't know that torch.compile is behind it.
    """
    from torch._functorch import config  # here, because importing the two takes seconds
    from torch._inductor.compile_fx import compile_fx

    options: dict[str, Any] = {"donated_buffer": False}
    if any(isinstance(value, torch.SymInt) for value in inputs):
        options["enable_autograd_cache"] = False  # it would keep an entry made before the last lines here
    with config.patch(**options):
        program = compile_fx(graph, inputs, config_patches=patches)
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []  # the None that it is now is taken for "some"
    return program


def _twin(formula: Callable[..., Any]) -> Callable[..., Any]:
    """`formula` with a code object and name of its own: torch.compile counts recompilations per code object
    and gives up after a few, and remembers per name which sizes have varied."""
    code = formula.__code__.replace(co_name=f"{formula.__name__}_{next(_serial)}")
    return types.FunctionType(
        code, formula.__globals__, formula.__name__, formula.__defaults__, formula.__closure__
    )


def compiler_missing(case: Case) -> str | None:
    """Why torch.compile can't generate code for this case's device, or None."""
    if any(isinstance(a, TensorMeta) and a.numel == 0 for a in case.args.values()):
        return "an empty tensor is not worth compiling for"
    if case.device.startswith("cuda"):
        why = missing("triton") or hardware.without_triton(case.device)
        return None if why is None else f"torch.compile needs triton on a GPU: {why}"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None and shutil.which("clang++") is None:
        return f"torch.compile needs a C++ compiler on the CPU ({compiler} not found; install g++ or set CXX)"
    return unlinkable()


def unlinkable() -> str | None:
    """Why torch.compile's C++ code can't be linked, or None: it passes PyTorch's folder on unquoted."""
    place = str(Path(torch.__file__).parent)
    if not re.search(r"""[\s'"\\]""", place):
        return None
    return f"torch.compile on the CPU fails where PyTorch's folder has spaces or quotes in its path: {place}"


def compiled_candidate(formula: Callable[..., Any]) -> Candidate:
    """The candidate that torch.compile makes of a formula, often the definition."""
    return Candidate("compiled", compiled(formula), supports=compiler_missing)
