"""The overview of a run: every number against the Parquet files, its title against the layers, and every state.

Shapes: S steps, E experts.
"""

import base64
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from opened import tables
from streamlit.testing.v1 import AppTest

from app.figures.inputs import Curve
from app.views import overview as page
from app.views import overview_losses
from recorder.writer import RunWriter

Open = Callable[..., AppTest]
Write = Callable[..., Path]
UNUSED = 0.1  # of the uniform share
COLUMN_OF = {
    "load_numbers": "expert 0",
    "losses_numbers": "cross-entropy",
    "violation_numbers": "bound",
    "unused_numbers": "idle experts",
    "shares_numbers": "expert 0 (%)",
    "layers": "gini",
    "events": "kind",
}


def rows(run: Path, table: str, **equal: Any) -> pd.DataFrame:
    """The rows of a table as the files hold them, in order of steps."""
    frame = pq.read_table(run / table).to_pandas(ignore_metadata=True)
    for name, value in equal.items():
        frame = frame[frame[name] == value]
    return frame.sort_values("step")


def loads(run: Path, layer: int, column: str = "load") -> np.ndarray:
    return np.stack(rows(run, "layer_stats", phase="train", layer=layer)[column].to_list())


def trailing(load_SE: np.ndarray, window: int) -> np.ndarray:
    return np.stack([load_SE[max(0, row + 1 - window) : row + 1].sum(axis=0) for row in range(len(load_SE))])


def violation(load: np.ndarray) -> np.ndarray:
    return load.max(axis=-1) / load.mean(axis=-1) - 1


def idle(load: np.ndarray) -> np.ndarray:
    return (load < UNUSED * load.mean(axis=-1, keepdims=True)).sum(axis=-1)


def table(test: AppTest, key: str) -> pd.DataFrame:
    assert not test.exception, test.exception
    # A table that nothing can be picked in reaches the browser without its key: a column tells it.
    return next(frame for frame in tables(test) if COLUMN_OF[key] in frame)


def figures(test: AppTest) -> dict[str, dict[str, Any]]:
    """Figures by the key of their chart."""
    found = {}
    for element in test.get("plotly_chart"):
        proto = element.proto
        found[proto.id.rpartition("-")[2]] = json.loads(proto.spec)
    return found


def array(value: Any) -> np.ndarray:
    """An array of a plotly figure: a list, or base64 of its bytes."""
    if isinstance(value, dict):
        flat = np.frombuffer(base64.b64decode(value["bdata"]), dtype=np.dtype(value["dtype"]))
        return flat.reshape([int(n) for n in str(value.get("shape", len(flat))).split(",")])
    return np.array([np.nan if item is None else item for item in value])


def words(test: AppTest) -> str:
    kinds = (test.title, test.markdown, test.caption, test.info, test.warning, test.error, test.code, test.subheader)
    return "\n".join(element.value for kind in kinds for element in kind)


