"""Compare: loss and balance over the steps, in one chart, in one chart a run, or grouped by a setting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import streamlit as st

from app import (
    charts,
    comparison_curves,
    comparison_settings,
    comparison_tables,
    comparison_words,
    state,
    words,
    x_axis,
)
from app.comparison import WINDOW, Compared, Window, layer_label
from app.comparison_curves import Axis, Values
from app.comparison_metrics import Measured
from app.figures.curves import metric_curves
from app.figures.inputs import Curve, ReferenceLine
from app.text import plain
from moe_core import metrics

SMOOTHINGS = (0.0, 0.8, 0.95)
TOGETHER, EACH = "together", "run"
MAX_TOGETHER = 6  # more curves than these in one chart cannot be told apart
PANELS_PER_ROW = 4
_POINTS = 10_000  # of all curves of a chart


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How the runs' curves are laid out.

    panels   the heading of the small chart that each run belongs to, by its label; {} where all share one chart
    grouped  the runs by their value of the setting they are grouped by; {} where they are not
    """

    axis: Axis
    smoothing: float
    panels: Mapping[str, str]
    grouped: Mapping[str, Sequence[Compared]]

    @property
    def headings(self) -> list[str]:
        """The panels in the order they stand."""
        return list(dict.fromkeys(self.panels.values())) or [""]


def show(compared: Sequence[Compared], found: Sequence[Measured], layer: int, window: Window) -> None:
    """The controls, then cross-entropy, max_violation and idle experts; for groups, their table."""
    st.subheader("Over the steps", anchor=False)
    arrangement = _arrange(compared)
    if arrangement.grouped:
        _groups(compared, found, layer, window, arrangement)
    _losses(compared, found, layer, window, arrangement)
    if arrangement.panels:
        _violation(compared, found, layer, window, arrangement)
        _idle(compared, found, layer, window, arrangement)
        return
    left, right = st.columns(2)
    with left:
        _violation(compared, found, layer, window, arrangement)
    with right:
        _idle(compared, found, layer, window, arrangement)


# ---------------------------------------------------------------------------------------------------- controls


def _arrange(compared: Sequence[Compared]) -> Arrangement:
    fields = comparison_settings.group_fields(compared, state.wanted("group"))
    group_, smoothing_, x_ = st.columns(3)
    with group_:
        by = state.pick_option(
            "group",
            "Charts",
            [TOGETHER, EACH, *fields],
            default=TOGETHER if len(compared) <= MAX_TOGETHER else EACH,
            format_func=lambda name: {TOGETHER: "all runs in one", EACH: "one a run"}.get(name, f"grouped by {name}"),
            help="One chart a run, or one for all runs that agree in a setting: all on the same axes.",
            as_list=True,
        )
    with smoothing_:
        smoothing = state.pick_option(
            "smoothing",
            "Smoothing of losses",
            SMOOTHINGS,
            default=0.8,
            format_func=lambda weight: f"{weight:g}" if weight else "none",
            help="Weight of the past in an exponential average that starts at the first value itself. The values lie "
            "faintly behind.",
        )
    with x_:
        names = comparison_curves.axes_offered(compared)
        axis = comparison_curves.axis_of(compared, x_axis.pick(names))
    grouped: Mapping[str, Sequence[Compared]] = {}
    panels: dict[str, str] = {}
    if by in fields:
        grouped = comparison_settings.groups(compared, by)
        for name, members in grouped.items():
            panels |= {one.label: f"{by} {name} ({words.count(len(members), 'run')})" for one in members}
        said = (
            "A grey band reaches from the lowest to the highest run of a group, its mean is the line in the colour of "
            "the text; a group of one run has neither. Every run keeps its own colour."
            if axis.is_steps
            else "Every run keeps its own colour. A group's mean is over steps: choose them as the x axis to see it."
        )
    elif by == EACH:
        panels = {one.label: one.label for one in compared}
        said = "One chart a run, all on the same axes. Look for the one that is unlike the others."
    else:
        said = "Every run in full, each in its own colour. Look for where one leaves the others, and at what loss."
    st.caption(f"{said} {plain(axis.note)}")
    return Arrangement(axis=axis, smoothing=smoothing, panels=panels, grouped=grouped)


def _groups(
    compared: Sequence[Compared],
    found: Sequence[Measured],
    layer: int,
    window: Window,
    arrangement: Arrangement,
) -> None:
    unlike = comparison_settings.within_groups(arrangement.grouped)
    alone = [name for name, members in arrangement.grouped.items() if len(members) == 1]
    said = [f"Runs of one group differ in {words.listed(unlike)}: the spread is of that." if unlike else ""]
    if unlike == ["seed"]:
        said = ["Runs of one group differ in their seed alone: the spread is that of seeds."]
    elif not unlike and len(alone) < len(arrangement.grouped):
        said = ["Runs of one group differ in no recorded setting: the spread is that of repetition."]
    if alone:
        which = "has" if len(alone) == 1 else "have"
        said.append(f"{words.listed(alone)} {which} one run, so no spread: nothing is called better than it or worse.")
    st.caption(
        plain(" ".join(filter(None, said)))
        + f" Mean, spread (standard deviation, n - 1) and range are of the runs' values over the {window.short}, layer "
        f"{layer_label(compared, layer)}; the verdict is Welch's t test at 95% against the best mean."
    )
    frame = comparison_tables.group_table(arrangement.grouped, compared, found, layer, window)
    charts.table(frame, key="compare_groups", columns={"metric": st.column_config.Column(pinned=True)})


# ------------------------------------------------------------------------------------------------------- charts


