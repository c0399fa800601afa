"""Layouts of Hugging Face configs against the models that transformers builds from them, and against hostile files."""

import json
import random
from typing import Any

import pytest
import torch

from moe_core.hf_config import FAMILIES, layout_from_hf_config
from moe_core.layout import Count, Layout

pytest.importorskip("transformers")
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from . import hf_meta

BUILT_FAMILIES = sorted(set(FAMILIES) - {"kimi_k2"})  # that one runs code of its own, with DeepSeek-V3's shape


def as_saved(config: Any) -> dict[str, Any]:
    """What `save_pretrained` writes into config.json."""
    return json.loads(config.to_json_string(use_diff=True))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # no shared expert: a network of width 0
@pytest.mark.parametrize("family", BUILT_FAMILIES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_counts_are_those_of_the_model_that_transformers_builds(family: str, seed: int) -> None:
    fields = hf_meta.random_config(family, random.Random(f"{family}-{seed}"))
    config = hf_meta.config_of(family, fields)
    built = hf_meta.parameters(hf_meta.meta_model(config))
    for written in (as_saved(config), json.loads(json.dumps(config.to_dict())), {"model_type": family, **fields}):
        assert layout_from_hf_config(written).total_parameters() == built, fields


@pytest.mark.parametrize("family", sorted(set(BUILT_FAMILIES) - {"dbrx"}))  # which names its parts otherwise
def test_parts_of_each_layer_are_those_of_the_built_model(family: str) -> None:
    config = hf_meta.config_of(family, hf_meta.random_config(family, random.Random(family)))
    model = hf_meta.meta_model(config)
    layout = layout_from_hf_config(as_saved(config))
    for layer, block in zip(layout.layers, model.model.layers, strict=True):
        parts = layer.components(layout.d_model)
        assert layer.count(layout.d_model).total == hf_meta.parameters(block)
        assert parts["attention"].total == hf_meta.parameters(block.self_attn)
        routed = sum(hf_meta.parameters(m) for name, m in block.named_modules() if name.endswith(".experts"))
        assert parts.get("routed", Count()).total == routed
        assert layer.is_moe == (routed > 0)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss"])
def test_flops_are_those_that_run(family: str) -> None:
    fields = hf_meta.random_config(family, random.Random(5)) | {"sliding_window": 50}
    fields |= {"use_sliding_window": False, "layer_types": ["full_attention"] * fields["num_hidden_layers"]}
    config = hf_meta.config_of(family, fields)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model = hf_meta.real_model(config)
    tokens = 5
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.ones(1, tokens, dtype=torch.long), use_cache=False)
    layout = layout_from_hf_config(as_saved(config))
    assert layout.flops_per_token(tokens) * tokens == counter.get_total_flops()


def mixtral(**changes: Any) -> dict[str, Any]:
    fields = {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    }
    return {name: value for name, value in (fields | changes).items() if value != "gone"}


def test_a_published_config() -> None:
    layout = layout_from_hf_config(mixtral(sliding_window=4096), name="mine")
    assert isinstance(layout, Layout)
    assert (layout.name, layout.total_parameters()) == ("mine", 46_702_792_704)
    assert {layer.attention.window for layer in layout.layers} == {4096}


