"""Replay: how one layer's experts were loaded at one step, and what changed since the step recorded before it.

Shape: E experts.
"""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import streamlit as st
from numpy.typing import NDArray

from app import charts, data, layer_keys, moving, player, state, token_strip
from app.figures.inputs import LoadSeries
from app.figures.load_heatmap import load_heatmap
from app.figures.model_map import model_map
from app.figures.pooling import expert_groups
from app.figures.sheet import with_layout
from app.layer_stats import LayerStats
from app.moments import Moment, moment
from app.views import empty, replay_bars
from app.words import NONE, percent, value
from moe_core import metrics
from recorder.reader import Run
from recorder.schema import PHASES

STRIP_COLUMNS = 200
STRIP_ROWS = 32
STRIP_HEIGHT = 90  # pixels
MAP_CELLS = 1500
_HEADING = 18  # pixels of a panel's heading
MAP_NUMBERS = 6_000_000  # loads held in memory for the map of all layers: steps times experts

_IDLE = f"less than {metrics.IDLE_SHARE:g} of the uniform share"
_TITLE_HELP = (
    f"Of this step's assignments in this layer alone. Idle: {_IDLE} (assignments / experts); "
    "purple begins lower, at 1/16. Busiest: the largest load over the uniform share. "
    "A single step carries sampling noise; Overview judges windows of steps."
)
_COUNTS_HELP = """All of this step in this layer.

- Tokens: real ones; padding is not counted.
- Assignments: tokens times top-k, before capacity drops any.
- Unused: experts without an assignment; in one step that can be chance.
- Rerouted: assignments that the selection bias changed, over all assignments.
- Dropped: assignments that an expert's capacity dropped.
- Not routed: tokens whose router logits were not finite; in no other count.

A dash: not recorded, or there is no such thing in this run.
"""


def render() -> None:
    """Draw the page."""
    head = st.container()  # the title tells of the step, which is known only further down
    run = empty.require_run()
    if run is None:
        head.title("Replay")
        return
    layers = layer_keys.keys(run)
    wanted = state.wanted("layer")
    layer = next((index for index in layers if str(index) == wanted), layers[0])
    phase = next((name for name in PHASES if data.layer_stats(run, layer, name).steps_S.size), None)
    if phase is None:
        head.title("Replay")
        state.pick_layer(run)
        st.info(
            f"No load of layer {layer_keys.label(run, layer)} is recorded in this run{empty.where_readable(run)}. "
            "Pick another layer, or another run in the sidebar."
        )
        return
    if phase != "train":
        st.caption(f"This run recorded no load while training: the steps shown are of phase {phase}.")
    stats = data.layer_stats(run, layer, phase)
    others = _all_layers(run, layers, stats)
    whole = _strip(data.load_series(run, layer, phase), charts.theme()) if stats.steps_S.size > 1 else None
    player.replay(
        stats.steps_S.tolist(), lambda step: _draw(step, run=run, stats=stats, others=others, whole=whole, head=head)
    )


def _draw(
    step: int,
    *,
    run: Run,
    stats: LayerStats,
    others: dict[int, LayerStats],
    whole: go.Figure | None,
    head: Any,
) -> None:
    theme = charts.theme()
    now = moment(stats, step)
    strip = st.container()
    picture, side = st.columns([4, 1.1], gap="medium")
    with side:
        if state.pick_layer(run) != stats.layer:
            st.rerun()  # steps and loads of the layer are read where the whole page runs
        expert = _pick_expert(stats.num_experts)
        _numbers_of_step(now)
    if whole is not None:
        with strip:
            _where(whole, stats, step, expert)
    head.title(title_of(stats.label, now), help=_TITLE_HELP)
    with picture:
        replay_bars.bars(stats, now, expert, title_of(stats.label, now))
    routed = token_strip.text(run, stats.layer, step, expert)  # close to the bars, to be seen with them
    replay_bars.notes(run, stats, now, expert)
    if routed is not None:
        token_strip.matrix(run, stats.layer, *routed)
    replay_bars.what_changed(stats, now)
    if others:
        _map(run, others, step, (stats.layer, expert), theme)


def _pick_expert(num_experts: int) -> int | None:
    """`state.pick_expert` as a list whatever the number of experts: there is no room here for buttons."""
    chosen = state.pick_option(
        "expert",
        "Highlight",
        ["all", *map(str, range(num_experts))],
        format_func=lambda text: "None" if text == "all" else f"Expert {text}",
        as_list=True,
    )
    return None if chosen == "all" else int(chosen)


def title_of(layer: layer_keys.Label, now: Moment) -> str:
    """The page's answer for this step, computed."""
    where = f"Step {now.step:,}, layer {layer}"
    busiest = float(np.max(metrics.load_ratio(now.load_E)))
    if np.isnan(busiest):
        return f"{where}: {'no tokens' if now.tokens == 0 else 'no load recorded'}"
    idle = int(metrics.idle_experts(now.load_E))
    said = f"{idle} of {len(now.load_E)} experts idle" if idle else "no expert idle"
    return f"{where}: {said}, busiest {busiest:.1f}x"


