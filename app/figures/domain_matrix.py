"""Domains by experts: the load that each domain alone puts on them, in load colours.

Shapes: D domains, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from app.figures.labels import category_ticks, plain
from app.figures.pooling import expert_groups, group_labels, pool_experts
from app.figures.sheet import Sheet, heatmap
from app.figures.theme import Theme, figure_layout, load_coloraxis, load_z, palette

MAX_COLUMNS = 128  # experts; more are pooled by their maximum
_ROW = 34  # pixels


def domain_matrix(
    share_DE: NDArray[np.float64], domains: Sequence[str], baseline: float, *, title: str, theme: Theme = "light"
) -> go.Figure:
    """Share of a domain's tokens that use each expert over the baseline k/E, on the load scale: white is even use.

    share_DE: rows sum to k; NaN = no tokens. Beyond MAX_COLUMNS neighbouring experts are pooled, the greatest shown.
    """
    first_R = expert_groups(share_DE.shape[1], MAX_COLUMNS)
    ratio = pool_experts(share_DE / baseline, first_R)
    labels = group_labels(first_R, share_DE.shape[1])
    names = [plain(domain) for domain in domains]
    text = [[f"{100 * cell * baseline:.1f}%" if np.isfinite(cell) else "no tokens" for cell in row] for row in ratio]
    fig = Sheet(
        heatmap(
            x=labels,
            y=names,
            z=load_z(ratio),
            customdata=ratio,
            text=text,
            coloraxis="coloraxis",
            xgap=1,
            ygap=2,
            hoverongaps=False,
            hovertemplate="<b>%{y}</b>, expert %{x}<br>%{text} of its tokens use it"
            "<br>%{customdata:.2f} x the uniform share<extra></extra>",
        )
    )
    note = "Load of each domain alone over the uniform share, k/E of its tokens."
    if len(labels) < share_DE.shape[1]:
        note += f" {share_DE.shape[1]} experts in {len(labels)} columns, the greatest of each shown."
    figure_layout(
        fig,
        title=title,
        theme=theme,
        note=note,
        height=max(_ROW * len(names) + 56, 300),
        legend=False,
        right=120,
        left=24 + 8 * max((len(domain) for domain in domains), default=0),
        x_title="expert",
    )
    fig.update_layout(coloraxis=load_coloraxis(theme, length=240), plot_bgcolor=palette(theme).no_data)
    fig.update_xaxes(
        type="category",
        categoryarray=labels,
        tickvals=category_ticks(labels, 40),
        showgrid=False,
        ticks="",
        tickangle=0,
    )
    fig.update_yaxes(type="category", categoryarray=names, autorange="reversed", showgrid=False, ticks="")
    return fig.figure()
