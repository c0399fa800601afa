"""One run at a glance: is the load balanced, and when did it collapse?

Shapes: S recorded steps, E experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from app import charts, data, diagnosis_panel, health, layer_keys, navigation, record_again, state, x_axis
from app.fragments import fragment
from app.layer_stats import LayerStats
from app.ranks import ranks_line
from app.report.button import report_button
from app.text import plain
from app.views import empty, overview_charts, overview_losses
from app.words import NONE, count, listed, step_word, value
from moe_core import metrics
from recorder.reader import Run

MAX_ROWS_TOGETHER = 64  # experts of all layers in one heatmap; more, and one layer is drawn at a time
_LAYER_COLUMNS = (  # those that matter first
    *("layer", "router", "num_experts", "top_k", "max_violation_window", "max_violation", "idle_experts"),
    *("dead_experts", "rerouted_share", "aux_loss", "router_entropy", "load_entropy", "load_cv", "gini", "drop_rate"),
    *("tokens", "idle_ids"),
)
MAX_PANELS = 12  # small charts, one a layer; more layers, and the chosen one is drawn alone


def render() -> None:
    """Draw the page."""
    head = st.container()
    run = empty.require_run()
    if run is None:
        head.title("Overview")
        return
    layers = _indices(run)
    one_at_a_time = _rows(run) > MAX_ROWS_TOGETHER or len(layers) > MAX_PANELS
    window, axis = _controls(run)
    summary = data.summary(run, window)
    covered = _covered(run, window)
    wrong = data.trouble(run, window)
    with head:
        st.title(
            headline(summary["layers"], wrong, damaged=bool(data.problems(run))),
            help=f"Over {covered.words}. Least balanced is the layer with the greatest max_violation of the loads "
            "summed over them. Idle is an expert with less than a tenth of the uniform share, busy any other. "
            "A loss that is not finite, and steps without a routed token, come first.",
        )
        st.caption(f"{_described(run)} The numbers are of {covered.words}{covered.range}.")
        if data.main_phase(run) != "train":
            st.caption(diagnosis_panel.instead_of_training(run))
        ranks = ranks_line(run, data.incomplete_steps(run))
        if ranks is not None:
            st.caption(ranks)
        if wrong.unrouted:
            st.caption(f"Balance is a matter of the steps that routed tokens: {headline(summary['layers'])}.")
    _numbers(run, summary, covered)
    diagnosis_panel.show(run)
    idle = {one["key"]: _experts_idle(one) for one in summary["layers"] if one["idle_experts"] is not None}
    over = f"the steps with routed tokens among {covered.words}" if wrong.unrouted else covered.words
    # a fragment, so that another layer draws its charts anew and not the page
    by_layer = fragment(_of_one_layer) if one_at_a_time else _of_all_layers
    by_layer(run, layers, window, axis, idle, over)
    overview_losses.losses(run, axis)
    _layer_table(run, summary, covered)
    _events(run)
    report_button([run])
    record_again.buttons(run, "overview")


def _of_one_layer(
    run: Run, layers: Sequence[int], window: int, axis: x_axis.XAxis, idle: Mapping[int, str], over: str
) -> None:
    layer = _choose_layer(run, layers, window)
    overview_charts.load(run, [layer], idle, over)
    overview_charts.balance(run, layers if len(layers) <= MAX_PANELS else [layer], window, axis)
    overview_charts.shares(run, layer, axis)


def _of_all_layers(
    run: Run, layers: Sequence[int], window: int, axis: x_axis.XAxis, idle: Mapping[int, str], over: str
) -> None:
    overview_charts.load(run, layers, idle, over)
    overview_charts.balance(run, layers, window, axis)
    fragment(_shares)(run, layers, window, axis)


def _shares(run: Run, layers: Sequence[int], window: int, axis: x_axis.XAxis) -> None:
    layer = _choose_layer(run, layers, window)
    overview_charts.shares(run, layer, axis)


def _choose_layer(run: Run, layers: Sequence[int], window: int) -> int:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        layer = _pick_layer(run, layers, window)
        if st.button("Replay this layer", key="replay_layer", icon=":material/play_circle:"):
            navigation.go("replay", layer=layer, phase=data.linked_phase(run))
    return layer


class Covered:
    """The recorded steps that numbers cover, in words.

    words: "the last 50 recorded training steps"; range: their first and last, " (steps 350 to 399)".
    """

    def __init__(self, steps_S: np.ndarray, window: int, phase: str = "train") -> None:
        one = step_word(phase)
        last_S = steps_S[-window:]
        if steps_S.size > window:
            many = f"{window} recorded {one}s"
            self.words = f"the last recorded {one}" if window == 1 else f"the last {many}"
        elif steps_S.size > 1:
            self.words = f"all {steps_S.size} recorded {one}s"
        else:
            self.words = f"the only recorded {one}" if steps_S.size else f"no {one}"
        self.range = ""
        if last_S.size:
            first, last = int(last_S[0]), int(last_S[-1])
            self.range = f" (step {first:,})" if first == last else f" (steps {first:,} to {last:,})"


def _covered(run: Run, window: int) -> Covered:
    """What the numbers of the load cover: its rows may have been recorded at fewer steps than the losses."""
    steps = [data.layer_stats(run, layer).steps_S for layer in _indices(run)]
    return Covered(max(steps, key=len), window, data.main_phase(run))


def headline(layers: Sequence[dict[str, Any]], wrong: health.Trouble | None = None, *, damaged: bool = False) -> str:
    """The answer in words: what went wrong, else the balance.

    Where only some tokens of some steps could not be routed, both.

    layers   those of `recorder.summary.summarise`
    damaged  whether there are part files that cannot be read, so that a load may have been recorded after all
    """
    if wrong is None or wrong.words is None:
        return _balance(layers, damaged)
    return wrong.words if wrong.loss or wrong.unrouted else f"{wrong.words}. {_balance(layers, damaged)}"


def _balance(layers: Sequence[dict[str, Any]], damaged: bool) -> str:
    known = [layer for layer in layers if layer["max_violation_window"] is not None]
    if not known:
        if damaged:
            return "No load of the window can be read, so nothing can be said of its balance"
        return "No load recorded in the window, so nothing can be said of its balance"
    worst = least_balanced(known)
    assert worst is not None
    violation = f"max_violation {value(worst['max_violation_window'])}{_of_bound(worst)}"
    idle = [layer for layer in known if layer["idle_experts"]]
    if len(layers) == 1:
        said = f"{_experts_idle(worst)} idle" if idle else "All experts are busy"
        return f"Layer {worst['label']}: {said}, {violation}" if idle else f"{said}: {violation}"
    if not idle:
        where = "every MoE layer" if len(known) == len(layers) else f"the {len(known)} layers with tokens"
        return f"All experts are busy in {where}; least balanced is layer {worst['label']}, {violation}"
    said = f"Layer {worst['label']} is least balanced: {_experts_idle(worst)} idle, {violation}"
    most = max(idle, key=lambda layer: layer["idle_experts"])
    if most["idle_experts"] > worst["idle_experts"]:
        said += f"; most idle, {_experts_idle(most)}, are in layer {most['label']}"
    return said


def least_balanced(layers: Sequence[dict[str, Any]], name: str = "max_violation_window") -> dict[str, Any] | None:
    """The layer of a summary with the greatest `name`, the first of equals; None where none has a value."""
    return max(
        (layer for layer in layers if layer[name] is not None), key=lambda layer: float(layer[name]), default=None
    )


def normalised_aux_loss(stats: LayerStats, window: int) -> tuple[float | None, bool]:
    """Mean normalised aux loss (uniform = 1) of the last `window` recorded steps, and whether it was recorded.

    Steps without a recorded value take E * sum_i f_i P_i of their load and mean_prob. None where there is neither.
    """
    recorded_S = stats.aux_loss_S[-window:]
    load_SE, mean_prob_SE = stats.load_SE[-window:], stats.mean_prob_SE[-window:]
    computed_S = np.atleast_1d(metrics.aux_loss(load_SE, mean_prob_SE)) if len(load_SE) else np.zeros(0)
    values_S = np.where(np.isfinite(recorded_S), recorded_S, computed_S)
    finite_S = values_S[np.isfinite(values_S)]
    return (float(finite_S.mean()) if finite_S.size else None), bool(np.isfinite(recorded_S).any())


def _experts_idle(layer: dict[str, Any]) -> str:
    if not layer["idle_experts"]:
        return overview_charts.NO_EXPERT
    if not layer["num_experts"]:
        return count(layer["idle_experts"], "expert")
    return f"{layer['idle_experts']} of {count(layer['num_experts'], 'expert')}"


def _of_bound(layer: dict[str, Any]) -> str:
    if not layer["num_experts"] or not layer["top_k"]:
        return ""
    return f" of at most {value(metrics.max_violation_bound(layer['num_experts'], layer['top_k']))}"


def _described(run: Run) -> str:
    layers = list(layer_keys.routers(run).values())
    shapes = list(dict.fromkeys((layer.get("top_k"), layer.get("num_experts")) for layer in layers))
    experts = [f"top-{k} of {count(e, 'expert')}" for k, e in shapes if k and e]
    balancer = run.config.get("balancer")
    parts = [f"**{plain(run.name)}**"]
    if balancer:
        parts.append("no balancer" if balancer == "none" else f"balancer {plain(str(balancer))}")
    if experts:
        parts.append(listed(experts))
    indices = [str(label) for label in layer_keys.labels(run).values()]
    few = len(indices) <= 6
    parts.append(
        (f"MoE layer {indices[0]}" if len(indices) == 1 else f"MoE layers {listed(indices)}")
        if few
        else f"{len(indices)} MoE layers"
    )
    return f"{parts[0]}: {', '.join(parts[1:])}."


def _rows(run: Run) -> int:
    return sum(layer.get("num_experts") or 0 for layer in layer_keys.routers(run).values())


def _controls(run: Run) -> tuple[int, x_axis.XAxis]:
    """The window; what the curves run over."""
    steps = data.steps(run)
    with st.container(horizontal=True, gap="large"):
        window = state.pick_window()
        return window, x_axis.axis(steps, x_axis.pick(x_axis.offered(steps)))


def _pick_layer(run: Run, layers: Sequence[int], window: int) -> int:
    worst = least_balanced(data.summary(run, window)["layers"])
    return state.pick_option(
        "layer",
        "MoE layer",
        list(layers),
        default=layers[0] if worst is None else worst["key"],
        format_func=lambda key: str(layer_keys.label(run, key)),
        help="Index in the whole model, dense layers counted. The least balanced one unless chosen otherwise.",
    )


# ---------------------------------------------------------------------------------------------------- the numbers


def _numbers(run: Run, summary: dict[str, Any], covered: Covered) -> None:
    layers = summary["layers"]
    worst = least_balanced(layers)
    idle, dead = least_balanced(layers, "idle_experts"), least_balanced(layers, "dead_experts")
    several = len(layers) > 1
    over = f"over {covered.words}{covered.range}"
    losses = Covered(data.steps(run)["step"].to_numpy(dtype=np.int64), summary["window"], data.main_phase(run))
    aux = [(layer, *normalised_aux_loss(data.layer_stats(run, layer), summary["window"])) for layer in _indices(run)]
    known = [(mean, layer, recorded) for layer, mean, recorded in aux if mean is not None]
    aux_mean, aux_layer, recorded = max(known, key=lambda item: item[0]) if known else (None, None, False)

    def where(key: int | None) -> str:
        return f", layer {layer_keys.label(run, key)}" if several and key is not None else ""

    def named(label: str, layer: dict[str, Any] | None, name: str) -> str:
        return label + where(layer["key"] if layer and layer[name] else None)

    with st.container(horizontal=True, gap="small", key="overview_numbers"):
        if data.steps(run)["ce_loss"].notna().any():
            _metric(
                "Cross-entropy",
                _final_loss(run, summary, "ce_loss"),
                f"Mean of ce_loss, in nats per token, over {losses.words}{losses.range}. No auxiliary losses in it.",
            )
        else:
            _metric(
                "Loss",
                _final_loss(run, summary, "loss"),
                f"Mean of the training loss, auxiliary losses included, over {losses.words}{losses.range}. This run "
                "recorded no cross-entropy.",
            )
        _metric(
            named("max_violation", worst, "max_violation_window"),
            value(worst["max_violation_window"] if worst else None),
            f"max(load) / mean(load) - 1 of the loads summed {over}; the worst MoE layer. 0 is balanced; "
            f"where tokens choose, the most there can be is E/k - 1{_bound_words(worst)}, all of them on one expert.",
        )
        _metric(
            named("Idle experts" if not several else "Idle", idle, "idle_experts"),
            _of_experts(idle, "idle_experts"),
            f"Experts that get less than a tenth of the uniform share {over}, dead ones included; the worst MoE layer.",
        )
        _metric(
            named("Dead experts" if not several else "Dead", dead, "dead_experts"),
            _of_experts(dead, "dead_experts"),
            f"Experts that get no assignment at all {over}; the worst MoE layer.",
        )
        _metric(
            f"Aux loss{where(aux_layer)}",
            value(aux_mean),
            f"E * sum of f_i P_i, normalised so that uniform gives 1, without its coefficient; f: shares of the "
            f"assignments, P: mean router probabilities. Mean of the steps' values {over}; the worst MoE layer. "
            + "Below 1 where the router's probabilities lean to experts that get less. "
            + ("As recorded." if recorded else "Computed from load and mean_prob: none was recorded in this run."),
        )
        total = len(data.steps(run))
        _metric("Steps", f"{total:,}", _steps_help(run, total))


def _metric(label: str, shown: str, help_: str) -> None:
    st.metric(label, shown, help=help_, width="content")


def _indices(run: Run) -> list[int]:
    return layer_keys.keys(run)


def _final_loss(run: Run, summary: dict[str, Any], column: str) -> str:
    mean = summary["losses"][column]
    if mean is None and data.steps(run)[column].tail(summary["window"]).notna().any():
        return "not finite"
    return value(mean, 4)


def _bound_words(layer: dict[str, Any] | None) -> str:
    if layer is None or not layer["num_experts"] or not layer["top_k"]:
        return ""
    return f" = {value(metrics.max_violation_bound(layer['num_experts'], layer['top_k']))}"


def _of_experts(layer: dict[str, Any] | None, name: str) -> str:
    if layer is None:
        return NONE
    return f"{layer[name]} of {layer['num_experts']}" if layer["num_experts"] else str(layer[name])


def _steps_help(run: Run, total: int) -> str:
    said = f"Recorded {step_word(data.main_phase(run))}s"
    steps = data.steps(run)["step"]
    if total:
        said += f", from {int(steps.min()):,} to {int(steps.max()):,}"
    planned = run.config.get("steps")
    return f"{said}; {planned:,} were asked for." if isinstance(planned, int) else f"{said}."


# ----------------------------------------------------------------------------------------------------- the tables


def _layer_table(run: Run, summary: dict[str, Any], covered: Covered) -> None:
    st.subheader("Every MoE layer", anchor=False)
    st.caption(f"Over {covered.words}{covered.range}. What a column means stands in its heading's help.")
    charts.table(layer_frame(run, summary), key="layers", columns=_layer_columns())


def layer_frame(run: Run, summary: dict[str, Any]) -> pd.DataFrame:
    """The summary's layers as a table, with the share that the bias changed over the window.

    The normalised aux loss is computed where none was recorded.
    """
    lines = []
    for layer in summary["layers"]:
        line = {name: layer[name] for name in _LAYER_COLUMNS if name in layer}
        stats = data.layer_stats(run, layer["key"])
        line["aux_loss"] = normalised_aux_loss(stats, summary["window"])[0]
        line["rerouted_share"] = overview_charts.final_rerouted_share(stats, summary["window"])
        line["idle_ids"] = ", ".join(map(str, layer["idle_ids"])) or None
        lines.append(line)
    frame = pd.DataFrame(lines, columns=[*_LAYER_COLUMNS])
    if frame["layer"].duplicated().any():
        frame["router"] = [str(layer["label"]) for layer in summary["layers"]]
    else:
        frame = frame.drop(columns="router")
    whole = ("layer", "num_experts", "top_k", "dead_experts", "idle_experts")
    return frame.astype(
        {name: "Int64" if name in whole else "Float64" for name in frame if name not in ("idle_ids", "router")}
    )


def _layer_columns() -> dict[str, Any]:
    def number(label: str, help_: str, format_: str | None = "%.3f") -> Any:
        return st.column_config.NumberColumn(label, help=help_, format=format_)

    mean = "mean of the steps' values"
    return {
        "layer": number("Layer", "Index in the whole model, dense layers counted.", "%d"),
        "router": st.column_config.TextColumn(
            "Router", help="What it is called here: this run has layers with several."
        ),
        "num_experts": number("Experts", "E, experts that tokens are routed to; shared ones are not counted.", "%d"),
        "top_k": number("Top-k", "k, experts each token uses.", "%d"),
        "tokens": number("Tokens", "Tokens routed in a step, mean.", "localized"),
        "max_violation": number("Max violation, batch", f"max(load) / mean(load) - 1 of each step, {mean}."),
        "max_violation_window": number(
            "Max violation, window",
            "The same of the loads summed over the window: free of the noise of single batches.",
        ),
        "load_cv": number("Load CV", f"Standard deviation of the load over its mean, {mean}. 0 is balanced."),
        "load_entropy": number("Load entropy", f"Entropy of the shares of the load over ln E, {mean}. 1 is balanced."),
        "router_entropy": number(
            "Router entropy", f"Entropy of each token's router probabilities over ln E, {mean}. 0 is certain."
        ),
        "dead_experts": number("Dead (count)", "Experts without any assignment in the window.", "%d"),
        "idle_experts": number(
            "Idle (count)", "Experts below a tenth of the uniform share in the window, dead ones included.", "%d"
        ),
        "rerouted_share": number(
            "Rerouted share",
            "Share of the window's assignments that the selection bias changed; no value without a bias.",
        ),
        "gini": number("Gini", f"Gini coefficient of the load, {mean}. 0 is balanced, 1 - 1/E one expert for all."),
        "drop_rate": number("Drop rate", f"Share of the assignments that capacity dropped, {mean}."),
        "aux_loss": number(
            "Aux loss",
            f"E * sum of f_i P_i, uniform = 1, no coefficient, {mean}; from load and mean_prob where not recorded.",
        ),
        "idle_ids": st.column_config.TextColumn(
            "Idle ids", help="Their numbers, dead ones included: as many as the count says."
        ),
    }


def _events(run: Run) -> None:
    frame = data.events(run)
    if not len(frame):
        return
    st.subheader("Events", anchor=False)
    st.caption("What the recorder noted during the run, by step.")
    charts.table(frame[["step", "kind", "message"]], key="events")
