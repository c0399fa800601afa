"""Layouts of the picked run: its layers and parameters from its manifest, experts in the colours of their load."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import charts, data, layer_keys, navigation, state
from app.figures.labels import si
from app.figures.model_map import MAX_ROWS, is_moe, key_of, label_of, model_map
from app.figures.parameter_bars import parameter_bars
from app.figures.parameter_split import Split, parameter_split
from app.layout_tables import CONTEXT
from app.text import plain
from app.views import empty
from app.words import NONE, count, percent, value
from moe_core import metrics
from moe_core.layout import CONVENTIONS, Count, MoEFFN, ffn_parameters
from recorder.reader import Run
from recorder.run_layout import embeddings_of, outside_layers, run_report

WINDOWS = (10, 50, 200)
_PLAIN = "none"
_CLICKABLE_EXPERTS = 4000
_ONE_DECIMAL = st.column_config.NumberColumn(format="%.1f")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The dense feed-forward network that a MoE layer is measured by: as wide as one of its experts.

    width and activation are None where the manifest does not tell them, only what one expert holds.
    """

    width: int | None
    activation: str | None
    parameters: int


def render(head: DeltaGenerator, controls: DeltaGenerator) -> None:
    """Draw the page. head: where its title goes. controls: where the choice of a window goes."""
    run = empty.require_run(layers=False)
    if run is None:
        head.title("Layouts")
        return
    model = run.manifest.get("model") or {}
    layers = layer_keys.layers(run)
    head.title(
        title_of(model), help="From the run's manifest: the model's layers, and its parameters, embeddings included."
    )
    if not layers and data.lists_no_layers(run):
        empty.no_layers_listed(run)
        return
    if not layers:
        st.info("This run's manifest describes no layers. Pick another run in the sidebar.")
        return
    moe = [layer for layer in layers if is_moe(layer)]
    references = [reference_of(model, layer) for layer in layers]
    _large_numbers(model, layers, references)
    with controls:
        window = _pick_window(moe)
    _diagram(run, model, layers, moe, window)
    _dense_comparison(layers, references)
    st.subheader("The whole model", anchor=False)
    _whole_model(run, model)
    st.subheader("Layer by layer", anchor=False)
    st.caption(
        "Parameters of each layer's feed-forward part; attention and norms are not in it. "
        "Router: width x experts. Experts: all routed ones together. Active: what one token uses."
    )
    frame = layer_table(model, layers, references)
    charts.table(frame, key="layout_layers", columns=_formats(frame))


def title_of(model: Mapping[str, Any]) -> str:
    """The page's answer: how many layers are MoE, and what share of the parameters a token uses."""
    layers = model.get("layers") or []
    with_router = [layer for layer in layers if is_moe(layer)]
    moe = layer_keys.blocks(with_router)
    said = "No layers described"
    if layers:
        said = f"{moe} of {count(layer_keys.blocks(layers), 'layer')} {'is' if moe == 1 else 'are'} MoE"
        said += f", with {len(with_router)} routers" if len(with_router) > moe else ""
    total, active = model.get("parameters_total"), model.get("parameters_active")
    if total and active:
        share = active / total
        said += f"; {percent(share, 0 if share >= 0.1 else 1)} of parameters per token"
    return said


def reference_of(model: Mapping[str, Any], layer: Mapping[str, Any]) -> Reference | None:
    """What a layer is measured by: itself where it is dense; None where the manifest does not tell enough."""
    width = layer.get("expert_d_ff") if is_moe(layer) else layer.get("d_ff")
    activation = layer.get("activation")
    try:
        parameters = ffn_parameters(model.get("d_model"), width, activation)  # type: ignore[arg-type]
    except ValueError:
        one = _counted(layer)
        return None if one is None else Reference(width=width, activation=activation, parameters=one)
    return Reference(width=int(width or 0), activation=str(activation), parameters=parameters)


def _counted(layer: Mapping[str, Any]) -> int | None:
    """Parameters of a dense layer, or of one expert by what a token leaves unused; None where that cannot be told."""
    total, active = layer.get("parameters_total"), layer.get("parameters_active")
    if not is_moe(layer):
        return total or None
    unused = int(layer["num_experts"]) - int(layer.get("top_k") or layer["num_experts"])
    if layer.get("latent_size") or total is None or active is None or unused < 1 or (total - active) % unused:
        return None
    return (total - active) // unused or None


