"""LLM-Med: shapes, positions, causality, the cache, sampling, and what it refuses."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import bakeoff
from bakeoff import models
from bakeoff.models.generation import sample
from bakeoff.models.llm_med import SIZES, Cache, Config, LLMMed
from bakeoff.models.ngrams import NGrams, _in_halves, with_ngrams
from bakeoff.ops.rotary import rotary
from tests.unit.compiler import needs_compiler
from tests.unit.language_models import check_blind_guess, check_loss, moved

SMALL = {"d_model": 32, "layers": 2, "heads": 4, "max_seq_len": 24}
RUNGS = {"qk_norm": True, "conv": 4, "ngrams": 4, "ngram_bits": 8}
SHAPES: dict[str, dict[str, object]] = {
    "plain": {},
    "shared keys": {"kv_heads": 2},
    "one key head": {"kv_heads": 1},
    "own head": {"tie": False},
    "capped": {"logit_cap": 5.0},
    "normed": {"qk_norm": True, "kv_heads": 2},
    "every rung": {**RUNGS, "logit_cap": 5.0},
}


def perturbed(dtype: torch.dtype = torch.float64, **changes: object) -> LLMMed:
    """A small model whose weights are far from their start."""
    torch.manual_seed(0)
    return moved(LLMMed(Config(**{**SMALL, **changes})), dtype)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_shapes_and_loss(changes: dict[str, object]) -> None:
    model = perturbed(torch.float32, **changes)
    ids = torch.randint(256, (3, 11))
    loss = check_loss(model, ids)
    again, same = model(ids, ids.roll(-1, 1), return_logits=True)
    torch.testing.assert_close(again, model(ids)[0], rtol=0, atol=0)
    assert same == loss


def test_untrained_loss_is_that_of_a_blind_guess() -> None:
    check_blind_guess(LLMMed(Config.sizes("tiny")))


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_the_past_can_not_see_the_future(changes: dict[str, object]) -> None:
    model = perturbed(torch.float32, **changes)
    ids = torch.randint(256, (2, 20))
    before, _ = model(ids)
    for cut in (1, 7, 19):
        edited = ids.clone()
        edited[:, cut:] = (edited[:, cut:] + 1 + torch.arange(20 - cut)) % 256
        after, _ = model(edited)
        assert torch.equal(after[:, :cut], before[:, :cut])
        assert not torch.equal(after[:, cut:], before[:, cut:])


def test_positions_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Permuting the past changes the last logit. One layer: in two, the causal mask alone tells order."""
    model = perturbed(layers=1)
    ids = torch.randint(256, (1, 12))
    order = torch.cat([torch.randperm(11).roll(1), torch.tensor([11])])
    assert not torch.equal(order[:-1], torch.arange(11))

    def change() -> float:
        return (model(ids)[0][:, -1] - model(ids[:, order])[0][:, -1]).abs().max().item()

    assert change() > 1e-3

    def by_head(
        qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = qkv.tensor_split((qkv.shape[2] - 2 * kv_heads, qkv.shape[2] - kv_heads), dim=2)
        turned = rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return turned[0].transpose(1, 2), turned[1].transpose(1, 2), v

    monkeypatch.setattr("bakeoff.nn.attention.qkv_rotary", by_head)
    assert change() < 1e-12


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("pieces", [[24], [1] * 24, [7, 5, 1, 1, 10], [1, 23]])
def test_decoding_in_pieces_equals_one_pass(changes: dict[str, object], pieces: list[int]) -> None:
    model = perturbed(**changes)
    ids = torch.randint(256, (2, 24))
    cache = Cache(model.config)
    parts = [model.decode(piece, cache) for piece in ids.split(pieces, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids)[0], rtol=0, atol=1e-12)
    assert cache.length == 24
    with pytest.raises(ValueError, match="max_seq_len=24"):
        model.decode(ids[:, :1], cache)


def test_the_leak_guard_lets_every_rung_pass_with_any_parameters() -> None:
    bakeoff.assert_causal(perturbed(torch.float32, **SHAPES["every rung"]), length=20)


def test_rungs_begin_as_the_model_without_them() -> None:
    """But for normalised queries and keys: convolutions are the identity, n-grams add nothing."""
    models = [LLMMed(Config(**SMALL)), LLMMed(Config(**SMALL, conv=4, ngrams=3))]  # type: ignore[arg-type]
    missing = models[1].load_state_dict(models[0].state_dict(), strict=False)
    assert {name.split(".")[-1] for name in missing.missing_keys} == {"short", "weight"}
    assert missing.unexpected_keys == []
    ids = torch.randint(256, (2, 9))
    torch.testing.assert_close(models[1](ids)[0], models[0](ids)[0])


def test_the_size_of_queries_and_keys_does_not_matter_once_they_are_normalised() -> None:
    model = perturbed(qk_norm=True, norm_eps=0.0)
    ids = torch.randint(256, (2, 12))
    before = model(ids)[0]
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight[:64] *= 7.0  # queries and keys, four heads of eight each
    torch.testing.assert_close(model(ids)[0], before)
    with torch.no_grad():
        model.blocks[0].attention.norm.q.mul_(2.0)
    assert not torch.allclose(model(ids)[0], before)


def test_n_grams_are_told_apart_by_their_symbols_alone() -> None:
    """Equal n-grams have one row wherever they stand, others almost always others, of every length."""
    ngrams = NGrams(3, 20, 32)
    text = torch.tensor([list(b"abcab?abc"), list(b"bac.cabac")])
    rows = ngrams.rows(F.pad(text + 1, (2, 0)), 9)
    for n, found in zip((2, 3), rows, strict=True):
        seen: dict[bytes, int] = {}
        for row, places in zip(text.tolist(), found.tolist(), strict=True):
            padded = [256] * (n - 1) + row
            for t, place in enumerate(places):
                key = bytes(str(padded[t : t + n]), "ascii")
                assert seen.setdefault(key, place) == place
        assert len(set(seen.values())) == len(seen)
        assert min(seen.values()) >= 0
        assert max(seen.values()) < 2**20
    every = torch.cartesian_prod(*[torch.arange(256)] * 2)
    filled = NGrams(2, 12, 32).rows(every + 1, 1)[0]
    filled = filled.flatten().bincount(minlength=2**12)
    assert filled.min() > 0
    assert filled.max() < 64, "65,536 bigrams fill 4,096 rows about evenly, 16 each"


def test_generate_follows_the_likeliest_symbols_of_the_full_pass() -> None:
    model = perturbed()
    prompt = torch.randint(256, (2, 5), dtype=torch.uint8)
    text = model.generate(prompt, 10, temperature=0.0)
    assert text.shape == (2, 15)
    assert torch.equal(text[:, :5], prompt.long())
    logits, _ = model(text[:, :-1])
    assert torch.equal(logits[:, 4:].argmax(-1), text[:, 5:])


@pytest.mark.parametrize("changes", [{}, SHAPES["every rung"]])
def test_generate_past_the_window_reads_the_last_half(changes: dict[str, object]) -> None:
    model = perturbed(**changes)
    text = model.generate(torch.randint(256, (1, 20)), 40, temperature=0.0)
    assert text.shape == (1, 60)
    # Symbol 24 is drawn from a full window; the next from the last 12, which grow to 24 again, and so on.
    for start, end in ((0, 24), (13, 25), (13, 30), (13, 37), (26, 38), (26, 50)):
        expected = model(text[:, start:end])[0][:, -1].argmax(-1)
        assert torch.equal(text[:, end], expected)
    long = model.generate(torch.randint(256, (1, 50)), 3, temperature=0.0)
    assert torch.equal(long[:, 50], model(long[:, 26:50])[0][:, -1].argmax(-1))


def test_streaming_is_repeatable_and_leaves_the_model_alone() -> None:
    model = perturbed(torch.float32, dropout=0.5).train()
    prompt = torch.randint(256, (2, 3))
    whole = model.generate(prompt, 6, seed=7)
    pieces = list(model.stream(prompt, 6, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(whole[:, 3:], torch.stack(pieces, 1))
    assert not torch.equal(whole, model.generate(prompt, 6, seed=8))
    assert model.training
    assert model.generate(prompt, 0).shape == (2, 3)
    next(model.stream(prompt, 2))
    assert torch.is_grad_enabled()


def test_dropout_acts_in_training_alone() -> None:
    model = perturbed(torch.float32, dropout=0.5)
    ids = torch.randint(256, (2, 8))
    assert not torch.equal(model.train()(ids)[0], model(ids)[0])
    assert torch.equal(model.eval()(ids)[0], model(ids)[0])


def test_sampling_keeps_only_what_it_is_told_to() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(4000, 1)
    generator = torch.Generator().manual_seed(0)
    assert sample(logits, 0.0).unique().tolist() == [0]
    assert sample(logits, 1.0, 2, generator=generator).unique().tolist() == [0, 1]
    # Probabilities are 0.64, 0.24, 0.09, 0.03: the first two reach 0.8, the first alone 0.5.
    assert sample(logits, 1.0, 0, 0.8, generator).unique().tolist() == [0, 1]
    assert sample(logits, 1.0, 0, 0.5, generator).unique().tolist() == [0]
    drawn = sample(logits, 1.0, generator=generator)
    shares = torch.bincount(drawn, minlength=4) / 4000
    torch.testing.assert_close(shares, logits[0].softmax(-1), rtol=0, atol=0.03)
    hot = torch.bincount(sample(logits, 100.0, generator=generator), minlength=4) / 4000
    assert hot.min() > 0.2


def test_sampling_keeps_one_of_equals_and_never_none() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0]]).repeat(100, 1)
    assert sample(logits, 1.0, 1).unique().numel() == 1
    assert sample(logits, 1.0, 2).unique().numel() == 2
    assert sample(logits, 1.0, 0, 1e-300).unique().numel() == 1


