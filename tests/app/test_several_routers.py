"""Runs with several routers in a layer: every page shows the router it names, each number against the Parquet files.

Shapes: E experts, T tokens.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from opened import tables
from streamlit.testing.v1 import AppTest
from typer.testing import CliRunner

from app import layer_keys
from recorder.cli import cli
from recorder.reader import Run
from recorder.writer import RunWriter

Open = Callable[..., AppTest]
E, STEPS, LAST = 4, 12, 11
# By router, in model order: layer's index, module, tokens seen, name shown
KINDS: dict[str, list[tuple[int, str, range, str]]] = {
    "attention": [
        (0, "model.layers.0.mlp.router", range(8), "0 (mlp)"),
        (0, "model.layers.0.self_attention.experts.router", range(8), "0 (attention)"),
        (1, "model.layers.1.mlp.router", range(8), "1 (mlp)"),
        (1, "model.layers.1.self_attention.experts.router", range(8), "1 (attention)"),
    ],
    "seq2seq": [
        (1, "encoder.block.1.layer.1.mlp.router", range(8), "1 (encoder)"),
        (3, "encoder.block.3.layer.1.mlp.router", range(8), "3 (encoder)"),
        (1, "decoder.block.1.layer.2.mlp.router", range(8, 14), "1 (decoder)"),
        (3, "decoder.block.3.layer.2.mlp.router", range(8, 14), "3 (decoder)"),
    ],
}
LAYERS = {"attention": ("2 of 2 layers are MoE, with 4 routers", 0), "seq2seq": ("4 of 8 layers are MoE", 4)}


def expert_of(router: int, step: int, token: np.ndarray, turn: int) -> np.ndarray:
    """Each router its own routing: round robin, all on one, two of four, three to one. turn: another run's."""
    routes = [(token + step) % E, np.full_like(token, 2), token % 2, np.where(token % 4 == 0, 1, 3)]
    return (routes[(router + turn) % 4] + turn) % E


def manifest(kind: str) -> dict[str, Any]:
    layers: list[dict[str, Any]] = [
        {"index": index, "kind": "moe", "router": router, "module": module, "num_experts": E, "top_k": 1}
        # no activation that we know: what one expert holds follows from the counts
        | {"expert_d_ff": 8 + router, "parameters_total": 40 + 400 * (router + 1)}
        | {"parameters_active": 40 + 100 * (router + 1), "activation": None}
        for router, (index, module, _, _) in enumerate(KINDS[kind])
    ]
    if kind == "seq2seq":
        for stack in ("encoder", "decoder"):
            layers += [
                {"index": index, "kind": "dense", "router": None, "module": f"{stack}.block.{index}.layer.1.mlp"}
                for index in (0, 2)
            ]
        layers.sort(key=lambda layer: (not layer["module"].startswith("encoder"), layer["index"]))
    return {"name": kind, "model": {"d_model": 16, "layers": layers}}


def write(path: Path, kind: str, turn: int = 0) -> Path:
    with RunWriter(path, manifest=manifest(kind)) as writer:
        for step in range(STEPS):
            writer.log_step(step, tokens=14, loss=1.0)
            for router, (layer, _, tokens, _) in enumerate(KINDS[kind]):
                token_T = np.array(tokens)
                expert_T = expert_of(router, step, token_T, turn)
                prob_E = np.arange(1, E + 1) ** (router + 1.0)
                writer.log_layer_stats(
                    step,
                    layer=layer,
                    router=router,
                    tokens=len(token_T),
                    load=np.bincount(expert_T, minlength=E),
                    gate_mass=0.5 * np.bincount(expert_T, minlength=E),
                    mean_prob=prob_E / prob_E.sum(),
                )
                writer.log_decisions(
                    step,
                    layer=layer,
                    router=router,
                    tokens_T=token_T,
                    experts_TK=expert_T[:, None],
                    weights_TK=np.full((len(token_T), 1), 0.5),
                )
            sequence_T = np.repeat([0, 1, 2], [4, 4, 6])
            writer.log_tokens(
                step,
                sequence_T=sequence_T,
                position_T=np.concatenate([np.arange(4), np.arange(4), np.arange(6)]),
                text_T=[f"w{token}" for token in range(14)],
            )
    return path


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(shown: Path, kind: str) -> Path:
    return write(shown / "a", kind)


def loads(run: Path, router: int) -> np.ndarray:
    """(S, E) from the files."""
    rows = pd.read_parquet(run / "layer_stats").query("router == @router").sort_values("step")
    return np.stack(rows["load"].to_list())


