"""Layouts of published models and of designs: numbers on the page against the counted ones, and what the URL keeps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app import layout_tables
from app.figures.parameter_split import Split, parameter_split
from app.layout_design import Design
from moe_core.models import PUBLISHED, model_layout, model_names


def clean(test: AppTest) -> AppTest:
    assert not test.exception, test.exception
    return test


def figure(test: AppTest, key: str) -> dict[str, Any]:
    return next(json.loads(c.proto.spec) for c in test.get("plotly_chart") if c.proto.id.endswith(f"-{key}"))


def stacks(test: AppTest) -> int:
    return sum("-layout_stack_" in c.proto.id for c in test.get("plotly_chart"))


def metrics_of(test: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in test.metric}


def test_models_stand_side_by_side_even_without_runs(shown: Path, open_page: Callable[..., AppTest]) -> None:
    names = ["Qwen3-235B-A22B", "tiny", "Kimi-K2"]
    test = clean(open_page("layouts", show="models", models=names))
    assert test.title[0].value == r"One token uses 9.4% of Qwen3-235B-A22B, 49.0% of tiny, 3.2% of Kimi-K2"
    table = test.dataframe[0].value.set_index("model")
    assert list(table.index) == names
    for name in names:
        layout = model_layout(name)
        assert table.loc[name, "total"] == layout.total_parameters()
        assert table.loc[name, "active, minus both embeddings"] == layout.active_parameters("minus_both_embeddings")
    assert table.loc["Kimi-K2", "published active"] == PUBLISHED["Kimi-K2"].published_active
    bars = figure(test, "layout_split")["data"]
    totals = [sum(lengths) for lengths in zip(*(bar["x"] for bar in bars), strict=True)]
    assert totals == [model_layout(name).total_parameters() for name in names]
    assert stacks(test) == 3


def test_the_choice_of_models_is_kept_in_the_url(shown: Path, open_page: Callable[..., AppTest]) -> None:
    test = clean(open_page("layouts", show="models", models=["nonsense"]))
    assert test.multiselect(key="models").value == ["Mixtral-8x7B", "DeepSeek-V3"]
    test.multiselect(key="models").set_value(["OLMoE-1B-7B"])
    clean(test.run())
    assert test.query_params["models"] == "OLMoE-1B-7B"
    assert test.title[0].value == "One token uses 18.5% of OLMoE-1B-7B"
    test.segmented_control(key="show").set_value("design")
    clean(test.run())
    assert test.query_params["show"] == "design"
    assert "Mixtral" in test.selectbox(key="design_base").value


@pytest.mark.parametrize("name", model_names())
def test_every_model_is_drawn(name: str, shown: Path, open_page: Callable[..., AppTest]) -> None:
    if name in ("Mixtral-8x22B", "DeepSeek-V2", "Qwen3-30B-A3B", "gpt-oss-120b"):
        pytest.skip("alike in shape to another one")
    clean(open_page("layouts", show="models", models=name))


def test_numbers_of_a_design_follow_the_editor(shown: Path, open_page: Callable[..., AppTest]) -> None:
    test = clean(open_page("layouts", show="design", design=["small", "num_experts:16"]))
    base = model_layout("small")
    layout = Design.of(base).changed(["num_experts:16"]).layout(base, "design")
    assert test.number_input(key="design_num_experts").value == 16
    assert test.title[0].value.startswith("183M parameters, of which one token uses 40.4M")
    assert f"{layout.total_parameters():,}" == "182,838,144", "by hand: 8 more experts and router rows in each layer"
    assert layout.total_parameters() == base.total_parameters() + 6 * 8 * (3 * 384 * 1472 + 384)
    assert stacks(test) == 2, "the design and where it began"

    test.number_input(key="design_latent_size").set_value(96)
    clean(test.run())
    assert test.query_params["design"] == ["small", "num_experts:16", "latent_size:96"]
    layout = Design.of(base).changed(["num_experts:16", "latent_size:96"]).layout(base, "design")
    assert test.dataframe[0].value["total"].tolist()[:2] == [layout.total_parameters(), base.total_parameters()]
    dense = layout.dense_equivalent()
    assert any(f"{dense.total_parameters():,} parameters" in caption.value for caption in test.caption)

    test.selectbox(key="design_base").set_value("DeepSeek-V3")
    clean(test.run())
    assert test.query_params["design"] == "DeepSeek-V3", "another beginning comes with its own numbers"
    assert test.number_input(key="design_num_experts").value == 256
    assert stacks(test) == 1


def test_numbers_that_do_not_go_together_are_said_in_a_line(shown: Path, open_page: Callable[..., AppTest]) -> None:
    test = clean(open_page("layouts", show="design", design=["tiny", "num_experts:2", "top_k:3"]))
    assert "top\\_k=3 must be from 1 to 2" in test.error[0].value
    test = clean(open_page("layouts", show="design", design=["tiny", "moe_frequency:9"]))
    assert "No layer is MoE here" in test.warning[0].value


def test_the_largest_design_is_drawn(shown: Path, open_page: Callable[..., AppTest]) -> None:
    changes = ["num_layers:94", "num_experts:896", "top_k:16", "latent_size:2048"]
    test = clean(open_page("layouts", show="design", design=["large", *changes]))
    drawn = figure(test, "layout_stack_0")
    heatmaps = [trace for trace in drawn["data"] if trace["type"] == "heatmap"]
    assert len(heatmaps) == 47
    assert all(abs(trace["x"][1] - trace["x"][0]) < 0.5 for trace in heatmaps), "narrow: a latent width"
    assert any("Narrow columns" in caption.value for caption in test.caption)


def test_exports_tell_what_the_command_tells() -> None:
    layouts = [model_layout("tiny"), model_layout("OLMoE-1B-7B")]
    told = json.loads(layout_tables.as_json(layouts))
    assert [model["total_parameters"] for model in told] == [layout.total_parameters() for layout in layouts]
    layers = layout_tables.layer_table(layouts)
    assert len(layers) == 4 + 16
    components = layout_tables.component_table(layouts).set_index("component")
    assert components.loc["routed", "OLMoE-1B-7B, total"] == 16 * 64 * 3 * 2048 * 1024
    assert components["tiny, total"].sum() == layouts[0].total_parameters()


def test_one_bar_a_model() -> None:
    splits = [Split(name="a<b>", active=1, total=4), Split(name="a<b>", active=0, total=0)]
    drawn = parameter_split(splits, title="t")
    assert [list(bar.x) for bar in drawn.data] == [[1, 0], [3, 0]]
    assert list(drawn.layout.yaxis.ticktext) == ["a&lt;b&gt;"] * 2
    assert [note.text for note in drawn.layout.annotations] == ["1 of 4, 25.0%", "0 of 0, 0.0%"]
    with pytest.raises(ValueError, match="c has active=2 of total=1"):
        parameter_split([Split(name="c", active=2, total=1)], title="t")
