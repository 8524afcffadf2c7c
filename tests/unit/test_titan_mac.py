"""TitanMAC: causality, whose memories they are, decoding, training, what it refuses."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import bakeoff
from bakeoff.apps.compare import match, pair, parameters
from bakeoff.apps.train import load_run, recipe, resolve, train
from bakeoff.apps.train.metrics import read_metrics
from bakeoff.models.titan_mac import SIZES, Cache, Config, TitanMAC
from bakeoff.nn.neural_memory import of_length
from tests.unit.language_models import check_blind_guess, check_gradients, check_loss, moved

SMALL: dict[str, Any] = {
    "d_model": 16, "layers": 2, "heads": 2, "segment": 8, "persistent": 3, "chunk": 4, "max_seq_len": 24,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "mac": {},
    "mac, gated by segments": {"gate": "segment"},
    "mac without memory": {"memory": False},
    "mac without persistent": {"persistent": 0, "tie": False},
    "mag": {"variant": "mag"},
    "mag without memory": {"variant": "mag", "memory": False},
    "lmm": {"variant": "lmm"},
    "lmm, last layer": {"variant": "lmm", "learns": "last"},
    "simplest": {"ascent": True, "momentum": False, "per_token": False, "max_lr": 0.02},
}
EVERY = pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
MAIN = pytest.mark.parametrize("variant", ["mac", "mag", "lmm"])


def perturbed(dtype: torch.dtype = torch.float64, **changes: Any) -> TitanMAC:
    """A small model whose weights are far from their start."""
    torch.manual_seed(0)
    return moved(TitanMAC(Config(**{**SMALL, **changes})), dtype)


@EVERY
def test_shapes_loss_and_a_gradient_for_every_parameter(changes: dict[str, Any]) -> None:
    model = perturbed(torch.float32, **changes)
    ids = torch.randint(256, (3, 19))
    loss = check_loss(model, ids)
    check_gradients(model, loss)


@MAIN
def test_every_parameter_learns_from_rows_shorter_than_a_chunk(variant: str) -> None:
    model = perturbed(torch.float32, variant=variant)
    ids = torch.randint(256, (2, 3))
    check_gradients(model, model(ids, ids)[1])


def test_untrained_loss_is_that_of_a_blind_guess() -> None:
    check_blind_guess(TitanMAC(Config.sizes("tiny")))


# causality ------------------------------------------------------------------------------------------------


@EVERY
def test_no_output_depends_on_a_later_token(changes: dict[str, Any]) -> None:
    """At every position, inside segments and at their edges."""
    model = perturbed(**changes)
    ids = torch.randint(256, (1, 18))
    with torch.no_grad():
        logits, _ = model(ids)
        for t in range(1, 18):
            other = ids.clone()
            other[:, t:] = (other[:, t:] + 1) % 256
            changed, _ = model(other)
            torch.testing.assert_close(changed[:, :t], logits[:, :t], rtol=0, atol=1e-10)
            assert not torch.allclose(changed[:, t], logits[:, t])


@pytest.mark.parametrize(
    "changes",
    [{}, {"variant": "lmm"}, *(pytest.param(c, marks=pytest.mark.exhaustive) for c in SHAPES.values())],
)
def test_the_leak_guard_lets_it_pass_with_any_parameters(changes: dict[str, Any]) -> None:
    bakeoff.assert_causal(perturbed(torch.float32, **changes), length=20, samples=2)


@pytest.mark.parametrize(
    ("changes", "reach"), [({}, None), ({"gate": "segment"}, None), ({"memory": False}, 0)]
)
def test_memory_carries_what_attention_no_longer_sees(changes: dict[str, Any], reach: int | None) -> None:
    """Of one layer and segments of 8, position 23 attends to 16 and later ones."""
    model = perturbed(layers=1, **changes)
    ids = torch.randint(256, (1, 24))
    other = ids.clone()
    other[:, 2] += 1
    with torch.no_grad():
        moved = (model(ids)[0] - model(other)[0])[:, 23].abs().max()
    assert (moved == 0) == (reach == 0)


def test_what_a_short_row_wrote_is_read() -> None:
    """A published memory never wrote before the end of a chunk. The convolutions reach 3 positions back."""
    model = perturbed(layers=1, variant="lmm", chunk=16)
    ids = torch.randint(256, (1, 9))
    other = ids.clone()
    other[:, 0] += 1
    with torch.no_grad():
        assert not torch.allclose(model(ids)[0][:, 8], model(other)[0][:, 8])


def test_what_is_recalled_at_different_positions_differs() -> None:
    """Of a published model all positions of a segment asked the same."""
    model = perturbed(layers=1)
    mixer = model.blocks[0].mixer
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    asked, _ = mixer.ask(x, None)
    recalled = mixer.memory.recall(of_length(3.0, asked, 2), mixer.memory.start(x).memory)
    assert recalled[0].std(dim=0).min() > 1e-3


@MAIN
def test_a_row_has_memories_of_its_own(variant: str) -> None:
    model = perturbed(variant=variant)
    ids = torch.randint(256, (3, 20))
    logits, _ = model(ids)
    other = ids.clone()
    other[1] = ids[1].flip(0)
    changed, _ = model(other)
    torch.testing.assert_close(changed[::2], logits[::2], rtol=0, atol=1e-12)
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(model(ids[order])[0], logits[order])


@MAIN
def test_memories_outlive_neither_a_step_nor_an_evaluation(variant: str) -> None:
    model = perturbed(variant=variant)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.randint(256, (2, 20))
    logits, _ = model.train()(ids)
    model(ids, ids)[1].backward()
    model.eval()(ids.flip(1))
    assert torch.equal(model(ids)[0], logits)
    assert before.keys() == {name for name, _ in model.named_parameters()}, "nothing else is in a checkpoint"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# decoding -------------------------------------------------------------------------------------------------


@EVERY
def test_decoding_equals_the_whole_pass(changes: dict[str, Any]) -> None:
    """In pieces of one and of several bytes, across the edges of chunks and segments."""
    model = perturbed(**changes)
    ids = torch.randint(256, (2, 27))
    whole, _ = model(ids)
    for cuts in ([1] * 27, [9, 1, 1, 5, 11], [27]):
        cache = Cache(model.config)
        pieces = [model.decode(piece, cache) for piece in ids.split(cuts, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-9, atol=1e-9)


@MAIN
def test_pieces_carry_the_gradients_of_the_whole_until_detached(variant: str) -> None:
    model = perturbed(variant=variant)
    ids = torch.randint(256, (2, 19))
    parameters = list(model.parameters())
    cache = model.make_cache()
    pieces = torch.cat([model.decode(piece, cache) for piece in ids.split(7, dim=1)], dim=1)
    found = torch.autograd.grad(pieces.square().sum(), parameters)
    expected = torch.autograd.grad(model(ids)[0].square().sum(), parameters)
    torch.testing.assert_close(found, expected)
    cache.detach()
    model.decode(ids[:, :9], cache).square().sum().backward()  # earlier pieces' graph is gone
    with torch.no_grad():
        assert not model.decode(ids[:, :1], cache).requires_grad


@MAIN
def test_a_cache_may_begin_under_inference_mode(variant: str) -> None:
    model = perturbed(variant=variant)
    ids = torch.randint(256, (2, 19))
    cache = model.make_cache()
    with torch.inference_mode():
        first = model.decode(ids[:, :11], cache)
    rest = model.decode(ids[:, 11:], cache)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), model(ids)[0])
    rest.sum().backward()


@MAIN
def test_a_cache_does_not_grow_with_the_text(variant: str) -> None:
    model = perturbed(variant=variant)
    cache = model.make_cache()

    def held() -> int:
        tensors = [
            *(t for past in cache.layers for t in (past.k, past.v, past.raw, past.asked) if t is not None),
            *(t for past in cache.layers for t in (past.last or ())),
            *(t for past in cache.layers if past.memory for t in past.memory.tensors().values()),
        ]
        return sum(t.numel() for t in tensors)

    with torch.no_grad():
        model.decode(torch.randint(256, (1, 16)), cache)
        before = held()
        model.decode(torch.randint(256, (1, 80)), cache)
    assert held() == before


@EVERY
def test_generate_goes_on_past_any_length(changes: dict[str, Any]) -> None:
    model = perturbed(torch.float32, **changes)
    prompt = torch.randint(256, (2, 5))
    text = model.generate(prompt, 30, temperature=0.0)
    assert text.shape == (2, 35)
    assert torch.equal(text[:, :5], prompt)
    assert torch.equal(text, model.generate(prompt, 30, temperature=0.0))
    first, _ = model(prompt)
    assert torch.equal(text[:, 5], first[:, -1].argmax(-1))


def test_a_cache_is_of_one_model_and_one_batch() -> None:
    model = perturbed(torch.float32)
    ids = torch.randint(256, (2, 5))
    cache = Cache(model.config)
    model.decode(ids, cache)
    with pytest.raises(ValueError, match=r"ids have 3 rows, the cache 2: .* new Cache\(model.config\)"):
        model.decode(torch.randint(256, (3, 1)), cache)
    with pytest.raises(ValueError, match=r"made for another model: use Cache\(model.config\)"):
        model.decode(ids, Cache(perturbed(gate="segment").config))
    with pytest.raises(TypeError, match=r"cache must be a bakeoff.models.titan_mac.Cache, got a builtins"):
        model.decode(ids, None)  # type: ignore[arg-type]
    assert model.decode(ids[:, :1], cache).shape == (2, 1, 256)


# numbers --------------------------------------------------------------------------------------------------


@EVERY
def test_gradients_are_the_slope_of_the_loss_in_float64(changes: dict[str, Any]) -> None:
    """Along a random direction, by differences of which float32 anywhere inside would leave two digits."""
    model = perturbed(**changes)
    ids = torch.randint(256, (2, 11))
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

    torch.testing.assert_close((loss_at(1e-6) - loss_at(-1e-6)) / 2e-6, slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@MAIN
def test_a_model_in_16_bits_is_near_the_same_in_float32(variant: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = TitanMAC(Config(**{**SMALL, "variant": variant}))
    ids = torch.randint(256, (2, 9))
    _, exact = model(ids, ids)
    with torch.autocast("cpu", dtype=dtype):
        _, cast = model(ids, ids)
    torch.testing.assert_close(cast, exact, rtol=2e-2, atol=0)
    _, loss = model.to(dtype)(ids, ids)
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=0)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())
    assert model.generate(ids, 2).shape == (2, 11)


@EVERY
def test_a_model_without_data_gives_its_shapes(changes: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = TitanMAC(Config(**{**SMALL, **changes}))
        logits, _ = model(torch.zeros(2, 9, dtype=torch.long))
    assert logits.shape == (2, 9, 256)


@pytest.mark.parametrize(
    "variant", ["mac", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("mag", "lmm"))]
)
def test_torch_compile_takes_it_whole(variant: str) -> None:
    model = perturbed(variant=variant, layers=1)
    ids = torch.randint(256, (2, 12))
    torch.compiler.reset()
    call = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    torch.testing.assert_close(call(ids)[0], model(ids)[0], rtol=1e-9, atol=1e-9)


def test_dropout_acts_in_training_alone() -> None:
    model = perturbed(torch.float32, dropout=0.5)
    ids = torch.randint(256, (2, 8))
    assert not torch.equal(model.train()(ids)[0], model(ids)[0])
    assert torch.equal(model.decode(ids, Cache(model.config)), model.eval()(ids)[0])
    assert torch.equal(model(ids)[0], model(ids)[0])


@MAIN
def test_it_trains(variant: str) -> None:
    """A rule that needs eight bytes of memory: the byte eight before comes again."""
    torch.manual_seed(0)
    model = TitanMAC(Config(**{**SMALL, "d_model": 32, "layers": 1, "segment": 16, "variant": variant}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        ids = torch.randint(4, (8, 8)).repeat(1, 2)
        _, loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 1.1 * math.log(4) < losses[0]


# configuration and applications ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers=0 must be at least 1"),
        ({"dropout": 1.0}, "dropout=1.0 must be in"),
        ({"persistent": -1}, "persistent=-1 must not be negative"),
        ({"d_model": 18}, r"d_model=18 must be a multiple of 2\*heads=4.*d_model=20 is"),
        ({"segment": 10}, "segment=10 must be a multiple of chunk=4, .*with chunk=2 it is"),
        ({"segment": 63, "chunk": 64}, "segment=63 must be a multiple of chunk=64, .*with chunk=63 it is"),
        ({"segment": 100, "chunk": 64}, "segment=100 must be a multiple of chunk=64, .*with chunk=50 it is"),
        ({"variant": "mal"}, "variant='mal' must be one of mac, mag, lmm"),
        ({"gate": "none"}, "gate='none' must be one of token, segment"),
        ({"learns": "first"}, "learns='first' must be one of all, last"),
        ({"max_lr": 0.0}, "max_lr=0 must be positive"),
        ({"variant": "lmm", "memory": False}, "mixes no time: use mac or mag without memory"),
        ({"norm_eps": math.nan}, "norm_eps=nan must be a finite number, not negative"),
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**{**SMALL, **changes})


def test_sizes_are_named() -> None:
    assert set(SIZES) == {"tiny", "byte", "seed", "base"}
    for size, (width, layers) in {"byte": (256, 4), "seed": (512, 6), "base": (768, 12)}.items():
        config = Config.sizes(size)  # type: ignore[arg-type]
        assert (config.d_model, config.layers) == (width, layers)
    seed = Config.sizes("seed", variant="lmm")
    assert (seed.heads, seed.segment, seed.persistent, seed.variant) == (8, 512, 16, "lmm")
    with pytest.raises(ValueError, match="no size 'huge'; there are tiny, byte, seed, base"):
        Config.sizes("huge")  # type: ignore[arg-type]


def test_bad_input_names_the_fix() -> None:
    model = perturbed(torch.float32)
    ids = torch.randint(256, (2, 5))
    with pytest.raises(TypeError, match="expected uint8, int32 or int64"):
        model(ids.float())
    with pytest.raises(ValueError, match="no symbols"):
        model(ids[:0])
    with pytest.raises(ValueError, match=r"targets have shape \(2, 4\), ids \(2, 5\): make them equal"):
        model(ids, ids[:, :4])
    with pytest.raises(TypeError, match=r"config must be a bakeoff.models.titan_mac.Config, got a builtins"):
        TitanMAC(SMALL)  # type: ignore[arg-type]


def test_flops_count_what_is_attended_to() -> None:
    model = TitanMAC(Config.sizes("tiny"))
    assert model.flops_per_token(256) > 6 * sum(p.numel() for p in model.blocks.parameters())
    without = TitanMAC(Config.sizes("tiny", memory=False))
    assert without.flops_per_token(256) < model.flops_per_token(256)
    assert model.flops_per_token(4096) == model.flops_per_token(64), "segments, whatever the row"


def test_it_is_trained_resumed_and_asked_to_write(tmp_path: Path) -> None:
    """The trainer, with its leak guard, from the recipe; a resumed run ends where a whole one does."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} lazy dogs and {n % 7} foxes\n" for n in range(800)))
    small = [f"model.{name}={value}" for name, value in SMALL.items()]
    common = [
        *small, "train.max_seconds=0", "train.batch_size=2", "train.eval_rows=2", "train.log_every=1",
        "train.device=cpu", "select.tune=false", f"data.path={text}", "metrics.console=false",
        "optim.warmup=0", "optim.min_lr=1",
    ]  # fmt: skip

    def run(folder: str, steps: int, *more: str) -> list[float]:
        given = [*common, f"train.steps={steps}", f"train.run_dir={tmp_path / folder}", *more]
        train(resolve(recipe("titan-mac-tiny"), None, given), console=Console(file=io.StringIO()))
        rows = read_metrics(tmp_path / folder / "metrics.jsonl")
        return [row["loss"] for row in rows if row["event"] == "train"]

    whole = run("whole", 3)
    run("parts", 2, "train.leak_check=false")
    assert run("parts", 3, "train.leak_check=false") == whole
    model, config = load_run(tmp_path / "whole")
    assert isinstance(model, TitanMAC)
    assert config.recipe == "titan-mac-tiny"
    assert model.generate(torch.tensor([[65]]), 12).shape == (1, 13)


def test_it_is_compared_with_equal_parameters() -> None:
    first, second = pair("titan-mac-tiny", "llm-med-tiny", steps=1)
    target = parameters(second.model)
    assert abs(parameters(match(first, target).model) - target) <= 0.02 * target
    assert recipe("titan-mac").model == Config.sizes("seed")