def aux_loss(run: Path, router: int) -> float:
    rows = pd.read_parquet(run / "layer_stats").query("router == @router")
    return float(np.mean([E * (f / f.sum()) @ p for f, p in zip(rows["load"], rows["mean_prob"], strict=True)]))


def violation(load: np.ndarray) -> np.ndarray:
    return load.max(axis=-1) / load.mean(axis=-1) - 1


def names(kind: str) -> list[str]:
    return [name for _, _, _, name in KINDS[kind]]


def table_with(test: AppTest, column: str) -> pd.DataFrame:
    return next(frame for frame in tables(test) if column in frame)


def heatmaps(test: AppTest, key: str) -> dict[str, np.ndarray]:
    """z by the name of each heatmap trace of the figure with this key."""
    return {trace.get("name", ""): array(trace["z"]) for trace in figure(test, key) if trace["type"] == "heatmap"}


def figure(test: AppTest, key: str) -> list[dict[str, Any]]:
    """The traces of a figure; the page may draw it at alternating places, key_0 and key_1."""
    charts = {chart.proto.id.rsplit("-", 1)[-1]: json.loads(chart.proto.spec) for chart in test.get("plotly_chart")}
    return next(charts[name]["data"] for name in (key, f"{key}_0", f"{key}_1") if name in charts)


def array(values: Any) -> np.ndarray:
    if not isinstance(values, dict):
        return np.asarray(values, float)
    flat = np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"])
    return flat.reshape([int(size) for size in str(values.get("shape", "-1")).split(",")]).astype(float)


def scale(load_E: np.ndarray) -> np.ndarray:
    """Colours of the map: log2 of load over the uniform share, from 1/32 on."""
    ratio = load_E / load_E.mean()
    return np.log2(np.maximum(ratio, 1 / 32))


def test_a_key_names_one_router(run: Path, kind: str) -> None:
    opened = Run(run)
    assert layer_keys.keys(opened) == [0, 1, 2, 3]
    assert list(layer_keys.labels(opened).values()) == names(kind)
    assert [layer_keys.place_of(opened, key) for key in range(4)] == [
        (index, router) for router, (index, _, _, _) in enumerate(KINDS[kind])
    ]
    with pytest.raises(ValueError, match="layer 4 is no MoE layer"):
        layer_keys.place_of(opened, 4)


def test_overview_shows_every_router(run: Path, kind: str, open_page: Open) -> None:
    test = open_page("overview", run="a")
    assert not test.exception, test.exception
    worst = names(kind)[1]
    assert test.title[0].value.startswith(f"Layer {worst} is least balanced: 3 of 4 experts idle, max_violation 3")
    assert f"layers {', '.join(names(kind)[:3])} and {names(kind)[3]}" in test.caption[0].value.lower()
    shown = table_with(test, "expert 0")
    table = table_with(test, "gini")
    curves = table_with(test, "bound")
    for router, name in enumerate(names(kind)):
        load_SE = loads(run, router)
        np.testing.assert_array_equal(shown[shown["layer"] == name].filter(like="expert").to_numpy(), load_SE)
        np.testing.assert_allclose(curves[curves["layer"] == name]["max_violation"], violation(load_SE))
        row = table[table["router"] == name].iloc[0]
        assert (row["layer"], row["tokens"]) == (KINDS[kind][router][0], load_SE.sum(axis=1).mean())
        assert row["aux_loss"] == pytest.approx(aux_loss(run, router))
        assert row["max_violation_window"] == pytest.approx(violation(load_SE.sum(axis=0)))
    most = max(range(4), key=lambda router: aux_loss(run, router))
    metric = next(metric for metric in test.metric if metric.label.startswith("Aux loss"))
    assert (metric.label, float(metric.value)) == (
        f"Aux loss, layer {names(kind)[most]}",
        pytest.approx(aux_loss(run, most), abs=5e-3),
    )


