"""Curves over steps: losses, max_violation, idle and dead experts, normalised aux loss, for one or several runs.

Shape legend: S recorded steps, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray

from app.figures.breaks import breaks, restart_position, with_gaps
from app.figures.group_range import GroupRange, add_ranges
from app.figures.inputs import Curve, ReferenceLine
from app.figures.labels import number, plain
from app.figures.sheet import Sheet, Trace, scatter
from app.figures.theme import Theme, categorical_colour, figure_layout, line_dash, palette
from moe_core.curves import downsample, smooth

MAX_POINTS = 2000
STEP = "step"
_MIN_POINTS = 5  # the fewest that `downsample` can keep: first, last, minimum, maximum, a gap
_WEIGHT = {"thick": 0, "line": 1, "dash": 2, "dot": 3, "thin": 4}
_PANEL_GAP = 64  # pixels between rows of panels, room for a heading and step labels


def metric_curves(
    curves: Sequence[Curve],
    *,
    title: str,
    y_title: str,
    theme: Theme = "light",
    lines: Sequence[ReferenceLine] = (),
    ranges: Sequence[GroupRange] = (),
    smoothing: float = 0.0,
    log_y: bool = False,
    y_floor: float | None = None,
    note: str | None = None,
    marker_step: int | None = None,
    max_points: int = MAX_POINTS,
    panels_per_row: int = 2,
    panel_height: int = 260,
    share_y: bool = True,
    wrap_at: int = 88,
    x_title: str = STEP,
) -> go.Figure:
    """Curves over steps, one small chart per panel name, runs in their own colours.

    curves: see `Curve`; panels stand in the order they first come. y_title: name and unit of the values.
    lines: bounds and balanced values, drawn dashed and labelled, always within the picture.
    ranges: what several runs of a panel cover, with their mean, over the curves.
    smoothing: weight of `moe_core.curves.smooth`, 0 draws the values as they are; otherwise they stay faintly behind.
    log_y: logarithmic values; what is zero or negative then gets a mark at the foot, as non-finite values do.
    y_floor: lowest value of the axis (0 for counts). max_points: per curve; beyond it curves are down-sampled, their
    minima and maxima kept, and the note says so. marker_step: a line at this step.
    share_y: the same value axis in every panel.
    x_title: name and unit of what the curves' `at_S` count; hover names the step too.
    A curve of a resumed run is not joined over steps that are missing between two segments.
    """
    p = palette(theme)
    panels = list(dict.fromkeys(c.panel for c in curves)) or [""]
    cols = min(panels_per_row, len(panels))
    rows = math.ceil(len(panels) / cols)
    plot_height = rows * panel_height + (rows - 1) * _PANEL_GAP
    headings = [plain(name) for name in panels] if panels != [""] else None
    fig = Sheet(
        rows=rows,
        cols=cols,
        shared_xaxes="all" if len(panels) > 1 else None,
        vertical_spacing=_PANEL_GAP / plot_height if rows > 1 else 0.0,
        horizontal_spacing=0.08 if cols > 1 else 0.0,
        subplot_titles=headings,
    )
    axes = {
        name: _value_range(
            [c for c in curves if share_y or c.panel == name],
            [line for line in lines if share_y or line.panel in (None, name)],
            log_y=log_y,
            floor=y_floor,
        )
        for name in panels
    }
    # One legend entry a group, by its most visible curve, first panel first.
    by_weight = sorted(curves, key=lambda c: _WEIGHT[c.style])
    entry = {c.group: c for c in reversed(by_weight)}
    thinned = 0
    for curve in sorted(curves, key=lambda c: c.style != "thin"):  # faint curves lie behind
        place = _place(panels.index(curve.panel), cols)
        thinned = max(thinned, len(curve.steps_S) if len(curve.steps_S) > max_points else 0)
        for trace in _curve_traces(curve, theme, smoothing, log_y, max_points, curve is entry[curve.group], x_title):
            fig.add_trace(trace, **place)
        marks = _marks(curve, theme, foot=axes[curve.panel][0], log_y=log_y, x_title=x_title)
        if marks is not None:
            fig.add_trace(marks, **place)
    for index, name in enumerate(panels):
        place = _place(index, cols)
        if not any(c.panel == name for c in curves):
            fig.add_trace(scatter(x=[None], y=[None], showlegend=False, hoverinfo="skip"), **place)
        for line in lines:
            if line.panel in (None, name):
                _add_line(fig, line, theme, place, log_y)
        for step in sorted({int(r) for c in curves if c.panel == name for r in c.restarts}):
            at = next(
                restart_position(c.steps_S, c.at_S, step) for c in curves if c.panel == name and step in c.restarts
            )
            _add_restart(fig, at, theme, place)
        if marker_step is not None:
            fig.add_vline(x=marker_step, line={"color": p.text, "width": 1.5}, **place)
        fig.update_yaxes(range=list(axes[name]), **place)
    add_ranges(fig, ranges, panels, theme=theme, panels_per_row=cols)
    notes = [note] if note else []
    if smoothing > 0:
        notes.append(f"Smoothed with weight {smoothing:g}; the values themselves lie faintly behind.")
    if thinned:
        notes.append(f"Down-sampled from {thinned:,} to at most {max_points:,} points a curve, minima and maxima kept.")
    figure_layout(
        fig,
        title=title,
        theme=theme,
        note=" ".join(notes) or None,
        height=plot_height + 56,
        legend=len({c.group for c in curves}) > 1 or any(c.style in ("thin", "dash", "dot") for c in curves),
        head=28 if headings else 12,
        right=24,
        wrap_at=wrap_at,
    )
    fig.update_yaxes(type="log" if log_y else "linear")
    if log_y:
        fig.update_yaxes(dtick=1, exponentformat="none")
    fig.update_yaxes(title={"text": y_title}, col=1)
    fig.update_xaxes(title={"text": x_title}, row=rows)
    extent = _x_range(curves)
    fig.update_xaxes(range=extent, showticklabels=True, showgrid=False, ticks="outside", ticklen=4)
    if x_title == STEP and extent is not None and extent[1] - extent[0] < 8:
        fig.update_xaxes(dtick=1, tickformat=",d")
    # A person's zoom stays while a live run grows.
    fig.update_layout(hovermode="closest", uirevision=x_title)
    return fig.figure()


def _place(index: int, cols: int) -> dict[str, int]:
    return {"row": index // cols + 1, "col": index % cols + 1}


def _curve_traces(
    curve: Curve, theme: Theme, smoothing: float, log_y: bool, max_points: int, legend: bool, x_title: str
) -> list[Trace]:
    colour = categorical_colour(curve.colour, theme=theme)
    drawable = _drawable(curve.values_S, log_y)
    values = np.where(drawable, curve.values_S, np.nan)
    width = {"line": 2.0, "thin": 1.0, "thick": 3.0, "dash": 2.0, "dot": 2.0}[curve.style]
    dash = curve.style if curve.style in ("dash", "dot") else line_dash(curve.colour)
    base: dict[str, Any] = {"legendgroup": curve.group, "name": plain(curve.group)}
    hover = f"<b>{plain(curve.name)}</b><br>{_where(curve, x_title)}<br>%{{y:.6g}}<extra></extra>"
    places_B = breaks(curve.steps_S, curve.restarts)

    def trace(y: NDArray[np.float64], **settings: Any) -> Trace:
        steps, at, y = with_gaps(places_B, curve.steps_S, curve.steps_S if curve.at_S is None else curve.at_S, y)
        kept, y = downsample(np.arange(len(y)), y, max(max_points, _MIN_POINTS))
        # A value between two gaps has no neighbour to draw a line to: without a marker it would not be seen.
        alone = len(y) == 1 or bool(np.any(_lonely(y)))
        marker = {"size": np.where(_lonely(y), 8, 0) if alone else 0, "opacity": 1, "color": colour}
        return scatter(
            x=at[kept] if len(places_B) or curve.at_S is not None else curve.steps_S[kept],
            y=y,
            customdata=None if curve.at_S is None else steps[kept],
            mode="lines+markers" if alone else "lines",
            marker=marker if alone else None,
            connectgaps=False,
            **base,
            **settings,
        )

    thin = curve.style == "thin"
    if smoothing <= 0:
        line = {"color": colour, "width": width, "dash": dash}
        opacity = 0.45 if thin else 1.0
        return [trace(values, line=line, opacity=opacity, showlegend=legend, hovertemplate=hover)]
    faint = {"color": colour, "width": 1.0, "dash": dash}
    smoothed_hover = hover.replace("%{y:.6g}", f"%{{y:.6g}} (smoothed, weight {smoothing:g})")
    raw = trace(values, line=faint, opacity=0.3, showlegend=False, hovertemplate=hover)
    line = {"color": colour, "width": width, "dash": dash}
    soft = trace(
        smooth(values, smoothing),
        line=line,
        opacity=0.6 if thin else 1.0,
        showlegend=legend,
        hovertemplate=smoothed_hover,
    )
    return [raw, soft]


def _lonely(y: NDArray[np.float64]) -> NDArray[np.bool_]:
    known = np.concatenate([[False], np.isfinite(y), [False]])
    return known[1:-1] & ~known[:-2] & ~known[2:]


def _drawable(values: NDArray[np.float64], log_y: bool) -> NDArray[np.bool_]:
    with np.errstate(invalid="ignore"):
        return np.isfinite(values) & ((values > 0) if log_y else True)


def _where(curve: Curve, x_title: str) -> str:
    """A hover template's line on where a point stands."""
    if curve.at_S is None:
        return "step %{x:,d}"
    return f"step %{{customdata:,d}}<br>{plain(x_title)}: %{{x:,.5~g}}"


