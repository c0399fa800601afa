"""Pictures that change while a replay plays: no blink between two steps.

Streamlit draws a plotly figure anew, from an empty place, whenever anything in it has changed. Here each picture
has two places, one above the other, used in turn: the old figure stays in sight until the new one covers it.
"""

from typing import Any

import streamlit as st

from app import charts, export_images, narrow_title
from app.figures.sheet import with_layout

# A line over load colours, white in the middle of the scale in both themes: dark, with a light rim.
DARK, LIGHT = "#14181d", "#ffffff"

_PLACES = "_moving_places"
_OLD_FOR_S = 2  # then the old figure is hidden, for readers of the screen too; drawing takes far less


def show(figure: Any, *, key: str, alt: str, selectable: bool = False) -> list[dict[str, Any]]:
    """`charts.show` for a figure of a fixed height that is replaced often; without a table of numbers."""
    figure = with_layout(figure, paper_bgcolor=export_images.page_ground(charts.theme()))  # it must cover the old one
    height = figure.to_dict()["layout"]["height"]
    new = (figure.to_json(), alt)
    # key -> the place last drawn in, and what stands in both: (figure as JSON, figure, alt, height)
    places: dict[str, Any] = st.session_state.setdefault(_PLACES, {})
    at, content = places.get(key, (1, [None, None]))
    if content[at] is None or (content[at][0], content[at][2]) != new:
        at = 1 - at
        content = [*content]
        content[at] = (new[0], figure, alt, height)
        old = content[1 - at]
        if old is not None and old[3] != height:
            content[1 - at] = None  # of another layer or run: it would keep its room
        places[key] = (at, content)
    points: list[dict[str, Any]] = []
    narrow_title.show(figure, key=f"{key}_places")
    with st.container(key=f"{key}_places"):
        for place in (0, 1):
            with st.container(key=f"{key}_place_{place}"):
                if content[place] is None:
                    continue
                _, drawn, text, _ = content[place]
                found = charts.show(
                    drawn, key=f"{key}_{place}", alt=text, selectable=selectable, saveable=False, titled=False
                )
                points = found if place == at else points
        # Last: put on top before its new figure has come, the place would show the one before the old one.
        _style(key, at, height)
    with st.container(horizontal=True, horizontal_alignment="right"):
        charts.save(figure, key=key, alt=alt, chart=f"{key}_{at}")
    return points


def line_at(container_key: str, *, left: str, top: int, height: int) -> None:
    """A vertical line over the one chart of a container, which itself does not change. left: CSS length in it."""
    frame = f".st-key-{container_key} [data-testid=stFullScreenFrame]"
    st.html(
        f"<style>{frame} {{position: relative}} "
        f"{frame}::after {{content: ''; position: absolute; pointer-events: none; z-index: 2; "
        f"left: {left}; top: {top}px; height: {height}px; width: 2px; background: {DARK}; "
        f"box-shadow: 0 0 0 1.5px {LIGHT}}}</style>"
    )


def _style(key: str, at: int, height: int) -> None:
    stack, now, old = (f".st-key-{key}_{name}" for name in ("places", f"place_{at}", f"place_{1 - at}"))
    st.html(
        f"<style>{stack} {{position: relative; min-height: calc({height}px - var(--rs-cut, 0px))}} "
        f".st-key-{key}_place_1 {{position: absolute; top: 0; left: 0; width: 100%}} "
        f"{now} {{z-index: 1; visibility: visible; transition: none}} "
        f"{old} {{z-index: 0; visibility: hidden; transition: visibility 0s {_OLD_FOR_S}s}}</style>"
    )
