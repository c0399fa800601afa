"""Tokens by experts: what selection ranked, with the chosen cells framed and the next best marked.

Shapes: T tokens, E experts, R ranked choices (the chosen K, and the next best where there is one).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from app.figures.labels import number
from app.figures.matrices import category_axes
from app.figures.sheet import Sheet, Trace, heatmap, scatter
from app.figures.theme import SHARE_SCALE, Theme, figure_layout, palette

MOST_ROWS = 32
_MOST_LARGE = 256  # cells; more are too small for a number and a frame, and get a dot
_FRAME = {"light": "#D55E00", "dark": "#F0762B"}


def choice_matrix(
    values_TE: NDArray[np.float32],
    order_TR: NDArray[np.int64],
    *,
    num_chosen: int,
    value_name: str,
    title: str,
    dropped_TE: NDArray[np.bool_] | None = None,
    theme: Theme = "light",
    wrap_at: int = 88,
) -> go.Figure:
    """A cell for each token and expert, darker (on a dark ground lighter) for a higher value.

    values_TE: NaN = the row has no route, -inf = the expert is out for this token. order_TR: experts best first, -1 =
    none; of these num_chosen are chosen (a solid frame), one more is the next best (a dotted one); with many cells the
    chosen get a dot. dropped_TE: chosen, but over capacity (a cross). Of more than MOST_ROWS tokens the first are
    drawn, and the note says so.
    """
    p = palette(theme)
    T, E = values_TE.shape
    shown = min(T, MOST_ROWS)
    finite_TE = np.where(np.isfinite(values_TE[:shown]), values_TE[:shown], np.nan).astype(np.float64)
    tokens, experts = [str(token) for token in range(shown)], [str(expert) for expert in range(E)]
    place_TE = _places(order_TR[:shown], E)
    said = np.array([[_said(values_TE[t, e], place_TE[t, e], num_chosen) for e in range(E)] for t in range(shown)])
    low, high = (np.nanmin(finite_TE), np.nanmax(finite_TE)) if np.isfinite(finite_TE).any() else (0.0, 1.0)
    fig = Sheet(
        heatmap(
            x=experts,
            y=tokens,
            z=finite_TE,
            zmin=float(low),
            zmax=float(high if high > low else low + 1),
            customdata=said,
            colorscale=SHARE_SCALE[theme],
            hoverongaps=True,
            xgap=2 if E <= 16 else 1,
            ygap=2 if E <= 16 else 1,
            hovertemplate=f"token %{{y}}, expert %{{x}}<br>{value_name} %{{customdata}}<extra></extra>",
            showscale=False,
        )
    )
    large = shown * E <= _MOST_LARGE
    rows, columns = np.nonzero(place_TE >= 0)
    chosen_N = place_TE[rows, columns] < num_chosen
    if large:
        fig.add_trace(_texts(values_TE[:shown], (finite_TE - low) / max(high - low, 1e-9), theme))
        cells = zip(rows.tolist(), columns.tolist(), chosen_N.tolist(), strict=True)
        fig.update_layout(shapes=[_frame(*cell, theme) for cell in cells])
    else:
        fig.add_trace(_dots(rows[chosen_N], columns[chosen_N], theme))
    if dropped_TE is not None and dropped_TE[:shown].any():
        rows, columns = np.nonzero(dropped_TE[:shown])
        fig.add_trace(
            scatter(
                x=[experts[column] for column in columns],
                y=[tokens[row] for row in rows],
                mode="markers",
                marker={"symbol": "x-thin", "size": 20 if large else 7, "line": {"color": _FRAME[theme], "width": 2}},
                hoverinfo="skip",
                name="dropped",
                showlegend=False,
            )
        )
    figure_layout(
        fig,
        title=title,
        theme=theme,
        note=_note(T, shown, large, bool((place_TE >= num_chosen).any()), dropped_TE),
        height=int(np.clip(shown * 34, 120, 640)) + 56,
        legend=False,
        x_title="expert",
        y_title="token",
        wrap_at=wrap_at,
    )
    fig.update_layout(plot_bgcolor=p.no_data)
    category_axes(fig, experts, tokens, most_columns=16, most_rows=32)
    return fig.figure()


def _texts(values_TE: NDArray[np.float32], share_TE: NDArray[np.float64], theme: Theme) -> Trace:
    """The numbers in the cells, each in the ink that its ground calls for: plotly's own choice is too pale on green."""
    T, E = values_TE.shape
    pale = share_TE < 0.4 if theme == "light" else share_TE > 0.45
    ink_TE = np.where(pale, "#1f2328", "#ffffff")
    ink_TE[np.isnan(share_TE)] = palette(theme).text
    return scatter(
        x=np.tile([str(expert) for expert in range(E)], T).tolist(),
        y=np.repeat([str(token) for token in range(T)], E).tolist(),
        text=[_cell(float(value)) for value in values_TE.ravel()],
        mode="text",
        textfont={"size": 13 if E <= 10 else 10, "color": ink_TE.ravel().tolist()},
        hoverinfo="skip",
        showlegend=False,
        name="numbers",
    )


def _places(order_TR: NDArray[np.int64], num_experts: int) -> NDArray[np.int64]:
    """Each expert's place in its token's order, 0 = first; -1 where it has none."""
    place_TE = np.full((len(order_TR), num_experts), -1, dtype=np.int64)
    for place, ids_T in enumerate(order_TR.T):
        rows = np.flatnonzero(ids_T >= 0)
        place_TE[rows, ids_T[rows]] = place
    return place_TE


def _cell(value: float) -> str:
    return "" if np.isnan(value) else "out" if np.isneginf(value) else f"{value:.3f}"


def _said(value: float, place: int, num_chosen: int) -> str:
    if np.isnan(value):
        return "none: the row has no route"
    if np.isneginf(value):
        return "none: out for this token"
    rank = "" if place < 0 else f", choice {place + 1}" if place < num_chosen else ", the next best"
    return f"{number(float(value))}{rank}"


def _frame(token: int, expert: int, chosen: bool, theme: Theme) -> dict[str, Any]:
    line = {"color": _FRAME[theme], "width": 3 if chosen else 2, "dash": "solid" if chosen else "dot"}
    inset = 0.46
    ends = {"x0": expert - inset, "x1": expert + inset, "y0": token - inset, "y1": token + inset}
    return {"type": "rect", "line": line, "fillcolor": "rgba(0,0,0,0)", **ends}


def _dots(rows_N: NDArray[np.int64], columns_N: NDArray[np.int64], theme: Theme) -> Trace:
    return scatter(
        x=[str(column) for column in columns_N],
        y=[str(row) for row in rows_N],
        mode="markers",
        marker={"size": 5, "color": _FRAME[theme]},
        hoverinfo="skip",
        showlegend=False,
        name="chosen",
    )


def _note(T: int, shown: int, large: bool, with_next: bool, dropped_TE: NDArray[np.bool_] | None) -> str:
    parts = ["Framed: chosen." if large else "A dot: chosen."]
    if large and with_next:
        parts.append("Dotted: the next best, whose value is the threshold.")
    if dropped_TE is not None and dropped_TE[:shown].any():
        parts.append("Crossed: dropped, the expert is full.")
    if shown < T:
        parts.append(f"The first {shown} of {T:,} tokens.")
    return " ".join(parts)
