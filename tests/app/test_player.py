"""Replay: play moves the step on its own clock, pause keeps it, and the URL waits for the pause."""

from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app import player

SCRIPT = """
import streamlit as st
from app import player, state

state.begin(st.session_state.get("test_page", "replay"))
player.replay(st.session_state["test_steps"], lambda step: st.text(f"step {step}"))
state.finish()
"""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(player.time, "monotonic", clock)
    return clock


def start(steps: Any, **parameters: Any) -> AppTest:
    test = AppTest.from_string(SCRIPT, default_timeout=60)
    test.session_state["test_steps"] = steps
    for name, value in parameters.items():
        test.query_params[name] = str(value)
    return drawn(test)


def drawn(test: AppTest) -> AppTest:
    test.run()
    assert not test.exception, test.exception
    return test


def press(test: AppTest, key: str) -> AppTest:
    test.button(key=key).click()
    return drawn(test)


def tick(test: AppTest, clock: Clock) -> str:
    clock.now += player.FRAME_S
    return drawn(test).text[0].value


def test_play_moves_and_pause_keeps(clock: Clock) -> None:
    test = start(range(10), step=3)
    press(test, "play")
    assert test.text[0].value == "step 3", "the first frame is the step one was at"
    assert test.button(key="play").label == "Pause"
    assert [tick(test, clock), tick(test, clock)] == ["step 4", "step 5"]
    assert drawn(test).text[0].value == "step 5", "a run between two ticks is no frame"
    assert test.slider(key="step").value == 5
    press(test, "play")
    assert test.query_params["step"] == "5"
    assert tick(test, clock) == "step 5"


def test_it_stops_at_the_end_and_starts_over_from_there(clock: Clock) -> None:
    test = start(range(4), step=2)
    press(test, "play")
    assert tick(test, clock) == "step 3"
    assert test.button(key="play").label == "Play"
    assert tick(test, clock) == "step 3"
    press(test, "play")
    assert test.text[0].value == "step 0"


def test_a_long_run_plays_in_about_a_minute_and_the_speed_can_be_chosen(clock: Clock) -> None:
    test = start(range(1000), step=0)
    press(test, "play")
    assert tick(test, clock) == "step 20"
    test.selectbox(key="player_speed").set_value(100)
    drawn(test)
    assert tick(test, clock) == "step 120"


def test_steps_recorded_sparsely_are_the_only_ones_played(clock: Clock) -> None:
    test = start([0, 7, 8, 30], step=0)
    press(test, "play")
    assert [tick(test, clock) for _ in range(3)] == ["step 7", "step 8", "step 30"]


def test_one_step_on_and_back_and_the_ends() -> None:
    test = start([0, 7, 8], step=0)
    assert test.button(key="step_back").disabled
    assert press(test, "step_forward").text[0].value == "step 7"
    assert press(test, "step_forward").text[0].value == "step 8"
    assert test.button(key="step_forward").disabled
    assert press(test, "step_back").text[0].value == "step 7"


def test_a8_one_step_has_no_controls() -> None:
    test = start([7])
    assert test.text[0].value == "step 7"
    assert len(test.button) == len(test.slider) == len(test.select_slider) == 0


def test_leaving_the_page_stops_the_replay_and_keeps_the_step(clock: Clock) -> None:
    test = start(range(10), step=3)
    press(test, "play")
    tick(test, clock)
    test.session_state["test_page"] = "compare"
    test.query_params.clear()
    assert drawn(test).text[0].value == "step 4"
    test.session_state["test_page"] = "replay"
    assert tick(test, clock) == "step 4"
