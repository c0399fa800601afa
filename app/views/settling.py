"""When routing settles: what the same tokens choose at each probe, against the last probe and the one before.

Shapes: P probes, T tokens of the probe.
"""

import numpy as np
import pandas as pd
import streamlit as st

from app import charts, data, glossary, layer_keys, navigation, settling, state
from app.figures.count_bars import count_bars
from app.figures.curves import metric_curves
from app.figures.inputs import Curve, ReferenceLine
from app.fragments import fragment
from app.text import plain
from app.views import empty
from app.words import count, percent, value
from recorder.reader import Run

MAX_MOVERS = 2000
MAX_CURVES = 7  # more layers, and all but the chosen one are drawn faintly
_SATURATION = "saturation: choices shared with the last probe"
_CHURN = "churn: choices changed since the probe before"


def render() -> None:
    """Draw the page."""
    head = st.container()
    run = empty.require_run(decisions=True)
    if run is None:
        head.title("Settling")
        return
    probes_P = data.decision_steps(run, "probe")
    if probes_P.size < 2:
        head.title("Settling")
        _too_few(run, probes_P)
        return
    saturation = {layer: data.of_run(run, "saturation", layer) for layer in layer_keys.keys(run)}
    saturation = {layer: one for layer, one in saturation.items() if len(one) > 1}
    if not saturation:
        head.title("Settling")
        st.info("No layer was recorded at two probes with the same tokens, so nothing can be compared.")
        return
    churn = {layer: data.of_run(run, "churn", layer) for layer in saturation}
    head.title(
        settling.headline(_named(run, saturation)),
        help=glossary.explain("saturation", f"{percent(settling.SETTLED)} or more at every later probe is settled."),
    )
    with head:
        st.caption(
            f"**{plain(run.name)}**: {count(probes_P.size, 'probe')}, steps {probes_P[0]:,} to {probes_P[-1]:,}. "
            "Look for where saturation levels off, and for churn that stays up: there the balancer or the learning "
            "rate still moves tokens about."
        )
    fragment(_of_one_layer)(run, saturation, churn)


def _of_one_layer(run: Run, saturation: dict[int, pd.Series], churn: dict[int, pd.Series]) -> None:
    layer = state.pick_layer(run, list(saturation))
    _curves(run, saturation, churn, layer)
    _movers(run, layer, saturation[layer].index.to_numpy(np.int64))


def _too_few(run: Run, probes_P: np.ndarray) -> None:
    there = "no probe" if not probes_P.size else f"only the probe at step {probes_P[0]:,}"
    st.info(f"This run recorded {there} with its decisions{empty.where_readable(run)}: settling takes two or more.")
    st.markdown("**What to do:** record with probes, one fixed batch every so many steps:")
    st.code("routescope record --probe-every 20 --steps 400", "bash")
    st.markdown('From your own code: `with recorder.step(step, phase="probe"): model(the_same_batch)`.')


def _curves(run: Run, saturation: dict[int, pd.Series], churn: dict[int, pd.Series], layer: int) -> None:
    many = len(saturation) > MAX_CURVES
    named = layer_keys.labels(run)
    curves = []
    for place, one in enumerate(saturation):
        for panel, series in ((_SATURATION, saturation[one]), (_CHURN, churn[one])):
            values_P = series.to_numpy(np.float64)
            other = many and one != layer
            curves.append(
                Curve(
                    name=f"layer {named[one]}",
                    group="other layers" if other else f"layer {named[one]}",
                    colour=1 if other else (0 if many else place),
                    steps_S=series.index.to_numpy(np.int64),
                    values_S=values_P,
                    null_S=np.isnan(values_P),
                    panel=panel,
                    style="thin" if other else "line",
                )
            )
    stats = data.layer_stats(run, layer, "probe")
    chance = stats.top_k / stats.num_experts if stats.num_experts else 0
    lines = [ReferenceLine(value=chance, label=f"chance, k/E = {value(chance)}", panel=_SATURATION)] if chance else []
    figure = metric_curves(
        curves,
        title=_curves_title(saturation[layer], churn[layer], named[layer]),
        y_title="share of choices",
        theme=charts.theme(),
        lines=lines,
        y_floor=0,
        note="Chance: what tokens would share that chose evenly and at random.",
    )
    charts.show(
        figure,
        key="settling",
        alt=f"Saturation and churn of each MoE layer of {run.name} by probe.",
        numbers=lambda: settling.curves_table(_named(run, saturation), _named(run, churn)),
    )


def _curves_title(saturation: pd.Series, churn: pd.Series, layer: layer_keys.Label) -> str:
    before_last = saturation.iloc[-2]
    said = f"Layer {layer}: {percent(saturation.iloc[0])} of the final choices at step {saturation.index[0]:,}, "
    said += f"{percent(before_last)} at step {saturation.index[-2]:,}"
    known = churn.dropna()
    if len(known) > 1:
        said += f"; churn {percent(known.iloc[0])} at first, {percent(known.iloc[-1])} at last"
    return said


def _movers(run: Run, layer: int, probes_P: np.ndarray) -> None:
    st.subheader(f"Which tokens of layer {layer_keys.label(run, layer)} moved last", anchor=False)
    fluctuation = data.of_run(run, "last_fluctuation", layer)
    if not len(fluctuation):
        st.caption("No token of the last probe has a choice in this layer.")
        return
    st.caption(
        "Each token of the probe by its last probe whose first choice was not the final one (StableMoE 2204.08396). "
        "Bars far to the right are tokens that kept moving until the end."
    )
    moves = settling.moves_table(fluctuation, probes_P)
    late = moves.iloc[len(moves) // 2 + 1 :]
    title = f"{moves['tokens'].iloc[0]:,} of {count(len(fluctuation), 'token')} never had another first choice"
    if len(late):
        name = "last probe with another first choice"
        title += f"; {late['tokens'].sum():,} still had one at step {late[name].iloc[0]} or later"
    figure = count_bars(
        moves.iloc[:, 0].tolist(),
        moves["tokens"].tolist(),
        title=title,
        x_title="last probe with another first choice (step)",
        y_title="tokens",
        theme=charts.theme(),
    )
    charts.show(
        figure,
        key="fluctuation",
        alt=f"Tokens of layer {layer_keys.label(run, layer)} by the last probe they moved at.",
        numbers=lambda: moves,
    )
    last = int(probes_P[-1])
    movers = settling.last_movers(fluctuation, data.tokens(run, last, "probe"), most=MAX_MOVERS)
    if not len(movers):
        st.caption("Every token chose its final expert first at every probe.")
        return
    total = int(fluctuation["last_fluctuation"].notna().sum())
    shown = f"The last {MAX_MOVERS:,} of {total:,} that moved" if total > MAX_MOVERS else f"All {total:,} that moved"
    st.caption(f"{shown}, latest first.")
    charts.table(movers, key="movers")
    if st.button("See the last probe's tokens", key="settling_tokens", icon=":material/text_fields:"):
        navigation.go("tokens", layer=layer, phase="probe", step=last)


def _named(run: Run, by_key: dict[int, pd.Series]) -> dict[layer_keys.Label, pd.Series]:
    named = layer_keys.labels(run)
    return {named[key]: series for key, series in by_key.items()}
