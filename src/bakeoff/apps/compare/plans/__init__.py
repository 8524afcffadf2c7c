"""Models over seeds, learning rates, rows and budgets, run by run: ``bakeoff compare --model ...``."""

from bakeoff.apps.compare.plans.carry_out import carry_out
from bakeoff.apps.compare.plans.entries import Entry, entries
from bakeoff.apps.compare.plans.plan import Budget, Plan, Setting
from bakeoff.apps.compare.plans.record import Finished, Record, read_runs
from bakeoff.apps.compare.plans.summary import Line, Outcome, summarise

__all__ = [
    "Budget",
    "Entry",
    "Finished",
    "Line",
    "Outcome",
    "Plan",
    "Record",
    "Setting",
    "carry_out",
    "entries",
    "read_runs",
    "summarise",
]