def test_state_dict_round_trip_and_tied_head() -> None:
    model, other = perturbed(torch.float32), LLMMed(Config(**SMALL))
    assert "head.weight" not in model.state_dict()
    assert not any(name in ("cos", "sin") for name in model.state_dict())
    other.load_state_dict(model.state_dict())
    ids = torch.randint(256, (1, 9))
    assert torch.equal(other(ids)[0], model(ids)[0])
    untied = perturbed(torch.float32, tie=False)
    assert "head.weight" in untied.state_dict()


@pytest.mark.parametrize("changes", [{"kv_heads": 2, "tie": False}, SHAPES["every rung"]])
@pytest.mark.parametrize("fresh", [False, True])
def test_every_parameter_learns(changes: dict[str, object], fresh: bool) -> None:
    """Also of a model that no step has changed, where what rungs add does nothing yet."""
    model = LLMMed(Config(**{**SMALL, **changes})) if fresh else perturbed(**changes)  # type: ignore[arg-type]
    ids = torch.randint(256, (2, 12))
    model(ids, ids.roll(-1, 1))[1].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("changes", [{}, SHAPES["every rung"]])
def test_bf16_autocast_is_near_float32(changes: dict[str, object]) -> None:
    model = perturbed(torch.float32, **changes)
    ids = torch.randint(256, (2, 16))
    exact = model(ids, ids.roll(-1, 1))[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, loss = model(ids, ids.roll(-1, 1))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0.0)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_products_in_halves_are_products_modulo_2_to_the_64() -> None:
    ends = [0, 1, -1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**63 - 1, -(2**63)]
    keys = torch.cat([torch.tensor(ends), torch.randint(-(2**63), 2**63 - 1, (999,))])
    plus = torch.randint(2**32, keys.shape)
    odd = 0x9E3779B97F4A7C15
    wrapped = [
        ((key * odd + more + 2**63) % 2**64) - 2**63
        for key, more in zip(keys.tolist(), plus.tolist(), strict=True)
    ]
    assert _in_halves(keys, plus).tolist() == wrapped


