"""What this load would cost on R ranks: contiguous against a plan with spare replicas.

Shapes: S recorded steps, E experts, R ranks.
"""

import json
from collections.abc import Sequence

import numpy as np
import pandas as pd
import streamlit as st

from app import charts, data, glossary, layer_keys, placing, state
from app.figures.curves import metric_curves
from app.figures.inputs import Curve, LoadSeries, ReferenceLine
from app.figures.load_heatmap import load_heatmap
from app.placing import CONTIGUOUS, PLANNED, Placed
from app.text import plain
from app.views import empty
from app.words import count, step_word, value
from recorder.reader import Run


def render() -> None:
    """Draw the page."""
    head = st.container()
    run = empty.require_run()
    if run is None:
        head.title("Placement")
        return
    series = {layer: data.load_series(run, layer) for layer in layer_keys.keys(run)}
    series = {layer: one for layer, one in series.items() if one.steps_S.size}
    experts = [one.num_experts for one in series.values()]
    choices = placing.rank_choices(experts)
    if not choices:
        head.title("Placement")
        st.info(
            "Experts can be placed on ranks where every MoE layer has two or more and a recorded load, and some number "
            "of spare replicas gives each rank as many slots in all of them"
            f"{empty.where_readable(run)}. Pick another run in the sidebar."
        )
        return
    with st.container(horizontal=True, gap="large"):
        ranks = state.pick_option(
            "ranks", "Ranks", choices, default=choices[min(1, len(choices) - 1)], help="Devices that share the experts."
        )
        spares = state.pick_option(
            "spares",
            "Spare replicas",
            placing.spare_choices(experts, ranks),
            help="Slots beyond one for each expert of a layer, for copies of busy ones; as many slots on every rank.",
        )
        window = state.pick_window()
        layer = state.pick_layer(run, list(series))
    st.caption(
        f"Spare replicas come in steps of {ranks}, the number of ranks: every rank of a layer has as many slots."
    )
    placed = {index: placing.place(one, ranks, spares, window) for index, one in series.items()}
    one = placed[layer]
    with head:
        _head(run, one, list(placed.values()), ranks, spares)
    _cost(one)
    _loads(one)
    _who_holds_what(run, one, list(placed.values()))


def _head(run: Run, one: Placed, placed: list[Placed], ranks: int, spares: int) -> None:
    st.title(
        placing.headline(one, ranks, spares),
        help=glossary.explain(
            "slowest_rank_cost", "Mean of the steps of the window; communication between ranks is not in it."
        ),
    )
    before, after = (value(placing.balancedness(placed, name)) for name in (CONTIGUOUS, PLANNED))
    said = [
        placing.worst_words(placed),
        "Balancedness (mean / max of the rank loads, mean over layers and steps) is "
        f"{before} contiguous, {after} planned.",
        f"The plan is made for the loads of the last {one.window} recorded {step_word(data.main_phase(run))}s summed, "
        "and judged on each of those steps; further back it shows how long a plan lasts.",
        "Greedy replication and packing, after the published description of DeepSeek's EPLB.",
    ]
    st.caption(f"**{plain(run.name)}**. {' '.join(line for line in said if line)}")


def _cost(one: Placed) -> None:
    st.caption("1 is a perfect split. A planned line that climbs away from the window is a plan that has gone stale.")
    layer, steps_S = one.series.label, one.series.steps_S
    curves = [
        Curve(name=name, group=name, colour=colour, steps_S=steps_S, values_S=cost, null_S=np.isnan(cost))
        for colour, (name, cost) in enumerate((name, one.cost_S(name)) for name in (CONTIGUOUS, PLANNED))
    ]
    figure = metric_curves(
        curves,
        title=f"Layer {layer}: the slowest rank works {value(one.cost(CONTIGUOUS))} times a perfect split, "
        f"{value(one.cost(PLANNED))} times by the plan",
        y_title="slowest rank / perfect split",
        theme=charts.theme(),
        lines=[ReferenceLine(value=1.0, label="perfect split")],
        y_floor=1.0,
    )
    charts.show(
        figure,
        key="placement_cost",
        alt=f"Load of the slowest rank over a perfect split by step, layer {layer}, contiguous and planned.",
        numbers=lambda: pd.DataFrame(
            {"step": steps_S} | {f"slowest rank, {name}": one.cost_S(name) for name in one.by_name}
        ),
    )


def _loads(one: Placed) -> None:
    st.caption("Load of each rank over a perfect split, the colours of all load pictures: pale is even.")
    series = [one.rank_series(name) for name in (CONTIGUOUS, PLANNED)]
    ends = [
        f"{name} {value(float(np.nanmax(np.nan_to_num(part.load_SE[-one.window :]).sum(axis=0))))}"
        for name, part in zip((CONTIGUOUS, PLANNED), series, strict=True)
    ]
    figure = load_heatmap(
        series,
        title=f"Busiest rank of layer {one.series.label} in the window, in assignments: {', '.join(ends)}",
        theme=charts.theme(),
        row_name="rank",
    )
    charts.show(
        figure,
        key="placement_loads",
        alt=f"Load of every rank by step, layer {one.series.label}, contiguous beside planned.",
        numbers=lambda: _rank_loads(series),
    )


def _rank_loads(series: Sequence[LoadSeries]) -> pd.DataFrame:
    frames = []
    for name, part in zip((CONTIGUOUS, PLANNED), series, strict=True):
        frame = pd.DataFrame(part.load_SE, columns=[f"rank {rank}" for rank in range(part.num_experts)])
        frame.insert(0, "placement", name)
        frame.insert(0, "step", part.steps_S)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _who_holds_what(run: Run, one: Placed, placed: list[Placed]) -> None:
    st.subheader(f"Who holds what in layer {one.series.label}", anchor=False)
    copied = np.flatnonzero(one.by_name[PLANNED].replicas > 1).tolist()
    named = f"Experts with copies: {', '.join(map(str, copied))}." if copied else "No expert has a copy."
    st.caption(
        f"{named} Copies of one expert share its load evenly, and never a rank while that can be avoided. Loads here "
        "are those of the window summed; single steps are less even, so that the mean of their slowest ranks is higher."
    )
    charts.table(placing.slots_table(one), key="placement_slots")
    st.subheader("Every MoE layer", anchor=False)
    charts.table(placing.costs_table(placed), key="placement_layers")
    st.download_button(
        f"Save the plan of {count(len(placed), 'layer')} as JSON",
        data=lambda: json.dumps(placing.plan_document(run.run_id, placed), indent=1).encode(),
        file_name=f"{run.run_id}-plan.json",
        mime="application/json",
        key="placement_plan",
        icon=":material/download:",
        on_click="ignore",
    )
