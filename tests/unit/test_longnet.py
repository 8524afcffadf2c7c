"""LongNetLM: causality, reach, decoding, training. ImageLongNet: places, orders. What both refuse."""

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import bakeoff
from bakeoff.apps.compare import match, pair, parameters
from bakeoff.apps.train import load_run, recipe, resolve, train
from bakeoff.apps.train.config import Config as RunConfig
from bakeoff.apps.train.config import ConfigError
from bakeoff.apps.train.metrics import read_metrics
from bakeoff.models.longnet import SIZES, Cache, Config, ImageConfig, ImageLongNet, LongNetLM
from tests.unit.language_models import check_blind_guess, check_gradients, check_loss, moved

SMALL: dict[str, Any] = {
    "d_model": 16, "layers": 2, "heads": 2, "segments": (4, 8, 64), "rates": (1, 2, 4), "max_seq_len": 40,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "three branches": {},
    "one branch": {"segments": (6,), "rates": (1,)},
    "shared keys": {"d_model": 24, "heads": 6, "kv_heads": 2, "tie": False},
    "odd": {"segments": (5, 15), "rates": (1, 3)},
    "nothing dense": {"segments": (7, 20), "rates": (2, 3)},
}
EVERY = pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())


def perturbed(dtype: torch.dtype = torch.float64, **changes: Any) -> LongNetLM:
    """A small model whose weights are far from their start."""
    torch.manual_seed(0)
    return moved(LongNetLM(Config(**{**SMALL, **changes})), dtype)


@EVERY
def test_shapes_loss_and_a_gradient_for_every_parameter(changes: dict[str, Any]) -> None:
    model = perturbed(torch.float32, **changes)
    ids = torch.randint(256, (3, 19))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of unreachable tokens: the layers together reach all
        loss = check_loss(model, ids)
    check_gradients(model, loss)


def test_untrained_loss_is_that_of_a_blind_guess() -> None:
    check_blind_guess(LongNetLM(Config.sizes("tiny")))


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


@pytest.mark.parametrize("changes", [{}, SHAPES["shared keys"]], ids=["plain", "shared keys"])
def test_the_leak_guard_lets_it_pass_with_any_parameters(changes: dict[str, Any]) -> None:
    bakeoff.assert_causal(perturbed(torch.float32, **changes), length=20, samples=2)


def test_a_token_is_seen_by_what_a_branch_shows_it_to() -> None:
    """Of one layer with a phase for each of two heads: position 7 sees its own four, and every other of 0..7
    by the head that selects it."""
    model = perturbed(layers=1, segments=(4, 8), rates=(1, 2))
    ids = torch.randint(256, (1, 8))
    moved = []
    with torch.no_grad():
        for t in range(7):
            other = ids.clone()
            other[:, t] += 1
            moved.append(not torch.equal(model(ids)[0][:, 7], model(other)[0][:, 7]))
    assert moved == [False, True, False, True, True, True, True]


def test_layers_take_turns_at_what_few_heads_leave_out() -> None:
    """Of one head and rate 2, layer 0 shows even positions to each other, layer 1 odd ones."""
    model = perturbed(layers=2, heads=1, segments=(16,), rates=(2,))
    ids = torch.randint(256, (1, 12))
    for t, last in ((2, 10), (3, 11)):
        other = ids.clone()
        other[:, t] += 1
        moved = (model(ids)[0] - model(other)[0]).abs().amax((0, 2)).nonzero().flatten()
        assert moved.tolist() == [*range(t, last + 1, 2)]


# decoding -------------------------------------------------------------------------------------------------