@needs_compiler
def test_compiled_code_finds_the_same_ngrams() -> None:
    """That the bytes are also looked up in `embed` tells the compiler how small they are."""
    model = perturbed(torch.float32, layers=1, ngrams=3, ngram_bits=4)
    ids = torch.randint(256, (2, 24))
    torch.compiler.reset()

    def embedded(ids: torch.Tensor) -> torch.Tensor:
        return with_ngrams(model.embed(ids), model.ngrams, ids, None)

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(embedded)(ids), embedded(ids))


@pytest.mark.parametrize("changes", [pytest.param({}, marks=pytest.mark.exhaustive), SHAPES["every rung"]])
def test_compiles_as_one_graph(changes: dict[str, object]) -> None:
    """Traced and differentiated by torch.compile, with no code generator, which the CPU may lack."""
    model = perturbed(torch.float32, **{**changes, "layers": 1})
    ids = torch.randint(256, (2, 16))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(ids, ids.roll(-1, 1))[1]
    loss.backward()
    torch.testing.assert_close(loss, model(ids, ids.roll(-1, 1))[1])
    assert model.embed.weight.grad is not None
    shorter = torch.randint(256, (2, 9))
    torch.testing.assert_close(compiled(shorter)[0], model(shorter)[0])


def test_flops_of_a_hand_counted_model() -> None:
    model = LLMMed(Config(d_model=8, layers=1, heads=2, kv_heads=1, d_ff=16, max_seq_len=4))
    weights = 8 * (2 + 1 + 1) * 4 + 8 * 8 + 8 * 32 + 16 * 8 + 256 * 8
    assert model.flops_per_token(4) == 6 * weights + 6 * 8 * 4
    rungs = LLMMed(Config(**RUNGS, d_model=8, layers=1, heads=2, kv_heads=1, d_ff=16, max_seq_len=4))  # type: ignore[arg-type]
    assert rungs.flops_per_token(4) == 6 * (weights + 8 * 4) + 6 * 8 * 4
    added = sum(p.numel() for p in rungs.parameters()) - sum(p.numel() for p in model.parameters())
    assert added == 2 * 4 + 8 * 4 + 3 * 2**8 * 8


