"""Pairs of experts as a matrix of shares: who fires with whom, who follows whom.

Shapes: A experts of the rows, B experts of the columns.
"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from app.figures.matrices import category_axes, colorbar
from app.figures.sheet import Sheet, heatmap
from app.figures.theme import SHARE_SCALE, Theme, figure_layout, palette

# One hue for shares, as in the matrix of tokens: neither the load's colours nor an expert's.
MAX_SIDE = 100  # rows or columns; more are pooled by their maximum


def pair_matrix(
    share_AB: NDArray[np.float64],
    order_A: NDArray[np.int64],
    order_B: NDArray[np.int64],
    *,
    title: str,
    row_title: str,
    column_title: str,
    hover: str,
    limit: float,
    theme: Theme = "light",
    note: str | None = None,
) -> go.Figure:
    """Shares from 0 to `limit` as intensity, rows from the top and columns from the left in the orders given.

    share_AB: by the experts' own numbers; NaN is left grey. hover: words between the two experts and the share, with
    %{y} and %{x} in place of them. Beyond MAX_SIDE neighbours in the order are pooled, the greatest share shown.
    """
    p = palette(theme)
    share = share_AB[np.ix_(order_A, order_B)]
    share, rows = _pooled(share, order_A)
    share, columns = _pooled(share.T, order_B)
    share = share.T
    notes = [note] if note else []
    if len(rows) < len(order_A) or len(columns) < len(order_B):
        notes.append(f"Neighbours are pooled to {len(rows)} rows and {len(columns)} columns, the greatest share shown.")
    side = int(np.clip(18 * len(rows), 260, 640))
    fig = Sheet(
        heatmap(
            x=columns,
            y=rows,
            z=share,
            zmin=0,
            zmax=limit,
            colorscale=SHARE_SCALE[theme],
            hoverongaps=False,
            xgap=1 if len(columns) <= 64 else 0,
            ygap=1 if len(rows) <= 64 else 0,
            hovertemplate=f"{hover}: <b>%{{z:.1%}}</b><extra></extra>",
            colorbar=colorbar("share", theme, tickformat=".0%"),
        )
    )
    figure_layout(
        fig,
        title=title,
        theme=theme,
        note=" ".join(notes) or None,
        height=side + 56,
        legend=False,
        right=90,
        x_title=column_title,
        y_title=row_title,
    )
    fig.update_layout(plot_bgcolor=p.no_data)
    category_axes(fig, columns, rows, most_columns=40, most_rows=32, short=_block)
    return fig.figure()


def _block(name: str) -> str:
    """ "63 +5" for the six experts of "63, 464, ..."."""
    first, *others = name.split(", ")
    return f"{first} +{len(others)}" if others else first


def _pooled(share: NDArray[np.float64], order: NDArray[np.int64]) -> tuple[NDArray[np.float64], list[str]]:
    """Rows by their names; where there are too many, blocks of them by the greatest share in each."""
    each = -(-len(order) // MAX_SIDE)
    if each <= 1:
        return share, [str(expert) for expert in order]
    first_R = np.arange(0, len(order), each)
    names = [", ".join(map(str, order[first : first + each])) for first in first_R.tolist()]
    return np.fmax.reduceat(share, first_R, axis=0), names
