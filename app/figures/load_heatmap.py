"""Expert-by-step load: one row of panels per MoE layer, one column per run, one scale for all.

Shape legend: S recorded steps, E experts, C columns drawn, R rows drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from app.figures.inputs import LoadSeries
from app.figures.labels import category_ticks, number, plain, wrap
from app.figures.pooling import (
    StepColumns,
    expert_groups,
    group_labels,
    pool_columns,
    pool_experts,
    step_columns,
)
from app.figures.sheet import Sheet, heatmap, scatter
from app.figures.theme import BEYOND_Z, Theme, figure_layout, load_coloraxis, load_z, palette, undimmed
from moe_core.metrics import load_ratio

MAX_COLUMNS = 400  # of all panels of a row there are about 800 pixels, and a column wants one of its own
MIN_COLUMNS = 100
MAX_CELLS = 40_000
MAX_ROWS = 128
MAX_CLICKABLE_POINTS = 4000
CLICK_POINTS = "cells"  # name of the traces that can be clicked
MAX_CLICK_STRIDE = 6  # columns between two clickable points: a column is about 2 pixels wide, a point 12
_HEADING = 26  # pixels between rows of panels


@dataclass(frozen=True, kw_only=True)
class HeatmapCells:
    """What one panel draws: z_RC on the load scale (NaN: no data), its columns and rows, numbers for hover."""

    z_RC: NDArray[np.float64]
    columns: StepColumns
    labels: list[str]  # R
    numbers_RCN: NDArray[np.float64]  # see _hover


def heatmap_cells(series: LoadSeries, *, max_columns: int = MAX_COLUMNS, max_rows: int = MAX_ROWS) -> HeatmapCells:
    """Pool one series into cells, steps by their sum and experts by the maximum (see `app.figures.pooling`).

    numbers_RCN holds, per cell: first step, load / uniform share of the steps together, assignments in all, last step,
    smallest and largest load / uniform share of a single step and expert that the cell covers, first expert, last
    expert.
    """
    columns = step_columns(series.steps_S, max_columns)
    first_R = expert_groups(series.num_experts, max_rows)
    last_R = np.append(first_R[1:], series.num_experts) - 1
    load_CE = pool_columns(series.load_SE, columns)
    pooled_CR = pool_experts(np.asarray(load_ratio(load_CE)).reshape(load_CE.shape), first_R)

    filled = ~columns.hole_C
    numbers = np.full((*pooled_CR.shape, 8), np.nan)
    numbers[..., 1] = pooled_CR
    numbers[..., 6] = first_R
    numbers[..., 7] = last_R
    if filled.any():
        start = columns.start_C[filled]
        numbers[filled, :, 0] = series.steps_S[start][:, None]
        numbers[filled, :, 3] = series.steps_S[columns.stop_C[filled] - 1][:, None]
        assignments = np.add.reduceat(load_CE[filled], first_R, axis=1)
        numbers[filled, :, 2] = np.where(np.isnan(pooled_CR[filled]), np.nan, assignments)
        ratio_SE = np.asarray(load_ratio(series.load_SE), dtype=np.float64).reshape(series.load_SE.shape)
        for place, extreme in ((4, np.fmin), (5, np.fmax)):
            by_column = extreme.reduceat(ratio_SE, start, axis=0)
            numbers[filled, :, place] = extreme.reduceat(by_column, first_R, axis=1)
    return HeatmapCells(
        z_RC=load_z(pooled_CR).T,
        columns=columns,
        labels=group_labels(first_R, series.num_experts),
        numbers_RCN=numbers.transpose(1, 0, 2),
    )


def load_heatmap(
    series: Sequence[LoadSeries],
    *,
    title: str,
    theme: Theme = "light",
    clickable: bool = False,
    marker_step: int | None = None,
    max_columns: int | None = None,
    max_rows: int = MAX_ROWS,
    panel_height: int | None = None,
    wrap_at: int = 88,
    row_name: str = "expert",
) -> go.Figure:
    """Load / uniform share of every expert over the steps, runs side by side, layers below each other.

    series: one per run and layer; runs stand in the order they first come, layers ascend. All panels share the step
    axis and the load scale. A run without one of the layers gets an empty panel that says so.
    clickable: lay invisible points with customdata (layer, expert, step, ...) over the cells, since Streamlit passes on
    no selection of heatmap cells; in each row one every few columns where one a cell would be more than
    MAX_CLICKABLE_POINTS, and none where they would lie too far apart.
    marker_step: draw a line at this step. max_columns, max_rows: pool steps or experts of a panel beyond these; by
    default what the panels' pixels and MAX_CELLS allow, 100 to 400 columns.
    row_name: what a row is, where it is no expert but a rank that works for several.
    """
    p = palette(theme)
    runs = list(dict.fromkeys(s.run for s in series))
    layers = sorted({s.layer for s in series})
    shown = {s.layer: s.label for s in series}
    by_panel = {(s.layer, s.run): s for s in series}
    if len(by_panel) != len(series):
        raise ValueError("two series have the same run and layer")
    if max_columns is None:
        max_columns = _columns_that_fit(series, len(runs), max_rows)
    cells = {key: heatmap_cells(s, max_columns=max_columns, max_rows=max_rows) for key, s in by_panel.items()}
    rows, cols = max(len(layers), 1), max(len(runs), 1)
    heights = [
        panel_height or _panel_height(max(len(cells[k].labels) for k in cells if k[0] == layer), rows)
        for layer in layers
    ] or [160]
    plot_height = sum(heights) + _HEADING * (rows - 1)
    fig = Sheet(
        rows=rows,
        cols=cols,
        shared_xaxes="columns",
        row_heights=heights,
        vertical_spacing=_HEADING / plot_height if rows > 1 else 0.0,
        horizontal_spacing=min(0.05, 0.3 / cols),
        column_titles=[plain(run) for run in runs] if runs else None,
    )
    total_cells = sum(c.z_RC.size for c in cells.values())
    click_stride = -(-total_cells // MAX_CLICKABLE_POINTS) or 1
    extent = _extent(cells.values())
    for row, layer in enumerate(layers, start=1):
        counts = {by_panel[layer, run].num_experts for run in runs if (layer, run) in by_panel}
        for col, run in enumerate(runs, start=1):
            if (layer, run) not in cells:
                _empty_panel(fig, row, col, f"layer {shown[layer]} of this run has no {row_name}s", theme)
                continue
            one, panel = by_panel[layer, run], cells[layer, run]
            hover = _hover(one, panel, row_name)
            _add_cells(fig, row, col, panel, hover, fields=6 if _pooled(one, panel) else 3)
            _mark_beyond(fig, row, col, panel)
            if clickable and click_stride <= MAX_CLICK_STRIDE:
                _add_points(fig, row, col, panel, layer, hover, click_stride)
            for restart in one.restarts:
                _line_at(fig, restart - 0.5, row=row, col=col, dash="dot")
            fig.update_yaxes(
                type="category",
                categoryorder="array",
                categoryarray=panel.labels,
                tickvals=category_ticks(panel.labels, max(heights[row - 1] // 22, 2)),
                range=[-0.5, len(panel.labels) - 0.5],
                showticklabels=col == 1 or len(counts) > 1,
                row=row,
                col=col,
            )
        fig.update_yaxes(title={"text": f"{wrap(f'layer {shown[layer]}', 16)}<br>{row_name}"}, row=row, col=1)
    if marker_step is not None and series:
        _line_at(fig, marker_step)
    fig.update_xaxes(title={"text": "step"}, row=rows)
    bounds = {s.bound for s in series}
    figure_layout(
        fig,
        title=title,
        theme=theme,
        note=_note(list(cells.values()), row_name),
        height=plot_height + 56,
        legend=False,
        head=30 if runs else 12,
        right=150,
        left=76,
        wrap_at=wrap_at,
    )
    fig.update_xaxes(range=extent, showgrid=False, ticks="outside", ticklen=4)
    fig.update_yaxes(showgrid=False, ticks="")
    fig.update_layout(
        plot_bgcolor=p.no_data,
        coloraxis=load_coloraxis(
            theme, bound=bounds.pop() if len(bounds) == 1 else None, length=min(plot_height + 40, 360)
        ),
        hovermode="closest",
        uirevision="load",  # a person's zoom stays while a live run grows
    )
    return fig.figure()


def has_click_points(figure: go.Figure) -> bool:
    """Whether a heatmap asked to be clickable is: with very many cells it is not."""
    return any(trace.get("name") == CLICK_POINTS for trace in figure.to_dict()["data"])


def _columns_that_fit(series: Sequence[LoadSeries], runs: int, max_rows: int) -> int:
    drawn_rows = sum(min(s.num_experts, max_rows) for s in series)
    fit = min(MAX_CELLS // max(drawn_rows, 1), 2 * MAX_COLUMNS // max(runs, 1))
    return int(np.clip(fit, MIN_COLUMNS, MAX_COLUMNS))


def _line_at(fig: Sheet, x: float, dash: str = "solid", **place: int) -> None:
    """A dark line with a light rim: the cells below are white, purple or red in both themes."""
    fig.add_vline(x=x, line={"color": "#ffffff", "width": 4}, **place)
    fig.add_vline(x=x, line={"color": "#1f2328", "width": 1.5, "dash": dash}, **place)


def _panel_height(rows: int, panels: int) -> int:
    """Pixels: 13 a row where there is room, never so many that two layers cannot be seen together."""
    return int(np.clip(rows * 13, 130 if panels > 1 else 230, 210 if panels > 1 else 330))


def _extent(cells: Any) -> list[float]:
    edges = np.concatenate([c.columns.edges for c in cells] or [np.array([-0.5, 0.5])])
    return [float(edges.min()), float(edges.max())]


def _note(cells: Sequence[HeatmapCells], row_name: str) -> str | None:
    """What was pooled, in words."""
    parts = []
    steps = max((c.columns.per_column for c in cells), default=1)
    if steps > 1:
        parts.append(f"each column sums {steps} recorded steps")
    experts = max((c.numbers_RCN[:, :, 7] - c.numbers_RCN[:, :, 6]).max(initial=0) + 1 for c in cells) if cells else 1
    if experts > 1:
        parts.append(f"each row shows the busiest of {int(experts)} {row_name}s")
    if not parts:
        return None
    text = ", ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _pooled(series: LoadSeries, cells: HeatmapCells) -> bool:
    return cells.columns.per_column > 1 or len(cells.labels) < series.num_experts


def _hover(series: LoadSeries, cells: HeatmapCells, row_name: str) -> str:
    """Hover template; customdata holds the first three numbers of `heatmap_cells`, where pooled the first six."""
    step = "step %{customdata[0]:,d}"
    if cells.columns.per_column > 1:
        step = "steps %{customdata[0]:,d} to %{customdata[3]:,d}"
    lines = [f"<b>{plain(series.run)}</b>, layer {series.label}", f"{row_name} %{{y}}, {step}"]
    if _pooled(series, cells):
        lines.append("%{customdata[1]:.3f} x the uniform share, %{customdata[2]:,d} assignments in all")
        lines.append("single steps: %{customdata[4]:.3f} x to %{customdata[5]:.3f} x")
    else:
        lines.append("%{customdata[1]:.3f} x the uniform share")
        lines.append("%{customdata[2]:,d} assignments")
    lines.append(f"most possible: {number(series.bound)} x")
    return "<br>".join(lines) + "<extra></extra>"


def _add_cells(fig: Sheet, row: int, col: int, cells: HeatmapCells, hover: str, fields: int) -> None:
    if cells.z_RC.size == 0:
        return
    fig.add_trace(
        heatmap(
            x=cells.columns.edges,
            y=cells.labels,
            z=cells.z_RC.astype(np.float32),
            customdata=_compact(cells.numbers_RCN[..., :fields]),
            coloraxis="coloraxis",
            hovertemplate=hover,
            hoverongaps=False,
        ),
        row=row,
        col=col,
    )


def _compact(numbers: NDArray[np.float64]) -> NDArray:
    """float32 where it holds every whole number exactly: half the bytes to the browser."""
    exact = np.nanmax(numbers, initial=0) < 2**24
    return numbers.astype(np.float32) if exact else numbers


def _mark_beyond(fig: Sheet, row: int, col: int, cells: HeatmapCells) -> None:
    """A mark in each stretch of cells beyond 16, so that clipped cells differ by more than their colour."""
    beyond = cells.z_RC == BEYOND_Z
    x, y = [], []
    centres = (cells.columns.edges[:-1] + cells.columns.edges[1:]) / 2
    for r in np.flatnonzero(beyond.any(axis=1)):
        change = np.flatnonzero(np.diff(np.concatenate([[False], beyond[r], [False]]).astype(np.int8)))
        for first, stop in change.reshape(-1, 2):
            x.append(float(centres[first] + centres[stop - 1]) / 2)
            y.append(cells.labels[r])
    if x:
        fig.add_trace(
            scatter(
                x=x,
                y=y,
                mode="markers",
                marker={"symbol": "triangle-up", "size": 7, "color": "#ffffff"},
                hoverinfo="skip",
                showlegend=False,
                name="beyond 16x",
                **undimmed("#ffffff"),
            ),
            row=row,
            col=col,
        )


def _add_points(fig: Sheet, row: int, col: int, cells: HeatmapCells, layer: int, hover: str, stride: int) -> None:
    """Invisible points that can be clicked, in every `stride`-th column; customdata = (layer, expert, step, ...)."""
    known_r, known_c = np.nonzero(~np.isnan(cells.z_RC))
    here = known_c % stride == stride - 1  # never more than a stride-th of the columns
    known_r, known_c = known_r[here], known_c[here]
    numbers = cells.numbers_RCN[known_r, known_c]
    centres = (cells.columns.edges[:-1] + cells.columns.edges[1:]) / 2
    data = np.column_stack([np.full(len(known_r), layer), numbers[:, 6], numbers[:, 0], numbers[:, :6]])
    for i in reversed(range(6)):  # the points carry three more fields in front
        hover = hover.replace(f"customdata[{i}]", f"customdata[{i + 3}]")
    fig.add_trace(
        scatter(
            x=centres[known_c],
            y=np.array(cells.labels, dtype=object)[known_r],
            # An array of numbers would reach Streamlit's selection as a dict. One of objects is sent as a list, and
            # plotly takes it as it is; a list it looks through, number by number.
            customdata=data.astype(object),
            mode="markers",
            # Plotly takes any marker under the pointer for a hit, the nearest only outside of all: so small that those
            # of two rows do not overlap.
            marker={"size": 6, "opacity": 0},
            **undimmed("#000000", opacity=0),
            hovertemplate=hover,
            showlegend=False,
            name=CLICK_POINTS,
        ),
        row=row,
        col=col,
    )


def _empty_panel(fig: Sheet, row: int, col: int, text: str, theme: Theme) -> None:
    # An annotation alone would leave the subplot out of the figure: give it one point that is not drawn.
    fig.add_trace(scatter(x=[None], y=[None], showlegend=False, hoverinfo="skip", name="empty"), row=row, col=col)
    fig.update_yaxes(showticklabels=False, row=row, col=col)
    fig.add_annotation(
        text=text,
        x=0.5,
        y=0.5,
        xref="x domain",
        yref="y domain",
        showarrow=False,
        font={"size": 13, "color": palette(theme).text},
        row=row,
        col=col,
    )
