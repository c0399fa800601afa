"""The figures of a report, in both themes, with as many points as fit into its 10 MB whatever the runs hold.

Shape suffixes: S recorded steps, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from app import data, layer_keys
from app.comparison import Compared
from app.export_page import PageFigure
from app.figures.balance_curves import unused_curves, violation_curves
from app.figures.curves import metric_curves
from app.figures.inputs import Curve, LoadSeries
from app.figures.load_heatmap import MAX_COLUMNS, MAX_ROWS, load_heatmap
from app.figures.model_map import MAX_ROWS as MAP_ROWS
from app.figures.model_map import model_map
from app.figures.theme import Theme
from app.words import count, listed, value
from moe_core import metrics
from recorder.reader import Run

# plotly.js takes 4.8 MB of the 10. A cell takes 11 bytes (load_heatmap's own hover would take 43), a point 22.
MAX_CELLS = 150_000
MAX_POINTS = 60_000
MAX_MAP_CELLS = 12_000  # of the maps of all runs; a cell with what it says takes 110
_MIN_COLUMNS = 60
_PANEL_COLUMNS = 900  # of the panels of one row together: more than pixels would show nothing more
_SMOOTHING = 0.8
_WRAP_AT = 92
_LOW_PANELS = 4  # more layers, and their small charts are lower


def load(series: Sequence[LoadSeries], *, title: str, alt: str) -> PageFigure:
    """Load over the uniform share of every expert by step: layers below each other, runs side by side, one scale."""
    max_rows = next((rows for rows in (MAX_ROWS, 64, 32, 16, 8) if _rows(series, rows) * _MIN_COLUMNS <= MAX_CELLS), 4)
    runs = len({one.run for one in series})
    columns = min(MAX_CELLS // _rows(series, max_rows), _PANEL_COLUMNS // runs, MAX_COLUMNS)

    def draw(theme: Theme) -> go.Figure:
        figure = load_heatmap(
            series, title=title, theme=theme, max_rows=max_rows, max_columns=max(columns, 1), wrap_at=_WRAP_AT
        )
        for trace in figure.select_traces(selector={"type": "heatmap"}):
            _lighten(trace)
        return figure

    caption = (
        "Pale is balanced, red overloaded, purple next to unused (below 1/16 of the uniform share). "
        "Every panel has the same scale."
    )
    return _figure(draw, alt=alt, caption=caption)


def _rows(series: Sequence[LoadSeries], max_rows: int) -> int:
    return sum(min(one.num_experts, max_rows) for one in series)


def _lighten(trace: go.Heatmap) -> None:
    """Keep of the numbers under the pointer the load over the uniform share alone."""
    trace.customdata = np.asarray(trace.customdata)[..., 1].astype(np.float32)
    first = str(trace.hovertemplate).partition("<br>")[0]
    trace.hovertemplate = (
        f"{first}<br>expert %{{y}}, about step %{{x:,.0f}}<br>%{{customdata:.3f}} x the uniform share<extra></extra>"
    )


def losses(runs: Sequence[Compared], *, over: str, ends: Sequence[Mapping[str, float | None]]) -> PageFigure | None:
    """Cross-entropy by step (the training loss where no run recorded one); of one run the held-out one too.

    over: the steps of the final losses in words. ends: these losses, of each run those of `summarise`. None where
    nothing was recorded.
    """
    column = "ce_loss" if any(data.steps(one.run)["ce_loss"].notna().any() for one in runs) else "loss"
    name = "cross-entropy" if column == "ce_loss" else "loss"
    drawn, said, without = [], [], []
    for one, end in zip(runs, ends, strict=True):
        curve = _loss_curve(one.run, column, one.label if len(runs) > 1 else "training", one.colour)
        if curve is None:
            without.append(one.label)
            continue
        drawn.append(curve)
        number = "not finite" if end[column] is None else value(end[column], 4)
        said.append(f"{one.label} {number}" if len(runs) > 1 else number)
    if not drawn:
        return None
    if len(runs) == 1:
        probe = _loss_curve(runs[0].run, column, "held-out (probe)", runs[0].colour + 1, phase="probe")
        drawn += [] if probe is None else [probe]
    title = f"{name[0].upper()}{name[1:]} over {over}: {', '.join(said)}"

    def draw(theme: Theme) -> go.Figure:
        return metric_curves(
            drawn,
            title=title,
            y_title="nats per token" if column == "ce_loss" else "loss",
            theme=theme,
            smoothing=_SMOOTHING if len(runs) > 1 else 0.0,
            max_points=_points(2 * len(drawn), 4),
            panel_height=300,
        )

    caption = "" if not without else f"No {name} was recorded in {listed(without)}."
    return _figure(draw, alt=f"{title}, by step.", caption=caption)


def _loss_curve(run: Run, column: str, name: str, colour: int, phase: str = data.MAIN) -> Curve | None:
    frame = data.steps(run, phase)
    known = frame[column].notna().to_numpy(dtype=bool)
    if not known.any():
        return None
    return Curve(
        name=name,
        group=name,
        colour=colour,
        steps_S=frame["step"].to_numpy(dtype=np.int64),
        values_S=frame[column].to_numpy(dtype=np.float64, na_value=np.nan),
        null_S=~known,
        restarts=data.restarts(run) if phase == data.MAIN else (),
    )


def balance(series: Sequence[LoadSeries], *, colours: Mapping[str, int], words: str) -> list[PageFigure]:
    """max_violation, and idle and dead experts, by step, a small chart a layer.

    words: of which runs and layers, for those who cannot see them.
    """
    panels = len({one.layer for one in series})
    common: dict[str, Any] = {
        "window": metrics.WINDOW,
        "colours": colours,
        "max_points": _points(4 * len(series), 1),
        "panel_height": 220 if panels <= _LOW_PANELS else 130,
    }
    several = len(colours) > 1
    window = f"over up to {count(metrics.WINDOW, 'step')} that end at each"

    def violation(theme: Theme) -> go.Figure:
        title = f"max_violation: how far the busiest expert is above the uniform share, {window} (thick)"
        low = panels > _LOW_PANELS
        return violation_curves(series, title=title, theme=theme, log_y=several, low=low, **common)

    def unused(theme: Theme) -> go.Figure:
        return unused_curves(series, title=f"Idle and dead experts, {window}", theme=theme, **common)

    return [
        _figure(
            violation,
            alt=f"max_violation by step of {words}.",
            caption="Near 0 is balance; near the dashed bound nearly all tokens go to one expert.",
        ),
        _figure(
            unused,
            alt=f"Idle and dead experts by step of {words}.",
            caption="Zero is good. A line that rises and stays up is a collapse.",
        ),
    ]


def layers(run: Run, *, over: str, maps: int = 1) -> PageFigure | None:
    """The model's map in the load of its last recorded steps; None where the manifest describes no layer.

    over: these steps in words. maps: how many such figures the report has.
    """
    described = layer_keys.layers(run)
    if not described:
        return None
    loads = {}
    for key in layer_keys.keys(run):
        stats = data.layer_stats(run, key)
        if stats.steps_S.size:
            loads[key] = metrics.window_load(stats.load_SE, metrics.WINDOW)
    busiest = max(
        ((float(np.nanmax(ratio_E)), key) for key, ratio_E in _ratios(loads).items() if np.isfinite(ratio_E).any()),
        default=None,
    )
    title = f"Layers and experts; no token was routed in {over}"
    if busiest is not None:
        most, key = busiest
        expert = int(np.nanargmax(_ratios(loads)[key]))
        title = (
            f"Expert {expert} of layer {layer_keys.label(run, key)} is the busiest: "
            f"{value(most)} x the uniform share, over {over}"
        )
    model = run.manifest.get("model") or {}

    max_rows = int(np.clip(MAX_MAP_CELLS // (maps * len(described)), 4, MAP_ROWS))

    def draw(theme: Theme) -> go.Figure:
        return model_map(
            described,
            title=title,
            theme=theme,
            load_by_layer=loads,
            d_model=model.get("d_model"),
            max_rows=max_rows,
            wrap_at=_WRAP_AT,
        )

    return _figure(
        draw,
        alt=f"The layers of {run.name} and the load of their experts. {title}.",
        caption="Layers from left to right: a dense one is a plain block, a MoE layer a column of its experts.",
    )


def _ratios(loads: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    return {key: np.asarray(metrics.load_ratio(load_E), dtype=np.float64) for key, load_E in loads.items()}


def _points(curves: int, share: int) -> int:
    """Points of each of so many curves that may have a `share`-th of all points."""
    return int(np.clip(MAX_POINTS // (share * max(curves, 1)), 20, 2000))


def _figure(draw: Callable[[Theme], go.Figure], *, alt: str, caption: str) -> PageFigure:
    return PageFigure(light=draw("light"), dark=draw("dark"), alt=alt, caption=caption)
