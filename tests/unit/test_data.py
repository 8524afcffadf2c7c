"""Bytes as data: what is read, in which order, and what is refused."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bakeoff.apps.train import data
from bakeoff.apps.train.data import (
    Batches,
    ByteCorpus,
    DataError,
    Prefetcher,
    held_out_rows,
    permute,
    split,
    stdlib_files,
)


def corpus_of(folder: Path, sizes: list[int]) -> tuple[ByteCorpus, bytes]:
    random = np.random.default_rng(0)
    text = b""
    for number, size in enumerate(sizes):
        piece = random.integers(0, 256, size, dtype=np.uint8).tobytes()
        (folder / f"{number:03}.bin").write_bytes(piece)
        text += piece
    return ByteCorpus.open(folder), text


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    ends=st.tuples(*[st.integers(0, 99)] * 2),
)
def test_reads_across_files(
    sizes: list[int], ends: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    corpus, text = corpus_of(tmp_path_factory.mktemp("data"), sizes)
    assert len(corpus) == len(text)
    start, end = sorted(min(e, len(text)) for e in ends)
    assert corpus.read(start, end - start).tobytes() == text[start:end]
    for start, length in ((-1, 1), (0, len(text) + 1), (len(text), 1)):
        with pytest.raises(IndexError, match="are outside the"):
            corpus.read(start, length)


def test_folders_are_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    for name, text in {
        "b.txt": "B",
        "a/z.txt": "Z",
        "a/y/x.txt": "X",
        ".hidden": "-",
        ".git/c": "-",
        "c": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    os.mkfifo(tmp_path / "pipe")
    corpus = ByteCorpus.open(tmp_path)
    assert corpus.read(0, len(corpus)).tobytes() == b"XZB"


def test_files_are_held_out_whole(tmp_path: Path) -> None:
    _, text = corpus_of(tmp_path, [*range(1, 60)])
    corpus = ByteCorpus.open(tmp_path, 0.2)
    held_out = split(corpus, 0.2, 4)[1]
    assert len(held_out) == corpus.held > 0
    assert len(corpus) == len(text)
    held = {file for file, end in zip(corpus.files, corpus._ends, strict=True) if end > held_out.start}
    assert sum(file.stat().st_size for file in held) == corpus.held
    assert 3 < len(held) < 30
    more = tmp_path / "000" / "more.bin"
    more.parent.mkdir()
    more.write_bytes(b"new")  # the choice of the others doesn't depend on it
    again = ByteCorpus.open(tmp_path, 0.2)
    assert {file for file in again.files if file in held} == held
    start = split(again, 0.2, 4)[1].start
    assert held - {more} == {
        file for file, end in zip(again.files, again._ends, strict=True) if end > start
    } - {more}
    assert ByteCorpus.open(tmp_path / "010.bin", 0.2).held == 0  # one file can't be both


def test_a_home_that_no_one_knows_is_named() -> None:
    with pytest.raises(DataError, match=r"can't read ~nosuchuser/x: .*write the path out. Set data.path"):
        ByteCorpus.open("~nosuchuser/x")


def test_a_digest_is_of_the_bytes_in_their_order(tmp_path: Path) -> None:
    whole, parts, other = tmp_path / "whole.txt", tmp_path / "parts", tmp_path / "other.txt"
    whole.write_bytes(b"abcdef")
    parts.mkdir()
    (parts / "1").write_bytes(b"abc")
    (parts / "2").write_bytes(b"def")
    other.write_bytes(b"fedcba")
    digests = [ByteCorpus.open(path).digest() for path in (whole, parts, other)]
    assert digests[0] == digests[1] != digests[2]


def test_of_large_data_the_digest_reads_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "DIGEST_PIECE", 4)
    monkeypatch.setattr(data, "DIGEST_PIECES", 3)
    path = tmp_path / "large.txt"

    def digest(content: bytes) -> str:
        path.write_bytes(content)
        return ByteCorpus.open(path).digest()

    zeros = digest(bytes(30))
    assert digest(bytes(9) + b"x" + bytes(20)) == zeros  # between the pieces
    assert digest(bytes(20) + b"x" + bytes(9)) != zeros
    assert digest(bytes(31)) != zeros
    assert digest(bytes(11) + b"x") != digest(bytes(12))  # small enough to be read whole


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "OPEN_FILES", 3)
    corpus, text = corpus_of(tmp_path, [5] * 40)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert corpus.read(0, 200).tobytes() == text
    assert corpus.read(3, 100).tobytes() == text[3:103]
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 3


def test_the_standard_library_is_the_default_corpus() -> None:
    files = stdlib_files()
    names = [file.as_posix() for file in files]
    assert files == sorted(files, key=lambda f: f.as_posix())
    assert any(name.endswith("/argparse.py") for name in names)
    assert not any("/site-packages/" in n or "/test/" in n or "/tests/" in n for n in names)
    corpus = ByteCorpus.open("stdlib")
    assert len(corpus) > 5_000_000
    assert corpus.files == [file for file in files if file.stat().st_size]


def test_missing_empty_unreadable_and_short_data_name_the_path_and_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"can't read .*/none: No such file.*Set data.path"):
        ByteCorpus.open(tmp_path / "none")
    with pytest.raises(DataError, match=r"data.path is empty: set it to a file or folder"):
        ByteCorpus.open("")
    with pytest.raises(DataError, match="holds no bytes"):
        ByteCorpus.open(tmp_path)
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(DataError, match=r"empty.txt holds no bytes: give data.path"):
        ByteCorpus.open(empty)
    with pytest.raises(DataError, match="neither a file nor a folder"):
        ByteCorpus.open("/dev/null")
    short = tmp_path / "short.txt"
    short.write_bytes(b"x" * 129)
    left = r"short.txt holds 129 bytes, of which 64 are left to train on; rows of 64 bytes need at least 65 "
    with pytest.raises(DataError, match=f"{left}there and 65 held out: .*smaller train.seq_len$"):
        split(ByteCorpus.open(short), 0.1, 64)
    short.write_bytes(b"x" * 130)
    with pytest.raises(DataError, match=r"130 bytes, of which 13 are left .*, or a smaller data\.holdout$"):
        split(ByteCorpus.open(short), 0.9, 64)
    assert split(ByteCorpus.open(short), 0.1, 64) == (range(65), range(65, 130))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(DataError, match=r"short.txt: permission denied.*chmod"):
        ByteCorpus.open(short)


def test_a_file_that_changes_under_the_run_is_named(tmp_path: Path) -> None:
    corpus, _ = corpus_of(tmp_path, [10, 10])
    (tmp_path / "001.bin").write_bytes(b"now")
    assert len(corpus.read(0, 10)) == 10
    with pytest.raises(DataError, match=r"001.bin shrank from 10 to 3 bytes"):
        corpus.read(5, 10)
    corpus, _ = corpus_of(tmp_path, [10, 10])
    (tmp_path / "001.bin").unlink()
    with pytest.raises(DataError, match=r"can't read .*001.bin any more"):
        corpus.read(15, 1)


@given(count=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(count: int, key: int) -> None:
    assert sorted(permute(i, count, key) for i in range(count)) == list(range(count))


def test_permute_looks_random() -> None:
    order = np.array([permute(i, 1000, 5) for i in range(1000)])
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1
    assert (np.diff(order) == 1).mean() < 0.01
    assert (order == [permute(i, 1000, 6) for i in range(1000)]).mean() < 0.02


def batches(corpus: ByteCorpus, **changes: int) -> Batches:
    settings = {"seq_len": 8, "batch_size": 6, "seed": 3, **changes}
    return Batches(corpus, range(len(corpus) - 50), **settings)


def test_order_is_a_function_of_seed_and_step_for_any_world_size(tmp_path: Path) -> None:
    corpus, text = corpus_of(tmp_path, [700, 301])
    alone = batches(corpus)
    steps = [alone.batch(step) for step in range(40)]
    for step in (31, 0, 7):  # in any order, from a fresh object
        assert torch.equal(batches(corpus).batch(step), steps[step])
    for world in (2, 3, 6):
        parts = [batches(corpus, rank=rank, world_size=world).batch(17) for rank in range(world)]
        assert torch.equal(torch.cat(parts), steps[17])
    assert not torch.equal(batches(corpus, seed=4).batch(0), steps[0])
    row, start = alone.batch(2)[4], alone.starts(2)[4]
    assert bytes(row.tolist()) == text[start : start + 9]


def test_every_window_is_seen_once_a_pass_and_held_out_bytes_never(tmp_path: Path) -> None:
    corpus, _ = corpus_of(tmp_path, [1000])
    feed = batches(corpus, batch_size=1)
    passes = [[feed.starts(p * feed.windows + i)[0] for i in range(feed.windows)] for p in range(8)]
    for starts in passes:
        assert len(set(starts)) == feed.windows
        assert {b - a for a, b in zip(sorted(starts)[:-1], sorted(starts)[1:], strict=True)} == {8}
        assert max(starts) + 9 <= 950
    assert len({min(starts) for starts in passes}) > 1  # windows begin elsewhere in every pass
    assert passes[0] != passes[1]


def test_shortest_data_still_make_a_row(tmp_path: Path) -> None:
    corpus, text = corpus_of(tmp_path, [18])
    span, tail = split(corpus, 0.05, 8)
    feed = Batches(corpus, span, seq_len=8, batch_size=3, seed=0)
    assert feed.windows == 1
    assert {bytes(row.tolist()) for step in range(5) for row in feed.batch(step)} == {text[:9]}
    assert held_out_rows(corpus, tail, 8, 64).shape == (1, 9)


def test_held_out_rows_are_apart_and_in_the_tail(tmp_path: Path) -> None:
    (tmp_path / "count").write_bytes(bytes(range(250)))
    rows = held_out_rows(ByteCorpus.open(tmp_path / "count"), range(100, 250), 9, 4)
    assert rows[:, 0].tolist() == [100, 130, 170, 210]
    assert rows.shape == (4, 10)
    assert held_out_rows(ByteCorpus.open(tmp_path / "count"), range(100, 250), 9, 99).shape == (15, 10)


def test_ranks_that_do_not_divide_the_batch_are_refused(tmp_path: Path) -> None:
    corpus, _ = corpus_of(tmp_path, [200])
    with pytest.raises(DataError, match="batch_size=6 can't be shared by 4 ranks"):
        batches(corpus, world_size=4)
    with pytest.raises(ValueError, match="rank 2 is not in a world of 2"):
        batches(corpus, rank=2, world_size=2)


def test_a_batch_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    corpus, _ = corpus_of(tmp_path, [200])
    with pytest.raises(DataError, match=r"batch_size=1000000000000 rows of 11 bytes are more than .* memory"):
        Batches(corpus, range(200), seq_len=10, batch_size=10**12, seed=0)


def test_prefetching_changes_nothing_and_passes_errors_on(tmp_path: Path) -> None:
    corpus, _ = corpus_of(tmp_path, [600, 600])
    feed = batches(corpus)
    with Prefetcher(feed, torch.device("cpu")) as prefetcher:
        for step in (0, 1, 2, 9, 10, 3):
            assert torch.equal(prefetcher.get(step), feed.batch(step))
    fresh, _ = corpus_of(tmp_path, [600, 600])
    for file in tmp_path.iterdir():
        file.unlink()
    with (
        Prefetcher(batches(fresh), torch.device("cpu")) as prefetcher,
        pytest.raises(DataError, match="any more"),
    ):
        prefetcher.get(0)


def test_files_to_validate_by_lie_between_and_leave_the_held_out_ones(tmp_path: Path) -> None:
    corpus_of(tmp_path, [*range(1, 60)])
    plain, both = (ByteCorpus.open(tmp_path, 0.2, share) for share in (0.0, 0.3))
    held = plain.read(*_piece(split(plain, 0.2, 4)[1]))
    training, held_out = split(both, 0.2, 4, validation=0.3)
    assert both.read(*_piece(held_out)).tobytes() == held.tobytes()
    assert held_out.start - training.stop == both.validating > 0
    starts = [0, *both._ends.tolist()]
    for file, start in zip(both.files, starts, strict=False):
        at = data.place(file.relative_to(tmp_path))
        assert (at < 0.2) == (start >= held_out.start)
        assert (at >= 0.5) == (start < training.stop)


def _piece(span: range) -> tuple[int, int]:
    return span.start, len(span)


def test_of_one_file_the_piece_before_the_end_is_for_validation(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(bytes(1000))
    corpus = ByteCorpus.open(tmp_path / "one", 0.1, 0.2)
    assert split(corpus, 0.1, 9, validation=0.2) == (range(700), range(900, 1000))
    with pytest.raises(DataError, match="need at least 400 there and 400 to validate and 400 held out"):
        split(corpus, 0.1, 399, validation=0.2)
