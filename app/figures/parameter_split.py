"""Each model as one bar: all its parameters, and in it those that one token uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from app.figures.labels import plain, si
from app.figures.parameter_bars import ACCENTS
from app.figures.sheet import Sheet, Trace, bar
from app.figures.theme import Theme, figure_layout, palette
from app.words import percent


@dataclass(frozen=True, kw_only=True)
class Split:
    """One bar. name: of the model. active, total: parameters, active at most total."""

    name: str
    active: int
    total: int


def parameter_split(splits: Sequence[Split], *, title: str, theme: Theme = "light", wrap_at: int = 88) -> go.Figure:
    """A bar for each model, from top to bottom: its length all parameters, the part in colour those a token uses.

    The scale begins at 0 and is the same for all, so that lengths compare. Raises ValueError where active is more
    than total.
    """
    for split in splits:
        if not 0 <= split.active <= split.total:
            raise ValueError(f"{split.name} has active={split.active} of total={split.total}")
    p = palette(theme)
    names = [plain(split.name) for split in splits]
    hovers = [
        f"<b>{name}</b><br>{split.total:,} parameters<br>{split.active:,} active for a token, "
        f"{percent(split.active / max(split.total, 1), 1)}"
        for name, split in zip(names, splits, strict=True)
    ]
    positions = list(range(len(splits)))  # not the names: two models may share one

    def part(name: str, values: list[int], colour: str) -> Trace:
        return bar(
            x=values,
            y=positions,
            orientation="h",
            name=name,
            marker={"color": colour, "line": {"color": p.block_line, "width": 1}},
            hovertext=hovers,
            hovertemplate="%{hovertext}<extra></extra>",
        )

    fig = Sheet(
        part("active for a token", [split.active for split in splits], ACCENTS[theme][1]),
        part("not used by it", [split.total - split.active for split in splits], p.block),
    )
    longest = max((split.total for split in splits), default=1)
    for position, split in zip(positions, splits, strict=True):
        fig.add_annotation(
            x=split.total,
            y=position,
            text=f"{si(split.active)} of {si(split.total)}, {percent(split.active / max(split.total, 1), 1)}",
            xanchor="left",
            xshift=6,
            showarrow=False,
            font={"size": 13, "color": p.text},
        )
    widest = max((len(split.name) for split in splits), default=0)
    figure_layout(
        fig,
        title=title,
        theme=theme,
        height=70 + 34 * len(splits),
        x_title="parameters",
        wrap_at=wrap_at,
        left=min(280, 24 + 8 * widest),
    )
    fig.update_xaxes(range=[0, longest * 1.3 or 1], exponentformat="B")
    fig.update_yaxes(
        range=[len(splits) - 0.5, -0.5], tickvals=positions, ticktext=names, showgrid=False, ticks="", showline=False
    )
    fig.update_layout(barmode="stack", bargap=0.3, hovermode="closest", legend={"traceorder": "normal"})
    return fig.figure()