def _numbers_of_step(now: Moment) -> None:
    experts = len(now.load_E)
    violation = float(metrics.max_violation(now.load_E))
    bound = metrics.max_violation_bound(experts, now.top_k)
    idle, dead = float(metrics.idle_experts(now.load_E)), float(metrics.dead_experts(now.load_E))
    st.metric(
        "Max violation",
        value(violation),
        help="Of this step's load c per expert (batch value): max(c) / mean(c) - 1. 0 is balanced; at most "
        f"experts / top-k - 1 = {value(bound)} here.",
    )
    st.metric(
        "Idle experts",
        NONE if np.isnan(idle) else f"{idle:.0f} of {experts}",
        help=f"Experts with {_IDLE} in this step, those with no assignment included. Purple begins lower, at 1/16.",
    )
    st.metric(
        "Router entropy",
        value(now.router_entropy),
        help="Mean over the step's tokens of H(p) / ln E, p the router's probabilities: 1 is no preference, "
        "0 is certain. It says how decided the router is, not how balanced the load is.",
    )
    rerouted = float(metrics.rerouted_share(now.rerouted, now.assignments))
    dropped = float(now.dropped_E.sum())
    lines = [
        f"Tokens: {value(now.tokens)}",
        f"Assignments: {value(now.assignments)}",
        f"Unused in this step: {value(dead)}",
        f"Rerouted: {percent(rerouted, 1)}",
        f"Dropped: {value(dropped)}" + ("" if np.isnan(dropped) else f" ({_share(dropped, now.assignments)})"),
    ]
    if now.invalid > 0:
        lines.append(f"Not routed: {value(now.invalid)}")
    st.caption("  \n".join(lines), help=_COUNTS_HELP)


def _share(part: float, whole: float) -> str:
    return percent(float(metrics.drop_rate(part, whole)), 1)


# ----------------------------------------------------------------------------------------------- where one is


def _strip(series: LoadSeries, theme: Any) -> go.Figure:
    """The heatmap of the whole run as a thin band; the bars below carry the colour bar."""
    figure = load_heatmap(
        [series],
        title=f"The whole run in layer {series.label}; the line marks the step shown",
        theme=theme,
        max_columns=STRIP_COLUMNS,
        max_rows=STRIP_ROWS,
        panel_height=STRIP_HEIGHT,
        wrap_at=200,
    )
    layout = figure.to_dict()["layout"]
    first, last = layout["xaxis"]["range"]
    # The run's name above the panel is taken out, and its room: the sidebar names the run.
    total = layout["height"]
    small = with_layout(
        figure,
        annotations=[],
        height=total - _HEADING,
        margin={"t": layout["margin"]["t"] - _HEADING},
        title={"y": 1 - (1 - layout["title"]["y"]) * total / (total - _HEADING)},
        xaxis={"dtick": 1 if last - first < 8 else None},
        # "672-699" would reach into the axis title: the first expert of a row will do.
        yaxis={"ticktext": [label.split("-")[0] for label in layout["yaxis"]["tickvals"]]},
    )
    return _without_colour_bar(small)


def _where(whole: go.Figure, stats: LayerStats, step: int, expert: int | None) -> None:
    layout = whole.to_dict()["layout"]
    shapes = [] if expert is None else _row_frame(expert_groups(stats.num_experts, STRIP_ROWS), expert)
    figure = with_layout(whole, shapes=[*layout.get("shapes", []), *shapes])
    first, last = layout["xaxis"]["range"]
    margin = layout["margin"]
    share = (step - first) / (last - first)
    with st.container(key="replay_whole_run"):
        # Not in the figure: that would be drawn anew at every step.
        moving.line_at(
            "replay_whole_run",
            left=f"calc({margin['l']}px + {share:.5f} * (100% - {margin['l'] + margin['r']}px) - 1px)",
            top=margin["t"],
            height=STRIP_HEIGHT,
        )
        charts.show(figure, key="replay_strip", alt=f"Load of every expert of layer {stats.label} over the whole run.")


def _row_frame(first_R: NDArray[np.int64], expert: int) -> list[dict[str, Any]]:
    row = int(np.searchsorted(first_R, expert, side="right")) - 1
    box = {"type": "rect", "xref": "x domain", "x0": 0, "x1": 1, "yref": "y", "y0": row - 0.5, "y1": row + 0.5}
    # Cells are white to purple in both themes: a dark line with a light rim shows on all of them.
    return [
        box | {"line": {"color": colour, "width": width}} for colour, width in ((moving.LIGHT, 4), (moving.DARK, 1.5))
    ]


def _without_colour_bar(figure: go.Figure) -> go.Figure:
    return with_layout(figure, coloraxis={"showscale": False}, margin={"r": 24})


def _all_layers(run: Run, layers: list[int], stats: LayerStats) -> dict[int, LayerStats]:
    """The loads of every layer for the map; none where there is one layer, or they would fill the memory."""
    experts = sum(int(layer.get("num_experts") or 0) for layer in layer_keys.routers(run).values())
    if len(layers) < 2 or experts * stats.steps_S.size > MAP_NUMBERS:
        return {}
    return {index: data.layer_stats(run, index, stats.phase) for index in layers}


def _map(run: Run, others: dict[int, LayerStats], step: int, selected: tuple[int, int | None], theme: Any) -> None:
    loads = {index: stats.load_SE[stats.at(step)] for index, stats in others.items() if step in stats.steps_S}
    rows = max(MAP_CELLS // len(others), 8)
    single = all(stats.num_experts <= rows for stats in others.values())
    st.caption(
        f"All MoE layers at this step; the frame marks what is shown above. "
        f"Click {'an expert' if single else 'a layer'} to look at it there."
    )
    figure = model_map(
        layer_keys.layers(run),
        title=f"Every layer at step {step:,}",
        theme=theme,
        load_by_layer=loads,
        selected=selected,
        clickable=True,
        height=200,
        max_rows=rows,
    )
    clicked = moving.show(
        _without_colour_bar(figure),
        key="replay_map",
        alt=f"Map of the model's layers and experts in load colours of step {step}.",
        selectable=True,
    )
    for point in clicked:
        index, expert = (int(item) for item in point["customdata"][:2])
        if index in others:
            state.choose(layer=index, expert=expert if single and expert >= 0 else None)
            st.rerun()
