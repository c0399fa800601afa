"""Choices live in the session and the URL, survive page changes, and are fitted to the run without a word."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app import state

# A dashboard in miniature: the page and the recorded steps come from the session, as a person would change them.
SCRIPT = """
import types
import streamlit as st
from app import state

page = st.session_state.get("test_page", "replay")
steps = st.session_state.get("test_steps", range(100))
state.begin(page)
layers = [{"index": 1}, {"index": 3}, {"index": 5}]
run = types.SimpleNamespace(run_id="r", moe_layers=layers, manifest={"model": {"layers": layers}})
if page != "runs":
    layer = state.pick_layer(run)
    step = state.pick_step(steps)
    st.text(f"layer {layer} step {step}")
if page == "tokens":
    st.text(f"sequence {state.pick_sequence(range(3))} expert {state.pick_expert(4)}")
    st.text(f"phase {state.pick_phase(['train', 'probe'])} window {state.pick_window()}")
if page == "compare":
    st.text(" ".join(state.pick_options("runs", "Runs", ["a", "b", "c"], default=["b", "c"])))
if st.session_state.get("test_choose"):
    state.choose(**st.session_state["test_choose"])
    st.text(f"{state.url_parameters()}")
    st.text(f"{state.current('layer')} {state.current('step')}")
state.finish()
"""


def start(page: str = "replay", steps: Any = range(100), **parameters: Any) -> AppTest:
    test = AppTest.from_string(SCRIPT, default_timeout=60)
    test.session_state["test_page"] = page
    test.session_state["test_steps"] = steps
    for name, value in parameters.items():
        test.query_params[name] = value if isinstance(value, list) else str(value)
    return drawn(test)


def go(test: AppTest, page: str, steps: Any = None) -> AppTest:
    """As the browser does: a page change comes with an empty query."""
    test.session_state["test_page"] = page
    if steps is not None:
        test.session_state["test_steps"] = steps
    test.query_params.clear()
    return drawn(test)


def drawn(test: AppTest) -> AppTest:
    test.run()
    assert not test.exception, test.exception
    return test


def texts(test: AppTest) -> list[str]:
    return [element.value for element in test.text]


def url(test: AppTest) -> dict[str, list[str]]:
    return {name: [values] if isinstance(values, str) else list(values) for name, values in test.query_params.items()}


def test_defaults_are_the_first_layer_and_the_last_step_and_leave_the_url_alone() -> None:
    test = start()
    assert texts(test) == ["layer 1 step 99"]
    assert url(test) == {}


def test_a10_step_and_layer_survive_page_changes_and_reload() -> None:
    test = start()
    test.slider(key="step").set_value(57)
    test.button_group(key="layer").set_value(3)
    drawn(test)
    assert url(test) == {"step": ["57"], "layer": ["3"]}
    assert texts(go(test, "compare"))[0] == "layer 3 step 57"
    go(test, "runs")
    assert url(test) == {"step": ["57"], "layer": ["3"]}, "a page without these widgets keeps them in its URL"
    assert texts(go(test, "replay")) == ["layer 3 step 57"]
    again = start(**{name: values[0] for name, values in url(test).items()})
    assert texts(again) == ["layer 3 step 57"]


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        pytest.param(range(11), 10, id="A8-from-step-57-to-a-run-of-11-steps"),
        pytest.param(range(500, 600), 500, id="A8-a-run-that-starts-at-500"),
        pytest.param([7], 7, id="A8-a-run-of-one-step"),
        pytest.param([0, 50, 56, 60], 56, id="sparse-the-nearest"),
        pytest.param([50, 64], 50, id="the-earlier-of-two-as-near"),
        pytest.param(range(0, 100, 5), 55, id="every-5-steps"),
    ],
)
def test_a_wanted_step_is_fitted_to_the_run_and_not_forgotten(steps: Any, shown: int) -> None:
    test = start(step=57)
    assert texts(test) == ["layer 1 step 57"]
    assert texts(go(test, "replay", steps)) == [f"layer 1 step {shown}"]
    assert url(test)["step"] == [str(shown)], "a link shows what its sender saw"
    assert texts(go(test, "replay", range(100))) == ["layer 1 step 57"]


def test_a8_one_step_draws_no_slider() -> None:
    test = start(steps=[7])
    assert len(test.slider) == len(test.select_slider) == 0


def test_sliders_stop_at_recorded_steps_only() -> None:
    even = start(steps=range(500, 600, 5))
    assert (even.slider(key="step").min, even.slider(key="step").max, even.slider(key="step").step) == (500, 595, 5)
    uneven = start(steps=[0, 50, 56, 60])
    assert uneven.select_slider(key="step").options == ["0", "50", "56", "60"]
    uneven.select_slider(key="step").set_value(50)
    assert texts(drawn(uneven)) == ["layer 1 step 50"]


@pytest.mark.parametrize("step", ["abc", "", "1e9", "57.5", "None", "9" * 400, "-", "٣x"])
def test_nonsense_in_the_url_means_the_default(step: str) -> None:
    test = start(step=step, layer="99", run="../../etc")
    expected = 99
    assert texts(test) == [f"layer 1 step {expected}"]


@pytest.mark.parametrize(("step", "shown"), [("-5", 0), ("1000", 99), (" 57 ", 57)])
def test_numbers_out_of_range_are_clamped(step: str, shown: int) -> None:
    assert texts(start(step=step)) == [f"layer 1 step {shown}"]


def test_other_choices_from_the_url_and_their_defaults() -> None:
    assert texts(start("tokens"))[1:] == ["sequence 0 expert None", "phase train window 50"]
    test = start("tokens", sequence=2, expert=3, phase="probe", window=10)
    assert texts(test)[1:] == ["sequence 2 expert 3", "phase probe window 10"]
    test = start("tokens", sequence=9, expert="x", phase="sleep", window=-1)
    assert texts(test)[1:] == ["sequence 0 expert None", "phase train window 50"]


def test_a_choice_of_several() -> None:
    assert texts(start("compare"))[1] == "b c"
    test = start("compare", runs=["c", "nonsense", "a", "c"])
    assert texts(test)[1] == "c a"
    test.multiselect(key="runs").set_value(["b"])
    drawn(test)
    assert url(test)["runs"] == ["b"]
    assert texts(go(go(test, "runs"), "compare"))[1] == "b"


def test_back_and_forward_take_the_url_and_a_plain_rerun_does_not() -> None:
    test = start(step=57, layer=3)
    test.query_params["step"] = "12"  # a stale URL that raced with a rerun
    assert texts(drawn(test)) == ["layer 3 step 57"]
    test.query_params.clear()
    test.query_params["step"] = "12"
    assert texts(history(test)) == ["layer 1 step 12"]
    test.query_params.clear()
    assert texts(history(test)) == ["layer 1 step 12"], "the bare entry a page change leaves behind"


def history(test: AppTest) -> AppTest:
    """Run as after a press of the browser's back button, which AppTest cannot press."""
    real = state.get_script_run_ctx

    def in_history() -> Any:
        context = real()
        assert context is not None
        context.is_history_navigation = True
        return context

    with mock.patch.object(state, "get_script_run_ctx", in_history):
        return drawn(test)


