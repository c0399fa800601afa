"""The page of all runs: its numbers against the Parquet files, its title against the runs, and its picking.

Shapes: S steps, E experts.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from app import data
from app.runs_headline import has_balancer
from recorder.reader import Run
from recorder.writer import RunWriter

Open = Callable[..., AppTest]
Write = Callable[..., Path]


def rows(run: Path, table: str, *, window: int | None = None, **equal: Any) -> pd.DataFrame:
    """The rows of a table as the files hold them, in order of steps; the last `window` of them."""
    frame = pq.read_table(run / table).to_pandas(ignore_metadata=True)
    for name, value in equal.items():
        frame = frame[frame[name] == value]
    frame = frame.sort_values("step")
    return frame if window is None else frame.tail(window)


def shown_table(test: AppTest) -> pd.DataFrame:
    assert not test.exception, test.exception
    return test.dataframe[0].value.set_index("run")


def words(test: AppTest) -> str:
    assert not test.exception, test.exception
    kinds = (test.title, test.markdown, test.caption, test.info, test.code)
    return "\n".join(element.value for kind in kinds for element in kind)


def test_every_number_is_that_of_the_files(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, open_page: Open, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROUTESCOPE_DIRS", str(recorded))
    monkeypatch.chdir(tmp_path)
    table = shown_table(open_page("runs"))
    assert sorted(table.index) == ["aux", "plain"]
    worst_idle = {}
    for name, top_k in (("plain", 1), ("aux", 2)):
        line = table.loc[name]
        steps = rows(recorded / name, "steps", phase="train")
        assert line["status"] == "finished"
        assert line["experts"] == f"{top_k} of 8"
        assert line["steps"] == len(steps) == 60
        assert line["loss"] == pytest.approx(steps["loss"].tail(50).mean(), rel=1e-6)
        assert list(line["loss_curve"]) == pytest.approx(steps["loss"].tolist(), rel=1e-6)  # 60 points, so all of them
        violations, idle, dead, curves = [], [], [], []
        for layer in (0, 1):
            load_SE = np.stack(rows(recorded / name, "layer_stats", phase="train", layer=layer)["load"].to_list())
            summed_E = load_SE[-50:].sum(axis=0)
            violations.append(summed_E.max() / summed_E.mean() - 1)
            idle.append(int((summed_E < summed_E.mean() / 10).sum()))
            dead.append(int((summed_E == 0).sum()))
            curves.append(load_SE.max(axis=1) / load_SE.mean(axis=1) - 1)
        assert line["max_violation"] == pytest.approx(max(violations))
        assert (line["idle_experts"], line["dead_experts"]) == (max(idle), max(dead))
        assert list(line["violation_curve"]) == pytest.approx(np.max(curves, axis=0).tolist())
        worst_idle[name] = max(idle)
    assert (table.loc["plain", "balancer"], table.loc["aux", "balancer"]) == ("none", "aux")
    title = open_page("runs").title[0].value
    assert title.startswith("2 runs: ")
    assert ("all experts are busy too" in title) == (worst_idle["plain"] == 0)
    assert (f"{worst_idle['plain']} of 8 experts idle" in title) == (worst_idle["plain"] > 0)
    assert ("the run with a balancer keeps all experts busy" in title) == (worst_idle["aux"] == 0)


# ------------------------------------------------------------------------------------------------------ the title


def skewed(folder: Path, run_id: str, balancer: str | None, idle: int, steps: int = 50, experts: int = 8) -> Path:
    """A run of one layer, `idle` of its experts without a token."""
    load_E = np.array([0] * idle + [16] * (experts - idle))
    layers = [{"index": 0, "kind": "moe", "router": 0, "num_experts": experts, "top_k": 1}]
    config = {} if balancer is None else {"balancer": balancer}
    with RunWriter(folder / run_id, manifest={"name": run_id, "config": config, "model": {"layers": layers}}) as writer:
        for step in range(steps):
            writer.log_step(step, tokens=128, loss=1.0)
            writer.log_layer_stats(
                step, layer=0, router=0, tokens=128, load=load_E, gate_mass=load_E, mean_prob=load_E / load_E.sum()
            )
    return folder / run_id


@pytest.mark.parametrize(
    ("runs", "title"),
    [
        pytest.param(
            [("none", 3), ("aux", 0), ("quantile", 0)],
            "3 runs: without a balancer a layer leaves 3 of 8 experts idle; "
            "every run with a balancer keeps all experts busy",
            id="the lesson",
        ),
        pytest.param(
            [("none", 3), ("z", 5), ("aux+z", 0)],
            "3 runs: without a balancer a layer leaves up to 5 of 8 experts idle; "
            "the run with a balancer keeps all experts busy",
            id="a z-loss is no balancer",
        ),
        pytest.param(
            [("none", 0), ("aux", 1), ("quantile", 0)],
            "3 runs: without a balancer all experts are busy too; 1 of 2 runs with a balancer has idle experts",
            id="the other way round",
        ),
        pytest.param([("aux", 2)], "1 run: the run with a balancer has idle experts", id="one balanced run"),
        pytest.param([(None, 2), (None, 0)], "2 runs: 1 of 2 runs has idle experts", id="nobody says which balancer"),
        pytest.param([(None, 0)], "1 run: all experts are busy", id="nobody says, nothing idle"),
    ],
)
def test_the_title_says_only_what_is_true(
    shown: Path, open_page: Open, runs: list[tuple[str | None, int]], title: str
) -> None:
    for number, (balancer, idle) in enumerate(runs):
        skewed(shown, f"run{number}", balancer, idle)
    test = open_page("runs")
    assert test.title[0].value == title
    assert "less than a tenth of the uniform share" in test.title[0].help


def test_short_runs_are_listed_but_not_judged(shown: Path, open_page: Open) -> None:
    skewed(shown, "short", "aux", 4, steps=49)
    test = open_page("runs")
    assert test.title[0].value == "1 run, none long enough to judge the balance"
    assert shown_table(test).loc["short", "idle_experts"] == 4
    skewed(shown, "long", "aux", 0)
    test = open_page("runs")
    assert test.title[0].value == "2 runs, 1 judged: the run with a balancer keeps all experts busy"
    assert "fewer than 50 steps to go by: short" in words(test)


def test_a_run_that_fails_in_any_way_hides_no_other(
    shown: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("good", "odd"):
        skewed(shown, name, "aux", 0)
    row = data.run_row

    def fail_for_one(run: Run) -> dict[str, Any]:
        if run.run_id == "odd":
            raise TypeError("no number at all")
        return row(run)

    monkeypatch.setattr(data, "run_row", fail_for_one)
    test = open_page("runs")
    assert test.title[0].value == "2 runs, 1 judged: the run with a balancer keeps all experts busy"
    assert "no number at all" in words(test)


# ----------------------------------------------------------------------------------------------------- every state


def test_a_run_of_one_step_without_values_shows_none_of_them_as_0(
    shown: Path, write_run: Write, open_page: Open
) -> None:
    write_run(shown, "one", range(1))
    with RunWriter(shown / "dense") as writer:
        writer.log_step(0, tokens=8, loss=float("nan"))
    test = open_page("runs")
    table = shown_table(test)
    assert table.loc["one", "steps"] == 1
    assert table.loc["one", "loss_curve"] is None  # one value would be a level line
    assert table.loc["dense", ["loss", "max_violation", "idle_experts", "dead_experts"]].isna().all()
    assert table["experts"].isna()["dense"]


def test_every_kind_of_ending_is_listed_with_its_reason(shown: Path, write_run: Write, open_page: Open) -> None:
    for run_id in ("good", "broken", "gone"):
        write_run(shown, run_id, range(3), status="running" if run_id == "gone" else "finished")
    (shown / "broken" / "run.json").write_text("{")
    manifest = shown / "gone" / "run.json"
    manifest.write_text(manifest.read_text().replace('"pid": ', '"pid": 99'))
    with RunWriter(shown / "empty"):
        pass
    failed = RunWriter(shown / "failed")
    failed.log_step(0, tokens=8, loss=1.0)
    failed.finalize("failed", error="disk *full*\nat once")
    test = open_page("runs")
    table = shown_table(test)
    statuses = {
        "good": "finished",
        "broken": "unreadable",
        "gone": "unfinished",
        "empty": "finished",
        "failed": "failed",
    }
    assert table["status"].to_dict() == statuses
    assert table.loc["empty", "steps"] == 0
    assert table["steps"].isna()["broken"]
    said = words(test)
    assert "**broken** (unreadable)" in said
    assert "not JSON" in said
    assert "**gone** (unfinished): its process ended without closing the run" in said
    assert r"**failed** (failed): disk \*full\* at once" in said
    assert "**good**" not in said


def test_a_running_run_is_listed_and_watched(shown: Path, write_run: Write, open_page: Open) -> None:
    write_run(shown, "live", range(3), status="running")
    test = open_page("runs")
    assert list(shown_table(test).loc["live", ["status", "steps"]]) == ["running", 3]
    test.run()
    assert not test.exception


def test_an_empty_folder_says_what_to_do(shown: Path, open_page: Open) -> None:
    test = open_page("runs")
    assert test.title[0].value == "Runs"
    assert "There are no runs here yet" in words(test)
    assert not test.dataframe


# ------------------------------------------------------------------------------------------------------- picking


def labels(test: AppTest) -> list[str]:
    return [button.label for button in test.main.button if not button.disabled]


def test_nothing_ticked_says_how_to_pick(shown: Path, write_run: Write, open_page: Open) -> None:
    write_run(shown, "a", range(3))
    test = open_page("runs")
    assert "Tick one run to open, rename, zip or delete it, or several to compare them." in words(test)
    assert labels(test) == []


def ticked(open_page: Open, run: str) -> AppTest:
    """The page with one run ticked: AppTest ticks no rows, but a run ticked before is ticked when one comes back."""
    test = open_page("recording", run=run)
    test.session_state["_runs_ticked"] = run
    test._page_hash = calc_hash("runs")
    return test.run()


@pytest.mark.parametrize(
    ("key", "path"), [("open_overview", "overview"), ("open_replay", "replay"), ("open_tokens", "tokens")]
)
def test_one_ticked_run_is_opened(shown: Path, write_run: Write, open_page: Open, key: str, path: str) -> None:
    for run_id in ("a", "b", "c"):
        write_run(shown, run_id, range(3))
    assert labels(open_page("runs", run="b")) == []
    test = ticked(open_page, "b")
    assert labels(test) == ["Overview", "Replay", "Tokens"]
    test.button(key=key).click().run()
    assert not test.exception
    assert test.query_params["run"] == "b"
    assert test.session_state["_page"] == path


def test_an_unreadable_run_leads_to_what_to_do(shown: Path, write_run: Write, open_page: Open) -> None:
    write_run(shown, "a", range(3))
    (shown / "a" / "run.json").write_text("{")
    test = ticked(open_page, "a")
    assert labels(test) == ["See what to do about it"]
    test.button(key="open_overview").click().run()
    assert "cannot be read" in test.error[0].value


def test_several_ticked_runs_are_compared_with_exactly_those(shown: Path, write_run: Write, open_page: Open) -> None:
    for run_id in ("a", "b", "c", "broken"):
        write_run(shown, run_id, range(3))
    (shown / "broken" / "run.json").write_text("{")
    test = open_page("runs", runs=["a", "c", "broken"])
    assert labels(test) == ["Compare these 2 runs"]
    said = words(test)
    assert "**b**" not in said.replace("**broken**", "")
    assert "Left out, unreadable: broken." in said
    test.button(key="compare").click().run()
    assert not test.exception
    assert sorted(test.query_params["runs"]) == ["a", "c"]
    assert test.session_state["_page"] == "compare"


def test_one_readable_run_is_no_comparison(shown: Path, write_run: Write, open_page: Open) -> None:
    for run_id in ("a", "broken"):
        write_run(shown, run_id, range(3))
    (shown / "broken" / "run.json").write_text("{")
    test = open_page("runs", runs=["a", "broken"])
    assert labels(test) == []
    assert "Two runs that can be read are needed" in words(test)


def test_ticks_follow_their_runs_when_another_is_listed(shown: Path, write_run: Write, open_page: Open) -> None:
    for run_id in ("a", "b"):
        write_run(shown, run_id, range(3))
    test = open_page("runs", runs=["a", "b"])
    assert "**a** and **b**" in words(test)
    write_run(shown, "newest", range(3))
    test.run()
    assert shown_table(test).index.tolist() == ["newest", "b", "a"]
    assert "**a** and **b**" in words(test)
    shutil.rmtree(shown / "b")
    test.run()
    assert "**b**" not in words(test)


def test_rules_without_a_page() -> None:
    assert has_balancer({"balancer": "sign-bias+z"}) is True
    assert has_balancer({"balancer": "z"}) is False
    assert has_balancer({"balancer": None}) is None
