"""What figures of cells in rows and columns share: named axes without a grid, and a small scale beside them."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from app.figures.labels import category_ticks
from app.figures.theme import Theme, palette


def category_axes(
    fig: go.Figure, columns: Sequence[str], rows: Sequence[str], *, most_columns: int, most_rows: int
) -> None:
    """One column and row for each name, columns from the left and rows from the top; at most so many are named."""
    named = ((fig.update_xaxes, columns, most_columns), (fig.update_yaxes, rows, most_rows))
    for axis, labels, most in named:
        axis(
            type="category",
            categoryorder="array",
            categoryarray=list(labels),
            tickvals=category_ticks(labels, most),
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
