"""The controls of the Routing lab: the row above the picture, the buttons below it, sliders of bias and capacity.

Every change is a new `Lab`, kept in the URL, and can be undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import streamlit as st

from app.lab import choices, run, value_fields
from app.lab.choices import KEY, change, current, fill, set_value, slider
from app.lab.lab import Lab
from app.lab.presets import PRESETS, RANDOM
from app.lab.settings import BALANCERS, LIMITS, ROUTERS

_MOST_SLIDERS = 16  # experts with a slider each for the bias


def head(lab: Lab) -> None:
    """The row above the picture: preset, router, k, balancer, and the rest in a popover."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        fill("preset", lab.preset)
        st.selectbox(
            "Begin with",
            list(PRESETS),
            format_func=lambda name: PRESETS[name].label,
            key=f"{KEY}preset",
            on_change=_take_preset,
            width=185,
        )
        _pick("router", "Router", ROUTERS, lab, width=165, help=_ROUTER_HELP)
        with st.container(width=105):
            slider("top_k", "Top-k", 1, lab.batch.num_experts, 1, lab.settings.top_k)
        _pick("balancer", "Balancer", BALANCERS, lab, width=175, help=_BALANCER_HELP)
        with st.popover("Values", icon=":material/tune:", width="content"):
            value_fields.fields(lab)


_ROUTER_HELP = (
    "How logits become scores and weights, and in which order. Softmax scores of a token add up to 1; sigmoid scores "
    "each expert on its own. Under expert choice the experts pick their tokens."
)
_BALANCER_HELP = (
    "What keeps the load even: a loss that pushes the router, or a bias that changes the choice alone. By sequence: f "
    "and P are taken in each sequence. Whole step: f counts every micro-batch since the last optimizer step. Soft: P "
    "in place of f."
)


def actions(lab: Lab, *, can_apply: bool) -> None:
    """The buttons: apply the update, once or many times; take in a micro-batch; draw, undo, reset."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        for times in (1, 10, 100):
            st.button(
                "Apply the update" if times == 1 else f"{times} times",
                key=f"{KEY}apply_{times}",
                type="primary" if times == 1 else "secondary",
                icon=":material/update:" if times == 1 else None,
                on_click=_apply,
                args=(times,),
                disabled=not can_apply,
            )
        if lab.settings.takes_micro_batches:
            st.button(
                "Take in as a micro-batch",
                key=f"{KEY}take_in",
                on_click=_take_in,
                disabled=not can_apply,
                help="Count this batch towards the optimizer step without taking the step.",
            )
        st.button("Random batch", key=f"{KEY}random", icon=":material/casino:", on_click=_draw_random)
        st.button(
            "Undo",
            key=f"{KEY}undo",
            icon=":material/undo:",
            on_click=choices.undo,
            disabled=not choices.can_undo(),
        )
        st.button("Reset", key=f"{KEY}reset", icon=":material/restart_alt:", on_click=_reset)


def bias(lab: Lab) -> None:
    """A slider for each expert's selection bias."""
    bias_E = lab.state.bias_E
    if len(bias_E) > _MOST_SLIDERS:
        st.caption(f"With {len(bias_E)} experts there is no room for a slider each; up to {_MOST_SLIDERS} get one.")
        return
    widest = max(1.0, float(np.ceil(np.abs(bias_E).max())))
    for first in range(0, len(bias_E), 8):
        for expert, column in zip(range(first, min(first + 8, len(bias_E))), st.columns(8), strict=False):
            with column:
                slider(
                    f"bias_{expert}",
                    f"Expert {expert}",
                    -widest,
                    widest,
                    0.01,
                    round(float(bias_E[expert]), 4),
                    store=_set_bias,
                    args=(expert,),
                    format="%.3f",
                )


def capacity(lab: Lab) -> None:
    """A slider for the capacity factor."""
    low, high = LIMITS["capacity_factor"]
    slider(
        "capacity_factor",
        "Capacity factor (0 = no limit)",
        low,
        high,
        0.05,
        lab.settings.capacity_factor,
        format="%.2f",
    )


def _pick(name: str, label: str, words: Mapping[str, str], lab: Lab, *, width: int, help: str) -> None:
    fill(name, getattr(lab.settings, name))
    st.selectbox(
        label,
        list(words),
        format_func=lambda key: words[key],
        key=f"{KEY}{name}",
        on_change=set_value,
        args=(name,),
        width=width,
        help=help,
    )


def _set_bias(expert: int) -> None:
    change(current().with_bias(expert, st.session_state[f"{KEY}bias_{expert}"]))


def _take_preset() -> None:
    change(Lab.of(st.session_state[f"{KEY}preset"]))


def _apply(times: int) -> None:
    change(run.advance(current(), times))


def _take_in() -> None:
    change(run.take_in(current()))


def _draw_random() -> None:
    """Widget callback: a random batch under the settings at hand, of the same size unless that is a large one."""
    lab = current()
    size = (lab.batch.num_tokens, lab.batch.num_experts)
    if not (lab.is_editable or lab.is_drawn):
        size = (PRESETS[RANDOM].settings.tokens, PRESETS[RANDOM].settings.experts)
    seed = (lab.settings.seed + 1) % 10_000 if lab.preset == RANDOM else lab.settings.seed
    change(Lab.of(RANDOM, replace(lab.settings, seed=seed, tokens=size[0], experts=size[1])))


def _reset() -> None:
    change(Lab.of(current().preset))
