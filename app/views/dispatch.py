"""Dispatch: which dispatcher is fastest on this machine for a chosen shape, whether all agree, and what they hold.

The measurement is `routescope bench dispatch` in a process of its own (`app.measurement`): torch is never loaded
here, and no thread of this server takes part.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from app import charts, state, watch
from app import dispatch_settings as settings
from app.figures.load_bars import load_bars
from app.figures.reference_bars import ReferenceBar, reference_bars
from app.fragments import fragment
from app.measurement import Bench, Measurement
from app.text import duration, plain
from app.words import NONE, listed, percent, value
from recorder.dispatch_shape import ACTIVATIONS, MAX_SKEW, PRESETS

DISPATCHERS = ("sorted", "grouped", "masked", "naive")  # of which "auto" chooses
AUTO, DENSE, LAYER, ROUTING = "auto", "dense", "layer", "routing"
ABOUT = {
    AUTO: "the default: sorted on a CPU",
    "naive": "loop over slots and experts: the reference",
    "masked": "loop over experts",
    "sorted": "assignments sorted by expert, slices of them",
    "grouped": "sorted, one grouped matrix product",
    DENSE: "one matrix product of the same FLOPs",
    ROUTING: "from logits to sorted assignments",
    LAYER: "a whole MoE layer: routing, default dispatcher",
}
DISAGREEMENT = 1e-2  # rounding of float32 stays far below
SCATTER = 1.4  # a median this many times the shortest round: the machine was not quiet
_TIE = 1.03  # a time this close to the fastest is as fast
_POLL_S = 0.5
_STARTED = "_dispatch_started"
_KEY = "dispatch_"
_OWN = "Own shape"
_HELP = {
    "d_model": "Numbers in a token's vector.",
    "d_ff": "Inner width of each expert.",
    "top_k": "Experts for each token.",
    "num_tokens": "Tokens in the batch.",
    "skew": "How unequally popular the experts are: standard deviation of their logits' offsets. 0 is equally.",
    "rounds": "All take turns in each round; the median over rounds counts.",
    "threads": "CPU threads that torch may use.",
}


def render() -> None:
    """Draw the page."""
    bench = _bench()
    values = settings.from_text(state.wanted("dispatch"))
    name = settings.as_text(values)
    state.show("dispatch", name)
    found, measured = _found(bench, name)
    st.title(
        title_of(found) if found else "Which dispatcher is fastest here?",
        help="A dispatcher takes each token to its experts and adds up what they give. All give the same result; "
        "they differ in speed and memory. Timed: forward and backward, in float32, on this machine's CPU.",
    )
    running = bench.running()
    wrong = settings.problems(values)
    pressed = _controls(values, can_run=not wrong and running is None)
    for line in wrong:
        st.error(plain(line))
    if pressed:
        _start(bench, name, values)
    if running is not None:
        fragment(_progress, run_every=_POLL_S)(bench)
    else:
        _before_running(bench, name, values, wrong, measured)
    if found is None:
        if running is None and not wrong:
            st.info("Choose a shape and press *Run*. It is measured on this machine, in a process of its own.")
        return
    if measured != name:
        st.warning(
            f"Shown is an earlier measurement: {settings.in_words(settings.from_text(measured))}. "
            "Press *Run* to measure what is chosen above.",
            icon=":material/history:",
        )
    _result(found, settings.from_text(measured))


def title_of(report: Mapping[str, Any]) -> str:
    """The page's answer: "sorted is fastest here: 7.2 ms, 1.7x one dense product of the same FLOPs"."""
    timings = by_name(report)
    names = _by_time(report)
    first = timings[names[0]]
    as_fast = [name for name in names if timings[name]["milliseconds"] <= _TIE * first["milliseconds"]]
    return (
        f"{listed(as_fast)} {'is' if len(as_fast) == 1 else 'are'} fastest here: "
        f"{milliseconds(first['milliseconds'])}, {first['relative']:.1f}x one dense product of the same FLOPs"
    )


