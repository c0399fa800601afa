"""Layouts: the parameters shown against models that are built here, and the loads against the Parquet files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from streamlit.testing.v1 import AppTest
from torch import nn

from moe_core.experts import make_expert
from moe_core.transformer import MoETransformer, MoETransformerConfig
from recorder.describe import describe_model
from recorder.writer import RunWriter


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def write(path: Path, model: dict[str, Any], *, steps: int = 1, **changes: Any) -> Path:
    """A run of this model, expert e of each layer with e more assignments than expert 0, and a step's number more."""
    with RunWriter(path, manifest={"name": path.name, "config": {}, "model": model | changes}) as writer:
        for step in range(steps):
            writer.log_step(step, tokens=8, loss=1.0)
            for layer in model["layers"]:
                if layer["kind"] == "moe":
                    load_E = np.arange(layer["num_experts"]) + step
                    more = {"gate_mass": load_E, "mean_prob": load_E / load_E.sum()}
                    router = layer["router"]
                    writer.log_layer_stats(step, layer=layer["index"], router=router, tokens=8, load=load_E, **more)
    return path


def dense(index: int, parameters: int = 0) -> dict[str, Any]:
    return {"index": index, "kind": "dense", "router": None, "parameters_total": parameters or None}


def clean(test: AppTest) -> AppTest:
    assert not test.exception, test.exception
    return test


def said(test: AppTest) -> str:
    return "\n".join(element.value for element in (*test.caption, *test.markdown))


def metrics_of(test: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in test.metric}


def conventions(test: AppTest) -> pd.DataFrame:
    return test.dataframe[0].value.set_index("convention")


def layer_table(test: AppTest) -> pd.DataFrame:
    return test.dataframe[1].value.set_index("layer")


def figure(test: AppTest, key: str) -> dict[str, Any]:
    return next(json.loads(c.proto.spec) for c in test.get("plotly_chart") if c.proto.id.endswith(f"-{key}"))


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"num_experts": 8, "top_k": 2, "num_shared_experts": 1, "expert_d_ff": 32}, id="fine-shared"),
        pytest.param({"num_experts": 16, "top_k": 1}, id="switch"),
        pytest.param({"num_experts": 4, "top_k": 2, "moe_frequency": 1, "activation": "gelu"}, id="all-moe-gelu"),
    ],
)
def test_the_arithmetic_is_that_of_a_built_model(
    shown: Path, open_page: Callable[..., AppTest], shape: dict[str, Any]
) -> None:
    config = MoETransformerConfig(vocab_size=100, d_model=32, num_layers=4, num_heads=2, d_ff=64, **shape)
    model = MoETransformer(config)
    write(shown / "a", describe_model(model))
    test = clean(open_page("layouts", run="a"))

    total = size(model)
    one = size(make_expert(32, config.expert_d_ff or 64, config.activation))
    unused = (config.num_experts - config.top_k) * one
    active = total - unused * len(config.moe_layers)
    assert test.title[0].value == (
        f"{len(config.moe_layers)} of 4 layers are MoE; {100 * active / total:.0f}% of parameters per token"
    )
    assert metrics_of(test)["Parameters"] == f"{total / 1000:.3g}k"
    assert metrics_of(test)["Active for a token"] == f"{active / 1000:.3g}k"
    moe = model.layers[config.moe_layers[0]].mlp
    assert metrics_of(test)["MoE layer, times dense"] == f"{size(moe) / one:.2f}x"
    assert metrics_of(test)["Active, times dense"] == f"{(size(moe) - unused) / one:.2f}x"
    assert f"width {config.expert_d_ff or 64}, {config.activation}, {one:,} parameters" in said(test)

    counted = conventions(test)
    embedding, head = size(model.embedding), size(model.head)
    for name, less in (
        ("all parameters, embeddings included", 0),
        ("minus the input embedding", embedding),
        ("minus both embeddings", embedding + head),
    ):
        assert counted.loc[name, ["total", "active"]].tolist() == [total - less, active - less]
        assert counted.loc[name, "active (%)"] == pytest.approx(100 * (active - less) / (total - less))

    table = layer_table(test)
    for index, block in enumerate(model.layers):
        line = table.loc[index]
        assert line["total"] == size(block.mlp)
        if index not in config.moe_layers:
            assert line["kind"] == "dense"
            assert line["active"] == size(block.mlp)
            assert line[["router", "routed experts", "shared", "x dense, total"]].isna().all()
            continue
        assert line["kind"] == "MoE"
        assert line["active"] == size(block.mlp) - unused
        assert line["router"] == size(block.mlp.router)
        assert line["routed experts"] == size(block.mlp.experts)
        assert line["shared"] == (0 if block.mlp.shared is None else size(block.mlp.shared))
        assert line["x dense, total"] == pytest.approx(size(block.mlp) / one)
        assert line["x dense, active"] == pytest.approx((size(block.mlp) - unused) / one)
        if "x own dense layer, total" in table:
            own = size(model.layers[0].mlp)
            assert line["x own dense layer, total"] == pytest.approx(size(block.mlp) / own)
            assert line["x own dense layer, active"] == pytest.approx((size(block.mlp) - unused) / own)
    assert ("x own dense layer, total" in table) == (config.expert_d_ff == 32), "only where it is another width"

    bars = {trace["name"]: trace for trace in figure(test, "layout_dense")["data"]}
    assert list(bars["total"]["y"]) == table["total"].tolist()
    assert list(bars["active for a token"]["y"]) == table["active"].tolist()
    widths = [one if index in config.moe_layers else size(model.layers[index].mlp) for index in range(4)]
    assert list(bars["dense of the same width"]["y"]) == widths


