"""Comparing up to 12 runs: small charts on one scale, groups with their spread, colours that stay, ties, resumes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from compared_runs import by_hand, figures, table_with, words, write
from streamlit.testing.v1 import AppTest

from recorder.writer import RunWriter

Open = Callable[..., AppTest]
STEPS = range(60)
LAST = range(10, 60)
OFFSETS = {"aux": 0.0, "none": 1.0, "quantile": 0.1}  # of the losses
BALANCERS = tuple(OFFSETS)
TWELVE = [f"{balancer}{seed}" for balancer in BALANCERS for seed in range(4)]


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three balancers by four seeds; without one the loads are skewed, and the loss is higher by far."""
    folder = tmp_path_factory.mktemp("twelve")
    for place, name in enumerate(TWELVE):
        rng = np.random.default_rng(place)
        balancer, seed = name[:-1], int(name[-1])
        skewed = [20, 6, 4, 2] if balancer == "none" else [8, 8, 8, 8]
        losses_S = 4 + OFFSETS[balancer] + rng.normal(0, 0.01) + rng.normal(0, 0.02, len(STEPS))
        loads_SE = rng.multinomial(32, np.array(skewed) / 32, len(STEPS))
        write(folder, name, STEPS, loads_SE, balancer=balancer, losses_S=losses_S, config={"seed": seed})
    return folder


@pytest.fixture
def compare(twelve: Path, shown: Path, open_page: Open) -> Open:
    """`compare("aux0", "none1", group="balancer")`: the page on these of the twelve and of the shown folder."""
    for path in twelve.iterdir():
        (shown / path.name).symlink_to(path)

    def open_(*runs: str, **choices: Any) -> AppTest:
        test = open_page("compare", runs=list(runs), **choices)
        assert not test.exception, test.exception
        return test

    return open_


def title(figure: Mapping[str, Any]) -> str:
    return (figure["layout"]["title"].get("text") or "").replace("<br>", " ")


def titled(test: AppTest, start: str) -> dict[str, Any]:
    return next(figure for figure in figures(test) if title(figure).removeprefix("<b>").startswith(start))


def array(values: Any) -> np.ndarray:
    """The numbers of a figure as the browser gets them: a list, or base64 with its type."""
    if isinstance(values, dict):
        import base64

        return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"]).astype(float)
    return np.array([np.nan if value is None else value for value in values], float)


def panels(figure: Mapping[str, Any]) -> list[str]:
    return [note["text"] for note in figure["layout"]["annotations"] if note.get("yref") == "paper"]


def losses(run: Path) -> pd.Series:
    frame = pd.read_parquet(run / "steps").query("phase == 'train'")
    return frame.set_index("step")["ce_loss"].sort_index()


# ------------------------------------------------------------------------------------------------- twelve at once


def test_twelve_runs_stand_in_small_charts_on_one_scale(twelve: Path, compare: Open) -> None:
    test = compare(*TWELVE)
    assert test.multiselect(key="runs").value == TWELVE
    heatmaps = [figure for figure in figures(test) if title(figure).startswith("<b>Busiest expert")]
    assert [panels(figure) for figure in heatmaps] == [TWELVE[:4], TWELVE[4:8], TWELVE[8:]]
    assert len({tuple(figure["layout"]["xaxis"]["range"]) for figure in heatmaps}) == 1
    loss = titled(test, "Cross-entropy, last 50 shared steps")
    assert panels(loss) == TWELVE
    axes = [axis for name, axis in loss["layout"].items() if name.startswith("yaxis")]
    assert len(axes) == 12
    assert len({tuple(axis["range"]) for axis in axes}) == 1
    looks = {(trace["line"]["color"], trace["line"]["dash"]) for trace in loss["data"]}
    assert len(looks) == 12
    means = {name: losses(twelve / name).loc[LAST].mean() for name in TWELVE}
    low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    assert f"{means[low]:.4g} ({low}) to {means[high]:.4g} ({high})" in title(loss)
    table = table_with(test, "better").set_index("metric")
    for name in TWELVE:
        for metric, value in by_hand(twelve / name, 1, LAST).items():
            assert value is None or table.loc[metric, name] == pytest.approx(value), metric
    assert "none" not in str(table.loc["max_violation, window", "better"])
    assert set(table_with(test, "setting").set_index("setting").index) == {"balancer", "seed"}
    assert "All 12 runs: top-1 of 4 experts, last step 59." in words(test)


