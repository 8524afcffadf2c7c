"""Text, symbol by symbol: settled caches, prompts of unequal length, sampling, standard input."""

import io
import itertools
import re
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from bakeoff.apps.cli import generating
from bakeoff.graphs import NotCapturable
from bakeoff.models import build, byte_spectral, llm_med, longnet, titan_mac
from bakeoff.models.generation import sample

LONG = 37
MIXING = {
    "attention": llm_med.Config(d_model=32, layers=2, heads=4, kv_heads=2, max_seq_len=40, logit_cap=5.0),
    "every rung": llm_med.Config(
        d_model=32, layers=2, heads=4, max_seq_len=40, qk_norm=True, conv=4, ngrams=5, ngram_bits=8
    ),
    "poles": byte_spectral.Config(d_model=16, layers=2, heads=2, max_seq_len=40, window=9),
    "wide encoder": byte_spectral.Config(
        d_model=16, layers=2, max_seq_len=40, window=9, channels=2, features="complex", ngrams=4, ngram_bits=8
    ),
    "taps": byte_spectral.Config(
        d_model=16, layers=3, heads=2, max_seq_len=40, window=9, filter="taps", taps=7, attention_every=2
    ),
    "minimum_phase": byte_spectral.Config(
        d_model=16, layers=1, heads=2, max_seq_len=40, window=1, filter="minimum_phase", taps=7
    ),
    "dilated": longnet.Config(
        d_model=32, layers=3, heads=4, kv_heads=2, segments=(4, 16, 32), rates=(1, 3, 5), max_seq_len=40
    ),
    "dilated, gaps": longnet.Config(
        d_model=32, layers=2, heads=4, segments=(5, 16), rates=(2, 4), max_seq_len=LONG
    ),
}


def memory(**changes: Any) -> titan_mac.Config:
    return titan_mac.Config(d_model=16, layers=2, heads=2, segment=8, chunk=4, **{"persistent": 3, **changes})