def _large_numbers(
    model: Mapping[str, Any], layers: list[dict[str, Any]], references: Sequence[Reference | None]
) -> None:
    total, active = model.get("parameters_total"), model.get("parameters_active")
    times = [_times(layer, reference) for layer, reference in zip(layers, references, strict=True) if is_moe(layer)]
    columns = st.columns(4)
    columns[0].metric(
        "Parameters", NONE if total is None else si(float(total)), help=f"{value(total)} in all, embeddings included."
    )
    columns[1].metric(
        "Active for a token",
        NONE if active is None else si(float(active)),
        help=f"{value(active)}: all but the routed experts that a token does not use, embeddings included.",
    )
    for column, label, at in ((columns[2], "MoE layer, times dense", 0), (columns[3], "Active, times dense", 1)):
        known = [pair[at] for pair in times if pair is not None]
        column.metric(
            label,
            _range(known),
            help="Parameters of a MoE layer's feed-forward part"
            + (" that one token uses" if at else "")
            + ", over those of one dense feed-forward network as wide as one of its experts.",
        )


def _times(layer: Mapping[str, Any], reference: Reference | None) -> tuple[float, float] | None:
    total, active = layer.get("parameters_total"), layer.get("parameters_active")
    if reference is None or total is None or active is None:
        return None
    return total / reference.parameters, active / reference.parameters


def _range(values: list[float]) -> str:
    if not values:
        return NONE
    low, high = f"{min(values):.2f}x", f"{max(values):.2f}x"
    return low if low == high else f"{low} to {high}"


def _pick_window(moe: list[dict[str, Any]]) -> int | None:
    """How many of the last recorded steps colour the experts; None for a plain diagram."""
    if not moe:
        return None
    chosen = state.pick_option(
        "window",
        "Colour of the experts",
        [_PLAIN, *map(str, WINDOWS)],
        format_func=lambda text: "plain" if text == _PLAIN else f"load, {text} steps",
        help="Assignments of the last recorded training steps, summed, over the uniform share.",
    )
    return None if chosen == _PLAIN else int(chosen)


def _diagram(
    run: Run,
    model: Mapping[str, Any],
    layers: list[dict[str, Any]],
    moe: list[dict[str, Any]],
    window: int | None,
) -> None:
    loads, covered = (None, "") if window is None else _loads(run, moe, window)
    single = bool(moe) and max(int(layer["num_experts"]) for layer in moe) <= MAX_ROWS
    single = single and sum(int(layer["num_experts"]) for layer in moe) + len(layers) - len(moe) <= _CLICKABLE_EXPERTS
    said = "Layers from left to right: a dense one is a plain block, a MoE layer a column of experts."
    if loads is not None:
        said += " Look for purple cells (next to unused) and red ones (overloaded)."
    if moe:
        said += f" Click {'an expert' if single else 'the mark above a layer'} to open it in Replay."
    st.caption(said)
    figure = model_map(
        layers,
        title=f"Layers and experts{covered}",
        theme=charts.theme(),
        load_by_layer=loads,
        d_model=model.get("d_model"),
        clickable=single,
    )
    clicked = charts.show(
        figure,
        key="layout_map",
        alt=f"Diagram of the layers and their experts: {title_of(model)}{covered}.",
        selectable=bool(moe),
    )
    keys = {key_of(layer) for layer in moe}
    for point in clicked:
        key, expert = (int(item) for item in point["customdata"][:2])
        if key in keys:
            navigation.go("replay", layer=key, expert=expert if expert >= 0 else None)


def _loads(run: Run, moe: list[dict[str, Any]], window: int) -> tuple[dict[int, np.ndarray], str]:
    """Summed loads by the key of the router, and the steps they cover in words."""
    loads: dict[int, np.ndarray] = {}
    first, last = [], []
    for key in dict.fromkeys(key_of(layer) for layer in moe):
        stats = data.layer_stats(run, key)
        if stats.steps_S.size:
            loads[key] = metrics.window_load(stats.load_SE, window)
            first.append(int(stats.steps_S[-window:][0]))
            last.append(int(stats.steps_S[-1]))
    if not loads:
        return loads, ", no load recorded while training"
    return loads, f", load of steps {min(first):,} to {max(last):,}"


