"""Running runs: what is said of one that hangs, one that crashed and several at once, and a page that keeps up."""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app import live
from recorder.reader import Run
from recorder.writer import RunWriter

Write = Callable[..., Path]
Open = Callable[..., AppTest]


def beat(path: Path, seconds_ago: float, **changes: Any) -> None:
    """Put the last sign of life of a run this far into the past."""
    manifest = json.loads((path / "run.json").read_text()) | changes
    manifest["heartbeat_at"] = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat()
    (path / "run.json").write_text(json.dumps(manifest))


def age_parts(path: Path, seconds: float) -> None:
    for part in (path / "steps").iterdir():
        moment = part.stat().st_mtime - seconds
        os.utime(part, (moment, moment))


def words(test: AppTest) -> str:
    assert not test.exception, test.exception
    return "\n".join(element.value for kind in (test.caption, test.warning, test.title) for element in kind)


@pytest.mark.parametrize(
    ("beat_ago", "rows_ago", "stalled", "said"),
    [
        pytest.param(0, 0, False, "recording", id="all is well"),
        pytest.param(30, 30, False, "recording", id="between two signs of life"),
        pytest.param(200, 200, True, "no sign of life for 3 min 20 s", id="silent"),
        pytest.param(2, 130, True, "no new step for 2 min 10 s, though its process lives", id="alive, but no rows"),
    ],
)
def test_a_stalled_run_says_since_when(
    shown: Path, write_run: Write, beat_ago: float, rows_ago: float, stalled: bool, said: str
) -> None:
    path = write_run(shown, "a", range(5), status="running")
    beat(path, beat_ago)
    age_parts(path, rows_ago)
    found = live.pulse(Run(path))
    assert found.stalled is stalled
    assert found.words.startswith(said)


def test_slow_steps_are_no_stall(shown: Path) -> None:
    layers = [{"index": 0, "kind": "moe", "router": 0, "num_experts": 2, "top_k": 1}]
    writer = RunWriter(shown / "slow", manifest={"model": {"layers": layers}})
    for step in (0, 10):  # of every tenth step, 30 s each: 300 s between two records
        writer.log_step(step, tokens=8, loss=1.0, wall_time_s=30.0)
        writer.log_layer_stats(
            step, layer=0, router=0, tokens=8, load=np.array([4, 4]), gate_mass=np.ones(2), mean_prob=np.ones(2) / 2
        )
    writer.flush()
    beat(writer.path, 900)
    age_parts(writer.path, 900)
    assert not live.pulse(Run(writer.path)).stalled
    beat(writer.path, 3300)
    assert live.pulse(Run(writer.path)).words.startswith("no sign of life for 55 min 00 s")


def test_the_page_says_that_a_run_hangs_and_names_the_others(shown: Path, write_run: Write, open_page: Open) -> None:
    for name, last in (("a", 5), ("b", 8), ("c", 3)):
        write_run(shown, name, range(last), status="running")
    beat(shown / "a", 200)
    beat(shown / "c", 100)
    test = open_page("replay", run="a", step=2)
    assert "This run says it is running, but gives no sign of life for 3 min 2" in words(test)
    assert "2 other runs being recorded:" in words(test)
    labels = {button.key: button.label for button in test.button}
    assert labels["live_b"] == "b: step 7"
    assert labels["live_c"].startswith("c: step 2, no sign of life for 1 min 4")
    test.button(key="live_b").click().run()
    assert "the run is at step 7" in words(test)


def test_a_crashed_run_says_so_and_since_when(shown: Path, write_run: Write, open_page: Open) -> None:
    path = write_run(shown, "a", range(5), status="running")
    manifest = json.loads((path / "run.json").read_text())
    beat(path, 200, process=manifest["process"] | {"started_at": 1.0})  # that process is gone
    said = words(open_page("overview", run="a"))
    assert "This run ended at step 4 without being closed" in said
    assert "its last sign of life came 3 min 2" in said


def test_a_growing_run_comes_into_sight_and_a_chosen_step_stays(shown: Path, write_run: Write, open_page: Open) -> None:
    writer = RunWriter(shown / "a", manifest=json.loads((write_run(shown, "model", range(1)) / "run.json").read_text()))
    grow(writer, range(6))
    newest, chosen = open_page("replay", run="a"), open_page("replay", run="a", step=2)
    assert newest.title[0].value.startswith("Step 5,")
    grow(writer, range(6, 9))
    for test in (newest, chosen):
        test.run()  # as the page does by itself when it sees that the run has grown
    assert newest.title[0].value.startswith("Step 8,")
    assert chosen.title[0].value.startswith("Step 2,")
    assert chosen.slider(key="step").max == 8
    chosen.button(key="newest_step").click().run()
    assert chosen.title[0].value.startswith("Step 8,")
    writer.finalize()


def grow(writer: RunWriter, steps: range) -> None:
    for step in steps:
        writer.log_step(step, tokens=8, loss=1.0, wall_time_s=0.01)
        for router, layer in enumerate((1, 3)):
            load_E = np.array([2, 2, 2, 2])
            writer.log_layer_stats(
                step, layer=layer, router=router, tokens=8, load=load_E, gate_mass=load_E, mean_prob=np.full(4, 0.25)
            )
    writer.flush()


def test_compare_says_how_far_running_runs_are_and_grows_with_them(
    shown: Path, write_run: Write, open_page: Open
) -> None:
    write_run(shown, "done", range(8))
    manifest = json.loads((shown / "done" / "run.json").read_text())
    writer = RunWriter(shown / "a", manifest=manifest | {"name": "a"})
    grow(writer, range(6))
    newest, chosen = (open_page("compare", runs=["a", "done"], **at) for at in ({}, {"step": 2}))
    assert "Still recording: a is at step 5." in words(newest)
    assert [test.slider(key="step").value for test in (newest, chosen)] == [5, 2]
    grow(writer, range(6, 8))
    for test in (newest, chosen):
        test.run()  # as the page does by itself when it sees that the run has grown
        assert "Still recording: a is at step 7." in words(test)
    assert [test.slider(key="step").value for test in (newest, chosen)] == [7, 2]
    writer.finalize("finished")
    assert "Still recording" not in words(newest.run())


def test_compare_names_the_run_that_hangs(shown: Path, write_run: Write, open_page: Open) -> None:
    write_run(shown, "done", range(8))
    write_run(shown, "a", range(5), status="running")
    beat(shown / "a", 200)
    said = words(open_page("compare", runs=["a", "done"]))
    assert "**a** says it is running, but gives no sign of life for 3 min 2" in said
