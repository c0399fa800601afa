"""Whether a manifest has the shape that readers lean on: other writers than ours may have written it."""

from collections.abc import Mapping
from typing import Any

_MODEL_NUMBERS = ("parameters_total", "parameters_active", "d_model", "vocab_size")
_LAYER_NUMBERS = (
    *("index", "router", "num_experts", "top_k", "num_shared_experts", "latent_size", "d_ff", "expert_d_ff"),
    *("parameters_total", "parameters_active", "block_parameters_total", "block_parameters_active"),
)
#: Numbers of parameters may need 64 bits; all others are those of columns and arrays that have 32.
_MOST, _MOST_PARAMETERS = 2**31 - 1, 2**63 - 1
_LONGEST = 80


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line that says what is wrong, where a run of this manifest could not be read."""
    model = manifest.get("model") or {}
    layers = model.get("layers") or [] if isinstance(model, dict) else None
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise ValueError("run.json does not list the model's layers as objects")
    wrong = _wrong(model, _MODEL_NUMBERS)
    if wrong is not None:
        raise ValueError(f"run.json has {_said(model[wrong])} for the model's {wrong}, which is no whole number")
    for layer in layers:
        wrong = _wrong(layer, _LAYER_NUMBERS) or ("index" if layer.get("index") is None else None)
        if wrong is not None:
            raise ValueError(f"run.json describes a layer with {_said(layer.get(wrong))} for {wrong}, no whole number")
    for name in ("config", "recorded"):
        if not isinstance(manifest.get(name) or {}, dict):
            raise ValueError(f"run.json holds no {name} object")
    domains = manifest.get("domains") or []
    if not isinstance(domains, list) or not all(isinstance(name, str) for name in domains):
        raise ValueError(f"run.json has {_said(domains)} for domains, which is no list of names")


def _wrong(numbers: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The first of `names` whose value is neither null nor a whole number that an array can hold."""
    for name in names:
        value = numbers.get(name)
        most = _MOST_PARAMETERS if "parameters" in name else _MOST
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or abs(value) > most):
            return name
    return None


def _said(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
