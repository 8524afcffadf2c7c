"""ByteSpectralLM: causality, decoding with state, the filters, what it refuses."""

import math
from functools import partial
from typing import Any

import pytest
import torch

import bakeoff
from bakeoff.models.byte_spectral import SIZES, ByteSpectralLM, Cache, Config, MinimumPhase
from tests.unit.language_models import check_blind_guess, check_gradients, check_loss, moved

SMALL = {"d_model": 16, "layers": 2, "heads": 2, "max_seq_len": 24, "poles": 3, "window": 8, "bins": 5}
SHAPES: dict[str, dict[str, object]] = {
    "poles": {},
    "taps": {"filter": "taps"},
    "short taps": {"filter": "taps", "taps": 7},
    "minimum phase": {"filter": "minimum_phase"},
    "attention": {"attention_every": 2},
    "attention alone": {"attention_every": 1},
    "normed attention": {"attention_every": 2, "qk_norm": True},
    "own head": {"tie": False},
    "wide encoder": {"channels": 3, "features": "complex", "ngrams": 4, "ngram_bits": 6},
    "log spectra": {"channels": 2, "features": "log"},
}
FEW = ("poles", "taps", "minimum phase", "attention", "wide encoder")
"""Other shapes are made of the same parts."""
EVERY = pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())


def perturbed(dtype: torch.dtype = torch.float64, **changes: object) -> ByteSpectralLM:
    """A small model whose weights are far from their start."""
    torch.manual_seed(0)
    return moved(ByteSpectralLM(Config(**{**SMALL, **changes})), dtype)  # type: ignore[arg-type]


@EVERY
def test_shapes_loss_and_a_gradient_for_every_parameter(changes: dict[str, object]) -> None:
    model = perturbed(torch.float32, **changes)
    ids = torch.randint(256, (3, 11))
    loss = check_loss(model, ids)
    check_gradients(model, loss)


def test_untrained_loss_is_that_of_a_blind_guess() -> None:
    check_blind_guess(ByteSpectralLM(Config.sizes("tiny")))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=[] if name in FEW else pytest.mark.exhaustive)
        for name, changes in SHAPES.items()
    ],
)
def test_the_leak_guard_lets_it_pass_with_any_parameters(changes: dict[str, object]) -> None:
    bakeoff.assert_causal(perturbed(torch.float32, **changes), length=20)


