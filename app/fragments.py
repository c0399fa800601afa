"""Parts of a page that are drawn anew on their own, each an own one on every page."""

from collections.abc import Callable
from typing import Any

import streamlit as st

from app import state


def fragment(draw: Callable[..., Any], *, run_every: float | None = None) -> Callable[..., Any]:
    """`st.fragment(draw, run_every=...)`, told apart by the page that is drawn.

    A browser that has not heard yet that the page has changed still asks for parts of the page before, and Streamlit
    takes it back to that page, blank. What `state.forget_fragments` has dropped is not drawn, if no other page has it.
    """

    def own(*arguments: Any) -> Any:
        return draw(*arguments)

    own.__module__, own.__qualname__ = draw.__module__, f"{draw.__qualname__} on {state.page()}"  # Streamlit's identity
    return st.fragment(own, run_every=run_every)
