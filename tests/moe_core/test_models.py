"""Published models: totals to the last parameter, active ones against the published figures."""

import subprocess
import sys

import pytest

from moe_core.layout import CONVENTIONS
from moe_core.models import PUBLISHED, TEACHING_SIZES, model_layout, model_names

#: Counted on models that transformers 5.24 built from these shapes on PyTorch's meta device, apart from this code.
BUILT = {
    "Mixtral-8x7B": 46_702_792_704,
    "Mixtral-8x22B": 140_620_634_112,
    "DeepSeek-V2": 235_741_434_880,
    "DeepSeek-V3": 671_026_404_352,
    "Kimi-K2": 1_026_408_209_408,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "OLMoE-1B-7B": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "GLM-4.5": 352_797_814_784,
}


def figure(text: str) -> float:
    return float(text[:-1]) * {"B": 1e9, "T": 1e12}[text[-1]]


def test_every_model_is_counted() -> None:
    assert set(PUBLISHED) == set(BUILT)


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_to_the_last_parameter(name: str) -> None:
    assert PUBLISHED[name].layout.total_parameters() == BUILT[name]


@pytest.mark.parametrize("model", PUBLISHED.values(), ids=PUBLISHED)
def test_published_figures(model) -> None:
    active = {name: model.layout.active_parameters(name) for name in CONVENTIONS}
    published = figure(model.published_active)
    assert active[model.convention] == pytest.approx(published, rel=0.02)
    if not model.convention_stated:
        assert model.convention == min(active, key=lambda name: abs(active[name] - published))
    assert model.layout.total_parameters() == pytest.approx(figure(model.published_total), rel=0.03)


def test_caches_and_costs_that_their_authors_give() -> None:
    # DeepSeek-V2 (arXiv 2405.04434, table 1): (d_c + d_h^R) values a layer, 576; 60 layers
    assert PUBLISHED["DeepSeek-V2"].layout.cache_bytes_per_token("float8") == 576 * 60
    # gpt-oss: every other layer sees 128 tokens only
    gpt_oss = PUBLISHED["gpt-oss-20b"].layout
    assert gpt_oss.cache_bytes(1000, "float8") == 2 * 8 * 64 * (12 * 128 + 12 * 1000)
    assert [layer.attention.window for layer in gpt_oss.layers[:4]] == [128, None, 128, None]


def test_names_are_found_whatever_their_case() -> None:
    assert model_layout("mixtral-8X7b") is PUBLISHED["Mixtral-8x7B"].layout
    assert model_layout("tiny") is TEACHING_SIZES["tiny"].layout
    assert [model_layout(name).name for name in model_names()] == list(model_names())
    with pytest.raises(ValueError, match="no model 'mixtral'; near it: Mixtral-8x7B, Mixtral-8x22B"):
        model_layout("mixtral")
    with pytest.raises(ValueError, match=r"no model '\?'; known: Mixtral-8x7B"):
        model_layout("?")


def test_no_torch_is_loaded() -> None:
    code = "import sys, moe_core.models, moe_core.hf_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