@EVERY
def test_decoding_equals_the_whole_pass(changes: dict[str, object]) -> None:
    """In pieces of one and of several bytes, beyond what windows and short filters hold."""
    model = perturbed(**changes)
    ids = torch.randint(256, (2, 23))
    whole, _ = model(ids)
    for cuts in ([1] * 23, [9, 1, 1, 5, 7], [23]):
        cache = Cache(model.config)
        pieces = [model.decode(piece, cache) for piece in ids.split(cuts, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-9, atol=1e-9)


@EVERY
def test_a_buffer_may_be_filled_anew_after_every_piece(changes: dict[str, object]) -> None:
    model = perturbed(**changes)
    ids = torch.randint(256, (2, 20), dtype=torch.uint8)
    buffer, cache = torch.empty(2, 4, dtype=torch.uint8), Cache(model.config)
    pieces = [model.decode(buffer.copy_(piece), cache) for piece in ids.split(4, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids)[0], rtol=1e-9, atol=1e-9)


@EVERY
def test_a_cache_keeps_no_more_than_it_needs(changes: dict[str, object]) -> None:
    model = perturbed(**{**changes, "max_seq_len": 600})
    cache = Cache(model.config)
    model.decode(torch.randint(256, (1, 500)), cache)
    assert cache.bytes is not None
    for kept in [cache.bytes, *cache.past.kept.values()]:
        assert kept.untyped_storage().nbytes() == kept.numel() * kept.itemsize


@pytest.mark.parametrize("kind", ["poles", "taps"])
def test_what_decays_at_once_is_no_nan(kind: str) -> None:
    model = perturbed(torch.float32, filter=kind)
    with torch.no_grad():
        for block in model.blocks:
            block.mixer.filter.decay[::2] = 1000.0  # exp of it is infinite
    bakeoff.assert_causal(model, length=20)
    _, loss = model(torch.randint(256, (1, 20)), torch.randint(256, (1, 20)))
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_a_step_with_poles_keeps_a_state_of_fixed_size() -> None:
    model = perturbed()
    cache = Cache(model.config)

    def held() -> int:
        assert cache.bytes is not None
        return cache.bytes.numel() + sum(kept.numel() for kept in cache.past.kept.values())

    model.decode(torch.randint(256, (1, 30)), cache)
    before = held()
    for _ in range(40):
        model.decode(torch.randint(256, (1, 1)), cache)
    assert held() == before


@EVERY
def test_generate_goes_on_past_its_length(changes: dict[str, object]) -> None:
    model = perturbed(torch.float32, **changes)
    prompt = torch.randint(256, (2, 5))
    text = model.generate(prompt, 40, temperature=0.0)
    assert text.shape == (2, 45)
    assert torch.equal(text[:, :5], prompt)
    assert torch.equal(text, model.generate(prompt, 40, temperature=0.0))
    first, _ = model(prompt)
    assert torch.equal(text[:, 5], first[:, -1].argmax(-1))


def test_dropout_acts_in_training_alone() -> None:
    model = perturbed(torch.float32, dropout=0.5)
    ids = torch.randint(256, (2, 8))
    assert not torch.equal(model.train()(ids)[0], model(ids)[0])
    assert torch.equal(model.decode(ids, Cache(model.config)), model.eval()(ids)[0])
    assert torch.equal(model(ids)[0], model(ids)[0])


def test_minimum_phase_keeps_the_magnitude_and_has_its_energy_first() -> None:
    torch.manual_seed(0)
    filtered = MinimumPhase(channels=8, taps=512)
    h = filtered.response().double()
    got = torch.fft.rfft(h, 8 * 512).abs().log()
    wanted = torch.nn.functional.interpolate(
        filtered.log_magnitude.double()[:, None], 4 * 512 + 1, mode="linear", align_corners=True
    )[:, 0]
    assert float((got - wanted).square().mean().sqrt().detach()) < 5e-3, "but for corners, which taps round"
    energy = h.square().cumsum(1)
    turned = torch.flip(h, [1]).square().cumsum(1)
    assert bool((energy >= turned - 1e-9).all())


def test_an_encoder_sees_both_ways_and_classifies() -> None:
    model = perturbed(torch.float32, bidirectional=True, classes=3)
    ids = torch.randint(256, (4, 11))
    logits, _ = model(ids)
    assert logits.shape == (4, 3)
    _, loss = model(ids, torch.tensor([0, 2, 1, -100]))
    expected = torch.nn.functional.cross_entropy(logits[:3], torch.tensor([0, 2, 1]))
    torch.testing.assert_close(loss, expected)
    with pytest.raises(ValueError, match="can't decode"):
        model.generate(ids, 3)
    with pytest.raises(ValueError, match="can't decode"):
        model.stream(ids, 3)  # at the call, not when it is read
    with pytest.raises(TypeError, match=r"targets are torch.float32"):
        model(ids, torch.zeros(4))
    empty = torch.empty(0)
    hidden = partial(model.blocks[0].mixer, cos=empty, sin=empty, cache=None)
    x = torch.randn(1, 11, 16)
    other = x.clone()
    other[:, -1] += 1
    assert not torch.allclose(hidden(x)[:, 0], hidden(other)[:, 0])


def test_it_trains() -> None:
    """A rule that needs eight bytes of memory: the byte eight before comes again."""
    torch.manual_seed(0)
    model = ByteSpectralLM(Config(**{**SMALL, "d_model": 32, "layers": 1}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = last = 0.0
    for step in range(150):
        ids = torch.randint(4, (16, 8)).repeat(1, 3)
        _, loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first, last = (loss.item(), 0.0) if step == 0 else (first, loss.item())
    assert last < 0.75 * math.log(4) < first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers=0 must be at least 1"),
        ({"dropout": 1.0}, "dropout=1.0 must be in"),
        ({"attention_every": -1}, "attention_every=-1 must not be negative"),
        (
            {"attention_every": 2, "d_model": 18},
            r"d_model=18 must be a multiple of 2\*heads=4.*d_model=20 is",
        ),
        ({"bidirectional": True}, "an encoder needs both"),
        ({"classes": 3}, "an encoder needs both"),
        ({"bidirectional": True, "classes": 2, "attention_every": 1}, "attention here is causal"),
        ({"channels": 0}, "channels=0 must be at least 1"),
        ({"features": "phases"}, "features='phases' must be one of magnitude, log, complex"),
        ({"ngrams": 1}, "ngrams=1 must be 2 to 16 symbols, or 0"),
        ({"ngram_bits": 30}, "ngram_bits=30 must be 1 to 24"),
        ({"filter": "waves"}, "filter='waves' must be one of poles, taps, minimum_phase"),
        ({"norm_eps": math.nan}, "norm_eps=nan must be a finite number, not negative"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0 must be a finite number"),
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**{**SMALL, **changes})  # type: ignore[arg-type]


def test_an_unknown_filter_or_size_is_refused() -> None:
    with pytest.raises(Exception, match="filter='waves' must be one of"):
        Config.sizes("tiny", filter="waves")
    with pytest.raises(ValueError, match="no size 'huge'; there are tiny, small, base"):
        Config.sizes("huge")  # type: ignore[arg-type]
    assert set(SIZES) == {"tiny", "small", "base"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 16.0}, "d_model=16.0 must be an int"),
        ({"layers": True}, "layers=True must be an int"),
        ({"taps": "7"}, "taps='7' must be an int"),
        ({"heads": None}, "heads=None must be an int"),
        ({"tie": "no"}, "tie='no' must be True or False"),
    ],
)
def test_a_value_of_another_type_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Config(**{**SMALL, **changes})  # type: ignore[arg-type]


