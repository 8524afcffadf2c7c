"""Small random models of many of transformers' causal language models, and what swap replaces in each."""

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

V = 131

_ALL, _UNGATED, _UNTURNED = (
    "norms rotary mlp attention loss",
    "norms rotary attention loss",
    "norms mlp attention loss",
)

KINDS: dict[str, str] = {
    **dict.fromkeys(
        ("llama", "qwen2", "qwen3", "mistral", "ministral", "phi3", "olmo2", "olmo3", "granite", "smollm3",
         "stablelm", "exaone4", "hunyuan_v1_dense", "lfm2", "dots1", "qwen2_moe", "qwen3_next",
         "qwen3_5_text", "glm4_moe", "hunyuan_v1_moe", "bamba", "diffllama"),
        _ALL,
    ),
    **dict.fromkeys(
        ("qwen3_moe", "mixtral", "gemma", "gemma3_text", "phi", "phimoe", "granitemoe", "starcoder2",
         "gpt_neox", "seed_oss", "apertus", "arcee", "bitnet", "olmoe", "persimmon"),
        _UNGATED,
    ),
    **dict.fromkeys(
        ("glm", "glm4", "deepseek_v2", "deepseek_v3", "helium", "ernie4_5", "jamba", "llama4_text"),
        _UNTURNED,
    ),
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "nanochat", "granitemoehybrid", "gpt2", "opt", "gptj"),
                    "norms attention loss"),
    **dict.fromkeys(("gemma2", "falcon", "gpt_oss"), "norms rotary loss"),
    **dict.fromkeys(("mamba2", "bloom"), "norms loss"),
    **dict.fromkeys(("cohere", "cohere2"), "mlp attention"),
    "olmo": "rotary mlp attention loss",
    "nemotron": "rotary attention loss",
}  # fmt: skip
"""What is replaced, in at least one layer, by the family's `model_type`."""

_SMALL: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 64, "layer_types": None,
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 96, "rotary_dim": 8,
    "word_embed_proj_dim": 64, "ffn_dim": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_dt_rank": 4,
    "mamba_expand": 2, "mamba_chunk_size": 8, "state_size": 8, "chunk_size": 8, "time_step_rank": 4,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": V,
    "no_rope_layers": [1, 0],
}  # fmt: skip

_OWN: dict[str, dict[str, Any]] = {
    "phi": {"num_key_value_heads": 4},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": None},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "bamba": {"attn_layer_indices": [1], "layer_types": ()},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
}


def built(family: str, seed: int = 0, **settings: Any) -> Any:
    """A model in training mode, its weights drawn."""
    config: Any = CONFIG_MAPPING[family]
    default = config()
    known = {*dir(default), *config.attribute_map, *_OWN.get(family, {})}
    told = {**_SMALL, **_OWN.get(family, {}), **settings}
    told = {name: value for name, value in told.items() if name in known and _settable(config, name)}
    if "layer_types" in told and told["layer_types"] is None:
        kinds = list(dict.fromkeys(default.layer_types or ()))
        told["layer_types"] = (kinds * 2)[:2]
    told = {name: value for name, value in told.items() if value is not None and value not in ((), [])}
    torch.manual_seed(seed)
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])(config(**told))
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" not in name and "dt" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.2)
    return model.train()


def _settable(config: Any, name: str) -> bool:
    found = getattr(config, name, None)
    return not isinstance(found, property) or found.fset is not None
