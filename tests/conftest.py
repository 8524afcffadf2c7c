"""What every lane shares: a private table cache, few threads, fixed seeds, and why a lane can't run.

A lane is a folder of tests and a pytest process of its own: ``make test``, or one of ``make unit``,
``make interp``, ``make compile``, ``make dist``, ``make gpu``. These leave out what is marked ``exhaustive``
and let hypothesis try fewer examples; ``make test-all`` and pytest alone run everything.
"""

import atexit
import gc
import importlib.util
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _remove(folder: str, process: int) -> None:
    """But not from a fork, which ends before."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


# Read when a library is imported or first used, so they are set before any test module is imported. Nothing
# is written below the home folder, and no earlier run's compiled kernels hide a failure to compile.
WORKER = "PYTEST_XDIST_WORKER" in os.environ
# A worker's folder is in that of the run, which is left when a worker is killed.
CACHE = tempfile.mkdtemp(prefix="bakeoff-test-", dir=os.environ["BAKEOFF_TEST_RUN"] if WORKER else None)
os.environ["BAKEOFF_CACHE"] = f"{CACHE}/bakeoff"
if not WORKER:
    os.environ["BAKEOFF_TEST_RUN"] = CACHE  # one folder for all workers
    # Also after an error before pytest is configured.
    atexit.register(_remove, CACHE, os.getpid())
# What one worker has compiled, another one takes.
os.environ["TRITON_CACHE_DIR"] = f"{os.environ['BAKEOFF_TEST_RUN']}/triton"
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{os.environ['BAKEOFF_TEST_RUN']}/inductor"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # more are processes that import torch first
os.environ.pop("BAKEOFF_POLICY", None)
os.environ["OMP_NUM_THREADS"] = "1" if WORKER else "2"

# A script's jobs in the background ignore Ctrl-C, and so would every program that a test interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _without_triton() -> str | None:
    return None if importlib.util.find_spec("triton") else "needs triton (Linux)"


def _without_interpreter() -> str | None:
    if _without_triton():
        return _without_triton()
    triton, numpy = ([int(n) for n in version(name).split(".")[:2]] for name in ("triton", "numpy"))
    if triton < [3, 7] and numpy >= [2, 4]:
        return (
            "needs numpy < 2.4 beside triton 3.6, whose interpreter fails on run-time ranges with newer ones"
        )
    return None


def _without_cuda() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device"


def _without_gloo() -> str | None:
    import torch.distributed as dist

    return None if dist.is_available() and dist.is_gloo_available() else "needs torch.distributed with gloo"


NEEDS: dict[str, Callable[[], str | None]] = {
    "interp": _without_interpreter,
    "compile": _without_triton,
    "gpu": lambda: _without_triton() or _without_cuda(),
    "dist": _without_gloo,
}
_unable: dict[str, str] = {}


def _lane(path: Path) -> str:
    return path.relative_to(HERE).parts[0] if path.is_relative_to(HERE) and path != HERE else ""


def pytest_configure(config: pytest.Config) -> None:
    """Find out which of the lanes asked for can't run here; fix hypothesis' examples."""
    for argument in config.args:
        lane = _lane(Path(argument.split("::")[0]).resolve())
        reason = NEEDS[lane]() if lane in NEEDS else None
        if reason:
            _unable[lane] = reason
    if config.getoption("--hypothesis-profile", None) == "quick":
        # torch.compile's C++ takes half as long to compile without vectors, and takes 9 s to find out which
        # there are. `make test-all` has them.
        os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
    if importlib.util.find_spec("hypothesis"):
        from hypothesis import HealthCheck, settings

        for profile, examples in (("full", 100), ("quick", 30)):
            settings.register_profile(
                profile,
                max_examples=examples,
                derandomize=True,  # the same examples on every run
                deadline=None,  # a busy machine is no failure
                database=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
            )
        settings.load_profile(config.getoption("--hypothesis-profile", None) or "full")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the test files of a lane that can't run, which may not even be importable here."""
    return True if collection_path.name.startswith("test_") and _lane(collection_path) in _unable else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse a run that mixes lanes: the interpreter lane changes what triton is for the whole process.

    A file named on the command line is collected in any case, so its tests are taken out here.
    """
    unable = [item for item in items if _lane(item.path) in _unable]
    if unable:
        config.hook.pytest_deselected(items=unable)
        items[:] = [item for item in items if item not in unable]
    lanes = sorted({_lane(item.path) for item in items} - {""})
    if len(lanes) > 1:
        raise pytest.UsageError(
            f"{', '.join(lanes)} are separate processes: run `make test`, or one lane each"
        )


def pytest_collection_finish() -> None:
    """What stands now, modules and thousands of tests, stays; nothing need look through it for garbage. Nor
    every few hundred objects of what torch.compile makes, which costs 3 % of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for lane, reason in _unable.items():
        files = len(list((HERE / lane).glob("test_*.py")))
        terminalreporter.write_line(f"{lane}: 0 run, {reason} ({files} test files left out)")


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main() -> Generator[None, int, int]:
    """A lane that can't run here is no failure; a lane that lost its tests is."""
    status = yield
    return 0 if _unable and status == pytest.ExitCode.NO_TESTS_COLLECTED else status


def pytest_unconfigure() -> None:
    _remove(CACHE, os.getpid())


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Every test starts from the same random state and leaves torch's global switches as it found them."""
    random.seed(0)
    if "torch" not in sys.modules:  # a test of something else
        yield
        return
    import torch

    # Without an accelerator torch.manual_seed keeps the stack, in case there will be one: 2 % of the time.
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(0)
    deterministic = torch.are_deterministic_algorithms_enabled()
    dtype = torch.get_default_dtype()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_default_dtype(dtype)
