"""What swap leaves alone or refuses, with the reason; plain modules; the loss's conditions."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bakeoff
from bakeoff.errors import SwapError
from bakeoff.swaps.own_globals import with_globals
from bakeoff.swaps.replacement import replacement_of
from tests.unit.forked import said_by
from tests.unit.swapped import HAS, gradients, made, tokens

needs_loss = pytest.mark.skipif(not HAS["loss"], reason="no op linear_cross_entropy")


def swapped(model: nn.Module, **wishes: Any) -> Any:
    return bakeoff.swap(model, quiet=True, **wishes)


def reasons(model: nn.Module, kind: str) -> set[str]:
    return {one.reason for one in swapped(model).left if one.kind == kind}


def test_arguments() -> None:
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got dict"):
        bakeoff.swap({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"norms must be True, False or 'require', got 'yes'"):
        bakeoff.swap(nn.RMSNorm(4), norms="yes")
    with pytest.raises(TypeError, match=r"unswap: model must be a torch.nn.Module, got dict"):
        bakeoff.unswap({})  # type: ignore[arg-type]


def test_prints_what_was_replaced_and_what_not(capsys: pytest.CaptureFixture[str]) -> None:
    bakeoff.swap(made("gemma"))
    printed = capsys.readouterr().out
    assert "norms        5 GemmaRMSNorm             -> rms_norm" in printed
    assert "stays: its forward is not down(silu(gate(x)) * up(x)): its activation is GELUTanh" in printed
    bakeoff.swap(nn.Linear(2, 2))
    assert "nothing to replace was found" in capsys.readouterr().out


def test_what_is_required_and_impossible_is_an_error_that_changes_nothing() -> None:
    model = made("gemma")
    with pytest.raises(SwapError, match=r"mlp is required and can't be replaced in\n  model\.layers\.0\.mlp"):
        swapped(model, mlp="require")
    with pytest.raises(SwapError, match="norms is required, and the model has nothing"):
        swapped(nn.Linear(2, 2), norms="require")
    assert not any(replacement_of(module) for module in model.modules())


def test_unknown_layers_stay() -> None:
    class ScaledRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return 2 * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight

    class OutsideNorm(ScaledRMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight

    class OddMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down_proj(F.silu(self.up_proj(x)) * self.gate_proj(x))
            return out

    class DroppingMLP(OddMLP):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
            return F.dropout(out, 0.1, self.training)

    for cls in (ScaledRMSNorm, OutsideNorm):
        (reason,) = reasons(cls(), "norms")
        assert "neither x / rms(x) * weight nor" in reason
    for cls in (OddMLP, DroppingMLP):
        (reason,) = reasons(cls().eval(), "mlp")
        assert "is not down(silu(gate(x)) * up(x))" in reason
    assert "normalises over 2 dimensions" in next(iter(reasons(nn.RMSNorm((2, 3)), "norms")))
    assert "it holds bias" in next(iter(reasons(nn.BatchNorm1d(4), "norms")))
    assert "it holds" not in next(iter(reasons(nn.InstanceNorm1d(4), "norms")))


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_swap_before_left_out_is_reported_and_can_not_be_required(whole: bool) -> None:
    model = made("llama")
    first = swapped(model if whole else model.model.layers[0], attention=False)
    left = [one for one in swapped(model.model.layers[0]).left if one.kind == "attention"]
    assert [one.name for one in left] == ["self_attn"]
    assert "it was swapped before without this; call bakeoff.unswap(model)" in left[0].reason
    with pytest.raises(SwapError, match=r"(?s)attention is required.*layers\.0\.self_attn .*without this"):
        swapped(model, attention="require")
    first.undo()
    swapped(model, attention="require").verify(input_ids=tokens(), labels=tokens())


@pytest.mark.parametrize("before", [True, False])
def test_hooks_on_an_activation_fire(before: bool) -> None:
    model, ids, seen = made("llama"), tokens(), list[Any]()
    if not before:
        swapped(model, mlp="require")
    activation = model.model.layers[0].mlp.act_fn
    hook = activation.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    if before:
        assert reasons(model, "mlp") == {
            "its act_fn has hooks, which would not be called; remove them before the swap"
        }
    assert not seen
    model(input_ids=ids)
    assert seen == [(*ids.shape, 96)]
    hook.remove()
    model(input_ids=ids)
    assert replacement_of(model.model.layers[1].mlp).calls == {"mlp": 2}  # type: ignore[union-attr]
    if not before:
        assert replacement_of(model.model.layers[0].mlp).calls == {"mlp": 1}  # type: ignore[union-attr]


def test_another_activation_after_the_swap_holds() -> None:
    model, ids = made("llama"), tokens()
    report = swapped(model, mlp="require")
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU()
    got = model(input_ids=ids).logits
    assert report.calls()["mlp"] == 0
    report.undo()
    torch.testing.assert_close(got, model(input_ids=ids).logits)


def test_rotation_of_neighbours_stays() -> None:
    import transformers

    config = transformers.GlmConfig(
        vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0,
    )  # fmt: skip
    assert reasons(transformers.GlmForCausalLM(config), "rotary") == {
        "apply_rotary_pos_emb does not turn the pairs (i, i + R/2) of the first R elements"
    }


def test_a_replaced_forward_stays() -> None:
    model = made("llama")
    model.model.norm.forward = lambda x: x
    assert any("somebody has replaced its forward already" in reason for reason in reasons(model, "norms"))


def test_a_forward_wrapped_after_the_swap_is_not_undone() -> None:
    model = made("llama")
    report = swapped(model)
    own = model.model.norm.forward
    model.model.norm.forward = lambda x: own(x) + 0
    with pytest.raises(SwapError, match=r"model\.norm's forward has been wrapped or replaced since"):
        report.undo()
    with pytest.raises(SwapError, match="wrapped or replaced since"):
        bakeoff.unswap(model)
    assert replacement_of(model.model.layers[0].mlp)
    model.model.norm.forward = own
    report.undo()


def test_what_accelerate_wrapped_and_unwrapped_is_undone() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # which one process has one of
    model = made("llama")
    report, accelerator = swapped(model), Accelerator(cpu=True, mixed_precision="bf16")
    wrapped = accelerator.prepare(model)
    wrapped(input_ids=tokens(), labels=tokens()).loss.backward()
    with pytest.raises(SwapError, match=r"accelerator\.unwrap_model\(model, keep_fp32_wrapper=False\)"):
        report.undo()
    before = report.calls()["norms"]
    assert accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)(input_ids=tokens()).logits is not None
    assert report.calls()["norms"] == 2 * before
    AcceleratorState._reset_state(reset_partial_state=True)
    report.undo()
    assert not any("forward" in vars(module) for module in model.modules())


def test_quantised_weights() -> None:
    class Int8Norm(nn.RMSNorm):
        def __init__(self) -> None:
            super().__init__(8)
            self.weight = nn.Parameter(torch.ones(8, dtype=torch.int8), requires_grad=False)

    assert "torch.int8" in next(iter(reasons(Int8Norm(), "norms")))

    class Quantised(nn.Linear):
        pass

    model, ids = made("llama"), tokens()
    model.lm_head.__class__ = Quantised
    for layer in model.model.layers:
        layer.mlp.gate_proj.__class__ = Quantised
    want = gradients(model, input_ids=ids, labels=ids)
    report = swapped(model, mlp="require")  # calls projections, whatever they are
    if HAS["loss"]:
        assert any(
            "a tests.unit.test_swap_refusals.Quantised, not a plain nn.Linear" in one.reason
            for one in report.left
        )
    torch.testing.assert_close(gradients(model, input_ids=ids, labels=ids), want)


@needs_loss
def test_loss_takes_labels_items_and_shifted_labels() -> None:
    ids = tokens()
    labels = ids.clone()
    labels[0, 3:6] = -100
    cases: list[dict[str, Any]] = [
        {"labels": labels},
        {"labels": labels, "num_items_in_batch": 31},
        {"labels": labels, "num_items_in_batch": torch.tensor(31)},
        {"labels": labels, "shift_labels": labels.roll(2, 1)},
    ]
    for family in ("gemma2", "phi", "llama-bias-tied"):
        model = made(family, num_hidden_layers=1)
        want = [gradients(model, input_ids=ids, **case) for case in cases]
        report = swapped(model, loss="require")
        for case, (loss, grads) in zip(cases, want, strict=True):
            got = gradients(model, input_ids=ids, **case)
            torch.testing.assert_close(got[0], loss)
            torch.testing.assert_close(got[1], grads, rtol=1e-4, atol=1e-5)
        assert report.calls()["loss"] == len(cases)


@needs_loss
def test_logits_are_there_where_they_are_asked_for() -> None:
    model, ids = made("llama"), tokens()
    report = swapped(model)
    assert model(input_ids=ids, labels=ids).logits is None
    assert report.calls()["loss"] == 1
    assert model(input_ids=ids).logits.shape == (2, 12, 131)
    assert model(input_ids=ids, logits_to_keep=3).logits.shape == (2, 3, 131)
    loss, logits = model(input_ids=ids, labels=ids, return_dict=False, use_cache=False)
    assert (loss.dim(), logits.shape) == (0, (2, 12, 131))
    model.eval()
    assert model(input_ids=ids, labels=ids).logits.shape == (2, 12, 131)
    assert report.calls()["loss"] == 1


@needs_loss
def test_other_losses_stay() -> None:
    model = made("llama")
    model.loss_function = lambda logits, labels, **_: logits.mean()
    assert any("not the library's ForCausalLMLoss" in reason for reason in reasons(model, "loss"))

    class ScaledForCausalLM(type(made("llama"))):  # type: ignore[misc]
        def forward(
            self, input_ids: Tensor, labels: Any = None, logits_to_keep: int = 0, **kwargs: Any
        ) -> Any:
            from transformers.modeling_outputs import CausalLMOutputWithPast

            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state).clamp(-1, 1)
            return CausalLMOutputWithPast(
                self.loss_function(logits, labels, self.config.vocab_size, **kwargs), logits
            )

    model = made("llama")
    model.__class__ = ScaledForCausalLM
    assert "its forward does something to logits that linear_cross_entropy doesn't" in reasons(model, "loss")


@needs_loss
def test_a_loss_that_differs_in_training_alone_stays() -> None:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class RegularForCausalLM(type(made("llama"))):  # type: ignore[misc]
        def forward(
            self, input_ids: Tensor, labels: Any = None, logits_to_keep: int = 0, **kwargs: Any
        ) -> Any:
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
            more = logits.logsumexp(-1).square().mean() if self.training else 0.0
            return CausalLMOutputWithPast(loss + more, logits)

    model = RegularForCausalLM(made("llama").config).eval()  # swapped before training begins
    assert "its forward does something to logits that linear_cross_entropy doesn't" in reasons(model, "loss")


@needs_loss
def test_a_loss_that_is_set_after_the_swap_holds() -> None:
    model = made("llama")
    report = swapped(model)
    model.loss_function = lambda logits, labels, **_: logits.mean()
    out = model(input_ids=tokens(), labels=tokens())
    assert torch.equal(out.loss, out.logits.mean())
    assert report.calls()["loss"] == 0


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm_of_torch(affine: bool, eps: float | None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        norm = nn.RMSNorm(24, eps=eps, elementwise_affine=affine).to(dtype)
        x = (torch.randn(5, 24) * 1e-3).to(dtype)
        want = norm(x)
        report = swapped(norm, norms="require")
        torch.testing.assert_close(norm(x), want, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        assert report.calls() == {"norms": 1}


def test_transformer_encoder_with_and_without_its_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 16)
    trained, fast = model(x), _without_gradients(model, x)
    report = swapped(model)
    torch.testing.assert_close(model.train()(x), trained)
    torch.testing.assert_close(_without_gradients(model, x), fast)
    if HAS["layer"]:
        assert report.calls() == {"norms": 4}  # the fast path reads the norms' weights and calls none
        report.verify(x)
    else:
        assert {one.reason for one in report.left if one.kind == "norms"} == {
            "this version has no op layer_norm"
        }


def _without_gradients(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.eval()(x)
    return out


def test_decorators_that_hide_what_they_wrap() -> None:
    import functools

    kept: dict[str, Any] = {}

    def hiding(function: Any) -> Any:
        kept["function"] = function

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return kept["function"](*args)

        return call

    @hiding
    def shown(x: int) -> int:
        return len(range(x))

    with pytest.raises(SwapError, match="can't be found"):
        with_globals(shown, {"len": lambda _: 7})
    assert with_globals(shown.__wrapped__, {"len": lambda _: 7})(3) == 7
    assert shown(3) == 3


def test_documented_example_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "in-your-own-model.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert "results agree" in said_by(example, tmp_path)


def test_bench_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bakeoff.apps.bench import swap as bench

    monkeypatch.setattr(bench, "tune", lambda *_: None)
    rows: dict[str, Any] = {}
    for text in ("eager", "ours"):
        told: dict[str, Any] = {
            "text": text,
            "budget_s": 0.1,
            "hear": lambda row: rows.update({row.mode: row}),
        }
        monkeypatch.setattr(bench, "MODES", ("eager", "ours"))
        bench.run_swap("cpu", tmp_path / "swap.json", **told)
    assert [row.reason for row in rows.values()] == ["", ""]
    assert rows["ours"].loss == pytest.approx(rows["eager"].loss, rel=1e-5)
    assert rows["eager"].gradients < 1e-6
    assert rows["ours"].gradients < 1e-5
    assert rows["ours"].step_us > 0
