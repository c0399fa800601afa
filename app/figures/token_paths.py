"""Which expert one token goes to, over steps: a matrix of layers or of experts by steps.

Shape legend: R rows (layers or experts), S steps in which the token occurs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from app.figures.labels import category_ticks, plain
from app.figures.matrices import colorbar
from app.figures.sheet import Sheet, heatmap, scatter
from app.figures.theme import INTENSITY, Theme, figure_layout, palette, undimmed

MAX_NUMBERED = 32  # columns in which a cell has room for an expert's number
_ROW = 20  # pixels
_TEXT_FROM = 0.55  # of the scale: from here on the ground asks for the other ink


def token_paths(
    share_RS: NDArray[np.float64],
    expert_RS: NDArray[np.int64],
    steps: Sequence[int],
    rows: Sequence[str],
    layers: Sequence[int],
    *,
    title: str,
    y_title: str,
    theme: Theme = "light",
    note: str | None = None,
    numbered: bool = False,
    wrap_at: int = 88,
) -> go.Figure:
    """Share of a token's occurrences in each cell as intensity, from 0 to all of them.

    share_RS: 0 to 1, NaN where the layer decided nothing. expert_RS: the expert that a cell is about. steps: only
    those in which the token occurs; equal columns, whatever lies between them. rows: names of the rows, the first at
    the foot. layers: the layer's key behind each row. numbered: write the expert into each cell, where there is room.
    Cells can be clicked: points above them carry customdata (layer's key, step, expert).
    """
    p = palette(theme)
    columns = [f"{step:,}" for step in steps]
    hover = [
        [
            "" if np.isnan(share) else _hover(row, step, int(expert), share)
            for share, expert, step in zip(share_S, expert_S, columns, strict=True)
        ]
        for row, share_S, expert_S in zip(rows, share_RS, expert_RS, strict=True)
    ]
    fig = Sheet(
        heatmap(
            x=columns,
            y=list(rows),
            z=share_RS,
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            hoverongaps=False,
            zmin=0,
            zmax=1,
            colorscale=INTENSITY[theme],
            xgap=1 if len(columns) <= 160 else 0,
            ygap=1,
            colorbar=colorbar("share of its<br>occurrences", theme, length=170, tickformat=".0%"),
        )
    )
    at = [(r, s) for r in range(len(rows)) for s in range(len(columns)) if share_RS[r, s] > 0]
    with_text = numbered and len(columns) <= MAX_NUMBERED
    ink = {True: "#ffffff" if theme == "light" else "#0b1f18", False: p.text}
    fig.add_trace(
        scatter(
            x=[columns[s] for _, s in at],
            y=[rows[r] for r, _ in at],
            mode="markers+text" if with_text else "markers",
            text=[str(expert_RS[r, s]) if expert_RS[r, s] >= 0 else "-" for r, s in at] if with_text else None,
            textfont={"size": 12, "color": [ink[bool(share_RS[r, s] >= _TEXT_FROM)] for r, s in at]},
            marker={"size": 14, "opacity": 0, "color": p.text},
            customdata=[[layers[r], int(steps[s]), int(expert_RS[r, s])] for r, s in at],
            hovertext=[hover[r][s] for r, s in at],
            hovertemplate="%{hovertext}<extra></extra>",
            showlegend=False,
            name="cells",
            **undimmed(p.text, 0.0) if not with_text else {},
        )
    )
    figure_layout(
        fig,
        title=title,
        theme=theme,
        note=note,
        height=max(len(rows) * _ROW, 170) + 56,
        legend=False,
        right=110,
        left=76,
        x_title="step",
        y_title=y_title,
        wrap_at=wrap_at,
    )
    fig.update_xaxes(
        type="category",
        categoryorder="array",
        categoryarray=columns,
        range=[-0.5, len(columns) - 0.5],
        tickvals=category_ticks(columns, 12),
        tickangle=0,
        showgrid=False,
        ticks="",
    )
    fig.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=list(rows),
        range=[-0.5, len(rows) - 0.5],
        tickvals=category_ticks(rows, 32),
        showgrid=False,
        ticks="",
    )
    return fig.figure()


def _hover(row: str, step: str, expert: int, share: float) -> str:
    to = f"expert {expert}" if expert >= 0 else "no expert"
    return f"<b>{plain(row)}, step {step}</b><br>{to}: {100 * share:.1f}% of its occurrences"
