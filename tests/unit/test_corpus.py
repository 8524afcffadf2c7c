"""Corpora: the same sources give the same folder, each text once, and a manifest that finds every change."""

import bz2
import gzip
import lzma
import os
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bakeoff.apps.cli import main
from bakeoff.apps.corpus import CorpusError, check, english_corpus, python_corpus, read_manifest
from bakeoff.apps.corpus.sources import refused
from bakeoff.apps.train.data import ByteCorpus, files_below, place, split


def code(word: str, lines: int = 10) -> bytes:
    return "".join(f"{word}_{line} = {line}\n" for line in range(lines)).encode()


def written(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def texts(out: Path) -> dict[str, bytes]:
    return {file.relative_to(out).as_posix(): file.read_bytes() for file in files_below(out)}


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["corpus", *map(str, arguments)])


# Python -----------------------------------------------------------------------------------------------------


def test_sources_are_kept_once_and_filtered(tmp_path: Path) -> None:
    root = written(
        tmp_path / "src",
        {
            "a.py": code("a"), "deep/b.py": code("b"), "z/copy.py": code("a").replace(b"\n", b"\r\n"),
            "notes.txt": code("n"), ".hidden.py": code("h"), "site-packages/c.py": code("c"),
            "small.py": b"x = 1\n",
            "latin.py": code("l") + b"# \xe9\n", "nul.py": code("n") + b"\0",
            "wide.py": b"x = '" + b"y" * 2000 + b"'\n",
            "large.py": b"x = 1\n" * 200_000,
        },
    )  # fmt: skip
    out = tmp_path / "out"
    manifest = python_corpus(out, [str(root)])
    assert texts(out) == {"src/a.py": code("a"), "src/deep/b.py": code("b")}
    assert manifest.dropped == {
        "copies of others": 1, "larger than 1 MiB": 1, "not UTF-8": 1, "shorter than 64 bytes": 1,
        "with control characters": 1, "with long lines": 1,
    }  # fmt: skip
    assert (manifest.files, manifest.bytes) == (2, len(code("a")) + len(code("b")))
    assert read_manifest(out) == manifest == check(out)


def test_the_same_sources_elsewhere_are_the_same_corpus(tmp_path: Path) -> None:
    files = {f"{name}.py": code(name) for name in "abcdefgh"}
    here = python_corpus(tmp_path / "1", [f"x={written(tmp_path / 'here', files)}"])
    there = python_corpus(tmp_path / "2", [f"x={written(tmp_path / 'there', dict(reversed(files.items())))}"])
    assert here.digest == there.digest
    assert here.entries == there.entries
    assert texts(tmp_path / "1") == texts(tmp_path / "2")
    assert str(tmp_path) not in (tmp_path / "1" / ".manifest.json").read_text()
    changed = written(tmp_path / "there", {"a.py": code("other")})
    assert python_corpus(tmp_path / "3", [f"x={changed}"]).digest != here.digest


def test_what_is_held_out_is_what_training_holds_out(tmp_path: Path) -> None:
    files = {f"{number:03}.py": code(f"name{number}") for number in range(200)}
    manifest = python_corpus(tmp_path / "out", [f"x={written(tmp_path / 'src', files)}"])
    corpus = ByteCorpus.open(tmp_path / "out", 0.05, 0.05)
    training, held_out = split(corpus, 0.05, 16, validation=0.05)
    assert len(held_out) == manifest.held_out["bytes"] > 0
    assert held_out.start - training.stop == manifest.held_out["validation_bytes"] > 0
    assert len(corpus) == manifest.bytes  # the manifest is not trained on


def test_a_limit_takes_a_sample_that_is_held_out_from_like_the_whole(tmp_path: Path) -> None:
    files = {f"{number:03}.py": code(f"name{number:03}") for number in range(400)}
    root = f"x={written(tmp_path / 'src', files)}"
    half = 200 * len(code("name000"))
    manifest = python_corpus(tmp_path / "out", [root], limit=half)
    assert 0.98 * half < manifest.bytes <= half
    assert manifest.dropped == {"beyond the limit": 400 - manifest.files}
    held = sum(place(file.relative_to(tmp_path / "out")) < 0.5 for file in files_below(tmp_path / "out"))
    assert 0.35 < held / manifest.files < 0.65
    with pytest.raises(CorpusError, match="raise --limit"):
        python_corpus(tmp_path / "none", [root], limit=10)


