"""Runs every kernel of this package under NVIDIA's compute-sanitizer, at small odd shapes.

``python -m tests.gpu.sanitize memcheck`` or ``racecheck``, in the repository, on a machine with a GPU; names
of ops after that choose some. Each op gets a process of its own, several at a time. Forward and backward of
all the op's cases, cut down, go through each candidate that has kernels, and PyTorch allocates each tensor by
itself, so that an access beyond one is seen. Exits with 1 where there is anything to report.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bakeoff.select import Candidate, Case, Op

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck")
MARK = "ran: "
BROKEN = 77
"""The status that compute-sanitizer ends with where it found something."""
CUBLAS = ("nvjet", "cublas", "cutlass")
"""In the names of cuBLAS's kernels, which some candidates call."""
OTHERS = (*CUBLAS, "at::native::")
"""In those that aren't ours, PyTorch's too: racecheck takes barriers and steps of a warp there for races."""
SIZES = (131, 256)
"""What cases are cut to: an odd number, or a power of 2 for kernels that take nothing else."""


@dataclass
class Report:
    """What one op's process came to."""

    op: str
    calls: dict[str, int]
    """By candidate, how many cases ran forward and, where they have gradients, backward."""
    launches: int
    seconds: float
    problem: str
    """Empty where all is well."""


def sanitizer() -> str | None:
    """The program's path, or None where there is none."""
    beside = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (str(beside) if beside.exists() else None)


def examine(tool: str, op: str, limit_s: float, most: int = 0) -> Report:
    """One op under one tool; at most so many cases of a candidate, or all."""
    program = sanitizer()
    assert program is not None, "needs compute-sanitizer, which CUDA's toolkit brings"
    racing = tool == "racecheck"
    command = [program, "--tool", tool, "--error-exitcode", str(BROKEN)]
    command += ["--print-limit", "100000" if racing else "5"]
    if not racing:  # which fails on cuBLAS's kernels where it is told to leave them out
        command += [word for lib in CUBLAS for word in ("--kernel-name-exclude", f"kernel_substring={lib}")]
    command += [sys.executable, "-m", "tests.gpu.sanitize", "run", op, "--most", str(most)]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Report(op, {}, 0, limit_s, f"did not end within {limit_s:.0f} s")
    told = [json.loads(line[len(MARK) :]) for line in done.stdout.splitlines() if line.startswith(MARK)]
    calls, launched = told[0] if told else ({}, 0)
    clean = done.returncode == 0 or (racing and done.returncode == BROKEN and only_others(done.stdout))
    problem = "" if clean and told else f"status {done.returncode}\n{_findings(done.stdout)}{_tail(done)}"
    if not problem and not launched:
        problem = "no kernel ran"
    return Report(op, calls, launched, time.perf_counter() - started, problem)


class Race(NamedTuple):
    """One that racecheck reports, by the access that it names first."""

    access: str
    kernel: str
    file: str
    line: str

    def ours(self) -> bool:
        """Whether code of this package may have made it.

        Gluon's warp_specialize keeps in shared memory which function each warp is to run. Triton writes that
        and reads it with barriers of all warps between, which racecheck doesn't know; both count for lines of
        the kernel's definition. `tests.gpu.specialized` is a kernel with nothing else in it.
        """
        if any(other in self.kernel for other in OTHERS):
            return False
        if self.access != "Read" or not self.file:
            return True
        texts = (path.read_text() for folder in ("src", "tests") for path in (ROOT / folder).rglob(self.file))
        lines = [text.splitlines() for text in texts if "gl.warp_specialize(" in text]
        return not any(found[int(self.line) - 1].startswith("def ") for found in lines)


def races(said: str) -> list[Race]:
    """All that racecheck reports."""
    pattern = r"Race reported between (\w+) access at (.+?)\+0x\w+(?: in (\S+):(\d+))?"
    return [Race(*words) for words in re.findall(pattern, said)]


def only_others(said: str) -> bool:
    """Whether racecheck found races of others' alone, and the program ended well."""
    failed = "returned an error" in said or "Internal Sanitizer Error" in said
    found = races(said)
    return bool(found) and not failed and not any(race.ours() for race in found)


def _findings(said: str) -> str:
    """A line for each kernel with races of ours."""
    found = Counter(race.kernel for race in races(said) if race.ours())
    return "".join(f"{count} races in {name[:120]}\n" for name, count in found.items())


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "Host Frame" not in line]
    return "\n".join(lines[-40:])


def run(name: str, most: int = 0) -> None:
    """What the tool watches: every kernel candidate of the op at small odd cases."""
    import torch

    import bakeoff.ops  # noqa: F401  declares the ops
    from bakeoff.kernels.counter import launches
    from bakeoff.select import find_op
    from bakeoff.select.contests.draw import cotangent, inputs
    from bakeoff.select.contests.results import gradients, outputs_of

    op = find_op(name)
    before, calls = launches(), Counter[str]()
    for candidate in (c for c in op.candidates if c.launches is not None):
        cases = _cases(op, candidate)
        for case in cases[:: max(1, -(-len(cases) // most))] if most else cases:
            args = inputs(op, case, 0)
            with torch.set_grad_enabled(case.needs_grad):
                outputs = outputs_of(candidate.implementation, args)
                dys = [cotangent(output, args, 1) for output in outputs]
                gradients(outputs, args, dys)
            torch.cuda.synchronize()
            calls[candidate.name] += 1
    print(MARK + json.dumps([calls, launches() - before]), flush=True)


def _cases(op: "Op", candidate: "Candidate") -> "list[Case]":
    """The op's cases that the candidate takes, cut down, each once."""
    from tests.cut import cut

    for size in SIZES:
        cases = [cut(op, case, size, "cuda:0", outer=3, lists=3001, large=16501) for case in op.cases()]
        for case in cases:
            if op.check is not None:
                op.check(case)
        if taken := [case for case in cases if not candidate.reasons(case)]:
            return list({str(case.args): case for case in taken}.values())
    return []


def main(words: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize", description=__doc__)
    parser.add_argument("tool", choices=[*TOOLS, "run"])
    parser.add_argument("ops", nargs="*", help="some of the ops; all, if none is named")
    parser.add_argument("--jobs", type=int, default=min(6, os.cpu_count() or 1), help="processes at a time")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that an op may take")
    parser.add_argument("--most", type=int, default=0, help="cases of a candidate; all, if not given")
    options = parser.parse_intermixed_args(words)
    if options.tool == "run":
        for name in options.ops:
            run(name, options.most)
        return 0
    if sanitizer() is None:
        print("needs compute-sanitizer, which CUDA's toolkit brings; set CUDA_HOME if it lies elsewhere")
        return 2
    found_any = False
    with ThreadPoolExecutor(options.jobs) as pool:
        asked = [
            pool.submit(examine, options.tool, op, options.limit, options.most)
            for op in options.ops or own_ops()
        ]
        for report in (future.result() for future in as_completed(asked)):
            ran = ", ".join(f"{name} {count}" for name, count in report.calls.items()) or "nothing"
            told = f"{report.launches} launches, {report.seconds:.0f} s: {report.problem or 'clean'}"
            print(f"{options.tool} {report.op}: cases of {ran}, {told}", flush=True)
            found_any |= bool(report.problem)
    return int(found_any)


def own_ops() -> list[str]:
    """The ops that have kernels of this package."""
    import bakeoff.ops  # noqa: F401  declares the ops
    from bakeoff.select import registry

    return sorted(op.name for op in registry.values() if any(c.launches is not None for c in op.candidates))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
