"""The model's map: layers from left to right, a MoE layer as a column of expert cells in load colours.

Shape legend: E experts, R rows drawn of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from app.figures.labels import next_step, plain, si
from app.figures.pooling import expert_groups, group_labels, pool_experts
from app.figures.sheet import Sheet, Trace, heatmap, scatter
from app.figures.theme import Theme, figure_layout, ink_on, load_coloraxis, load_colours, load_z, palette, undimmed
from moe_core.metrics import load_ratio

MAX_ROWS = 64
MAX_CLICKABLE_CELLS = 4000
MAX_NUMBERED_CELLS = 300
# Experts without load: the colour of parameters in `parameter_bars`, so that 93 thin columns still tell MoE from dense.
_PLAIN_EXPERT: Mapping[Theme, str] = {"light": "#a9d8c8", "dark": "#2f7f69"}
_FOOT = (-0.16, -0.05)  # where shared experts stand, below the column that fills 0..1


def model_map(
    layers: Sequence[Mapping[str, Any]],
    *,
    title: str,
    theme: Theme = "light",
    load_by_layer: Mapping[int, NDArray] | None = None,
    d_model: int | None = None,
    selected: tuple[int, int | None] | None = None,
    clickable: bool = False,
    height: int = 330,
    max_rows: int = MAX_ROWS,
    wrap_at: int = 88,
    panel: bool = False,
) -> go.Figure:
    """Layers from left to right: dense layers plain blocks, MoE layers columns of experts, shared ones framed below.

    layers: the manifest's `model.layers`, dicts with index, kind ("dense" or "moe"), num_experts, top_k,
    num_shared_experts, latent_size, parameters_total, parameters_active; missing numbers are left out of the labels.
    Where some share an index, also `key` (which stands for the index below; -1 for none) and `label`.
    d_model: the model's width; experts that work in a narrower latent one stand in a column as much narrower.
    load_by_layer: layer index -> (E,) assignments, summed over whatever the picture is about; without it the experts
    have a neutral colour (a layout diagram). A MoE layer that is not in it shows as "no data".
    selected: (layer index, expert or None) to frame. clickable: add invisible points with customdata (layer, expert),
    expert -1 for a dense layer, while there are at most MAX_CLICKABLE_CELLS.
    panel: one of several side by side, half as wide: no numbers in the cells, half the ticks, and no note, so that all
    stand at one height; the page says what a note would.
    Layers with more than `max_rows` experts show the busiest of a few neighbours in each cell, and the note says so.
    """
    p = palette(theme)
    fig = Sheet()
    shapes: list[dict[str, Any]] = []
    pooled = 1
    half = 0.4 if len(layers) <= 40 else 0.47  # half the width of a layer
    cells: list[tuple[float, float, int, int]] = []  # x, y, layer, expert
    numbers: list[tuple[float, float, str, str]] = []
    moe = [layer for layer in layers if is_moe(layer)]
    drawn = sum(len(expert_groups(int(layer["num_experts"]), max_rows)) for layer in moe)
    has_points = clickable and drawn + len(layers) - len(moe) <= MAX_CLICKABLE_CELLS
    numbered = (
        not panel
        and 0 < sum(int(layer["num_experts"]) for layer in moe) <= MAX_NUMBERED_CELLS
        and all(int(layer["num_experts"]) <= 16 for layer in moe)
    )
    for x, layer in enumerate(layers):
        index = key_of(layer)
        if not is_moe(layer):
            shapes.append(_box(x, half, 0, 1, fill=p.block, line=p.block_line))
            cells.append((x, 0.5, index, -1))
            continue
        experts = int(layer["num_experts"])
        first_R = expert_groups(experts, max_rows)
        pooled = max(pooled, -(-experts // len(first_R)))
        edges = np.append(first_R, experts) / experts
        centres = (edges[:-1] + edges[1:]) / 2
        labels = group_labels(first_R, experts)
        inner = half * _latent_share(layer, d_model)
        trace, grounds = _column(layer, (x - inner, x + inner), edges, first_R, load_by_layer, theme)
        trace["ygap"] = 1 if len(first_R) <= 40 else 0
        if has_points:  # the points above the cells tell it
            trace["hoverinfo"] = "skip"
        else:
            hover = _expert_hovers(layer, first_R, load_by_layer)
            trace |= {"text": [[text] for text in hover], "hovertemplate": "%{text}<extra></extra>"}
        fig.add_trace(trace)
        # Behind the cells: shows in the gaps between them, as thin lines that part even white from white.
        shapes.append(_box(x, inner, 0, 1, fill=p.block_line, line=p.block_line))
        if inner < half and len(layers) <= 40:  # frames of more layers would be all one sees
            shapes.append(_box(x, half, 0, 1, fill="rgba(0,0,0,0)", line=p.block_line))
        cells.extend((x, float(y), index, int(e)) for y, e in zip(centres, first_R, strict=True))
        if numbered:
            inks = map(ink_on, grounds)
            numbers.extend((x, float(y), label, ink) for y, label, ink in zip(centres, labels, inks, strict=True))
        shared = int(layer.get("num_shared_experts") or 0)
        for i in range(min(shared, 4)):
            left = x - half + 2 * half * i / min(shared, 4)
            right = left + 2 * half / min(shared, 4)
            shapes.append(
                {"type": "rect", "x0": left, "x1": right, "y0": _FOOT[0], "y1": _FOOT[1], "layer": "between"}
                | {"fillcolor": p.block, "line": {"color": p.text, "width": 2 if len(layers) <= 24 else 1}}
            )
    shared_any = any(int(layer.get("num_shared_experts") or 0) for layer in moe)
    if selected is not None:
        frame = _selected_box(layers, half, selected)
        if frame is not None:
            shapes.append(frame | {"layer": "above", "line": {"color": p.text, "width": 3}})
    silent = {key_of(layer) for layer in moe if load_by_layer is not None and _no_data(layer, load_by_layer)}
    _add_layer_hover(fig, layers, theme, shared_any, silent)
    if numbers:
        fig.add_trace(
            scatter(
                x=[n[0] for n in numbers],
                y=[n[1] for n in numbers],
                text=[n[2] for n in numbers],
                mode="text",
                textfont={"size": 11, "color": [n[3] for n in numbers]},
                **undimmed(p.text),
                hoverinfo="skip",
                showlegend=False,
                name="expert numbers",
            )
        )
    if has_points:
        fig.add_trace(
            scatter(
                x=[c[0] for c in cells],
                y=[c[1] for c in cells],
                customdata=[[c[2], c[3]] for c in cells],
                mode="markers",
                marker={"size": 14, "opacity": 0},
                **undimmed(p.text, opacity=0),
                text=_cell_hovers(layers, cells, load_by_layer, max_rows),
                hovertemplate="%{text}<extra></extra>",
                showlegend=False,
                name="cells",
            )
        )
    figure_layout(
        fig,
        title=title,
        theme=theme,
        note=None if panel else _note(pooled, load_by_layer is not None, shared_any, _latent_words(moe, d_model)),
        height=height + 56,
        legend=False,
        left=24,
        right=150 if load_by_layer is not None else 24,
        x_title="layer",
        wrap_at=wrap_at,
    )
    every = next_step(len(layers) / (16 if panel else 32))
    fig.update_xaxes(
        range=[-0.6, max(len(layers), 1) - 0.4],
        tickvals=list(range(0, len(layers), every)),
        ticktext=[_tick(layer, few=len(layers) <= (4 if panel else 12)) for layer in layers][::every],
        showgrid=False,
        ticks="",
        showline=False,
    )
    fig.update_yaxes(range=[(_FOOT[0] if shared_any else 0) - 0.03, 1.12], visible=False, showgrid=False)
    fig.update_layout(shapes=shapes, hovermode="closest")
    if load_by_layer is not None:
        bounds = {int(layer["num_experts"]) / int(layer["top_k"]) for layer in moe if layer.get("top_k")}
        bound = bounds.pop() if len(bounds) == 1 else None
        fig.update_layout(coloraxis=load_coloraxis(theme, bound=bound, length=min(height + 40, 360)))
    return fig.figure()


def key_of(layer: Mapping[str, Any]) -> int:
    """What a layer is looked up by: its `key`, where layers are told apart by more than their index."""
    return int(layer.get("key", layer["index"]))


def label_of(layer: Mapping[str, Any]) -> int | str:
    """What a layer is called: its `label`, or else its index."""
    return layer.get("label", layer["index"])


def is_moe(layer: Mapping[str, Any]) -> bool:
    return layer.get("kind") == "moe" and int(layer.get("num_experts") or 0) > 0


def _box(x: float, half: float, low: float, high: float, *, fill: str, line: str) -> dict[str, Any]:
    return {
        "type": "rect",
        "x0": x - half,
        "x1": x + half,
        "y0": low,
        "y1": high,
        "fillcolor": fill,
        "line": {"color": line, "width": 1},
        "layer": "between",
    }


def _column(
    layer: Mapping[str, Any],
    sides: tuple[float, float],
    edges: NDArray[np.float64],
    first_R: NDArray[np.int64],
    load_by_layer: Mapping[int, NDArray] | None,
    theme: Theme,
) -> tuple[Trace, list[str]]:
    """One MoE layer as a heatmap of one column, and the colour of each of its cells."""
    p = palette(theme)
    rows = len(first_R)
    settings: dict[str, Any] = {"x": list(sides), "y": edges, "name": f"layer {label_of(layer)}"}
    if load_by_layer is None:
        flat = [[0, _PLAIN_EXPERT[theme]], [1, _PLAIN_EXPERT[theme]]]
        trace = heatmap(z=np.zeros((rows, 1)), colorscale=flat, showscale=False, **settings)
        return trace, [_PLAIN_EXPERT[theme]] * rows
    ratio_E = _ratios(layer, load_by_layer)
    pooled_R = pool_experts(ratio_E, first_R)
    z = load_z(pooled_R)
    if np.isnan(z).all():
        grey = [[0, p.no_data], [1, p.no_data]]
        trace = heatmap(z=np.zeros((rows, 1)), colorscale=grey, showscale=False, **settings)
        return trace, [p.no_data] * rows
    return heatmap(z=z[:, None], coloraxis="coloraxis", **settings), load_colours(pooled_R, theme=theme)


def _ratios(layer: Mapping[str, Any], load_by_layer: Mapping[int, NDArray]) -> NDArray[np.float64]:
    experts = int(layer["num_experts"])
    load = load_by_layer.get(key_of(layer))
    if load is None:
        return np.full(experts, np.nan)
    load = np.asarray(load, dtype=np.float64)
    if load.shape != (experts,):
        raise ValueError(f"layer {label_of(layer)} has {experts} experts, but its load has shape {load.shape}")
    return np.asarray(load_ratio(load), dtype=np.float64).reshape(experts)


def _expert_hovers(
    layer: Mapping[str, Any], first_R: NDArray[np.int64], load_by_layer: Mapping[int, NDArray] | None
) -> list[str]:
    experts = int(layer["num_experts"])
    stops = [*first_R[1:].tolist(), experts]
    ratio_E = None if load_by_layer is None else _ratios(layer, load_by_layer)
    load = None if load_by_layer is None else load_by_layer.get(key_of(layer))
    texts = []
    for first, stop in zip(first_R.tolist(), stops, strict=True):
        single = stop - first == 1
        lines = [
            f"<b>layer {label_of(layer)}, " + (f"expert {first}</b>" if single else f"experts {first}-{stop - 1}</b>")
        ]
        if ratio_E is not None:
            part = ratio_E[first:stop]
            if load is None or np.isnan(part).all():
                lines.append("no data")
            elif single:
                lines.append(f"{part[0]:.3f} x the uniform share, {float(load[first]):,.0f} assignments")
            else:
                best = first + int(np.nanargmax(part))
                lines.append(f"busiest: expert {best}, {ratio_E[best]:.3f} x the uniform share")
                lines.append(f"never used: {int((np.asarray(load[first:stop]) == 0).sum())} of {stop - first}")
        texts.append("<br>".join(lines))
    return texts


def _cell_hovers(
    layers: Sequence[Mapping[str, Any]],
    cells: Sequence[tuple[float, float, int, int]],
    load_by_layer: Mapping[int, NDArray] | None,
    max_rows: int,
) -> list[str]:
    texts: list[str] = []
    for layer in layers:
        if is_moe(layer):
            texts.extend(_expert_hovers(layer, expert_groups(int(layer["num_experts"]), max_rows), load_by_layer))
        else:
            texts.append(layer_summary(layer))
    assert len(texts) == len(cells)
    return texts


def layer_summary(layer: Mapping[str, Any]) -> str:
    """What a layer is, as hover text: kind, experts, top-k, shared experts, latent width, parameters."""
    lines = [f"<b>layer {label_of(layer)}</b>"]
    if is_moe(layer):
        text = f"mixture of {int(layer['num_experts']):,} experts"
        if layer.get("top_k"):
            text += f", top {int(layer['top_k'])}"
        lines.append(text)
        shared = int(layer.get("num_shared_experts") or 0)
        if shared:
            lines.append(f"{shared} shared expert" + ("s" if shared > 1 else ""))
        if layer.get("latent_size"):
            lines.append(f"latent width {int(layer['latent_size']):,}")
        if layer.get("balancer"):
            lines.append(f"balancer: {plain(layer['balancer'])}")
    else:
        lines.append("dense feed-forward layer")
    total, active = layer.get("parameters_total"), layer.get("parameters_active")
    if total is not None:
        lines.append(f"{int(total):,} parameters")
    if active is not None and is_moe(layer):
        lines.append(f"{int(active):,} active for a token")
    return "<br>".join(lines)


def _add_layer_hover(
    fig: Sheet, layers: Sequence[Mapping[str, Any]], theme: Theme, shared: bool, silent: set[int]
) -> None:
    """A handle above each layer (and on dense blocks and shared experts) that tells what the layer is.

    Its customdata is (layer, -1), so that a click on it opens the layer.
    """
    p = palette(theme)
    summaries = [layer_summary(layer) for layer in layers]
    few = len(layers) <= 10  # more headings would run into each other

    def handles(places: Sequence[tuple[int, float]], name: str, size: int, opacity: float, text: list[str]) -> None:
        fig.add_trace(
            scatter(
                x=[x for x, _ in places],
                y=[y for _, y in places],
                mode="markers+text" if few else "markers",
                marker={"symbol": "square", "size": size, "color": p.block_line, "opacity": opacity},
                text=text,
                textfont={"size": 12, "color": p.text},
                textposition="middle center",
                hovertext=[summaries[x] for x, _ in places],
                hovertemplate="%{hovertext}<extra></extra>",
                customdata=[[key_of(layers[x]), -1] for x, _ in places],
                showlegend=False,
                name=name,
                **undimmed(p.text, opacity),
            )
        )

    heads = [_head(layer, no_data=key_of(layer) in silent) if few else "" for layer in layers]
    tops = [(x, 1.05) for x in range(len(layers))]
    handles(tops, "layers", 14 if few else 10, 0 if few else 0.9, heads)
    dense = [x for x, layer in enumerate(layers) if not is_moe(layer)]
    spots = [(x, y) for x in dense for y in (0.1, 0.3, 0.5, 0.7, 0.9)]
    if spots:
        handles(spots, "dense layers", 20, 0, [""] * len(spots))
    if shared:
        feet = [x for x, layer in enumerate(layers) if int(layer.get("num_shared_experts") or 0)]
        counts = [f"{int(layers[x]['num_shared_experts'])} shared" for x in feet]
        handles([(x, sum(_FOOT) / 2) for x in feet], "shared experts", 12, 0, counts)


def _no_data(layer: Mapping[str, Any], load_by_layer: Mapping[int, NDArray]) -> bool:
    return bool(np.isnan(_ratios(layer, load_by_layer)).all())


def _head(layer: Mapping[str, Any], *, no_data: bool) -> str:
    if not is_moe(layer):
        return "dense"
    if no_data:
        return "no data"
    top_k = layer.get("top_k")
    return f"top {int(top_k)} of {int(layer['num_experts'])}" if top_k else f"{int(layer['num_experts'])} experts"


def _tick(layer: Mapping[str, Any], *, few: bool) -> str:
    total, active = layer.get("parameters_total"), layer.get("parameters_active")
    name = str(label_of(layer))
    if not few:
        return name.partition(" (")[0]
    if total is None:
        return name
    text = f"{name}<br>{si(float(total))}"
    return text + (f", {si(float(active))} active" if is_moe(layer) and active is not None else "")


def _selected_box(
    layers: Sequence[Mapping[str, Any]], half: float, selected: tuple[int, int | None]
) -> dict[str, Any] | None:
    index, expert = selected
    for x, layer in enumerate(layers):
        if key_of(layer) == index:
            low, high = 0.0, 1.0
            if expert is not None and is_moe(layer):
                count = int(layer["num_experts"])
                low, high = expert / count, (expert + 1) / count
            return _box(x, half, low, high, fill="rgba(0,0,0,0)", line="rgba(0,0,0,0)")
    return None


def _latent_share(layer: Mapping[str, Any], d_model: int | None) -> float:
    """How wide the experts' column is beside its layer: the latent width over the model's, but wide enough to see."""
    latent = layer.get("latent_size")
    return min(1.0, max(0.3, int(latent) / d_model)) if latent and d_model else 1.0


def _latent_words(moe: Sequence[Mapping[str, Any]], d_model: int | None) -> str:
    narrow = {int(layer["latent_size"]) for layer in moe if _latent_share(layer, d_model) < 1}
    if not narrow:
        return ""
    widths = " or ".join(f"{width:,}" for width in sorted(narrow))
    return f"Narrow columns: experts work in a latent width, {widths} of {d_model:,}."


def _note(pooled: int, with_load: bool, shared: bool, latent: str) -> str | None:
    parts = []
    if pooled > 1 and with_load:
        parts.append(
            f"Each cell shows the busiest of up to {pooled} neighbouring experts; purple only where all are below 1/16."
        )
    elif pooled > 1:
        parts.append(f"Each cell stands for up to {pooled} neighbouring experts.")
    else:
        parts.append("One cell an expert, expert 0 at the foot.")
    if shared:
        parts.append("Framed below: shared experts, which every token uses.")
    if latent:
        parts.append(latent)
    return " ".join(parts)
