"""What only a GPU's contest has."""

from bakeoff.apps.bench.suites import cells
from bakeoff.select import find_op
from bakeoff.select.contests.contest import contest


def test_every_timed_candidate_is_weighed() -> None:
    op = find_op("rms_norm")
    forward, both = cells(op, "cuda:0", "1000x1000")
    skip = {name: "not now" for name in op.by_name if name not in ("eager", "triton")}
    peaks = {}
    for cell in (forward, both):
        (verdict,) = contest(cell.op, cell.case, ("graph",), budget_s=0.05, skip=skip, for_the_record=True)
        for trial in verdict.trials:
            assert (trial.peak_bytes is None) == (trial.timing is None)
            peaks[trial.candidate, cell.direction] = trial.peak_bytes
    for name in ("eager", "triton"):
        assert 2_000_000 <= peaks[name, "forward"] < peaks[name, "both"]
