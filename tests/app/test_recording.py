"""The page of recordings, and the notices of them beside every page."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from streamlit.testing.v1 import AppTest

from app import job_queue, jobs
from recorder.reader import Run

RECORDER = """
import signal, sys, time
import numpy as np
from recorder.writer import RunWriter
stop = []
signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
layers = [{"index": 1, "kind": "moe", "router": 0, "num_experts": 4, "top_k": 1}]
writer = RunWriter(sys.argv[1], flush_steps=1, manifest={"name": "A *new* run", "model": {"layers": layers}})
for step in range(int(sys.argv[2])):
    if stop:
        writer.finalize("cancelled")
        sys.exit(130)
    load = np.array([8, 0, 0, 0])
    writer.log_step(step, tokens=8, loss=1.0)
    writer.log_layer_stats(step, layer=1, router=0, tokens=8, load=load, gate_mass=load, mean_prob=load / 8)
    time.sleep(0.02)
writer.finalize()
"""


@pytest.fixture
def start(shown: Path) -> Iterator[Callable[..., jobs.Job]]:
    started = []

    def start_(*, run_id: str = "new", steps: int = 100_000, code: str = RECORDER) -> jobs.Job:
        command = [sys.executable, "-c", code, str(shown / run_id), str(steps)]
        started.append(jobs.start(command, run_id=run_id, out=shown, steps=steps))
        return started[-1]

    yield start_
    for job in started:
        if jobs.is_alive(job):
            psutil.Process(job.pid).kill()


def until(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def recorded(job: jobs.Job) -> int:
    return len(Run(job.run_path).steps("train")) if (job.run_path / "run.json").exists() else 0


def words(test: AppTest) -> str:
    assert not test.exception, test.exception
    kinds = (test.title, test.subheader, test.markdown, test.caption, test.info, test.error, test.code)
    return "\n".join(element.value for kind in kinds for element in kind)


def test_nothing_recorded_yet_says_how(shown: Path, open_page: Callable[..., AppTest]) -> None:
    text = words(open_page("recording"))
    assert "Nothing is being recorded" in text
    assert f"routescope record --balancer none --steps 400 --out {shown}" in text


def test_a_recording_is_watched_cancelled_and_opened(
    start: Callable[..., jobs.Job], open_page: Callable[..., AppTest]
) -> None:
    job = start()
    until(lambda: recorded(job) >= 3)
    test = open_page("recording")
    assert r"A \*new\* run" in words(test)
    assert "of 100000 now" in words(test)
    test.button(key="cancel_new").click().run()
    until(lambda: not jobs.is_alive(job))
    kept = recorded(job)
    test.run()
    assert rf"**A \*new\* run** cancelled after {kept} of 100000 steps; they are kept" in words(test)
    test.button(key="open_new").click().run()
    assert not test.exception
    assert test.query_params["run"] == "new"
    assert test.sidebar.selectbox(key="run").value == "new"
    assert "Recording" not in test.title[0].value


def test_a_finished_recording_opens_by_itself_where_it_was_watched(
    start: Callable[..., jobs.Job], open_page: Callable[..., AppTest]
) -> None:
    job = start(steps=100)
    until(lambda: recorded(job) >= 1)
    test = open_page("recording")
    assert test.title[0].value == r"Recording A \*new\* run"
    until(lambda: not jobs.is_alive(job))
    test.run()
    assert not test.exception
    assert test.query_params["run"] == "new"
    later = open_page("recording")
    assert later.title[0].value == "Nothing is being recorded", "one that ended before is offered, not opened"
    assert "finished, 100 steps in" in words(later)


def test_no_page_is_taken_away_from_a_form_that_is_being_filled(
    start: Callable[..., jobs.Job], open_page: Callable[..., AppTest]
) -> None:
    job = start(steps=100)
    until(lambda: recorded(job) >= 1)
    test = open_page("recording")
    test.session_state["record_expander"] = True
    test.run()
    test.sidebar.text_input(key="record_name").set_value("The next").run()
    until(lambda: not jobs.is_alive(job))
    test.run()
    assert test.sidebar.text_input(key="record_name").value == "The next"
    assert "finished, 100 steps in" in words(test)
    assert test.button(key="open_new")
    test.session_state["record_expander"] = False
    test.run()
    assert test.query_params["run"] == "new", "closed, it is not being filled"


def test_several_at_once_are_all_shown_and_none_opens_while_another_runs(
    start: Callable[..., jobs.Job], open_page: Callable[..., AppTest]
) -> None:
    short, long = start(run_id="short", steps=60), start(run_id="long")
    until(lambda: min(recorded(short), recorded(long)) >= 1)
    test = open_page("recording")
    assert {button.key for button in test.button} >= {"cancel_short", "cancel_long"}
    assert test.title[0].value == "Recording 2 runs at once"
    until(lambda: not jobs.is_alive(short))
    test.run()
    assert test.title[0].value == r"Recording A \*new\* run"
    assert {button.key for button in test.button} >= {"open_short", "cancel_long"}


def test_those_that_wait_are_listed_moved_and_cancelled(
    start: Callable[..., jobs.Job], shown: Path, open_page: Callable[..., AppTest]
) -> None:
    running = start(run_id="long")
    until(lambda: recorded(running) >= 1)
    for run_id in ("one", "two"):
        command = [sys.executable, "-c", RECORDER, str(shown / run_id), "3", f"--name=Run *{run_id}*"]
        job_queue.add(command, run_id=run_id, out=shown, steps=3)
    beside = open_page("runs").sidebar
    assert r"Waiting for their turn: Run \*one\*, Run \*two\*" in [caption.value for caption in beside.caption]
    test = open_page("recording")
    text = words(test)
    assert r"Recording A \*new\* run; 2 wait" in text
    assert r"1. **Run \*one\***, 3 steps" in text
    assert r"2. **Run \*two\***, 3 steps" in text
    assert not test.sidebar.caption, "the page itself says all of it, and newer"
    assert "up_one" not in {button.key for button in test.button}
    test.button(key="up_two").click().run()
    assert r"1. **Run \*two\***" in words(test)
    test.button(key="cancel_one").click().run()
    assert [job.run_id for job in job_queue.waiting(shown)] == ["two"]
    test.button(key="now_two").click().run()
    two = jobs.read(shown, "two")
    assert two is not None
    until(lambda: jobs.state(two) == "finished")
    assert jobs.is_alive(running)
    assert "finished, 3 steps" in words(test.run())


def test_one_that_waits_to_be_continued_is_called_by_its_runs_name(
    start: Callable[..., jobs.Job], shown: Path, open_page: Callable[..., AppTest], write_run: Callable[..., Path]
) -> None:
    write_run(shown, "folder", range(3), name="Its name", status="cancelled")
    running = start(run_id="long")
    until(lambda: recorded(running) >= 1)
    job_queue.add([sys.executable, "-c", ""], run_id="folder", out=shown, steps=9, continued=True)
    assert "1. **Its name**, goes on" in words(open_page("recording"))
    assert "Waiting for its turn: Its name" in [caption.value for caption in open_page("runs").sidebar.caption]


def test_a_failure_shows_one_line_and_no_traceback(
    start: Callable[..., jobs.Job], open_page: Callable[..., AppTest]
) -> None:
    job = start(code="import sys; print('Traceback'); sys.exit('routescope: --corpus none.txt is empty')")
    until(lambda: not jobs.is_alive(job))
    test = open_page("recording")
    assert "failed after 0 of 100000 steps" in words(test)
    assert [error.value for error in test.error] == ["--corpus none.txt is empty"]


def test_other_pages_tell_of_a_recording_until_it_is_seen(
    start: Callable[..., jobs.Job], open_page: Callable[..., AppTest], shown: Path, write_run: Callable[..., Path]
) -> None:
    write_run(shown, "old", range(3))
    job = start()
    until(lambda: recorded(job) >= 1)
    test = open_page("overview", run="old")
    assert not test.exception
    assert test.sidebar.button(key="watch")
    assert jobs.cancel(job)
    until(lambda: not jobs.is_alive(job))
    test.run()
    assert r"A \*new\* run: cancelled" in [caption.value for caption in test.sidebar.caption]
    test.sidebar.button(key="notice_open_new").click().run()
    assert test.query_params["run"] == "new"
    assert not any("cancelled" in caption.value for caption in test.sidebar.caption)


def test_a_script_of_ones_own_is_shown_too(shown: Path, open_page: Callable[..., AppTest]) -> None:
    process = subprocess.Popen([sys.executable, "-c", RECORDER, str(shown / "mine"), "100000"])
    try:
        until(lambda: (shown / "mine" / "run.json").exists() and len(Run(shown / "mine").steps("train")) > 3)
        test = open_page("recording")
        text = words(test)
        assert "Nothing is being recorded" not in text
        assert r"A \*new\* run" in text
        assert "Recorded by a process that was not started here: step " in text
        assert "cancel_mine" not in {button.key for button in test.button}
        test.button(key="open_mine").click().run()
        assert not test.exception
        assert test.query_params["run"] == "mine"
    finally:
        process.kill()
        process.wait()