def test_the_load_of_the_last_steps(recorded: Path, shown: Path, open_page: Callable[..., AppTest]) -> None:
    (shown / "aux").symlink_to(recorded / "aux")
    test = clean(open_page("layouts", run="aux"))
    assert "uniform share" not in json.dumps(figure(test, "layout_map")), "no load unless asked for"
    test.segmented_control(key="window").set_value("50")
    clean(test.run())
    assert test.query_params["window"] == "50"
    drawn = figure(test, "layout_map")
    assert "load of steps 10 to 59" in drawn["layout"]["title"]["text"]
    hovers = next(trace for trace in drawn["data"] if trace.get("name") == "cells")["text"]
    rows = pq.read_table(recorded / "aux" / "layer_stats").to_pandas()
    for layer in (0, 1):
        mine = rows[(rows["phase"] == "train") & (rows["layer"] == layer) & (rows["step"] >= 10)]
        load = np.sum(mine["load"].tolist(), axis=0)
        for expert in range(8):
            assert (
                f"<b>layer {layer}, expert {expert}</b><br>{load[expert] * 8 / load.sum():.3f} x the uniform share, "
                f"{load[expert]:,} assignments" in hovers
            )


def test_two_layers_of_eight_and_93_of_896(shown: Path, open_page: Callable[..., AppTest]) -> None:
    small = MoETransformer(MoETransformerConfig(vocab_size=50, d_model=16, num_heads=2, num_experts=8))
    write(shown / "small", describe_model(small))
    layer = {"kind": "moe", "num_experts": 896, "top_k": 16, "num_shared_experts": 1, "expert_d_ff": 2048}
    expert = 3 * 7168 * 2048
    total, active = 7168 * 896 + 897 * expert, 7168 * 896 + 17 * expert
    layer |= {"activation": "swiglu", "parameters_total": total, "parameters_active": active}
    layers = [dense(0, 3 * 7168 * 18432)]
    layers += [layer | {"index": i, "router": i - 1} for i in range(1, 93)]
    write(shown / "large", {"d_model": 7168, "vocab_size": 160_000, "layers": layers})

    test = clean(open_page("layouts", run="small"))
    texts = [trace.get("text") for trace in figure(test, "layout_map")["data"] if trace.get("name") == "expert numbers"]
    assert texts == [[str(expert) for expert in range(8)] * 2]
    assert "Click an expert to open it in Replay" in said(test)

    test = clean(open_page("layouts", run="large", window=50))
    assert test.title[0].value == "92 of 93 layers are MoE"
    table = layer_table(test)
    assert len(table) == 93
    assert table.loc[92, ["router", "routed experts", "shared"]].tolist() == [7168 * 896, 896 * expert, expert]
    assert metrics_of(test)["MoE layer, times dense"] == f"{total / expert:.2f}x"
    assert metrics_of(test)["Active, times dense"] == f"{active / expert:.2f}x"
    assert "Click the mark above a layer" in said(test), "a cell is several experts"
    assert conventions(test)[["total", "active"]].isna().all(axis=None), "not in the manifest: no number"


