"""Selection: the fastest correct candidate for each call, measured, verified and remembered."""

from bakeoff.select.agree import agree, tune_together
from bakeoff.select.contest import contest
from bakeoff.select.explain import Explanation, explain
from bakeoff.select.op import Candidate, Case, Cost, Op, TensorMeta, find_op, registry
from bakeoff.select.policy import configure, using
from bakeoff.select.tune import TuneReport, tune
from bakeoff.select.verdict import Trial, Verdict

__all__ = [
    "Candidate",
    "Case",
    "Cost",
    "Explanation",
    "Op",
    "TensorMeta",
    "Trial",
    "TuneReport",
    "Verdict",
    "agree",
    "configure",
    "contest",
    "explain",
    "find_op",
    "registry",
    "tune",
    "tune_together",
    "using",
]