# --------------------------------------------------------------------------------------------------------- groups


def test_groups_have_means_and_spreads_and_say_of_how_many(twelve: Path, compare: Open) -> None:
    chosen = [*TWELVE[:4], *TWELVE[4:6], TWELVE[8]]  # 4 with aux, 2 without, 1 with quantiles
    test = compare(*chosen, group="balancer", smoothing=0.0)
    grouped = {balancer: [name for name in chosen if name.startswith(balancer)] for balancer in BALANCERS}
    table = table_with(test, "spread").set_index(["metric", "group"])
    for metric in ("cross-entropy (nats per token)", "max_violation, window", "load entropy"):
        for balancer, names in grouped.items():
            values = np.array([by_hand(twelve / name, 1, LAST)[metric] for name in names], float)
            line = table.loc[metric, balancer]
            assert line["runs"] == len(names)
            assert line["mean"] == pytest.approx(values.mean())
            assert [line["lowest"], line["highest"]] == pytest.approx([values.min(), values.max()])
            if len(names) > 1:
                assert line["spread"] == pytest.approx(values.std(ddof=1))
            else:
                assert pd.isna(line["spread"])
    verdicts = table.loc["cross-entropy (nats per token)", "verdict"]
    means = table.loc["cross-entropy (nats per token)", "mean"]
    assert means.idxmin() == "aux"
    assert verdicts["none"] == "worse"
    assert pd.isna(verdicts["quantile"]), "one run says nothing on the spread"
    assert pd.isna(verdicts["aux"]), "nor is another best while that one is open"
    assert table.loc["idle experts", "verdict"].tolist() == ["equal"] * 3
    said = words(test).replace("\\", "")
    assert "quantile has one run, so no spread" in said
    assert "Runs of one group differ in their seed alone: the spread is that of seeds." in said

    loss = titled(test, "Cross-entropy")
    assert panels(loss) == ["balancer aux (4 runs)", "balancer none (2 runs)", "balancer quantile (1 run)"]
    means = [trace for trace in loss["data"] if trace["name"] == "mean of the group"]
    bands = [trace for trace in loss["data"] if trace["name"] in ("lowest", "highest")]
    assert len(means) == 2
    for trace, band, names in zip(means, (bands[:2], bands[2:]), (grouped["aux"], grouped["none"]), strict=True):
        values_RS = np.stack([losses(twelve / name).to_numpy(float) for name in names])
        np.testing.assert_allclose(array(trace["y"]), values_RS.mean(axis=0))
        np.testing.assert_allclose(array(band[0]["y"]), values_RS.min(axis=0))
        np.testing.assert_allclose(array(band[1]["y"]), values_RS.max(axis=0))
    aux = np.array([losses(twelve / name).loc[LAST].mean() for name in grouped["aux"]])
    assert f"aux {aux.mean():.4g} ± {aux.std(ddof=1):.2g} (4 runs)" in title(loss)


def test_a_link_that_groups_by_a_setting_keeps_it_where_every_run_is_a_group_of_its_own(compare: Open) -> None:
    test = compare("aux0", "none0", group="balancer")
    assert test.query_params["group"] == "balancer"
    assert "aux and none have one run, so no spread" in words(test)
    assert panels(titled(test, "Cross-entropy")) == ["balancer aux (1 run)", "balancer none (1 run)"]


# -------------------------------------------------------------------------------------------------------- colours


def colours(test: AppTest) -> dict[str, tuple[str, str]]:
    loss = titled(test, "Cross-entropy, last")
    return {trace["name"]: (trace["line"]["color"], trace["line"]["dash"]) for trace in loss["data"]}


