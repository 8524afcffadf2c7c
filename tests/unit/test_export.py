"""`bakeoff export`: a program that runs where there is no bakeoff and gives the model's logits."""

import re
import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from bakeoff.apps import export as module
from bakeoff.apps.cli import main
from bakeoff.apps.export import Exported, ExportError, export
from bakeoff.apps.train import checkpoint, load_run
from bakeoff.apps.train.checkpoint import State
from bakeoff.apps.train.config import Config
from bakeoff.models import build, byte_spectral, llm_med, longnet, titan_mac
from bakeoff.select import using

MODELS: dict[str, Any] = {
    "llm-med": llm_med.Config(
        d_model=16, layers=1, heads=2, max_seq_len=16, qk_norm=True, conv=4, ngrams=3, ngram_bits=6
    ),
    "byte-spectral": byte_spectral.Config(
        d_model=16, layers=1, max_seq_len=16, channels=2, features="complex", ngrams=3, ngram_bits=6
    ),
    "titan-mac": titan_mac.Config(
        d_model=16, layers=1, heads=2, segment=8, chunk=8, persistent=2, max_seq_len=16
    ),
    "longnet": longnet.Config(d_model=16, layers=1, heads=2, max_seq_len=16, segments=(8, 16), rates=(1, 2)),
}

# Loads programs, and the ids that the test left, where nothing called bakeoff can be imported.
STRANGER = """
    import sys
    sys.modules["bakeoff"] = None
    import torch
    from pathlib import Path
    for folder in map(Path, sys.argv[1:]):
        program = torch.export.load(folder / "program.pt2").module()
        ids = torch.load(folder / "ids.pt")
        torch.save([program(each).detach() for each in ids], folder / "logits.pt")
    assert not any(name.startswith("bakeoff.") for name in sys.modules)
"""


def saved(config: Any, run_dir: Path) -> Path:
    """A run that ended at once, with weights that are not those of a start."""
    torch.manual_seed(1)
    model = build(config)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    run_dir.mkdir()
    checkpoint.save(run_dir, Config(model=config), State({"step": 1}, weights, {}, {}), keep=1)
    return run_dir


@pytest.mark.parametrize(
    "kinds",
    [("llm-med", "byte-spectral"), pytest.param(("titan-mac", "longnet"), marks=pytest.mark.exhaustive)],
)
def test_programs_give_the_models_logits_without_bakeoff(kinds: tuple[str, ...], tmp_path: Path) -> None:
    for kind in kinds:
        run_dir, out = saved(MODELS[kind], tmp_path / f"{kind}-run"), tmp_path / kind
        done = CliRunner().invoke(main, ["export", str(run_dir), "--out", str(out)])
        assert done.exit_code == 0, done.output
        rows = 1 if kind == "longnet" else 3
        assert f"ids [{'1' if rows == 1 else 'batch'}, length up to 16] int64" in done.stdout
        torch.save([torch.randint(256, (rows, length)) for length in (16, 9, 2)], out / "ids.pt")
    stranger = [sys.executable, "-c", textwrap.dedent(STRANGER), *kinds]
    ran = subprocess.run(stranger, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    for kind in kinds:
        out = tmp_path / kind
        model, _ = load_run(tmp_path / f"{kind}-run")
        for ids, found in zip(torch.load(out / "ids.pt"), torch.load(out / "logits.pt"), strict=True):
            with using("off"), torch.no_grad():
                expected = model(ids)[0]
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        weights = load_file(out / "model.safetensors")
        assert set(weights) == set(model.state_dict())
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("config", "takes"),
    [
        (llm_med.Config(d_model=16, layers=1, heads=2, max_seq_len=2), "[batch, 2]"),
        (byte_spectral.Config(d_model=16, layers=1, max_seq_len=2), "[batch, length up to 2]"),
    ],
)
def test_a_model_of_the_shortest_rows_is_exported(config: Any, takes: str, tmp_path: Path) -> None:
    assert takes in export(saved(config, tmp_path / "run"), tmp_path / "out").takes


