"""Selection: the fastest correct candidate for each call, measured, verified and remembered."""

from bakeoff.select.choose.agree import agree, tune_together
from bakeoff.select.choose.explain import Explanation, explain
from bakeoff.select.choose.policy import configure, using
from bakeoff.select.choose.tune import TuneReport, tune
from bakeoff.select.contests.contest import contest
from bakeoff.select.contests.verdict import Trial, Verdict
from bakeoff.select.declare.op import Candidate, Case, Cost, Op, TensorMeta, find_op, registry

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
