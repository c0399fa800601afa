"""What figures of cells in rows and columns share: named axes without a grid, and a small scale beside them."""

from collections.abc import Callable, Sequence
from typing import Any

from app.figures.labels import category_ticks
from app.figures.sheet import Sheet
from app.figures.theme import Theme, palette

_ROOM = 100  # characters of labels, a gap after each, that fit side by side under a figure beside the menu


def category_axes(
    fig: Sheet,
    columns: Sequence[str],
    rows: Sequence[str],
    *,
    most_columns: int,
    most_rows: int,
    short: Callable[[str], str] = str,
) -> None:
    """One column and row for each name, columns from the left and rows from the top; at most so many are named.

    Of long names fewer columns are named, as many as stand side by side without touching.
    short: a name as it stands on an axis; hovering shows it in full.
    """
    longest = max((len(short(name)) for name in columns), default=0)
    most_columns = min(most_columns, max(_ROOM // (longest + 1), 1))
    named = ((fig.update_xaxes, columns, most_columns), (fig.update_yaxes, rows, most_rows))
    for axis, labels, most in named:
        ticks = category_ticks(labels, most)
        axis(
            type="category",
            categoryorder="array",
            categoryarray=list(labels),
            tickvals=ticks,
            ticktext=[short(name) for name in ticks],
            showgrid=False,
            ticks="",
            tickangle=0,
        )
    fig.update_xaxes(range=[-0.5, len(columns) - 0.5])
    fig.update_yaxes(range=[len(rows) - 0.5, -0.5])


def colorbar(title: str, theme: Theme, *, length: int = 200, tickformat: str | None = None) -> dict[str, Any]:
    """The scale of a matrix, `length` pixels long, at the top of its right side. title: <br> breaks a line."""
    text = palette(theme).text
    return {
        "title": {"text": title, "side": "top", "font": {"size": 13, "color": text}},
        "tickformat": tickformat,
        "tickfont": {"size": 12, "color": text},
        "thickness": 14,
        "outlinewidth": 0,
        "lenmode": "pixels",
        "len": length,
        "y": 1,
        "yanchor": "top",
        "ypad": 0,
    }
