"""Tokens by experts of one sequence: gate weight as intensity.

Shape legend: T tokens, K top-k, E experts.
"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from app.figures.labels import category_ticks, next_step, plain
from app.figures.matrices import colorbar
from app.figures.sheet import Sheet, heatmap, scatter
from app.figures.theme import INTENSITY, MONO_FAMILY, Theme, figure_layout, palette
from app.figures.token_text import TokenRows

# Green, one hue: neither the load's blue and red nor an expert's colour. More weight stands out more from the page.
MAX_EXPERT_ROWS = 64
MAX_MATRIX_TOKENS = 256
MAX_LABELLED = 80  # of about 700 pixels a label turned upright needs nine


def token_matrix(
    rows: TokenRows,
    *,
    num_experts: int,
    title: str,
    theme: Theme = "light",
    weight_limit: float = 1.0,
    max_tokens: int = MAX_MATRIX_TOKENS,
    wrap_at: int = 88,
) -> go.Figure:
    """Gate weights of one sequence: tokens in order along x, experts in order up y, weight from 0 to `weight_limit`.

    rows: tokens of one sequence (T <= max_tokens are drawn, the note says so). num_experts: E of the layer; beyond
    MAX_EXPERT_ROWS only the experts that the sequence uses have a row. An expert that a token did not choose has an
    empty cell, which is another thing than a weight of 0. Assignments dropped by capacity bear a cross.
    Each token is a category of its own ("3 the"), so that equal tokens stay apart and "00" or "1e2" stay text.
    """
    p = palette(theme)
    count = min(len(rows), max_tokens)
    experts_TK = np.asarray(rows.experts_TK)[:count]
    weights_TK = np.asarray(rows.weights_TK, dtype=np.float64)[:count]
    used = sorted({int(e) for e in experts_TK.ravel() if e >= 0})
    if used and used[-1] >= num_experts:
        raise ValueError(f"expert id {used[-1]} is outside 0..{num_experts - 1}")
    shown = list(range(num_experts)) if num_experts <= MAX_EXPERT_ROWS else used
    row_of = {expert: i for i, expert in enumerate(shown)}
    positions = [int(v) for v in np.asarray(rows.position_T)[:count]]
    names = [rows.visible(i) for i in range(count)]
    categories = [f"{position} {plain(name)}" for position, name in zip(positions, names, strict=True)]
    if len(set(categories)) < count:  # positions repeat where several sequences came in: number them instead
        categories = [f"{i}: {c}" for i, c in enumerate(categories)]

    z = np.full((len(shown), count), np.nan)
    hover = np.full((len(shown), count), "", dtype=object)
    crosses: list[tuple[str, str]] = []
    for t in range(count):
        domain = rows.domain(t)
        where = f"<b>{plain(names[t])}</b><br>position {positions[t]}" + (f", {plain(domain)}" if domain else "")
        for k, expert in enumerate(int(e) for e in experts_TK[t]):
            if expert < 0:
                continue
            dropped = not rows.kept(t, k)
            z[row_of[expert], t] = weights_TK[t, k]
            hover[row_of[expert], t] = (
                f"{where}<br>expert {expert}, choice {k + 1} of {experts_TK.shape[1]}<br>weight {weights_TK[t, k]:.4f}"
                + (", dropped by capacity" if dropped else "")
            )
            if dropped:
                crosses.append((categories[t], str(expert)))
    labels = [str(e) for e in shown]
    fig = Sheet(
        heatmap(
            x=categories,
            y=labels,
            z=z,
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            hoverongaps=False,
            zmin=0,
            zmax=weight_limit,
            colorscale=INTENSITY[theme],
            xgap=1 if count <= 160 else 0,
            ygap=1,
            colorbar=colorbar("gate<br>weight", theme),
        )
    )
    if crosses:
        fig.add_trace(
            scatter(
                x=[x for x, _ in crosses],
                y=[y for _, y in crosses],
                mode="markers",
                marker={"symbol": "x-thin", "size": 8, "line": {"color": p.text, "width": 2}},
                hoverinfo="skip",
                showlegend=False,
                name="dropped",
            )
        )
    notes = []
    if count < len(rows):
        notes.append(f"The first {count:,} of {len(rows):,} tokens.")
    if len(shown) < num_experts:
        notes.append(f"Only the {len(shown)} of {num_experts} experts that these tokens use have a row.")
    if np.any(weights_TK[experts_TK >= 0] > weight_limit):
        notes.append(f"Weights above {weight_limit:g} have its colour.")
    if crosses:
        notes.append("A cross: dropped by capacity.")
    figure_layout(
        fig,
        title=title,
        theme=theme,
        note=" ".join(notes) or None,
        height=int(np.clip(len(shown) * 15, 210, 620)) + 110,
        bottom=110,
        legend=False,
        right=90,
        x_title="token, in order",
        y_title="expert",
        wrap_at=wrap_at,
    )
    every = next_step(count / MAX_LABELLED) if count else 1
    fig.update_xaxes(
        type="category",
        categoryorder="array",
        categoryarray=categories,
        range=[-0.5, max(count, 1) - 0.5],
        tickvals=categories[::every],
        ticktext=[plain(_short(name)) for name in names[::every]],
        tickangle=-90,
        tickfont={"family": MONO_FAMILY, "size": 11 if count <= 96 else 8},
        showgrid=False,
        ticks="",
    )
    fig.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=labels,
        range=[-0.5, max(len(shown), 1) - 0.5],
        tickvals=category_ticks(labels, 32),
        showgrid=False,
        ticks="",
    )
    return fig.figure()


def _short(name: str, longest: int = 10) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"
