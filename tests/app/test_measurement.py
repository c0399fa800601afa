"""A measurement in a process of its own: its progress, its result, and every way to end without one."""

import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from app.measurement import Bench, Measurement

REPORT = (
    "import sys; print('round 0 of 2', file=sys.stderr); print('round 2 of 2', file=sys.stderr); print('{\"a\": 1}')"
)
SLEEP = "import sys, time; print('round 1 of 3', file=sys.stderr, flush=True); time.sleep(60)"


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def ended(measurement: Measurement) -> Measurement:
    until(lambda: measurement.refresh() != "running")
    return measurement


def until(is_so, patience: float = 60) -> None:
    end = time.monotonic() + patience
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.cancel()


def test_a_result_is_kept_under_its_name(bench: Bench) -> None:
    measurement = bench.start("mine", command(REPORT))
    assert measurement is not None
    ended(measurement)
    assert bench.running() is None
    assert bench.report("mine") == {"a": 1}
    assert bench.report("other") is None
    assert bench.ended("mine") is None


def test_one_at_a_time_and_its_progress_is_seen(bench: Bench) -> None:
    measurement = bench.start("first", command(SLEEP))
    assert measurement is not None
    assert bench.start("second", command(REPORT)) is None
    until(lambda: measurement.progress().done is not None)
    progress = measurement.progress()
    assert (progress.done, progress.total) == (1, 3)
    assert progress.elapsed_s > 0


def test_cancelled_is_gone_with_its_process(bench: Bench) -> None:
    measurement = bench.start("first", command(SLEEP))
    assert measurement is not None
    pid = measurement._process.pid
    bench.cancel()
    assert not psutil.pid_exists(pid)
    assert bench.running() is None
    assert measurement.state == "cancelled"
    assert bench.ended("first") is measurement
    assert bench.ended("second") is None
    assert bench.start("second", command(REPORT)) is not None


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import sys; sys.exit('routescope: --tokens 0 is not allowed')", "--tokens 0 is not allowed"),
        ("print('no json')", "its report could not be read"),
        ("import sys; sys.exit(3)", "its process ended with code 3"),
    ],
)
def test_why_it_failed_is_one_line(code: str, error: str) -> None:
    measurement = ended(Measurement("mine", command(code)))
    assert (measurement.state, measurement.error, measurement.report) == ("failed", error, None)


def test_a_killed_process_is_told() -> None:
    measurement = Measurement("mine", command(SLEEP))
    os.kill(measurement._process.pid, signal.SIGKILL)
    assert "signal 9" in str(ended(measurement).error)


def test_what_cannot_be_run_is_an_error(bench: Bench) -> None:
    with pytest.raises(OSError, match="no-such-program"):
        bench.start("mine", ["no-such-program"])
    assert bench.start("mine", command(REPORT)) is not None


def test_old_results_make_room(bench: Bench) -> None:
    for number in range(22):
        measurement = bench.start(str(number), command("print('{}')") if number > 1 else command(REPORT))
        assert measurement is not None
        ended(measurement)
    assert bench.running() is None
    assert bench.report("0") is None
    assert bench.report("21") == {}
