"""explain: what a call written as text would run, and why."""

from pathlib import Path

import click
import msgspec
from click.core import ParameterSource

from bakeoff.apps.bench.notation import NotationError, read_case, split_key
from bakeoff.apps.cli import tables
from bakeoff.apps.cli.terminal import console, print_json
from bakeoff.apps.render import selection_table
from bakeoff.apps.train.selection import read_selection
from bakeoff.device import named_device
from bakeoff.errors import BakeoffError, ContestError, PolicyError
from bakeoff.select import Case, Op, find_op, using
from bakeoff.select.choose import policy
from bakeoff.select.choose.explain import explain_case
from bakeoff.select.choose.tune import note, tune
from bakeoff.select.declare.key import key

__all__ = ["run"]


class RunError(BakeoffError, ValueError):
    """A folder that is no run's."""


def run(
    words: tuple[str, ...],
    device: str,
    grad: bool,
    regime: str,
    policy_name: str | None,
    tune_now: bool,
    as_json: bool,
) -> None:
    """Print the explanation of the call in `words`, or of every call of the run in that folder; without
    words, the table's verdicts."""
    if not words:
        _refuse_options("--device")
        tables.show(None, device)
        return
    if len(words) == 1 and Path(words[0]).is_dir():
        _refuse_options("--device", "--json")
        _show_run(Path(words[0]), as_json=as_json)
        return
    if len(words) == 1 and "/" in words[0]:
        raise RunError(f"there is no folder {words[0]}: give the one that bakeoff train printed")
    pasted = split_key(" ".join(words))
    if pasted:
        name, arguments, device, regime = pasted
    else:
        name, arguments = words[0], list(words[1:])
        if "(" in name:
            raise NotationError(f"{name[:60]!r} is no whole key: quote all of it, to the regime at its end")
    op = find_op(name)
    case = read_case(op, arguments, str(named_device(device)), grad=grad)
    if regime == "graph" and not case.device.startswith("cuda"):
        raise PolicyError("--regime graph needs a CUDA device: use eager or compiled on the CPU")
    compiled = regime == "compiled"  # which `using` can't set: only torch.compile does
    if tune_now and compiled:
        raise PolicyError(
            "--tune holds no contest inside torch.compile: call bakeoff.tune on a compiled step"
        )
    with using(policy_name, regime=None if compiled else regime) as entered:
        settings = msgspec.structs.replace(entered, regime=regime)
        effective = settings.on(case.device)
        if tune_now and policy.store.lookup(op, key(op, case, effective), case.device) is None:
            _tune(op, case, effective)
        explanation = explain_case(op, case, settings)
    if as_json:
        print_json(explanation)
    else:
        console().print(selection_table([explanation]))


def _show_run(run_dir: Path, *, as_json: bool) -> None:
    """What every call of a run's steps runs, and why."""
    found = read_selection(run_dir)
    if found is None:
        held = run_dir / "selection.json"
        if not held.is_file():
            raise RunError(f"{run_dir} holds no selection.json: give the folder that bakeoff train printed")
        raise RunError(f"{held} can't be read or is torn: delete it, and bakeoff train writes it anew")
    if as_json:
        print_json(found.calls)
    else:
        console().print(selection_table(found.calls))


def _refuse_options(*but: str) -> None:
    """Raises UsageError where options of a call were given without one."""
    context = click.get_current_context()
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    ]
    if given := [name for name in given if name.startswith("-") and name not in but]:
        raise click.UsageError(
            f"{', '.join(given)} without a call: name an op and its arguments, "
            f"such as rms_norm 'x=bf16[8192,4096]'",
            context,
        )


def _tune(op: Op, case: Case, regime: str) -> None:
    """Hold the contest of `case`. Raises ContestError where it can't be held."""
    if unsettled := tune(lambda: note(op, case, regime)).unsettled:
        reasons = "; ".join(unsettled.values())
        raise ContestError(f"--tune left no verdict, and without it explain says what runs: {reasons}")
