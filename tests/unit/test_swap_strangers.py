"""swap on what its users bring: own norms, embeddings and adapters, patched classes, models of two halves."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import bakeoff
from bakeoff.errors import SwapError
from tests.unit.families import built
from tests.unit.swapped import V, gradients, made, tokens

pytestmark = pytest.mark.usefixtures("one_thread")


def swapped(model: nn.Module, **wishes: Any) -> Any:
    return bakeoff.swap(model, quiet=True, **wishes)


def reasons(model: nn.Module, kind: str) -> set[str]:
    return {one.reason for one in swapped(model).left if one.kind == kind}


class HalfNorm(modeling_llama.LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) * 0.5
        return out


class EvaluationNorm(HalfNorm):
    def forward(self, x: Tensor) -> Tensor:
        out = modeling_llama.LlamaRMSNorm.forward(self, x)
        return out if self.training else out + 1


class WideNorm(HalfNorm):
    def forward(self, x: Tensor) -> Tensor:
        return modeling_llama.LlamaRMSNorm.forward(self, x.float())  # type: ignore[no-any-return]


class RowsNorm(HalfNorm):
    def forward(self, x: Tensor) -> Tensor:
        return modeling_llama.LlamaRMSNorm.forward(self, x) if x.dim() == 3 else x


class GatedNorm(HalfNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        out = modeling_llama.LlamaRMSNorm.forward(self, x)
        return out if gate is None else out * F.silu(gate)


class Unnamed(modeling_llama.LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-1, 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (HalfNorm, "is neither x / rms(x) * weight"),
        (Unnamed, "is neither x / rms(x) * weight"),
        (EvaluationNorm, "is neither x / rms(x) * weight"),
        (WideNorm, "something else at other dtypes"),
        (RowsNorm, "something else at other dtypes or numbers of dimensions"),
        (GatedNorm, "also takes gate"),
    ],
)
def test_other_mathematics_under_the_name_of_a_norm_stays(cls: type[nn.Module], reason: str) -> None:
    (found,) = reasons(cls(8), "norms")  # type: ignore[call-arg]
    assert reason in found
    with pytest.raises(SwapError, match="norms is required"):
        swapped(cls(8), norms="require")  # type: ignore[call-arg]


def test_a_parametrised_norm_says_so() -> None:
    norm = modeling_llama.LlamaRMSNorm(8)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())
    assert reasons(norm, "norms") == {"its weight is computed, by torch.nn.utils.parametrize"}


def test_tables_of_somebody_else_s_embedding_stay() -> None:
    class OtherTables(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, position_ids: Tensor) -> Any:
            cos, sin = self.inner(x, position_ids)
            return cos + torch.linspace(0, 0.3, cos.shape[-1]), sin

    model, ids = made("llama"), tokens()
    model.model.rotary_emb = OtherTables(model.model.rotary_emb)
    want = model(input_ids=ids).logits
    report = swapped(model)
    assert {one.reason for one in report.left} == {
        "its tables may come from OtherTables, which is not of its file"
    }
    torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-4, atol=1e-4)


def test_a_turn_of_the_last_elements_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_llama.apply_rotary_pos_emb

    def last(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        still = q.shape[-1] - cos.shape[-1]
        turned = own(q[..., still:], k[..., still:], cos, sin, unsqueeze_dim)
        return tuple(torch.cat([x[..., :still], y], -1) for x, y in zip((q, k), turned, strict=True))

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", last)
    assert reasons(made("llama"), "rotary") == {
        "apply_rotary_pos_emb does not turn the pairs (i, i + R/2) of the first R elements"
    }


@pytest.mark.parametrize("patched", ["forward", "global"])
def test_what_is_patched_between_two_swaps_is_seen(patched: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, own = tokens(), modeling_llama.apply_rotary_pos_emb
    cls, forward = modeling_llama.LlamaAttention, modeling_llama.LlamaAttention.forward
    swapped(made("llama"), rotary=False).undo()

    @functools.wraps(forward)
    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        out, *more = forward(self, *args, **kwargs)
        return out * 2, *more

    with monkeypatch.context() as patch:
        if patched == "forward":
            patch.setattr(cls, "forward", doubled)
        else:
            patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_: own(q * 0.5, k, *_))
        want = made("llama")(input_ids=ids).logits
        model = made("llama")
        swapped(model, rotary=False, attention="require")
        torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-4, atol=1e-4)
    model, want = made("llama"), made("llama")(input_ids=ids).logits
    swapped(model, rotary=False)
    torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-4, atol=1e-4)


class Adapted(nn.Module):
    """A frozen projection with a low-rank adapter in float32, as PEFT makes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.full((base.in_features, 2), 0.02))
        self.up = nn.Parameter(torch.full((2, base.out_features), 0.02))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x.float() @ self.down @ self.up
        return out


