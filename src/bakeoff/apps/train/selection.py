"""Selection at the start of a run: contests if asked for, then what each op runs, and why. A run that goes on
runs what it ran before, by its own table, and holds no contests."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import torch

from bakeoff import hardware
from bakeoff.apps.train.config import Select
from bakeoff.apps.train.metrics import log
from bakeoff.parallel import ALONE, World
from bakeoff.paths import write_whole
from bakeoff.select import Explanation, Verdict, find_op
from bakeoff.select.choose import policy
from bakeoff.select.choose import table as tables
from bakeoff.select.choose.agree import tune_together
from bakeoff.select.choose.explain import explain_case
from bakeoff.select.choose.policy import current
from bakeoff.select.choose.tune import Recorded, recording

__all__ = ["Selection", "choices", "own_table_ends", "read_selection", "select_candidates", "summary"]

_FILE = "selection.json"
_OWN = "the run's own table"


class Selection(msgspec.Struct, frozen=True):
    """What every call of a run's steps runs, and why: ``RUN/selection.json``."""

    facts: hardware.Facts
    calls: list[Explanation]

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdicts behind the choices, by key."""
        return {call.key: call.verdict for call in self.calls if call.verdict is not None}


def read_selection(run_dir: Path) -> Selection | None:
    """What the run in `run_dir` runs; None where that is not known."""
    try:
        return msgspec.json.decode((run_dir / _FILE).read_bytes(), type=Selection)
    except (OSError, msgspec.MsgspecError):
        return None


def select_candidates(
    step: Callable[[], object],
    settings: Select,
    run_dir: Path,
    announce: Callable[[str], None],
    world: World = ALONE,
    *,
    compiled: bool = False,
    before: Path | None = None,
) -> list[Explanation]:
    """Returns what each call of `step` will run. Where the policy in force lets tables decide, that of the
    run in the folder `before` does, if it knows these calls and was measured here; otherwise contests are
    held if `settings` ask for them.

    `step` runs once or twice and must leave the model as it was; `compiled` says that it calls torch.compiled
    code. Of several ranks the first decides for all. All is kept as ``run_dir/selection.json``, and the
    verdicts as ``run_dir/table.json``.
    """
    recorded = None
    if current().policy in ("table", "tune"):
        if before is not None:
            recorded = _as_before(step, before, announce, world, compiled=compiled)
        if recorded is None and (settings.tune or world.size > 1):
            report = tune_together(step, settings.budget_s if settings.tune else 0.0, announce=log.info)
            for name, reason in report.unsettled.items() if settings.tune else ():
                log.info("not settled: %s: %s", name, reason)
    recorded = recorded or _recorded(step, compiled=compiled)
    explanations = []
    for (name, _), (op, case) in recorded.items():
        now = current()
        if name.endswith(" compiled"):
            now = msgspec.structs.replace(now, regime="compiled")
        explanations.append(explain_case(op, case, now))
    if recorded and world.first:
        facts = hardware.facts(next(iter(recorded.values()))[1].device)
        _keep(run_dir, Selection(facts, explanations))
    return explanations


def _as_before(
    step: Callable[[], object],
    before: Path,
    announce: Callable[[str], None],
    world: World,
    *,
    compiled: bool,
) -> Recorded | None:
    """The calls of `step`, for which the table of the run in `before` alone decides from here on; None, with
    a reason for people, where it can't."""

    def read() -> tuple[Selection, str] | None:
        found = read_selection(before)
        return (found, _elsewhere(found)) if found else None

    read_by_first = world.decide(read)
    if read_by_first is None:
        return None
    kept, elsewhere = read_by_first
    if elsewhere:
        announce(f"the run's own table is not used: it was measured {elsewhere}")
        return None
    policy.store.agreed, policy.store.agreed_by = kept.verdicts, _OWN
    recorded = _recorded(step, compiled=compiled)
    if {name for name, _ in recorded} <= {call.key for call in kept.calls}:
        announce("candidates are those that the run had before, by its own table; nothing is tuned")
        return recorded
    _release()
    announce("the step makes other calls than the run's table knows")
    return None


def _elsewhere(kept: Selection) -> str:
    """Where else than here a run's verdicts were measured; "" where nothing differs."""
    device = "cpu" if kept.facts.cuda == "none" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        return f"on another machine ({kept.facts.device})"
    if kept.facts.same_machine != (here := hardware.facts(device)).same_machine:
        return f"on another machine ({kept.facts.device})"
    if kept.facts.same_software != here.same_software:
        return f"under other versions (torch {kept.facts.torch}, triton {kept.facts.triton})"
    found = {tables.differences(find_op(row.op), row, here, device) for row in kept.verdicts.values()}
    return "; ".join(sorted(found - {""}))


def _recorded(step: Callable[[], object], *, compiled: bool) -> Recorded:
    if compiled:  # code that is compiled already would run unseen
        torch.compiler.reset()
    with recording() as recorded:
        step()
    return recorded


def _keep(run_dir: Path, selection: Selection) -> None:
    """Keeps the calls beside those of another regime that the run made before."""
    old = read_selection(run_dir)
    if old is not None and old.facts == selection.facts:
        calls = {call.key: call for call in (*old.calls, *selection.calls)}
        selection = Selection(selection.facts, list(calls.values()))
    try:
        write_whole(run_dir / _FILE, msgspec.json.encode(selection))
        if selection.verdicts:
            tables.write(run_dir / "table.json", tables.Table(selection.facts, selection.verdicts))
    except OSError as error:
        log.warning("can't keep the verdict table with the run (%s); training goes on", error.strerror)


@contextlib.contextmanager
def own_table_ends() -> Iterator[None]:
    """After the block a run's own table no longer decides in this process."""
    try:
        yield
    finally:
        if policy.store.agreed_by == _OWN:
            _release()


def _release() -> None:
    policy.store.agreed, policy.store.agreed_by = None, "rank 0"
    policy.forget()


def summary(explanations: Iterable[Explanation], where: str) -> str:
    """What was measured and what was not, in one line; `where` is what `bakeoff explain` takes to list it."""
    calls = list(explanations)
    forced = dict(current().overrides)
    measured = sum(call.verdict is not None for call in calls)
    chosen = sum(call.verdict is None and call.op in forced for call in calls)
    default = len(calls) - measured - chosen
    parts = [f"{measured} of {len(calls)} calls measured"]
    parts += [f"{chosen} as configured"] if chosen else []
    parts += [f"{default} use the default"] if default else []
    return f"{', '.join(parts)}; `bakeoff explain {where}` lists them"


def choices(explanations: list[Explanation]) -> dict[str, str]:
    """``select/OP`` -> the candidate chosen, or all of them where an op's calls differ."""
    by_op: dict[str, set[str]] = {}
    for explanation in explanations:
        by_op.setdefault(explanation.op, set()).add(explanation.choice)
    return {f"select/{op}": ", ".join(sorted(names)) for op, names in by_op.items()}
