"""Bars of counts over categories in a given order."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from app.figures.labels import category_ticks
from app.figures.parameter_bars import ACCENTS
from app.figures.sheet import Sheet, bar
from app.figures.theme import Theme, figure_layout

_MOST_TICKS = 24


def count_bars(
    labels: Sequence[str],
    values: Sequence[float],
    *,
    title: str,
    x_title: str,
    y_title: str,
    theme: Theme = "light",
    note: str | None = None,
    height: int = 260,
) -> go.Figure:
    """One bar for each label, in their order, from 0 up."""
    fig = Sheet(
        bar(
            x=list(labels),
            y=list(values),
            marker={"color": ACCENTS[theme][0]},
            hovertemplate=f"<b>{x_title}: %{{x}}</b><br>%{{y:,}} {y_title}<extra></extra>",
        )
    )
    figure_layout(
        fig, title=title, theme=theme, note=note, height=height, x_title=x_title, y_title=y_title, legend=False
    )
    fig.update_xaxes(
        type="category", showgrid=False, tickvals=category_ticks(list(labels), _MOST_TICKS), categoryorder="trace"
    )
    fig.update_yaxes(rangemode="tozero", tickformat=",d" if max(values, default=0) >= 4 else None)
    return fig.figure()
