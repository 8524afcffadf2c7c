"""What the first version of bakeoff saved is still read, and means the same."""

import json
import logging
import tomllib
import zlib
from pathlib import Path

import pytest
import torch

from bakeoff.apps.train import load_run, resolve
from bakeoff.apps.train.checkpoint import State, save, steps
from bakeoff.apps.train.config import Config, Data, Metrics, Optim, Train, from_saved, to_tree
from bakeoff.models.llm_med import Config as ModelConfig
from bakeoff.models.llm_med import LLMMed

# Every key as the first trainer wrote it; saved runs hold it, so no line here may ever change.
FIRST = """
recipe = "llm-med-tiny"

[model]
kind = "llm-med"
vocab = 256
d_model = 32
layers = 2
heads = 4
kv_heads = 2
d_ff = 0
max_seq_len = 64
rope_base = 10000.0
norm_eps = 1e-06
dropout = 0.0
logit_cap = 0.0
tie = true

[data]
path = "stdlib"
holdout = 0.04

[optim]
lr = 0.002
min_lr = 0.2
warmup = 0.05
beta1 = 0.8
beta2 = 0.9
eps = 1e-07
weight_decay = 0.2
clip = 0.5

[train]
steps = 7
max_seconds = 60.0
batch_size = 8
seq_len = 32
accumulate = 2
seed = 3
device = "cpu"
precision = "float32"
log_every = 50
eval_every = 9
eval_rows = 48
checkpoint_every = 5
keep = 3
run_dir = "runs/first"
resume = "auto"

[select]
policy = "heuristic"
tune = false
budget_s = 20.0
rms_norm = "eager"

[metrics]
tensorboard = true
wandb = true
wandb_project = "mine"
console = false
"""


def test_the_first_version_s_configuration_is_read_key_by_key() -> None:
    config, notes = from_saved(tomllib.loads(FIRST))
    assert config.recipe == "llm-med-tiny"
    assert config.model == ModelConfig(d_model=32, layers=2, heads=4, kv_heads=2, max_seq_len=64)
    assert config.data == Data(holdout=0.04)
    assert config.optim == Optim(
        lr=0.002, min_lr=0.2, warmup=0.05, beta1=0.8, beta2=0.9, eps=1e-7, weight_decay=0.2, clip=0.5
    )
    assert config.train == Train(
        steps=7, max_seconds=60.0, batch_size=8, seq_len=32, accumulate=2, seed=3, device="cpu",
        precision="float32", log_every=50, eval_every=9, eval_rows=48, checkpoint_every=5, keep=3,
        run_dir="runs/first",
    )  # fmt: skip
    assert (config.select.policy, config.select.tune, config.select.budget_s) == ("heuristic", False, 20.0)
    assert config.select.ops == {"rms_norm": "eager"}
    assert config.metrics == Metrics(tensorboard=True, wandb=True, wandb_project="mine", console=False)
    given, now = tomllib.loads(FIRST), to_tree(config)
    for section, keys in given.items():
        for key, value in keys.items() if isinstance(keys, dict) else ():
            assert now[section][key] == value, f"{section}.{key}"
    assert notes
    assert all(note.startswith("missing ") for note in notes), notes  # nothing it said is lost


def test_as_a_file_it_still_starts_a_run(tmp_path: Path) -> None:
    (tmp_path / "first.toml").write_text(FIRST)
    assert resolve(Config(), tmp_path / "first.toml") == from_saved(tomllib.loads(FIRST))[0]


def test_a_checkpoint_with_it_opens_and_its_defaults_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, _ = from_saved(tomllib.loads(FIRST))
    weights = LLMMed(config.model).state_dict()
    save(tmp_path, config, State({"step": 1}, weights, {}, {"few": torch.ones(2)}), keep=1)
    (folder,) = steps(tmp_path)
    (folder / "config.toml").write_text(FIRST)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["config.toml"] = {"bytes": len(FIRST), "crc32": zlib.crc32(FIRST.encode())}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with caplog.at_level(logging.WARNING, logger="bakeoff"):
        model, found = load_run(tmp_path)
    assert found == config
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert "missing train.capture is" in caplog.text


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ({"rotary": "eager"}, {"rotary": "eager", "qkv_rotary": "eager"}),
        ({"rotary": "triton", "qkv_rotary": "eager"}, {"rotary": "triton", "qkv_rotary": "eager"}),
        ({"rotary": "liger"}, {"rotary": "liger"}),  # no candidate of qkv_rotary
        ({"rms_norm": "eager"}, {"rms_norm": "eager"}),
    ],
)
def test_what_was_said_of_rotary_goes_for_qkv_rotary(said: dict[str, str], taken: dict[str, str]) -> None:
    """Models rotated by the one before they did by the other; the configuration stays as it is written."""
    config, _ = from_saved({"select": said})
    assert config.select.ops == said
    assert config.select.forced() == taken
