"""Pictures that are replaced: the old one stays until the new one has come."""

import json
from typing import Any

from streamlit.testing.v1 import AppTest

SCRIPT = """
import plotly.graph_objects as go
import streamlit as st
from app import moving

figure = go.Figure(layout={"height": st.session_state["test_height"], "title": st.session_state["test_title"]})
moving.show(figure, key="picture", alt="A picture")
"""


def draw(test: AppTest, title: str, height: int = 300) -> tuple[dict[str, str], str]:
    """Titles by place, and the style that says which place is on top."""
    test.session_state["test_title"], test.session_state["test_height"] = title, height
    test.run()
    assert not test.exception, test.exception
    charts = test.get("plotly_chart")
    titles = {chart.proto.id[-1]: title_of(chart) for chart in charts}
    return titles, test.get("html")[-1].proto.body


def title_of(chart: Any) -> str:
    return str(json.loads(chart.proto.spec)["layout"]["title"]["text"])


def test_new_and_old_take_turns_and_the_new_one_is_on_top() -> None:
    test = AppTest.from_string(SCRIPT, default_timeout=60)
    titles, style = draw(test, "one")
    assert titles == {"0": "one"}
    titles, style = draw(test, "two")
    assert titles == {"0": "one", "1": "two"}
    assert "_place_1 {z-index: 1; visibility: visible" in style
    assert "_place_0 {z-index: 0; visibility: hidden; transition: visibility 0s" in style
    titles, style = draw(test, "three")
    assert titles == {"0": "three", "1": "two"}
    assert "_place_0 {z-index: 1" in style


def test_the_same_figure_stays_where_it_is() -> None:
    test = AppTest.from_string(SCRIPT, default_timeout=60)
    draw(test, "one")
    before = draw(test, "two")
    assert draw(test, "two") == before


def test_a_figure_of_another_height_leaves_no_room_behind() -> None:
    test = AppTest.from_string(SCRIPT, default_timeout=60)
    draw(test, "tall", 500)
    titles, style = draw(test, "low", 300)
    assert titles == {"1": "low"}
    assert "min-height: calc(300px" in style
