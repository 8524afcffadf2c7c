"""Configurations: files, overrides, round trips, and errors that name the fix."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakeoff.apps.train.config import (
    Config,
    ConfigError,
    Data,
    Metrics,
    Optim,
    Select,
    Train,
    from_saved,
    from_tree,
    resolve,
    to_toml,
    to_tree,
)
from bakeoff.apps.train.recipes import RECIPES, recipe
from bakeoff.models import byte_spectral, llm_med


def test_later_layers_win(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[train]\nsteps = 7\nbatch_size = 4\n[model]\nd_model = 64\n[select]\nrms_norm = "triton"\n'
    )
    config = resolve(recipe("llm-med"), file, ["train.steps=9", "select.rotary=eager"])
    assert (config.train.steps, config.train.batch_size) == (9, 4)
    assert (config.model.d_model, config.model.layers) == (64, 6)
    assert config.select.ops == {"rms_norm": "triton", "rotary": "eager"}
    assert config.optim == recipe("llm-med").optim


def test_overrides_are_read_by_the_type_of_their_key() -> None:
    config = resolve(
        Config(),
        None,
        [
            "data.path=123",
            "optim.lr=3e-4",
            "optim.clip=2",
            "model.tie=false",
            "train.run_dir=a b = c",
            'recipe="q\\"x"',
            "train.steps = 1_000",
        ],
    )
    assert config.data.path == "123"
    assert (config.optim.lr, config.optim.clip, config.model.tie) == (3e-4, 2.0, False)
    assert (config.train.run_dir, config.recipe, config.train.steps) == ("a b = c", 'q"x', 1000)


@pytest.mark.parametrize(("text", "number"), [(".1", 0.1), ("1.", 1.0), ("1e3", 1000.0), ("+1.e-3", 0.001)])
def test_floats_are_read_as_python_writes_them(text: str, number: float) -> None:
    assert resolve(Config(), None, [f"train.max_seconds={text}"]).train.max_seconds == number
    assert resolve(recipe("llm-med"), None, [f"model.logit_cap={text}"]).model == msgspec.structs.replace(
        recipe("llm-med").model, logit_cap=number
    )


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_resolve_and_round_trip(name: str, tmp_path: Path) -> None:
    config = recipe(name)
    assert config.recipe == name
    file = tmp_path / "printed.toml"
    file.write_text(to_toml(config))
    assert resolve(Config(), file) == config


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    path=texts,
    folder=texts,
    lr=st.floats(1e-300, 1e300),
    seed=st.integers(0, 2**62),
    tie=st.booleans(),
    forced=st.dictionaries(st.sampled_from(["rms_norm", "rotary"]), texts),
)
def test_printed_toml_reads_back_equal(
    path: str,
    folder: str,
    lr: float,
    seed: int,
    tie: bool,
    forced: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    config = Config(
        model=llm_med.Config(tie=tie),
        data=Data(path=path),
        optim=Optim(lr=lr),
        train=Train(seed=seed, run_dir=folder),
        select=Select(ops=forced),
        metrics=Metrics(wandb_project=folder),
    )
    file = tmp_path_factory.mktemp("toml") / "run.toml"
    file.write_bytes(to_toml(config).encode())
    assert resolve(Config(), file) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepps=1", "unknown key 'train.stepps'; did you mean train.steps?"),
        ("stepps=1", "unknown key 'stepps'; did you mean train.steps?"),
        ("d_model=3", "did you mean model.d_model?"),
        ("select.rms_nrom=eager", "did you mean select.rms_norm?"),
        ("select.ops=eager", "unknown key 'select.ops'"),
        ("qqq.zzz=1", "a configuration has recipe, model, data, optim, train, parallel, select, metrics"),
        ("train.zzzzz=1", "[train] has steps, max_seconds"),
        ("train.steps.x=1", "unknown key 'train.steps.x'"),
        ("train=3", "train is a table of keys: set one of them, such as train.steps=..."),
        ("train.steps", "has no '=': write KEY=VALUE"),
        ("train.steps=abc", "train.steps: expected int, got 'abc'"),
        ("train.steps=1.5", "train.steps: expected int, got 1.5"),
        ("train.steps=-1", "train.steps: expected int >= 0, got -1"),
        ("train.steps=1\nx = 2", "train.steps: expected int"),
        ("metrics.wandb=yes", "metrics.wandb: expected bool, got 'yes'"),
        ("model.dropout=true", "model.dropout: expected float, got True"),
        ("optim.lr=nan", "optim.lr: expected float > 0.0, got nan"),
        ("optim.lr=inf", "optim: lr=inf must be a finite number"),
        ("optim.clip=nan", "optim.clip: expected float >= 0.0, got nan"),
        ("train.max_seconds=inf", "train: max_seconds=inf must be a finite number"),
        ("optim.lr=Infinity", "optim: lr=inf must be a finite number"),
        ("model.dropout=.1.", "model.dropout: expected float, got '.1.'"),
        ("train.steps=1e3", "train.steps: expected int, got 1000.0"),
        ("train.seed=9223372036854775808", "train.seed: expected int <= 9223372036854775807, got 9223372036"),
        ("train.seed=99999999999999999999999", "train.seed: expected int <= 9223372036854775807, got 99999"),
        ("train.precision=fp8", "train.precision: expected one of auto, float32, bf16, got 'fp8'"),
        ("model.kind=foo", "model.kind: 'foo' is not a model; there are llm-med, byte-spectral"),
        ("model.d_model=100", "model: d_model=100 must be a multiple of 2*heads=16"),
        ("train.steps=0", "train.steps and train.max_seconds are both 0"),
        ("train.seq_len=1", "rows of 1 byte are too short: make train.seq_len, or model.max_seq_len"),
        ("train.seq_len=4096", "train.seq_len=4096 is longer than model.max_seq_len=1024"),
        ("train.accumulate=5", "can't be cut into train.accumulate=5 equal parts"),
        ("model.vocab=100", "it needs 256"),
        ("data.path=caf\udce9", "data.path='caf\\udce9' is not UTF-8: rename it, or give the folder"),
        ("train.run_dir=caf\udce9", "train.run_dir='caf\\udce9' is not UTF-8: rename it"),
    ],
)
def test_wrong_overrides_name_the_key_and_the_fix(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Config(), None, [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]\nsteps = 1\n", "unknown key 'trian'; did you mean train?"),
        ("[train]\nstep = 1\n", "unknown key 'train.step'; did you mean train.steps?"),
        ("train = 3\n", "train is a table of keys, got 3: write [train]"),
        ('[train]\nsteps = "many"\n', "train.steps: expected int, got 'many'"),
        ("[select]\nrms_norm = 3\n", "select.rms_norm: expected str, got 3"),
        ("[train\n", "is not TOML"),
    ],
)
def test_wrong_files_name_the_key_and_the_fix(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(Config(), file)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"train": {"step": 1}}, "unknown key 'train.step'; did you mean train.steps?"),
        ({"model": {"layers": 2}}, "model.kind is missing; there are llm-med, byte-spectral"),
        ({"model": {"kind": 5}}, "model.kind: 5 is not a model; there are llm-med, byte-spectral"),
        ({"model": 3}, "model is a table of keys, got 3"),
        ({"recipe": 3}, "recipe: expected str, got 3"),
        ({"optim": {"lr": 10**400}}, "optim.lr: expected float up to 1.8e+308, got 1000"),
        ({"data": {"holdout": 1}}, "data.holdout: expected float < 1.0, got 1"),
        ({"select": {"tuned": "eager"}}, "unknown key 'select.tuned'; did you mean select.tune?"),
    ],
)
def test_wrong_values_of_any_origin_name_the_key(tree: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_tree(tree)
    assert message in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nsteps = 7\n", "utf-8-sig")
    assert resolve(Config(), tmp_path / "run.toml").train.steps == 7


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"[data]\npath = '\xff'\n")
    for name in ("missing.toml", "latin.toml", "."):
        with pytest.raises(ConfigError, match="can't read the configuration"):
            resolve(Config(), tmp_path / name)


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no recipe 'llmmed-tiny'; did you mean 'llm-med-tiny'\?"):
        recipe("llmmed-tiny")
    with pytest.raises(ConfigError, match="no recipe 'zzz'; there are llm-med, llm-med-tiny"):
        recipe("zzz")


# several models --------------------------------------------------------------------------------------------


def test_another_kind_of_model_starts_from_its_own_defaults(tmp_path: Path) -> None:
    base = recipe("llm-med-tiny")
    chosen = resolve(base, None, ["model.kind=byte-spectral", "model.filter=taps", "model.layers=3"])
    assert chosen.model == byte_spectral.Config(filter="taps", layers=3)
    assert chosen.train == base.train
    later = resolve(base, None, ["model.filter=taps", "model.layers=3", "model.kind=byte-spectral"])
    assert later.model == chosen.model, "a kind clears the other kind's keys, not those given beside it"
    file = tmp_path / "other.toml"
    file.write_text('[model]\nkind = "byte-spectral"\npoles = 4\n')
    assert resolve(base, file).model == byte_spectral.Config(poles=4)
    kept = resolve(recipe("byte-spectral"), None, ["model.kind=byte-spectral", "model.poles=4"])
    assert kept.model == msgspec.structs.replace(recipe("byte-spectral").model, poles=4)


def test_a_configuration_of_either_model_is_read_back(tmp_path: Path) -> None:
    for name in ("llm-med", "byte-spectral-tiny"):
        file = tmp_path / f"{name}.toml"
        file.write_text(to_toml(recipe(name)))
        assert resolve(Config(), file) == recipe(name)
        assert from_saved(to_tree(recipe(name))) == (recipe(name), [])


def test_a_key_of_the_other_model_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'model.poles'"):
        resolve(recipe("llm-med"), None, ["model.poles=4"])
    with pytest.raises(ConfigError, match=r"unknown key 'model.kv_heads': the kind of model that is set"):
        resolve(recipe("byte-spectral"), None, ["model.kv_heads=4"])
    with pytest.raises(
        ConfigError, match=r"model\.filter: expected one of poles, taps, minimum_phase, got 'x'"
    ):
        resolve(recipe("byte-spectral"), None, ["model.filter=x"])