def _marks(curve: Curve, theme: Theme, *, foot: float, log_y: bool, x_title: str) -> Trace | None:
    """Marks at the foot of the panel where a recorded value cannot be drawn: NaN, infinities, zeros on a log axis.

    foot: lowest value of the axis, its logarithm on a log axis.
    """
    lost = ~_drawable(curve.values_S, log_y)
    if curve.null_S is not None:
        lost &= ~curve.null_S
    if not lost.any():
        return None
    places = np.flatnonzero(lost)[:MAX_POINTS]  # a run that is NaN from some step on: its first marks tell the story
    steps, values = curve.steps_S[places], curve.values_S[places]
    words = [str(float(v)) if not np.isfinite(v) else f"{number(float(v))}, off the log axis" for v in values]
    return scatter(
        x=steps if curve.at_S is None else curve.at_S[places],
        customdata=None if curve.at_S is None else steps,
        y=np.full(len(steps), 10.0**foot if log_y else foot),
        mode="markers",
        marker={
            "symbol": "x",
            "size": 9,
            "color": categorical_colour(curve.colour, theme=theme),
            "line": {"color": palette(theme).text, "width": 1},
        },
        cliponaxis=False,
        text=words,
        hovertemplate=f"<b>{plain(curve.name)}</b><br>{_where(curve, x_title)}<br>value: %{{text}}<extra></extra>",
        legendgroup=curve.group,
        name=f"{plain(curve.group)}: not finite",
        showlegend=False,
    )