def by_name(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The timings of a report by the name of what was timed."""
    return {timing["name"]: timing for timing in report["timings"]}


def milliseconds(time: float) -> str:
    """A time as the page writes it: "0.412 ms", "7.2 ms", "1,150 ms"."""
    return f"{value(time, 2 if 1 <= time < 10 else 3)} ms"


def numbers(report: Mapping[str, Any]) -> pd.DataFrame:
    """A row for each thing timed: the dispatchers, the fastest on top, and below them what they are measured by."""
    timings = by_name(report)
    names = [*_by_time(report), *(name for name in (AUTO, LAYER, ROUTING, DENSE) if name in timings)]
    return pd.DataFrame(
        {
            "name": name,
            "what it is": ABOUT.get(name, ""),
            "ms": timings[name]["milliseconds"],
            "x dense": timings[name]["relative"],
            "peak MiB": timings[name]["peak_mib"],
            "largest difference": timings[name]["difference"],
            "rounds": timings[name]["rounds"],
        }
        for name in names
    ).astype({"largest difference": "Float64"})


@st.cache_resource
def _bench() -> Bench:
    return Bench()


def _found(bench: Bench, name: str) -> tuple[dict[str, Any] | None, str]:
    """The report to show and what it is of: of what is chosen, else the last that this session measured."""
    for candidate in (name, *reversed(st.session_state.get(_STARTED, []))):
        report = bench.report(candidate)
        if report is not None:
            return report, candidate
    return None, ""


def _controls(values: settings.Values, *, can_run: bool) -> bool:
    labels = [settings.preset_label(shape) for shape in PRESETS]
    preset = settings.preset_of(values)
    chosen = _OWN if preset is None else settings.preset_label(preset)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        _fill("preset", chosen)
        st.selectbox(
            "Shape",
            labels if preset else [_OWN, *labels],
            key=f"{_KEY}preset",
            on_change=_take_preset,
            width=360,
            help="Width x expert width, top-k of experts, tokens in the batch. *Set values* changes each of them.",
        )
        with st.popover("Set values", icon=":material/tune:", width="content"):
            _fields(values)
        return st.button("Run", type="primary", icon=":material/play_arrow:", key="dispatch_run", disabled=not can_run)


def _fields(values: settings.Values) -> None:
    for row in (("d_model", "d_ff"), ("num_experts", "top_k"), ("num_tokens", "skew"), ("rounds", "threads")):
        for column, name in zip(st.columns(2, vertical_alignment="bottom"), row, strict=True):
            _fill(name, values[name])
            least, most = (0.0, MAX_SKEW) if name == "skew" else settings.WHOLE[name]
            column.number_input(
                settings.LABELS[name],
                least,
                most,
                None,
                step=0.5 if name == "skew" else 1,
                key=f"{_KEY}{name}",
                help=_HELP.get(name),
                on_change=_store,
                args=(name,),
            )
    _fill("activation", values["activation"])
    st.selectbox(
        settings.LABELS["activation"], ACTIVATIONS, key=f"{_KEY}activation", on_change=_store, args=("activation",)
    )


def _fill(name: str, chosen: Any) -> None:
    # On every run: the browser draws the fields of a closed popover only once it is opened, from the newest run.
    st.session_state[f"{_KEY}{name}"] = chosen


def _store(name: str) -> None:
    """Widget callback: what this field shows is now wanted."""
    # Of this field alone: those that the browser has not drawn yet, in a closed popover, have no values of their own.
    values = settings.from_text(state.wanted("dispatch")) | {name: st.session_state[f"{_KEY}{name}"]}
    state.choose(dispatch=settings.as_text(values))


def _take_preset() -> None:
    """Widget callback: the preset's shape, and the rounds and threads as they were."""
    label = st.session_state[f"{_KEY}preset"]
    shape = next((shape for shape in PRESETS if settings.preset_label(shape) == label), None)
    if shape is not None:
        values = settings.from_text(state.wanted("dispatch"))
        kept = {name: values[name] or settings.DEFAULTS[name] for name in ("rounds", "threads")}
        state.choose(dispatch=settings.as_text(settings.of_preset(shape, **kept)))


def _start(bench: Bench, name: str, values: settings.Values) -> None:
    st.session_state.setdefault(_STARTED, []).append(name)
    state.choose(dispatch=name)  # so that a reload finds the result
    try:
        bench.start(name, settings.command(values))
    except OSError as error:
        st.error(f"The measurement could not be started: {plain(str(error))}")
        return
    st.rerun()


def _before_running(bench: Bench, name: str, values: settings.Values, wrong: Sequence[str], measured: str) -> None:
    """What ended without a result, how long it will take, and what would disturb it."""
    last = bench.ended(name)
    if last is not None and last.state == "failed":
        st.error(f"No result: {plain(last.error or 'no reason given')}")
    elif last is not None:
        st.caption("Cancelled; nothing of it is kept.")
    if wrong or measured == name:
        return
    line = f"Takes about {duration(settings.estimated_seconds(values))}."
    if watch.active(watch.all_jobs()):
        line += " A recording is under way: it takes its share of the processor, so times will be longer and scatter."
    st.caption(line)


def _progress(bench: Bench) -> None:
    running = bench.running()
    if running is None:
        st.rerun()
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        share, text = _progress_text(running)
        st.progress(share, text=text)
        if st.button("Cancel", key="dispatch_cancel"):
            bench.cancel()
            st.rerun()


def _progress_text(running: Measurement) -> tuple[float, str]:
    progress = running.progress()
    what = settings.in_words(settings.from_text(running.name))
    if progress.done is None or not progress.total:
        return 0.0, f"Loading torch and warming up, {duration(progress.elapsed_s)} so far ({what})"
    said = f"Round {progress.done} of {progress.total}, {duration(progress.elapsed_s)} so far"
    if progress.done == progress.total:
        said = f"Measuring memory, {duration(progress.elapsed_s)} so far"
    return progress.done / progress.total, f"{said} ({what})"


# ---------------------------------------------------------------------------------------------------- the result


def _result(report: Mapping[str, Any], values: settings.Values) -> None:
    timings = by_name(report)
    _large_numbers(report, timings)
    rounds = max(timing["rounds"] for timing in timings.values())
    st.caption(
        f"Measured on this machine: {settings.in_words(values)}; medians over {rounds:,} "
        f"{'round' if rounds == 1 else 'rounds'} in which all took turns. "
        "Look for the shortest bar, and how near it comes to the dashed line: one dense product with as many FLOPs, "
        "which no dispatcher is expected to beat. On a CPU auto is sorted, timed once more: the gap between their two "
        "bars is the noise in these times."
    )
    left, right = st.columns([3, 2])
    with left:
        _times(report, timings)
    with right:
        _memory(report, timings)
    _loads(report, values)
    st.subheader("All numbers", anchor=False)
    charts.table(numbers(report), key="dispatch_numbers", columns=_formats())


def _large_numbers(report: Mapping[str, Any], timings: Mapping[str, Mapping[str, Any]]) -> None:
    auto = timings.get(AUTO)
    largest = largest_difference(report)
    columns = st.columns(4)
    columns[0].metric(
        "Default (auto)",
        NONE if auto is None else milliseconds(auto["milliseconds"]),
        help="Forward and backward of the dispatcher that a layer uses when none is named: it chooses by shape.",
    )
    columns[1].metric(
        "Auto, times dense",
        NONE if auto is None else f"{auto['relative']:.2f}x",
        help="Its time over that of one dense matrix product with the same floating-point operations, both in the "
        "same round; the median over rounds.",
    )
    columns[2].metric(
        "Routing's share",
        percent(report["routing_share"]),
        help="Of a whole layer's time, the part from router logits to sorted assignments, backward included.",
    )
    columns[3].metric(
        "Largest difference",
        NONE if largest is None else f"{largest:.1e}",
        help="The largest absolute difference from naive, over outputs and the gradients of tokens, gate values and "
        "every weight. Sums in another order differ by float32 rounding.",
    )
    if is_disturbed(report):
        st.warning(
            "The rounds scatter widely: something else keeps this machine busy, and these times are not its best. "
            "Measure again when it is quiet, or with fewer CPU threads.",
            icon=":material/speed:",
        )
    if largest is not None and largest > DISAGREEMENT:
        st.error(f"The dispatchers do not agree: they differ by up to {largest:.1e}, more than rounding explains.")


def is_disturbed(report: Mapping[str, Any]) -> bool:
    """Whether the rounds scatter as they do on a machine that is busy with something else."""
    medians, least = zip(
        *((timing["milliseconds"], timing["least_milliseconds"]) for timing in report["timings"]), strict=True
    )
    return float(np.median(np.array(medians) / np.array(least))) > SCATTER


def largest_difference(report: Mapping[str, Any]) -> float | None:
    """The largest difference of any dispatcher from naive; None where none was compared."""
    return max((t["difference"] for t in report["timings"] if t["difference"] is not None), default=None)


def _times(report: Mapping[str, Any], timings: Mapping[str, Mapping[str, Any]]) -> None:
    order = _by_time(report)
    bars = [
        ReferenceBar(
            name=_shown(name),
            value=timings[name]["milliseconds"],
            label=f"{milliseconds(timings[name]['milliseconds'])}, {timings[name]['relative']:.2f}x"
            + (f", routing {percent(report['routing_share'])}" if name == LAYER else ""),
            accent=name == order[0],
            part=timings[ROUTING]["milliseconds"] if name == LAYER else 0.0,
        )
        for name in [*order, AUTO, LAYER]
    ]
    dense = timings[DENSE]["milliseconds"]
    figure = reference_bars(
        bars,
        reference=dense,
        reference_label=f"dense {milliseconds(dense)}",
        title="Time, forward and backward",
        x_title="milliseconds",
        part_name="routing, ms",
        theme=charts.theme(),
        wrap_at=56,
    )
    alt = "; ".join(f"{bar.name} {bar.label}" for bar in bars)
    charts.show(figure, key="dispatch_times", alt=f"Bars of time: {alt}. One dense product takes {dense:.3g} ms.")


def _memory(report: Mapping[str, Any], timings: Mapping[str, Mapping[str, Any]]) -> None:
    names = _by_time(report)
    least = min(timings[name]["peak_mib"] for name in names)
    bars = [
        ReferenceBar(
            name=_shown(name),
            value=timings[name]["peak_mib"],
            label=f"{value(timings[name]['peak_mib'])} MiB",
            accent=timings[name]["peak_mib"] == least,
        )
        for name in [*names, AUTO]
    ]
    dense = timings[DENSE]["peak_mib"]
    figure = reference_bars(
        bars,
        reference=dense,
        reference_label=f"dense {value(dense)} MiB",
        title="Memory at the peak",
        x_title="MiB beyond weights and inputs",
        theme=charts.theme(),
        wrap_at=38,
    )
    alt = "; ".join(f"{bar.name} {bar.label}" for bar in bars)
    charts.show(figure, key="dispatch_memory", alt=f"Bars of peak memory: {alt}. One dense product: {dense:.3g} MiB.")


def _loads(report: Mapping[str, Any], values: settings.Values) -> None:
    load_E = np.asarray(report["load"])
    idle = int((load_E == 0).sum())
    title = f"Tokens per expert: {load_E.min():,} to {load_E.max():,}"
    title += f", {idle:,} of {len(load_E):,} without any" if idle else ", none idle"
    st.caption(
        "What the experts were given: the same batch for every dispatcher. Pale and short is balanced; *Skew* under "
        "*Set values* makes some experts more popular, which is where dispatchers differ."
    )
    charts.show(
        load_bars(load_E, top_k=int(values["top_k"]), title=title, theme=charts.theme()),
        key="dispatch_load",
        alt=f"{title}; bars of load over the uniform share.",
        numbers=lambda: pd.DataFrame({"expert": range(len(load_E)), "assignments": load_E}),
    )


def _by_time(report: Mapping[str, Any]) -> list[str]:
    """The dispatchers that can be named, the fastest first. auto is one of them under another name."""
    timings = by_name(report)
    return sorted((name for name in DISPATCHERS if name in timings), key=lambda name: timings[name]["milliseconds"])


def _shown(name: str) -> str:
    return {AUTO: "auto (default)", LAYER: "whole layer"}.get(name, name)


def _formats() -> dict[str, Any]:
    column = st.column_config.NumberColumn
    return {
        "ms": column(format="%.2f", help="Forward and backward, the median over rounds."),
        "x dense": column(format="%.2f", help="Time over the dense product's in the same round, the median."),
        "peak MiB": column(format="%.1f", help="Memory allocated at most during one run, beyond what stood before."),
        "largest difference": column(
            format="%.1e", help="From naive, over outputs and all gradients; none for what gives other results."
        ),
        "rounds": column(help="A candidate ten times slower than the fastest is timed twice only."),
    }
