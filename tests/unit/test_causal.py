"""The leak guard: certain finds, rounding that is no leak, decoding, and what it leaves untouched."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bakeoff.causal import CausalityError, assert_causal
from bakeoff.causal.edits import Edits
from bakeoff.errors import BakeoffError
from bakeoff.models import byte_spectral
from bakeoff.models.llm_med import Config, LLMMed
from bakeoff.select import Candidate, Op, call, using
from tests.unit import zoo
from tests.unit.leak_zoo.body import Body, D, T, V, following
from tests.unit.leak_zoo.honest import Dropout, HardGate, Noisy, PaddedConvolution, Recurrent, RunningMean
from tests.unit.leak_zoo.leaks import BatchNorm, ClosedGate, Fourier, LeaksAfterTraining, MeanGate


def test_the_model_as_it_is_keeps_its_closed_gate() -> None:
    assert_causal(ClosedGate(), vocab=V, perturb=False)
    with pytest.raises(CausalityError):
        assert_causal(ClosedGate(), vocab=V)


class ChunkEnd(Body):
    """A scan in chunks whose last outputs take in the next chunk's first token."""

    chunk, widest = 8, 0

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        type(self).widest = max(self.widest, len(ids))
        ends = torch.arange(1, h.shape[1] + 1) % self.chunk == 0
        return following(h) * ends[:, None]


@pytest.mark.parametrize(
    ("chunk", "length"),
    [(1, 2), (40, 64), (63, 64), (100, 256), (300, 512), (1, 513), (100, 1024), (512, 1024)],
)
@pytest.mark.parametrize("how", ["perturbed", "as it is", "frozen"])
def test_a_leak_of_one_output_is_certain_to_be_found(
    chunk: int, length: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChunkEnd, "chunk", chunk)
    monkeypatch.setattr(ChunkEnd, "widest", 0)
    for seed in range(2):
        torch.manual_seed(seed)
        model = ChunkEnd().requires_grad_(how != "frozen")
        with pytest.raises(CausalityError, match="sees its future, at least 1 ahead") as caught:
            assert_causal(model, vocab=V, length=length, perturb=how != "as it is", seed=seed)
        assert (caught.value.position + 1) % chunk == 0
    assert ChunkEnd.widest <= 16


def test_single_places_are_all_or_the_multiples_of_a_power_of_two() -> None:
    steps = {2: 1, 512: 1, 513: 2, 1000: 4, 1024: 4, 2048: 16, 4096: 64, 2**17: 2048}
    for length, step in steps.items():
        edits = Edits(torch.zeros(2, length, dtype=torch.long), V, torch.Generator())
        places = edits.places()
        assert places.tolist() == list(range(step, length, step))
        if length <= 2048:
            assert len(places) * length <= 2**18
            rows = edits.rows[:1].expand(len(places), -1)
            assert torch.equal((edits.single(rows, places) != rows).nonzero()[:, 1], places)


def test_parts_keep_their_modes_through_the_update() -> None:
    model = BatchNorm().train()
    model.norm.eval()
    assert_causal(model, vocab=V, length=T)


@pytest.mark.parametrize("animal", [Body, PaddedConvolution, RunningMean, HardGate, Recurrent])
def test_bf16_rounding_is_no_leak_and_hides_none(animal: Callable[[], nn.Module]) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model, leaky = animal(), Fourier()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_causal(model, vocab=V, length=T, seed=seed)
            with pytest.raises(CausalityError):
                assert_causal(MeanGate(), vocab=V, length=T, seed=seed)
            with pytest.raises(CausalityError):
                assert_causal(leaky, vocab=V, length=T, seed=seed)
        if animal is not PaddedConvolution:
            assert_causal(model.bfloat16(), vocab=V, length=T, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    assert_causal(RunningMean().to(dtype), vocab=V, length=T)
    with pytest.raises(CausalityError):
        assert_causal(MeanGate().to(dtype), vocab=V, length=T)


def test_a_leak_beyond_the_length_needs_a_longer_row() -> None:
    class Far(Body):
        def mix(self, h: Tensor, ids: Tensor) -> Tensor:
            return h.roll(-20, 1) * (torch.arange(h.shape[1]) < h.shape[1] - 20)[:, None]

    assert_causal(Far(), vocab=V, length=5)  # and one row of 20
    with pytest.raises(CausalityError, match="in rows of 64, output"):
        assert_causal(Far(), vocab=V, length=16)
    with pytest.raises(CausalityError) as caught:
        assert_causal(Far(), vocab=V, length=48)
    assert (caught.value.position, caught.value.ahead) == (0, 20)


# Alarms that float64 confirms or denies


@pytest.mark.parametrize(
    ("kind", "noise", "seeds"),
    [
        *((kind, 1.0, 2) for kind in ("poles", "taps", "minimum_phase")),
        *(pytest.param(kind, noise, seeds, marks=pytest.mark.exhaustive)
          for kind in ("poles", "taps", "minimum_phase") for noise, seeds in ((0.0, 2), (0.5, 6), (1.0, 6))),
    ],
)  # fmt: skip
def test_rounding_that_a_transform_spreads_is_no_leak(kind: Any, noise: float, seeds: int) -> None:
    """Filters and gates far from their start: activations of one row differ in size a hundredfold."""
    config = byte_spectral.Config(
        d_model=16, layers=2, heads=2, max_seq_len=24, poles=3, window=8, bins=5, filter=kind
    )
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = byte_spectral.ByteSpectralLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * noise)
        assert_causal(model, length=20, seed=seed)


