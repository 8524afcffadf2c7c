"""Variants: the launch configurations of one candidate, as text.

``forward(rows=4,warps=8) backward(rows=2,warps=4)``: the numbers of each axis. An axis that is left out is at
the default that the kernel computes for the call; "" is the default on every axis.

An implementation that has variants is an object with ``variants(case)``, a sequence of NamedTuples of whole
numbers per axis (the default first, then by promise), and ``bind(text)``, the callable for one of them, the
same each time. What `bakeoff.kernels.op.kernel_op` makes has both. Others have the default alone.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bakeoff.kernels.variants import text as written
from bakeoff.select.declare.candidate import Candidate
from bakeoff.select.declare.case import Case

__all__ = [
    "AXES",
    "EVERY",
    "MOST",
    "at",
    "bound",
    "joined",
    "label",
    "named",
    "parts",
    "unusable",
    "variants_of",
]

AXES = ("forward", "backward")
EVERY = "*"
"""In place of a text: all variants of a candidate but the default."""
MOST = 64
"""Configurations that count on one axis, the default among them."""
_FIELD = r"[A-Za-z]\w{0,30}=-?[0-9]{1,9}"
_PART = re.compile(rf"({'|'.join(AXES)})\({_FIELD}(?:,{_FIELD}){{0,20}}\)", re.ASCII)
_NAMED = re.compile(rf" ((?:{'|'.join(AXES)})\(.*|{re.escape(EVERY)})", re.DOTALL)


def parts(text: str) -> dict[str, str]:
    """`text` by axis. Raises ValueError for anything that isn't of the form of a variant."""
    found: dict[str, str] = {}
    for part in text.split(" ") if text else ():
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"{text[:80]!r} is no variant, such as 'forward(rows=4,warps=8)'")
        found[match[1]] = part
    if joined(found) != text:
        raise ValueError(f"{text[:80]!r} is no variant: each axis once, in the order {', '.join(AXES)}")
    return found


def variants_of(candidate: Candidate, case: Case) -> dict[str, tuple[str, ...]]:
    """By axis the texts of a candidate's variants for `case`, the default left out, by promise; nothing where
    it has none. Imports the implementation, so ask only candidates that run in this process anyway."""
    listed = _listed(candidate, case)
    return {axis: listed[axis][1:] for axis in AXES if len(listed.get(axis, ())) > 1}


def joined(parts: Mapping[str, str]) -> str:
    """One text of the variants of single axes."""
    return " ".join(parts[axis] for axis in AXES if axis in parts)


def bound(candidate: Candidate, text: str) -> Callable[..., Any]:
    """What runs `candidate` as the variant `text`."""
    implementation: Any = candidate.implementation
    call: Callable[..., Any] = implementation.bind(text) if text else implementation
    return call


def at(candidate: Candidate, text: str) -> Candidate:
    """`candidate` with the variant `text` as its implementation."""
    return replace(candidate, call=bound(candidate, text), load=None) if text else candidate


def label(name: str, text: str) -> str:
    """A candidate and its variant as stages and memos name them."""
    return f"{name} {text}" if text else name


def named(text: str) -> tuple[str, str]:
    """The candidate's name and the variant in what `label` made."""
    match = _NAMED.search(text)
    return (text[: match.start()], match[1]) if match else (text, "")


def unusable(candidate: Candidate, case: Case, text: str) -> str | None:
    """Why `case` can't run as the variant `text`, which may come from a damaged file, or None."""
    try:
        asked = parts(text)
        known = _listed(candidate, case)
    except Exception as error:  # whatever a kernel's own code raises
        return f"{type(error).__name__}: {error}"
    for axis, part in asked.items():
        if part not in known.get(axis, ()):
            return f"{part} is none of its variants for this case"
    return None


def _listed(candidate: Candidate, case: Case) -> dict[str, tuple[str, ...]]:
    """By axis the texts of the configurations that a candidate declares for `case`, the default first."""
    declared = getattr(candidate.implementation, "variants", None)
    axes: dict[str, tuple[str, ...]] = {}
    for axis, tilings in declared(case).items() if declared else ():
        if axis not in AXES:
            raise ValueError(f"variants() has an axis {axis!r}; the axes are {', '.join(AXES)}")
        if axis == "forward" or case.needs_grad:
            axes[axis] = tuple(dict.fromkeys(written({axis: tiling}) for tiling in list(tilings)[:MOST]))
    return axes
