"""What models and memories refuse of symbols, prompts, caches and states, and what they say to do."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from bakeoff import models
from bakeoff.models import byte_spectral, llm_med, longnet, titan_mac
from bakeoff.models.longnet import ImageConfig, ImageLongNet
from bakeoff.nn import NeuralMemory

MEMORY: dict[str, Any] = {"d_model": 16, "layers": 2, "heads": 2, "segment": 8, "chunk": 4, "persistent": 2}
BYTES: dict[str, Any] = {"d_model": 16, "layers": 2, "heads": 2, "max_seq_len": 24, "window": 5, "bins": 3}
ROWS: dict[str, Any] = {"d_model": 16, "layers": 2, "heads": 2, "max_seq_len": 24}
CONFIGS: dict[str, Any] = {
    **{name: titan_mac.Config(**MEMORY, variant=name) for name in ("mac", "mag", "lmm")},
    "mag, no memory": titan_mac.Config(**MEMORY, variant="mag", memory=False),
    "poles": byte_spectral.Config(**BYTES),
    "taps": byte_spectral.Config(**BYTES, filter="taps", attention_every=2, ngrams=2, ngram_bits=4),
    "llm-med": llm_med.Config(**ROWS, vocab=100, ngrams=2, ngram_bits=4),
    "longnet": longnet.Config(**ROWS, segments=(8, 16), rates=(1, 2)),
}
EVERY = pytest.mark.parametrize("name", CONFIGS)


def model_of(name: str) -> tuple[Any, Tensor]:
    return models.build(CONFIGS[name]), torch.randint(90, (2, 12))


def refuses(error: type[Exception], message: str) -> Any:
    return pytest.raises(error, match=re.escape(message))


@EVERY
def test_what_lies_on_another_device(name: str) -> None:
    model, ids = model_of(name)
    away = ids.to("meta")
    with refuses(ValueError, "ids are on meta, the model on cpu: call ids.to('cpu')"):
        model(away)
    with refuses(ValueError, "targets are on meta, the model on cpu: call targets.to('cpu')"):
        model(ids, away)
    with refuses(ValueError, "ids are on meta, the model on cpu"):
        model.decode(away, model.make_cache())
    with refuses(ValueError, "prompt are on meta, the model on cpu: call prompt.to('cpu')"):
        model.stream(away, 3)
    with refuses(ValueError, "prompt[0] are on meta, the model on cpu"):
        model.generate([*away], 3)
    empty = models.build(CONFIGS[name]).to("meta")
    with refuses(
        ValueError, "without data: call model.to_empty(device='cpu'), then model.reset_parameters()"
    ):
        empty(ids)
    for settled in (False, True):
        cache = model.make_cache()
        model.decode(ids, cache)
        if settled:
            cache.settle(model)
        with refuses(ValueError, "the cache is on cpu, ids and model on meta: begin with a new Cache"):
            empty.decode(away[:, :1], cache)


@EVERY
def test_parameters_of_one_model_in_another_without_data(name: str) -> None:
    """As for ensembles; where positions are tables, buffers are given, too."""
    model, ids = model_of(name)
    empty = models.build(CONFIGS[name]).to("meta")
    given = dict(model.named_parameters())
    tables = dict(model.named_buffers())
    assert torch.equal(torch.func.functional_call(empty, {**given, **tables}, (ids,))[0], model(ids)[0])
    if name in ("lmm", "poles"):
        assert torch.equal(torch.func.functional_call(empty, given, (ids,))[0], model(ids)[0])


@EVERY
def test_values_that_are_no_symbols(name: str) -> None:
    model, ids = model_of(name)
    last = model.config.vocab - 1
    for wrong in (-1, -100, last + 1, 2**31 - 1):
        for dtype in (torch.int32, torch.int64):
            other = ids.to(dtype)
            other[1, 3] = wrong
            with refuses(IndexError, f"ids hold {wrong}: this model takes 0 to {last}"):
                model(other)
            with refuses(IndexError, f"prompt hold {wrong}: this model takes 0 to {last}"):
                model.stream(other, 3)
            with refuses(IndexError, f"prompt[1] hold {wrong}: this model takes 0 to {last}"):
                model.generate([*other], 3)
    cache = model.make_cache()
    with refuses(IndexError, "ids hold 256"):
        model.decode(ids.fill_(256), cache)
    assert not cache.length
    with refuses(IndexError, f"targets hold 256: this model takes 0 to {last}, or -100 where none counts"):
        model(ids * 0, ids)
    assert model(ids * 0, (ids * 0).index_fill(1, torch.tensor([2]), -100))[1].isfinite()


def test_bytes_that_are_no_targets_of_a_small_vocabulary() -> None:
    """In uint8 -100 is 156, which then counts."""
    model = models.build(llm_med.Config(d_model=16, layers=1, heads=2, max_seq_len=8, vocab=100))
    ids = torch.zeros(1, 4, dtype=torch.uint8)
    for wrong in (100, 156):
        with refuses(IndexError, f"targets hold {wrong}: this model takes 0 to 99"):
            model(ids, ids + wrong)
    assert model(ids, ids + 99)[1].isfinite()


@EVERY
def test_no_rows_and_other_dtypes(name: str) -> None:
    model, ids = model_of(name)
    for empty in (ids[:0], ids[:, :0]):
        with refuses(ValueError, "no symbols: give at least one row of one"):
            model(empty)
        with refuses(ValueError, "no symbols: give at least one row of one"):
            model.stream(empty, 2)
    for dtype in (torch.float32, torch.bool, torch.int16):
        with refuses(TypeError, f"ids are {dtype}, expected uint8, int32 or int64: call ids.long()"):
            model(ids.to(dtype))


def test_a_memory_takes_tensors_like_its_parameters() -> None:
    memory, x = NeuralMemory(16, heads=2, chunk=4), torch.randn(2, 7, 16)
    _, state = memory(x)
    with refuses(ValueError, "x is on meta, the parameters on cpu: move one with .to(device)"):
        memory(x.to("meta"))
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        with refuses(TypeError, f"x is {dtype}, the parameters are torch.float32: cast one with .to(dtype)"):
            memory(x.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        memory(x.bfloat16(), state)
    with refuses(ValueError, "the state is on meta, expected cpu: call state.to('cpu')"):
        memory(x, state.to("meta"))
    for rows in ([True, False], torch.tensor([1, 0]), torch.tensor([[True], [False]])):
        with refuses(TypeError, "rows must be a bool tensor [B]"):
            memory.reset(state, rows)  # type: ignore[arg-type]


def test_images_and_classes() -> None:
    shape: dict[str, Any] = {"shape": (8, 8), "d_model": 16, "layers": 2, "heads": 2, "segments": (8, 16)}
    symbols = ImageLongNet(ImageConfig(**shape, rates=(1, 2), channels=0, symbols=5))
    images = torch.zeros(2, 8, 8, dtype=torch.long)
    with refuses(IndexError, "images hold 5: this model takes 0 to 4"):
        symbols(images + 5)
    with refuses(IndexError, "targets hold 10: this model takes 0 to 9, or -100 where none counts"):
        symbols(images, torch.tensor([3, 10]))
    pixels = ImageLongNet(ImageConfig(**shape, rates=(1, 2)))
    for model, away in ((symbols, images.to("meta")), (pixels, torch.zeros(2, 3, 8, 8, device="meta"))):
        with refuses(ValueError, "images are on meta, the model on cpu: call images.to('cpu')"):
            model(away)
    encoder = models.build(byte_spectral.Config(**BYTES, bidirectional=True, classes=3))
    with refuses(IndexError, "targets hold 3: this model takes 0 to 2"):
        encoder(images[0], torch.full((8,), 3))
