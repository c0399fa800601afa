"""Compare: what each run comes to in numbers, and which is better where that is defined."""

from collections.abc import Sequence

import streamlit as st

from app import charts, comparison_metrics, comparison_tables
from app.comparison import STRETCHES, Compared, Window, layer_label
from app.comparison_metrics import METRICS, Measured
from app.text import plain
from app.words import listed

_COLUMNS = {
    "metric": st.column_config.Column(pinned=True),
    "better": st.column_config.Column(width="medium"),
    "noise up to": st.column_config.Column(help="Half the 95% interval of the difference; a smaller one is noise."),
}


def metrics(compared: Sequence[Compared], found: Sequence[Measured], layer: int, window: Window) -> None:
    """The metric table of one layer, and one of every layer."""
    st.subheader(
        f"Metrics of layer {layer_label(compared, layer)}",
        anchor=False,
        help="Better is marked only where the runs can be compared: at steps they share; the loss where text and "
        "tokens and active parameters are the same; balance where experts and top-k are the same. Router entropy and "
        f"aux loss have no better side. How noise is judged: the window is cut into {STRETCHES} stretches, and the "
        "difference is taken without each of them in turn (a jackknife); where the 95% interval of the difference "
        "(Student's t) holds zero, the runs are equal within noise. That is the noise of the steps; one run of each "
        "says nothing on how much another seed would change: for that, group several seeds below.",
    )
    st.caption(
        f"Over {window.words}. Aux losses are computed from load and mean_prob for every run, whether it was trained "
        "on one or not, so that uniform reads 1."
    )
    charts.table(comparison_tables.table(compared, found, layer, window), key="compare_metrics", columns=_COLUMNS)
    _say_why_not(compared, found, layer, window)
    if max(len(one.layers) for one in compared) > 1:
        charts.table_to_open(
            lambda: comparison_tables.every_layer(compared, found), key="compare_layers", label="Every layer"
        )


def _say_why_not(compared: Sequence[Compared], found: Sequence[Measured], layer: int, window: Window) -> None:
    """Why no run is called better in metrics that have a better side."""
    reasons: dict[str, list[str]] = {}
    for metric in METRICS:
        reason = comparison_metrics.no_better(metric, compared, layer, window)
        recorded = any(one.value(metric, layer) is not None for one in found)
        if reason is not None and metric.better is not None and recorded:
            reasons.setdefault(reason, []).append(metric.name)
    if not reasons and window.shared and not window.stretches:
        reasons[f"fewer than {STRETCHES} shared steps, too few to tell a difference from noise"] = ["any metric"]
    said = "; ".join(f"{listed(names)} ({reason})" for reason, names in reasons.items())
    if said:
        st.caption(f"Not called better: {plain(said)}.")
