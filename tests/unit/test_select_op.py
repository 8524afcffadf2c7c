"""Declarations: what a candidate's source hash covers, and scalars as the definition declares them."""

import dataclasses
import functools
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from bakeoff.select import Candidate, registry
from bakeoff.select.declare.key import key
from tests.unit import zoo

ROOT = Path(__file__).parents[2]

NOTEBOOK = """
    import sys, torch, bakeoff
    from bakeoff.select import Candidate, Cost, Op, call
    def reference(x: torch.Tensor) -> torch.Tensor: return x.clamp(min=0)
    def slow(x):
        for _ in range(40): y = torch.relu(x) + 0
        return y
    def declared(fast):
        return Op(
            name="zoo_relu", reference=reference,
            candidates=(Candidate("eager", slow), Candidate("fast", fast)), check=lambda c: None,
            bucket=lambda c: c, cost=lambda c: Cost(2 * c.x.nbytes, c.x.numel), cases=lambda: [],
            heuristic=lambda c, r: "eager", features={"x": 1}, batched=frozenset({"x"}),
        )
    import bakeoff.select.choose.tune
    sys.modules["bakeoff.select.choose.tune"]._PER_KEY_S = 0.3
    x = torch.randn(64, 64)
    for name in sys.argv[1:]:
        op = declared({"right": lambda x: torch.relu(x), "wrong": lambda x: torch.sigmoid(x)}[name])
        report = bakeoff.tune(lambda: call(op, x), budget_s=30)
        print(report.measured, *report.choices.values(), torch.equal(call(op, x), reference(x)))
"""