class Loud(PaddedConvolution):
    """A padded transform of rows with one token hundreds of times as large as others, and a small leak."""

    leak = 0.0

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        n, loud = h.shape[1], h * (1 + 300 * (ids == V - 1))[..., None]
        spectrum = torch.fft.rfft(self.filter[:n], n=2 * n, dim=0)
        y = torch.fft.irfft(torch.fft.rfft(loud, n=2 * n, dim=1) * spectrum, n=2 * n, dim=1)[:, :n]
        return y / (1e-6 + y.abs().amax(-1, keepdim=True)) + self.leak * following(h)


def test_a_leak_below_the_rounding_is_found_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(V - 1, (4, T))
    ids[:, -1] = V - 1
    for seed in range(3):
        torch.manual_seed(seed)
        model = Loud()
        assert_causal(model, ids, vocab=V, perturb=False, seed=seed)
        model.leak = 1e-4
        with pytest.raises(CausalityError, match="sees its future"):
            assert_causal(model, ids, vocab=V, perturb=False, seed=seed)
    model.leak = 0.0
    monkeypatch.setattr("bakeoff.causal.checks.confirmed", lambda *_: "")
    with pytest.raises(CausalityError):
        assert_causal(model, ids, vocab=V, perturb=False)  # float32 alone raises it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_leak_of_one_dtype_is_a_leak(dtype: torch.dtype) -> None:
    class Low(Body):
        def mix(self, h: Tensor, ids: Tensor) -> Tensor:
            return h + following(h) * (h.dtype == dtype)

    with pytest.raises(CausalityError, match="sees its future") as caught:
        assert_causal(Low().to(dtype), vocab=V, length=T)
    assert ("its float64 copy changes by 0, so this is float32's own" in str(caught.value)) == (
        dtype == torch.float32
    )