@pytest.mark.parametrize("before", [True, False])
def test_adapters_in_a_wider_dtype(before: bool) -> None:
    """Put in before the swap or after it; one of gate and up, and of queries, keys and values, is wider."""
    both, ids = [made("llama").bfloat16(), made("llama").bfloat16()], tokens()
    for number, model in enumerate(both):
        if number and not before:
            swapped(model)
        for layer in model.model.layers:
            layer.mlp.gate_proj = Adapted(layer.mlp.gate_proj)
            layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
        model.lm_head = Adapted(model.lm_head)
        if number and before:
            report = swapped(model, mlp="require")
            assert any("strangers.Adapted, not a plain" in one.reason for one in report.left)
    results = []
    for model in both:
        with torch.autocast("cpu", torch.bfloat16):
            results.append(gradients(model, input_ids=ids, labels=ids))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=2e-2, atol=2e-2)
    assert results[1][1].keys() == results[0][1].keys()


def test_a_wider_gate_widens_the_product() -> None:
    mlp = made("llama", num_hidden_layers=1).model.layers[0].mlp
    mlp.gate_proj.double()
    mlp.down_proj.double()
    mlp.gate_proj.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    x = torch.randn(2, 64)
    want = mlp(x)
    swapped(mlp, mlp="require")
    torch.testing.assert_close(mlp(x), want)


def test_a_layer_named_after_its_attention_is_none() -> None:
    report = swapped(built("jamba"), attention="require")
    assert [held.cls.__name__ for held in report.replaced.values() if "attention" in held.calls] == [
        "JambaAttention"
    ]


def test_layers_that_turn_nothing_say_so() -> None:
    report = swapped(built("smollm3"))
    assert [one.name for one in report.left if one.kind == "rotary"] == ["model.layers.1.self_attn"]
    with pytest.raises(SwapError, match=r"calls no apply_rotary_pos_emb in this layer"):
        swapped(built("deepseek_v3"), rotary="require")
    with pytest.raises(SwapError, match=r"the model has no RotaryEmbedding"):
        swapped(built("granitemoehybrid"), rotary="require")