def _dense_comparison(layers: list[dict[str, Any]], references: Sequence[Reference | None]) -> None:
    known = [
        (layer, reference.parameters)
        for layer, reference in zip(layers, references, strict=True)
        if reference is not None and None not in (layer.get("parameters_total"), layer.get("parameters_active"))
    ]
    if not any(is_moe(layer) for layer, _ in known):
        if any(map(is_moe, layers)):
            st.caption(
                "What one expert holds does not follow from the manifest, so the MoE layers are not set beside a dense "
                "network."
            )
        return
    st.caption(
        f"Each MoE layer beside one dense feed-forward network as wide as one of its experts "
        f"({_widths(layers, references)}); "
        "a dense layer stands beside itself. Look at the gap between active and total: parameters that a token "
        "does not pay for."
    )
    charts.show(
        parameter_bars(
            [layer for layer, _ in known],
            [parameters for _, parameters in known],
            title="Parameters beside a dense layer of an expert's width",
            theme=charts.theme(),
        ),
        key="layout_dense",
        alt="Bars for each layer: a dense network of the same width, the layer's active and its total parameters.",
    )
    own = {layer["parameters_total"] for layer in layers if not is_moe(layer) and layer.get("parameters_total")}
    single = {parameters for layer, parameters in known if is_moe(layer)}
    if own and own != single:
        st.caption(
            "The model's own dense layers have another width: their feed-forward part holds "
            + " or ".join(f"{size:,}" for size in sorted(own))
            + " parameters. The table below sets each MoE layer beside the first of them too."
        )


def _widths(layers: list[dict[str, Any]], references: Sequence[Reference | None]) -> str:
    found = {one for layer, one in zip(layers, references, strict=True) if is_moe(layer) and one is not None}

    def words(one: Reference) -> str:
        width = None if one.width is None else f"width {one.width:,}"
        activation = None if one.activation is None else plain(one.activation)
        return ", ".join(part for part in (width, activation, f"{one.parameters:,} parameters") if part)

    return "; ".join(words(one) for one in sorted(found, key=lambda one: one.parameters))


def _whole_model(run: Run, model: Mapping[str, Any]) -> None:
    total, active = model.get("parameters_total"), model.get("parameters_active")
    if total and active is not None and active <= total:
        split = Split(name=run.name, active=active, total=total)
        charts.show(
            parameter_split([split], title="All parameters, and those that one token uses", theme=charts.theme()),
            key="layout_split",
            alt=f"{active:,} of {total:,} parameters are active for a token.",
        )
    st.caption(
        "Three ways to count are in use; the figures on top are of the first. "
        "Active replaces all routed experts by the top-k that a token uses."
    )
    frame, note = conventions(model)
    charts.table(frame, key="layout_conventions", columns=_formats(frame) | {"active (%)": _ONE_DECIMAL})
    if note:
        st.caption(note)
    report = run_report(run.manifest, CONTEXT)
    if report["flops_per_token"] is not None:
        st.caption(
            f"One token forward, attending to {CONTEXT:,} tokens: {report['flops_per_token']:,} FLOPs. It adds "
            f"{report['cache_bytes_per_token']:,} bytes to the key-value cache, and all weights take "
            f"{report['weight_bytes']['bfloat16']:,} bytes (both in bfloat16)."
        )
    st.download_button(
        "Save as JSON",
        data=json.dumps(report, indent=2, allow_nan=False).encode(),
        file_name="layout.json",
        mime="application/json",
        key="layout_run_json",
        icon=":material/download:",
        on_click="ignore",
    )


