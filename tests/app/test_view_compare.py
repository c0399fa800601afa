"""The page that compares runs: every number on it against the Parquet files, and runs that do not match."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from compared_runs import by_hand, figures, loads, table_with, words, write
from opened import tables
from streamlit.testing.v1 import AppTest

Open = Callable[..., AppTest]
Compare = Callable[..., AppTest]
SAMPLES = Path(__file__).resolve().parents[2] / "sample_runs"
STEPS = 50


@pytest.fixture
def compare(shown: Path, open_page: Open) -> Compare:
    """`compare("none", "quantile", step=57)`: the page on these runs of the shown folder."""

    def open_(*runs: str, **choices: Any) -> AppTest:
        test = open_page("compare", runs=list(runs), **choices)
        assert not test.exception, test.exception
        return test

    return open_


@pytest.fixture
def samples(shown: Path) -> Path:
    for path in SAMPLES.iterdir():
        if (path / "run.json").exists():
            (shown / path.name).symlink_to(path)
    return shown


# ------------------------------------------------------------------------------------------------- the numbers


def test_aux_loss_against_quantile_are_the_default(samples: Path, open_page: Open) -> None:
    test = open_page("compare")
    assert not test.exception
    assert test.query_params["runs"] == ["aux-loss", "quantile"]
    assert test.multiselect(key="runs").value == ["aux-loss", "quantile"]


def test_a_run_that_is_shown_is_compared_with_the_one_most_like_it(shown: Path, open_page: Open) -> None:
    write(shown, "wide", range(3), [4] * 8, balancer="aux")
    write(shown, "mine", range(3), [4, 4], balancer="aux")
    write(shown, "twin", range(3), [4, 4], balancer="aux")
    write(shown, "like", range(3), [8, 0], balancer="none")
    write(shown, "newer", range(3), [4] * 8, balancer="quantile")
    write(shown, "newest", range(3), [4] * 4, balancer="quantile")
    for run, pair in (("mine", ["mine", "like"]), ("newer", ["newer", "wide"]), ("gone", ["wide", "newer"])):
        test = open_page("compare", run=run)
        assert not test.exception
        assert test.query_params["runs"] == pair


def test_without_aux_and_quantile_the_newest_is_compared_with_the_one_most_like_it(
    shown: Path, open_page: Open
) -> None:
    write(shown, "like", range(3), [8, 0])
    write(shown, "other", range(3), [4] * 8)
    write(shown, "newest", range(3), [4, 4], balancer="quantile")
    assert open_page("compare").query_params["runs"] == ["newest", "like"]


def test_the_title_answers_with_the_numbers_of_the_files(samples: Path, compare: Compare) -> None:
    idle = {layer: by_hand(SAMPLES / "none", layer, range(350, 400))["idle experts"] for layer in (1, 3)}
    worst = max(idle, key=lambda layer: (idle[layer], -layer))
    assert compare("none", "quantile").title[0].value == (
        f"Without a balancer {idle[worst]:.0f} of 16 experts sit idle in layer {worst}; with quantiles none does"
    )
    busiest = {
        name: 1 + max(by_hand(SAMPLES / name, layer, range(350, 400))["max_violation, window"] or 0 for layer in (1, 3))
        for name in ("aux-loss", "quantile")
    }
    low, high = sorted(busiest, key=busiest.__getitem__)
    phrase = {"aux-loss": "with the aux loss", "quantile": "with quantiles"}
    assert compare("aux-loss", "quantile").title[0].value == (
        f"No expert sits idle; the busiest takes {busiest[low]:.3g} times the uniform share {phrase[low]}, "
        f"{busiest[high]:.3g} times {phrase[high]}"
    )


T_95 = 2.776445105  # Student's t of 4 degrees of freedom, two-sided


Hand = Mapping[str, float | None]


def noise(without: Sequence[Sequence[Hand]], metric: str) -> float:
    """Half the 95% interval of a difference by the jackknife: of two runs the metric without each of five stretches."""
    one, two = ([its[metric] for its in run] for run in without)
    left_out = np.subtract(np.array(two, float), np.array(one, float))
    spread = np.sqrt(4 / 5 * ((left_out - left_out.mean()) ** 2).sum())  # the jackknife's standard error
    return T_95 * spread


@pytest.mark.parametrize("layer", [1, 3])
def test_every_metric_is_that_of_the_files(samples: Path, compare: Compare, layer: int) -> None:
    test = compare("none", "quantile", layer=layer)
    table = table_with(test, "better").set_index("metric")
    hand = {name: by_hand(SAMPLES / name, layer, range(350, 400)) for name in ("none", "quantile")}
    without = [
        [
            by_hand(SAMPLES / name, layer, [step for step in range(350, 400) if not start <= step < start + 10])
            for start in range(350, 400, 10)
        ]
        for name in ("none", "quantile")
    ]
    labels = list(table)[:2]
    higher = {"load entropy"}
    for metric, line in table.iterrows():
        values = [hand[name][str(metric)] for name in ("none", "quantile")]
        for label, value in zip(labels, values, strict=True):
            if value is None:
                assert pd.isna(line[label])
            else:
                assert line[label] == pytest.approx(value, rel=1e-9)
        if metric in ("router entropy", "aux loss, normalised", "drop rate"):
            assert pd.isna(line["better"])
        elif str(metric).startswith("held-out"):
            assert values[0] != values[1]
            assert pd.isna(line["better"]), "two or three probes do not tell how far they waver"
            assert pd.isna(line["noise up to"])
        elif values[0] == values[1]:
            assert line["better"] == "equal"
        else:
            most = noise(without, str(metric))
            assert line["noise up to"] == pytest.approx(most, rel=1e-3)
            best = labels[int((values[1] < values[0]) != (metric in higher))]
            assert line["better"] == ("equal within noise" if abs(values[1] - values[0]) <= most else best)
        if None not in values:
            assert line["difference"] == pytest.approx(values[1] - values[0], rel=1e-6)
    assert "the last 50 steps that all these runs recorded (350 to 399)" in words(test)
    assert "held-out cross-entropy (nats per token) (a window holds too few probes" in words(test)

    every = table_with(test, "max_violation_window")
    for _, line in every.iterrows():
        name = "quantile" if line["run"] == labels[1] else "none"
        value = by_hand(SAMPLES / name, int(line["layer"]), range(350, 400))["max_violation, window"]
        assert line["max_violation_window"] == pytest.approx(value)
    assert len(every) == 4


def test_loads_at_a_step_are_those_of_the_files(samples: Path, compare: Compare) -> None:
    test = compare("none", "quantile", layer=3, step=57)
    assert test.slider[0].value == 57
    numbers = table_with(test, "assignments")
    labels = numbers["run"].unique().tolist()
    said = words(test)
    for label, name in zip(labels, ("none", "quantile"), strict=True):
        load = loads(SAMPLES / name, 3).query("step == 57")["load"].iloc[0]
        mine = numbers[numbers["run"] == label]
        assert mine["assignments"].tolist() == load.tolist()
        assert mine["load / uniform share"].tolist() == pytest.approx((load / load.mean()).tolist())
        assert f"expert {load.argmax()} at {load.max() / load.mean():.3g}x" in said
        assert f"{(load < load.mean() / 10).sum()} of 16 below 0.1x" in said


def test_curves_and_heatmap_are_drawn_in_full_from_the_files(samples: Path, compare: Compare) -> None:
    test = compare("none", "quantile", layer=1)
    losses = next(f for f in tables(test) if list(f) == ["run", "step", "ce_loss"])
    violation = table_with(test, f"max_violation, window of {STEPS}")
    idle = next(f for f in tables(test) if list(f) == ["run", "layer", "step", "idle", "dead"])
    totals = table_with(test, "assignments, all steps")
    for label, name in zip(losses["run"].unique(), ("none", "quantile"), strict=True):
        recorded = pd.read_parquet(SAMPLES / name / "steps").query("phase == 'train'").sort_values("step")
        assert losses[losses["run"] == label]["ce_loss"].tolist() == pytest.approx(recorded["ce_loss"].tolist())
        load = np.stack(loads(SAMPLES / name, 1)["load"].to_list()).astype(float)
        mine = violation[violation["run"] == label]
        assert mine["max_violation"].tolist() == pytest.approx((load.max(1) / load.mean(1) - 1).tolist())
        rolled = pd.DataFrame(load).rolling(STEPS, min_periods=1).sum().to_numpy()
        window = mine["max_violation, window of 50"].tolist()
        assert window == pytest.approx((rolled.max(1) / rolled.mean(1) - 1).tolist())
        idle_S = (rolled < rolled.mean(1, keepdims=True) / 10).sum(1)
        assert idle[idle["run"] == label]["idle"].tolist() == idle_S.tolist()
        assert idle[idle["run"] == label]["dead"].tolist() == (rolled < 0.5).sum(1).tolist()
        total = totals[(totals["run"] == label) & (totals["layer"] == 1)]
        assert total["assignments, all steps"].tolist() == load.sum(axis=0).tolist()


def test_titles_of_the_charts_carry_the_same_numbers(samples: Path, compare: Compare) -> None:
    test = compare("none", "quantile", layer=3)
    titles = " ".join(
        (figure["layout"].get("title", {}).get("text") or "").replace("<br>", " ") for figure in figures(test)
    )
    for name in ("none", "quantile"):
        hand = by_hand(SAMPLES / name, 3, range(350, 400))
        assert f"{hand['cross-entropy (nats per token)']:.4g}" in titles
        assert f"{hand['max_violation, window']:.3g}" in titles
        worst = max(by_hand(SAMPLES / name, layer, range(350, 400))["max_violation, window"] or 0 for layer in (1, 3))
        assert f"{worst + 1:.3g}x" in titles


# -------------------------------------------------------------------------------------- runs that do not match


def test_a8_a_step_clamps_to_the_shorter_run_and_is_wanted_still(shown: Path, compare: Compare) -> None:
    write(shown, "long", range(100), [4, 4])
    write(shown, "short", range(11), [8, 0])
    test = compare("long", "short", step=57)
    assert test.slider[0].value == 10
    assert "They share 11 recorded steps, 0 to 10; the title is about the 11 steps of them." in words(test)
    test.multiselect(key="runs").set_value(["long"]).run()
    write(shown, "other", range(100), [8, 0])
    test = compare("long", "other", step=57)
    assert test.slider[0].value == 57


def test_metrics_are_of_the_steps_that_all_share(shown: Path, compare: Compare) -> None:
    rng = np.random.default_rng(0)
    a = write(shown, "a", range(0, 120), rng.integers(1, 30, (120, 4)), dropped=1)
    b = write(shown, "b", range(60, 200, 2), rng.integers(1, 30, (70, 4)), dropped=2)
    test = compare("a", "b")
    steps = range(60, 120, 2)
    assert "the 30 steps that all these runs recorded (60 to 118)" in words(test)
    table = table_with(test, "better").set_index("metric")
    for label, run in (("a", a), ("b", b)):
        for metric, value in by_hand(run, 1, steps).items():
            shown_value = table.loc[metric, label]
            assert pd.isna(shown_value) if value is None else shown_value == pytest.approx(value), metric
    numbers = table_with(test, f"max_violation, window of {STEPS}")
    assert numbers.groupby("run")["step"].agg(["min", "max", "count"]).to_numpy().tolist() == [
        [0, 119, 120],
        [60, 198, 70],
    ], "drawn in full all the same"


def test_runs_without_a_shared_step(shown: Path, compare: Compare) -> None:
    write(shown, "a", range(20), [8, 0])
    write(shown, "late", range(500, 520), [4, 4])
    test = compare("a", "late")
    assert "no recorded step in common" in words(test)
    assert not test.slider
    table = table_with(test, "better")
    assert table["better"].isna().all()
    assert table["difference"].isna().all()
    assert "each run's own last 50 recorded steps" in words(test)


def test_one_step_runs_draw_no_slider(shown: Path, compare: Compare) -> None:
    write(shown, "a", [0], [8, 0])
    write(shown, "b", [0], [4, 4])
    test = compare("a", "b")
    assert not test.slider
    assert test.title[0].value == "In run a, 1 of 2 experts sits idle in layer 1; in run b, none does"
    assert "the one step that all these runs recorded (0)" in words(test)


def test_different_experts_top_k_and_layers_are_compared_where_that_is_defined(shown: Path, compare: Compare) -> None:
    write(shown, "a", range(5), [8, 8, 0, 0], layers=(1, 3))
    write(shown, "b", range(5), [4, 4, 4, 4, 4, 4, 4, 4], layers=(1, 5), top_k=2)
    test = compare("a", "b", layer=1)
    assert test.title[0].value == "In run a, 2 of 4 experts sit idle in layer 1; in run b, none does"
    assert "Their MoE layers differ." in words(test)
    table = table_with(test, "better").set_index("metric")
    assert table.loc["max_violation, window", ["a", "b"]].tolist() == [1, 0]
    assert pd.isna(table.loc["max_violation, window", "better"]), "bounds differ: 3 and 3 of other experts"
    assert table.loc["cross-entropy (nats per token)", "better"] == "equal"
    assert table.loc["aux loss, normalised", ["a", "b"]].tolist() == [2, 1]
    test = compare("a", "b", layer=5)
    assert "Layer 5 of this run has no experts." in words(test)
    assert pd.isna(table_with(test, "better").set_index("metric").loc["idle experts", "a"])


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (32, 4), (128, 8)])
def test_x9_balanced_aux_losses_read_one_whatever_the_experts(
    shown: Path, compare: Compare, experts: int, top_k: int
) -> None:
    write(shown, "a", range(3), [3 * top_k] * experts, top_k=top_k)
    write(shown, "b", range(3), [9] * 3)
    table = table_with(compare("a", "b"), "better").set_index("metric")
    assert table.loc["aux loss, normalised", ["a", "b"]].tolist() == pytest.approx([1, 1], rel=1e-6)


def test_a_loss_is_called_better_only_on_the_same_text(shown: Path, compare: Compare) -> None:
    write(shown, "a", range(3), [4, 4])
    path = write(shown, "b", range(3), [4, 4])
    manifest = json.loads((path / "run.json").read_text())
    manifest["config"]["vocab_size"] = 128
    (path / "run.json").write_text(json.dumps(manifest))
    table = table_with(compare("a", "b"), "better").set_index("metric")
    assert pd.isna(table.loc["cross-entropy (nats per token)", "better"])
    assert pd.isna(table.loc["cross-entropy (nats per token)", "difference"])
    assert table.loc["idle experts", "better"] == "equal"


def test_unreadable_and_empty_runs_are_named_and_the_others_compared(shown: Path, compare: Compare) -> None:
    write(shown, "a", range(3), [8, 0])
    write(shown, "b", range(3), [4, 4], status="running")
    write(shown, "empty", [], np.zeros((0, 2), int))
    broken = write(shown, "broken", range(3), [4, 4])
    (broken / "run.json").write_text("{")
    test = compare("a", "broken", "empty", "b")
    said = [warning.value for warning in test.warning]
    assert len(said) == 2
    assert said[0].startswith("broken cannot be read and is left out")
    assert said[1] == r"Left out\: empty (finished, no load of a training step recorded)." or "empty" in said[1]
    assert test.title[0].value == "In run a, 1 of 2 experts sits idle in layer 1; in run b, none does"
    assert "last step 2, running" in words(test)


def test_one_run_alone_and_none(shown: Path, open_page: Open) -> None:
    test = open_page("compare")
    assert not test.exception
    assert "There are no runs here yet" in words(test)
    write(shown, "a", range(3), [8, 0])
    test = open_page("compare")
    assert not test.exception
    assert "only one run here, a" in words(test)
    assert "routescope record --balancer quantile" in words(test)


def test_fewer_than_two_picked_asks_for_another(shown: Path, compare: Compare) -> None:
    write(shown, "a", range(3), [8, 0])
    write(shown, "b", range(3), [8, 0])
    assert "Pick two runs or more above" in words(compare("a"))


def test_a10_runs_step_and_layer_survive_a_reload(samples: Path, compare: Compare) -> None:
    test = compare("none", "quantile", step=57, layer=3)
    url = test.query_params
    assert url["runs"] == ["none", "quantile"]
    assert url["step"] in ("57", ["57"])
    assert url["layer"] in ("3", ["3"])


def test_runs_of_one_name_and_of_a_strange_one(shown: Path, compare: Compare) -> None:
    write(shown, "a", range(3), [8, 0], name="better")
    write(shown, "b", range(3), [4, 4], name="better")
    write(shown, "c", range(3), [4, 4], name="difference")
    test = compare("a", "b", "c")
    table = table_with(test, "what it is")
    assert list(table) == ["metric", "better (a)", "better (b)", "run difference", "better", "what it is"]
    assert "in the other 2 runs none does" in test.title[0].value


# ------------------------------------------------------------------------------------------------------ titles


def test_as_many_idle_in_each_run_and_all_alike(shown: Path, compare: Compare) -> None:
    write(shown, "a", range(3), [8, 0])
    write(shown, "b", range(3), [8, 8, 0, 0])
    title = compare("a", "b").title[0].value
    assert (
        title.replace("\\", "")
        == "As many experts sit idle in each of these runs: 1 of 2 and 2 of 4 in the worst layer"
    )
    write(shown, "c", range(3), [4, 4])
    write(shown, "d", range(3), [4, 4])
    title = compare("c", "d").title[0].value
    assert title == "No expert sits idle; the busiest takes 1 times the uniform share in each of these runs"
