"""Words and tables as HTML. Whatever comes from a run is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import pandas as pd

from app.words import NONE, value
from recorder.diagnosis import Finding


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, *, muted: bool = False) -> str:
    return f"<p{' class=muted' if muted else ''}>{escape(text)}</p>"


def findings(found: Sequence[Finding]) -> str:
    """The sentences of a diagnosis as a list, each with its level and, for who wants to look it up, its rule."""
    items = [
        f'<li class="{escape(one.level)}"><span class="level">{escape(one.level)}</span> {escape(one.text)}. '
        f'<span class="muted">[{escape(one.rule)}]</span></li>'
        for one in found
    ]
    return f"<ul>{''.join(items)}</ul>" if items else paragraph("No rule of the diagnosis has anything to say.")


def definitions(meanings: Sequence[tuple[str, str]]) -> str:
    """What the columns of a table are."""
    return paragraph(" ".join(f"{name}: {meaning}." for name, meaning in meanings), muted=True)


def table(frame: pd.DataFrame) -> str:
    """A frame as a table, numbers with three significant digits, "-" where there is no value."""
    words = [not pd.api.types.is_numeric_dtype(dtype) for dtype in frame.dtypes]
    head = "".join(
        f"<th{_class(is_words)}>{escape(str(name).replace('_', ' '))}</th>"
        for name, is_words in zip(frame.columns, words, strict=True)
    )
    rows = [
        "<tr>" + "".join(_cell(one, is_words) for one, is_words in zip(row, words, strict=True)) + "</tr>"
        for row in frame.itertuples(index=False)
    ]
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _cell(one: Any, is_words: bool) -> str:
    if one is None or one is pd.NA:
        text = NONE
    elif isinstance(one, str):
        text = one
    else:
        text = value(one)
    return f"<td{_class(is_words)}>{escape(text)}</td>"


def _class(is_words: bool) -> str:
    return " class=words" if is_words else ""
