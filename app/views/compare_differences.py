"""Compare: each run minus one of them, at the steps they share."""

from collections.abc import Sequence
from typing import Any

import streamlit as st

from app import charts, comparison_curves, comparison_metrics, state
from app.comparison import WINDOW, Compared, Window, layer_label
from app.comparison_curves import Values
from app.comparison_metrics import BY_KEY, Measured, Metric
from app.figures.curves import metric_curves
from app.figures.inputs import ReferenceLine
from app.text import plain
from app.words import value
from moe_core import metrics

_POINTS = 10_000  # of all curves of a chart
_SMOOTHING = 0.8
_SAID = 3  # differences in a title; of more, the lowest and the highest


def show(compared: Sequence[Compared], found: Sequence[Measured], layer: int, window: Window) -> None:
    """Which run to subtract, then the differences in cross-entropy and in balance where they are defined."""
    if not window.shared:
        return
    st.subheader("Differences at shared steps", anchor=False)
    labels = {one.reference: one.label for one in compared}
    chosen = state.pick_option(
        "against",
        "Each run minus",
        list(labels),
        format_func=lambda reference: labels[reference],
        help="The run that is subtracted from every other one, at the steps that the two recorded.",
        as_list=True,
    )
    baseline = next(one for one in compared if one.reference == chosen)
    st.caption(
        f"Above the dashed line at 0: more than {plain(baseline.label)} at the same step. Look for a curve that stays "
        "on one side; one that keeps crossing the line shows no difference."
    )
    others = [one for one in compared if one is not baseline]
    left, right = st.columns(2)
    with left:
        _draw(
            "ce_loss",
            "Cross-entropy",
            comparison_curves.losses(compared),
            *(baseline, others, compared, found, layer, window),
            y_title="nats per token",
            smoothing=_SMOOTHING,
        )
    with right:
        _draw(
            "max_violation_window",
            f"max_violation of layer {layer_label(compared, layer)}",
            comparison_curves.of_loads(compared, layer, metrics.max_violation),
            *(baseline, others, compared, found, layer, window),
            y_title=f"max_violation, window of {WINDOW}",
            smoothing=0.0,
        )


def _draw(
    key: str,
    name: str,
    values: Sequence[Values],
    baseline: Compared,
    others: Sequence[Compared],
    compared: Sequence[Compared],
    found: Sequence[Measured],
    layer: int,
    window: Window,
    **settings: Any,
) -> None:
    metric = BY_KEY[key]
    against = [baseline, *others]
    why_not = {one.label: comparison_metrics.not_comparable(metric, [baseline, one], layer, window) for one in others}
    drawn = [one for one in comparison_curves.differences(values, baseline) if why_not.get(one.one.label, "") is None]
    if not drawn:
        reasons = ", ".join(dict.fromkeys(reason for reason in why_not.values() if reason)) or "not recorded"
        st.caption(f"{name}: no difference is defined ({plain(reasons)}).")
        return
    left_out = [one.label for one in others if why_not[one.label] is not None]
    by_label = {one.label: its for one, its in zip(compared, found, strict=True)}
    said = _said(metric, baseline, [one.one for one in drawn], by_label, layer, window)
    smoothed = 2 if settings["smoothing"] else 1
    figure = metric_curves(
        comparison_curves.curves(drawn, comparison_curves.OVER_STEPS, {}, what=f" minus {baseline.label}"),
        title=f"{name} minus that of {baseline.label}, {window.short}: {said}",
        theme=charts.theme(),
        lines=[ReferenceLine(value=0.0, label="")],
        max_points=max(_POINTS // (len(drawn) * smoothed), 100),
        wrap_at=42,
        **settings,
    )
    charts.show(
        figure,
        key=f"compare_difference_{key}",
        alt=f"{name} of each run minus that of {baseline.label} by step, over the {window.short}: {said}.",
        numbers=lambda: comparison_curves.numbers(
            comparison_curves.OVER_STEPS, {f"{key} minus that of {baseline.label}": drawn}
        ),
    )
    if left_out:
        st.caption(f"Not comparable with {plain(against[0].label)}: {plain(', '.join(left_out))}.")


def _said(
    metric: Metric,
    baseline: Compared,
    others: Sequence[Compared],
    found: dict[str, Measured],
    layer: int,
    window: Window,
) -> str:
    """ "+0.0123 (b), no more than noise"; of many the lowest and the highest."""
    reference = found[baseline.label].value(metric, layer)
    parts = []
    for one in others:
        its = found[one.label].value(metric, layer)
        if its is None or reference is None:
            continue
        noise = comparison_metrics.noise(metric, (baseline, layer), (one, layer), window)
        tie = ", no more than noise" if abs(its - reference) <= noise else ""
        parts.append((its - reference, f"{signed(its - reference)} ({one.label}{tie})"))
    parts.sort()
    if len(parts) > _SAID:
        return f"{parts[0][1]} to {parts[-1][1]}"
    return ", ".join(text for _, text in parts) or "-"


def signed(number: float) -> str:
    """ "+0.0123", "-2", "0"."""
    return f"+{value(number)}" if number > 0 else value(number)
