"""Declarations: what a candidate's source hash covers, and scalars as the definition declares them."""

import functools
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from bakeoff.select.declare.key import key
from bakeoff.select.declare.op import Candidate
from tests.unit import zoo

ROOT = Path(__file__).parents[2]

NOTEBOOK = """
    import sys, torch, bakeoff
    from bakeoff.select.declare.op import Candidate, Cost, Op
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
    x = torch.randn(64, 64)
    for name in sys.argv[1:]:
        op = declared({"right": lambda x: torch.relu(x), "wrong": lambda x: torch.sigmoid(x)}[name])
        report = bakeoff.tune(lambda: op(x), budget_s=3)
        print(report.measured, *report.choices.values(), torch.equal(op(x), reference(x)))
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

    def hashes() -> list[str]:
        loads = [kernels.op, kernels.partial, kernels.wrapped, functools.partial(kernels.partial)]
        return [Candidate("c", load).source_hash for load in [*loads, "zoo_wrapped_kernels:plain"]]

    before = hashes()
    assert before == hashes()
    assert len(set(before)) == 1
    file.write_text(text + "# edited\n")
    assert not set(before) & set(hashes())


def test_the_hash_reads_what_lies_in_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for body in ("return x", "return x", "return x * 1"):
        place = tmp_path / f"{len(hashes)}.zip"
        with zipfile.ZipFile(place, "w") as archive:
            archive.writestr("zoo_archived/__init__.py", "")
            archive.writestr("zoo_archived/kernel.py", f"def call(x, w, flag=None): {body}\n")
            archive.writestr("zoo_archived/kernel.cu", "// CUDA")
        with monkeypatch.context() as inside:
            inside.syspath_prepend(place)
            sources = ("zoo_archived.kernel:kernel.cu",)
            hashes.append(Candidate("c", "zoo_archived.kernel:call", sources=sources).source_hash)
        for name in [name for name in sys.modules if name.startswith("zoo_archived")]:
            del sys.modules[name]
    assert hashes[0] == hashes[1] != hashes[2]


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
