"""swap: equal results in every family, reversible, refused where it can't be right."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bakeoff
from bakeoff.errors import SwapError
from bakeoff.select.contests import judge
from bakeoff.swaps.replacement import replacement_of
from bakeoff.swaps.verify import _KeepDouble
from tests.unit.swapped import FAMILIES, HAS, WINDOWED, T, V, gradients, made, tokens

SILU = {"llama", "llama-bias-tied", "qwen2", "qwen3", "mistral", "phi3"}


def swapped(model: nn.Module, **wishes: Any) -> Any:
    return bakeoff.swap(model, quiet=True, **wishes)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(pytest.param(family, torch.float32, id=f"{family}-fp32") for family in FAMILIES),
        *(
            pytest.param(
                family,
                torch.bfloat16,
                id=f"{family}-bf16",
                marks=() if family in ("llama", "qwen3") else pytest.mark.exhaustive,
            )
            for family in FAMILIES
        ),
    ],
)
def test_results_are_right_and_every_replacement_runs(family: str, dtype: torch.dtype) -> None:
    model, ids = made(family).to(dtype), tokens()
    report = swapped(model, attention=family not in WINDOWED, rotary="require")
    comparison = report.verify(input_ids=ids, labels=ids)
    kinds = {"rotary"} | ({"mlp"} if family in SILU else set()) | ({"loss"} if HAS["loss"] else set())
    kinds |= {"norms"} if family != "phi" or HAS["layer"] else set()
    kinds |= {"attention"} if HAS["attention"] and family not in WINDOWED | {"gemma2"} else set()
    assert set(report.calls()) == kinds
    assert all(report.calls().values())
    assert {f"d {name}" for name, _ in model.named_parameters()} <= set(comparison.swapped)
    assert all(p.grad is None for p in model.parameters())


def test_whole_numbers_are_cast_to_what_they_are_multiplied_by() -> None:
    """As positions are by frequencies: in float64 too, where these are."""
    frequencies, positions = torch.rand(1, 3, 1, dtype=torch.float64), torch.arange(5)[None, None]
    with _KeepDouble():
        angles = frequencies.to(dtype=torch.float) @ positions.float()
        assert torch.equal(angles, frequencies.float() @ positions.to(torch.float32))
        assert torch.ones(2, dtype=torch.float16).float().dtype == torch.float32
    assert torch.equal(angles, frequencies * positions)


def test_a_wrong_replacement_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from bakeoff.swaps import mlp

    monkeypatch.setattr(mlp, "swiglu", lambda gate, up: nn.functional.silu(gate) * up * 1.001)
    mlp._forward_of.cache_clear()
    model, ids = made("llama"), tokens()
    with pytest.raises(SwapError, match="mlp is required"):  # the trial on a stand-in sees it, too
        swapped(model, mlp="require")
    monkeypatch.setattr(mlp, "agrees", lambda *_: True)
    monkeypatch.setattr(judge, "FURTHER", 2)
    model = made("llama", num_hidden_layers=1)
    with pytest.raises(SwapError, match=r"verify: .* is wrong: .* error"):
        swapped(model).verify(input_ids=ids, labels=ids)
    mlp._forward_of.cache_clear()


def test_a_replacement_that_does_not_run_is_found() -> None:
    model, ids = made("llama"), tokens()
    report = swapped(model)
    model.model.layers[1].mlp.forward = lambda x: x
    with pytest.raises(SwapError, match=r"1 of the replacements did not run.*layers\.1\.mlp \(mlp\)"):
        report.verify(input_ids=ids, labels=ids)


def test_undo_gives_back_the_same_objects_and_bits() -> None:
    model, ids = made("qwen3"), tokens()
    objects, state = list(model.modules()), {n: t.clone() for n, t in model.state_dict().items()}
    held = [set(vars(module)) for module in objects]
    before = gradients(model, input_ids=ids, labels=ids)
    report = swapped(model)
    assert list(model.state_dict()) == list(state)
    report.undo()
    report.undo()
    assert [id(m) for m in model.modules()] == [id(m) for m in objects]
    assert [set(vars(module)) for module in objects] == held
    after = gradients(model, input_ids=ids, labels=ids)
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(grad, after[1][name]) for name, grad in before[1].items())
    assert not report.calls() or not any(replacement_of(m) for m in model.modules())


def test_with_statement_and_unswap() -> None:
    model = made("llama")
    with bakeoff.swap(model, quiet=True):
        assert replacement_of(model.model.norm)
    assert replacement_of(model.model.norm) is None
    swapped(model)
    bakeoff.unswap(model)
    with pytest.raises(SwapError, match="nothing in this model is swapped"):
        bakeoff.unswap(model)


def test_other_instances_and_classes_stay() -> None:
    model, other = made("llama"), made("llama")
    forwards = [type(module).forward for module in model.modules()]
    swapped(model)
    assert [type(module).forward for module in model.modules()] == forwards
    assert not any("forward" in vars(module) for module in other.modules())
    report = swapped(other)
    model(input_ids=tokens())
    assert not any(report.calls().values())


def test_a_second_swap_changes_nothing() -> None:
    model = made("llama")
    first = swapped(model)
    held = [vars(module).get("forward") for module in model.modules()]
    second = swapped(model, norms="require")
    assert not second.replaced
    assert {one.reason for one in second.left if one.kind == "norms"} == {"it was swapped before"}
    assert [vars(module).get("forward") for module in model.modules()] == held
    second.undo()
    assert replacement_of(model.model.norm)
    first.undo()
    assert replacement_of(model.model.norm) is None


def test_unswap_after_training_keeps_what_was_learnt() -> None:
    model, ids = made("llama"), tokens()
    report = swapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = None
    for _ in range(5):
        loss, _ = gradients(model, input_ids=ids, labels=ids)
        first = loss if first is None else first
        optimizer.step()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    report.undo()
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert first is not None
    assert model(input_ids=ids, labels=ids).loss < first


def test_state_loads_both_ways() -> None:
    model, other, ids = made("llama", 1), made("llama", 2), tokens()
    swapped(model)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(input_ids=ids).logits, model(input_ids=ids).logits)
    third = made("llama", 3)
    model.load_state_dict(third.state_dict())
    torch.testing.assert_close(third(input_ids=ids).logits, model(input_ids=ids).logits)


def test_copies_and_pickles_are_swapped_themselves() -> None:
    model, ids = made("qwen2"), tokens()
    report = swapped(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.model.norm.weight.zero_()
        assert not other(input_ids=ids).logits.any()
        assert other.model.norm.forward.__self__.calls == {"norms": 1}
        assert report.calls()["norms"] == 0
        bakeoff.unswap(other)
        assert "forward" not in vars(other.model.norm)
    assert model(input_ids=ids).logits.any()


def test_hooks_fire() -> None:
    model, ids = made("llama"), tokens()
    seen: list[str] = []
    for name in ("model.norm", "model.layers.0.mlp", "model.layers.0.self_attn", "model.layers.1"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
        model.get_submodule(name).register_full_backward_hook(lambda *_, name=name: seen.append(f"d {name}"))
    swapped(model)
    gradients(model, input_ids=ids, labels=ids)
    assert len(seen) == 8
    assert len(set(seen)) == 8


def test_a_hook_on_the_head_keeps_the_model_s_own_loss() -> None:
    model, ids = made("llama"), tokens()
    report = swapped(model)
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, args, out: seen.append(out))
    out = model(input_ids=ids, labels=ids)
    assert out.logits is seen[0]
    assert report.calls().get("loss", 0) == 0
    left = swapped(copy.deepcopy(made("llama")) if not HAS["loss"] else _hooked_head())
    reason = "has hooks" if HAS["loss"] else "no op"
    assert any(one.kind == "loss" and reason in one.reason for one in left.left)


def _hooked_head() -> nn.Module:
    model: nn.Module = made("llama")
    model.lm_head.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, ids = made("llama"), tokens()
    want = gradients(model, input_ids=ids, labels=ids)
    report = swapped(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    got = gradients(model, input_ids=ids, labels=ids)
    torch.testing.assert_close(got, want)
    assert report.calls()["rotary"] == 4  # once more in the backward


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma3",
        *(pytest.param(f, marks=pytest.mark.exhaustive) for f in ("qwen3", "mistral", "phi3")),
    ],
)
def test_generation_with_cache_and_left_padding(family: str) -> None:
    model, ids = made(family).eval(), tokens(3, 7)
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :5] = 0, 0
    ids[mask == 0] = 0
    told: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, attention_mask=mask, **told)
    plain = model.generate(ids[:1], **told)
    report = swapped(model)
    assert torch.equal(model.generate(ids, attention_mask=mask, **told), want)
    assert torch.equal(model.generate(ids[:1], **told), plain)
    assert report.calls()["rotary"] == 2 * 2 * 6  # layers, calls of generate, tokens


def test_positions_of_each_row() -> None:
    model, ids = made("llama").double(), tokens()
    at = torch.stack([torch.arange(T), torch.arange(T).flip(0)])
    want = model(input_ids=ids, position_ids=at).logits
    swapped(model)
    torch.testing.assert_close(model(input_ids=ids, position_ids=at).logits, want, rtol=1e-6, atol=1e-6)


def test_signature_is_the_model_s_own() -> None:
    model = made("llama")
    want = inspect.signature(model.forward)
    swapped(model)
    assert inspect.signature(model.forward) == want


def test_torch_compile_traces_every_replacement_once_a_layer() -> None:
    model, ids = made("llama"), tokens()
    want = gradients(model, input_ids=ids, labels=ids)
    report = swapped(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    got = gradients(compiled, input_ids=ids, labels=ids)
    torch.testing.assert_close(got[0], want[0])
    for name, grad in want[1].items():
        torch.testing.assert_close(got[1][f"_orig_mod.{name}"], grad)
    expected = {"norms": 5, "rotary": 2, "mlp": 2} | ({"loss": 1} if HAS["loss"] else {})
    assert report.traced() == expected | ({"attention": 2} if HAS["attention"] else {})
    with pytest.raises(SwapError, match="is compiled; swap first"):
        swapped(compiled)


def test_layers_compile_once_for_all() -> None:
    model, ids = made("llama", num_hidden_layers=9), tokens()
    report = swapped(model)
    torch.compiler.reset()
    for layer in model.model.layers:  # more than torch.compile's limit of recompilations
        layer.compile(backend="eager", fullgraph=True)
    model(input_ids=ids, use_cache=False)
    assert report.traced()["mlp"] <= 2


def test_optimizer_goes_on_where_it_was() -> None:
    ids, runs = tokens(), []
    for convert in (False, True):
        model = made("llama")
        groups = [
            {"params": list(model.model.parameters()), "weight_decay": 0.1},
            {"params": [model.lm_head.weight]},
        ]
        optimizer: Any = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9))
        for step in range(4):
            if step == 2 and convert:
                report = swapped(model, optimizer=optimizer)
                optimizer = report.optimizer
                assert isinstance(optimizer, bakeoff.optim.AdamW)
                assert "bakeoff.optim.AdamW" in str(report)
            gradients(model, input_ids=ids, labels=ids)
            optimizer.step()
        runs.append(dict(model.named_parameters()))
    for name, p in runs[0].items():
        torch.testing.assert_close(p, runs[1][name], rtol=1e-4, atol=1e-5)


def test_optimizers_that_can_not_be_carried_over() -> None:
    model = made("llama")
    with pytest.raises(SwapError, match=r"only a torch\.optim\.AdamW"):
        swapped(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    driven = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.ConstantLR(driven)
    with pytest.raises(SwapError, match="scheduler already drives"):
        swapped(model, optimizer=driven)
    with pytest.raises(SwapError, match="amsgrad"):
        swapped(model, optimizer=torch.optim.AdamW(model.parameters(), amsgrad=True))
    assert not any(replacement_of(module) for module in model.modules())


def test_mixed_dtypes_as_the_model_s_own() -> None:
    """Norms kept in float32 in a bfloat16 model, and autocast."""
    model, x = made("llama"), torch.randn(2, T, 64)
    norm = model.model.norm
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        want = norm(x.to(dtype))
        report = swapped(model)
        got = norm(x.to(dtype))
        report.undo()
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    want_logits = _under_autocast(model)
    swapped(model)
    got_logits = _under_autocast(model)
    assert got_logits.dtype == want_logits.dtype
    assert (got_logits - want_logits).norm() < 0.02 * want_logits.norm()


def _under_autocast(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits: Tensor = model(input_ids=tokens()).logits
    return logits


def test_three_steps_of_the_library_s_trainer(tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in tokens(4)]
    losses = []
    for swap in (False, True):
        model = made("llama")
        report = swapped(model) if swap else None
        args = TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=2,
            report_to=[], logging_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True, bf16=True,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=rows)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
        if report is not None:
            assert report.calls()["mlp"] == 3 * 2 * 2
            assert report.calls().get("loss", 6) == 6
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


def test_meta_weights() -> None:
    with torch.device("meta"):
        model = made_on_meta()
    report = swapped(model, norms="require", mlp="require", rotary="require")
    model.to_empty(device="cpu")
    assert len(report.replaced) >= 9


def made_on_meta() -> Any:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
        )
    )