@pytest.mark.parametrize("together", [True, False], ids=["declared once more", "in the next process"])
def test_a_verdict_never_outlives_code_that_has_no_file(tmp_path: Path, together: bool) -> None:
    said = []
    for names in [("right", "wrong")] if together else [("right",), ("wrong",)]:
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(NOTEBOOK), *names],
            env={"PYTHONPATH": str(ROOT / "src"), "BAKEOFF_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        said += run.stdout.splitlines()
        assert run.returncode == 0, run.stderr
    assert said == ["1 fast True", "1 eager True"]


def test_callables_without_a_source_differ_and_never_fail() -> None:
    calls: list[Any] = [torch.Tensor.relu, torch.ops.aten.relu, torch.ops.aten.relu.default]
    hashes = {Candidate("c", call).source_hash for call in calls * 2}
    assert len(hashes) == 2 * len(calls)


def test_the_hash_covers_what_only_wraps_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text = textwrap.dedent(
        """
        import functools, torch
        @torch.library.custom_op("zoo_wrapped::relu", mutates_args=())
        def op(x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x)
        def plain(x, slope=0): return torch.relu(x)
        partial = functools.partial(plain, slope=1)
        @functools.wraps(plain)
        def wrapped(*a): return plain(*a)
        """
    )
    file = tmp_path / "zoo_wrapped_kernels.py"
    file.write_text(text)
    import zoo_wrapped_kernels as kernels

    def load() -> Any:
        from zoo_wrapped_kernels import plain

        return plain

    def hashes() -> list[str]:
        calls = [kernels.op, kernels.partial, kernels.wrapped, functools.partial(kernels.partial)]
        loaded = Candidate("c", load=load)
        return [candidate.source_hash for candidate in (*(Candidate("c", call) for call in calls), loaded)]

    before = hashes()
    assert before == hashes()
    assert len(set(before)) == 1
    file.write_text(text + "edited = 1\n")
    assert not set(before) & set(hashes())


def test_the_hash_reads_what_lies_in_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        from zoo_archived.kernel import call

        return call

    hashes = []
    for body, cuda in (("x", "//"), ("x", "//"), ("x * 1", "//"), ("x", "// edited")):
        place = tmp_path / f"{len(hashes)}.zip"
        with zipfile.ZipFile(place, "w") as archive:
            archive.writestr("zoo_archived/__init__.py", "")
            text = f'SOURCE = "cuda/kernel.cu"\ndef call(x, w, flag=None): return {body}\n'
            archive.writestr("zoo_archived/kernel.py", text)
            archive.writestr("zoo_archived/cuda/kernel.cu", '#include "shared.cuh"')
            archive.writestr("zoo_archived/cuda/shared.cuh", cuda)
        with monkeypatch.context() as inside:
            inside.syspath_prepend(place)
            hashes.append(Candidate("c", load=load).source_hash)
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


FOLDER = {
    "__init__.py": "",
    "declared.py": "from zoo_folder.kernels import launch\n",
    "kernels/__init__.py": "",
    "kernels/launch.py": """
        import torch, absent_from_here
        def call(x, w, flag=None):
            from . import tiling
            from .deeper import steps
            return x
    """,
    "kernels/tiling.py": "from zoo_folder.elsewhere import nothing\n",
    "kernels/deeper/__init__.py": "",
    "kernels/deeper/steps.py": "",
    "kernels/beside.py": "",
    "elsewhere.py": "",
}


def test_the_hash_follows_imports_within_the_folder_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside functions and relative ones, too; modules are read, none is imported."""

    def load() -> Any:
        from zoo_folder.kernels import launch

        return launch.call

    monkeypatch.syspath_prepend(tmp_path)
    paths = {name: tmp_path / "zoo_folder" / name for name in FOLDER}
    for name, path in paths.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(FOLDER[name]))
    before = Candidate("c", load=load).source_hash
    changing = set()
    for name, path in paths.items():
        text = path.read_text()
        path.write_text(text + "edited = 1\n")
        if Candidate("c", load=load).source_hash != before:
            changing.add(name)
        path.write_text(text)
    assert Candidate("c", load=load).source_hash == before
    inside = {"launch.py", "tiling.py", "__init__.py", "deeper/__init__.py", "deeper/steps.py"}
    assert changing == {f"kernels/{name}" for name in inside}
    assert not any(name.startswith("zoo_folder") for name in sys.modules)


def test_a_loader_without_imports_has_the_source_of_its_module() -> None:
    loaded = Candidate("c", load=lambda: zoo.good)
    assert loaded.implementation is zoo.good
    assert loaded.source_hash == Candidate("c", load=lambda: zoo.eager).source_hash
    assert loaded.source_hash != Candidate("c", zoo.good).source_hash, "another module's"
    assert loaded.modules == (__name__,)


@pytest.mark.parametrize(
    "given", [{}, {"call": zoo.good, "load": lambda: zoo.good}, {"call": "tests.unit:x"}]
)
def test_a_candidate_is_a_callable_or_a_loader(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"candidate 'c'.*load="):
        Candidate("c", **given)


def test_declarations_are_data() -> None:
    op = zoo.op(zoo.GOOD)
    for change in ("name", "traced"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(op, change, "other")
    assert not callable(op)
    assert op != zoo.op(zoo.GOOD), "an op is itself alone: memos are by op"
    assert op.name not in registry


def test_what_selection_declares_stands_on_nothing_of_the_other_rooms() -> None:
    """Importing the declaring room by its files imports neither contests nor choosing."""
    script = """
        import importlib.machinery, sys, types
        package = types.ModuleType("bakeoff.select")  # without what __init__ imports
        import bakeoff
        package.__path__ = [bakeoff.__path__[0] + "/select"]
        sys.modules["bakeoff.select"] = package
        from bakeoff.select.declare import compiled, key, op, registry
        print([name for name in sys.modules if name.startswith(("bakeoff.select.c", "bakeoff.ops"))])
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "[]\n"


def scaled(x: torch.Tensor, scale: float = 1.0, cap: float | None = None, times: int = 1) -> torch.Tensor:
    return x * scale


def test_equal_numbers_make_one_key() -> None:
    op = zoo.op(
        name="zoo_scaled",
        reference=scaled,
        incumbent=Candidate("eager", scaled),
        check=lambda case: None,
        bucket=lambda case: case,
        features={"x": 1},
    )
    x = torch.ones(2, 3)
    assert key(op, op.case((x, 2, 3, 1)), "eager") == key(op, op.case((x, 2.0, 3.0, 1)), "eager")
    others = op.case((x, "two", None, 2.5))
    assert [others.args[name] for name in op.params[1:]] == ["two", None, 2.5], "for the check to name"
