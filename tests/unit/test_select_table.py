"""The table on disk: whatever lies there, a run goes on, nothing good is lost, only the sound is believed."""

import errno
import functools
import itertools
import json
import logging
import multiprocessing
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bakeoff import hardware
from bakeoff.errors import TableError
from bakeoff.select import Candidate, Op
from bakeoff.select.choose import table as tables
from bakeoff.select.choose.table import Store, Table, cache_dir, read, write
from bakeoff.select.contests.judge import Errors
from bakeoff.select.contests.measure import Timing
from bakeoff.select.contests.verdict import Trial, Verdict
from bakeoff.select.declare.key import key
from tests.unit import zoo
from tests.unit.forked import Forked

OP = zoo.op(zoo.GOOD, name="zoo_table")


def row(op: Op = OP, rows: int = 4, us: float = 5.0) -> Verdict:
    name = key(op, zoo.case(rows, 8), "eager")
    trials = tuple(
        Trial(c.name, c.source_hash, Timing(t, t, t, 0.01, 9), Errors(1e-7, 1e-8, 1e-9))
        for c, t in zip(op.candidates, (10.0, us), strict=False)
    )
    return Verdict(
        name, op.name, "eager", op.candidates[-1].name, "faster", trials, op.cost(zoo.case(rows, 8)), "2026"
    )


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("BAKEOFF_CACHE", str(tmp_path / "cache"))
    return Store()


def found(verdict: Verdict, op: Op = OP) -> tables.Found | None:
    """What another process would find."""
    return Store().lookup(op, verdict.key, "cpu")


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# -------------------------------------------------------------------------------------- in good order
def test_what_is_added_is_found_by_the_next_process(store: Store) -> None:
    verdict = row()
    assert store.lookup(OP, verdict.key, "cpu") is None
    store.add([verdict], "cpu")
    fresh = store.lookup(OP, verdict.key, "cpu")
    assert fresh is not None
    assert fresh.source == "measured now"
    later = found(verdict)
    assert later == tables.Found(verdict, "user cache", stale=False)


def test_the_file_is_sorted_readable_json_in_the_cache_folder(store: Store) -> None:
    store.add([row(rows=n) for n in (7, 3, 5)], "cpu")
    path = store.path("cpu")
    assert path.parent == cache_dir()
    text = path.read_text()
    assert text.count("\n") > 30
    names = list(json.loads(text)["rows"])
    assert names == sorted(names)
    assert json.loads(text)["facts"]["torch"] == hardware.facts("cpu").torch
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".json", ".lock"], "no temporary file is left"


def test_adding_keeps_and_replaces(store: Store) -> None:
    store.add([row(rows=3)], "cpu")
    Store().add([row(rows=4, us=6.0)], "cpu")
    Store().add([row(rows=4, us=7.0)], "cpu")
    table = read(store.path("cpu"))
    assert len(table.rows) == 2
    assert table.rows[row(rows=4).key].timings["good"].us == 7.0


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAKEOFF_CACHE", "~/somewhere")
    assert cache_dir() == Path.home() / "somewhere"
    monkeypatch.delenv("BAKEOFF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/x")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_dir() == Path("/var/x/bakeoff")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == Path.home() / "Library" / "Caches" / "bakeoff"