def _losses(
    compared: Sequence[Compared], found: Sequence[Measured], layer: int, window: Window, arrangement: Arrangement
) -> None:
    values = comparison_curves.losses(compared)
    without = [one.label for one in compared if one.label not in {its.one.label for its in values}]
    if without:
        st.caption(f"No cross-entropy was recorded in {plain(words.listed(without))}.")
    if not values:
        return
    smoothing = arrangement.smoothing
    trails = f"{smoothing / (1 - smoothing):.0f}"
    _draw(
        comparison_curves.curves(values, arrangement.axis, arrangement.panels),
        arrangement,
        ranges=values,
        title=_title("Cross-entropy", "ce_loss", compared, found, layer, window, arrangement, digits=4),
        key="compare_loss",
        alt="Cross-entropy of each run by step",
        numbers=lambda: comparison_curves.numbers(arrangement.axis, {"ce_loss": values}),
        y_title="nats per token",
        smoothing=smoothing,
        note=f"The thick line is an average of past steps: while the loss falls it trails by about {trails} steps."
        if smoothing
        else None,
    )


def _violation(
    compared: Sequence[Compared], found: Sequence[Measured], layer: int, window: Window, arrangement: Arrangement
) -> None:
    label = layer_label(compared, layer)
    each = comparison_curves.of_loads(compared, layer, metrics.max_violation, 1)
    summed = comparison_curves.of_loads(compared, layer, metrics.max_violation)
    drawn = comparison_curves.curves(each, arrangement.axis, arrangement.panels, style="thin", what=", each step")
    style = "line" if arrangement.panels else "thick"
    drawn += comparison_curves.curves(
        summed, arrangement.axis, arrangement.panels, style=style, what=f", window of {WINDOW}"
    )
    _draw(
        drawn,
        arrangement,
        ranges=summed,
        title=_title(
            f"max_violation of layer {label}", "max_violation_window", compared, found, layer, window, arrangement
        ),
        key="compare_violation",
        alt=f"max_violation of layer {label} by step",
        numbers=lambda: comparison_curves.numbers(
            arrangement.axis, {"max_violation": each, f"max_violation, window of {WINDOW}": summed}, label
        ),
        lines=comparison_curves.bounds(compared, layer, arrangement.panels),
        y_title="max_violation",
        log_y=True,
        note=f"Thin: each step. Thick: loads of the last {WINDOW} recorded steps summed. 0 is balanced; "
        "dashed: the most possible, E/k - 1.",
    )


def _idle(
    compared: Sequence[Compared], found: Sequence[Measured], layer: int, window: Window, arrangement: Arrangement
) -> None:
    label = layer_label(compared, layer)
    idle = comparison_curves.of_loads(compared, layer, metrics.idle_experts)
    dead = comparison_curves.of_loads(compared, layer, metrics.dead_experts)
    drawn = comparison_curves.curves(idle, arrangement.axis, arrangement.panels, what=", idle")
    drawn += comparison_curves.curves(dead, arrangement.axis, arrangement.panels, style="dot", what=", dead")
    _draw(
        drawn,
        arrangement,
        ranges=idle,
        title=_title(f"Idle experts of layer {label}", "idle_experts", compared, found, layer, window, arrangement),
        key="compare_idle",
        alt=f"Idle and dead experts of layer {label} by step",
        numbers=lambda: comparison_curves.numbers(arrangement.axis, {"idle": idle, "dead": dead}, label),
        y_title="experts",
        y_floor=0.0,
        note=f"Solid: idle, below a tenth of the uniform share over the last {WINDOW} recorded steps. "
        "Dotted: dead, not used at all in them.",
    )


def _title(
    name: str,
    key: str,
    compared: Sequence[Compared],
    found: Sequence[Measured],
    layer: int,
    window: Window,
    arrangement: Arrangement,
    digits: int = 3,
) -> str:
    if arrangement.grouped:
        by_label = {one.label: its for one, its in zip(compared, found, strict=True)}
        said = comparison_words.of_groups(key, arrangement.grouped, by_label, layer)
    else:
        said = comparison_words.standing(key, compared, found, layer, window, digits)
    return f"{name}, {window.short}: {said}"


def _draw(
    drawn: Sequence[Curve],
    arrangement: Arrangement,
    *,
    ranges: Sequence[Values],
    title: str,
    key: str,
    alt: str,
    numbers: Any,
    lines: Sequence[ReferenceLine] = (),
    smoothing: float = 0.0,
    **settings: Any,
) -> None:
    """One chart, or small ones on shared axes; the title is its alternative text's end."""
    headings = [name for name in arrangement.headings if any(curve.panel == name for curve in drawn)]
    in_order = sorted(drawn, key=lambda curve: headings.index(curve.panel))
    few = len(headings) <= 2
    traces = len(drawn) * (2 if smoothing else 1)
    per_row = 2 if few or len(headings) == 4 else min(PANELS_PER_ROW, len(headings))
    together = arrangement.grouped and arrangement.axis.is_steps
    figure = metric_curves(
        in_order,
        title=title,
        theme=charts.theme(),
        lines=lines,
        ranges=comparison_curves.ranges(ranges, arrangement.panels, smoothing) if together else (),
        smoothing=smoothing,
        max_points=max(_POINTS // max(traces, 1), 100),
        panels_per_row=per_row,
        panel_height=260 if few else 150,
        x_title=arrangement.axis.title,
        wrap_at=88 if arrangement.panels or key == "compare_loss" else 42,
        **settings,
    )
    charts.show(figure, key=key, alt=f"{alt}. {title}.", numbers=numbers)
