"""The machinery of the test command: it counts everything, goes on after a failure, and hides nothing."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PASSES = "def test_a(): pass\n"
FAILS = "def test_b(): assert 0\n"
SKIPS = "import pytest\ndef test_c(): pytest.skip('for a reason')\n"


@pytest.fixture
def lanes(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    """A repository of tests only; returns a function that runs lanes in it: (status, lines of output)."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "lanes.py", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for conftest in (ROOT / "tests").rglob("conftest.py"):
        copy = tmp_path / conftest.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(conftest, copy)
    scratch = tmp_path_factory.mktemp("scratch")
    outer = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID", "PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS")

    def run(
        *names: str, pytest_arguments: tuple[str, ...] = (), workers: str = "0", **files: str
    ) -> tuple[int, list[str]]:
        for name, text in files.items():
            lane, _, test = name.partition("_")
            (tmp_path / "tests" / lane / f"test_{test}.py").parent.mkdir(exist_ok=True)
            (tmp_path / "tests" / lane / f"test_{test}.py").write_text(text)
        command = [sys.executable, "scripts/lanes.py", *names]
        if pytest_arguments:
            command = [sys.executable, "-m", "pytest", *pytest_arguments]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={key: value for key, value in os.environ.items() if key not in outer}
            | {"PYTEST_XDIST_AUTO_NUM_WORKERS": workers, "TMPDIR": str(scratch)},  # some are aborted
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout.splitlines()

    return run


def test_counts_and_goes_on_after_a_failure(lanes) -> None:
    status, lines = lanes("unit", "compile", unit_a=FAILS + SKIPS, compile_b=PASSES)
    assert status == 1
    assert lines[-1].startswith("1 passed, 1 failed, 1 skipped in ")


def test_a_lane_that_waits_runs_beside_another_and_prints_by_itself(lanes) -> None:
    body = (
        "import pathlib, time\n"
        "def test_a():\n"
        "    pathlib.Path('{}').touch()\n"
        "    while not pathlib.Path('{}').exists(): time.sleep(0.05)\n"
        "    assert 0, 'said by {}'\n"
    )
    first, second = body.format("one", "two", "unit"), body.format("two", "one", "dist")
    status, lines = lanes("unit", "dist", unit_a=first, dist_b=second)
    assert status == 1
    assert lines[-1].startswith("0 passed, 2 failed, 0 skipped in ")
    _, *parts = re.split(r"^(unit|dist)$", "\n".join(lines), flags=re.MULTILINE)
    said = dict(zip(parts[::2], parts[1::2], strict=True))
    assert {name: set(re.findall(r"said by (\w+)", text)) for name, text in said.items()} == {
        "unit": {"unit"},
        "dist": {"dist"},
    }


def test_lanes_that_keep_all_cores_busy_run_one_after_the_other(lanes) -> None:
    begins = "import pathlib, time\ndef test_a():\n    time.sleep(1)\n"
    ends = "    pathlib.Path('ended').touch()\n"
    after = "import pathlib\ndef test_b():\n    assert pathlib.Path('ended').exists()\n"
    status, lines = lanes("unit", "compile", unit_a=begins + ends, compile_b=after)
    assert status == 0
    assert lines[-1].startswith("2 passed, 0 failed, 0 skipped in ")


def test_all_well(lanes) -> None:
    status, lines = lanes("unit", unit_a=PASSES)
    assert status == 0
    assert lines[-1].startswith("1 passed, 0 failed, 0 skipped in ")


@pytest.mark.parametrize("broken", ["import no_such_module", "import os; os.abort()", "def helper(): pass"])
def test_a_lane_that_breaks_or_runs_nothing_fails(lanes, broken: str) -> None:
    status, lines = lanes("unit", unit_a=broken)
    assert status == 1
    assert lines[-1].startswith("0 passed, 1 failed, 0 skipped in ")


MARKED = (
    "import pytest\n"
    "from hypothesis import settings\n"
    "def test_a(): assert settings.default.max_examples == {}\n"
    "@pytest.mark.exhaustive\n"
    "def test_b(): pass\n"
)


def test_exhaustive_tests_run_only_when_all_are_asked_for(lanes) -> None:
    status, lines = lanes("unit", unit_a=MARKED.format(30))
    assert status == 0, lines
    assert lines[-1].startswith("1 passed, 0 failed, 0 skipped in ")
    status, lines = lanes("--all", "unit", unit_a=MARKED.format(100))
    assert status == 0, lines
    assert lines[-1].startswith("2 passed, 0 failed, 0 skipped in ")


