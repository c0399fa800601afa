"""What `--model` tells about a model that a dump does not know: which layers are MoE, E and k. No torch.

Sources of the names in a config.json: the configuration classes of transformers 5 (Mixtral, Qwen2-MoE, Qwen3-MoE,
OLMoE, DeepSeek-V2 and V3, GLM-4-MoE, GPT-OSS, Granite-MoE, Llama 4, DBRX).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_core.layout import moe_layer_indices

#: Published shapes: layers, how many of them at the start are dense, E, k.
_PUBLISHED = {
    "Mixtral-8x7B": (32, 0, 8, 2),
    "Mixtral-8x22B": (56, 0, 8, 2),
    "DeepSeek-V2": (60, 1, 160, 6),
    "DeepSeek-V3": (61, 3, 256, 8),
    "Kimi-K2": (61, 1, 384, 8),
    "Qwen1.5-MoE-A2.7B": (24, 0, 60, 4),
    "Qwen3-30B-A3B": (48, 0, 128, 8),
    "Qwen3-235B-A22B": (94, 0, 128, 8),
    "OLMoE-1B-7B": (16, 0, 64, 8),
    "gpt-oss-20b": (24, 0, 32, 4),
    "gpt-oss-120b": (36, 0, 128, 4),
    "GLM-4.5": (92, 3, 160, 8),
}

_NUM_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_topk")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The layers of a model: which are MoE (indices in the whole model), E experts each, k of them a token."""

    name: str
    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    score_function: str | None = None
    d_model: int | None = None
    vocab_size: int | None = None


def model_shape(model: str) -> ModelShape:
    """The shape of a published model by name, or of a config.json (or the folder that holds one).

    Raises:
        ValueError: neither, or a config that does not tell layers, experts and experts per token.
    """
    by_name = {name.lower(): name for name in _PUBLISHED}
    name = by_name.get(model.rpartition("/")[2].lower())
    path = Path(model)
    if name is not None and not path.exists():
        num_layers, dense, num_experts, top_k = _PUBLISHED[name]
        moe = moe_layer_indices(num_layers, first_k_dense=dense)
        return ModelShape(name=name, num_layers=num_layers, moe_layers=moe, num_experts=num_experts, top_k=top_k)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        known = ", ".join(_PUBLISHED)
        raise ValueError(f"--model {model!r} is no config.json and no name among {known}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--model {file} is no model's config.json: {error}") from None
    return _from_config(config, file)


def _from_config(config: dict[str, Any], file: Path) -> ModelShape:
    text = config.get("text_config")
    own = text if isinstance(text, dict) else config
    experts = own.get("ffn_config")
    own = own | experts if isinstance(experts, dict) else own
    num_layers = _number(own, _NUM_LAYERS, file)
    num_experts = _number(own, _NUM_EXPERTS, file)
    top_k = _number(own, _TOP_K, file)
    if top_k > num_experts:
        raise ValueError(f"--model {file} has {top_k} experts per token of {num_experts}")
    try:
        moe = _moe_layers(own, num_layers)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--model {file} does not say which layers are MoE: {error}") from None
    if not moe:
        raise ValueError(f"--model {file} has no MoE layer")
    name = config.get("_name_or_path") or config.get("model_type") or file.parent.name
    return ModelShape(
        name=str(name),
        num_layers=num_layers,
        moe_layers=moe,
        num_experts=num_experts,
        top_k=top_k,
        score_function=own.get("scoring_func") if own.get("scoring_func") in ("softmax", "sigmoid") else None,
        d_model=_whole(own.get("hidden_size")),
        vocab_size=_whole(own.get("vocab_size")),
    )


def _moe_layers(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """MoE layers by the rules of the families: an explicit list, a period, the first ones dense, some left dense."""
    if isinstance(config.get("moe_layers"), list):
        return moe_layer_indices(num_layers, explicit=config["moe_layers"])
    if config.get("interleave_moe_layer_step"):  # Llama 4: the last of each group
        return moe_layer_indices(num_layers, moe_frequency=config["interleave_moe_layer_step"])
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        if len(frequency) != num_layers:
            raise ValueError(f"moe_layer_freq has {len(frequency)} entries for {num_layers} layers")
        return tuple(i for i, moe in enumerate(frequency) if moe)
    if frequency is not None or config.get("first_k_dense_replace") is not None:  # DeepSeek, GLM
        dense = config.get("first_k_dense_replace") or 0
        return moe_layer_indices(num_layers, moe_frequency=frequency or 1, moe_offset=0, first_k_dense=dense)
    step, dense_only = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or [])
    return tuple(i for i in moe_layer_indices(num_layers, moe_frequency=step) if i not in dense_only)


def _number(config: dict[str, Any], names: tuple[str, ...], file: Path) -> int:
    for name in names:
        value = _whole(config.get(name))
        if value:
            return value
    raise ValueError(f"--model {file} has none of {', '.join(names)} as a whole number of at least 1")


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