def test_installed_sources_are_the_default_and_their_versions_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = written(
        tmp_path / "site", {"p/a.py": code("a"), "p-1.5.dist-info/METADATA": b"Name: p\nVersion: 1.5\n"}
    )
    library = written(tmp_path / "lib", {"b.py": code("b")})
    places = {"stdlib": str(library), "purelib": str(site), "platlib": str(site)}
    monkeypatch.setattr("bakeoff.apps.corpus.sources.sysconfig.get_path", places.__getitem__)
    manifest = python_corpus(tmp_path / "out")
    assert set(texts(tmp_path / "out")) == {"stdlib/b.py", "site-packages/p/a.py"}
    assert manifest.sources[1] == {"name": "site-packages", "distributions": {"p": "1.5"}}
    assert set(manifest.sources[0]) == {"name", "python"}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (code("a"), ""), (b"", ""), ("é = 1\n".encode(), ""), (b"\xff", "not UTF-8"),
        (b"a\x01", "with control characters"), (b"a\tb\r\n\f", ""), (b"y" * 1001, "with long lines"),
        (b"y" * 1000 + b"\n" * 20, ""), ((b"y" * 120 + b"\n") * 3, "with long lines"),
    ],
)  # fmt: skip
def test_what_is_text(content: bytes, why: str) -> None:
    assert refused(content) == why


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["{src}/none"], r"none is no folder: give --from \[NAME=\]FOLDER"),
        (["{src}", "{src}"], "two folders are named src: write --from OTHERNAME="),
        (["a/b={src}"], "'a/b' can't name a folder; write NAME="),
        (["{src}/empty"], r"no document is left \(none was found\): give other sources"),
    ],
)
def test_roots_that_are_refused(words: list[str], fix: str, tmp_path: Path) -> None:
    src = written(tmp_path / "src", {"a.py": code("a")})
    (src / "empty").mkdir()
    with pytest.raises(CorpusError, match=fix):
        python_corpus(tmp_path / "out", [word.format(src=src) for word in words])
    assert [path.name for path in tmp_path.iterdir()] == ["src"]  # nothing half-made stays


# English ----------------------------------------------------------------------------------------------------

WIKI = (
    b"<mediawiki>\n<siteinfo>the information of the site, of more than 64 bytes in all, once</siteinfo>\n"
    + b"".join(
        b"  <page>\n    <title>%d</title>\n    <text>%s</text>\n  </page>\n" % (n, b"word %d " % n * 20)
        for n in range(30)
    )
)


def test_a_dump_is_cut_into_pages_however_it_is_packed(tmp_path: Path) -> None:
    plain = written(tmp_path, {"wiki": WIKI}) / "wiki"
    manifest = english_corpus(tmp_path / "plain", plain)
    assert manifest.files == 31
    assert b"".join(texts(tmp_path / "plain").values()) == WIKI
    (tmp_path / "wiki.xz").write_bytes(lzma.compress(WIKI))
    (tmp_path / "wiki.gz").write_bytes(gzip.compress(WIKI))
    (tmp_path / "wiki.bz2").write_bytes(bz2.compress(WIKI))
    with zipfile.ZipFile(tmp_path / "any.zip", "w") as archive:
        archive.writestr("wiki", WIKI)
    for name in ("wiki.xz", "wiki.gz", "wiki.bz2", "any.zip"):
        packed = english_corpus(tmp_path / f"of-{name}", tmp_path / name)
        assert packed.digest == manifest.digest
        assert packed.sources[0]["name"] == name


def test_books_lose_their_licence_and_other_files_are_documents(tmp_path: Path) -> None:
    story = b"It was a dark and stormy night; the rain fell in torrents, except at times.\n" * 3
    book = (
        b"Licence.\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\n"
        + story
        + b"\n*** END OF THE PROJECT\nLaw."
    )
    root = written(
        tmp_path / "in",
        {"a/x.txt": book, "y.md": story + b"And more.", "z.png": story, "bad.txt": b"\xff" * 99},
    )
    manifest = english_corpus(tmp_path / "out", root)
    assert texts(tmp_path / "out") == {"a/x.txt": story, "y.md": story + b"And more."}
    assert manifest.dropped == {"not UTF-8": 1, "not named as text": 1}


