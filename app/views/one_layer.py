"""How a page about all recorded decisions of one layer begins: its run, layer and phase, or why there is nothing."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import streamlit as st

from app import data, layer_keys, state
from app.views import empty
from recorder.reader import Run


@dataclass(frozen=True, kw_only=True)
class OneLayer:
    """What such a page is about.

    head    the place above the choices, for the title and its caption
    layer   a key of `app.layer_keys`
    load_E  assignments per expert in all of the layer's recorded decisions of the phase, not all 0
    """

    head: Any
    run: Run
    layer: int
    phase: str
    load_E: np.ndarray


def choose(title: str, *, unknown: str) -> OneLayer | None:
    """Draw the choices of layer and phase; None after drawing why the page is empty.

    title    the page's, where it is empty
    unknown  what nobody can tell of a run without single decisions
    """
    head = st.container()
    run = empty.require_run(decisions=True)
    if run is None:
        head.title(title)
        return None
    phases = [phase for phase in data.phases(run) if data.decision_steps(run, phase).size]
    if not phases:
        head.title(title)
        st.info(
            f"This run recorded no single decisions{empty.where_readable(run)}, so nobody can tell which {unknown}."
        )
        st.markdown("**What to do:** record the decisions of every tenth step:")
        st.code("routescope record --decisions-every 10 --steps 400", "bash")
        return None
    with st.container(horizontal=True, gap="large"):
        layer = state.pick_layer(run)
        phase = state.pick_phase(phases)
    load_E = data.load_of_decisions(run, layer, phase)
    if not load_E.sum():
        head.title(title)
        st.info(f"No decision of layer {layer_keys.label(run, layer)} was recorded in phase {phase}.")
        return None
    return OneLayer(head=head, run=run, layer=layer, phase=phase, load_E=load_E)
