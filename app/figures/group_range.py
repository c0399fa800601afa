"""The mean of several runs and the range they cover, laid over their curves.

Shape legend: S steps that all the runs recorded, R runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.figures.sheet import Sheet, scatter
from app.figures.theme import Theme, hex_to_rgb, palette

MEAN = "mean of the group"
MAX_COLUMNS = 500  # of a band; where a stretch has more steps, a column covers several


@dataclass(frozen=True, kw_only=True)
class GroupRange:
    """What the runs of one panel have at the steps all of them recorded: one stretch of it, finite throughout."""

    panel: str
    steps_S: NDArray[np.int64]
    values_RS: NDArray[np.float64]


def add_ranges(
    fig: Sheet, ranges: Sequence[GroupRange], panels: Sequence[str], *, theme: Theme, panels_per_row: int
) -> None:
    """Draw in each panel a grey band from the lowest to the highest run and their mean as a line in the text's colour.

    panels: every panel of the figure in the order they stand, `panels_per_row` in a row.
    """
    p = palette(theme)
    cols = min(panels_per_row, len(panels))
    grey = f"rgba({', '.join(map(str, hex_to_rgb(p.muted)))}, 0.25)"
    for place, one in enumerate(ranges):
        start = np.arange(0, len(one.steps_S), -(-len(one.steps_S) // MAX_COLUMNS))
        low = np.minimum.reduceat(one.values_RS.min(axis=0), start)
        high = np.maximum.reduceat(one.values_RS.max(axis=0), start)
        size = np.diff(np.append(start, len(one.steps_S)))
        mean = np.add.reduceat(one.values_RS.mean(axis=0), start) / size
        steps = one.steps_S[start + (size - 1) // 2]
        at = panels.index(one.panel)
        where = {"row": at // cols + 1, "col": at % cols + 1}
        edge = {"x": steps, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
        fig.add_trace(scatter(y=low, name="lowest", **edge), **where)
        fig.add_trace(scatter(y=high, name="highest", fill="tonexty", fillcolor=grey, **edge), **where)
        fig.add_trace(
            scatter(
                x=steps,
                y=mean,
                mode="lines",
                line={"color": p.text, "width": 2.5},
                name=MEAN,
                legendgroup=MEAN,
                showlegend=place == 0,
                customdata=np.stack([low, high], axis=1),
                hovertemplate=f"<b>mean of {len(one.values_RS)} runs</b><br>step %{{x:,d}}<br>%{{y:.6g}}"
                "<br>lowest %{customdata[0]:.6g}, highest %{customdata[1]:.6g}<extra></extra>",
            ),
            **where,
        )