def test_layers_are_read_in_order(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "package"
    monkeypatch.setattr("importlib.resources.files", lambda name: shipped)
    write(shipped / "tables" / "cpu.json", Table(hardware.facts("cpu"), {row(us=3.0).key: row(us=3.0)}))
    below = found(row())
    assert below is not None
    assert below.source == "shipped table cpu.json"
    store.add([row(us=4.0)], "cpu")
    above = found(row())
    assert above is not None
    assert above.source == "user cache"


def test_a_broken_shipped_table_is_ignored_and_stays_where_it_is(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = tmp_path / "package"
    monkeypatch.setattr("importlib.resources.files", lambda name: shipped)
    broken = shipped / "tables" / "bad.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    assert found(row()) is None
    assert broken.exists()
    assert "bad.json" in caplog.text


# ------------------------------------------------------------------------------- stamps and sources
def under(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Be another environment on this machine."""
    facts = msgspec.structs.replace(hardware.facts("cpu"), **versions)
    monkeypatch.setattr(hardware, "facts", lambda device="cuda": facts)


def test_other_versions_are_used_and_marked_stale_and_outlive_new_rows(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        under(before, triton="3.0.0")
        store.add([row(rows=3), row(rows=4)], "cpu")
    old = found(row(rows=3))
    assert old is not None
    assert old.stale
    Store().add([row(rows=4, us=6.0)], "cpu")
    new, kept = found(row(rows=4)), found(row(rows=3))
    assert new is not None
    assert not new.stale
    assert kept is not None
    assert kept.stale
    assert kept.source == "user cache"


def test_environments_side_by_side_keep_their_verdicts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = ("2.11.0+cu130", "2.12.0", "2.13.0")
    for us, torch in enumerate(versions, 4):
        with monkeypatch.context() as environment:
            under(environment, torch=torch)
            Store().add([row(us=us)], "cpu")
    for us, torch in enumerate(versions, 4):
        with monkeypatch.context() as environment:
            under(environment, torch=torch)
            again = found(row())
            assert again is not None
            assert (again.stale, again.verdict.timings["good"].us) == (False, us)


def test_of_other_versions_the_last_measured_count(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for us, torch in enumerate(("1", "3", "2"), 4):
        with monkeypatch.context() as environment:
            under(environment, torch=torch)
            Store().add([row(us=us)], "cpu")
            os.utime(store.path("cpu"), (us, us))
    last = found(row())
    assert last is not None
    assert (last.stale, last.verdict.timings["good"].us) == (True, 6)


def test_other_environments_tables_are_never_moved(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as later:
        under(later, torch="9.0")
        store.add([row()], "cpu")
        theirs = store.path("cpu")
        edit(theirs, lambda t: t.update(schema=2))
    before = theirs.read_bytes()
    assert found(row()) is None
    assert "ignored" in caplog.text
    assert theirs.read_bytes() == before


def test_a_table_of_other_versions_than_its_name_says_is_not_mixed(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.add([row()], "cpu")
    edit(store.path("cpu"), lambda t: t["facts"].update(triton="3.0.0"))
    Store().add([row(rows=9)], "cpu")
    assert "under other versions than its name says" in caplog.text
    assert list(read(store.path("cpu")).rows) == [row(rows=9).key]
    assert list(store.path("cpu").parent.glob("*.broken-*")), "set aside, not lost"


@pytest.mark.parametrize("field", ["torch", "triton", "cuda", "driver"])
def test_every_version_counts(field: str) -> None:
    facts = hardware.facts("cpu")
    assert msgspec.structs.replace(facts, **{field: "0"}).same_software != facts.same_software
    assert msgspec.structs.replace(facts, **{field: "0"}).same_machine == facts.same_machine


def test_another_machines_table_is_not_believed_nor_mixed(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.add([row()], "cpu")
    edit(store.path("cpu"), lambda t: t["facts"].update(device="NVIDIA H100 PCIe"))
    assert found(row()) is None
    assert "measured on another machine ('NVIDIA H100 PCIe')" in caplog.text
    store.add([row(rows=9)], "cpu")
    assert list(read(store.path("cpu")).rows) == [row(rows=9).key]
    assert list(store.path("cpu").parent.glob("*.broken-*")), "set aside, not lost"


def test_machines_differ_by_name_processors_and_memory() -> None:
    facts = hardware.Facts("NVIDIA H100", 132, 80 << 30, "2", "3", "12")
    for other in ({"device": "NVIDIA H200"}, {"sms": 114}, {"memory": 94 << 30}):
        assert msgspec.structs.replace(facts, **other).same_machine != facts.same_machine
    assert msgspec.structs.replace(facts, memory=(80 << 30) - 5).same_machine == facts.same_machine


def test_editing_one_candidates_source_invalidates_only_rows_of_its_op(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    kernel = tmp_path / "zoo_edited_kernel.py"
    kernel.write_text("def call(x, w, flag=None): return x\n")

    def load() -> Any:
        from zoo_edited_kernel import call

        return call

    def declared() -> Op:
        return zoo.op(Candidate("kernel", load=load), name="zoo_edited")

    store.add([row(declared()), row(OP)], "cpu")
    assert found(row(declared()), declared()) is not None
    kernel.write_text("def call(x, w, flag=None): return x * 1\n")
    assert found(row(declared()), declared()) is None
    assert found(row(OP)) is not None


def test_a_new_candidate_or_an_installed_peer_reopens_the_contest(store: Store) -> None:
    store.add([row()], "cpu")
    more = zoo.with_candidates(OP, zoo.GOOD, zoo.LAUNCHES)
    assert found(row(), more) is None
    absent = zoo.with_candidates(OP, zoo.GOOD, zoo.WRONG["absent"][0])
    assert found(row(), absent) is not None


def test_a_candidate_that_is_gone_leaves_the_rest_usable(store: Store) -> None:
    store.add([row()], "cpu")
    fewer = zoo.with_candidates(OP)
    assert found(row(), fewer) is not None
    assert found(row(), zoo.op(zoo.GOOD, name="zoo_other")) is None, "a row of another op"


# --------------------------------------------------------------------------- torn, foreign, hostile
def _nest(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def _row(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda t: next(iter(t["rows"].values())).update(changes)


def _trial(index: int, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda t: next(iter(t["rows"].values()))["trials"][index].update(changes)


def _rename(t: dict[str, Any]) -> None:
    t["rows"] = {f"other\x1b[2J{name}": value for name, value in t["rows"].items()}


CONTENTS: dict[str, bytes | Callable[[dict[str, Any]], object]] = {
    "empty": b"",
    "torn": b'{"facts": {"device": "x", "sms": 4',
    "not json": b"\x00\xff\xfe",
    "nested": _nest(200_000),
    "nested objects": b'{"rows":' * 50_000,
    "list": b"[]",
    "null": b"null",
    "wrong types": b'{"facts": 7, "rows": []}',
    "another schema": lambda t: t.update(schema=2),
    "no facts": lambda t: t.pop("facts"),
    "unknown winner": _row(winner="nobody"),
    "rejected winner": _trial(1, rejected="wrong"),
    "winner without a time": _trial(1, timing=None),
    "slower winner": _trial(1, timing={"us": 11.0, "p20": 1, "p80": 1, "spread": 0, "samples": 3}),
    "negative time": _trial(1, timing={"us": -5.0, "p20": 1, "p80": 1, "spread": 0, "samples": 3}),
    "zero time": _trial(1, timing={"us": 0, "p20": 1, "p80": 1, "spread": 0, "samples": 3}),
    "text as time": _trial(1, timing={"us": "fast", "p20": 1, "p80": 1, "spread": 0, "samples": 3}),
    "no trials": _row(trials=[]),
    "another key": _row(key="rms_norm() cpu eager"),
    "renamed key": _rename,
    "escape in a reason": _row(why="\x1b]0;owned\x07"),
    "escape in an op": _row(op="zoo\x1b[2J"),
    "escape in a version": lambda t: t["facts"].update(torch="9\x1b]0;owned\x07"),
    "escape in a candidate": _trial(0, candidate="\x1b[31meager"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_hostile_contents_are_reported_set_aside_and_measured_again(
    store: Store, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.add([row()], "cpu")
    path, content = store.path("cpu"), CONTENTS[name]
    if callable(content):
        edit(path, content)
    else:
        path.write_bytes(content)
    bytes_before = path.read_bytes()
    with pytest.raises(TableError, match=str(path)) as caught:
        read(path)
    assert str(caught.value).isprintable()
    assert found(row()) is None
    assert "set aside" in caplog.text
    (aside,) = path.parent.glob("*.broken-*")
    assert aside.read_bytes() == bytes_before
    Store().add([row()], "cpu")
    assert found(row()) is not None


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999", "-1"])
def test_numbers_that_are_none_are_refused(store: Store, text: str) -> None:
    store.add([row()], "cpu")
    path = store.path("cpu")
    path.write_text(path.read_text().replace('"us": 5.0', f'"us": {text}'))
    assert text in path.read_text()
    with pytest.raises(TableError):
        read(path)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(tables._LARGEST + 1)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_fifo, Path.mkdir, _loop, _dangling, _huge, _device])
def test_what_is_no_table_file_never_blocks_or_stops_a_run(
    store: Store, make: Callable[[Path], None]
) -> None:
    path = store.path("cpu")
    path.parent.mkdir(parents=True)
    make(path)
    assert found(row()) is None
    store.add([row()], "cpu")
    assert found(row()) is not None


# ------------------------------------------------------------------------------------ bad disks
def reported_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="bakeoff"):
        store.add([row(rows=3)], "cpu")
        store.add([row(rows=4)], "cpu")
    told = [r.getMessage() for r in caplog.records if "can't be written" in r.getMessage()]
    assert len(told) == 1
    assert "set BAKEOFF_CACHE to a writable folder" in told[0]
    for rows in (3, 4):
        kept = store.lookup(OP, row(rows=rows).key, "cpu")
        assert kept is not None, "verdicts hold for this run"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_failing_disk_costs_only_the_next_runs_start(
    store: Store, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.add([row(rows=9)], "cpu")
    before = store.path("cpu").read_bytes()

    def fsync(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    reported_once(store, caplog)
    assert store.path("cpu").read_bytes() == before, "the old table is whole"
    assert not list(store.path("cpu").parent.glob(".*")), "no half-written file is left"


def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        small = Path("/dev/full")  # not a folder: the same answer without the right to mount
    try:
        monkeypatch.setenv("BAKEOFF_CACHE", str(small))
        if small.is_dir():
            (small / "ballast").write_bytes(b"x" * 8192)
        reported_once(Store(), caplog)
    finally:
        if small.is_mount():
            subprocess.run(["umount", str(small)], check=True)


def test_a_cache_folder_that_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BAKEOFF_CACHE", str(tmp_path / "file"))
    assert found(row()) is None
    reported_once(Store(), caplog)


@pytest.mark.parametrize("cache", ["~nosuchuser/x", None])
def test_a_home_that_no_one_knows_costs_only_the_next_runs_start(
    cache: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME", "BAKEOFF_CACHE"):
        monkeypatch.delenv(name, raising=False)
    if cache:
        monkeypatch.setenv("BAKEOFF_CACHE", cache)
    assert found(row()) is None
    reported_once(Store(), caplog)
    assert not list(tmp_path.iterdir()), "no folder that is called ~"


# ------------------------------------------------------------------------------ many writers, kill -9
def _writer(first: int) -> None:
    for rows in range(first, first + 8):
        Store().add([row(rows=rows)], "cpu")


def test_writers_in_several_processes_lose_nothing_and_readers_see_no_torn_file(store: Store) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_writer, args=(first,)) for first in (1, 100, 300)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if store.path("cpu").exists():
            read(store.path("cpu"))  # a reader sees the old or the new file whole, never a torn one
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    wanted = {row(rows=rows).key for first in (1, 100, 300) for rows in range(first, first + 8)}
    assert set(read(store.path("cpu")).rows) == wanted


def _write_on(inside: bool) -> None:
    """Until it is killed; `inside`: stops in the middle."""
    if inside:
        os.replace = lambda *_: (print("half", flush=True), time.sleep(60))  # type: ignore[assignment]
    for rows in itertools.count(10):
        Store().add([row(rows=rows % 4000)], "cpu")
        print("one", flush=True)


@pytest.mark.parametrize("inside", [True, False], ids=["before the rename", "at any time"])
def test_kill_9_while_writing_leaves_a_whole_table(store: Store, inside: bool, tmp_path: Path) -> None:
    store.add([row(rows=3)], "cpu")
    with Forked(functools.partial(_write_on, inside), tmp_path / "said") as writer:
        writer.wait_for(lambda: writer.said().count("\n") >= (1 if inside else 5))
        time.sleep(0 if inside else 0.013)
        assert writer.end(signal.SIGKILL) == -signal.SIGKILL
    assert row(rows=3).key in read(store.path("cpu")).rows
    Store().add([row(rows=2)], "cpu")  # the dead writer's lock is gone
    assert found(row(rows=2)) is not None
    assert found(row(rows=3)) is not None
    assert not list(store.path("cpu").parent.glob(".*")), "its half-written file is cleaned up"
