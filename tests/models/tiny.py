"""Tiny random models of many families, their weights spread wide enough that greedy tokens vary."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

VOCAB = 96
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, dict] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 5, "layer_types": _MIXED, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 5, "layer_types": _MIXED, "query_pre_attn_scalar": 16},
    "phi3": {},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "gpt_neox": {"rotary_pct": 0.5},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 3.0, "residual_multiplier": 0.7},
    "cohere": {"logit_scale": 0.5},
    "mixtral": _MOE,
    "qwen3_moe": {**_MOE, "head_dim": 16},
    "starcoder2": {"sliding_window": 7},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_oss": {**_MOE, "head_dim": 16, "sliding_window": 5, "layer_types": _MIXED},  # attention sinks
    "gemma3n_text": {  # layers that share the keys of earlier ones
        "head_dim": 16,
        "sliding_window": 5,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "deepseek_v3": {  # multi-head latent attention: keys and values of different sizes
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
}


def tiny_config(family: str, **changes):
    """The configuration of a tiny model of a transformers model type."""
    known = AutoConfig.for_model(family)
    own = FAMILIES.get(family, {})
    settings = {k: v for k, v in _COMMON.items() if hasattr(known, k)} | own | changes
    return AutoConfig.for_model(family, **settings)


def tiny_model(family: str, seed: int = 0, **changes):
    """A random fp32 causal model of a transformers model type, with `changes` to its tiny configuration."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:  # norms, biases, sinks: near what they were
                parameter.add_(0.2 * noise)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=None, pad_token_id=0)
    return model.eval()