@EVERY
def test_decoding_equals_the_whole_pass(changes: dict[str, Any]) -> None:
    """In pieces of one and of several bytes, across the edges of segments."""
    model = perturbed(**changes)
    ids = torch.randint(256, (2, 39))
    whole, _ = model(ids)
    for cuts in ([1] * 39, [9, 1, 1, 5, 23], [20, 19], [39]):
        cache = Cache(model.config)
        pieces = [model.decode(piece, cache) for piece in ids.split(cuts, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-9, atol=1e-9)


def test_a_long_piece_behind_a_cache_goes_in_parts() -> None:
    model = perturbed(max_seq_len=640, segments=(64, 256), rates=(1, 2))
    ids = torch.randint(256, (1, 600))
    cache = Cache(model.config)
    with torch.no_grad():
        pieces = [model.decode(piece, cache) for piece in ids.split([30, 570], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids)[0], rtol=1e-9, atol=1e-9)


def test_pieces_carry_the_gradients_of_the_whole() -> None:
    model = perturbed()
    ids = torch.randint(256, (2, 19))
    parameters = list(model.parameters())
    cache = model.make_cache()
    pieces = torch.cat([model.decode(piece, cache) for piece in ids.split(7, dim=1)], dim=1)
    found = torch.autograd.grad(pieces.square().sum(), parameters)
    expected = torch.autograd.grad(model(ids)[0].square().sum(), parameters)
    torch.testing.assert_close(found, expected)


def test_a_cache_may_begin_under_inference_mode() -> None:
    model = perturbed()
    ids = torch.randint(256, (2, 19))
    cache = model.make_cache()
    with torch.inference_mode():
        first = model.decode(ids[:, :11], cache)
    rest = model.decode(ids[:, 11:], cache)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), model(ids)[0])
    rest.sum().backward()


def test_a_cache_holds_selected_rows_alone() -> None:
    model = perturbed()
    cache = model.make_cache()
    with torch.no_grad():
        model.decode(torch.randint(256, (1, 40)), cache)
    for layer in cache.layers:
        assert [k.shape for k, _ in layer] == [(1, 2, rows, 8) for rows in (4, 4, 10)]
        assert [v.shape for _, v in layer] == [k.shape for k, _ in layer]


@EVERY
def test_generate_goes_on_past_the_context(changes: dict[str, Any]) -> None:
    model = perturbed(torch.float32, **changes)
    prompt = torch.randint(256, (2, 5))
    text = model.generate(prompt, 45, temperature=0.0)
    assert text.shape == (2, 50)
    assert torch.equal(text, model.generate(prompt, 45, temperature=0.0))
    assert torch.equal(text[:, 5], model(prompt)[0][:, -1].argmax(-1))


def test_a_cache_is_of_one_model_and_one_batch() -> None:
    model = perturbed(torch.float32)
    ids = torch.randint(256, (2, 5))
    cache = Cache(model.config)
    model.decode(ids, cache)
    with pytest.raises(ValueError, match=r"ids have 3 rows, the cache 2: .* new Cache\(model.config\)"):
        model.decode(torch.randint(256, (3, 1)), cache)
    with pytest.raises(ValueError, match=r"made for another model: use Cache\(model.config\)"):
        model.decode(ids, Cache(perturbed(tie=False).config))
    with pytest.raises(
        TypeError, match=r"cache must be a bakeoff.models.longnet.cache.Cache, got a builtins"
    ):
        model.decode(ids, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a row of 41 symbols is longer than max_seq_len=40"):
        model.decode(torch.randint(256, (2, 36)), cache)
    assert model.decode(ids[:, :1], cache).shape == (2, 1, 256)


# numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_is_near_the_same_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = LongNetLM(Config(**SMALL))
    ids = torch.randint(256, (2, 9))
    _, exact = model(ids, ids)
    with torch.autocast("cpu", dtype=dtype):
        _, cast = model(ids, ids)
        assert model.generate(ids, 2).shape == (2, 11)
    torch.testing.assert_close(cast, exact, rtol=2e-2, atol=0)
    _, loss = model.to(dtype)(ids, ids)
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=0)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())
    assert model.generate(ids, 2).shape == (2, 11)


def test_a_model_without_data_gives_its_shapes() -> None:
    with torch.device("meta"):
        model = LongNetLM(Config(**SMALL))
        logits, _ = model(torch.zeros(2, 9, dtype=torch.long))
    assert logits.shape == (2, 9, 256)


def test_torch_compile_takes_it_whole() -> None:
    model = perturbed()
    ids = torch.randint(256, (2, 20))
    torch.compiler.reset()
    call = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    torch.testing.assert_close(call(ids)[0], model(ids)[0], rtol=1e-9, atol=1e-9)
    found = torch.autograd.grad(call(ids, ids)[1], list(model.parameters()))
    torch.testing.assert_close(found, torch.autograd.grad(model(ids, ids)[1], list(model.parameters())))