def test_a_choice_by_program_counts_at_once_and_on_the_next_page() -> None:
    test = start(step=57, layer=3)
    test.session_state["test_choose"] = {"layer": 5, "step": None}
    drawn(test)
    assert texts(test)[1:] == ["{'layer': ['5']}", "5 None"], "links and page changes of this very run have it"
    test.session_state["test_choose"] = {}
    assert texts(go(test, "compare"))[0] == "layer 5 step 99"


def test_unknown_choices_and_empty_options_are_refused() -> None:
    with pytest.raises(ValueError, match="colour"):
        state.pick_option("colour", "Colour", [1, 2])
    with pytest.raises(ValueError, match="'layer'"):
        state.pick_option("layer", "Layer", [])
    with pytest.raises(ValueError, match="no recorded steps"):
        state.pick_step([])


def test_nearest_step_agrees_with_a_search_by_eye() -> None:
    steps_S = np.array([0, 5, 9, 40])
    for text in range(-3, 50):
        by_eye = min(steps_S.tolist(), key=lambda step: (abs(step - text), step))
        assert state.nearest_step(steps_S, str(text)) == by_eye


def test_the_real_pages_share_the_run_of_the_url(
    shown: Path, write_run: Callable[..., Path], open_page: Callable[..., AppTest]
) -> None:
    write_run(shown, "a", range(3))
    write_run(shown, "b", range(3))
    test = open_page("recording", run="a")
    assert not test.exception
    assert test.sidebar.selectbox(key="run").value == "a"
    assert url(test)["run"] == ["a"]
    fallen_back = open_page("recording", run="../a")
    assert fallen_back.sidebar.selectbox(key="run").value == "b", "the newest"
    assert any("There is no run" in caption.value for caption in fallen_back.sidebar.caption)


STALE = """
import streamlit as st
from app import state

def late(name, value):
    st.session_state[name] = value
    (state._store if name == "step" else state._store_options)(name)

state.begin("replay")
steps = st.session_state.setdefault("test_steps", range(10))
label = st.session_state.setdefault("test_label", "{} (running)")
state.pick_step(steps)
state.pick_option("run", "Run", ["a", "b"], default="b", format_func=label.format, as_list=True)
state.pick_options("runs", "Runs", ["a", "b"], default=["b"], format_func=label.format)
for name, value in (("step", 9), ("step", 4), ("run", "b (running)"), ("runs", ["a (running)"]), ("runs", ["a"])):
    st.button(f"{name} {value}", on_click=late, args=(name, value))
state.finish()
"""


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        pytest.param("step 9", {}, id="the step that is shown in any case"),
        pytest.param("step 4", {"step": "4"}, id="a step"),
        pytest.param("run b (running)", {}, id="what is no option any more"),
        pytest.param("runs ['a (running)']", {}, id="nor any of several"),
        pytest.param("runs ['a']", {"runs": "a"}, id="an option"),
    ],
)
def test_what_the_browser_says_late_is_no_choice(told: str, wanted: dict[str, str]) -> None:
    test = AppTest.from_string(STALE, default_timeout=60)
    drawn(test)
    test.session_state["test_label"] = "{}"
    next(button for button in test.button if button.label == told).click()
    drawn(test)
    assert dict(test.query_params) == wanted


def test_a_page_that_draws_itself_again_tells_its_widgets_again_what_they_show() -> None:
    test = AppTest.from_string(STALE.replace("state.finish()", "state.finish()\nst.button('again', on_click=again)"))
    test = AppTest.from_string(AGAIN, default_timeout=60)
    drawn(test)
    assert [widget.proto.set_value for widget in (test.slider[0], test.selectbox[0])] == [True, True]
    drawn(test)
    assert [widget.proto.set_value for widget in (test.slider[0], test.selectbox[0])] == [False, False]
    test.session_state["test_again"] = True
    drawn(test)
    assert [widget.proto.set_value for widget in (test.slider[0], test.selectbox[0])] == [True, True]


AGAIN = """
import streamlit as st
from app import state

state.begin("replay")
state.pick_step(range(10))
state.pick_option("run", "Run", ["a", "b"], default="b", as_list=True)
state.finish()
if st.session_state.pop("test_again", False):
    state.draw_again()
"""