def test_a_program_with_other_logits_is_no_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(module._Logits):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) + 1.0

    monkeypatch.setattr(module, "_Logits", Off)
    run_dir = saved(MODELS["llm-med"], tmp_path / "run")
    with pytest.raises(ExportError, match=r"logits differ by 1.0e\+00 at rows of"):
        export(run_dir, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_can_not_be_exported_is_said_first(tmp_path: Path) -> None:
    run_dir = saved(MODELS["llm-med"], tmp_path / "run")
    with pytest.raises(ExportError, match="run is not empty: give another --out"):
        export(run_dir, run_dir)
    with pytest.raises(ExportError, match=r"can't write to .*step.*config.toml/x \(Not a directory\)"):
        export(run_dir, run_dir / "checkpoints" / "step-00000001" / "config.toml" / "x")
    done = CliRunner().invoke(main, ["export", str(tmp_path / "none")])
    assert done.exit_code == 1
    assert "none holds no checkpoint" in done.stderr


def test_what_lies_in_the_folder_stays(tmp_path: Path) -> None:
    run_dir, out = saved(MODELS["llm-med"], tmp_path / "run"), tmp_path / "out"
    export(run_dir, out)
    (run_dir / "config.toml").write_text("of the run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for folder in (out, run_dir):
        with pytest.raises(ExportError, match="is not empty: give another --out"):
            export(run_dir, folder)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("room", [1_000, 30_000])  # for less than the weights; for these, but not the program
def test_a_full_disk_is_named_and_no_half_stays(room: int, tmp_path: Path) -> None:
    run_dir = saved(MODELS["llm-med"], tmp_path / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(ExportError, match=r"can't write to .*out \(File too large\): give another --out"):
            export(run_dir, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "out").iterdir()) == []


KINDS: list[Any] = [
    llm_med.Config(
        d_model=16, layers=1, heads=2, max_seq_len=16, tie=False, qk_norm=True, conv=4, ngrams=2, ngram_bits=6
    ),
    longnet.Config(d_model=16, layers=1, heads=2, max_seq_len=16, segments=(8, 16), rates=(1, 2)),
    *(byte_spectral.Config(d_model=16, layers=1, filter=name) for name in ("poles", "taps", "minimum_phase")),
    byte_spectral.Config(d_model=16, layers=2, attention_every=2, qk_norm=True),
    *(
        titan_mac.Config(d_model=16, layers=1, heads=2, segment=8, chunk=8, variant=name)
        for name in ("mac", "mag", "lmm")
    ),
    titan_mac.Config(d_model=16, layers=1, heads=2, segment=8, chunk=8, per_token=False),
]


def written() -> dict[str, list[str]]:
    """What the page says: each name's shapes."""
    page = Path("docs/training.md").read_text().partition("### Names in model.safetensors")[2]
    shapes: dict[str, list[str]] = {}
    for line in page.splitlines():
        if line.startswith("| `"):
            names, said = line.split("|")[1:3]
            pairs = zip(re.findall(r"`([^`]+)`", names), re.findall(r"\[([^]]+)\]", said), strict=True)
            for name, shape in pairs:
                shapes.setdefault(name, []).append(shape)
    return shapes


def sizes(config: Any) -> dict[str, int]:
    """What the page's letters stand for."""
    letters = {"C": "d_model", "F": "ff_dim", "H": "heads", "E": "head_dim", "kv_heads": "n_kv_heads"}
    letters |= {"L": "n_taps", "P": "poles", "W": "window", "K": "bins", "features": "spectral_dim"}
    letters |= {"X": "expansion", **{name: name for name in ("conv", "ngram_bits", "persistent", "channels")}}
    return {letter: getattr(config, name) for letter, name in letters.items() if hasattr(config, name)}


def computed(shape: str, known: dict[str, int]) -> tuple[int, ...]:
    """A shape such as "2 F, 2^`conv`" as numbers."""
    product = re.sub(r"(?<=[\w)]) (?=[\w(])", "*", shape.replace("`", "").replace("^", "**"))
    return tuple(eval(f"({product},)", {}, known))


def test_the_page_of_names_holds_every_name_and_no_other_and_their_shapes() -> None:
    page, found = written(), set()
    for config in KINDS:
        for own, weight in build(config).state_dict().items():
            name = re.sub(r"^blocks\.\d+", "blocks.N", own)
            found.add(name)
            assert tuple(weight.shape) in [computed(shape, sizes(config)) for shape in page[name]], own
    assert found == set(page)


def test_what_a_program_takes_is_said() -> None:
    assert Exported(Path(), 64, any_length=True, any_batch=True).takes == "ids [batch, length up to 64] int64"
    assert Exported(Path(), 64, any_length=False, any_batch=False).takes == "ids [1, 64] int64"
