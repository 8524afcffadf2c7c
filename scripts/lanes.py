"""Runs lint and test lanes, each in its own process, and ends with one line that counts them all.

``python scripts/lanes.py lint unit interp`` runs those three: lanes that keep every core busy one after the
other, which takes less time than together, and beside them in turn those that mostly wait. A failing one
doesn't stop the next. What a lane prints is shown once it is through; a lane
alone prints as it goes. The last line reads ``N passed, N failed, N skipped in S s (...)`` and is also
left in build/lanes.txt. Tests marked ``exhaustive`` are left out, and hypothesis tries fewer examples, unless
``--all`` is given.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
WORKERS = ["-n", "auto", "--maxprocesses", "4"]

LINT = (
    ("ruff check", [sys.executable, "-m", "ruff", "check", "--quiet", "."]),
    ("ruff format", [sys.executable, "-m", "ruff", "format", "--check", "--quiet", "."]),
    ("mypy", [sys.executable, "-m", "mypy"]),
    ("import layers", [str(BIN / "lint-imports"), "--no-logo"]),
)
# Tests on one GPU would share its memory and disturb each other's graphs.
OPTIONS = {
    "unit": [*WORKERS, "--dist", "loadfile", "--timeout", "300"],
    "interp": [*WORKERS, "--dist", "worksteal", "--timeout", "300"],
    "compile": [*WORKERS, "--dist", "worksteal", "--timeout", "300"],
    "dist": [*WORKERS, "--dist", "worksteal", "--timeout", "300"],
    "gpu": [],
}
WAITING = frozenset({"lint", "dist", "gpu"})
"""Lanes that leave cores idle: for other processes, one after the other on one core, for a GPU."""
NOT_PASSED_ON = frozenset({"TRITON_INTERPRET", "PYTHONDONTWRITEBYTECODE"})
"""Variables that lanes don't hear of: what a lane sets itself, and what would make hundreds of processes
compile the package anew."""
QUICK = ["-m", "not exhaustive", "--hypothesis-profile", "quick"]
EVERYTHING = ["--hypothesis-profile", "full"]


@dataclass
class Outcome:
    """What one lane came to."""

    lane: str
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    ok: bool = True


class Output:
    """What one lane prints: into a file until the lane is through, or as it comes."""

    def __init__(self, file: IO[str] | None) -> None:
        self.file = file

    def say(self, line: str) -> None:
        print(line, file=self.file, flush=True)

    def run(self, command: list[str]) -> int:
        """The command's exit status."""
        environment = {key: value for key, value in os.environ.items() if key not in NOT_PASSED_ON}
        error = None if self.file is None else subprocess.STDOUT
        return subprocess.run(
            command, cwd=ROOT, env=environment, stdout=self.file, stderr=error, check=False
        ).returncode

    def show(self) -> None:
        if self.file is not None:
            self.file.seek(0)
            print(self.file.read(), end="", flush=True)


def lint(output: Output) -> Outcome:
    """Run every linter; all of them, so that one run shows everything there is to repair."""
    start = time.monotonic()
    broken = []
    for name, command in LINT:
        output.say(f"lint: {name}")
        if output.run(command):
            broken.append(name)
    if broken:
        output.say(f"lint: {', '.join(broken)} failed")
    return Outcome("lint", time.monotonic() - start, ok=not broken)


def lane(name: str, selection: list[str], output: Output) -> Outcome:
    """Run one folder of tests in a pytest process of its own and count what it did."""
    folder = ROOT / "tests" / name
    start = time.monotonic()
    output.say(f"\n{name}")
    if not any(folder.glob("test_*.py")):
        output.say(f"{name}: 0 run, it has no tests yet")
        return Outcome(name, 0.0)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(folder), "-q", "--durations=5", "--durations-min=1"]
        command += [f"--junitxml={report}", "-p", "no:cacheprovider", *OPTIONS[name], *selection]
        status = output.run(command)
        outcome = Outcome(name, time.monotonic() - start, ok=status == 0)
        if report.exists():
            for suite in ET.parse(report).getroot().iter("testsuite"):
                total, failures, errors, skipped = (
                    int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")
                )
                outcome.failed += failures + errors
                outcome.skipped += skipped
                outcome.passed += total - failures - errors - skipped
    if not outcome.ok and not outcome.failed:
        output.say(f"{name}: pytest ended with status {status} before it could count")
        outcome.failed = 1
    return outcome


def run_all(names: list[str], selection: list[str]) -> list[Outcome]:
    """The outcomes, in the order of `names`; those of `WAITING` run in turn beside the others."""
    outcomes: dict[str, Outcome] = {}
    interrupted = threading.Event()

    def run(queue: list[str]) -> None:
        for name in queue:
            if interrupted.is_set():
                return
            with tempfile.TemporaryFile("w+") as file:
                output = Output(file if len(names) > 1 else None)
                try:
                    outcomes[name] = lint(output) if name == "lint" else lane(name, selection, output)
                finally:
                    output.show()

    queues = [[n for n in names if n not in WAITING], [n for n in names if n in WAITING]]
    with ThreadPoolExecutor(2) as pool:
        try:
            list(pool.map(run, queues))
        except KeyboardInterrupt:  # which the lanes under way hear themselves
            interrupted.set()
            raise
    return [outcomes[name] for name in names]


def summary(outcomes: list[Outcome], seconds: float) -> str:
    """The closing line."""
    passed, failed, skipped = (
        sum(getattr(o, key) for o in outcomes) for key in ("passed", "failed", "skipped")
    )
    each = []
    for o in outcomes:
        came_to = o.passed + o.failed if o.lane != "lint" else "clean" if o.ok else "FAILED"
        each.append(f"{o.lane} {came_to} in {o.seconds:.0f} s")
    return f"{passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s ({', '.join(each)})"


def main(names: list[str]) -> int:
    """Run what `names` lists, in that order; 0 when all of it is well."""
    selection = EVERYTHING if "--all" in names else QUICK
    names = [name for name in names if name != "--all"]
    unknown = [name for name in names if name not in OPTIONS and name != "lint"]
    if unknown or not names:
        print(f"usage: lanes.py [--all] [{'|'.join(['lint', *OPTIONS])}] ...", file=sys.stderr)
        return 2
    start = time.monotonic()
    outcomes = run_all(names, selection)
    line = summary(outcomes, time.monotonic() - start)
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "lanes.txt").write_text(line + "\n")
    print(f"\n{line}", flush=True)
    return 0 if all(o.ok for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