@EVERY
def test_gradients_are_the_slope_of_the_loss_in_float64(changes: dict[str, object]) -> None:
    """Along a random direction, by differences of which float32 anywhere inside would leave two digits."""
    model = perturbed(**changes)
    ids = torch.randint(256, (2, 9))
    parameters = list(model.parameters())
    along = [torch.randn_like(parameter) for parameter in parameters]
    gradients = torch.autograd.grad(model(ids, ids)[1], parameters)
    slope = sum((gradient * step).sum() for gradient, step in zip(gradients, along, strict=True))

    @torch.no_grad()
    def loss_at(distance: float) -> torch.Tensor:
        for parameter, step in zip(parameters, along, strict=True):
            parameter.add_(distance * step)
        loss: torch.Tensor = model(ids, ids)[1]
        for parameter, step in zip(parameters, along, strict=True):
            parameter.sub_(distance * step)
        return loss

    torch.testing.assert_close((loss_at(1e-6) - loss_at(-1e-6)) / 2e-6, slope, rtol=1e-6, atol=1e-7)


ENCODER: dict[str, object] = {"bidirectional": True, "classes": 3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", [*SHAPES.values(), ENCODER], ids=[*SHAPES, "encoder"])
def test_a_model_in_16_bits_is_near_the_same_in_float32(
    changes: dict[str, object], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = ByteSpectralLM(Config(**{**SMALL, **changes}))  # type: ignore[arg-type]
    ids = torch.randint(256, (2, 9))
    targets = ids[:, 0] % 3 if changes is ENCODER else ids
    _, exact = model(ids, targets)
    _, loss = model.to(dtype)(ids, targets)
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=0)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())
    if changes is not ENCODER:
        assert model.generate(ids, 2).shape == (2, 11)