def test_a_single_long_text_is_cut_at_line_ends(tmp_path: Path) -> None:
    text = b"".join(b"line %d of a long text without any pages\n" % line for line in range(6000))
    manifest = english_corpus(tmp_path / "out", written(tmp_path, {"book.txt": text}) / "book.txt")
    pieces = texts(tmp_path / "out")
    assert b"".join(pieces.values()) == text
    assert manifest.files == len(pieces) == 4
    assert all(piece.endswith(b"\n") for piece in pieces.values())
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        for name in ("a.txt", "b.txt", ".c.txt", "../d.txt"):
            archive.writestr(name, name.encode() + text)
    english_corpus(tmp_path / "two", tmp_path / "two.zip")
    assert set(texts(tmp_path / "two")) == {"two/a.txt", "two/b.txt"}


@pytest.mark.parametrize("other", ["a.txt/b.txt", "a.txt/deep/b.txt"])
def test_a_document_named_like_a_folder_is_named(other: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "both.zip", "w") as archive:
        for name in ("a.txt", other):
            archive.writestr(name, code(name))
    with pytest.raises(CorpusError, match=f"the path of the folder that both/{other} lies in: rename one"):
        english_corpus(tmp_path / "out", tmp_path / "both.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["both.zip"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorpusError, match=r"pipe is neither a file nor a folder: write its text to a file"):
        english_corpus(tmp_path / "out", tmp_path / "pipe")


def test_what_is_missing_or_torn_says_what_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"enwik8 does not exist\. Fetch .*mattmahoney\.net/dc/enwik8\.zip"):
        english_corpus(tmp_path / "out", tmp_path / "enwik8")
    for name in ("torn.zip", "torn.xz", "torn.gz", "torn.bz2"):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(CorpusError, match=r"can't be unpacked .*: fetch it again"):
            english_corpus(tmp_path / "out", tmp_path / name)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(WIKI)[:-20])
    with pytest.raises(CorpusError, match="can't be unpacked"):
        english_corpus(tmp_path / "out", tmp_path / "cut.gz")
    assert not (tmp_path / "out").exists()


# Checking and the command -----------------------------------------------------------------------------------


def test_every_change_is_found(tmp_path: Path) -> None:
    files = {f"{name}.py": code(name) for name in "abcd"}
    out = tmp_path / "out"
    manifest = python_corpus(out, [f"x={written(tmp_path / 'src', files)}"])
    kept = tmp_path / "kept.json"
    kept.write_bytes((out / ".manifest.json").read_bytes())
    assert check(out, kept) == manifest
    (out / "x" / "a.py").write_bytes(code("other"))
    (out / "x" / "b.py").unlink()
    (out / "new.py").write_bytes(b"")
    with pytest.raises(
        CorpusError, match=r"missing: x/b\.py \(1\); not in it: new\.py \(1\); changed: x/a\.py \(1\)"
    ):
        check(out)
    with pytest.raises(CorpusError, match="give a folder that bakeoff corpus made"):
        check(tmp_path / "src")
    kept.write_text("{}")
    with pytest.raises(CorpusError, match="is no manifest of this version"):
        check(out, kept)


def test_the_command_builds_checks_and_refuses_to_overwrite(tmp_path: Path) -> None:
    src = written(tmp_path / "src", {f"{n}.py": code(f"n{n}") for n in range(60)})
    out = tmp_path / "out"
    done = cli("python", out, "--from", src, "--limit", 1)
    assert done.exit_code == 0, done.output
    assert "documents  60 of" in done.output
    assert "too little to compare models by" in done.output
    assert f"--data {out} data.whole_files=true" in done.output
    assert "60 files as in the manifest" in cli("check", out).output
    again = cli("python", out, "--from", src)
    assert again.exit_code == 1
    assert "exists: give a new folder" in again.output
    (tmp_path / "wiki").write_bytes(WIKI)
    assert cli("english", tmp_path / "english", "--from", tmp_path / "wiki").exit_code == 0
    assert "enwik8.zip" in " ".join(cli("english", "--help").output.split())
