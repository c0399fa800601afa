"""Two or more runs side by side on one scale: who leaves experts idle, at what loss, and since when.

Shape suffixes: S recorded steps, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from app import charts, comparison, data, diagnosis_panel, folders, layer_keys, pickers, player, state, words
from app.comparison import WINDOW, Compared
from app.figures.balance_curves import unused_curves, violation_curves
from app.figures.curves import metric_curves
from app.figures.inputs import Curve, LoadSeries
from app.figures.load_bars import load_bars
from app.figures.load_heatmap import load_heatmap
from app.layer_stats import LayerStats
from app.text import plain
from app.views import empty
from moe_core import metrics

MAX_RUNS = 6
MAX_FILES = 3  # more that cannot be read are counted, not named
DIAGNOSED = 3  # sentences shown at once of each run
MAX_LAYERS_TOGETHER = 4  # more layers than these, and the chosen one is drawn alone
_SMOOTHING = 0.8
_BARS_PER_ROW = 3
_TICKS_PER_ROW = 32


def render() -> None:
    """Draw the page."""
    title = st.empty()
    title.title("Compare")
    runs = pickers.in_order(data.listed())
    if not runs:
        empty.no_runs()
        return
    if len(runs) == 1:
        _only_one(runs[0])
        return
    runs_, layer_ = st.columns([3, 2])
    with runs_:
        default = comparison.default_pair(runs, pickers.chosen_run())
        if not state.wanted_list("runs"):
            # Named from here on: a link or a reload shows these even after others have been recorded.
            state.choose(runs=default)
        picked = pickers.pick_runs(default=default, max_runs=MAX_RUNS)
    compared = _usable(picked)
    if len(compared) < 2:
        st.info("Pick two runs or more above, each with a recorded load, to compare them.")
        return
    layers = sorted({layer for one in compared for layer in one.layers})
    with layer_:
        common = [layer for layer in layers if all(layer in one.layers for one in compared)]
        layer = state.pick_option(
            "layer",
            "MoE layer",
            layers,
            default=(common or layers)[0],
            format_func=lambda key: _label(compared, key),
            help="Index in the whole model.",
        )

    steps_S = comparison.shared_steps(compared, layer)
    window = comparison.window_of(steps_S)
    summaries = [comparison.summary(one, window) for one in compared]
    title.title(
        plain(comparison.answer(compared, summaries)),
        help=f"Over {window.words}, each run in its worst layer. Idle: less than a tenth of the uniform share of the "
        "loads summed over them. The uniform share is that of one expert if all had the same load.",
    )
    _say_what_went_wrong(compared)
    for one in compared:
        diagnosis_panel.show(one.run, reference=one.reference, label=one.label, most=DIAGNOSED)
    _say_what_differs(compared, layers, steps_S)
    _heatmaps(compared, layers if len(layers) <= MAX_LAYERS_TOGETHER else [layer], summaries, window)
    _at_one_step(compared, layer, steps_S)
    _table(compared, summaries, layer, window)
    _curves(compared, summaries, layer, window)


# --------------------------------------------------------------------------------------------------- which runs


def _only_one(run: data.Listed) -> None:
    st.info(f"There is only one run here, {plain(run.label)}: nothing to compare it with yet.")
    st.markdown("**Record another:** open *Record a run* in the sidebar, or in a terminal, with another balancer:")
    target = folders.recording_folder(data.shown_folders())
    st.code(f"routescope record --balancer quantile --steps 400 --out {target or 'runs'}", "bash")
    st.markdown("**Or show runs from elsewhere beside it:**")
    st.code("routescope app FOLDER FOLDER", "bash")


def _usable(picked: Sequence[tuple[data.Listed, Any]]) -> list[Compared]:
    """Those that hold a load, with their colours; one line names each of the others and says why."""
    places = comparison.colours([one.reference for one, _ in picked], [run.reference for run in data.listed()])
    usable: list[Compared] = []
    left_out: list[str] = []
    for one, run in picked:
        problem = data.loads_problem(run)
        if problem is not None:
            left_out.append(f"{one.label} ({problem})")
        elif data.lists_no_layers(run):
            left_out.append(f"{one.label} (its run.json does not list the layers; routescope summary reads it)")
        elif not run.moe_layers:
            left_out.append(f"{one.label} (no MoE layer)")
        elif not any(data.layer_stats(run, key).steps_S.size for key in layer_keys.keys(run)):
            left_out.append(f"{one.label} ({run.status}, no load recorded{empty.where_readable(run)})")
        else:
            candidate = Compared(label=one.label, reference=one.reference, colour=places[one.reference], run=run)
            other = next((known.label for known in usable if not candidate.agrees(known)), None)
            if other is None:
                usable.append(candidate)
            else:
                left_out.append(f"{one.label} (its layers have other routers than those of {other})")
    if left_out:
        st.warning(f"Left out: {plain(words.listed(left_out))}.")
    return usable


def _label(compared: Sequence[Compared], key: int) -> str:
    """What a layer is called; the runs compared agree on it."""
    return str(next(layer_keys.label(one.run, key) for one in compared if key in one.layers))


def _say_what_went_wrong(compared: Sequence[Compared]) -> None:
    """A line for each run whose balance is not that of a run that learns."""
    for one in compared:
        wrong = data.trouble(one.run, WINDOW).words
        if wrong is not None:
            st.warning(f"**{plain(one.label)}**: {plain(wrong)}.")
        files = [line.partition(": ")[0] for line in data.problems(one.run)]
        if files:
            named = words.listed(files) if len(files) <= MAX_FILES else words.count(len(files), "part file")
            st.warning(f"**{plain(one.label)}**: {plain(named)} cannot be read; the rest is compared.")


def _say_what_differs(compared: Sequence[Compared], layers: Sequence[int], steps_S: np.ndarray) -> None:
    parts = []
    for one in compared:
        status = "" if one.run.status == "finished" else f", {one.run.status}"
        shapes = dict.fromkeys(one.shape(layer) for layer in one.layers)
        experts = words.listed([f"top-{k} of {words.count(e or 0, 'expert')}" for e, k in shapes])
        phase = data.main_phase(one.run)
        parts.append(
            f"**{plain(one.label)}** {experts}, last step {words.value(one.run.last_step)}{status}"
            + ("" if phase == "train" else f", judged by its {words.step_word(phase)}s: it has no training steps")
        )
    text = "; ".join(parts) + "."
    if any(set(one.layers) != set(layers) for one in compared):
        text += " Their MoE layers differ."
    if steps_S.size:
        text += f" They share {words.count(steps_S.size, 'recorded step')}, {steps_S[0]:,} to {steps_S[-1]:,};"
        text += f" the title is about {comparison.window_of(steps_S).words.split(' that all')[0]} of them."
    st.caption(text)


# ----------------------------------------------------------------------------------------------------- pictures


def _series(one: Compared, layer: int) -> LoadSeries:
    return replace(data.load_series(one.run, layer), run=one.label)


def _heatmaps(
    compared: Sequence[Compared],
    layers: Sequence[int],
    summaries: Sequence[Mapping[str, Any]],
    window: comparison.Window,
) -> None:
    st.caption(
        "Pale means balanced, red overloaded, purple next to unused (below 1/16 of the uniform share). Look for purple "
        "rows that stay in one run and not in another: the scale is the same for all."
    )
    series = [_series(one, layer) for one in compared for layer in one.layers if layer in layers]
    names = [_label(compared, layer) for layer in layers]
    which = f"layer {names[0]}" if len(layers) == 1 else f"layers {words.listed(names)}"
    busiest = [
        f"{one.label} {words.value(ratio)}x" + (f" (layer {where})" if len(layers) > 1 else "")
        for one, found in zip(compared, summaries, strict=True)
        for ratio, where in _busiest(found, layers)
    ]
    charts.show(
        load_heatmap(
            series,
            title=f"Busiest expert over the {window.short}, in uniform shares: {', '.join(busiest)}",
            theme=charts.theme(),
        ),
        key="compare_heatmap",
        alt=f"Load over the uniform share of each expert by step, {words.listed([one.label for one in compared])} side "
        f"by side, {which}.",
        numbers=_load_numbers(series),
    )


def _busiest(found: Mapping[str, Any], layers: Sequence[int]) -> list[tuple[float, layer_keys.Label]]:
    """The largest load over the uniform share among these layers, and in which; [] where there is none."""
    known = [e for e in found["layers"] if e["key"] in layers and e["max_violation_window"] is not None]
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


def _at_one_step(compared: Sequence[Compared], layer: int, steps_S: np.ndarray) -> None:
    st.subheader(f"Load of layer {_label(compared, layer)} at one step", anchor=False)
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
                        _label(compared, layer),
                        step,
                        stats.get(one.label),
                        figures.get(one.label),
                        compared.index(one),
                    )
        with st.expander("Numbers", icon=":material/table:"):
            charts.table(_step_numbers(stats, step), key="compare_step_numbers")

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
        figure.update_yaxes(range=axis.range, tickvals=axis.tickvals, ticktext=axis.ticktext, row=1, col=1)
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


# ------------------------------------------------------------------------------------------------------ numbers


def _table(
    compared: Sequence[Compared], summaries: Sequence[Mapping[str, Any]], layer: int, window: comparison.Window
) -> None:
    st.subheader(
        f"Metrics of layer {_label(compared, layer)}",
        anchor=False,
        help="Better is marked only where the runs can be compared: at steps they share; the loss where text and "
        "tokens and active parameters are the same and the difference is above two standard errors of the steps' "
        "differences; balance where experts and top-k are the same. Router entropy and aux loss have no "
        "better side. One run of each: how much another seed would change is not known.",
    )
    st.caption(
        f"Over {window.words}. Aux losses are computed from load and mean_prob for every run, whether it was trained "
        "on one or not, so that uniform reads 1."
    )
    charts.table(comparison.table(compared, summaries, layer, window), key="compare_metrics")
    if max(len(one.layers) for one in compared) > 1:
        with st.expander("Every layer", icon=":material/table:"):
            charts.table(comparison.every_layer(compared, summaries), key="compare_layers")


def _curves(
    compared: Sequence[Compared], summaries: Sequence[Mapping[str, Any]], layer: int, window: comparison.Window
) -> None:
    st.subheader("Over the steps", anchor=False)
    st.caption("Every run in full, each in its own colour. Look for where one leaves the others, and at what loss.")
    _losses(compared, summaries, window)
    with_layer = [(one, found) for one, found in zip(compared, summaries, strict=True) if layer in one.layers]
    series = [_series(one, layer) for one, _ in with_layer]
    label = _label(compared, layer)
    common: dict[str, Any] = {
        "theme": charts.theme(),
        "window": WINDOW,
        "colours": {one.label: one.colour for one in compared},
        "wrap_at": 42,
    }
    left, right = st.columns(2)
    with left:
        violation = _values(with_layer, layer, "max_violation_window")
        charts.show(
            violation_curves(series, title=f"max_violation, {window.short}: {violation}", log_y=True, **common),
            key="compare_violation",
            alt=f"max_violation of layer {label} by step; over the {window.short}: {violation}.",
            numbers=_curve_numbers(series, "max_violation"),
        )
    with right:
        idle = _values(with_layer, layer, "idle_experts")
        charts.show(
            unused_curves(series, title=f"Idle experts, {window.short}: {idle}", **common),
            key="compare_idle",
            alt=f"Idle and dead experts of layer {label} by step; idle over the {window.short}: {idle}.",
            numbers=_curve_numbers(series, "idle"),
        )


def _losses(compared: Sequence[Compared], summaries: Sequence[Mapping[str, Any]], window: comparison.Window) -> None:
    curves, frames, without = [], [], []
    for one in compared:
        frame = data.steps(one.run)
        if frame["ce_loss"].isna().all():
            without.append(one.label)
            continue
        steps_S = frame["step"].to_numpy(np.int64)
        values_S = frame["ce_loss"].to_numpy(np.float64, na_value=np.nan)
        curves.append(
            Curve(
                name=one.label,
                group=one.label,
                colour=one.colour,
                steps_S=steps_S,
                values_S=values_S,
                null_S=frame["ce_loss"].isna().to_numpy(bool),
                restarts=data.restarts(one.run),
            )
        )
        frames.append(pd.DataFrame({"run": one.label, "step": steps_S, "ce_loss": values_S}))
    if without:
        st.caption(f"No cross-entropy was recorded in {plain(words.listed(without))}.")
    if not curves:
        return
    ends = ", ".join(
        f"{one.label} {words.value(found['losses']['ce_loss'], 4)}"
        for one, found in zip(compared, summaries, strict=True)
    )
    charts.show(
        metric_curves(
            curves,
            title=f"Cross-entropy, {window.short}: {ends}",
            y_title="nats per token",
            theme=charts.theme(),
            smoothing=_SMOOTHING,
            note="The thick line is an average of past steps: while the loss falls it trails by about 4 steps.",
        ),
        key="compare_loss",
        alt=f"Cross-entropy of each run by step; mean over the {window.short}: {ends}.",
        numbers=pd.concat(frames, ignore_index=True),
    )


def _values(runs: Sequence[tuple[Compared, Mapping[str, Any]]], layer: int, key: str) -> str:
    return ", ".join(f"{one.label} {words.value(comparison.of_layer(found, layer).get(key))}" for one, found in runs)


def _curve_numbers(series: Sequence[LoadSeries], kind: str) -> pd.DataFrame:
    frames = []
    for one in series:
        summed_SE = metrics.rolling_window_load(one.load_SE, WINDOW)
        columns: dict[str, Any] = {"run": one.run, "layer": one.label, "step": one.steps_S}
        if kind == "idle":
            columns |= {"idle": metrics.idle_experts(summed_SE), "dead": metrics.dead_experts(summed_SE)}
        else:
            columns |= {
                "max_violation": metrics.max_violation(one.load_SE),
                f"max_violation, window of {WINDOW}": metrics.max_violation(summed_SE),
            }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)
