"""`bakeoff doctor`: what it looks at and what it warns of."""

import io
import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from bakeoff import hardware
from bakeoff.apps.bench.notation import read_case
from bakeoff.apps.cli import doctor, main
from bakeoff.select import find_op
from bakeoff.select.choose import policy
from bakeoff.select.choose.table import Table, write
from tests.unit.verdicts import made

CPU = doctor.Machine(
    device="cpu", torch="2.13.0+cpu", triton="3.7.1", c_compiler="/usr/bin/gcc", cxx_compiler="/usr/bin/g++"
)
H100 = msgspec.structs.replace(
    CPU, device="cuda:0", torch="2.13.0+cu130", capability=(9, 0), shared_memory=227 * 1024
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty table cache."""
    monkeypatch.setenv("BAKEOFF_CACHE", str(tmp_path / "cache"))
    policy.store.forget()
    yield tmp_path / "cache"
    policy.store.forget()


def test_nothing_to_warn_of_on_an_h100() -> None:
    assert doctor.problems(H100) == []


@pytest.mark.parametrize(
    ("base", "changes", "texts"),
    [
        (CPU, {}, ["no GPU"]),
        (CPU, {"gpu_unused": True}, ["this PyTorch can't use it"]),
        (CPU, {"cxx_compiler": None}, ["no C++ compiler", "g++"]),
        (CPU, {"unlinkable": "fails in /my folder/torch"}, ["fails in /my folder/torch"]),
        (CPU, {"python_headers": False}, ["Python.h"]),
        (CPU, {"triton": "none"}, ["triton is not installed", "pip install triton"]),
        (H100, {"torch": "2.10.1"}, ["older than 2.11"]),
        (H100, {"triton": "3.5.0"}, ["older than 3.6"]),
        (H100, {"capability": (6, 1)}, ["sm_61", "Volta", "bfloat16"]),
        (H100, {"capability": (7, 5)}, ["sm_75", "Ampere", "float16"]),
        (H100, {"shared_memory": 48 * 1024}, ["48 KiB of shared memory"]),
        (H100, {"c_compiler": None}, ["no C compiler", "gcc"]),
        (H100, {"others": "2 other process(es) use the GPU"}, ["2 other process", "little trust"]),
        (H100, {"hip": True}, ["AMD"]),
        (H100, {"cache_writable": False}, ["BAKEOFF_CACHE"]),
    ],
)
def test_known_problems(base: doctor.Machine, changes: dict[str, object], texts: list[str]) -> None:
    found = doctor.problems(msgspec.structs.replace(base, **changes))
    new = [text for text in found if text not in doctor.problems(base)] if changes else found
    for text in texts:
        assert any(text in line for line in new), found


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)])
def test_bf16_warning_ends_at_ampere(capability: tuple[int, int]) -> None:
    found = " ".join(doctor.problems(msgspec.structs.replace(H100, capability=capability)))
    assert ("bfloat16" in found) == (capability < (8, 0))
    assert "Volta" not in found


def test_report_of_this_machine(cache: Path) -> None:
    report = doctor.examine("cpu")
    assert report.facts == hardware.facts("cpu")
    assert report.ceilings.copy_gbps > 0
    assert report.ceilings.matmul_tflops > 0
    assert report.cache == str(cache)
    assert report.table == doctor.TableState(str(policy.store.path("cpu")))
    assert set(report.packages) >= {"liger_kernel", "quack", "fla", "tensorboard", "wandb"}
    assert not cache.exists(), "looking must not write"


def test_report_counts_stale_and_changed_rows(cache: Path) -> None:
    op = find_op("rms_norm")
    first = made(op, read_case(op, ["x=fp32[4,8]"], "cpu"), {"eager": 2.0, "compiled": 1.0}, "compiled")
    second = made(op, read_case(op, ["x=fp32[4,16]"], "cpu"), {"eager": 2.0}, "eager")
    changed = msgspec.structs.replace(
        second, trials=(msgspec.structs.replace(second.trials[0], source_hash="0"), *second.trials[1:])
    )
    older = msgspec.structs.replace(hardware.facts("cpu"), torch="2.11.0")
    write(policy.store.path("cpu"), Table(older, {first.key: first, second.key: changed}))
    report = doctor.examine("cpu")
    assert (report.table.rows, report.table.stale, report.table.outdated) == (2, 1, 1)
    assert any("1 verdicts were measured under other versions" in text for text in report.warnings)


def test_report_where_the_cache_can_not_be_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 300)  # a longer name than a folder may have: unlike a locked one, for root too
    monkeypatch.setenv("BAKEOFF_CACHE", str(folder / "bakeoff"))
    report = doctor.examine("cpu")
    assert report.cache == str(folder / "bakeoff")
    assert report.table == doctor.TableState(str(policy.store.path("cpu")))


def test_report_of_a_broken_table_leaves_it(cache: Path) -> None:
    path = policy.store.path("cpu")
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": 1, "rows"')
    report = doctor.examine("cpu")
    assert "not a table" in report.table.problem
    assert any("set aside" in text for text in report.warnings)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_paths_are_whole_on_a_narrow_terminal(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "a folder" / ("x" * 90)
    monkeypatch.setenv("BAKEOFF_CACHE", str(deep))
    report = msgspec.structs.replace(doctor.examine("cpu"), warnings=[f"{deep} can't be written"])
    out = io.StringIO()
    doctor.show(report, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert f"cache      {deep}" in lines
    assert f"table      0 verdicts, 0 stale, 0 not in force: {report.table.path}" in lines
    assert f"! {deep} can't be written" in lines


def test_text_and_json_say_the_same(cache: Path) -> None:
    done = CliRunner().invoke(main, ["doctor", "--device", "cpu", "--json"])
    assert done.exit_code == 0, done.output
    plain = json.loads(done.stdout)
    report = msgspec.convert(plain, doctor.Report)
    out = io.StringIO()
    doctor.show(report, Console(file=out, width=200))
    for text in (
        report.facts.torch,
        report.facts.device,
        report.table.path,
        "copy",
        "matmul",
        "liger_kernel absent",
    ):
        assert text in out.getvalue()
    for warning in report.warnings:
        assert warning in out.getvalue()
