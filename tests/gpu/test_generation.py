"""Text on a CUDA device: a graph a symbol gives what steps issued one by one give, and nothing waits."""

import pytest
import torch

from bakeoff.apps.bench.step import counted
from bakeoff.graphs import forbid_sync
from bakeoff.models import build, byte_spectral, llm_med, longnet, titan_mac
from bakeoff.select import using

CONFIGS = {
    "llm-med": llm_med.Config(d_model=64, layers=2, heads=4, kv_heads=2, max_seq_len=128),
    "llm-med-strong": llm_med.Config(
        d_model=64,
        layers=2,
        heads=4,
        kv_heads=2,
        max_seq_len=128,
        qk_norm=True,
        conv=4,
        ngrams=4,
        ngram_bits=10,
    ),
    "poles": byte_spectral.Config(d_model=64, layers=2, heads=4, window=16, max_seq_len=128),
    "taps": byte_spectral.Config(
        d_model=64,
        layers=3,
        heads=4,
        window=16,
        filter="taps",
        taps=20,
        attention_every=3,
        max_seq_len=128,
        qk_norm=True,
    ),
    "mac": titan_mac.Config(d_model=64, layers=2, heads=2, segment=16, persistent=3, chunk=8),
    "mag": titan_mac.Config(d_model=64, layers=2, heads=2, segment=16, persistent=3, chunk=8, variant="mag"),
    "lmm": titan_mac.Config(d_model=64, layers=2, heads=2, chunk=8, variant="lmm", learns="last"),
    "longnet": longnet.Config(
        d_model=64, layers=3, heads=4, kv_heads=2, segments=(8, 32), rates=(1, 3), max_seq_len=128
    ),
}
DRAWS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 3},
}
NEW = 150  # past the context of 128, through many segments and chunks


def model_of(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = build(CONFIGS[name]).cuda().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_graph_gives_the_same_text_bit_for_bit(name: str, draw: str) -> None:
    model = model_of(name)
    prompts = [torch.randint(256, (length,), device="cuda") for length in (20, 5, 33)]
    captured = model.generate(prompts, NEW, capture=True, **DRAWS[draw])
    with using(regime="graph"):
        plain = model.generate(prompts, NEW, capture=False, **DRAWS[draw])
    for prompt, one, two in zip(prompts, captured, plain, strict=True):
        assert one.shape == (len(prompt) + NEW,)
        assert torch.equal(one, two)
        assert len(one.unique()) > 3, "a text of one symbol would show little"


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_a_graph_are_those_of_the_whole_pass(name: str) -> None:
    model = model_of(name)
    prompt = torch.randint(256, (2, 30), device="cuda")
    text = model.generate(prompt, 90, temperature=0.0, capture=True)
    with torch.no_grad():
        logits = model(text[:, :-1])[0][:, 29:]
    chosen = logits.gather(-1, text[:, 30:, None])[..., 0]
    assert (logits.amax(-1) - chosen).max() < 2e-3 * logits.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_symbol_is_one_graph_and_no_wait(name: str) -> None:
    model = model_of(name)
    text = model.stream(torch.randint(256, (4, 12), device="cuda"), 80, seed=1, top_p=0.9)
    for _ in range(8):  # the prompt, the warm-up, the capture
        next(text)
    torch.cuda.synchronize()
    with forbid_sync():
        for _ in range(20):
            next(text)
    launches, kernels, syncs = counted(lambda: next(text), torch.device("cuda"))
    assert launches == 3  # the graph, and two that tell it where the generator is
    assert kernels > 10
    assert syncs == 0


@pytest.mark.parametrize("name", ["llm-med", "taps", "mac", "longnet"])
def test_sixteen_bits(name: str) -> None:
    model, prompt = model_of(name), torch.randint(256, (3, 20), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        text = model.generate(prompt, 80, temperature=0.0, capture=True)
        with using(regime="graph"):
            assert torch.equal(text, model.generate(prompt, 80, temperature=0.0, capture=False))
    if name != "mac":  # whose memory is kept in float32
        model.bfloat16().generate(prompt, 80, seed=0, capture=True)


def test_other_work_between_symbols_changes_nothing() -> None:
    model, prompt = model_of("llm-med"), torch.randint(256, (2, 9), device="cuda")
    alone = model.generate(prompt, 40, seed=5, capture=True)
    symbols = []
    for symbol in model.stream(prompt, 40, seed=5, capture=True):
        symbols.append(symbol.clone())
        torch.rand(1000, device="cuda")
        model(prompt)
    assert torch.equal(torch.stack(symbols, 1), alone[:, 9:])
