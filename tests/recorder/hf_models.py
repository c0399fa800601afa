"""Tiny models of every family of transformers that the recorder reads, built from configs: no network, no weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"num_key_value_heads": 4, "head_dim": 4, "moe_intermediate_size": 16},
}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
ROUTED = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "moe_intermediate_size": 16},
}

# family: config class, model class, what differs from SMALL
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", LOCAL),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**QWEN, "shared_expert_intermediate_size": 20, "decoder_sparse_step": 1, "norm_topk_prob": False},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**QWEN, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 6, "num_experts_per_tok": 3}),
    "deepseek-v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**ROUTED, **MLA, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    ),
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**ROUTED, **MLA}),
    "glm4-moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", {**ROUTED, "head_dim": 8}),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", {**LOCAL, "head_dim": 8, "sliding_window": 8}),
    "granite-moe": ("GraniteMoeConfig", "GraniteMoeForCausalLM", LOCAL),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**LOCAL, "head_dim": 8, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2, "num_hidden_layers": 4},
    ),
    "dbrx": (
        "DbrxConfig",
        "DbrxForCausalLM",
        {
            **{"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2, "moe_jitter_eps": 0.01},
        },
    ),
    "jetmoe": ("JetMoeConfig", "JetMoeForCausalLM", {**LOCAL, "kv_channels": 8}),
    "switch": (
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        {
            **{"d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 4, "num_decoder_layers": 4, "num_heads": 4},
            **{"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "num_experts": 4},
            **{"expert_capacity": 3, "decoder_start_token_id": 0, "dropout_rate": 0.0},
        },
    ),
    # what comes along: the same output, each with a forward that was read
    "minimax": ("MiniMaxConfig", "MiniMaxForCausalLM", {**LOCAL, "head_dim": 8, "block_size": 4}),
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM", {**LOCAL, "router_jitter_noise": 0.01}),
    "flex-olmo": ("FlexOlmoConfig", "FlexOlmoForCausalLM", {"num_experts": 6, "num_experts_per_tok": 3}),
    "qwen3-next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **QWEN,
            **{"shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "qwen3-5-moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {
            **QWEN,
            **{"shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "granite-moe-swa": ("GraniteMoeSWAConfig", "GraniteMoeSWAForCausalLM", LOCAL),
    "granite-moe-hybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **LOCAL,
            "shared_intermediate_size": 16,
            "layer_types": ["attention"] * 3,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
        },
    ),
    "granite-moe-shared": (
        "GraniteMoeSharedConfig",
        "GraniteMoeSharedForCausalLM",
        {**LOCAL, "shared_intermediate_size": 16},
    ),
    "hunyuan": ("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", {"num_experts": 6, "moe_topk": 2, "head_dim": 8}),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4, "attn_layer_period": 2},
            **{"attn_layer_offset": 1, "num_hidden_layers": 4},
        },
    ),
    "aria-text": ("AriaTextConfig", "AriaTextForCausalLM", {"moe_num_experts": 6, "moe_topk": 2}),
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 16},
            **{"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        },
    ),
    "mistral4": ("Mistral4Config", "Mistral4ForCausalLM", {**ROUTED, **MLA}),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", {**ROUTED, **MLA}),
    "deepseek-v3-2": (
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        {**ROUTED, **MLA, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
    ),
    "glm-moe-dsa": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {**ROUTED, **MLA, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
    ),
    "kimi-linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            **ROUTED,
            **MLA,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 2,
        },
    ),
    "bailing-hybrid": (
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        {
            **ROUTED,
            **MLA,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "num_local_experts": 8,
        },
    ),
    "dots1": ("Dots1Config", "Dots1ForCausalLM", {**ROUTED, "head_dim": 8}),
    "exaone-moe": ("ExaoneMoeConfig", "ExaoneMoeForCausalLM", {**ROUTED, "num_experts": 8, "head_dim": 8}),
    "solar-open": ("SolarOpenConfig", "SolarOpenForCausalLM", {**ROUTED, "head_dim": 8}),
    "nemotron-h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **ROUTED,
            "layers_block_type": ["attention", "moe", "moe"],
            "head_dim": 8,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "mimo-v2-flash": ("MiMoV2FlashConfig", "MiMoV2FlashForCausalLM", {**ROUTED, "head_dim": 8, "v_head_dim": 8}),
    "minimax-m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", {**LOCAL, "head_dim": 8}),
    "hy-v3": ("HYV3Config", "HYV3ForCausalLM", {**QWEN, "num_shared_experts": 1}),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {**QWEN, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"], "use_expert_bias": True},
    ),
    "afmoe": ("AfmoeConfig", "AfmoeForCausalLM", {**QWEN, "num_dense_layers": 1, "num_shared_experts": 1}),
    "laguna": ("LagunaConfig", "LagunaForCausalLM", {**QWEN}),
    "longcat-flash": (
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {
            **{**MLA, "num_layers": 2, "n_routed_experts": 6, "zero_expert_num": 2, "moe_topk": 2},
            **{"ffn_hidden_size": 24, "expert_ffn_hidden_size": 16},
        },
    ),
    "ernie4-5-moe": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {
            **{"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 16},
            **{"moe_layer_start_index": 1, "moe_layer_end_index": 2},
        },
    ),
}


def tiny(family: str, **changes: Any) -> nn.Module:
    """A model of the family with weights that spread its routers' logits, in training mode, without dropout."""
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(0)
    settings = {**SMALL, **own, **changes}
    if family in ("dbrx", "switch"):  # these have names of their own for sizes
        settings = {"vocab_size": SMALL["vocab_size"], "pad_token_id": 0, "eos_token_id": 2, **own, **changes}
    config = getattr(transformers, config_class)(**settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name or name.endswith("expert_bias"):
                buffer.normal_(0, 0.2)
    return model.train()