def test_the_name_is_where_the_config_came_from() -> None:
    assert layout_from_hf_config(mixtral()).name == "mixtral"
    assert layout_from_hf_config(mixtral(_name_or_path="mistralai/Mixtral-8x7B")).name == "mistralai/Mixtral-8x7B"


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "a config is an object with a model_type, not a list of 0"),
        (None, "not None"),
        ({}, "no model_type"),
        ({"model_type": 3}, "no model_type"),
        ({"model_type": "llama"}, "model_type='llama' is not known; known are afmoe, "),
        ({"model_type": "x" * 9999}, "is not known"),
        ({"model_type": "llama4", "text_config": {}}, "more than a language model: give its text_config alone"),
        (mixtral(vocab_size="gone"), "the config has no vocab_size"),
        (mixtral(num_local_experts=None), "the config has no n_routed_experts and no num_experts"),
        (mixtral(hidden_size="4096"), "hidden_size='4096' must be a whole number, from 1 to "),
        (mixtral(hidden_size=4096.0), "hidden_size=4096.0 must be a whole number"),
        (mixtral(hidden_size=float("nan")), "hidden_size=nan must be a whole number"),
        (mixtral(hidden_size=True), "hidden_size=True must be a whole number"),
        (mixtral(hidden_size={"a": deep(500)}), "hidden_size=an object of 1 must be a whole number"),
        (mixtral(hidden_size=deep(5000)), "hidden_size=a list of 1 must be a whole number"),
        (mixtral(hidden_size=4100), "hidden_size=4100 is no multiple of num_attention_heads=32"),
        (mixtral(num_local_experts=10**12), "num_local_experts=1000000000000 must be from 1 to 1000000"),
        (mixtral(num_hidden_layers=10**9), "num_hidden_layers=1000000000 must be from 1 to 10000"),
        (mixtral(num_hidden_layers=0), "num_hidden_layers=0 must be from 1"),
        (mixtral(num_experts_per_tok=9), "top_k=9 must be from 1 to 8"),
        (mixtral(intermediate_size=1 << 30_000), "intermediate_size=a number of 30001 bits must be from 1 to"),
        (mixtral(num_key_value_heads=5), "num_kv_heads=5 does not divide num_heads=32"),
        (mixtral(tie_word_embeddings="no"), "tie_word_embeddings='no' must be true or false"),
        (mixtral(layer_types=["full_attention"]), "layer_types=a list of 1 must be a list with a word for each"),
        (mixtral(layer_types=["linear_attention"] * 32), "layer_types holds 'linear_attention'; layers of these kinds"),
        (mixtral(layer_types=[deep(3000)] * 32), "layer_types holds a list of 1; layers of these kinds"),
        (mixtral(layer_types=["sliding_attention"] * 32), "the config has no sliding_window"),
        ({**mixtral(), "model_type": "dbrx", "attn_config": 3}, "attn_config=3 must be an object"),
        ({**mixtral(), "model_type": "qwen3_moe", "mlp_only_layers": 3}, "the config has no moe_intermediate_size"),
    ],
)
def test_hostile_configs_are_refused_in_one_clear_line(config: Any, said: str) -> None:
    with pytest.raises(ValueError, match="^[^\n]{1,500}$") as error:
        layout_from_hf_config(config)
    assert said in str(error.value)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "x", 0])
def test_latent_attention_needs_no_key_value_heads_but_takes_no_nonsense_for_them(wrong: Any) -> None:
    fields = {"model_type": "deepseek_v3", **hf_meta.random_config("deepseek_v3", random.Random(1))}
    assert refusal(fields) is None
    assert refusal({**fields, "num_key_value_heads": None}) is None
    said = refusal({**fields, "num_key_value_heads": wrong})
    assert said is not None
    assert said.startswith(f"num_key_value_heads={wrong!r} must be ")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_config_of_nothing_but_a_family_names_what_it_lacks(family: str) -> None:
    with pytest.raises(ValueError, match="^the config has no [a-z_]+"):
        layout_from_hf_config({"model_type": family})


@pytest.mark.parametrize("family", BUILT_FAMILIES)
@pytest.mark.parametrize("wrong", ["8", -1, 1.5, [], {}, [1, 2], 10**15])
def test_every_field_is_checked(family: str, wrong: Any) -> None:
    """Any field of any family replaced by nonsense gives a layout (it does not matter there) or one clear line."""
    fields = {"model_type": family, **hf_meta.random_config(family, random.Random(1))}
    shapes = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "d_model", "ffn_config"}
    for name in fields:
        said = refusal({**fields, name: wrong})
        assert said is not None or name not in shapes
        assert said is None or (said and "\n" not in said and len(said) < 500)


def refusal(config: dict[str, Any]) -> str | None:
    try:
        layout_from_hf_config(config)
    except ValueError as error:
        return str(error)
    return None
