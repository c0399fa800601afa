"""A figure's title once more as text, for narrow screens: inside the figure it does not wrap, and scrolls out of sight.

`app/style.css` shows it where a figure is wider than the screen, and only there.
"""

import re
from typing import Any

import streamlit as st

from app.figures.theme import title_parts

_NOT_IN_A_CLASS = re.compile(r"[^\w-]")


def show(figure: Any, *, key: str) -> None:
    """Draw the title of a figure that is drawn next, for narrow screens; nothing where it has none.

    key  of the chart, or of a container that holds nothing else with a title
    """
    title, note, room = title_parts(figure)
    if not title:
        return
    # What the title takes in the figure is cut off there.
    cut = f".st-key-{_NOT_IN_A_CLASS.sub('-', key)}{{--rs-cut:{room}px}}"
    said = f"<p><b>{title}</b></p>" + (f"<p>{note}</p>" if note else "")
    st.html(f'<div class="rs-narrow-title"><style>@media (max-width:640px){{{cut}}}</style>{said}</div>')
