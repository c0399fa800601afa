"""How balanced the load is over steps: max_violation, idle and dead experts, shares in per cent.

Shape legend: S recorded steps, E experts, C columns drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from app.figures.breaks import restart_position
from app.figures.curves import STEP, metric_curves
from app.figures.inputs import Curve, LoadSeries, ReferenceLine
from app.figures.labels import number
from app.figures.pooling import step_columns
from app.figures.sheet import Sheet, Trace, scatter
from app.figures.theme import OKABE_ITO, Theme, categorical_colour, figure_layout, mix, palette
from moe_core.metrics import (
    WINDOW,
    dead_experts,
    idle_experts,
    max_violation,
    max_violation_bound,
    rolling_window_load,
)

MAX_SHARE_POINTS = 10_000
MAX_SHARE_COLUMNS = 200
MAX_BANDS = 64


def _run_colours(series: Sequence[LoadSeries], colours: Mapping[str, int] | None) -> Mapping[str, int]:
    if colours is not None:
        return colours
    return {run: i for i, run in enumerate(dict.fromkeys(s.run for s in series))}


def violation_curves(
    series: Sequence[LoadSeries],
    *,
    title: str,
    theme: Theme = "light",
    window: int = WINDOW,
    colours: Mapping[str, int] | None = None,
    log_y: bool = False,
    low: bool = False,
    **settings: Any,
) -> go.Figure:
    """max_violation of every run, one panel per layer: each step thin, the trailing window thick, the bound E/k - 1.

    series: one per run and layer. window: recorded steps whose loads are summed for the thick line.
    colours: place of each run in the fixed order of colours, by default the order of `series`.
    low: panels without room for words beside their heading. settings: passed on to `metric_curves`.
    """
    place = _run_colours(series, colours)
    curves, lines = [], []
    for s in sorted(series, key=lambda s: s.layer):
        shared: dict[str, Any] = {
            "steps_S": s.steps_S,
            "group": s.run,
            "colour": place[s.run],
            "panel": f"layer {s.label}",
            "restarts": s.restarts,
            "at_S": s.at_S,
        }
        batch_S = _values(max_violation(s.load_SE))
        window_S = _values(max_violation(rolling_window_load(s.load_SE, window)))
        curves.append(
            Curve(name=f"{s.run}, each step", values_S=batch_S, style="thin", null_S=np.isnan(batch_S), **shared)
        )
        curves.append(
            Curve(
                name=f"{s.run}, window of {window}",
                values_S=window_S,
                style="thick",
                null_S=np.isnan(window_S),
                **shared,
            )
        )
        bound = max_violation_bound(s.num_experts, s.top_k)
        label = f"bound E/k - 1 = {number(bound)}" + ("" if low else ": all tokens on one expert")
        line = ReferenceLine(value=bound, label=label, panel=f"layer {s.label}")
        if line not in lines:
            lines.append(line)
    note = f"Thin: each step. Thick: loads of the last {window} recorded steps summed. 0 is balanced."
    return metric_curves(
        curves,
        title=title,
        y_title="max_violation",
        theme=theme,
        lines=lines,
        log_y=log_y,
        note=note,
        y_floor=None if log_y else 0.0,
        **settings,
    )


def unused_curves(
    series: Sequence[LoadSeries],
    *,
    title: str,
    theme: Theme = "light",
    window: int = WINDOW,
    colours: Mapping[str, int] | None = None,
    **settings: Any,
) -> go.Figure:
    """Idle and dead experts of every run over a trailing window, one panel per layer.

    Idle (solid): less than a tenth of the uniform share over the window, dead ones included. Dead (dotted): none at
    all. The experts of a layer are drawn as its bound.
    """
    place = _run_colours(series, colours)
    curves, lines = [], []
    for s in sorted(series, key=lambda s: s.layer):
        summed_SE = rolling_window_load(s.load_SE, window)
        for kind, counted, style in (("idle", idle_experts, "line"), ("dead", dead_experts, "dot")):
            values_S = _values(counted(summed_SE))
            curves.append(
                Curve(
                    name=f"{s.run}, {kind}",
                    steps_S=s.steps_S,
                    values_S=values_S,
                    null_S=np.isnan(values_S),
                    group=s.run,
                    colour=place[s.run],
                    panel=f"layer {s.label}",
                    style=style,
                    restarts=s.restarts,
                    at_S=s.at_S,
                )
            )
        line = ReferenceLine(value=float(s.num_experts), label=f"all {s.num_experts} experts", panel=f"layer {s.label}")
        if line not in lines:
            lines.append(line)
    note = (
        f"Solid: idle, below a tenth of the uniform share over the last {window} recorded steps. "
        "Dotted: dead, not used at all in them."
    )
    return metric_curves(
        curves, title=title, y_title="experts", theme=theme, lines=lines, note=note, y_floor=0.0, **settings
    )


def _values(values: Any) -> NDArray[np.float64]:
    return np.atleast_1d(np.asarray(values, dtype=np.float64))


def pooled_shares(series: LoadSeries, max_columns: int) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Shares in per cent with steps pooled by summing their loads (shares of a column then still add up to 100).

    Returns the columns' middle steps (C,), shares (C, E) with NaN where there is no data, and records per column.
    A column of NaN stands in every hole, where steps were not recorded.
    """
    columns = step_columns(series.steps_S, max_columns)
    load_SE = np.nan_to_num(series.load_SE.astype(np.float64))
    shares = np.full((len(columns.start_C), series.num_experts), np.nan)
    middle = (columns.edges[:-1] + columns.edges[1:]) / 2
    filled = ~columns.hole_C
    if filled.any():
        start = columns.start_C[filled]
        last = columns.stop_C[filled] - 1
        middle[filled] = (series.steps_S[start] + series.steps_S[last]) / 2
        summed = np.add.reduceat(load_SE, start, axis=0)
        total = summed.sum(axis=1, keepdims=True)
        shares[filled] = 100 * summed / np.where(total > 0, total, np.nan)
    return middle, shares, columns.per_column