def test_a_model_without_data_gives_its_shapes() -> None:
    with torch.device("meta"):
        for changes in (*SHAPES.values(), ENCODER):
            model = ByteSpectralLM(Config(**{**SMALL, **changes}))  # type: ignore[arg-type]
            logits, _ = model(torch.zeros(2, 9, dtype=torch.long))
            assert logits.shape == ((2, 3) if changes is ENCODER else (2, 9, 256))


@pytest.mark.parametrize(
    "name", ["poles", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("taps", "attention"))]
)
def test_torch_compile_leaves_the_length_open(name: str) -> None:
    """A few graphs for all lengths: after eight torch.compile gives up."""
    model = perturbed(**{"max_seq_len": 200, **SHAPES[name]})
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    call = torch.compile(model, fullgraph=True, backend=count)
    for T in (4, 9, 33, 50, 63, 65, 90, 100, 110):
        ids = torch.randint(256, (1, T))
        torch.testing.assert_close(call(ids)[0], model(ids)[0], rtol=1e-9, atol=1e-9)
    assert len(graphs) <= 4


def test_a_cache_is_of_one_model_and_one_batch() -> None:
    model = perturbed(torch.float32)
    ids = torch.randint(256, (2, 5))
    cache = Cache(model.config)
    model.decode(ids, cache)
    with pytest.raises(ValueError, match=r"ids have 3 rows, the cache 2: .* new Cache\(model.config\)"):
        model.decode(torch.randint(256, (3, 1)), cache)
    with pytest.raises(ValueError, match=r"made for another model: use Cache\(model.config\)"):
        model.decode(ids, Cache(perturbed(filter="taps").config))
    with pytest.raises(
        TypeError, match=r"cache must be a bakeoff.models.byte_spectral.Cache, got a builtins"
    ):
        model.decode(ids, None)  # type: ignore[arg-type]
    assert model.decode(ids[:, :1], cache).shape == (2, 1, 256)


def test_bad_input_names_the_fix() -> None:
    model = perturbed(torch.float32)
    ids = torch.randint(256, (2, 5))
    with pytest.raises(TypeError, match="expected uint8, int32 or int64"):
        model(ids.float())
    with pytest.raises(TypeError, match=r"ids must be a tensor, got bytes: .*torch.tensor"):
        model(b"text")
    with pytest.raises(TypeError, match=r"prompt must be a tensor, got str"):
        model.generate("text", 2)  # type: ignore[arg-type]
    for targets in (ids.float(), ids.bool()):
        with pytest.raises(TypeError, match=r"targets are torch.*, expected uint8, int32 or int64"):
            model(ids, targets)
    with pytest.raises(
        TypeError, match=r"config must be a bakeoff.models.byte_spectral.Config, got a builtins"
    ):
        ByteSpectralLM(SMALL)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no symbols"):
        model(ids[:0])
    with pytest.raises(ValueError, match=r"targets have shape \(2, 4\), ids \(2, 5\): make them equal"):
        model(ids, ids[:, :4])
    with pytest.raises(ValueError, match="longer than max_seq_len=24"):
        perturbed(torch.float32, attention_every=2)(torch.randint(256, (1, 25)))
    assert model(torch.randint(256, (1, 60)))[0].shape == (1, 60, 256), "filters have no longest row"


def test_attention_that_no_block_would_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_every=6 is more than layers=4: no block would attend"):
        Config.sizes("small", layers=4, attention_every=6)


@EVERY
def test_a_cache_begun_in_inference_mode_may_be_trained_behind(changes: dict[str, object]) -> None:
    model, ids = perturbed(**changes), torch.randint(256, (2, 12))
    cache = model.make_cache()
    with torch.inference_mode():
        first = model.decode(ids[:, :7], cache)
    rest = model.decode(ids[:, 7:], cache)
    rest.sum().backward()
    torch.testing.assert_close(torch.cat([first, rest], dim=1), model(ids)[0])
