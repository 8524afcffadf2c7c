"""table: show, copy and compare the verdicts on disk."""

import datetime
import logging
from pathlib import Path

import click
from rich.text import Text

from bakeoff import hardware
from bakeoff.apps.cli.terminal import console, declared, print_plain
from bakeoff.apps.render import milliseconds
from bakeoff.apps.tabular import terminal_table
from bakeoff.device import named_device
from bakeoff.errors import TableError
from bakeoff.select.choose import policy
from bakeoff.select.choose.table import Table, read, write
from bakeoff.select.contests.verdict import Verdict
from bakeoff.select.declare.variants import label

__all__ = ["diff", "export", "import_", "path", "show", "standing"]

log = logging.getLogger("bakeoff")


def path(device: str) -> None:
    """Print where the table is."""
    click.echo(policy.store.path(str(named_device(device))))


def show(file: Path | None, device: str) -> None:
    """Print the verdicts in `file`, or in every table this machine reads, and whether each is in force."""
    device = str(named_device(device))
    paths = [file] if file else [path for path in policy.store.paths(device) if _exists(path)]
    shown = 0
    for path in paths:
        try:
            table = read(path)
        except TableError as error:
            if file:
                raise
            log.warning("%s; ignored", error)  # as calls do
            continue
        _show(table, path, device)
        shown += 1
    if not shown:
        own = policy.store.path(device)
        click.echo(f"no verdicts yet: bakeoff tune RECIPE measures some (they go to {own})")


def _show(table: Table, path: Path, device: str) -> None:
    columns = [
        (name, "right" if name.endswith("ms") else "left")
        for name in ("key", "winner", "ms", "eager ms", "standing")
    ]
    rows = [
        (
            Text(name),
            _choice(row),
            milliseconds(row.timings[row.winner].us),
            milliseconds(_eager_us(row)),
            standing(table, row, device),
        )
        for name, row in sorted(table.rows.items())
    ]
    out, facts = console(), table.facts
    out.print(terminal_table(columns, rows))
    versions = f"torch {facts.torch}, triton {facts.triton}"
    print_plain(out, f"{len(table.rows)} verdicts, {_machine(facts)}, {versions}: {path}")


def standing(table: Table, row: Verdict, device: str) -> str:
    """Whether a verdict is used on this machine: "in force", or why it is ignored or to be doubted."""
    facts = hardware.facts(device)
    if table.facts.same_machine != facts.same_machine:
        return "ignored: another machine's"
    op = declared().get(row.op)
    if op is None:
        return f"ignored: no op {row.op}"
    sources = {trial.candidate: trial.source_hash for trial in row.trials}
    for candidate in op.candidates:
        if not candidate.absent and sources.get(candidate.name) != candidate.source_hash:
            return f"ignored: {candidate.name} {'has changed' if candidate.name in sources else 'is new'}"
    if table.facts.same_software != facts.same_software:
        return f"stale: torch {table.facts.torch}, triton {table.facts.triton}"
    return row.warning or "in force"


def export(file: Path, device: str) -> None:
    """Copy this machine's table."""
    if file.is_dir():
        raise TableError(f"{file} is a folder: give a file in it, such as {file / 'table.json'}")
    own = policy.store.path(str(named_device(device)))
    if not _exists(own):
        raise TableError(f"there is no table at {own} yet: run bakeoff tune RECIPE first")
    table = read(own)
    try:
        write(file, table)
    except OSError as error:
        raise TableError(
            f"{file} can't be written ({error.strerror or error}): give a file in a writable folder"
        ) from None
    click.echo(f"{len(table.rows)} verdicts to {file}")


def import_(file: Path, replace: bool, device: str) -> None:
    """Add the verdicts in `file` to this machine's table, or with `replace` put `file` in its place."""
    device = str(named_device(device))
    table, here = read(file), hardware.facts(device)
    if table.facts.same_machine != here.same_machine:
        raise TableError(
            f"{file} was measured on {_machine(table.facts)}, this is {_machine(here)}: its times say "
            "nothing here; run bakeoff tune instead"
        )
    own, theirs = policy.store.path(device), policy.store.path(device, table.facts)
    if replace:
        for old in {own, theirs}:
            _set_aside(old)
        write(theirs, table)
    elif table.facts.same_software != here.same_software:
        raise TableError(
            f"{file} was measured with {_versions(table.facts)}; here are {_versions(here)}: "
            "--replace takes it in place of the table of the versions here, marked stale"
        )
    else:
        policy.store.add(table.rows.values(), device)
        if policy.store.silent:
            raise TableError(f"{own} can't be written: set BAKEOFF_CACHE to a writable folder")
    click.echo(f"{len(table.rows)} verdicts to {theirs}")


def diff(first: Path, second: Path | None, device: str) -> None:
    """Print which decisions and times differ."""
    second = second or policy.store.path(str(named_device(device)))
    left, right = read(first), read(second)
    if left.facts.same_machine != right.facts.same_machine:
        click.echo(f"different machines: {_machine(left.facts)} and {_machine(right.facts)}")
    elif left.facts.same_software != right.facts.same_software:
        click.echo(f"different versions: {_versions(left.facts)}; and {_versions(right.facts)}")
    other = 0
    for name in sorted(left.rows.keys() | right.rows.keys()):
        old, new = left.rows.get(name), right.rows.get(name)
        if old is None or new is None:
            click.echo(f"only in {first if new is None else second}: {name}: {_choice(old or new)}")  # type: ignore[arg-type]
        elif _choice(old) != _choice(new):
            click.echo(f"{name}: {_time(old)} -> {_time(new)}")
        else:
            ratio = new.timings[new.winner].us / old.timings[old.winner].us
            spread = 2 * max(old.timings[old.winner].spread, new.timings[new.winner].spread)
            if abs(ratio - 1) <= max(0.05, spread):
                continue
            click.echo(f"{name}: {_time(old)} -> {_time(new)} ({ratio:.2f} times)")
        other += 1
    click.echo(
        f"{other} of {len(left.rows.keys() | right.rows.keys())} keys differ (times by more than 5 % and "
        f"twice the spread)"
    )


def _exists(own: Path) -> bool:
    """Whether there is a file at `own`. Raises TableError where that can't be seen."""
    try:
        own.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise TableError(
            f"{own} can't be read ({error.strerror}): set BAKEOFF_CACHE to a folder that can be entered"
        ) from None
    return True


def _set_aside(own: Path) -> None:
    if _exists(own):
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        aside = own.with_suffix(f".before-{stamp}")
        own.replace(aside)
        click.echo(f"the old table is {aside}")


def _choice(verdict: Verdict) -> str:
    """The winner, with its launch configuration."""
    return label(verdict.winner, verdict.variant(verdict.winner))


def _time(verdict: Verdict) -> str:
    return f"{_choice(verdict)} {milliseconds(verdict.timings[verdict.winner].us)} ms"


def _eager_us(verdict: Verdict) -> float | None:
    timing = verdict.timings.get("eager")
    return timing.us if timing else None


def _machine(facts: hardware.Facts) -> str:
    units = "cores" if facts.cuda == "none" else "SMs"
    return f"{facts.device} ({facts.sms} {units}, {facts.memory / 2**30:.0f} GiB)"


def _versions(facts: hardware.Facts) -> str:
    return f"torch {facts.torch}, triton {facts.triton}, CUDA {facts.cuda}, driver {facts.driver or 'none'}"
