"""A Hugging Face `config.json` as a layout, by the family it names. Reads a dict; runs no code of the file, no torch.

Counts are those of the model that transformers (checked against 5.24) builds from the same config, balancer biases
aside. Extra layers for multi-token prediction are not in it, since it does not build them.

Shapes must be given. What a family's configs may leave out has the default that the family has there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .config_values import ConfigValues
from .hf_parts import (
    CHUNKED,
    FULL,
    SLIDING,
    experts,
    grouped_query,
    latent,
    same_window,
    sparse_layers,
    stack,
    windows,
    with_biases,
    with_shared,
)
from .layer_patterns import moe_layer_indices
from .layout import Layout
from .whole import said


def layout_from_hf_config(config: Any, name: str | None = None) -> Layout:
    """The layout of a Hugging Face config.

    Args:
        config: the config as JSON gives it, a dict.
        name: what to call it; by default its `_name_or_path`, else its `model_type`.

    Raises:
        ValueError: no dict, a family that is not known, a field that is missing, of another type or out of range.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"a config is an object with a model_type, not {said(config)}")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ValueError("the config has no model_type: is it a Hugging Face config.json?")
    family = FAMILIES.get(model_type)
    if family is None and isinstance(config.get("text_config"), Mapping):
        raise ValueError(f"model_type={said(model_type)} is more than a language model: give its text_config alone")
    if family is None:
        raise ValueError(f"model_type={said(model_type)} is not known; known are {', '.join(sorted(FAMILIES))}")
    own = config.get("_name_or_path")
    return family(ConfigValues(config), name or (own if own and isinstance(own, str) else model_type))


def _mixtral(v: ConfigValues, name: str) -> Layout:
    seen = windows(v, same_window(v))
    return stack(v, name, grouped_query(v), experts(v, width="intermediate_size"), windows=seen)


def _phimoe(v: ConfigValues, name: str) -> Layout:
    attention = grouped_query(v, **with_biases(v))
    seen = windows(v, same_window(v))
    moe = experts(v, width="intermediate_size")
    return stack(v, name, attention, moe, windows=seen, norm_bias=True, head_bias=v.flag("lm_head_bias"))


def _qwen2_moe(v: ConfigValues, name: str) -> Layout:
    count = v.layers("num_hidden_layers")
    kinds = [FULL] * count
    if v.flag("use_sliding_window"):
        last = v.number("max_window_layers", default=28, least=0)
        kinds = [SLIDING if i % 2 == 0 and i < last else FULL for i in range(count)]
    attention = grouped_query(v, qkv_bias=v.flag("qkv_bias", default=True))
    shared = v.number("shared_expert_intermediate_size", least=0)
    moe = experts(v, shared_d_ff=shared, shared_gate=True)
    return stack(v, name, attention, moe, _qwen_pattern(v), windows=windows(v, kinds))


def _qwen3_moe(v: ConfigValues, name: str) -> Layout:
    attention = grouped_query(v, qk_norm="head", **with_biases(v))
    kinds = same_window(v) if v.flag("use_sliding_window") else None
    return stack(v, name, attention, experts(v), _qwen_pattern(v), windows=windows(v, kinds))


def _qwen_pattern(v: ConfigValues) -> list[int]:
    count = v.layers("num_hidden_layers")
    step = v.number("decoder_sparse_step", default=1)
    dense = set(v.indices("mlp_only_layers"))
    return [index for index in moe_layer_indices(count, moe_frequency=step) if index not in dense]


def _olmoe(v: ConfigValues, name: str) -> Layout:
    attention = grouped_query(v, qk_norm="full", **with_biases(v))
    return stack(v, name, attention, experts(v, width="intermediate_size"))


def _gpt_oss(v: ConfigValues, name: str) -> Layout:
    kinds = [FULL if i % 2 else SLIDING for i in range(v.layers("num_hidden_layers"))]
    attention = grouped_query(v, head_dim=64, sinks=True, **with_biases(v, default=True))
    options = {"activation": "clamped-glu", "router_bias": True, "expert_bias": True}
    moe = experts(v, width="intermediate_size", **options)
    return stack(v, name, attention, moe, windows=windows(v, kinds))


