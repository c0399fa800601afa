"""Random configs of transformers' families, and the parameters of the models it builds from them on the meta device."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

BALANCER_BIASES = ("e_score_correction_bias", "expert_bias")


def random_config(family: str, rng: random.Random) -> dict[str, Any]:
    """Fields of a small config with odd numbers; what it leaves out has the family's default."""
    heads_per_kv, kv_heads = rng.randint(1, 4), rng.randint(1, 3)
    heads = heads_per_kv * kv_heads
    layers = rng.randint(1, 7)
    experts = rng.randint(2, 9)
    fields: dict[str, Any] = {
        "vocab_size": rng.randint(5, 97),
        "hidden_size": heads * 2 * rng.randint(1, 5),
        "intermediate_size": rng.randint(1, 40),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_experts_per_tok": rng.randint(1, experts),
        "tie_word_embeddings": rng.random() < 0.3,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    moe_width = {"moe_intermediate_size": rng.randint(1, 40)}
    shared = rng.randint(0, 3)
    bias = {"attention_bias": rng.random() < 0.5}
    head_dim = {"head_dim": 2 * rng.randint(1, 9)}
    first = {"first_k_dense_replace": rng.randint(0, layers)}
    mla = {
        "q_lora_rank": rng.choice([None, rng.randint(1, 20)]),
        "kv_lora_rank": rng.randint(1, 20),
        "qk_nope_head_dim": rng.randint(1, 12),
        "qk_rope_head_dim": 2 * rng.randint(1, 6),
        "v_head_dim": rng.randint(1, 12),
        "num_key_value_heads": heads,  # each head has keys of its own, expanded
        **bias,
    }
    kinds = {"mlp_layer_types": [rng.choice(["dense", "sparse"]) for _ in range(layers)]}
    sliding = {"sliding_window": rng.randint(1, 50)}
    groups = {"n_group": 1, "topk_group": 1}
    pattern = {
        "decoder_sparse_step": rng.randint(1, 3),
        "mlp_only_layers": sorted(rng.sample(range(layers), rng.randint(0, layers // 2))),
    }
    routed = {"n_routed_experts": experts, "n_shared_experts": shared, **moe_width, **groups}
    fields |= {
        "mixtral": {"num_local_experts": experts, **rng.choice([head_dim, {}]), **rng.choice([sliding, {}])},
        "phimoe": {"num_local_experts": experts, **bias, "lm_head_bias": rng.random() < 0.5},
        "qwen2_moe": {
            "num_experts": experts,
            "shared_expert_intermediate_size": rng.randint(1, 50),
            "qkv_bias": rng.random() < 0.5,
            "use_sliding_window": rng.random() < 0.5,
            "max_window_layers": rng.randint(0, layers),
            **moe_width,
            **pattern,
            **sliding,
        },
        "qwen3_moe": {"num_experts": experts, **moe_width, **pattern, **bias, **head_dim},
        "olmoe": {"num_experts": experts, **bias},
        "flex_olmo": {"num_experts": experts, **bias},
        "gpt_oss": {"num_local_experts": experts, **bias, **head_dim, **sliding},
        "deepseek_v2": {**routed, **first, **mla, "n_shared_experts": 1 + shared, "mlp_bias": rng.random() < 0.5},
        "deepseek_v3": {**routed, **first, **mla},
        "mistral4": {**routed, **first, **mla},
        "glm4_moe_lite": {**routed, **mla, **rng.choice([kinds, {}])},
        "glm4_moe": {**routed, **first, **bias, **head_dim, "use_qk_norm": rng.random() < 0.5},
        "dots1": {**routed, **first, **bias, **sliding, "max_window_layers": rng.randint(0, layers)},
        "ernie4_5_moe": {
            "moe_num_experts": experts,
            "moe_k": fields["num_experts_per_tok"],
            "moe_num_shared_experts": shared,
            "moe_layer_start_index": rng.randint(0, layers),
            "moe_layer_end_index": rng.choice([-1, layers - 1]),
            "moe_layer_interval": rng.randint(1, 3),
            "use_bias": rng.random() < 0.5,
            **moe_width,
        },
        "granitemoe": {"num_local_experts": experts, **bias},
        "granitemoe_swa": {
            "num_local_experts": experts,
            "shared_intermediate_size": rng.randint(0, 30),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **sliding,
            **bias,
        },
        "dbrx": {},
        "granitemoeshared": {"num_local_experts": experts, **bias, "shared_intermediate_size": rng.randint(0, 30)},
        "hunyuan_v1_moe": {
            "num_experts": experts,
            "moe_topk": rng.choice([1, [2] * layers]),
            **head_dim,
            **bias,
        },
        "minimax_m2": {"num_local_experts": experts, **head_dim},
        "exaone_moe": {"num_experts": experts, "num_shared_experts": shared, **moe_width, **rng.choice([first, kinds])},
        "solar_open": {**routed, **head_dim, **bias},
        "hy_v3": {
            "num_experts": experts,
            "num_shared_experts": 1 + shared,
            "mlp_bias": rng.random() < 0.5,
            **moe_width,
            **head_dim,
            **bias,
            **rng.choice([kinds, {}]),
        },
        "afmoe": {
            "num_experts": experts,
            "num_shared_experts": shared,
            "num_dense_layers": rng.randint(0, layers),
            **sliding,
            **moe_width,
            **rng.choice([head_dim, {}]),
            **bias,
        },
        "llama4_text": {
            "num_local_experts": experts,
            "intermediate_size_mlp": rng.randint(1, 40),
            "interleave_moe_layer_step": rng.randint(1, 3),
            **head_dim,
            **bias,
        },
    }[family]
    if family == "dbrx":
        return {
            "d_model": fields["hidden_size"],
            "n_heads": heads,
            "n_layers": layers,
            "vocab_size": fields["vocab_size"],
            "attn_config": {"kv_n_heads": kv_heads, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": fields["intermediate_size"],
                "moe_num_experts": experts,
                "moe_top_k": fields["num_experts_per_tok"],
            },
        }
    if family in ("hunyuan_v1_moe", "ernie4_5_moe"):
        del fields["num_experts_per_tok"]
    return fields


def meta_model(config: Any) -> torch.nn.Module:
    """The model that transformers builds from a config, without memory."""
    with torch.device("meta"):
        if config.model_type == "mistral4":  # not among those that the automatic class knows
            return Mistral4ForCausalLM(config)
        return AutoModelForCausalLM.from_config(config)


def config_of(family: str, fields: dict[str, Any]) -> Any:
    """transformers' own config object."""
    return CONFIG_MAPPING[family](**fields)


def parameters(model: torch.nn.Module) -> int:
    """Parameters, each counted once, balancer biases left out where a family makes parameters of them."""
    return sum(p.numel() for name, p in model.named_parameters() if not name.endswith(BALANCER_BIASES))


def real_model(config: Any) -> torch.nn.Module:
    """The same on the processor, to run."""
    return AutoModelForCausalLM.from_config(config).eval()