def test_sizes() -> None:
    assert set(SIZES) == {"tiny", "small", "base"}
    small = Config.sizes("small")
    assert (small.d_model, small.layers, small.heads, small.head_dim) == (384, 6, 8, 48)
    assert Config.sizes("tiny", kv_heads=2).n_kv_heads == 2
    with pytest.raises(ValueError, match="there are tiny, small, base"):
        Config.sizes("huge")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 100, "heads": 8}, "d_model=112 is"),
        ({"kv_heads": 3}, "kv_heads=3 must divide heads=4"),
        ({"layers": 0}, "layers=0 must be at least 1"),
        ({"d_ff": -1}, "d_ff=-1"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"logit_cap": -1.0}, "logit_cap=-1.0"),
        ({"conv": 1}, "conv=1 must be 2 to 8 taps, or 0"),
        ({"conv": 9}, "conv=9 must be 2 to 8 taps"),
        ({"ngrams": 1}, "ngrams=1 must be 2 to 16 symbols, or 0"),
        ({"ngrams": -2}, "ngrams=-2"),
        ({"ngram_bits": 0}, "ngram_bits=0 must be 1 to 24"),
    ],
)
def test_contradictory_configurations_name_the_fix(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**{**SMALL, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"d_model": 32.0}, TypeError, "d_model=32.0 must be an int"),
        ({"layers": True}, TypeError, "layers=True must be an int"),
        ({"heads": "4"}, TypeError, "heads='4' must be an int"),
        ({"tie": 1}, TypeError, "tie=1 must be True or False"),
        ({"dropout": "0.1"}, TypeError, "dropout='0.1' must be a number"),
        ({"norm_eps": None}, TypeError, "norm_eps=None must be a number"),
        ({"norm_eps": math.nan}, ValueError, "norm_eps=nan must be a finite number, not negative"),
        ({"logit_cap": math.inf}, ValueError, "logit_cap=inf must be a finite number"),
        ({"rope_base": 0.0}, ValueError, "rope_base=0 must be positive"),
        ({"qk_norm": 1}, TypeError, "qk_norm=1 must be True or False"),
        ({"conv": 4.0}, TypeError, "conv=4.0 must be an int"),
    ],
)
def test_a_value_of_another_type_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Config(**{**SMALL, **changes})
    assert Config(**{**SMALL, "dropout": 0}).dropout == 0, "a whole number is a number"