def share_area(
    series: LoadSeries,
    *,
    title: str,
    theme: Theme = "light",
    kind: str = "area",
    height: int = 340,
    named: int = len(OKABE_ITO),
    wrap_at: int = 88,
    x_title: str = STEP,
) -> go.Figure:
    """Each expert's share of the assignments over steps, in per cent. x_title: as in `metric_curves`.

    kind: "area" stacks the experts in order, expert 0 at the foot; the dotted lines lie where the bands meet at the
    uniform share. "lines" draws one line each and the uniform share. The `named` busiest experts of the whole run
    have colours and a legend, the others are grey; beyond MAX_BANDS experts the grey ones are one band.
    """
    if kind not in ("area", "lines"):
        raise ValueError(f"kind must be 'area' or 'lines', got {kind!r}")
    p = palette(theme)
    experts = series.num_experts
    drawn = min(experts, MAX_BANDS)
    steps, shares_CE, pooled = pooled_shares(
        series, int(np.clip(MAX_SHARE_POINTS // max(drawn, 1), 50, MAX_SHARE_COLUMNS))
    )
    total_E = np.nan_to_num(series.load_SE.astype(np.float64)).sum(axis=0)
    uniform = 100 / experts if experts else 0.0
    all_share = 100 * total_E / total_E.sum() if total_E.sum() > 0 else np.zeros(experts)
    busiest = sorted(range(experts), key=lambda e: (-total_E[e], e))[: min(named, len(OKABE_ITO))]
    busiest = [e for e in busiest if all_share[e] >= uniform / 2]  # no colour for experts that are hardly used
    colour_of = {expert: categorical_colour(rank, theme=theme, fill=True) for rank, expert in enumerate(busiest)}

    middle = steps if series.at_S is None else np.interp(steps, series.steps_S, series.at_S)
    traces: list[Trace] = []
    grey = {"fill": mix(p.block, p.ground, 0.75), "edge": p.ground}

    def draw(y_C: NDArray[np.float64], of: str, uniform: float, **settings: Any) -> None:
        """One expert's band or line: a trace for each stretch without a hole, as stacks would bridge it."""
        stretches = [slice(None)] if kind == "lines" else _stretches(y_C)
        for place, stretch in enumerate(stretches):
            traces.append(
                scatter(
                    x=middle[stretch],
                    y=y_C[stretch],
                    customdata=None if series.at_S is None else steps[stretch],
                    mode="lines",
                    stackgroup=("experts" if place == 0 else f"experts {place}") if kind == "area" else None,
                    legendgroup=of,
                    hovertemplate=_share_hover(of, uniform, None if series.at_S is None else x_title),
                    **settings | ({"showlegend": False} if place else {}),
                )
            )

    singles = [e for e in range(experts) if experts <= MAX_BANDS or e in colour_of]
    for expert in singles:
        colour = colour_of.get(expert)
        line: dict[str, Any] = (
            {"width": 0.6, "color": grey["edge"]}
            if kind == "area"
            else {"width": 2.2 if colour else 1, "color": colour or p.block}
        )
        draw(
            shares_CE[:, expert],
            f"expert {expert}",
            uniform,
            fillcolor=(colour or grey["fill"]) if kind == "area" else None,
            line=line,
            name=f"expert {expert} · {all_share[expert]:.0f}%",
            showlegend=colour is not None,
            legendrank=busiest.index(expert) if colour else 1000,
        )
    if len(singles) < experts:
        rest = [e for e in range(experts) if e not in colour_of]
        rest_C = shares_CE[:, rest].sum(axis=1) if kind == "area" else shares_CE[:, rest].mean(axis=1)
        name = f"the other {len(rest)} experts" + ("" if kind == "area" else ", mean")
        draw(
            rest_C,
            name,
            uniform * (len(rest) if kind == "area" else 1),
            fillcolor=grey["fill"] if kind == "area" else None,
            line={"width": 0.6 if kind == "area" else 2, "color": grey["edge"] if kind == "area" else p.block},
            name=name,
            showlegend=True,
        )
    fig = Sheet(*traces)
    notes = [_uniform_lines(fig, series.num_experts, kind, uniform, len(busiest), theme)]
    if pooled > 1:
        notes.append(f"Each point sums {pooled} recorded steps.")
    for restart in series.restarts:
        at = restart_position(series.steps_S, series.at_S, restart)
        fig.add_vline(x=at, line={"color": p.text, "width": 1, "dash": "dot"})
    figure_layout(
        fig,
        title=title,
        theme=theme,
        note=" ".join(notes),
        height=height,
        x_title=x_title,
        y_title="share of assignments (%)",
        wrap_at=wrap_at,
    )
    top = 100.0 if kind == "area" else max(float(np.nanmax(shares_CE, initial=0.0)), 2 * uniform) * 1.06
    fig.update_yaxes(range=[0, top], ticksuffix="%", showgrid=False)
    if len(middle):
        fig.update_xaxes(
            range=[float(middle[0]), float(middle[-1])] if len(middle) > 1 else [middle[0] - 1, middle[0] + 1],
            showgrid=False,
        )
    fig.update_layout(hovermode="closest", legend={"traceorder": "normal"}, uirevision=x_title)
    return fig.figure()


def _stretches(y_C: NDArray[np.float64]) -> list[slice]:
    """The stretches of consecutive columns with data; one empty stretch where there is none."""
    known = np.concatenate([[False], np.isfinite(y_C), [False]])
    ends = np.flatnonzero(known[1:] != known[:-1])
    return [slice(int(start), int(stop)) for start, stop in ends.reshape(-1, 2)] or [slice(0, 0)]


def _share_hover(name: str, uniform: float, x_title: str | None) -> str:
    where = "step %{x:,.6~g}" if x_title is None else f"step %{{customdata:,.6~g}}<br>{x_title}: %{{x:,.5~g}}"
    return f"<b>{name}</b><br>{where}<br>%{{y:.2f}}% of assignments<br>uniform share {uniform:.3g}%<extra></extra>"


def _uniform_lines(fig: Sheet, experts: int, kind: str, uniform: float, coloured: int, theme: Theme) -> str:
    """Draw the uniform share; returns the sentence that explains it."""
    p = palette(theme)
    share = f"{uniform:.3g}%"
    if kind == "lines":
        fig.add_hline(y=uniform, line={"color": p.text, "width": 1.5, "dash": "dash"})
        fig.add_annotation(
            text=f"uniform share {share}",
            x=1,
            xref="x domain",
            y=uniform,
            xanchor="right",
            yanchor="bottom",
            showarrow=False,
            font={"size": 12, "color": p.text},
        )
        return f"Dashed: the uniform share, {share} for each expert."
    dotted: dict[str, Any] = {"line": {"color": p.text, "width": 1, "dash": "dot"}, "opacity": 0.55}
    if experts > MAX_BANDS:
        fig.add_hline(y=coloured * uniform, **dotted)
        return f"Dotted: where the coloured experts would end at the uniform share, {share} each."
    every = -(-experts // 16)
    for expert in range(every, experts, every):
        fig.add_hline(y=expert * uniform, **dotted)
    if every == 1:
        return f"Dotted: where the bands would meet at the uniform share, {share} each."
    return f"Dotted: where every {every} bands would end at the uniform share, {share} each."