class ByOp(Loud):
    """Scales by an op of bakeoff, some of whose candidates leak in float32."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = (op,)  # as deep copies of a model copy an op, too

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return super().mix(h, ids) + call(self.op[0], h, torch.ones_like(h[0, 0]), None)


def test_a_leak_of_a_kernel_that_takes_no_float64_is_found() -> None:
    def low(x: Tensor, w: Tensor, flag: Any) -> Tensor:
        return torch.tanh(x + 1e-4 * following(x)) * w

    def clean(x: Tensor, w: Tensor, flag: Any) -> Tensor:
        return torch.tanh(x) * w

    def single(case: Any) -> str | None:
        return None if case.x.dtype == torch.float32 else "takes float32 alone"

    op = zoo.op(Candidate("low", low, supports=single), Candidate("clean", clean, supports=single))
    torch.manual_seed(0)
    quiet, loud = torch.randint(V - 1, (4, T)), torch.randint(V - 1, (4, T))
    loud[:, -1] = V - 1
    with zoo.registered(op):
        with using(zoo="clean"):
            assert_causal(ByOp(op), quiet, vocab=V - 1, perturb=False)
            assert_causal(ByOp(op), loud, vocab=V, perturb=False)
        with (
            using(zoo="low"),
            pytest.raises(CausalityError, match="the copy ran plain PyTorch, the model zoo by low") as caught,
        ):
            assert_causal(ByOp(op), quiet, vocab=V - 1, perturb=False)
        assert "its float64 copy changes by" in str(caught.value)


def test_a_model_that_takes_no_float64_is_judged_without_it() -> None:
    class Single(Fourier):
        def mix(self, h: Tensor, ids: Tensor) -> Tensor:
            return super().mix(h, ids) @ torch.eye(D)

    with pytest.raises(
        CausalityError, match="its float64 copy, to tell a leak from rounding, fails: Runtime"
    ):
        assert_causal(Single(), vocab=V, length=T)


# The language model: whole pass and decode


def tiny(**changes: Any) -> LLMMed:
    return LLMMed(Config(vocab=V, d_model=32, layers=2, heads=2, max_seq_len=T, **changes))


def test_llm_med_is_causal() -> None:
    assert_causal(tiny(dropout=0.1, kv_heads=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_causal(tiny())


class LateCache(LLMMed):
    """Decodes every piece one position too late."""

    def decode(self, ids: Tensor, cache: Any) -> Tensor:
        shifted = cache.length > 0
        cos, sin = self.cos, self.sin
        if shifted:
            self.cos, self.sin = self.cos.roll(-1, 0), self.sin.roll(-1, 0)
        try:
            return super().decode(ids, cache)
        finally:
            self.cos, self.sin = cos, sin


class OwnGenerate(Body):
    """Generates without a `decode`, by the likeliest token; `forgets` all but the last token."""

    forgets = False

    def build(self) -> None:
        self.rnn = nn.GRU(D, D, batch_first=True)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.rnn(h)[0]

    def generate(self, prompt: Tensor, max_new: int, temperature: float = 1.0) -> Tensor:
        for _ in range(max_new):
            logits = self(prompt[:, -1:] if self.forgets else prompt)[:, -1]
            prompt = torch.cat([prompt, logits.argmax(-1, keepdim=True)], dim=1)
        return prompt


def test_decode_that_differs_from_the_whole_pass() -> None:
    late = LateCache(tiny().config)
    with pytest.raises(CausalityError, match="decoding differs") as caught:
        assert_causal(late)
    assert caught.value.position == T // 2  # the prompt is right, the first step is not
    assert_causal(late, check_decode=False)


def test_a_model_without_decode_is_judged_by_the_tokens_it_chooses() -> None:
    model = OwnGenerate()
    assert_causal(model, vocab=V, length=T)
    model.forgets = True
    with pytest.raises(CausalityError, match="decoding differs"):
        assert_causal(model, vocab=V, length=T)


# What stays untouched, and bad input


@pytest.mark.parametrize("animal", [Dropout, LeaksAfterTraining, Noisy])
def test_the_model_and_the_random_state_stay_as_they_were(animal: Callable[[], nn.Module]) -> None:
    model = animal()
    model.train()
    model.head.eval()  # a flag of one part, too
    model(torch.zeros(1, T, dtype=torch.long)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    flags = [module.training for module in model.modules()]
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
    expected = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
    try:
        assert_causal(model, vocab=V)
    except CausalityError:
        assert animal is LeaksAfterTraining
    found = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    assert torch.equal(expected[0], found[0])
    assert expected[1:] == found[1:]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert flags == [module.training for module in model.modules()]


def test_inside_inference_mode_and_with_tied_frozen_and_compiled_parts() -> None:
    tied = Body()
    tied.head.weight = tied.embed.weight
    with torch.inference_mode():
        assert_causal(tied, vocab=V)
    assert_causal(tied.requires_grad_(False), vocab=V)
    ran = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal ran
            ran += 1
            return graph(*args)

        return call

    compiled = torch.compile(RunningMean(), backend=backend)
    ids = torch.zeros(2, T, dtype=torch.long)
    compiled(ids)
    assert_causal(compiled, vocab=V)
    assert ran == 1
    compiled(ids)
    assert ran == 2  # and it is still compiled


def test_what_cannot_be_judged_is_said() -> None:
    class Unseeded(Body):
        source = torch.Generator()

        def mix(self, h: Tensor, ids: Tensor) -> Tensor:
            return torch.randn(h.shape, generator=type(self).source)

    class Broken(Body):
        def mix(self, h: Tensor, ids: Tensor) -> Tensor:
            return h / 0 * 0

    class Short(Body):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids)[:, 1:]

    with pytest.raises(BakeoffError, match="two equal passes"):
        assert_causal(Unseeded(), vocab=V)
    with pytest.raises(BakeoffError, match="not finite"):
        assert_causal(Broken(), vocab=V)
    with pytest.raises(ValueError, match="logits have shape"):
        assert_causal(Short(), vocab=V)
    with pytest.raises(TypeError, match="expected logits"):
        assert_causal(type("Silent", (Body,), {"forward": lambda self, ids: (None, None)})(), vocab=V)


@pytest.mark.parametrize(
    ("ids", "settings", "says"),
    [
        (torch.zeros(4), {}, "expected integers"),
        (torch.zeros(1, 1, dtype=torch.long), {}, "T >= 2"),
        (torch.full((1, 4), V), {"vocab": V}, "outside of vocab=32"),
        (None, {"samples": 0}, "samples=0"),
        (None, {"length": 1}, "length=1"),
    ],
)
def test_bad_arguments(ids: Tensor | None, settings: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        assert_causal(Body(), ids, **settings)
