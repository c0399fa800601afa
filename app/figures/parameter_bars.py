"""Parameters of each layer, total and active, beside a dense feed-forward layer of the same width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from app.figures.labels import next_step
from app.figures.model_map import is_moe, key_of, label_of
from app.figures.sheet import Sheet, Trace, bar
from app.figures.theme import Theme, figure_layout, palette

#: Of total parameters and of those active for a token, in every picture of them.
ACCENTS: Mapping[Theme, tuple[str, str]] = {"light": ("#2f7f69", "#8fcbb6"), "dark": ("#3fa588", "#a9e0cd")}


def parameter_bars(
    layers: Sequence[Mapping[str, Any]],
    dense_parameters: Sequence[int] | Mapping[int, int],
    *,
    title: str,
    theme: Theme = "light",
    height: int = 320,
    wrap_at: int = 88,
) -> go.Figure:
    """Total and active parameters of each layer's feed-forward part beside a dense one of the same width.

    layers: as in `model_map`, parameters_total and parameters_active given. dense_parameters: parameters of the dense
    feed-forward layer to compare with, one per layer in order, or by layer index. The labels say how many times the
    parameters of that dense layer, and how many times the active ones.
    """
    p = palette(theme)
    if isinstance(dense_parameters, Mapping):
        dense = [float(dense_parameters[key_of(layer)]) for layer in layers]
    else:
        dense = [float(v) for v in dense_parameters]
    if len(dense) != len(layers):
        raise ValueError(f"{len(dense)} dense sizes for {len(layers)} layers")
    labels = [str(label_of(layer)) for layer in layers]
    total = [float(layer["parameters_total"]) for layer in layers]
    active = [float(layer["parameters_active"]) for layer in layers]
    labelled = len(layers) <= 10

    def bars(name: str, values: list[float], colour: str, factors: bool) -> Trace:
        times = [v / d if d > 0 else float("nan") for v, d in zip(values, dense, strict=True)]
        return bar(
            x=labels,
            y=values,
            name=name,
            marker={"color": colour, "line": {"color": p.block_line, "width": 1 if labelled else 0}},
            text=[f"{t:.2f}x" if is_moe(layer) else "" for t, layer in zip(times, layers, strict=True)]
            if factors and labelled
            else None,
            textposition="outside",
            textfont={"size": 12, "color": p.text},
            cliponaxis=False,
            customdata=times,
            hovertemplate=f"<b>layer %{{x}}</b><br>{name}: %{{y:,.0f}} parameters"
            "<br>%{customdata:.3f} x the dense layer<extra></extra>",
        )

    accents = ACCENTS[theme]
    fig = Sheet(
        bars("dense of the same width", dense, p.block, factors=False),
        bars("active for a token", active, accents[1], factors=True),
        bars("total", total, accents[0], factors=True),
    )
    figure_layout(
        fig,
        title=title,
        theme=theme,
        note="Feed-forward part only: router, experts and shared experts. "
        + (
            "Labels: times the dense layer." if labelled else "Point at a bar for how many times the dense layer it is."
        ),
        height=height,
        x_title="layer",
        y_title="parameters",
        wrap_at=wrap_at,
    )
    fig.update_xaxes(
        type="category",
        categoryorder="array",
        categoryarray=labels,
        tickvals=labels[:: next_step(len(labels) / 40)],
        ticktext=[label if labelled else label.partition(" (")[0] for label in labels][:: next_step(len(labels) / 40)],
        showgrid=False,
    )
    fig.update_yaxes(rangemode="tozero", range=[0, max([*total, *dense, 1.0]) * 1.12], exponentformat="B")
    fig.update_layout(barmode="group", bargap=0.25, bargroupgap=0.05)
    return fig.figure()
