"""ops: every op with its candidates."""

import msgspec
from rich.text import Text

from bakeoff.apps.cli.terminal import console, declared, print_json
from bakeoff.apps.tabular import terminal_table
from bakeoff.device import named_device
from bakeoff.select import Candidate, Case, Op
from bakeoff.select.declare.installed import package_version

__all__ = ["Listed", "listed", "run"]


class Listed(msgspec.Struct, frozen=True):
    """A candidate as ``bakeoff ops --json`` prints it; `reasons` say why it isn't `available`
    on the device."""

    op: str
    candidate: str
    available: bool
    reasons: list[str]
    backward: bool
    traceable: bool
    capturable: bool
    deterministic: bool
    requires: dict[str, str]
    min_capability: str
    source: str
    """The modules where the implementation lives; empty where their source can't be read."""
    source_hash: str


def run(device: str, as_json: bool) -> None:
    """Print every op's candidates."""
    place = str(named_device(device))
    rows = [row for op in declared().values() for row in listed(op, place)]
    if as_json:
        print_json(rows)
        return
    names = ("op", "candidate", "here", "backward", "compile", "graph", "deterministic", "needs")
    cells = [_cells(row, repeats=above is not None and above.op == row.op)
             for above, row in zip([None, *rows], rows, strict=False)]  # fmt: skip
    console().print(terminal_table([(name, "left") for name in names], cells))


def _cells(row: Listed, *, repeats: bool) -> list[str | Text]:
    """A line of the table; where the op `repeats` that of the line above, it is left out."""
    flags = (row.backward, row.traceable, row.capturable, row.deterministic)
    here = Text("yes") if row.available else Text("no: " + "; ".join(row.reasons), style="dim")
    needs = [f"{name} {version}".strip() for name, version in row.requires.items()]
    needs += [f"compute capability {row.min_capability}"] if row.min_capability else []
    marks = ["yes" if flag else "no" for flag in flags]
    return ["" if repeats else row.op, row.candidate, here, *marks, ", ".join(needs)]


def listed(op: Op, device: str) -> list[Listed]:
    """The candidates of `op` on `device`, judged by the first case of its grid."""
    case = Case(op.cases()[0].args, device)
    return [_listed(op, candidate, case) for candidate in op.candidates]


def _listed(op: Op, candidate: Candidate, case: Case) -> Listed:
    reasons = candidate.reasons(case)
    versions = {
        package: "" if candidate.absent else package_version(package) for package in candidate.requires
    }
    capability = candidate.min_capability
    return Listed(
        op.name,
        candidate.name,
        not reasons,
        reasons,
        candidate.has_backward,
        candidate.traceable,
        candidate.capturable,
        candidate.deterministic,
        versions,
        ".".join(map(str, capability)) if capability > (0, 0) else "",
        ", ".join(candidate.modules),
        candidate.source_hash,
    )
