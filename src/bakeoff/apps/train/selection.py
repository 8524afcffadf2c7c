"""Selection at the start of a run: contests if asked for, then what each op runs, and why."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from bakeoff import hardware
from bakeoff.apps.train.config import Select
from bakeoff.apps.train.metrics import log
from bakeoff.parallel import ALONE, World
from bakeoff.select import Explanation
from bakeoff.select.choose import table as tables
from bakeoff.select.choose.agree import tune_together
from bakeoff.select.choose.explain import explain_case
from bakeoff.select.choose.policy import current
from bakeoff.select.choose.tune import recording

__all__ = ["choices", "select_candidates"]


def select_candidates(
    step: Callable[[], object],
    settings: Select,
    run_dir: Path,
    announce: Callable[[str], None],
    world: World = ALONE,
    *,
    compiled: bool = False,
) -> list[Explanation]:
    """Tunes for what `step` calls, where the policy in force lets tables decide, and returns what each call
    will run. The verdicts behind the choices are saved as ``run_dir/table.json``.

    `step` runs once or twice and must leave the model as it was; `compiled` says that it calls torch.compiled
    code. Of several ranks the first decides for all.
    """
    if current().policy in ("table", "tune") and (settings.tune or world.size > 1):
        report = tune_together(step, settings.budget_s if settings.tune else 0.0, announce=announce)
        for name, reason in report.unsettled.items() if settings.tune else ():
            announce(f"not settled: {name}: {reason}")
    if compiled:  # code that is compiled already would run unseen
        torch.compiler.reset()
    with recording() as recorded:
        step()
    explanations = []
    for (name, _), (op, case) in recorded.items():
        now = current()
        if name.endswith(" compiled"):
            now = msgspec.structs.replace(now, regime="compiled")
        explanations.append(explain_case(op, case, now))
    verdicts = {each.key: each.verdict for each in explanations if each.verdict is not None}
    if verdicts and world.first:
        try:
            facts = hardware.facts(next(iter(recorded.values()))[1].device)
            tables.write(run_dir / "table.json", tables.Table(facts, verdicts))
        except OSError as error:
            log.warning("can't keep the verdict table with the run (%s); training goes on", error.strerror)
    return explanations


def choices(explanations: list[Explanation]) -> dict[str, str]:
    """``select/OP`` -> the candidate chosen, or all of them where an op's calls differ."""
    by_op: dict[str, set[str]] = {}
    for explanation in explanations:
        by_op.setdefault(explanation.op, set()).add(explanation.choice)
    return {f"select/{op}": ", ".join(sorted(names)) for op, names in by_op.items()}