def _deepseek_v2(v: ConfigValues, name: str) -> Layout:
    bias = v.flag("mlp_bias")
    moe = with_shared(v, "n_shared_experts", least=1, shared_bias=bias)
    return stack(v, name, latent(v), moe, _first_k_dense(v, 0), dense_bias=bias)


def _deepseek_v3(v: ConfigValues, name: str) -> Layout:
    return stack(v, name, latent(v), with_shared(v, "n_shared_experts"), _first_k_dense(v, 3))


def _mistral4(v: ConfigValues, name: str) -> Layout:
    return stack(v, name, latent(v), with_shared(v, "n_shared_experts"), _first_k_dense(v, 0))


def _glm4_moe_lite(v: ConfigValues, name: str) -> Layout:
    return stack(v, name, latent(v), with_shared(v, "n_shared_experts"), sparse_layers(v, 1))


def _glm4_moe(v: ConfigValues, name: str) -> Layout:
    qk_norm = "head" if v.flag("use_qk_norm") else None
    attention = grouped_query(v, qkv_bias=v.flag("attention_bias"), qk_norm=qk_norm)
    return stack(v, name, attention, with_shared(v, "n_shared_experts"), _first_k_dense(v, 1))


def _dots1(v: ConfigValues, name: str) -> Layout:
    count = v.layers("num_hidden_layers")
    first = v.number("max_window_layers", default=62, least=0)
    sliding = v.number("sliding_window", default=0, least=0) > 0
    kinds = [SLIDING if sliding and i >= first else FULL for i in range(count)]
    attention = grouped_query(v, qk_norm="head", **with_biases(v))
    moe = with_shared(v, "n_shared_experts")
    return stack(v, name, attention, moe, _first_k_dense(v, 0), windows=windows(v, kinds))


def _first_k_dense(v: ConfigValues, default: int) -> list[int]:
    """first_k_dense_replace, and then every moe_layer_freq-th layer from index 0 on, as DeepSeek's own code has it."""
    count = v.layers("num_hidden_layers")
    dense = v.number("first_k_dense_replace", default=default, least=0)
    step = v.number("moe_layer_freq", default=1)
    return list(moe_layer_indices(count, moe_frequency=step, moe_offset=0, first_k_dense=min(dense, count)))


def _ernie4_5_moe(v: ConfigValues, name: str) -> Layout:
    count = v.layers("num_hidden_layers")
    bias = v.flag("use_bias")
    moe = with_shared(v, "moe_num_shared_experts", shared_bias=bias)
    step = v.number("moe_layer_interval", default=1)
    first = v.number("moe_layer_start_index", default=1, least=0)
    last = v.number("moe_layer_end_index", default=-1, least=-1)
    last = count - 1 if last == -1 else last
    sparse = [index for index in moe_layer_indices(count, moe_frequency=step) if first <= index <= last]
    attention = grouped_query(v, **with_biases(v, "use_bias"))
    return stack(v, name, attention, moe, sparse, dense_bias=bias, head_bias=bias, tied=True)


def _granitemoe(v: ConfigValues, name: str) -> Layout:
    shared = v.number("shared_intermediate_size", default=0, least=0)
    moe = experts(v, width="intermediate_size", shared_d_ff=shared)
    return stack(v, name, grouped_query(v, **with_biases(v)), moe)


def _granitemoe_swa(v: ConfigValues, name: str) -> Layout:
    kinds = [SLIDING if i % 4 else FULL for i in range(v.layers("num_hidden_layers"))]
    moe = experts(v, width="intermediate_size", shared_d_ff=v.number("shared_intermediate_size", default=0, least=0))
    return stack(v, name, grouped_query(v, sinks=True, **with_biases(v)), moe, windows=windows(v, kinds))


def _dbrx(v: ConfigValues, name: str) -> Layout:
    attention, ffn = v.part("attn_config"), v.part("ffn_config")
    names = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    v = ConfigValues(
        {
            **{new: v.number(old) for new, old in names.items()},
            "vocab_size": v.number("vocab_size"),
            "num_key_value_heads": attention.number("kv_n_heads", default=1),
            "num_experts": ffn.experts("moe_num_experts"),
            "num_experts_per_tok": ffn.experts("moe_top_k"),
            "intermediate_size": ffn.number("ffn_hidden_size"),
        }
    )
    return stack(v, name, grouped_query(v), experts(v, width="intermediate_size"))


