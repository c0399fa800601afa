"""Horizontal bars, one a candidate, against a line at what all of them are measured by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from app.figures.labels import plain
from app.figures.sheet import Sheet, bar
from app.figures.theme import Theme, figure_layout, palette

CUT = 5  # a bar is cut at this many times the shortest, so that one slow candidate does not flatten all others
_ACCENTS = {"light": "#2f7f69", "dark": "#3fa588"}
_ROW = 34  # pixels


@dataclass(frozen=True, kw_only=True)
class ReferenceBar:
    """One candidate. value: at least 0. label: written beside its bar. part: how much of value is `part_name`."""

    name: str
    value: float
    label: str
    accent: bool = False
    part: float = 0.0


def reference_bars(
    bars: Sequence[ReferenceBar],
    *,
    reference: float,
    reference_label: str,
    title: str,
    x_title: str,
    part_name: str = "",
    note: str | None = None,
    theme: Theme = "light",
    wrap_at: int = 60,
) -> go.Figure:
    """A bar for each candidate, the first on top, and a dashed line at the reference.

    reference: the value all are measured by, in the same unit as `ReferenceBar.value`. part_name: what the parts of
    bars are, drawn darker and named in their hover.
    Raises ValueError without bars, and for a negative or non-finite value.
    """
    if not bars:
        raise ValueError("reference_bars needs at least one bar")
    for one in bars:
        if not 0 <= one.value < float("inf"):
            raise ValueError(f"the value of {one.name!r} must be finite and at least 0, got {one.value}")
    p = palette(theme)
    end = max(CUT * min(one.value for one in bars), 1.25 * reference) or 1.0
    cut = any(one.value > end for one in bars)
    names = [plain(one.name) for one in bars]
    # Beside a cut bar stands its whole value, and a mark that it goes on.
    labels = [plain(one.label) + (" »" if one.value > end else "") for one in bars]
    longest = max(min(one.value, end) for one in bars)
    fig = Sheet()
    if part_name:
        fig.add_trace(
            bar(
                y=names,
                x=[min(one.part, end) for one in bars],
                orientation="h",
                marker={"color": p.block_line},
                showlegend=False,
                hovertemplate=f"<b>%{{y}}</b><br>{plain(part_name)}: %{{customdata:,.3g}}<extra></extra>",
                customdata=[one.part for one in bars],
            )
        )
    fig.add_trace(
        bar(
            y=names,
            x=[max(min(one.value, end) - one.part, 0.0) for one in bars],
            orientation="h",
            marker={"color": [_ACCENTS[theme] if one.accent else p.block for one in bars]},
            showlegend=False,
            text=labels,
            textposition="outside",
            textfont={"size": 13, "color": p.text},
            cliponaxis=False,
            hovertemplate="<b>%{y}</b><br>%{text}<extra></extra>",
        )
    )
    fig.add_vline(x=reference, line={"color": p.text, "width": 1.5, "dash": "dash"})
    fig.add_annotation(
        text=plain(reference_label),
        x=reference,
        y=1,
        yref="y domain",
        xanchor="left",
        yanchor="bottom",
        xshift=-4,
        showarrow=False,
        font={"size": 12, "color": p.text},
    )
    cut_note = "A bar that ends in » is cut: its value stands beside it." if cut else None
    figure_layout(
        fig,
        title=title,
        theme=theme,
        note=" ".join(text for text in (note, cut_note) if text) or None,
        height=_ROW * len(bars) + 64,
        head=26,
        left=112,
        legend=False,
        x_title=x_title,
        wrap_at=wrap_at,
    )
    # Room to the right of the longest bar for what is written beside it.
    fig.update_xaxes(range=[0, max(longest, reference) * 1.7], rangemode="tozero")
    fig.update_yaxes(type="category", categoryorder="array", categoryarray=names[::-1], showgrid=False, ticksuffix=" ")
    fig.update_layout(barmode="stack", bargap=0.3, hovermode="closest")
    return fig.figure()