def test_a_run_keeps_its_colour_while_others_come_and_go_and_in_a_link(compare: Open) -> None:
    test = compare("aux0", "quantile3", "none0")
    first = colours(test)
    assert len(set(first.values())) == 3
    test.multiselect(key="runs").set_value(["quantile3", "none0", "aux1"]).run()
    second = colours(test)
    assert {name: second[name] for name in ("quantile3", "none0")} == {n: first[n] for n in ("quantile3", "none0")}
    link = test.query_params
    elsewhere = compare(*link["runs"], colours=link["colours"])
    assert colours(elsewhere) == second
    odd = compare("aux0", "none0", colours=["x", "99"])
    assert len(set(colours(odd).values())) == 2, "nonsense in a link is left aside"


# ------------------------------------------------------------------------------------ ties, resumed runs, the axis


def resumed(folder: Path) -> Path:
    """Steps 0 to 29, then 40 to 59 in a second segment; loads and losses near those of a run with aux."""
    layers = [{"index": 1, "kind": "moe", "router": 0, "num_experts": 4, "top_k": 1}]
    text = {"task": "lm", "corpus": [], "vocab_size": 64, "seq_len": 8}
    manifest = {"name": "resumed", "config": {"balancer": "aux", **text, "seed": 9}, "model": {"layers": layers}}
    rng = np.random.default_rng(9)
    for steps, resume in ((range(30), False), (range(40, 60), True)):
        writer = RunWriter(folder / "resumed", manifest=manifest, resume=resume)
        for step in steps:
            load_E = rng.multinomial(32, [0.25] * 4)
            writer.log_step(step, tokens=32, loss=4.0, ce_loss=4 + rng.normal(0, 0.02), wall_time_s=2.0)
            writer.log_layer_stats(
                step, layer=1, router=0, tokens=32, load=load_E, gate_mass=load_E, mean_prob=[0.25] * 4
            )
        writer.finalize("finished")
    return writer.path


def test_ties_are_said_gaps_not_joined_and_differences_are_of_shared_steps(
    twelve: Path, shown: Path, compare: Open
) -> None:
    path = resumed(shown)
    test = compare("aux0", "resumed", group="balancer", smoothing=0.0, against="resumed", x="tokens")
    assert test.title[0].value.endswith(": no more than noise")
    assert table_with(test, "better").set_index("metric").loc["max_violation, window", "better"] == "equal within noise"

    loss = titled(test, "Cross-entropy, last")
    one = next(trace for trace in loss["data"] if trace["name"] == "resumed")
    y, x = array(one["y"]), array(one["x"])
    mine = losses(path)
    np.testing.assert_allclose(y[~np.isnan(y)], mine.to_numpy(float))
    assert np.flatnonzero(np.isnan(y)).tolist() == [30], "a gap where steps are missing"
    np.testing.assert_allclose(x[~np.isnan(y)], 32.0 * np.arange(1, 51), err_msg="tokens of recorded steps, added up")
    assert not any(trace["name"] == "mean of the group" for trace in loss["data"]), "a mean is over steps"

    shared = mine.index.intersection(losses(twelve / "aux0").index)
    behind = (losses(twelve / "aux0")[shared] - mine[shared]).astype(float)
    numbers = table_with(test, "ce_loss minus that of resumed")
    assert numbers["step"].tolist() == shared.tolist()
    np.testing.assert_allclose(numbers["ce_loss minus that of resumed"], behind)
    assert f"{behind.mean():+.3g} (aux0" in title(titled(test, "Cross-entropy minus that of resumed"))

    test = compare("aux0", "resumed", group="balancer", smoothing=0.0)
    means = [trace for trace in titled(test, "Cross-entropy, last")["data"] if trace["name"] == "mean of the group"]
    assert [array(trace["x"]).tolist() for trace in means] == [list(range(30)), list(range(40, 60))]