def _hunyuan_v1_moe(v: ConfigValues, name: str) -> Layout:
    attention = grouped_query(v, qk_norm="head", **with_biases(v))
    moe = experts(v, width="intermediate_size", shared_d_ff=v.number("intermediate_size"))
    return stack(v, name, attention, moe)


def _minimax_m2(v: ConfigValues, name: str) -> Layout:
    attention = grouped_query(v, head_dim=128, qk_norm="full")
    return stack(v, name, attention, experts(v, width="intermediate_size"))


def _exaone_moe(v: ConfigValues, name: str) -> Layout:
    count = v.layers("num_hidden_layers")
    every = v.number("sliding_window_pattern", default=4, least=0)
    sliding = v.number("sliding_window", default=0, least=0) > 0 and every > 0
    kinds = [SLIDING if sliding and (i + 1) % every else FULL for i in range(count)]
    sparse = sparse_layers(v, v.number("first_k_dense_replace", default=1, least=0))
    moe = with_shared(v, "num_shared_experts")
    return stack(v, name, grouped_query(v, qk_norm="head"), moe, sparse, windows=windows(v, kinds))


def _solar_open(v: ConfigValues, name: str) -> Layout:
    attention = grouped_query(v, head_dim=128, qkv_bias=v.flag("attention_bias"))
    return stack(v, name, attention, with_shared(v, "n_shared_experts"))


def _hy_v3(v: ConfigValues, name: str) -> Layout:
    bias = v.flag("mlp_bias")
    attention = grouped_query(v, head_dim=128, qk_norm="head", **with_biases(v))
    moe = with_shared(v, "num_shared_experts", least=1, shared_bias=bias)
    return stack(v, name, attention, moe, sparse_layers(v, 1), dense_bias=bias)


def _afmoe(v: ConfigValues, name: str) -> Layout:
    count = v.layers("num_hidden_layers")
    every = v.number("global_attn_every_n_layers", default=4)
    kinds = [SLIDING if (i + 1) % every else FULL for i in range(count)]
    attention = grouped_query(v, head_dim=128, qk_norm="head", output_gate=True, **with_biases(v))
    sparse = range(min(v.number("num_dense_layers", default=1, least=0), count), count)
    moe = with_shared(v, "num_shared_experts")
    return stack(v, name, attention, moe, sparse, windows=windows(v, kinds), norms=4)


def _llama4_text(v: ConfigValues, name: str) -> Layout:
    count = v.layers("num_hidden_layers")
    every = v.number("no_rope_layer_interval", default=4)
    chunks = v.number("attention_chunk_size", default=0, least=0) > 0
    kinds = [CHUNKED if chunks and (i + 1) % every else FULL for i in range(count)]
    sparse = v.indices("moe_layers") if v.fields.get("moe_layers") is not None else None
    if sparse is None:
        sparse = list(moe_layer_indices(count, moe_frequency=v.number("interleave_moe_layer_step", default=1)))
    attention = grouped_query(v, head_dim=128, **with_biases(v))
    moe = experts(v, width="intermediate_size", shared_d_ff=v.number("intermediate_size"))
    return stack(v, name, attention, moe, sparse, dense_width="intermediate_size_mlp", windows=windows(v, kinds))


FAMILIES: dict[str, Callable[[ConfigValues, str], Layout]] = {
    "afmoe": _afmoe,
    "dbrx": _dbrx,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "dots1": _dots1,
    "ernie4_5_moe": _ernie4_5_moe,
    "exaone_moe": _exaone_moe,
    "flex_olmo": _olmoe,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "granitemoe_swa": _granitemoe_swa,
    "granitemoeshared": _granitemoe,
    "hunyuan_v1_moe": _hunyuan_v1_moe,
    "hy_v3": _hy_v3,
    "kimi_k2": _deepseek_v3,
    "llama4_text": _llama4_text,
    "minimax_m2": _minimax_m2,
    "mistral4": _mistral4,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "solar_open": _solar_open,
}
"""How to read each `model_type`: (fields, name) -> layout."""