def _value_range(
    curves: Sequence[Curve], lines: Sequence[ReferenceLine], *, log_y: bool, floor: float | None
) -> tuple[float, float]:
    """Ends of a value axis that holds every drawable value and every line, with some air (log10 on a log axis)."""
    values = [c.values_S[_drawable(c.values_S, log_y)] for c in curves]
    values.append(np.array([line.value for line in lines if line.value > 0 or not log_y], dtype=np.float64))
    everything = np.concatenate(values)
    if floor is not None and (floor > 0 or not log_y):
        everything = np.append(everything, floor)
    if len(everything) == 0:
        return (0.0, 1.0)
    if log_y:
        everything = np.log10(everything)
    low, high = float(everything.min()), float(everything.max())
    # A constant curve lies in the middle of a range that is wide enough for its axis labels to differ.
    air = 0.08 * (high - low) if high > low else max(abs(high) * 0.1, 1e-6)
    at_floor = floor is not None and not log_y and low >= floor
    return (low if at_floor and low == floor else low - air, high + air)


def _x_range(curves: Sequence[Curve]) -> list[float] | None:
    at = np.concatenate([np.zeros(0), *(c.steps_S if c.at_S is None else c.at_S for c in curves)])
    at = at[np.isfinite(at)]
    if len(at) == 0:
        return None
    low, high = float(at.min()), float(at.max())
    air = max((high - low) * 0.015, 0.5 if all(c.at_S is None for c in curves) else 1e-9)
    return [low - air, high + air]


def _add_line(fig: Sheet, line: ReferenceLine, theme: Theme, place: dict[str, int], log_y: bool) -> None:
    p = palette(theme)
    if log_y and line.value <= 0:
        return
    fig.add_hline(y=line.value, line={"color": p.muted, "width": 1.5, "dash": "dash"}, **place)
    fig.add_annotation(
        text=plain(line.label),
        x=1,
        xref="x domain",
        # On a log axis plotly wants a shape's value as it is, but an annotation's as its logarithm.
        y=math.log10(line.value) if log_y else line.value,
        xanchor="right",
        yanchor="bottom",
        showarrow=False,
        font={"size": 12, "color": p.text},
        **place,
    )


def _add_restart(fig: Sheet, at: float, theme: Theme, place: dict[str, int]) -> None:
    p = palette(theme)
    fig.add_vline(x=at, line={"color": p.text, "width": 1, "dash": "dot"}, **place)
    fig.add_annotation(
        text="resumed",
        textangle=-90,
        x=at,
        y=1,
        yref="y domain",
        xanchor="right",
        yanchor="top",
        showarrow=False,
        font={"size": 11, "color": p.text},
        **place,
    )


def sparkline(values_S: ArrayLike, points: int = 60) -> list[float]:
    """Values for a small line in a table cell, at most `points` of them, minima and maxima kept.

    values_S: (S,) in step order; what is not finite is left out, since a table's line chart cannot show gaps.
    """
    values = np.asarray(values_S, dtype=np.float64)
    values = values[np.isfinite(values)]
    _, kept = downsample(np.arange(len(values)), values, max(points, _MIN_POINTS))
    return [float(v) for v in kept]
