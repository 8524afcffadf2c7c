"""Selection: the fastest correct candidate for each call, measured, verified and remembered."""

from bakeoff.select.choose.agree import agree, tune_together
from bakeoff.select.choose.call import call
from bakeoff.select.choose.explain import Explanation, explain
from bakeoff.select.choose.policy import configure, using
from bakeoff.select.choose.sentinel import Sentinel, replay, sentinel
from bakeoff.select.choose.tune import TuneReport, tune, tune_missed
from bakeoff.select.contests.contest import contest
from bakeoff.select.contests.verdict import Trial, Verdict
from bakeoff.select.declare.candidate import Candidate, Implementation
from bakeoff.select.declare.case import Case, Cost, TensorMeta
from bakeoff.select.declare.lists import ListMeta, TensorList
from bakeoff.select.declare.op import Op
from bakeoff.select.declare.registry import find_op, register, registry

__all__ = [
    "Candidate",
    "Case",
    "Cost",
    "Explanation",
    "Implementation",
    "ListMeta",
    "Op",
    "Sentinel",
    "TensorList",
    "TensorMeta",
    "Trial",
    "TuneReport",
    "Verdict",
    "agree",
    "call",
    "configure",
    "contest",
    "explain",
    "find_op",
    "register",
    "registry",
    "replay",
    "sentinel",
    "tune",
    "tune_missed",
    "tune_together",
    "using",
]