def conventions(model: Mapping[str, Any]) -> tuple[pd.DataFrame, str]:
    """Total and active parameters under the three conventions, and a sentence on what could not be told."""
    total, active = model.get("parameters_total"), model.get("parameters_active")
    embedding, both = embeddings_of(model)
    outside = outside_layers(model)
    if embedding is None:
        note = "The manifest names no vocabulary: the model has no embeddings, or they cannot be told apart."
    elif both is None:
        note = "The manifest does not tell whether input and output share one embedding."
    else:
        note = (
            f"Input embedding: {model['vocab_size']:,} x {model['d_model']:,} = {embedding:,}. "
            f"Outside the layers stand {outside:,} parameters, "
        )
        note += (
            "too few for a second one: input and output share it."
            if both == embedding
            else "enough for two of them: the output has an embedding of its own."
        )
    rows = []
    for key, less in zip(CONVENTIONS, (0, embedding, both), strict=True):
        name = CONVENTIONS[key] + (", embeddings included" if key == "all" else "")
        of_total = None if total is None or less is None else total - less
        of_active = None if active is None or less is None else active - less
        share = 100 * of_active / of_total if of_total and of_active is not None else None
        rows.append({"convention": name, "total": of_total, "active": of_active, "active (%)": share})
    return pd.DataFrame(rows).astype({"total": "Int64", "active": "Int64", "active (%)": "Float64"}), note


def layer_table(
    model: Mapping[str, Any], layers: list[dict[str, Any]], references: Sequence[Reference | None]
) -> pd.DataFrame:
    """A row a layer. Router, experts and shared only where they add up to the manifest's total."""
    own = next(
        (layer["parameters_total"] for layer in layers if not is_moe(layer) and layer.get("parameters_total")), None
    )
    rows = []
    for layer, reference in zip(layers, references, strict=True):
        times = _times(layer, reference) if is_moe(layer) else None
        parts = _parts(model, layer)
        total, active = layer.get("parameters_total"), layer.get("parameters_active")
        rows.append(
            {
                "layer": label_of(layer),
                "kind": "MoE" if is_moe(layer) else "dense",
                "total": total,
                "active": active,
                "x dense, total": None if times is None else times[0],
                "x dense, active": None if times is None else times[1],
                "x own dense layer, total": total / own if own and total and is_moe(layer) else None,
                "x own dense layer, active": active / own if own and active and is_moe(layer) else None,
                "experts": layer.get("num_experts"),
                "top k": layer.get("top_k"),
                "shared experts": layer.get("num_shared_experts"),
                "width": layer.get("expert_d_ff") if is_moe(layer) else layer.get("d_ff"),
                "router": parts[0],
                "routed experts": parts[1],
                "shared": parts[2],
            }
        )
    frame = pd.DataFrame(rows)
    words = ("kind", "layer") if any(isinstance(label, str) for label in frame["layer"]) else ("kind",)
    frame = frame.astype(dict.fromkeys(words, "str"))
    whole = [name for name in frame.columns if name not in words and not name.startswith("x ")]
    times_ = [name for name in frame.columns if name.startswith("x ")]
    frame = frame.astype(dict.fromkeys(whole, "Int64") | dict.fromkeys(times_, "Float64"))
    if own is not None and frame["x dense, total"].equals(frame["x own dense layer, total"]):
        frame = frame.drop(columns=["x own dense layer, total", "x own dense layer, active"])
    return frame.drop(columns=[name for name in times_ if name in frame and frame[name].isna().all()])


def _formats(frame: pd.DataFrame) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in map(str, frame.columns):
        if name.startswith("x "):
            other = "the model's own first dense layer" if "own" in name else "a dense network as wide as one expert"
            columns[name] = st.column_config.NumberColumn(
                format="%.2f", help=f"Parameters of this layer over those of {other}."
            )
        elif frame[name].dtype == "Int64":
            columns[name] = st.column_config.NumberColumn(format="localized")
    return columns


def _parts(model: Mapping[str, Any], layer: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    if not is_moe(layer):
        return None, None, None
    width = layer.get("expert_d_ff")
    try:
        ffn = MoEFFN(
            num_experts=layer["num_experts"],
            top_k=layer["top_k"],
            expert_d_ff=width,  # type: ignore[arg-type]
            shared_d_ff=(layer.get("num_shared_experts") or 0) * width,  # type: ignore[operator]
            activation=layer["activation"],
            latent_size=layer.get("latent_size"),
        )
        parts = ffn.components(model["d_model"])
    except (ValueError, KeyError, TypeError):
        return None, None, None
    # A layer of another build (biases, no norm) does not add up: say nothing rather than something wrong.
    counted = sum(parts.values(), Count())
    if (counted.total, counted.active) != (layer.get("parameters_total"), layer.get("parameters_active")):
        return None, None, None
    return parts["router"].total, parts["routed"].total, parts["shared"].total
