"""Load and bias per expert at one step of a replay: the axes belong to the run, only the bars move.

Shape legend: E experts.
"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from app.figures.labels import category_ticks, number
from app.figures.pooling import expert_groups, group_labels
from app.figures.sheet import Sheet, Trace, bar, scatter
from app.figures.theme import LOAD_FLOOR, Theme, figure_layout, load_coloraxis, load_colours, palette
from moe_core.metrics import load_ratio

MAX_BARS = 256  # beyond, a bar would be thinner than a pixel
MAX_MARKED = 128
_FLOOR = np.log2(LOAD_FLOOR) - 0.5  # an idle bar reaches a little below 1/16, the edge of the scale
_TICKS = ((1 / 16, "1/16"), (1 / 8, "1/8"), (1 / 4, "1/4"), (1 / 2, "1/2"), (1, "1"))


def load_bars(
    load_E: NDArray,
    *,
    top_k: int,
    title: str,
    theme: Theme = "light",
    previous_load_E: NDArray | None = None,
    previous_step: int | None = None,
    gate_mass_E: NDArray | None = None,
    bias_E: NDArray | None = None,
    previous_bias_E: NDArray | None = None,
    bias_range: tuple[float, float] | None = None,
    highlight: int | None = None,
    colorbar: bool = True,
    wrap_at: int = 88,
) -> go.Figure:
    """Bars of load / uniform share from the uniform line up or down, with the selection bias below.

    load_E: assignments per expert at this step, (E,); all zero or NaN where there is no data.
    top_k: experts per token; the axis reaches from below 1/16 to the bound E / k, so it never moves.
    previous_load_E, previous_bias_E: values of the step before, drawn as ghost marks. previous_step names it in hover.
    gate_mass_E: sum of gate weights per expert, drawn as its share beside the bar (diamond).
    bias_E: selection bias used in this step. bias_range: its smallest and largest value over the whole run; given, the
    lower panel is there at every step, bias or not. highlight: expert with a frame.
    """
    load_E = np.asarray(load_E, dtype=np.float64)
    experts = len(load_E)
    if load_E.ndim != 1 or experts == 0:
        raise ValueError(f"load_E must be (experts,), got shape {load_E.shape}")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must lie in 1..{experts}, got {top_k}")
    p = palette(theme)
    first_R = expert_groups(experts, MAX_BARS)
    labels = group_labels(first_R, experts)
    with_bias = bias_range is not None or bias_E is not None
    heights = [250, 120] if with_bias else [250]
    gap = 34
    plot_height = sum(heights) + gap * (len(heights) - 1)
    fig = Sheet(
        rows=len(heights),
        cols=1,
        shared_xaxes="columns",
        row_heights=heights,
        vertical_spacing=gap / plot_height if with_bias else 0.0,
    )
    ratio_E = _ratio(load_E)
    before_E = None if previous_load_E is None else _fitting(previous_load_E, experts, "previous_load_E")
    mass_E = None if gate_mass_E is None else _ratio(_fitting(gate_mass_E, experts, "gate_mass_E"))
    bound = experts / top_k

    hover = _load_hovers(load_E, ratio_E, before_E, mass_E, previous_step)
    chosen_R = _strongest(np.nan_to_num(ratio_E, nan=-1.0), first_R)
    edges = [p.text if highlight is not None and e == highlight else p.block_line for e in chosen_R]
    widths = [3 if highlight is not None and e == highlight else 1 for e in chosen_R]
    fig.add_trace(
        bar(
            x=labels,
            y=_place(ratio_E[chosen_R]),
            marker={
                "color": load_colours(ratio_E[chosen_R], theme=theme),
                "line": {"color": edges, "width": widths if experts <= MAX_MARKED else 0},
            },
            customdata=chosen_R,
            hovertext=_group_hovers(hover, chosen_R, labels),
            hovertemplate="%{hovertext}<extra></extra>",
            name="load",
            showlegend=False,
        )
    )
    if before_E is not None and experts <= MAX_MARKED:
        for ghost in _ghosts(labels, _place(_ratio(before_E)), "load at the previous step", theme):
            fig.add_trace(ghost)
    if mass_E is not None and experts <= MAX_MARKED:
        fig.add_trace(
            scatter(
                x=labels,
                y=_place(mass_E),
                mode="markers",
                marker={
                    "symbol": "diamond",
                    "size": float(np.clip(300 / experts, 4, 9)),
                    "color": p.ground,
                    "line": {"color": p.text, "width": 1.5},
                },
                name="share of gate weight",
                hoverinfo="skip",
            )
        )
    fig.add_hline(y=0, line={"color": p.text, "width": 1.5}, row=1, col=1)
    fig.add_hline(y=np.log2(bound), line={"color": p.muted, "width": 1.5, "dash": "dash"}, row=1, col=1)
    fig.add_annotation(
        text=f"bound E/k = {number(bound)}x: every token",
        x=1,
        xref="x domain",
        xanchor="right",
        y=np.log2(bound),
        yanchor="bottom",
        showarrow=False,
        font={"size": 12, "color": p.text},
        row=1,
        col=1,
    )
    if with_bias:
        _bias_panel(fig, bias_E, previous_bias_E, bias_range, first_R, experts, theme)
    figure_layout(
        fig,
        title=title,
        theme=theme,
        note=_note(experts, len(labels)),
        height=plot_height + 56,
        legend=experts <= MAX_MARKED and (before_E is not None or mass_E is not None),
        right=150 if colorbar else 24,
        wrap_at=wrap_at,
    )
    tick_values, tick_texts = _ticks(bound)
    fig.update_yaxes(
        range=[_FLOOR, np.log2(bound) + 0.6],
        tickvals=tick_values,
        ticktext=tick_texts,
        title={"text": "load / uniform share"},
        row=1,
    )
    ticks = category_ticks(labels, 32 if experts <= 32 else 16)
    fig.update_xaxes(
        type="category",
        categoryorder="array",
        categoryarray=labels,
        range=[-0.6, len(labels) - 0.4],
        tickvals=ticks,
        ticktext=[label.split("-")[0] for label in ticks],
        tickangle=0,
        showgrid=False,
    )
    fig.update_xaxes(title={"text": "expert"}, row=len(heights))
    fig.update_layout(bargap=0.25 if experts <= 64 else 0.05, hovermode="closest")
    if colorbar:
        fig.update_layout(coloraxis=load_coloraxis(theme, bound=bound, length=min(plot_height + 30, 330)))
        # Bars carry colours of their own (idle is no point on a continuous scale): this trace brings the bar.
        fig.add_trace(
            scatter(
                x=[None],
                y=[None],
                mode="markers",
                marker={"color": [0.0], "coloraxis": "coloraxis"},
                showlegend=False,
                hoverinfo="skip",
                name="scale",
            )
        )
    return fig.figure()


def _fitting(values: NDArray, experts: int, name: str) -> NDArray[np.float64]:
    values = np.asarray(values, dtype=np.float64)
    if values.shape != (experts,):
        raise ValueError(f"{name} must be ({experts},), got shape {values.shape}")
    return values


def _ratio(values_E: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(load_ratio(values_E), dtype=np.float64).reshape(values_E.shape)


def _place(ratio_E: NDArray[np.float64]) -> NDArray[np.float64]:
    """Height on the axis: log2, and the foot of the axis for what is idle."""
    with np.errstate(divide="ignore"):
        return np.where(ratio_E < LOAD_FLOOR, _FLOOR, np.log2(ratio_E))


def _note(experts: int, bars: int) -> str | None:
    if bars < experts:
        per_bar = -(-experts // MAX_BARS)
        return f"Each bar shows the busiest of {per_bar} neighbouring experts; purple only where all are below 1/16."
    return None


def _strongest(values_E: NDArray[np.float64], first_R: NDArray[np.int64]) -> NDArray[np.int64]:
    """The expert with the largest value in each group, (R,)."""
    stops = [*first_R[1:].tolist(), len(values_E)]
    groups = zip(first_R.tolist(), stops, strict=True)
    return np.array([first + int(np.argmax(values_E[first:stop])) for first, stop in groups], dtype=np.int64)


def _load_hovers(
    load_E: NDArray[np.float64],
    ratio_E: NDArray[np.float64],
    before_E: NDArray[np.float64] | None,
    mass_E: NDArray[np.float64] | None,
    previous_step: int | None,
) -> list[str]:
    experts = len(load_E)
    when = "previous step" if previous_step is None else f"step {previous_step:,}"
    before_ratio_E = np.full(experts, np.nan) if before_E is None else _ratio(before_E)
    hover = []
    for e in range(experts):
        if np.isnan(ratio_E[e]):
            hover.append(f"<b>expert {e}</b><br>no data at this step")
            continue
        lines = [
            f"<b>expert {e}</b>",
            f"{load_E[e]:,.0f} assignments, {100 * ratio_E[e] / experts:.2f}%",
            f"{ratio_E[e]:.3f} x the uniform share",
        ]
        if mass_E is not None and np.isfinite(mass_E[e]):
            lines.append(f"gate weight {100 * mass_E[e] / experts:.2f}%, {mass_E[e]:.3f} x")
        if before_E is not None and np.isfinite(before_ratio_E[e]):
            share, earlier = 100 * ratio_E[e] / experts, 100 * before_ratio_E[e] / experts
            lines.append(f"{when}: {before_E[e]:,.0f} assignments, {earlier:.2f}% ({share - earlier:+.2f} points)")
        hover.append("<br>".join(lines))
    return hover


def _group_hovers(hover_E: list[str], chosen_R: NDArray[np.int64], labels: list[str]) -> list[str]:
    """Hover of each bar: of its expert, or of the one that stands for its group."""
    texts = []
    for expert, label in zip(chosen_R.tolist(), labels, strict=True):
        group = "" if label == str(expert) else f"experts {label}, of them<br>"
        texts.append(group + hover_E[expert])
    return texts


def _ghosts(labels: list[str], y: NDArray[np.float64], name: str, theme: Theme) -> list[Trace]:
    """Marks of the previous step: a dash with a rim, so that it shows on pale and on strong bars alike."""
    p = palette(theme)
    size = float(np.clip(420 / len(labels), 4, 22))
    rim, dash = (
        {"symbol": "line-ew", "size": size + 2 * extra, "line": {"color": colour, "width": 2.5 + 2 * extra}}
        for extra, colour in ((1, p.ground), (0, p.text))
    )
    common = {"x": labels, "y": y, "mode": "markers", "hoverinfo": "skip", "name": name}
    return [scatter(marker=rim, showlegend=False, **common), scatter(marker=dash, **common)]


def _ticks(bound: float) -> tuple[list[float], list[str]]:
    values, texts = [_FLOOR], ["< 1/16"]
    for ratio, text in _TICKS[1:]:  # "1/16" would stand on top of it
        values.append(float(np.log2(ratio)))
        texts.append(text)
    ratio = 2.0
    while ratio <= bound:
        values.append(float(np.log2(ratio)))
        texts.append(f"{number(ratio)}x")
        ratio *= 2
    return values, texts


def _bias_panel(
    fig: Sheet,
    bias_E: NDArray | None,
    previous_bias_E: NDArray | None,
    bias_range: tuple[float, float] | None,
    first_R: NDArray[np.int64],
    experts: int,
    theme: Theme,
) -> None:
    p = palette(theme)
    labels = group_labels(first_R, experts)
    bias = np.full(experts, np.nan) if bias_E is None else _fitting(bias_E, experts, "bias_E")
    before = None if previous_bias_E is None else _fitting(previous_bias_E, experts, "previous_bias_E")
    if bias_range is None:
        known = bias[np.isfinite(bias)]
        bias_range = (float(known.min(initial=0.0)), float(known.max(initial=0.0)))
    low, high = min(bias_range[0], 0.0), max(bias_range[1], 0.0)
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ValueError(f"bias_range must be finite, got {bias_range}")
    air = 0.08 * (high - low) or 1.0
    hover = []
    for e in range(experts):
        text = f"<b>expert {e}</b><br>bias {bias[e]:+.5g}"
        if before is not None:
            text += f"<br>previous step {before[e]:+.5g} (change {bias[e] - before[e]:+.3g})"
        hover.append(text)
    chosen_R = _strongest(np.nan_to_num(np.abs(bias), nan=-1.0), first_R)
    fig.add_trace(
        bar(
            x=labels,
            y=bias[chosen_R],
            marker={"color": p.block, "line": {"color": p.block_line, "width": 1 if experts <= MAX_MARKED else 0}},
            hovertext=_group_hovers(hover, chosen_R, labels),
            hovertemplate="%{hovertext}<extra></extra>",
            name="bias",
            showlegend=False,
        ),
        row=2,
        col=1,
    )
    if before is not None and experts <= MAX_MARKED:
        for ghost in _ghosts(labels, before, "bias at the previous step", theme):
            fig.add_trace(ghost | {"showlegend": False}, row=2, col=1)
    if bias_E is None:
        fig.add_annotation(
            text="no bias at this step",
            x=0.5,
            y=0.8,
            xref="x domain",
            yref="y domain",
            showarrow=False,
            font={"size": 13, "color": p.text},
            row=2,
            col=1,
        )
    fig.add_hline(y=0, line={"color": p.text, "width": 1.5}, row=2, col=1)
    fig.update_yaxes(range=[low - air, high + air], title={"text": "bias"}, nticks=5, row=2)
