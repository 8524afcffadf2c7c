"""The repository keeps its own promises: words, documents, commands, imports, start-up times."""

import codecs
import doctest
import importlib
import os
import pkgutil
import re
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import bakeoff
from tests.unit.forked import said_by

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(make|bakeoff)((?: +(?:'[^']*'|[\w./=:-]+))*)")


def files() -> list[Path]:
    """Every file that is or would be committed; in a plain copy, every file outside built folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found = [ROOT / name for name in listed.stdout.splitlines()]
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git, or no clone of this user's
        built = {".git", ".venv", "build", "dist", "runs", "__pycache__"}
        found = [p for p in ROOT.rglob("*") if not built & set(p.relative_to(ROOT).parts)]
        found = [p for p in found if not re.search(r"/\.\w+_cache/|/\.hypothesis/", str(p))]
    return [path for path in found if path.is_file()]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", "from bakeoff.apps.cli import main; main()", *arguments)


# Words -----------------------------------------------------------------------------------------------------

# Rotated, so that this list doesn't find itself. Each names a circumstance in which the text was made, which
# is nothing that a reader of the product can use.
UNWANTED = [
    codecs.decode(word, "rot13")
    for word in (
        r"\ontragf?\o",
        r"\ovffhrf? #?\q",
        r"\o(guvf|gur|na?|rnpu|bar|rneyvre|cerivbhf) frffvbaf?\o",
        r"(?<![\j.$~])/(jbex|ubzr|ebbg)/",
        r"\opynhqr\o|\onaguebcvp\o|\obcranv\o|\opungtcg\o|\opbcvybg\o",
        r"\ojbexcynpr\o",
        r"clcv\.bet|clgubaubfgrq|qbjaybnq\.clgbepu",
        r"\oGBQB\o|\oKKK\o|\oSVKZR\o",
    )
]


def unwanted(text: str) -> list[str]:
    return [found[0] for pattern in UNWANTED for found in re.finditer(pattern, text, re.IGNORECASE)]


def test_words() -> None:
    assert unwanted(codecs.decode("nf bar ntrag fnvq va vffhr 7, frr /jbex/znva", "rot13"))
    assert not unwanted("agenda, tissue 7, framework/x")
    found = {}
    for path in files():
        if path.name != "LICENSE" and path.suffix not in (".png", ".whl"):
            words = unwanted(path.read_text(encoding="utf-8"))
            if words:
                found[str(path.relative_to(ROOT))] = words
    assert not found


def test_files_are_found_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {path.relative_to(ROOT).parts for path in files()}
    assert ("README.md",) in found
    assert ".git" not in {parts[0] for parts in found}


def test_nothing_built_is_committed() -> None:
    built = (".pyc", ".so", ".cubin", ".whl")
    stray = [p for p in files() if p.suffix in built or p.stat().st_size > _most(p)]
    assert not stray


def _most(path: Path) -> int:
    """Bytes of a committed file; measurements have a row for each candidate of each cell."""
    return 2**22 if path.is_relative_to(ROOT / "results") else 2**20


# Documents -------------------------------------------------------------------------------------------------


def commands() -> set[tuple[str, ...]]:
    """Every make and bakeoff command in the documents: console blocks and code spans."""
    found: set[tuple[str, ...]] = set()
    for path in DOCUMENTS:
        text = path.read_text()
        blocks = re.findall(r"^```(?:console|bash)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        lines = [line.removeprefix("$ ").split("#")[0] for block in blocks for line in block.splitlines()]
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        lines += re.findall(r"`((?:make|bakeoff) [^`]+)`", prose)
        for line in lines:
            match = COMMAND.match(line.strip())
            if match:
                found.add((match[1], *match[2].split()))
    return found


def test_documented_commands_exist() -> None:
    from bakeoff.apps.cli import main
    from bakeoff.apps.train.recipes import recipe

    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    context = click.Context(main)
    wrong = []
    documented = commands()
    assert ("make", "demo") in documented
    assert any(command[0] == "bakeoff" for command in documented)
    for tool, *words in documented:
        if tool == "make":
            wrong += [word for word in words if "=" not in word and word not in targets]
            continue
        if words[:1] in (["train"], ["tune"]) and words[1:] and not words[1].startswith("-"):
            recipe(words[1])
        group: click.Command = main
        for word in words:
            if word.startswith("-") and word != "-":
                known = {option for parameter in group.params for option in parameter.opts}
                wrong += (
                    [f"bakeoff {group.name} {word}"] if word.split("=")[0] not in known | {"--help"} else []
                )
            elif isinstance(group, click.Group):
                inner = group.get_command(context, word)
                if inner is None:
                    wrong.append(f"bakeoff {word}")
                    break
                group = inner
    assert not wrong


def test_help_names_every_recipe() -> None:
    from bakeoff.apps.cli.commands.training import train
    from bakeoff.apps.train.recipes import RECIPES

    assert set(re.findall(r"[a-z]+-[a-z-]+|longnet", train.help or "")) >= set(RECIPES)


def test_every_command_explains_itself_and_is_documented() -> None:
    from bakeoff.apps.cli import main

    names = main.list_commands(click.Context(main))
    documented = {words[0] for tool, *words in commands() if tool == "bakeoff" and words}
    assert {"demo", "train", "tune", "bench", "explain", "doctor", "ops", "generate", "table"} <= set(names)
    assert set(names) - documented - {"demo"} == set()  # demo is documented as `make demo`
    for name in names:
        done = cli(name, "--help")
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) > 4, f"bakeoff {name} --help says too little"


@pytest.mark.parametrize("command", ["doctor", "ops"])
def test_cheap_commands_run(command: str) -> None:
    from bakeoff.apps.cli import main

    done = CliRunner().invoke(main, [command])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip()


def test_make_help_lists_every_target() -> None:
    done = run("make", "--no-print-directory", "help")
    assert done.returncode == 0, done.stderr
    listed = set(re.findall(r"^make ([\w-]+)", done.stdout, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert listed == set(phony[1].split()) - {"help"} | {"help"}


@pytest.mark.usefixtures("forked_workers")
def test_readme_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(example.splitlines()) <= 20
    said = said_by(example, tmp_path)
    assert "choice:" in said
    assert "source: measured now" in said, "each call runs its winner, the page says"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_map_shows_every_module() -> None:
    layers = re.search(
        r"## Layers.*?```\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL
    )
    assert layers is not None
    here = {
        path.stem for path in (ROOT / "src" / "bakeoff").iterdir() if path.is_dir() or path.suffix == ".py"
    }
    shown = set(re.findall(r"\w+", layers[1]))
    assert {name for name in here if not name.startswith("_")} - {"tables"} <= shown


def modules() -> list[str]:
    found = pkgutil.walk_packages(bakeoff.__path__, "bakeoff.")
    return sorted(
        m.name for m in found if m.name not in ("bakeoff.__main__", "bakeoff.select.contests.worker")
    )


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name: str) -> None:
    if ".kernels" in name or name.endswith((".autograd", ".launch", ".rows", ".run")):
        pytest.importorskip("triton")
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert failed == 0


# Imports and start-up --------------------------------------------------------------------------------------

WITHOUT_TRITON = """
import importlib.util, torch
assert importlib.util.find_spec("triton") is None
import bakeoff
from bakeoff.models import llm_med
x = torch.randn(4, 8)
exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
assert torch.allclose(bakeoff.ops.rms_norm(x).double(), exact, atol=1e-5)
try:
    bakeoff.ops.rms_norm(x, impl="triton")
except bakeoff.Unsupported as error:
    assert "triton is not installed" in str(error), error
else:
    raise AssertionError("ran a Triton kernel without Triton")
print("fine")
"""


def test_works_without_triton(tmp_path: Path) -> None:
    """A copy of this environment, by links, that really lacks triton."""
    for folder in dict.fromkeys(map(Path, sys.path)):
        if folder.name in ("site-packages", "dist-packages") and folder.is_dir():
            for entry in folder.iterdir():
                link = tmp_path / entry.name
                if not entry.name.startswith(("triton", "__pycache__")) and not link.exists():
                    link.symlink_to(entry)
    path = os.pathsep.join([str(ROOT / "src"), str(tmp_path)])
    done = run(sys.executable, "-S", "-c", WITHOUT_TRITON, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fine\n"


BROKEN_TRITON = """
import logging, torch
torch.cuda.is_available = lambda: True  # only there is Triton needed, and tried
import bakeoff
from bakeoff.select import find_op
(candidate,) = (c for c in find_op("rms_norm").candidates if c.name == "triton")
print(candidate.absent)
"""


def test_a_triton_that_can_not_be_imported_is_as_none(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('libfoo.so: cannot open')")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = run(sys.executable, "-c", BROKEN_TRITON, PYTHONPATH=path)
    assert done.stdout == "triton can't be imported (ImportError: libfoo.so: cannot open)\n", done.stderr


def test_dir_has_all_that_can_be_reached() -> None:
    assert {"nn", "optim", "graphs", "models", "tune"} <= set(dir(bakeoff))
    assert all(hasattr(bakeoff, name) for name in dir(bakeoff))


def test_import_adds_little_to_torch() -> None:
    """In seconds of CPU time, which other work on the machine doesn't add to."""
    code = "import torch, time; t = time.process_time(); import bakeoff; bakeoff.using; bakeoff.ops; {}"
    seconds: list[float] = []
    while not any(s < 0.5 for s in seconds):
        assert len(seconds) < 5, seconds
        seconds.append(float(run(sys.executable, "-c", code.format("print(time.process_time() - t)")).stdout))


def test_help_is_immediate() -> None:
    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    seconds: list[float] = []
    while not any(s < 0.3 for s in seconds):
        assert len(seconds) < 5, seconds
        before = spent()
        done = cli("--help")
        seconds.append(spent() - before)
        assert done.returncode == 0, done.stderr
