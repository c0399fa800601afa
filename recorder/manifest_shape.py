"""Whether a manifest has the shape that readers lean on: other writers than ours may have written it."""

from collections.abc import Mapping
from typing import Any

_MODEL_NUMBERS = ("parameters_total", "parameters_active", "d_model", "vocab_size")
_LAYER_NUMBERS = (
    *("index", "router", "num_experts", "top_k", "num_shared_experts", "latent_size", "d_ff", "expert_d_ff"),
    *("parameters_total", "parameters_active", "block_parameters_total", "block_parameters_active"),
)


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line that says what is wrong, where a run of this manifest could not be read."""
    model = manifest.get("model") or {}
    layers = model.get("layers") or [] if isinstance(model, dict) else None
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise ValueError("run.json does not list the model's layers as objects")
    wrong = _wrong(model, _MODEL_NUMBERS)
    if wrong is not None:
        raise ValueError(f"run.json has {model[wrong]!r} for the model's {wrong}, which is no whole number")
    for layer in layers:
        wrong = _wrong(layer, _LAYER_NUMBERS) or ("index" if layer.get("index") is None else None)
        if wrong is not None:
            raise ValueError(f"run.json describes a layer without a whole number for {wrong}")
    if not isinstance(manifest.get("config") or {}, dict):
        raise ValueError("run.json holds no config object")
    domains = manifest.get("domains") or []
    if not isinstance(domains, list) or not all(isinstance(name, str) for name in domains):
        raise ValueError(f"run.json has {str(domains)[:80]} for domains, which is no list of names")


def _wrong(numbers: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The first of `names` whose value is neither a whole number nor null."""
    for name in names:
        value = numbers.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            return name
    return None