def test_off_the_main_target_a_kernel_is_built_once_and_the_first_one_for_all(lanes, tmp_path: Path) -> None:
    body = (
        "import pathlib, pytest\n"
        "targets = pytest.mark.parametrize('target', ['sm_80', 'sm_90', 'sm_100', 'gfx942'])\n"
        "def built(*what): pathlib.Path('built').open('a').write(' '.join(map(str, what)) + '\\n')\n"
        "@targets\n"
        "@pytest.mark.parametrize('size', [pytest.param(0, marks=pytest.mark.exhaustive), 1, 2, 3])\n"
        "def test_a(size, target): built('a', size, target)\n"
        "@pytest.mark.kernel(of=lambda size: size > 1)\n"
        "@targets\n"
        "@pytest.mark.parametrize('size', range(4))\n"
        "def test_b(size, target): built('b', size, target)\n"
    )
    status, lines = lanes("compile", compile_a=body)
    assert status == 0, lines
    built = (tmp_path / "built").read_text().splitlines()
    elsewhere = ["a 1 sm_80", "a 1 sm_100", "a 1 gfx942", "b 0 sm_100", "b 2 gfx942"]
    main = [f"{name} {size} sm_90" for name, first in (("a", 1), ("b", 0)) for size in range(first, 4)]
    assert sorted(built) == sorted(main + elsewhere)


def test_an_empty_lane_says_so(lanes) -> None:
    status, lines = lanes("unit")
    assert status == 0
    assert "unit: 0 run, it has no tests yet" in lines


def test_unknown_lane(lanes) -> None:
    status, lines = lanes("unti")
    assert status == 2
    assert "unit" in lines[-1]


def test_gpu_lane_without_a_gpu_says_why_and_is_not_imported(lanes, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, lines = lanes("gpu", gpu_a="import no_such_module", gpu_b=FAILS)
    assert status == 0
    assert "gpu: 0 run, needs a CUDA device (2 test files left out)" in lines
    assert lines[-1].startswith("0 passed, 0 failed, 0 skipped in ")


def test_lanes_do_not_mix(lanes) -> None:
    status, lines = lanes(pytest_arguments=("tests/unit", "tests/dist"), unit_a=PASSES, dist_b=PASSES)
    assert status != 0
    assert any("dist, unit are separate processes" in line for line in lines)


def test_what_was_compiled_once_is_kept(lanes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    status, _ = lanes("unit", unit_a=PASSES)
    assert status == 0
    assert list((tmp_path / "tests" / "unit" / "__pycache__").glob("test_a.*.pyc"))


def test_interpreter_lane_refuses_a_compiled_triton(lanes) -> None:
    status, lines = lanes(pytest_arguments=("-p", "triton", "tests/interp"), interp_a=PASSES)
    assert status != 0
    assert any("run the interpreter lane alone" in line for line in lines)


def test_ctrl_c_reaches_children_even_if_the_lanes_ignore_it(lanes) -> None:
    body = (
        "import signal, subprocess, sys\n"
        "def test_a():\n"
        "    code = 'import signal; signal.raise_signal(signal.SIGINT)'\n"
        "    assert subprocess.run([sys.executable, '-c', code], stderr=-1).returncode == -signal.SIGINT\n"
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        status, lines = lanes("unit", unit_a=body)
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 0, lines


def test_workers_of_a_run_share_a_folder(lanes, tmp_path: Path) -> None:
    body = (
        "import os, pathlib\n"
        "def test_a():\n"
        "    shared = pathlib.Path(os.environ['BAKEOFF_TEST_RUN'])\n"
        "    assert shared.stat().st_mode & 0o777 == 0o700\n"
        "    place = pathlib.Path(f'place{os.getpid()}')\n"
        "    place.write_text(str(shared))\n"
    )
    status, lines = lanes(
        pytest_arguments=("-n2", "--dist", "each", "-p", "no:cacheprovider", "tests/unit"), unit_a=body
    )
    assert status == 0, lines
    first, second = (place.read_text() for place in tmp_path.glob("place*"))
    assert first == second != os.environ.get("BAKEOFF_TEST_RUN")
    assert not Path(first).exists()


def test_state_is_private(lanes, tmp_path: Path) -> None:
    """Each process has a cache of its own, which is gone afterwards."""
    body = (
        "import os, pathlib\n"
        "def test_a():\n"
        "    cache = pathlib.Path(os.environ['BAKEOFF_CACHE']).parent\n"
        "    assert cache.is_dir() and 'bakeoff-test-' in cache.name\n"
        "    assert 'BAKEOFF_POLICY' not in os.environ\n"
        "    pathlib.Path('place').write_text(str(cache))\n"
    )
    status, lines = lanes("unit", unit_a=body)
    assert status == 0, lines
    place = (tmp_path / "place").read_text()
    assert place != os.environ["BAKEOFF_CACHE"]
    assert not Path(place).exists()


def test_nothing_is_left_of_a_run_that_is_refused_or_loses_a_worker(lanes, tmp_path: Path) -> None:
    begins = "import os, pathlib\npathlib.Path('run').write_text(os.environ['BAKEOFF_TEST_RUN'])\n"
    status, _ = lanes(pytest_arguments=("-p", "triton", "tests/interp"), interp_a=begins)
    assert status != 0
    killed = begins + "def test_a(): os.abort()\n"
    status, lines = lanes(pytest_arguments=("-n1", "tests/unit"), unit_a=killed)
    assert status == 1, lines
    scratch = Path((tmp_path / "run").read_text()).parent
    assert not list(scratch.glob("bakeoff-test-*"))
