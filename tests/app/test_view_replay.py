"""Replay: every number against the Parquet files, and what may and may not move between steps."""

import base64
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from in_process import routescope
from opened import tables
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from app import player
from recorder.writer import RunWriter


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a selection bias in layers 1 and 3, 8 experts each, 30 steps, really recorded. Only to be read."""
    folder = tmp_path_factory.mktemp("biased")
    small = "--steps 30 --num-experts 8 --batch-size 4 --seq-len 32 --d-model 16 --d-ff 32 --num-heads 2"
    options = ["--balancer", "sign-bias", "--bias-rate", "0.01", *small.split()]
    routescope("record", *options, "--out", folder).check_returncode()
    return next(path for path in folder.iterdir() if (path / "run.json").exists())


@pytest.fixture
def add(recorded: Path, biased: Path, shown: Path) -> Callable[[str], Path]:
    """`add("aux")`: that really recorded run among those shown, under that name."""

    def add_(name: str) -> Path:
        (shown / name).symlink_to(biased if name == "sign-bias" else recorded / name)
        return shown / name

    return add_


def write_loads(path: Path, loads: Any, *, steps: Any = None, top_k: int = 1, **more: Any) -> Path:
    """A run of one MoE layer (1) with these loads, a row a step; `more` holds further columns, a value a step."""
    experts = len(loads[0])
    layers = [{"index": 0, "kind": "dense"}, {"index": 1, "kind": "moe", "num_experts": experts, "top_k": top_k}]
    phase = more.pop("phase", "train")
    manifest = {"name": path.name, "config": {"balancer": "none"}, "model": {"layers": layers}}
    with RunWriter(path, manifest=manifest) as writer:
        for i, load in enumerate(loads):
            step = i if steps is None else steps[i]
            load_E = np.array(load)
            writer.log_step(step, phase=phase, tokens=int(load_E.sum()) // top_k, loss=1.0)
            extra = {"gate_mass": load_E * 0.5} | {name: values[i] for name, values in more.items()}
            extra |= {} if "tokens" in extra else {"tokens": int(load_E.sum()) // top_k}
            writer.log_layer_stats(
                step, phase=phase, layer=1, router=0, load=load_E, mean_prob=np.full(experts, 1 / experts), **extra
            )
    return path


def stats(path: Path, layer: int, step: int) -> pd.Series:
    rows = pq.read_table(path / "layer_stats").to_pandas()
    return rows[(rows["phase"] == "train") & (rows["layer"] == layer) & (rows["step"] == step)].iloc[0]


def clean(test: AppTest) -> AppTest:
    assert not test.exception, test.exception
    return test


def said(test: AppTest) -> str:
    return "\n".join(element.value for element in (*test.caption, *test.markdown, *test.subheader))


def metrics_of(test: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in test.metric}


def table(test: AppTest, key: str) -> pd.DataFrame:
    # AppTest tells no keys of tables: go by a column, and by their order where two are alike.
    column = "load / uniform share" if key == "replay_experts" else "change (points)"
    return [frame for frame in tables(test) if column in frame][-1 if key == "replay_lost" else 0]


def figure(test: AppTest, name: str) -> dict[str, Any]:
    """The figure shown under this key; of those that alternate between two places the one on top."""
    charts = {chart.proto.id.rsplit("-", 1)[-1]: json.loads(chart.proto.spec) for chart in test.get("plotly_chart")}
    if name in charts:
        return charts[name]
    place, _ = test.session_state["_moving_places"][name]
    return charts[f"{name}_{place}"]


def numbers(values: Any) -> list[float]:
    """An array of a figure, whether plain or packed."""
    if isinstance(values, dict):
        return np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"]).astype(float).tolist()
    return list(values)


@pytest.mark.parametrize(
    ("name", "balancer", "layer", "step"),
    [("sign-bias", "sign-bias", 3, 17), ("aux", "aux", 1, 59), ("plain", "none", 0, 1)],
)
def test_every_number_equals_the_parquet_files(
    add: Callable[..., Path], open_page: Callable[..., AppTest], name: str, balancer: str, layer: int, step: int
) -> None:
    path = add(name)
    row, before = stats(path, layer, step), stats(path, layer, step - 1)
    load, earlier = row["load"], before["load"]
    mean = load.sum() / 8
    ratio = load / mean
    idle = int((load < 0.1 * mean).sum())
    share, earlier_share = 100 * load / load.sum(), 100 * earlier / earlier.sum()
    change = share - earlier_share

    test = clean(open_page("replay", run=path.name, layer=layer, step=step, expert=5))
    idle_words = f"{idle} of 8 experts idle" if idle else "no expert idle"
    assert test.title[0].value == f"Step {step}, layer {layer}: {idle_words}, busiest {ratio.max():.1f}x"
    found = metrics_of(test)
    assert float(found["Max violation"]) == pytest.approx(load.max() / mean - 1, rel=0.005)
    assert found["Idle experts"] == f"{idle} of 8"
    assert float(found["Router entropy"]) == pytest.approx(row["router_entropy"], rel=0.005)

    text = said(test)
    assert f"Tokens: {row['tokens']:,}" in text
    assert f"Assignments: {load.sum():,}" in text
    assert f"Unused in this step: {(load == 0).sum()}" in text
    rerouted = "-" if pd.isna(row["rerouted"]) else f"{100 * row['rerouted'] / load.sum():.1f}%"
    assert f"Rerouted: {rerouted}" in text
    assert row["dropped"] is None
    assert "Dropped: -" in text, "null is no 0"
    moved = f", {change[5]:+.2f} points of its share since" if change[5] else ", the same share as at"
    assert f"Expert 5: {load[5]:,} assignments" in text
    assert f"{moved} step {step - 1}" in text

    shown_numbers = table(test, "replay_experts")
    assert shown_numbers["assignments"].tolist() == load.tolist()
    assert shown_numbers["load / uniform share"].tolist() == pytest.approx(ratio.tolist())
    assert shown_numbers["share of assignments (%)"].tolist() == pytest.approx((100 * load / load.sum()).tolist())
    assert shown_numbers["gate weight (sum)"].tolist() == pytest.approx(row["gate_mass"].tolist())
    assert shown_numbers["share of gate weight (%)"].tolist() == pytest.approx(
        (100 * row["gate_mass"] / row["gate_mass"].sum()).tolist()
    )
    assert shown_numbers["mean router probability"].tolist() == pytest.approx(row["mean_prob"].tolist())
    assert shown_numbers["assignments before"].tolist() == earlier.tolist()
    assert shown_numbers["share before (%)"].tolist() == pytest.approx(earlier_share.tolist())
    assert shown_numbers["share change (points)"].tolist() == pytest.approx(change.tolist(), abs=1e-8)
    assert "dropped" not in shown_numbers

    order = sorted(range(8), key=lambda expert: (-change[expert], expert))
    gained, lost = table(test, "replay_gained"), table(test, "replay_lost")
    assert gained["expert"].tolist() == [expert for expert in order if change[expert] > 0][:5]
    order = sorted(range(8), key=lambda expert: (change[expert], expert))
    assert lost["expert"].tolist() == [expert for expert in order if change[expert] < 0][:5]
    for frame in (gained, lost):
        for line in frame.to_dict("records"):
            expert = line["expert"]
            seen = (line["before (%)"], line["now (%)"], line["change (points)"])
            assert seen == pytest.approx((earlier_share[expert], share[expert], change[expert]), abs=1e-8)
    assert f"{(change > 0).sum()} experts gained and {(change < 0).sum()} experts lost" in text.replace(
        "1 expert ", "1 experts "
    ).replace("no expert ", "0 experts ")

    bars = figure(test, "replay_bars")["data"][0]
    floor = math.log2(1 / 16) - 0.5
    heights = [math.log2(value) if value >= 1 / 16 else floor for value in ratio]
    assert numbers(bars["y"]) == pytest.approx(heights)
    if balancer == "sign-bias":
        bias, earlier_bias = row["expert_bias"].astype(float), before["expert_bias"].astype(float)
        assert shown_numbers["bias"].tolist() == pytest.approx(bias.tolist())
        assert gained["bias change"].tolist() == pytest.approx((bias - earlier_bias)[gained["expert"]].tolist())
        assert f"from {bias.min():+.4g} (expert {bias.argmin()}) to {bias.max():+.4g} (expert {bias.argmax()})" in text
        assert f"The bias changed for {(bias != earlier_bias).sum()} experts" in text
        assert "No bias is drawn" not in text
    else:
        assert f"No bias is drawn: none is recorded here; the balancer is: {balancer}." in text
        assert "bias" not in shown_numbers


def test_the_map_shows_every_layer_at_this_step(add: Callable[..., Path], open_page: Callable[..., AppTest]) -> None:
    path = add("aux")
    test = clean(open_page("replay", run=path.name, layer=1, step=12))
    hovers = next(trace for trace in figure(test, "replay_map")["data"] if trace.get("name") == "cells")["text"]
    for layer in (0, 1):
        load = stats(path, layer, 12)["load"]
        for expert in range(8):
            ratio = load[expert] * 8 / load.sum()
            assert (
                f"<b>layer {layer}, expert {expert}</b><br>"
                f"{ratio:.3f} x the uniform share, {load[expert]:,} assignments" in hovers
            )


def test_the_line_in_the_strip_stands_at_the_step(add: Callable[..., Path], open_page: Callable[..., AppTest]) -> None:
    path = add("plain")
    test = clean(open_page("replay", run=path.name, step=12))
    before = figure(test, "replay_strip")
    # 60 steps, each with an equal part: the middle of step 12 is at 12.5 of 60.
    assert f"{12.5 / 60:.5f} * (100%" in "".join(element.proto.body for element in test.get("html"))
    test.slider(key="step").set_value(20)
    clean(test.run())
    assert f"{20.5 / 60:.5f} * (100%" in "".join(element.proto.body for element in test.get("html"))
    assert figure(test, "replay_strip") == before, "an unchanged figure is not drawn anew"


def test_a5_axes_colours_and_sizes_stay(shown: Path, open_page: Callable[..., AppTest]) -> None:
    bias = [np.zeros(4), np.array([-0.5, 0.1, 0.2, 0.2]), np.array([-0.25, 0.0, 0.1, 0.15])]
    write_loads(shown / "a", [[25, 25, 25, 25], [97, 1, 1, 1], [50, 25, 15, 10]], expert_bias=bias)
    drawn = []
    for step in range(3):
        test = clean(open_page("replay", run="a", step=step))
        drawn.append(figure(test, "replay_bars"))
    first = drawn[0]["layout"]
    for one in drawn[1:]:
        for axis in ("xaxis", "yaxis", "xaxis2", "yaxis2"):
            assert one["layout"][axis] == first[axis]
        assert one["layout"]["coloraxis"] == first["coloraxis"]
        assert one["layout"]["height"] == first["height"]
        assert one["layout"]["margin"] == first["margin"]
        assert one["layout"]["showlegend"] == first["showlegend"]
        entries = [trace["name"] for trace in one["data"] if trace.get("showlegend") is not False]
        assert entries == [trace["name"] for trace in drawn[0]["data"] if trace.get("showlegend") is not False]
    colours = [one["data"][0]["marker"]["color"] for one in drawn]
    assert set(colours[0]) == {"#ffffff"}, "all .25 is balanced"
    assert colours[2][1] == colours[0][1], "the same value has the same colour at any step"
    assert len({*colours[1]}) == 2
    assert colours[1][0] != "#ffffff"
    assert first["yaxis"]["range"][1] > math.log2(4), "up to the bound E / k"
    low, high = first["yaxis2"]["range"]
    assert low < -0.5
    assert high > 0.2


def test_a8_one_step_has_no_slider(shown: Path, open_page: Callable[..., AppTest]) -> None:
    write_loads(shown / "one", [[3, 5]], steps=[7])
    test = clean(open_page("replay", run="one", step=57))
    assert test.title[0].value == "Step 7, layer 1: no expert idle, busiest 1.2x"
    assert not test.slider
    assert not test.select_slider
    assert "play" not in {button.key for button in test.button}
    assert "Only one step is recorded" in said(test)
    assert "previous" not in json.dumps(figure(test, "replay_bars")), "there never is one"


def test_a8_the_step_is_clamped_and_comes_back(
    shown: Path, write_run: Callable[..., Path], open_page: Callable[..., AppTest]
) -> None:
    write_run(shown, "long", range(100))
    write_run(shown, "short", range(11))
    write_run(shown, "late", range(500, 520))
    test = clean(open_page("replay", run="long", step=57))
    assert test.title[0].value.startswith("Step 57,")
    for run, expected in (("short", 10), ("late", 500), ("long", 57)):
        test.sidebar.selectbox(key="run").set_value(run)
        clean(test.run())
        assert test.title[0].value.startswith(f"Step {expected},")
        assert test.slider(key="step").value == expected


def test_a10_step_and_layer_survive_other_pages(
    shown: Path, write_run: Callable[..., Path], open_page: Callable[..., AppTest]
) -> None:
    write_run(shown, "a", range(100))
    test = clean(open_page("replay", run="a", step=57, layer=3))
    for page in ("compare", "layouts"):
        for name in (page, "replay"):
            test._page_hash = calc_hash(name)
            test.query_params.clear()
            clean(test.run())
        assert test.title[0].value.startswith("Step 57, layer 3:")
        assert (test.query_params["step"], test.query_params["layer"]) == ("57", "3")


def test_steps_recorded_sparsely_are_compared_with_the_one_before(
    shown: Path, open_page: Callable[..., AppTest]
) -> None:
    write_loads(shown / "sparse", [[4, 4], [8, 0], [2, 6], [5, 3]], steps=[0, 7, 8, 300])
    test = clean(open_page("replay", run="sparse", step=300))
    assert "What changed since step 8" in said(test)
    assert table(test, "replay_gained").to_dict("records") == [
        {"expert": 0, "before (%)": 25, "now (%)": 62.5, "change (points)": 37.5}
    ]
    assert table(test, "replay_lost").to_dict("records") == [
        {"expert": 1, "before (%)": 75, "now (%)": 37.5, "change (points)": -37.5}
    ]
    test.select_slider(key="step").set_value(0)
    clean(test.run())
    assert "Step 0 is the first one recorded" in said(test)
    assert table(test, "replay_gained").empty


def test_play_moves_the_title_and_the_numbers(
    shown: Path, open_page: Callable[..., AppTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_loads(shown / "a", [[8, 8], [12, 4], [16, 0]])
    now = [1000.0]
    monkeypatch.setattr(player.time, "monotonic", lambda: now[0])
    test = clean(open_page("replay", run="a", step=0))
    test.button(key="play").click()
    clean(test.run())
    seen = []
    for _ in range(2):
        now[0] += player.FRAME_S
        clean(test.run())
        seen.append((test.title[0].value, metrics_of(test)["Max violation"], metrics_of(test)["Idle experts"]))
    assert seen == [
        ("Step 1, layer 1: no expert idle, busiest 1.5x", "0.5", "0 of 2"),
        ("Step 2, layer 1: 1 of 2 experts idle, busiest 2.0x", "1", "1 of 2"),
    ]
    assert len(test.title) == 1


def test_another_layer_and_an_expert_can_be_picked(
    shown: Path, write_run: Callable[..., Path], open_page: Callable[..., AppTest]
) -> None:
    path = write_run(shown, "a", range(20), bias=True)
    test = clean(open_page("replay", run="a", step=6))
    assert test.title[0].value.startswith("Step 6, layer 1:")
    test.segmented_control(key="layer").set_value(3)
    clean(test.run())
    assert test.title[0].value.startswith("Step 6, layer 3:")
    assert table(test, "replay_experts")["assignments"].tolist() == stats(path, 3, 6)["load"].tolist()
    test.selectbox(key="expert").set_value("2")
    clean(test.run())
    assert test.query_params["expert"] == "2"
    assert "Expert 2: 2 assignments, 1 x the uniform share, the same share as at step 5." in said(test)
    widths = figure(test, "replay_bars")["data"][0]["marker"]["line"]["width"]
    assert numbers(widths) == [1, 1, 3, 1]


def test_shares_are_compared_where_the_tokens_differ(shown: Path, open_page: Callable[..., AppTest]) -> None:
    write_loads(shown / "a", [[2, 6], [8, 24], [30, 34]])
    test = clean(open_page("replay", run="a", step=1))
    assert "no expert gained and no expert lost" in said(test)
    assert "the tokens went from 8 to 32, which shares allow for" in said(test)
    assert table(test, "replay_gained").empty, "four times the tokens, the same shares"
    hover = figure(test, "replay_bars")["data"][0]["hovertext"][0]
    assert "step 0: 2 assignments, 25.00% (+0.00 points)" in hover


def test_a_bias_that_never_moves_is_not_shown_as_if_it_did(shown: Path, open_page: Callable[..., AppTest]) -> None:
    write_loads(shown / "zero", [[8, 8], [12, 4]], expert_bias=[np.zeros(2)] * 2)
    test = clean(open_page("replay", run="zero", step=1))
    assert "No bias is drawn: it is 0 for every expert at every recorded step" in said(test)
    assert "yaxis2" not in figure(test, "replay_bars")["layout"]
    write_loads(shown / "fixed", [[8, 8], [12, 4]], expert_bias=[np.array([0.5, -0.25])] * 2)
    test = clean(open_page("replay", run="fixed", step=1))
    assert "It is the same at every recorded step: no balancer moves it here." in said(test)
    assert figure(test, "replay_bars")["layout"]["title"]["text"].startswith("<b>Load and fixed bias per expert")
    assert "bias change" not in table(test, "replay_gained")
    write_loads(shown / "moved", [[8, 8], [12, 4]], expert_bias=[np.zeros(2), np.array([-0.1, 0.1])])
    test = clean(open_page("replay", run="moved", step=1))
    assert table(test, "replay_gained")["bias change"].tolist() == pytest.approx([-0.1])


# ------------------------------------------------------------------------------------------- the text beside it


def test_the_text_is_that_of_the_last_recorded_step_at_or_before(
    add: Callable[[str], Path], open_page: Callable[..., AppTest]
) -> None:
    path = add("aux")
    test = clean(open_page("replay", run=path.name, layer=1, step=34, phase="train", sequence=2))
    assert "Decisions of step 30, the last with recorded decisions at or before step 34." in said(test)
    tokens, decisions = (pq.read_table(path / name).to_pandas() for name in ("tokens", "decisions"))
    tokens = tokens[(tokens["phase"] == "train") & (tokens["step"] == 30) & (tokens["sequence"] == 2)]
    decisions = decisions[(decisions["phase"] == "train") & (decisions["step"] == 30) & (decisions["layer"] == 1)]
    rows = tokens.merge(decisions, on="token").sort_values("position")
    body = next(html.proto.body for html in test.get("html") if "rs-tokens" in html.proto.body)
    assert re.findall(r'data-e="([\d ]*)"', body) == [" ".join(map(str, experts)) for experts in rows["experts"]]
    used = len({expert for experts in rows["experts"] for expert in experts})
    title = figure(test, "replay_tokens")["layout"]["title"]["text"]
    assert f"Its {len(rows)} tokens use {used} of 8 experts, layer 1, step 30" in title
    test.slider(key="step").set_value(41)
    clean(test.run())
    assert "Decisions of step 40, the last" in said(test)
    probe = clean(open_page("replay", run=path.name, layer=1, step=20))
    assert "Decisions of this step. The probe is the same held-out text each time" in said(probe)


def test_no_text_before_the_first_decisions_or_without_any(
    shown: Path, write_run: Callable[..., Path], open_page: Callable[..., AppTest]
) -> None:
    write_run(shown, "a", range(5, 25))
    test = clean(open_page("replay", run="a", step=7))
    assert "None of phase train at or before step 7: the first decisions are those of step 10." in said(test)
    shutil.rmtree(shown / "a" / "decisions")
    assert "No single decisions were recorded in this run" in said(clean(open_page("replay", run="a", step=7)))


def test_drops_null_gate_weights_and_changed_tokens(shown: Path, open_page: Callable[..., AppTest]) -> None:
    write_loads(
        shown / "a",
        [[8, 8, 0, 0], [16, 8, 4, 4]],
        top_k=2,
        dropped=[np.array([0, 0, 0, 0]), np.array([6, 2, 0, 0])],
        invalid=[0, 3],
    )
    test = clean(open_page("replay", run="a", step=1))
    text = said(test)
    assert "Dropped: 8 (25.0%)" in text
    assert "Not routed: 3" in text
    assert "the tokens went from 8 to 16" in text
    assert table(test, "replay_experts")["dropped"].tolist() == [6, 2, 0, 0]
    test.slider(key="step").set_value(0)
    assert "Dropped: 0 (0.0%)" in said(clean(test.run()))


def test_a_step_without_tokens_shows_no_zero(shown: Path, open_page: Callable[..., AppTest]) -> None:
    write_loads(shown / "a", [[8, 8], [0, 0]], router_entropy=[0.5, None])
    test = clean(open_page("replay", run="a", step=1))
    assert test.title[0].value == "Step 1, layer 1: no tokens"
    assert metrics_of(test) == {"Max violation": "-", "Idle experts": "-", "Router entropy": "-"}
    assert "Unused in this step: -" in said(test)


def test_a_run_without_training_steps_shows_another_phase(shown: Path, open_page: Callable[..., AppTest]) -> None:
    write_loads(shown / "a", [[8, 8], [16, 0]], phase="eval")
    test = clean(open_page("replay", run="a"))
    assert test.title[0].value == "Step 1, layer 1: 1 of 2 experts idle, busiest 2.0x"
    assert "the steps shown are of phase eval" in said(test)


def test_failed_running_empty_and_unreadable_runs(
    shown: Path, write_run: Callable[..., Path], open_page: Callable[..., AppTest]
) -> None:
    write_run(shown, "failed", range(5), status="failed")
    write_run(shown, "growing", range(5), status="running")
    write_run(shown, "new", [], status="running")
    (shown / "broken").mkdir()
    (shown / "broken" / "run.json").write_text("{")
    for run in ("failed", "growing"):
        test = clean(open_page("replay", run=run, step=4))
        assert test.title[0].value.startswith("Step 4, layer 1:")
    for run in ("new", "broken"):
        test = clean(open_page("replay", run=run))
        assert test.title[0].value == "Replay"
        assert test.info or test.error
    shutil.rmtree(shown / "broken")


def test_no_runs_at_all(shown: Path, open_page: Callable[..., AppTest]) -> None:
    test = clean(open_page("replay"))
    assert test.title[0].value == "Replay"
    assert "There are no runs here yet." in test.info[0].value