MIXING |= {
    "mac": memory(),
    "mac, last": memory(learns="last", gate="segment", persistent=0),
    "mac without": memory(memory=False),
    "mag": memory(variant="mag"),
    "mag without": memory(variant="mag", memory=False, persistent=0),
    "lmm": memory(variant="lmm", learns="last"),
}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model = build(MIXING[name]).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", MIXING)
@torch.no_grad()
def test_a_settled_cache_goes_on_as_the_whole_pass(name: str) -> None:
    model, ids = model_of(name), torch.randint(256, (2, LONG))
    whole = model(ids)[0]
    for cut in (1, 8, 20):
        cache = model.make_cache(LONG)
        pieces = [model.decode(ids[:, :cut], cache)]
        cache.settle(model)
        at = [t.data_ptr() for t in (*cache.state().values(), *cache.buffers())]
        pieces += [model.decode(symbol, cache) for symbol in ids[:, cut:].split(1, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-12, rtol=0)
        assert at == [t.data_ptr() for t in (*cache.state().values(), *cache.buffers())]
        assert cache.length == cache.at == LONG


@pytest.mark.parametrize("name", ["attention", "taps", "poles", "dilated", "mac", "mag", "lmm"])
def test_prompts_of_unequal_length_go_on_as_alone(name: str) -> None:
    """Past the context, too, where there is one."""
    model = model_of(name)
    prompts = [torch.randint(256, (length,)) for length in (3, 11, 1)]
    for prompt, text in zip(prompts, model.generate(prompts, 45, temperature=0.0), strict=True):
        assert torch.equal(text, model.generate(prompt[None], 45, temperature=0.0)[0])
        assert torch.equal(text[: len(prompt)], prompt)


def test_prompts_longer_than_the_context() -> None:
    model = model_of("attention")
    prompts = [torch.randint(256, (length,)) for length in (3, 50)]
    short, long = model.generate(prompts, 4, temperature=0.0)
    assert torch.equal(long, model.generate(prompts[1][None], 4, temperature=0.0)[0])
    assert torch.equal(short, model.generate(prompts[0][None], 4, temperature=0.0)[0])
    assert [len(row) for row in model.generate(prompts, 0)] == [3, 50]


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, "prompt holds no rows"),
        (
            [torch.zeros(3, dtype=torch.long), torch.zeros(0, dtype=torch.long)],
            ValueError,
            r"prompt\[1\] has",
        ),
        (
            [torch.zeros(1, 3, dtype=torch.long)],
            ValueError,
            r"prompt\[0\] has shape \(1, 3\), expected \[T\]",
        ),
        ([torch.zeros(3)], TypeError, r"prompt\[0\] are torch.float32"),
        (["text"], TypeError, r"prompt\[0\] must be a tensor"),
        (
            [torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long, device="meta")],
            ValueError,
            r"prompt\[1\] are on meta, the model on cpu: call prompt\[1\].to",
        ),
    ],
)
def test_prompts_that_are_refused(prompt: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        model_of("attention").generate(prompt, 3)


def test_a_generator_is_no_number() -> None:
    with pytest.raises(TypeError, match=r"generator must be a torch.Generator, got int: give seed="):
        model_of("attention").stream(torch.zeros(1, 3, dtype=torch.long), 3, generator=7)


@pytest.mark.parametrize("name", ["attention", "every rung", "taps"])
@torch.no_grad()
def test_a_piece_that_finds_no_room_leaves_the_cache_as_it_was(name: str) -> None:
    model, ids = model_of(name), torch.randint(256, (2, 8))
    cache = model.make_cache(8)
    first = model.decode(ids[:, :6], cache)
    with pytest.raises(ValueError, match=r"9 positions are more .* capacity of 8: .*make_cache\(9\)"):
        model.decode(ids[:, :3], cache)
    found = torch.cat([first, model.decode(ids[:, 6:], cache)], dim=1)
    assert torch.allclose(found, model(ids)[0], atol=1e-9)
    cache.settle(model)
    with pytest.raises(ValueError, match="9 positions are more than the cache's capacity of 8"):
        model.decode(ids[:, :1], cache)


@pytest.mark.parametrize("name", ["attention", "poles", "taps", "dilated", "mac", "mag", "lmm"])
@torch.no_grad()
def test_a_settled_cache_takes_one_symbol_a_call(name: str) -> None:
    model, ids = model_of(name), torch.randint(256, (2, 9))
    cache = model.make_cache()
    with pytest.raises(ValueError, match="empty cache can't be settled: decode the first symbols"):
        cache.settle(model)
    found = [model.decode(ids[:, :5], cache)]
    cache.settle(model)
    with pytest.raises(ValueError, match="ids have 3 symbols a row, and a settled cache takes one a call"):
        model.decode(ids[:, 5:8], cache)
    found += [model.decode(ids[:, at : at + 1], cache) for at in range(5, 9)]
    assert torch.allclose(torch.cat(found, dim=1), model(ids)[0], atol=1e-9)


@pytest.mark.parametrize("name", ["attention", "poles", "dilated", "mac"])
def test_capacities_that_are_refused(name: str) -> None:
    model = model_of(name)
    for capacity in (0, -1):
        with pytest.raises(ValueError, match=f"capacity={capacity} must be at least 1, or None"):
            model.make_cache(capacity)
    with pytest.raises(TypeError, match=r"capacity=2.5 must be an int"):
        model.make_cache(2.5)


def test_a_graph_needs_a_cuda_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(NotCapturable, match="needs CUDA"):
        model_of("attention").generate(torch.zeros(1, 3, dtype=torch.long), 3, capture=True)


def test_the_callers_gradients_and_modes_stay() -> None:
    model, prompt = model_of("poles"), torch.randint(256, (1, 3))
    for _ in model.stream(prompt, 5):
        assert torch.is_grad_enabled()
    with torch.inference_mode():
        text = model.stream(prompt, 9, temperature=0.0)
        begun = [int(next(text)) for _ in range(4)]
    whole = begun + [int(symbol) for symbol in text]
    assert whole == model.generate(prompt, 9, temperature=0.0)[0, 3:].tolist()


def test_symbols_are_drawn_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).expand(20_000, -1)
    generator = torch.Generator().manual_seed(0)
    drawn = sample(logits, temperature=2.0, generator=generator).bincount(minlength=4) / 20_000
    torch.testing.assert_close(drawn, (logits[0] / 2).softmax(-1), atol=0.015, rtol=0)
    assert sample(logits, top_p=0.6, generator=generator).unique().tolist() == [2]
    assert sample(logits, top_k=2, generator=generator).unique().tolist() == [1, 2]


@pytest.mark.parametrize("count", [0, 1, 4, 5, 12])
def test_symbols_are_read_behind_the_ones_that_are_issued(count: int) -> None:
    issued = []

    def symbols() -> Any:
        for number in range(count):
            issued.append(number)
            yield torch.tensor([number])

    read = generating._read(symbols(), 4)
    for number in range(count):
        assert next(read) == number
        assert len(issued) >= min(count, 4 + number // 4 * 4 + (count > 4) * 4)
    assert list(read) == []


def test_the_documents_example_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "generation.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(example, {})


def test_a_prompt_from_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    model = model_of("poles").float()
    monkeypatch.setattr(generating, "load_run", lambda run: (model, None))
    given = "naïve\n".encode() + b"\xff"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    generating.stream(generating.Path("run"), "-", 5, "cpu", seed=0)
    out = capsys.readouterr().out
    assert out.startswith("naïve\n\ufffd")
    ids = torch.tensor([list(given)])
    expected = model.generate(ids, 5, seed=0)[0, -5:].tolist()
    shown = "".join(itertools.islice(generating.continuation(model, given, 5, seed=0), 6))
    assert out[7:] == shown + "\n"
    assert len(expected) == 5


def test_a_character_begun_by_the_prompt_is_shown_whole(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    class Parrot(torch.nn.Linear):
        def stream(self, ids: Any, max_new: int, **sampling: Any) -> Any:
            yield from (torch.tensor([byte]) for byte in "€".encode()[1:] + b"!")

    monkeypatch.setattr(generating, "load_run", lambda run: (Parrot(1, 1), None))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("5 €".encode()[:-2])))
    generating.stream(generating.Path("run"), "-", 3, "cpu")
    assert capsys.readouterr().out == "5 €!\n"


def test_a_closed_standard_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(click.UsageError, match="--prompt -: standard input is closed"):
        generating.stream(generating.Path("run"), "-", 3, "cpu")