def test_a_shared_embedding_and_one_that_cannot_be_told(shown: Path, open_page: Callable[..., AppTest]) -> None:
    model = MoETransformer(MoETransformerConfig(vocab_size=100, d_model=32, num_heads=2, num_experts=4))
    described = describe_model(model)
    tied = size(model) - size(model.head)
    active = described["parameters_active"] - size(model.head)
    write(shown / "tied", described, parameters_total=tied, parameters_active=active)
    counted = conventions(clean(open_page("layouts", run="tied")))
    assert counted["total"].tolist() == [tied, tied - 3200, tied - 3200]
    layers = [{**layer, "block_parameters_total": None} for layer in described["layers"]]
    write(shown / "untold", described, layers=layers)
    test = clean(open_page("layouts", run="untold"))
    assert conventions(test)["total"].tolist()[:2] == [size(model), size(model) - 3200]
    assert pd.isna(conventions(test).loc["minus both embeddings", "total"])
    assert "does not tell whether input and output share one embedding" in said(test)


def test_parts_that_do_not_add_up_are_not_shown(shown: Path, open_page: Callable[..., AppTest]) -> None:
    described = describe_model(
        MoETransformer(MoETransformerConfig(vocab_size=50, d_model=16, num_heads=2, num_experts=4))
    )
    layers = [{**layer, "parameters_total": layer["parameters_total"] + 4} for layer in described["layers"]]
    write(shown / "a", described, layers=layers)
    table = layer_table(clean(open_page("layouts", run="a")))
    assert table[["router", "routed experts", "shared"]].isna().all(axis=None)
    assert table["total"].tolist() == [layer["parameters_total"] for layer in layers]


def test_a_manifest_that_tells_little(
    shown: Path, write_run: Callable[..., Path], open_page: Callable[..., AppTest]
) -> None:
    write_run(shown, "a", range(3))
    test = clean(open_page("layouts", run="a", window=10))
    assert test.title[0].value == "2 of 4 layers are MoE"
    assert set(metrics_of(test).values()) == {"-"}
    assert "the model has no embeddings, or they cannot be told apart" in said(test)
    assert layer_table(test)["total"].isna().all()
    dense_only = {"layers": [dense(0), dense(1)]}
    write(shown / "dense", dense_only)
    test = clean(open_page("layouts", run="dense"))
    assert test.title[0].value == "0 of 2 layers are MoE"
    write(shown / "bare", {"layers": []})
    test = clean(open_page("layouts", run="bare"))
    assert test.title[0].value == "No layers described"
    assert test.info


def test_failed_running_empty_and_unreadable_runs(
    shown: Path, write_run: Callable[..., Path], open_page: Callable[..., AppTest]
) -> None:
    write_run(shown, "failed", range(5), status="failed")
    write_run(shown, "growing", range(5), status="running")
    write_run(shown, "new", [], status="running")
    (shown / "broken").mkdir()
    (shown / "broken" / "run.json").write_text("{")
    for run in ("failed", "growing"):
        assert clean(open_page("layouts", run=run)).title[0].value == "2 of 4 layers are MoE"
    for run in ("new", "broken"):
        test = clean(open_page("layouts", run=run))
        assert test.title[0].value == "Layouts"
        assert test.info or test.error
    for path in shown.iterdir():
        shutil.rmtree(path)
    assert "There are no runs here yet." in clean(open_page("layouts")).info[0].value