@pytest.fixture
def real(recorded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ROUTESCOPE_DIRS", str(recorded))
    monkeypatch.chdir(tmp_path)
    return recorded


# ----------------------------------------------------------------------------------------------- the large numbers


@pytest.mark.parametrize("window", [50, 10])
@pytest.mark.parametrize(("run_id", "top_k"), [("plain", 1), ("aux", 2)])
def test_large_numbers_and_title_are_those_of_the_files(
    real: Path, open_page: Open, run_id: str, top_k: int, window: int
) -> None:
    test = open_page("overview", run=run_id, window=window)
    assert not test.exception, test.exception
    run = real / run_id
    summed = [loads(run, layer)[-window:].sum(axis=0) for layer in (0, 1)]
    violations = [float(violation(load_E)) for load_E in summed]
    worst = int(np.argmax(violations))
    idle_L = [int(idle(load_E)) for load_E in summed]
    dead_L = [int((load_E == 0).sum()) for load_E in summed]
    aux_L = []
    for layer in (0, 1):
        load_SE, prob_SE = loads(run, layer), loads(run, layer, "mean_prob")
        share_SE = load_SE / load_SE.sum(axis=1, keepdims=True)
        aux_L.append(8 * (share_SE * prob_SE).sum(axis=1)[-window:].mean())
    numbers = {metric.label: metric.value for metric in test.metric}
    ce = rows(run, "steps", phase="train")["ce_loss"].tail(window).mean()
    assert float(numbers["Cross-entropy"]) == pytest.approx(ce, rel=1e-3)
    assert float(numbers[f"max_violation, layer {worst}"]) == pytest.approx(violations[worst], rel=5e-3)
    for word, counts in (("Idle", idle_L), ("Dead", dead_L)):
        label = f"{word}, layer {int(np.argmax(counts))}" if max(counts) else word
        assert numbers[label] == f"{max(counts)} of 8"
    assert float(numbers[f"Aux loss, layer {int(np.argmax(aux_L))}"]) == pytest.approx(max(aux_L), rel=5e-3)
    assert numbers["Steps"] == "60"

    title = test.title[0].value
    assert f"max_violation {numbers[f'max_violation, layer {worst}']} of at most {8 // top_k - 1}" in title
    assert f"ayer {worst}" in title
    if max(idle_L):
        assert "All experts are busy" not in title
        assert (f"{idle_L[worst]} of 8" if idle_L[worst] else "no expert idle") in title
    else:
        assert title.startswith("All experts are busy in every MoE layer; least balanced is layer")
    assert f"the last {window} recorded training steps (steps {60 - window} to 59)" in test.caption[0].value
    helps = {metric.label.split(",")[0]: metric.help for metric in test.metric}
    assert "none was recorded" in helps["Aux loss"] if run_id == "plain" else "As recorded" in helps["Aux loss"]
    assert f"E/k - 1 = {8 // top_k - 1}" in helps["max_violation"]


def test_the_layer_table_is_that_of_the_files(real: Path, open_page: Open) -> None:
    frame = table(open_page("overview", run="plain"), "layers")
    for layer in (0, 1):
        line = frame[frame["layer"] == layer].iloc[0]
        stats = rows(real / "plain", "layer_stats", phase="train", layer=layer).tail(50)
        load_SE = np.stack(stats["load"].to_list())
        prob_SE = np.stack(stats["mean_prob"].to_list())
        summed_E = load_SE.sum(axis=0)
        share_SE = load_SE / load_SE.sum(axis=1, keepdims=True)
        log_SE = np.log(share_SE, where=share_SE > 0, out=np.zeros_like(share_SE))
        pairs_S = np.abs(load_SE[:, :, None] - load_SE[:, None, :]).sum(axis=(1, 2))
        expected = {
            "num_experts": 8,
            "top_k": 1,
            "tokens": stats["tokens"].mean(),
            "max_violation_window": violation(summed_E),
            "max_violation": violation(load_SE).mean(),
            "idle_experts": idle(summed_E),
            "dead_experts": (summed_E == 0).sum(),
            "aux_loss": 8 * (share_SE * prob_SE).sum(axis=1).mean(),
            "router_entropy": stats["router_entropy"].mean(),
            "load_entropy": (-(share_SE * log_SE).sum(axis=1) / math.log(8)).mean(),
            "load_cv": (load_SE.std(axis=1) / load_SE.mean(axis=1)).mean(),
            "gini": (pairs_S / (2 * 64 * load_SE.mean(axis=1))).mean(),
        }
        assert {name: float(line[name]) for name in expected} == pytest.approx(expected, rel=1e-6)
        ids = np.flatnonzero(summed_E < UNUSED * summed_E.mean())
        assert ("" if pd.isna(line["idle_ids"]) else line["idle_ids"]) == ", ".join(map(str, ids))
        assert line["idle_experts"] == len(ids)
        assert pd.isna(line["drop_rate"])  # nothing drops tokens here: no value, not 0
        assert pd.isna(line["rerouted_share"])  # nor has it a bias


# --------------------------------------------------------------------------------------------------- the charts


def test_numbers_under_the_charts_are_those_of_the_files(real: Path, open_page: Open) -> None:
    test = open_page("overview", run="aux", layer=1)
    run = real / "aux"
    load = table(test, "load_numbers")
    curves, unused = table(test, "violation_numbers"), table(test, "unused_numbers")
    for layer in (0, 1):
        load_SE = loads(run, layer)
        mine = load[load["layer"] == layer]
        assert mine["step"].tolist() == list(range(60))
        assert np.array_equal(mine.drop(columns=["step", "layer"]).to_numpy(), load_SE)
        window_SE = trailing(load_SE, 50)
        mine = curves[curves["layer"] == layer]
        assert mine["max_violation"].tolist() == pytest.approx(violation(load_SE).tolist())
        assert mine["max_violation, window of 50"].tolist() == pytest.approx(violation(window_SE).tolist())
        assert set(mine["bound"]) == {3.0}
        mine = unused[unused["layer"] == layer]
        assert mine["idle experts"].tolist() == idle(window_SE).tolist()
        assert mine["dead experts"].tolist() == (window_SE == 0).sum(axis=1).tolist()
    shares = table(test, "shares_numbers").drop(columns="step").to_numpy()
    load_SE = loads(run, 1)
    assert shares == pytest.approx(100 * load_SE / load_SE.sum(axis=1, keepdims=True), rel=1e-5)
    assert shares.sum(axis=1) == pytest.approx(100)
    total_E = load_SE.sum(axis=0)
    title = figures(test)["shares"]["layout"]["title"]["text"]
    assert f"expert {total_E.argmax()} took {100 * total_E.max() / total_E.sum():.3g}% of all" in title

    losses = table(test, "losses_numbers").set_index("step")
    train, probe = rows(run, "steps", phase="train"), rows(run, "steps", phase="probe")
    assert losses["training loss"].tolist() == pytest.approx(train["loss"].tolist())
    assert losses["cross-entropy"].tolist() == pytest.approx(train["ce_loss"].tolist())
    held_out = losses["held-out cross-entropy (probe)"].dropna()
    assert held_out.index.tolist() == probe["step"].tolist() == [0, 20, 40, 59]
    assert held_out.tolist() == pytest.approx(probe["ce_loss"].tolist())


def test_what_is_drawn_is_what_the_files_hold(real: Path, open_page: Open) -> None:
    drawn = figures(open_page("overview", run="aux"))
    run = real / "aux"
    cells = [trace for trace in drawn["load"]["data"] if trace["type"] == "heatmap"]
    assert len(cells) == 2
    for layer, trace in enumerate(cells):
        load_SE = loads(run, layer)
        ratio_ES = (load_SE / load_SE.mean(axis=1, keepdims=True)).T
        z_ES = array(trace["z"])
        within = (ratio_ES >= 1 / 16) & (ratio_ES <= 16)
        assert z_ES[within] == pytest.approx(np.log2(ratio_ES[within]), abs=1e-5)
        assert (z_ES[ratio_ES < 1 / 16] == -5).all()  # idle has a place of its own
    thick = [trace for trace in drawn["violation"]["data"] if trace["line"]["width"] == 3]
    expected = [violation(trailing(loads(run, layer), 50)) for layer in (0, 1)]
    assert np.array([array(trace["y"]) for trace in thick]) == pytest.approx(np.array(expected))
    bounds = [shape["y0"] for shape in drawn["violation"]["layout"]["shapes"] if shape["line"].get("dash") == "dash"]
    assert bounds == [3.0, 3.0]


def test_a_loss_that_is_the_cross_entropy_is_drawn_once(real: Path, open_page: Open) -> None:
    test = open_page("overview", run="plain")
    assert "The training loss is the cross-entropy" in words(test)
    names = {trace["name"] for trace in figures(test)["losses"]["data"]}
    assert names == {"cross-entropy", "held-out cross-entropy (probe)"}


def test_held_out_is_set_against_training_over_the_same_steps(real: Path, open_page: Open) -> None:
    test = open_page("overview", run="aux")
    ce, probe = (rows(real / "aux", "steps", phase=phase).set_index("step")["ce_loss"] for phase in ("train", "probe"))
    last, held_out = ce.loc[10:59], probe.loc[10:59]
    assert (len(last), len(held_out)) == (50, 3)
    slope, start = statistics.linear_regression(last.index, last)
    there = statistics.mean(start + slope * step for step in held_out.index)
    scatter = statistics.pstdev(last - (start + slope * last.index.to_numpy()))
    apart = held_out.mean() - there
    title = figures(test)["losses"]["layout"]["title"]["text"].replace("<br>", " ")
    assert (
        f"{last.mean():.4g} over the last 50 steps; "
        f"held-out {held_out.mean():.4g} against {there:.4g} of training at the same steps, "
    ) in title
    said = f"{abs(apart):.2g} {'above' if apart > 0 else 'below'}"
    assert (said if abs(apart) > scatter else "no further apart than single steps scatter") in title
    assert f"single steps scatter about it by {scatter:.2g} (standard deviation)" in words(test)
    tokens = rows(real / "aux", "steps", phase="probe")["tokens"].unique()
    assert f"one fixed batch of {tokens[0]:,} tokens" in words(test)


def curve(name: str, steps: range, values: Sequence[float]) -> Curve:
    return Curve(name=name, group=name, colour=0, steps_S=np.array(steps), values_S=np.array(values))


def test_a_gap_is_claimed_only_beyond_the_scatter_of_single_steps() -> None:
    # Steps 50 to 99 lie on a line, 0.1 off it to either side, the same from both ends so that the line stays as it is;
    # the first and last lie on it. The standard deviation is 0.1 sqrt(48 / 50).
    off = [0.0, *(0.1 if place % 2 else -0.1 for place in range(24))]
    values = [9.0] * 50 + [4 - step / 50 + more for step, more in zip(range(50, 100), off + off[::-1], strict=True)]
    training = curve("cross-entropy", range(100), values)

    def against(steps: range, *values: float) -> overview_losses.Beside | None:
        return overview_losses.against_held_out([training, curve("held-out cross-entropy (probe)", steps, values)])

    below = against(range(50, 100, 25), 2.5, 2.3)  # where the line is at 3 and 2.5
    assert below is not None
    assert (below.held_out, below.training) == pytest.approx((2.4, 2.75))
    assert below.scatter == pytest.approx(0.1 * (48 / 50) ** 0.5)
    assert below.gap == pytest.approx(-0.35)
    within = against(range(10, 100, 65), 99.0, 2.59)  # step 10 lies before the window
    assert within is not None
    assert (within.held_out, within.training, within.gap) == (pytest.approx(2.59), pytest.approx(2.5), None)
    above = against(range(10, 100, 65), 1.0, 2.61)
    assert above is not None
    assert above.gap == pytest.approx(0.11)
    assert against(range(0, 50, 25), 2.0, 2.0) is None, "nothing held out in the window"
    loss = curve("held-out loss (eval)", range(50, 100, 25), [3.0, 3.0])
    assert overview_losses.against_held_out([training, loss]) is None, "another value"


def test_the_load_can_be_clicked_and_the_layer_replayed(real: Path, open_page: Open) -> None:
    test = open_page("overview", run="plain", layer=1)
    points = [
        trace for trace in figures(test)["load"]["data"] if trace["type"] == "scatter" and trace.get("customdata")
    ]
    assert {point[0] for trace in points for point in trace["customdata"]} == {0, 1}
    assert "Click a cell" in words(test)
    test.button(key="replay_layer").click().run()
    assert not test.exception
    assert test.session_state["_page"] == "replay"
    assert test.query_params["layer"] == "1"


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of one layer of 4 experts: steps 0 to 9, killed, resumed at 20 to 29; eval every 5; rerouted."""
    folder = tmp_path_factory.mktemp("resumed")
    layers = [{"index": 0, "kind": "moe", "router": 0, "num_experts": 4, "top_k": 1}]
    for steps in (range(10), range(20, 30)):
        resume = {"resume": True} if steps[0] else {}
        with RunWriter(folder / "r", manifest={"name": "r", "model": {"layers": layers}}, **resume) as writer:
            for step in steps:
                writer.log_step(step, tokens=100 + step, loss=9.0 - step / 10, ce_loss=8.0 - step / 10, wall_time_s=2.0)
                load_E = np.array([50, 50, step, 0])
                writer.log_layer_stats(
                    step,
                    layer=0,
                    router=0,
                    tokens=100 + step,
                    load=load_E,
                    gate_mass=load_E,
                    mean_prob=np.full(4, 0.25),
                    expert_bias=np.zeros(4),
                    rerouted=None if step == 3 else step,
                )
                if step % 5 == 0:
                    writer.log_step(step, phase="eval", tokens=64, loss=8.5 - step / 10)
    return folder


def test_a_resumed_run_over_tokens_with_eval_loss_and_rerouted(
    resumed: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROUTESCOPE_DIRS", str(resumed))
    monkeypatch.chdir(tmp_path)
    test = open_page("overview", run="r", x="tokens", window=10)
    assert not test.exception, test.exception
    drawn = figures(test)
    steps = [*range(10), *range(20, 30)]
    tokens = np.cumsum([100 + step for step in steps])
    by_name = {trace["name"]: trace for trace in drawn["losses"]["data"]}
    expected = [*tokens[:10], np.nan, *tokens[10:]]
    assert array(by_name["cross-entropy"]["x"]).astype(float) == pytest.approx(expected, nan_ok=True)
    assert np.isnan(array(by_name["cross-entropy"]["y"]).astype(float)[10]), "no line over the steps that are missing"
    held_out = by_name["held-out loss (eval)"]
    at = dict(zip(steps, tokens, strict=True))
    places = array(held_out["x"]).astype(float)
    assert places[np.isfinite(places)] == pytest.approx([at[step] for step in (0, 5, 20, 25)])
    assert "; held-out loss 6 at step 25" in drawn["losses"]["layout"]["title"]["text"]
    assert "resumed" in [note["text"] for note in drawn["losses"]["layout"]["annotations"]]
    assert "x adds up the tokens of 20 recorded steps, 67% of those from 0 to 29." in words(test)

    thick = next(trace for trace in drawn["rerouted"]["data"] if trace["line"]["width"] == 3)
    shares = array(thick["y"]).astype(float)
    last = range(20, 30)
    assert shares[-1] == pytest.approx(100 * sum(last) / sum(100 + step for step in last))
    # The window that ends at step 4 holds steps 0, 1, 2 and 4: nothing was recorded at step 3.
    assert shares[4] == pytest.approx(100 * 7 / (100 + 101 + 102 + 104))
    title = drawn["rerouted"]["layout"]["title"]["text"]
    assert f"the bias changes {100 * sum(last) / sum(100 + step for step in last):.1f}% of the assignments" in title
    numbers = next(frame for frame in tables(test) if "rerouted (%)" in frame)
    assert numbers["tokens so far"].tolist() == tokens.tolist()
    assert numbers["rerouted (%)"].isna().tolist() == [step == 3 for step in steps]
    share = float(table(test, "layers")["rerouted_share"].iloc[0])
    assert share == pytest.approx(sum(last) / sum(100 + step for step in last))


def test_a_run_without_a_bias_draws_no_rerouted_share(real: Path, open_page: Open) -> None:
    test = open_page("overview", run="plain", x="time")
    assert "rerouted" not in figures(test)
    assert figures(test)["losses"]["layout"]["xaxis"]["title"]["text"] == "time in steps so far (s)"


# ----------------------------------------------------------------------------------------------------- the title


def layer(index: int, idle_experts: int | None, violation_: float | None, **more: Any) -> dict[str, Any]:
    return {
        "layer": index,
        "key": index,
        "label": index,
        "idle_experts": idle_experts,
        "max_violation_window": violation_,
        "num_experts": 16,
        "top_k": 2,
    } | more


@pytest.mark.parametrize(
    ("layers", "title"),
    [
        pytest.param(
            [layer(1, 5, 3.75), layer(3, 11, 6.5)],
            "Layer 3 is least balanced: 11 of 16 experts idle, max_violation 6.5 of at most 7",
            id="the worst has the most idle experts",
        ),
        pytest.param(
            [layer(1, 5, 3.75), layer(3, 0, 6.5)],
            "Layer 3 is least balanced: no expert idle, max_violation 6.5 of at most 7; "
            "most idle, 5 of 16 experts, are in layer 1",
            id="another has the most idle experts",
        ),
        pytest.param(
            [layer(1, 0, 0.25), layer(3, 0, 0.125)],
            "All experts are busy in every MoE layer; least balanced is layer 1, max_violation 0.25 of at most 7",
            id="balanced",
        ),
        pytest.param(
            [layer(1, 0, 0.25), layer(3, None, None), layer(5, 0, 0.125)],
            "All experts are busy in the 2 layers with tokens; "
            "least balanced is layer 1, max_violation 0.25 of at most 7",
            id="a layer without tokens",
        ),
        pytest.param([layer(1, 0, 0.25)], "All experts are busy: max_violation 0.25 of at most 7", id="one layer"),
        pytest.param(
            [layer(1, 3, 2.5)], "Layer 1: 3 of 16 experts idle, max_violation 2.5 of at most 7", id="one, idle"
        ),
        pytest.param(
            [layer(1, 3, 2.5, num_experts=None, top_k=None)], "Layer 1: 3 experts idle, max_violation 2.5", id="no E"
        ),
        pytest.param(
            [layer(1, None, None)],
            "No load recorded in the window, so nothing can be said of its balance",
            id="no load",
        ),
    ],
)
def test_the_title_says_only_what_is_true(layers: list[dict[str, Any]], title: str) -> None:
    assert page.headline(layers) == title


# ----------------------------------------------------------------------------------------------------- every state


def test_an_empty_folder(shown: Path, open_page: Open) -> None:
    test = open_page("overview")
    assert not test.exception
    assert test.title[0].value == "Overview"
    assert "There are no runs here yet" in words(test)


def test_one_step_of_two_experts(shown: Path, open_page: Open) -> None:
    layers = [{"index": 0, "kind": "moe", "router": 0, "num_experts": 2, "top_k": 1}]
    with RunWriter(shown / "tiny", manifest={"model": {"layers": layers}}) as writer:
        writer.log_step(7, tokens=8, loss=2.5)
        nan_E = np.full(2, np.nan)
        load_E = np.array([6, 2])
        writer.log_layer_stats(7, layer=0, router=0, tokens=8, load=load_E, gate_mass=nan_E, mean_prob=nan_E)
    test = open_page("overview", run="tiny")
    assert not test.exception, test.exception
    assert test.title[0].value == "All experts are busy: max_violation 0.5 of at most 1"
    assert "the only recorded training step (step 7)" in test.caption[0].value
    numbers = {metric.label: metric.value for metric in test.metric}
    assert numbers == {
        "Loss": "2.5",  # no cross-entropy was recorded: it is left out, never 0
        "max_violation": "0.5",
        "Idle experts": "0 of 2",
        "Dead experts": "0 of 2",
        "Aux loss": "-",
        "Steps": "1",
    }
    assert table(test, "shares_numbers").iloc[0].tolist() == [7, 75.0, 25.0]
    assert "shares" not in figures(test)  # a single step has no line over time


def test_steps_without_any_load(shown: Path, open_page: Open) -> None:
    layers = [{"index": 0, "kind": "moe", "router": 0, "num_experts": 4, "top_k": 1}]
    with RunWriter(shown / "bare", manifest={"model": {"layers": layers}}) as writer:
        for step in range(3):
            writer.log_step(step, tokens=8, ce_loss=2.0)
    test = open_page("overview", run="bare")
    assert not test.exception, test.exception
    assert "nothing can be said of its balance" in test.title[0].value
    assert {metric.label: metric.value for metric in test.metric}["max_violation"] == "-"


def test_losses_that_are_not_finite_are_said_to_be(shown: Path, write_run: Write, open_page: Open) -> None:
    with RunWriter(shown / "lost", manifest=json.loads((write_run(shown, "a") / "run.json").read_text())) as writer:
        for step, loss in enumerate([2.0, math.inf, math.nan, 1.5]):
            writer.log_step(step, tokens=8, loss=loss, ce_loss=loss)
        writer.log_event(1, "non_finite", "loss is inf")
    test = open_page("overview", run="lost")
    assert not test.exception, test.exception
    assert {metric.label: metric.value for metric in test.metric}["Cross-entropy"] == "not finite"
    title = figures(test)["losses"]["layout"]["title"]["text"]
    assert "2 at step 0, 1.5 at step 3; not finite at 2 steps, first at 1" in title.replace("<br>", " ")
    assert table(test, "events").to_numpy().tolist() == [[1, "non_finite", "loss is inf"]]


def test_a_resumed_run_marks_the_restart(shown: Path, write_run: Write, open_page: Open) -> None:
    path = write_run(shown, "a", range(80))
    with RunWriter(path, resume=True) as writer:
        for step in range(60, 70):
            writer.log_step(step, tokens=8, loss=1.0, ce_loss=1.0)
    test = open_page("overview", run="a")
    assert not test.exception, test.exception
    assert {metric.label: metric.value for metric in test.metric}["Steps"] == "70"
    assert 59.5 in [shape.get("x0") for shape in figures(test)["losses"]["layout"]["shapes"]]
    assert "resumed" in table(test, "events")["kind"].tolist()


@pytest.mark.parametrize("status", ["running", "failed", "cancelled"])
def test_runs_that_did_not_finish(shown: Path, write_run: Write, open_page: Open, status: str) -> None:
    write_run(shown, "a", range(3), status=status)
    test = open_page("overview", run="a")
    assert not test.exception, test.exception
    assert {metric.label: metric.value for metric in test.metric}["Steps"] == "3"
    said = {"running": "Still recording", "failed": "This run failed after step 2"}
    assert said.get(status, "") in words(test)


def test_an_unreadable_run(shown: Path, write_run: Write, open_page: Open) -> None:
    (write_run(shown, "a", range(3)) / "run.json").write_text("{")
    test = open_page("overview", run="a")
    assert not test.exception
    assert "cannot be read" in test.error[0].value


def test_many_layers_are_drawn_one_at_a_time(shown: Path, open_page: Open) -> None:
    layers = [{"index": i, "kind": "moe", "router": i, "num_experts": 32, "top_k": 2} for i in range(4)]
    with RunWriter(shown / "big", manifest={"model": {"layers": layers}}) as writer:
        for step in range(5):
            writer.log_step(step, tokens=64, loss=1.0)
            for i in range(4):
                load_E = np.full(32, 4)
                load_E[: 2 * i] -= 4  # layer 3 has 6 idle experts, the most
                load_E[-1] += 8 * i
                writer.log_layer_stats(
                    step, layer=i, router=i, tokens=64, load=load_E, gate_mass=load_E, mean_prob=load_E / 128
                )
    test = open_page("overview", run="big")
    assert not test.exception, test.exception
    assert set(table(test, "load_numbers")["layer"]) == {3}  # the least balanced one, until another is chosen
    assert set(table(test, "violation_numbers")["layer"]) == {0, 1, 2, 3}
    assert len(table(test, "layers")) == 4
    test = open_page("overview", run="big", layer=2)
    assert set(table(test, "load_numbers")["layer"]) == {2}
    assert "4 of 32 experts idle" in figures(test)["load"]["layout"]["title"]["text"]