@pytest.mark.parametrize("router", range(4))
def test_replay_and_tokens_show_the_router_chosen(run: Path, kind: str, router: int, open_page: Open) -> None:
    name = names(kind)[router]
    test = open_page("replay", run="a", layer=router, step=7)
    assert not test.exception, test.exception
    assert test.title[0].value.startswith(f"Step 7, layer {name}: ")
    numbers = table_with(test, "load / uniform share")
    assert numbers["assignments"].to_list() == loads(run, router)[7].tolist()
    drawn = heatmaps(test, "replay_map")
    for other, label in enumerate(names(kind)):
        np.testing.assert_allclose(drawn[f"layer {label}"][:, 0], scale(loads(run, other)[7]).clip(-5), err_msg=label)

    test = open_page("tokens", run="a", layer=router, step=7)
    assert not test.exception, test.exception
    rows = pd.read_parquet(run / "decisions").query("router == @router and step == 7").sort_values("token")
    assert f"{len(rows)} tokens of step 7" in test.caption[0].value
    share = rows["experts"].str[0].value_counts(normalize=True)
    table = table_with(test, "all tokens, %").set_index("expert")["all tokens, %"]
    assert {int(e): p for e, p in table.items() if p} == pytest.approx((100 * share).round(2).to_dict())
    texts = pd.read_parquet(run / "tokens").query("step == 7").set_index("token")["text"]
    html = "".join(element.proto.body for element in test.get("html") if "rs-tokens" in element.proto.body)
    assert f"Layer {name}, step 7" in html
    assert {text for text in texts if f">{text}<" in html} == set(texts[rows["token"]])


def test_layouts_paint_each_router_with_its_own_load(run: Path, kind: str, open_page: Open) -> None:
    test = open_page("layouts", run="a", window=10)
    assert not test.exception, test.exception
    title, dense = LAYERS[kind]
    assert test.title[0].value.startswith(title)
    drawn = heatmaps(test, "layout_map")
    assert len(drawn) == 4
    for router, name in enumerate(names(kind)):
        np.testing.assert_allclose(drawn[f"layer {name}"][:, 0], scale(loads(run, router)[-10:].sum(axis=0)).clip(-5))
    table = table_with(test, "top k")
    assert len(table) == 4 + dense
    by_name = table.set_index("layer")
    for router, name in enumerate(names(kind)):
        size = 100 * (router + 1)  # of one expert
        assert by_name.loc[name, "x dense, total"] == pytest.approx((40 + 4 * size) / size)
        assert by_name.loc[name, "x dense, active"] == pytest.approx((40 + size) / size)
    cells = array(next(one for one in figure(test, "layout_map") if one["name"] == "cells")["customdata"])
    targets = {(int(key), int(expert)) for key, expert in cells if key >= 0}
    assert targets == {(key, expert) for key in range(4) for expert in range(E)}


def test_compare_tells_routers_apart(run: Path, kind: str, shown: Path, write_run: Any, open_page: Open) -> None:
    write(shown / "b", kind, turn=1)
    write_run(shown, "plain", range(STEPS))
    for router in range(4):
        test = open_page("compare", runs=["a", "b", "plain"], layer=router)
        assert not test.exception, test.exception
        assert "plain (its layers have other routers" in test.warning[0].value
        name = names(kind)[router]
        assert f"Metrics of layer {name}" in [heading.value for heading in test.subheader]
        metrics = table_with(test, "what it is").set_index("metric")
        layers = table_with(test, "top_k")
        curves = table_with(test, "max_violation, window of 50")
        bars = table_with(test, "assignments").query("step == @LAST")
        for label, path in zip(metrics.columns[:2], (shown / "a", shown / "b"), strict=True):
            load_SE = loads(path, router)
            assert metrics.loc["max_violation, batch", label] == pytest.approx(violation(load_SE).mean())
            assert metrics.loc["max_violation, window", label] == pytest.approx(violation(load_SE.sum(axis=0)))
            assert metrics.loc["aux loss, normalised", label] == pytest.approx(aux_loss(path, router))
            np.testing.assert_allclose(curves.query("run == @label")["max_violation"], violation(load_SE))
            assert bars.query("run == @label")["assignments"].to_list() == load_SE[LAST].tolist()
            of_run = layers[layers["run"] == label].set_index("layer")
            for other, its in enumerate(names(kind)):
                assert of_run.loc[its, "aux_loss"] == pytest.approx(aux_loss(path, other))
                assert of_run.loc[its, "max_violation"] == pytest.approx(violation(loads(path, other)).mean())


def test_summary_names_the_router(run: Path, kind: str) -> None:
    said = CliRunner().invoke(cli, ["summary", str(run)]).output.splitlines()
    heading = next(line for line in said if line.split()[:1] == ["layer"])
    assert heading.split()[:2] == ["layer", "router"]
    rows = [line.split()[:2] for line in said[said.index(heading) + 1 :] if line.strip()]
    assert [row for row in rows if row[0].isdecimal()] == [
        [str(index), str(router)] for router, (index, _, _, _) in enumerate(KINDS[kind])
    ]