def test_dropout_acts_in_training_alone() -> None:
    model = perturbed(torch.float32, dropout=0.5)
    ids = torch.randint(256, (2, 8))
    assert not torch.equal(model.train()(ids)[0], model(ids)[0])
    torch.testing.assert_close(model.decode(ids, Cache(model.config)), model.eval()(ids)[0])


@pytest.mark.parametrize("sparse", [True, False])
def test_what_lies_beyond_the_dense_segment_is_learned_by_the_sparse_branch(sparse: bool) -> None:
    """Even positions tell what stood at the row's start; the dense segment holds four."""
    torch.manual_seed(0)
    branches: Any = {"segments": (4, 16), "rates": (1, 2)} if sparse else {"segments": (4,), "rates": (1,)}
    model = LongNetLM(Config(**{**SMALL, "d_model": 32, "layers": 1, **branches}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        ids = torch.randint(4, 8, (16, 16))
        ids[:, 0] = torch.randint(4, (16,))
        targets = torch.full_like(ids, -100)
        targets[:, 4::2] = ids[:, :1]
        _, loss = model(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (loss.item() < 0.3) == sparse


# configuration and applications ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layers": 0}, ValueError, "layers=0 must be at least 1"),
        ({"heads": 2.0}, TypeError, "heads=2.0 must be an int"),
        ({"tie": 1}, TypeError, "tie=1 must be True or False"),
        ({"max_seq_len": 0}, ValueError, "max_seq_len=0 must be at least 1"),
        ({"dropout": 1.0}, ValueError, "dropout=1.0 must be in"),
        ({"d_model": 18}, ValueError, r"d_model=18 must be a multiple of 2\*heads=4.*d_model=20 is"),
        ({"kv_heads": 3}, ValueError, "kv_heads=3 must divide heads=2"),
        ({"segments": [4, 8]}, TypeError, r"segments=\[4, 8\] must be a tuple of int"),
        ({"segments": ()}, ValueError, r"segments=\(\) must hold at least one"),
        ({"rates": (0, 1, 2)}, ValueError, "each at least 1"),
        ({"rates": (1, 2)}, ValueError, "each branch has one of both"),
        ({"segments": (8, 4, 64)}, ValueError, "must increase"),
        ({"rates": (1, 4, 2)}, ValueError, "must not decrease"),
        ({"rates": (8, 8, 8)}, ValueError, "rate 8 is above its segment 4: a rate up to 4 fits"),
        ({"rates": (1, 2, 8)}, ValueError, r"rate 8 leaves 50\.0% .* 2 layers of 2 .* up to rate 4"),
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Config(**{**SMALL, **changes})


def test_sizes_are_named() -> None:
    assert set(SIZES) == {"tiny", "small", "base"}
    for size, (width, layers) in {"tiny": (128, 2), "small": (384, 6), "base": (768, 12)}.items():
        config = Config.sizes(size)  # type: ignore[arg-type]
        assert (config.d_model, config.layers) == (width, layers)
    with pytest.raises(ValueError, match="no size 'huge'; there are tiny, small, base"):
        Config.sizes("huge")  # type: ignore[arg-type]


def test_flops_grow_with_the_length_alone_while_a_segment_does() -> None:
    model = LongNetLM(Config.sizes("tiny"))
    assert model.flops_per_token(256) > 6 * sum(p.numel() for p in model.blocks.parameters() if p.ndim > 1)
    assert model.flops_per_token(64) < model.flops_per_token(256) == model.flops_per_token(4096)
    branches = 64 / 1 + 256 / 16
    assert model.flops_per_token(256) - LongNetLM(
        Config.sizes("tiny", segments=(64,), rates=(1,))
    ).flops_per_token(256) == 6 * 2 * 128 * (branches - 64)


def test_branches_are_set_as_a_list() -> None:
    given = ["model.segments=[32, 128]", "model.rates=[1, 2]"]
    config = resolve(recipe("longnet-tiny"), None, given).model
    assert (config.segments, config.rates) == ((32, 128), (1, 2))  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"model.rates: expected a list of int, .* got '1,2'"):
        resolve(recipe("longnet-tiny"), None, ["model.rates=1,2"])


def test_it_is_trained_resumed_and_asked_to_write(tmp_path: Path) -> None:
    """The trainer, with its leak guard, from the recipe; a resumed run ends where a whole one does."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} lazy dogs and {n % 7} foxes\n" for n in range(800)))
    small = [f"model.{name}={list(v) if isinstance(v, tuple) else v}" for name, v in SMALL.items()]
    common = [
        *small, "train.max_seconds=0", "train.batch_size=2", "train.eval_rows=2", "train.log_every=1",
        "train.device=cpu", "select.tune=false", f"data.path={text}", "metrics.console=false",
        "optim.warmup=0", "optim.min_lr=1",
    ]  # fmt: skip

    def run(folder: str, steps: int, *more: str) -> list[float]:
        given = [*common, f"train.steps={steps}", f"train.run_dir={tmp_path / folder}", *more]
        train(resolve(recipe("longnet-tiny"), None, given), console=Console(file=io.StringIO()))
        rows = read_metrics(tmp_path / folder / "metrics.jsonl")
        return [row["loss"] for row in rows if row["event"] == "train"]

    whole = run("whole", 3)
    run("parts", 2, "train.leak_check=false")
    assert run("parts", 3, "train.leak_check=false") == whole
    model, config = load_run(tmp_path / "whole")
    assert isinstance(model, LongNetLM)
    assert config.recipe == "longnet-tiny"
    assert model.config == Config(**SMALL)
    assert model.generate(torch.tensor([[65]]), 12).shape == (1, 13)


def test_it_is_compared_with_equal_parameters() -> None:
    first, second = pair("longnet-tiny", "llm-med-tiny", steps=1)
    target = parameters(second.model)
    assert abs(parameters(match(first, target).model) - target) <= 0.02 * target
    assert recipe("longnet").model == Config.sizes("small")
    assert isinstance(RunConfig(model=Config()).model, Config)


# images ---------------------------------------------------------------------------------------------------

IMAGE: dict[str, Any] = {
    "shape": (8, 12), "patch": 2, "channels": 2, "d_model": 16, "layers": 2, "heads": 2, "segments": (4, 24),
    "rates": (1, 2), "classes": 5,
}  # fmt: skip
IMAGES: dict[str, dict[str, Any]] = {
    "classes": {},
    "tiles": {"order": "tile", "tile": 2},
    "cells": {"labels": "cell", "order": "morton"},
    "symbols": {"shape": (5, 7), "patch": 1, "channels": 0, "symbols": 9, "labels": "cell"},
    "volume": {"shape": (4, 4, 6), "kv_heads": 1, "order": "snake"},
}
EVERY_IMAGE = pytest.mark.parametrize("changes", IMAGES.values(), ids=IMAGES.keys())


def image_model(dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[ImageLongNet, Tensor, Tensor]:
    """A model far from its start, images and targets."""
    torch.manual_seed(0)
    config = ImageConfig(**{**IMAGE, **changes})
    model = ImageLongNet(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    images = torch.randn(3, config.channels, *config.shape, dtype=dtype)
    if config.symbols:
        images = torch.randint(config.symbols, (3, *config.shape))
    targets = torch.randint(config.classes, (3, *(config.grid if config.labels == "cell" else ())))
    return model.to(dtype), images, targets


@EVERY_IMAGE
def test_images_have_logits_a_loss_and_gradients(changes: dict[str, Any]) -> None:
    model, images, targets = image_model(torch.float32, **changes)
    logits, none = model(images)
    assert none is None
    assert logits.shape == (*targets.shape, 5)
    hidden, loss = model(images, targets)
    assert hidden is None
    torch.testing.assert_close(loss, -logits.log_softmax(-1).gather(-1, targets[..., None]).mean())
    check_gradients(model, loss)


@EVERY_IMAGE
def test_an_order_changes_nothing_where_attention_is_full(changes: dict[str, Any]) -> None:
    """Labels return to their cells, and places travel with them."""
    full = {**changes, "segments": (4096,), "rates": (1,), "tile": 0}
    model, images, _ = image_model(**{**full, "order": "row"})
    for order in ("tile", "snake", "morton", "hilbert"):
        other, _, _ = image_model(**{**full, "order": order})
        torch.testing.assert_close(other(images)[0], model(images)[0])


def test_a_cell_is_its_own_pixels_in_every_order() -> None:
    """Without attention's branch a cell's logits depend on its patch alone."""
    model, images, _ = image_model(labels="cell", order="hilbert")
    for block in model.blocks:
        block.attention.out.weight.data.zero_()
    other = images.clone()
    other[:, :, 2:4, 8:10] += 1  # the cell in row 1 and column 4
    moved = (model(images)[0] - model(other)[0]).abs().amax((0, 3)).nonzero()
    assert moved.tolist() == [[1, 4]]


def test_images_go_through_torch_compile_autocast_and_the_meta_device() -> None:
    model, images, targets = image_model(torch.float32, labels="cell")
    torch.compiler.reset()
    call = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    torch.testing.assert_close(call(images, targets)[1], model(images, targets)[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(model(images, targets)[1], model(images, targets)[1])
    with torch.device("meta"):
        empty = ImageLongNet(model.config)
        assert empty(torch.zeros(2, 2, 8, 12))[0].shape == (2, 4, 6, 5)
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    assert torch.equal(empty(images)[0], model(images)[0])


@pytest.mark.parametrize("order", ["hilbert", "row"])
def test_neighbours_in_the_grid_are_learned_from_where_the_order_brings_them_together(order: Any) -> None:
    """A cell's label is the colour of the one point in its own 4 x 4 corner: 16 cells in a row of a Hilbert
    curve. In row order 16 cells are two rows, which hold half of the points."""
    torch.manual_seed(0)
    shape = {**IMAGE, "shape": (8, 8), "patch": 1, "channels": 0, "symbols": 5, "labels": "cell"}
    branches = {"segments": (16,), "rates": (1,), "layers": 1, "d_model": 32}
    model = ImageLongNet(ImageConfig(**{**shape, **branches, "order": order}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def drawn() -> tuple[Tensor, Tensor]:
        colours = torch.randint(1, 5, (16, 2, 2, 1))
        corners = torch.zeros(16, 2, 2, 16, dtype=torch.long)
        corners.scatter_(3, torch.randint(16, colours.shape), colours)
        images = corners.view(16, 2, 2, 4, 4).transpose(2, 3).reshape(16, 8, 8)
        return images, colours[..., 0].repeat_interleave(4, 1).repeat_interleave(4, 2)

    for _ in range(60):
        optimizer.zero_grad()
        model(*drawn())[1].backward()
        optimizer.step()
    images, labels = drawn()
    with torch.no_grad():
        right = (model(images)[0].argmax(-1) == labels).float().mean().item()
    assert right > 0.97 if order == "hilbert" else right < 0.8


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"shape": (8,)}, ValueError, r"shape=\(8,\) must be 2 or 3 multiples of patch=2"),
        ({"shape": (8, 9)}, ValueError, "multiples of patch=2"),
        ({"shape": [8, 8]}, TypeError, "must be a tuple of int"),
        ({"symbols": 3}, ValueError, "one of them is above 0"),
        ({"channels": 0, "symbols": 3}, ValueError, "patch=2 must be 1"),
        ({"order": "random"}, ValueError, "order='random' must be one of row, tile"),
        ({"labels": "pixel"}, ValueError, "labels='pixel' must be one of image, cell"),
        ({"tile": 4}, ValueError, "tile=4 .* belongs to order='tile'"),
        ({"d_model": 4}, ValueError, "heads of 2 are too narrow: .* d_model=8 is enough"),
        ({"classes": 0}, ValueError, "classes=0 must be at least 1"),
        ({"rates": (1, 8)}, ValueError, "up to rate 4"),
    ],
)
def test_an_image_shape_that_contradicts_itself_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ImageConfig(**{**IMAGE, **changes})


def test_images_of_another_form_are_refused() -> None:
    model, images, targets = image_model(torch.float32)
    with pytest.raises(ValueError, match=r"images have shape \(3, 2, 8\), expected"):
        model(images[..., 0])
    with pytest.raises(TypeError, match=r"call images.float\(\)"):
        model(images.long())
    with pytest.raises(ValueError, match=r"targets have shape \(2,\), expected \(3,\)"):
        model(images, targets[:2])
    with pytest.raises(TypeError, match=r"targets are torch.float32"):
        model(images, targets.float())
    with pytest.raises(TypeError, match=r"config must be a bakeoff.models.longnet.image.ImageConfig"):
        ImageLongNet(Config(**SMALL))  # type: ignore[arg-type]