@pytest.mark.parametrize("family", ["falcon", "mamba2"])
def test_tuples_by_the_configuration_keep_the_model_s_own_loss(family: str) -> None:
    model, ids = built(family), tokens()
    model.config.return_dict = False
    want = model(input_ids=ids, labels=ids, return_dict=None)[0]
    swapped(model, loss="require")
    out = model(input_ids=ids, labels=ids, return_dict=None)
    assert isinstance(out, tuple)
    torch.testing.assert_close(out[0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_mixture_s_balancing_loss_is_added(family: str) -> None:
    model, ids = built(family, output_router_logits=True, router_aux_loss_coef=0.5), tokens()
    want = gradients(model, input_ids=ids, labels=ids)
    report = swapped(model, loss="require")
    got = gradients(model, input_ids=ids, labels=ids)
    assert report.calls()["loss"] == 1
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    for name, grad in want[1].items():
        assert (got[1][name] - grad).norm() <= 1e-4 * grad.norm() + 1e-6, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_loss_has_the_library_s_dtype(dtype: torch.dtype) -> None:
    for family in ("llama", "mamba2"):  # the second widens its logits to float32
        model, ids = built(family).to(dtype), tokens()
        want = model(input_ids=ids, labels=ids).loss
        swapped(model, loss="require")
        got = model(input_ids=ids, labels=ids).loss
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-6 if dtype == torch.float64 else 2e-2, atol=0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8},
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 8,
         "short_factor": [1.1] * 8, "long_factor": [2.3] * 8},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_scaled_positions(rope: dict[str, Any]) -> None:
    """Short, beyond the length that tables were made for, and short again."""
    model, report = made("llama", rope_parameters={"rope_theta": 1e4, **rope}), None
    batches = [tokens(), tokens(length=70), tokens()]
    want = [gradients(model, input_ids=ids, labels=ids) for ids in batches]
    report = swapped(model, rotary="require")
    for ids, (loss, grads) in zip(batches, want, strict=True):
        got = gradients(model, input_ids=ids, labels=ids)
        torch.testing.assert_close(got[0], loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1], grads, rtol=1e-3, atol=1e-4)
    assert report.calls()["rotary"] == 6


def test_models_of_an_encoder_and_a_decoder() -> None:
    config = transformers.T5Config(
        vocab_size=V, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    report = swapped(transformers.T5ForConditionalGeneration(config), norms="require")
    report.verify(input_ids=tokens(), labels=tokens())
    assert {one.reason for one in report.left if one.kind == "attention"} == {
        "it looks at later positions, too",
        "it adds a bias to its scores",
    }


def test_other_models_with_labels_and_a_head_say_so() -> None:
    config = transformers.T5Config(
        vocab_size=V, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    with pytest.raises(SwapError, match=r"T5For.*: its class is called neither \.\.\.ForCausalLM nor"):
        swapped(transformers.T5ForConditionalGeneration(config), loss="require")


class PeftModelForCausalLM(nn.Module):
    """A wrapper that gives its model's attributes and has another signature, as PEFT's."""

    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.base_model = base_model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return self.base_model(input_ids=input_ids, labels=labels, **kwargs)


def test_a_wrapper_s_loss_is_the_inner_model_s() -> None:
    model, ids = PeftModelForCausalLM(made("llama")), tokens()
    report = swapped(model, loss="require")
    assert not report.left
    assert report.verify(input_ids=ids, labels=ids).calls["loss"] == 1
    report.undo()
    model.lm_head = nn.Linear(64, V)  # of its own: no wrapper
    with pytest.raises(
        SwapError, match=r"the model \(PeftModelForCausalLM\): its forward takes no labels or"
    ):
        swapped(model, loss="require")


@pytest.mark.parametrize("kept", ["nothing", "lm_head"])
def test_frozen_models_and_no_grad(kept: str) -> None:
    model, ids = made("llama"), tokens()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(kept))
    with torch.no_grad():
        found = swapped(model).verify(input_ids=ids, labels=ids)
    assert set(found.swapped) == {"output", "loss", *(["d lm_head.weight"] if kept == "lm_head" else [])}


def test_verify_says_why_it_can_not() -> None:
    layer = nn.Sequential(nn.RMSNorm(8))
    report = swapped(layer)
    layer.kept = torch.ones(2, requires_grad=True) * 2  # with a history, as a pruned weight
    with pytest.raises(SwapError, match=r"can't be copied into float64 .*; compare .*report\.undone\(\)"):
        report.verify(torch.randn(2, 8))
    report.undo()
    with pytest.raises(SwapError, match=r"verify: the swap of 0 has been undone; swap again"):
        report.verify(torch.randn(2, 8))


def test_a_model_that_float64_is_beyond() -> None:
    model = transformers.XGLMForCausalLM(
        transformers.XGLMConfig(vocab_size=V, d_model=32, ffn_dim=48, num_layers=1, attention_heads=4)
    )
    with pytest.raises(SwapError, match=r"verify: the model's own code.*fails in float64"):
        swapped(model).verify(input_ids=tokens(), labels=tokens())