@pytest.mark.parametrize("config", [{}, None, Config])
def test_a_model_is_built_of_a_configuration_alone(config: Any) -> None:
    with pytest.raises(TypeError, match=r"config must be a bakeoff.models.llm_med.Config, got a "):
        LLMMed(config)
    both = r"config must be a .*llm_med.Config or .*titan_mac.Config or .*longnet.*Config, got a "
    with pytest.raises(TypeError, match=both):
        models.build(config)


def empty_then_loaded(built: Any, way: str) -> Any:
    """A model like `built`, made without data and given its state by one of the usual ways."""
    torch.manual_seed(1)
    with torch.device("meta"):
        model = models.build(built.config)
    model.to(next(built.parameters()).dtype)
    if way == "assign":
        model.load_state_dict(built.state_dict(), assign=True)
    elif way.startswith("as a part"):
        whole = torch.nn.ModuleDict({"model": model if way.endswith("from meta") else copy.deepcopy(built)})
        whole.to_empty(device="cpu")
        whole.load_state_dict({f"model.{name}": value for name, value in built.state_dict().items()})
        model = whole["model"]
    else:
        junk = model if way == "from meta" else models.build(built.config).to(next(built.parameters()).dtype)
        model = junk.to_empty(device="cpu")
        model.load_state_dict(built.state_dict())
    return model


