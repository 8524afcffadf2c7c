"""What a swap did: what it replaced, what it left and why, and how to take it back."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from bakeoff.errors import SwapError
from bakeoff.swaps.replacement import Replacement, replacement_of, traced

__all__ = ["Left", "Report", "remove"]


class Left(NamedTuple):
    """A module that keeps its own code for one of swap's kinds, and why."""

    kind: str
    name: str
    cls: str
    reason: str


class Report:
    """What `bakeoff.swap` did to a model. Print it, or use it in a `with` statement, which undoes the swap.

    Attributes:
        model: the model, the same object as before.
        replaced: {module's name: the `Replacement` that is its forward now}.
        left: modules that were looked at and keep their own code, and why.
        optimizer: the converted optimizer, where one was given.
    """

    def __init__(self, model: nn.Module, replaced: dict[str, Replacement], left: list[Left]) -> None:
        self.model, self.replaced, self.left = model, replaced, left
        self.optimizer: torch.optim.Optimizer | None = None
        self._traced_before = traced()

    def calls(self) -> dict[str, int]:
        """How often each kind of replacement ran since the swap; torch.compile's code isn't counted."""
        total: Counter[str] = Counter()
        for replacement in self.replaced.values():
            total.update(replacement.calls)
        return dict(total)

    def traced(self) -> dict[str, int]:
        """How often torch.compile has traced each kind since the swap, in this process: what it traced runs
        in each call of the compiled code."""
        return dict(traced() - self._traced_before)

    def silent(self) -> list[str]:
        """Replacements that have not run since the swap, as ``name (kind)``."""
        return [
            f"{name or 'the model'} ({kind})"
            for name, replacement in self.replaced.items()
            for kind, count in replacement.calls.items()
            if not count
        ]

    def verify(self, *batch: Any, **named: Any) -> Any:
        """Prove on a batch that every replacement runs, and that outputs, loss and all gradients are as near
        to float64 as those of the model's own code.

        The batch is what the model is called with: ``report.verify(input_ids=..., labels=...)``. Dropout is
        off. Gradients of the model stay as they are. Takes the memory of the model in float64 and of four
        sets of gradients.

        Returns:
            Comparison: the errors of both, by name.

        Raises:
            SwapError: a replacement did not run, or a result is further off than the rule of contests allows.
        """
        from bakeoff.swaps.verify import verify

        return verify(self, batch, named)

    def undo(self) -> None:
        """Give the modules their own forward back. Parameters keep what training made of them.

        Raises:
            SwapError: a forward has been wrapped or replaced since; nothing is undone then.
        """
        remove({name: held for name, held in self.replaced.items() if replacement_of(held.module) is held})

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Within it the model runs its own code."""
        held = [one for one in self.replaced.values() if one.stands]
        for one in held:
            one.remove()
        try:
            yield
        finally:
            for one in held:
                one.install()

    def __enter__(self) -> "Report":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [f"swap: {type(self.model).__name__}"]
        rows: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for name, held in self.replaced.items():
            for kind, op in zip(held.found.kinds, held.found.ops, strict=True):
                rows[kind, held.cls.__name__, f"-> {op}"].append(name)
        for one in self.left:
            rows[one.kind, one.cls, f"stays: {one.reason}"].append(one.name)
        for (kind, cls, what), names in rows.items():
            lines.append(f"  {kind:9} {len(names):4} {cls:24} {what}")
        if self.optimizer is not None:
            lines.append(f"  optimizer    1 {'AdamW':24} -> bakeoff.optim.AdamW")
        if len(lines) == 1:
            lines.append("  nothing to replace was found")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


def remove(replaced: Mapping[str, Replacement]) -> None:
    """Takes these replacements away, or none where one has been wrapped."""
    for name, held in replaced.items():
        if not held.stands:
            raise SwapError(
                f"unswap: {name or 'the model'}'s forward has been wrapped or replaced since the swap "
                f"({vars(held.module).get('forward')!r}); undo that first (what accelerate wraps: "
                f"accelerator.unwrap_model(model, keep_fp32_wrapper=False))"
            )
    for held in replaced.values():
        held.remove()
