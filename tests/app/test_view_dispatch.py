"""The Dispatch page: what it measures, says, refuses, cancels and keeps, with the real command on a tiny shape."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opened import tables
from streamlit.testing.v1 import AppTest

from app import dispatch_settings as settings
from app.figures.reference_bars import ReferenceBar, reference_bars
from app.views import dispatch

TINY = settings.DEFAULTS | {"d_model": 16, "d_ff": 8, "num_experts": 4, "num_tokens": 30, "rounds": 2, "threads": 1}
LONG = TINY | {"num_tokens": 20_000, "d_model": 64, "rounds": 1000}


@pytest.fixture(autouse=True)
def quiet_bench() -> Iterator[None]:
    """No measurement of another test, before or after."""
    dispatch._bench.clear()
    yield
    dispatch._bench().cancel()


@pytest.fixture
def draw(shown: Path, open_page: Callable[..., AppTest]) -> Callable[[dict[str, Any]], AppTest]:
    return lambda values: open_page("dispatch", dispatch=settings.as_text(values))


def finish(test: AppTest) -> AppTest:
    end = time.monotonic() + 120
    while dispatch._bench().running() is not None:
        assert time.monotonic() < end
        time.sleep(0.2)
    return test.run()


def press(test: AppTest) -> AppTest:
    test.button(key="dispatch_run").click()
    return test.run()


def words(test: AppTest) -> str:
    return " ".join(element.value for kind in (test.caption, test.info, test.warning, test.error) for element in kind)


@pytest.mark.slow
def test_it_measures_says_so_and_keeps_the_result(draw: Callable[..., AppTest]) -> None:
    test = draw(TINY)
    assert not test.exception
    assert test.title[0].value == "Which dispatcher is fastest here?"
    assert "press *Run*" in words(test)
    test = finish(press(test))
    assert not test.exception
    report = dispatch._bench().report(settings.as_text(TINY))
    assert report is not None
    assert test.title[0].value == dispatch.title_of(report)
    assert "fastest here: " in test.title[0].value
    metrics = {metric.label: metric.value for metric in test.metric}
    assert metrics["Default (auto)"].endswith(" ms")
    assert metrics["Routing's share"].endswith("%")
    assert float(metrics["Largest difference"]) < 1e-4
    frame = tables(test)[-1]
    assert set(frame["name"]) == {"auto", "naive", "masked", "sorted", "grouped", "dense", "routing", "layer"}
    assert list(frame["name"])[-4:] == ["auto", "layer", "routing", "dense"]
    assert "width 16, expert width 8, top-2 of 4 experts, 30 tokens" in words(test)

    # another shape: the old result stays, marked as such, and nothing runs
    test.number_input(key="dispatch_num_tokens").set_value(31).run()
    assert "Shown is an earlier measurement" in words(test)
    assert "30 tokens" in words(test)
    assert test.title[0].value == dispatch.title_of(report)
    assert dispatch._bench().running() is None
    test.number_input(key="dispatch_num_tokens").set_value(30).run()
    assert "earlier measurement" not in words(test)


@pytest.mark.slow
def test_a_reload_and_another_window_find_the_result(draw: Callable[..., AppTest]) -> None:
    finish(press(draw(TINY)))
    other = draw(TINY)
    assert "fastest here: " in other.title[0].value


def test_progress_and_cancel(draw: Callable[..., AppTest]) -> None:
    test = press(draw(LONG))
    assert not test.exception
    assert test.button(key="dispatch_run").disabled
    other = draw(TINY)  # one at a time: another window sees it run, and waits
    assert other.button(key="dispatch_run").disabled
    test.button(key="dispatch_cancel").click().run()
    assert dispatch._bench().running() is None
    test.run()
    assert "Cancelled; nothing of it is kept." in words(test)
    assert not test.button(key="dispatch_run").disabled
    assert test.title[0].value == "Which dispatcher is fastest here?"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"top_k": 5}, "Top-k 5 is not between 1 and Experts 4"),
        ({"num_tokens": None}, "Tokens: a number is missing"),
        ({"num_tokens": 10_000_000, "rounds": 1000, "d_model": 4096}, "(This would take|of memory)"),
    ],
)
def test_what_cannot_be_measured_is_a_line(changes: dict[str, Any], line: str, draw: Callable[..., AppTest]) -> None:
    test = draw(TINY | changes)
    assert not test.exception
    [error] = test.error

    assert re.search(line, error.value.replace("\\", ""))
    assert test.button(key="dispatch_run").disabled


def test_a_failure_is_told(draw: Callable[..., AppTest], monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [sys.executable, "-c", "import sys; sys.exit('routescope: the measurement failed: no memory')"]
    monkeypatch.setattr(settings, "command", lambda values: failing)
    test = finish(press(draw(TINY)))
    assert not test.exception
    assert [error.value.replace("\\", "") for error in test.error] == ["No result: the measurement failed: no memory"]


def test_presets_and_fields_are_one_choice(draw: Callable[..., AppTest]) -> None:
    test = draw(settings.DEFAULTS)
    box = test.selectbox(key="dispatch_preset")
    assert len(box.options) == 4
    box.set_value(box.options[1]).run()
    assert not test.exception
    assert test.number_input(key="dispatch_num_experts").value == 64
    assert test.query_params["dispatch"] == settings.as_text(settings.of_preset(settings.PRESETS[1]))
    test.number_input(key="dispatch_d_ff").set_value(100).run()
    assert test.selectbox(key="dispatch_preset").value == "Own shape"
    test.selectbox(key="dispatch_activation").set_value("gelu").run()
    assert "_gelu_" in test.query_params["dispatch"]


def test_garbage_in_the_url_is_the_default(shown: Path, open_page: Callable[..., AppTest]) -> None:
    test = open_page("dispatch", dispatch="<script>_1_2")
    assert not test.exception
    assert test.number_input(key="dispatch_d_model").value == 64
    assert test.query_params["dispatch"] == settings.as_text(settings.DEFAULTS)


def timing(name: str, time: float, *, least: float | None = None, difference: float | None = 0.0) -> dict[str, Any]:
    least = time if least is None else least
    return {
        "name": name,
        "milliseconds": time,
        "least_milliseconds": least,
        "relative": time / 4,
        "peak_mib": 1.0,
        "difference": difference,
        "rounds": 3,
    }


def report(*timings: dict[str, Any]) -> dict[str, Any]:
    return {"timings": list(timings), "load": [1, 2], "routing_share": 0.1}


def test_titles() -> None:
    one = report(timing("dense", 4, difference=None), timing("auto", 6), timing("sorted", 7.2), timing("naive", 90))
    assert dispatch.title_of(one) == "sorted is fastest here: 7.2 ms, 1.8x one dense product of the same FLOPs"
    tie = report(timing("masked", 7.3), timing("sorted", 7.2), timing("grouped", 9))
    assert dispatch.title_of(tie).startswith("sorted and masked are fastest here: 7.2 ms")
    assert [dispatch.milliseconds(time) for time in (0.4123, 7.24, 43.75, 1149.7)] == [
        "0.412 ms",
        "7.2 ms",
        "43.8 ms",
        "1,150 ms",
    ]


def test_a_busy_machine_and_a_disagreement_are_seen() -> None:
    assert not dispatch.is_disturbed(report(timing("a", 5, least=4.5), timing("b", 5, least=4.9)))
    assert dispatch.is_disturbed(report(timing("a", 5, least=2), timing("b", 5, least=3)))
    assert dispatch.largest_difference(report(timing("a", 1, difference=None))) is None
    assert dispatch.largest_difference(report(timing("a", 1, difference=1e-6), timing("b", 1, difference=0.5))) == 0.5


def test_a_bar_that_would_flatten_the_others_is_cut_and_says_so() -> None:
    bars = [
        ReferenceBar(name="fast", value=10, label="10 ms", accent=True),
        ReferenceBar(name="<b>slow</b>", value=1000, label="1,000 ms", part=4),
    ]
    figure = reference_bars(bars, reference=8, reference_label="dense", title="Time", x_title="ms", part_name="part")
    part, rest = figure.data
    assert list(part.x) == [0, 4]
    assert list(rest.x) == [10, 46]  # cut at 5 times the shortest, part included
    assert list(rest.text) == ["10 ms", "1,000 ms »"]
    assert rest.y[1] == "&lt;b&gt;slow&lt;/b&gt;"
    assert "is cut" in figure.layout.title.text
    whole = reference_bars(bars[:1], reference=8, reference_label="dense", title="Time", x_title="ms")
    assert "cut" not in whole.layout.title.text
    with pytest.raises(ValueError, match="finite"):
        reference_bars(
            [ReferenceBar(name="x", value=float("nan"), label="")],
            reference=1,
            reference_label="",
            title="",
            x_title="",
        )
    with pytest.raises(ValueError, match="at least one"):
        reference_bars([], reference=1, reference_label="", title="", x_title="")


def test_the_page_loads_no_torch() -> None:
    code = "import sys, app.views.dispatch; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