@pytest.mark.parametrize(
    "way", ["from meta", "from data", "as a part, from meta", "as a part, from data", "assign"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_was_built_without_data_has_its_positions_once_loaded(dtype: torch.dtype, way: str) -> None:
    ids = torch.randint(256, (2, 20))
    attending = models.byte_spectral.Config(
        d_model=16, layers=2, heads=2, max_seq_len=24, poles=2, window=4, bins=3, attention_every=2
    )
    for built in (perturbed(dtype), models.build(attending).to(dtype)):
        torch.full((1 << 16,), 7.0)  # memory that is handed out again is not zeros
        loaded = empty_then_loaded(built, way)
        assert torch.equal(loaded(ids)[0], built(ids)[0])
        assert set(loaded.state_dict()) == set(built.state_dict())
        assert (loaded.cos.dtype, loaded.cos.device.type) == (dtype, "cpu")


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (b"text", TypeError, r"ids must be a tensor, got bytes: .*torch.tensor\(\[list\(b'text'\)\]\)"),
        ([[1, 2]], TypeError, "ids must be a tensor, got list"),
        (torch.zeros(2, 3), TypeError, r"ids are torch.float32.*call ids.long\(\)"),
        (torch.zeros(2, 3, dtype=torch.bool), TypeError, "torch.bool"),
        (torch.zeros(5, dtype=torch.long), ValueError, r"expected \[B, T\]; one row is ids\[None\]"),
        (torch.zeros(1, 0, dtype=torch.long), ValueError, "no symbols"),
        (torch.zeros(0, 4, dtype=torch.long), ValueError, "no symbols"),
        (torch.zeros(1, 25, dtype=torch.long), ValueError, r"25 symbols.*Config\(max_seq_len=25\)"),
    ],
)
def test_bad_ids_name_the_fix(ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLMMed(Config(**SMALL))(ids)


def test_bad_targets_and_sampling_settings_name_the_fix() -> None:
    model = LLMMed(Config(**SMALL))
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"targets have shape \(1, 3\), ids \(1, 4\)"):
        model(ids, ids[:, 1:])
    with pytest.raises(TypeError, match="targets are torch"):
        model(ids, ids.float())
    bad = [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}]
    for setting in bad:
        with pytest.raises(ValueError, match=next(iter(setting))):
            model.stream(ids, 1, **setting)  # refused at the call, before anything is drawn
    with pytest.raises(ValueError, match="max_new=-1"):
        model.stream(ids, -1)
    with pytest.raises(ValueError, match="not both"):
        model.stream(ids, 1, seed=1, generator=torch.Generator())
    with pytest.raises(TypeError, match="prompt must be a tensor, got str"):
        model.generate("text", 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"cache must be a bakeoff.models.llm_med.Cache, got a b"):
        model.decode(ids, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no symbols"):
        model.generate(ids[:, :0], 1)
    for wrong in ({"top_k": 1.5}, {"temperature": "x"}, {"seed": 1.0}, {"top_p": None}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            model.stream(ids, 1, **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"max_new=2.5 must be an int"):
        model.stream(ids, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"seed=\d+ must fit 64 bits"):
        model.stream(ids, 1, seed=2**70)


@pytest.mark.parametrize("changes", [{}, SHAPES["every rung"]])
def test_a_cache_begun_in_inference_mode_goes_on_without(changes: dict[str, object]) -> None:
    model, ids = perturbed(**changes), torch.randint(256, (2, 8))
    cache = model.make_cache()
    with torch.inference_mode():
        model.decode(ids[:, :4], cache)
    with torch.no_grad():
        torch.testing.assert_close(model.decode(ids[:, 4:], cache), model(ids)[0][:, 4:])


def test_pieces_carry_the_gradients_of_the_whole() -> None:
    attending = models.byte_spectral.Config(
        d_model=16, layers=2, heads=2, max_seq_len=24, poles=2, window=4, bins=3, attention_every=2
    )
    ids = torch.randint(256, (2, 8))
    rungs = perturbed(**SHAPES["every rung"])
    for model in (perturbed(), perturbed(kv_heads=2), rungs, models.build(attending).double()):
        parameters = list(model.parameters())
        cache = model.make_cache()
        pieces = torch.cat([model.decode(piece, cache) for piece in ids.split(3, dim=1)], dim=1)
        found = torch.autograd.grad(pieces.square().sum(), parameters)
        expected = torch.autograd.grad(model(ids)[0].square().sum(), parameters)
        torch.testing.assert_close(found, expected)
        with torch.no_grad():  # and then on without
            assert not model.decode(ids[:, :1], cache).requires_grad


@pytest.mark.parametrize("change", [{"layers": 1}, {"layers": 3}, {"kv_heads": 1}, {"max_seq_len": 8}])
def test_a_cache_is_for_one_model_and_its_rows(change: dict[str, int]) -> None:
    model, ids = LLMMed(Config(**SMALL)), torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="cache was made for another model"):
        model.decode(ids, Cache(Config(**{**SMALL, **change})))
    cache = model.make_cache()
    model.decode(ids, cache)
    for rows in (1, 3):
        with pytest.raises(ValueError, match=f"ids have {rows} rows, the cache 2"):
            model.decode(torch.zeros(rows, 1, dtype=torch.long), cache)
