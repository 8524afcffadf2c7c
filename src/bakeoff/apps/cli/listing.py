"""ops: what there is to choose from."""

import msgspec
from rich.table import Table
from rich.text import Text

from bakeoff.apps.cli.terminal import console, declared, device_named, print_json
from bakeoff.select import Candidate, Case, Op
from bakeoff.select.declare.installed import package_version

__all__ = ["Listed", "listed", "run"]


class Listed(msgspec.Struct, frozen=True):
    """A candidate as ``bakeoff ops --json`` gives it. `available` on the device, or the `reasons` why not."""

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
    source_hash: str


def run(device: str, as_json: bool) -> None:
    """Print every op's candidates."""
    rows = [row for op in declared().values() for row in listed(op, device_named(device))]
    if as_json:
        print_json(rows)
        return
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("op", "candidate", "here", "backward", "compile", "graph", "deterministic", "needs"):
        grid.add_column(name, overflow="fold")
    last = ""
    for row in rows:
        marks = [
            "yes" if flag else "no"
            for flag in (row.backward, row.traceable, row.capturable, row.deterministic)
        ]
        needs = [f"{name} {version}".strip() for name, version in row.requires.items()]
        needs += [f"compute capability {row.min_capability}"] if row.min_capability else []
        grid.add_row(
            row.op if row.op != last else "",
            row.candidate,
            Text(
                "yes" if row.available else "no: " + "; ".join(row.reasons),
                style="" if row.available else "dim",
            ),
            *marks,
            ", ".join(needs),
        )
        last = row.op
    console().print(grid)


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
