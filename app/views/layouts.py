"""Layouts: which layers are dense and which MoE, how many parameters, and what a token costs.

Of the picked run, of published models side by side, or of a design that is being thought about.
"""

import streamlit as st

from app import state
from app.views import layouts_design, layouts_models, layouts_run

_SHOWN = {"run": "The run", "models": "Published models", "design": "A design"}


def render() -> None:
    """Draw the page."""
    head = st.container()
    first, second = st.columns([3, 4], vertical_alignment="bottom")
    with first:
        shown = state.pick_option("show", "Layout of", list(_SHOWN), format_func=lambda name: _SHOWN[name])
    {"run": layouts_run, "models": layouts_models, "design": layouts_design}[shown].render(head, second)
