"""Small Hugging Face models for the tests of swap, with random weights."""

import importlib.util
from typing import Any

import torch
import transformers
from torch import Tensor, nn

HAS = {
    kind: importlib.util.find_spec(f"bakeoff.ops.{op}") is not None
    for kind, op in (("loss", "linear_cross_entropy"), ("attention", "attention"), ("layer", "layer_norm"))
}
"""Which of the ops that a swap can use this version has."""

V, T = 131, 12

_SMALL: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama-bias-tied": (
        "LlamaConfig", "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 16, "sliding_window": 8}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 16, "sliding_window": 8}),
    "phi": ("PhiConfig", "PhiForCausalLM", {"num_key_value_heads": 4}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
}  # fmt: skip

WINDOWED = {"mistral", "gemma3"}
"""Whose attention gets a mask, here, and so keeps the library's kernels."""


def made(family: str, seed: int = 0, **settings: Any) -> Any:
    """A model whose weights are all drawn, also those of norms and biases."""
    config, model, own = FAMILIES[family]
    drawn = torch.Generator().manual_seed(seed)
    built = getattr(transformers, model)(getattr(transformers, config)(**{**_SMALL, **own, **settings}))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.2)
    return built.train()


def tokens(rows: int = 2, length: int = T, seed: int = 1) -> Tensor:
    return torch.randint(3, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, **batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and all gradients."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
