"""Compare: the load of every expert, over the steps and at one step, all runs on one scale.

Shape suffixes: S recorded steps, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from app import charts, data, layer_keys, player, words
from app.comparison import WINDOW, Compared, Window, layer_label
from app.comparison_metrics import Measured
from app.figures.inputs import LoadSeries
from app.figures.load_bars import load_bars
from app.figures.load_heatmap import load_heatmap
from app.layer_stats import LayerStats
from app.text import plain
from moe_core import metrics

MAX_LAYERS_TOGETHER = 4  # more layers than these, and the chosen one is drawn alone
RUNS_A_ROW = 4  # more runs than these stand in rows, each row a figure with a title of its own
_BARS_PER_ROW = 3
_TICKS_PER_ROW = 32


# ---------------------------------------------------------------------------------------------- over the steps


def heatmaps(
    compared: Sequence[Compared], layers: Sequence[int], layer: int, found: Sequence[Measured], window: Window
) -> None:
    """Load by expert and step: every layer of a few runs, of many runs or layers the chosen layer alone."""
    st.caption(
        "Pale means balanced, red overloaded, purple next to unused (below 1/16 of the uniform share). Look for purple "
        "rows that stay in one run and not in another: the scale is the same for all. Experts have no identity across "
        "runs: number 3 of one is not number 3 of the other."
    )
    many = len(compared) > RUNS_A_ROW
    shown = [layer] if many or len(layers) > MAX_LAYERS_TOGETHER else list(layers)
    without = [one.label for one in compared if many and layer not in one.layers]
    if without:
        st.caption(f"No MoE layer {layer_label(compared, layer)} in {plain(words.listed(without))}.")
    in_rows = _rows([one for one in compared if one.label not in without])
    series = [[_series(one, key) for one in row for key in one.layers if key in shown] for row in in_rows]
    titles = [_title(row, shown, found, compared, window) for row in in_rows]
    figures = [load_heatmap(its, title=said, theme=charts.theme()) for its, said in zip(series, titles, strict=True)]
    _share_steps(figures)
    names = [layer_label(compared, key) for key in shown]
    which = f"layer {names[0]}" if len(names) == 1 else f"layers {words.listed(names)}"
    for number, (row, figure, its) in enumerate(zip(in_rows, figures, series, strict=True)):
        if len(row) < len(in_rows[0]):
            _keep_widths(figure, figures[0])
        charts.show(
            figure,
            key="compare_heatmap" if number == 0 else f"compare_heatmap_{number}",
            alt=f"Load over the uniform share of each expert by step, {words.listed([one.label for one in row])} side "
            f"by side, {which}.",
            numbers=partial(_load_numbers, its),
        )


def _rows(runs: Sequence[Compared]) -> list[Sequence[Compared]]:
    """Runs in rows of at most RUNS_A_ROW, as even as can be."""
    rows = -(-len(runs) // RUNS_A_ROW)
    across = -(-len(runs) // rows)
    return [runs[start : start + across] for start in range(0, len(runs), across)]


def _share_steps(figures: Sequence[Any]) -> None:
    ends = [figure.layout.xaxis.range for figure in figures]
    whole = [min(start for start, _ in ends), max(stop for _, stop in ends)]
    for figure in figures:
        figure.update_xaxes(range=whole)


def _keep_widths(figure: Any, full: Any) -> None:
    """Panels of a row that is not full stand where those of a full one do."""
    places = [axis.domain for axis in full.select_xaxes()]
    own = list(figure.select_xaxes())
    centres = {round(sum(axis.domain) / 2, 6): sum(place) / 2 for axis, place in zip(own, places, strict=False)}
    for axis, place in zip(own, places, strict=False):
        axis.domain = place
    figure.for_each_annotation(
        lambda note: note.update(x=centres.get(round(note.x, 6), note.x)) if note.xref == "paper" else note
    )


def _series(one: Compared, layer: int) -> LoadSeries:
    return replace(data.load_series(one.run, layer), run=one.label)


def _title(
    row: Sequence[Compared],
    layers: Sequence[int],
    found: Sequence[Measured],
    compared: Sequence[Compared],
    window: Window,
) -> str:
    by_label = {one.label: its for one, its in zip(compared, found, strict=True)}
    busiest = [
        f"{words.value(ratio)}x ({one.label}" + (f", layer {where})" if len(layers) > 1 else ")")
        for one in row
        for ratio, where in _busiest(by_label[one.label], layers)
    ]
    return f"Busiest expert over the {window.short}, in uniform shares: {', '.join(busiest)}"


def _busiest(found: Measured, layers: Sequence[int]) -> list[tuple[float, layer_keys.Label]]:
    """The largest load over the uniform share among these layers, and in which; [] where there is none."""
    known = [e for e in found.layers if e["key"] in layers and e["max_violation_window"] is not None]
    most = max(known, key=lambda entry: (entry["max_violation_window"], entry["key"]), default=None)
    return [] if most is None else [(most["max_violation_window"] + 1, most["label"])]


def _load_numbers(series: Sequence[LoadSeries]) -> pd.DataFrame:
    """A row for each expert of each series: the whole run's assignments, and over the uniform share.

    Every cell of the picture would be more rows than a browser should be sent; they are in `layer_stats`.
    """
    frames = []
    for one in series:
        total_E = np.nan_to_num(one.load_SE).sum(axis=0)
        last_E = metrics.window_load(one.load_SE, WINDOW)
        frames.append(
            pd.DataFrame(
                {
                    "run": one.run,
                    "layer": one.label,
                    "expert": np.arange(one.num_experts),
                    "assignments, all steps": total_E,
                    "load / uniform share, all steps": metrics.load_ratio(total_E),
                    f"assignments, its last {WINDOW} steps": last_E,
                    f"load / uniform share, its last {WINDOW} steps": metrics.load_ratio(last_E),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


# ------------------------------------------------------------------------------------------------- at one step


def at_one_step(compared: Sequence[Compared], layer: int, steps_S: np.ndarray) -> None:
    """Load by expert at the step of the slider, a small chart a run on one axis."""
    st.subheader(f"Load of layer {layer_label(compared, layer)} at one step", anchor=False)
    if not steps_S.size:
        st.info("These runs have no recorded step in common. Their curves below are drawn in full all the same.")
        return
    st.caption(
        "Bars up: more than the uniform share; down: less; purple at the foot: below 1/16 of it. One axis for all runs."
    )
    stats = {one.label: data.layer_stats(one.run, layer) for one in compared if layer in one.layers}

    def draw(step: int) -> None:
        figures = _bars(compared, stats, step)
        for start in range(0, len(compared), _BARS_PER_ROW):
            group = compared[start : start + _BARS_PER_ROW]
            for column, one in zip(st.columns(min(len(compared), _BARS_PER_ROW)), group, strict=False):
                with column:
                    _one_bars(
                        one,
                        layer_label(compared, layer),
                        step,
                        stats.get(one.label),
                        figures.get(one.label),
                        compared.index(one),
                    )
        charts.table_to_open(lambda: _step_numbers(stats, step), key="compare_step_numbers")

    player.replay(steps_S, draw)


def _bars(compared: Sequence[Compared], stats: Mapping[str, LayerStats], step: int) -> dict[str, Any]:
    figures = {
        one.label: load_bars(
            stats[one.label].load_SE[stats[one.label].at(step)],
            top_k=stats[one.label].top_k,
            title="",
            theme=charts.theme(),
            colorbar=False,
        )
        for one in compared
        if one.label in stats
    }
    # The axis of a run reaches to its own bound: all take the one that reaches furthest.
    axis = max((figure.layout.yaxis for figure in figures.values()), key=lambda axis: axis.range[1])
    for figure in figures.values():
        figure.update_yaxes(range=axis.range, tickvals=axis.tickvals, ticktext=axis.ticktext)
        figure.update_layout(margin_r=8)
        ticks = figure.layout.xaxis.tickvals
        every = -(-len(ticks) // (_TICKS_PER_ROW // min(len(compared), _BARS_PER_ROW)))
        figure.update_xaxes(tickvals=ticks[::every], ticktext=figure.layout.xaxis.ticktext[::every])
    return figures


def _one_bars(one: Compared, label: str, step: int, stats: LayerStats | None, figure: Any, number: int) -> None:
    if stats is None or figure is None:
        st.markdown(f"**{plain(one.label)}**")
        st.caption(f"Layer {label} of this run has no experts.")
        return
    load_E = stats.load_SE[stats.at(step)]
    ratio_E = np.asarray(metrics.load_ratio(load_E))
    if np.isnan(ratio_E).all():
        st.markdown(f"**{plain(one.label)}** no tokens at this step")
    else:
        top = int(ratio_E.argmax())
        idle = int((ratio_E < metrics.IDLE_SHARE).sum())
        st.markdown(f"**{plain(one.label)}** expert {top} at {words.value(float(ratio_E[top]))}x")
        st.caption(f"{idle} of {stats.num_experts} below {metrics.IDLE_SHARE}x")
    charts.show(
        figure,
        key=f"compare_bars_{number}",
        alt=f"Load over the uniform share of each expert of {one.label} in layer {label} at step {step}.",
    )


def _step_numbers(stats: Mapping[str, LayerStats], step: int) -> pd.DataFrame:
    frames = []
    for label, one in stats.items():
        load_E = one.load_SE[one.at(step)]
        frames.append(
            pd.DataFrame(
                {
                    "run": label,
                    "step": step,
                    "expert": np.arange(one.num_experts),
                    "assignments": load_E,
                    "load / uniform share": metrics.load_ratio(load_E),
                }
            )
        )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
