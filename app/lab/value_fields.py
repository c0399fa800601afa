"""The fields of the popover *Set values*: what matters for the chosen router and balancer, and the batch's size."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app.lab.batch import Batch
from app.lab.choices import KEY, change, current, fill, set_value
from app.lab.lab import MOST_CELLS, Lab
from app.lab.settings import CHOICES, LIMITS, Settings, divisors

LABELS = {
    "renormalize": "Renormalise",
    "scaling": "Scaling factor",
    "num_groups": "Groups",
    "top_groups": "Groups a token uses",
    "noise_std": "Noise",
    "noise_seed": "Noise seed",
    "min_capacity": "Smallest capacity",
    "drop_policy": "Who stays",
    "aux_coef": "Aux coefficient",
    "z_coef": "Z coefficient",
    "bias_rate": "Bias rate",
    "method": "Quantile",
    "update": "Updated",
    "num_bins": "Bins",
    "push": "Step size",
    "sequences": "Sequences",
    "seed": "Seed",
    "skew": "Skew",
}
HELP = {
    "renormalize": "Divide a token's chosen weights by their sum, so that they add up to 1. Never with k = 1, where "
    "every weight would be 1 and the router would learn nothing.",
    "scaling": "Multiplies every weight, once, at the end (routed_scaling_factor).",
    "num_groups": "Experts stand in groups of neighbours, as DeepSeek places them on machines. 1 = no groups.",
    "top_groups": "A token chooses among the experts of its best groups only.",
    "noise_std": "Standard deviation of normal noise added to the logits in training. 0 = off.",
    "noise_seed": "The same seed draws the same noise.",
    "min_capacity": "An expert takes at least so many. Layers of moe_core use 4; with so few tokens 1 shows more.",
    "drop_policy": "position: first choices before second, earlier tokens first. probs: the highest weight.",
    "aux_coef": "Factor of the aux loss in the training loss.",
    "z_coef": "Factor of the z-loss in the training loss.",
    "bias_rate": "How far the sign rule moves a bias at each step.",
    "method": "exact: one of the gaps themselves. histogram: the middle of its bin, for batches spread over machines.",
    "update": "forward: the bias is new after every batch. step: once for each optimizer step, the mean over its "
    "micro-batches.",
    "num_bins": "Bins between an expert's smallest and largest gap.",
    "push": "How far *Apply the update* moves the logits: they lose this times the gradient of the loss. In a model "
    "the router's weights move instead, with the learning rate.",
    "sequences": "The rows are so many sequences of equal length, one after the other.",
    "seed": "The same seed draws the same batch.",
    "skew": "How unequally popular the experts are: standard deviation of an offset for each. 0 is equally.",
}


def fields(lab: Lab) -> None:
    """Draw the fields."""
    settings, batch = lab.settings, lab.batch
    for row in _rows(settings):
        for column, name in zip(st.columns(2, vertical_alignment="bottom"), row, strict=False):
            with column:
                _value(name, settings, batch)
    left, right = st.columns(2)
    for column, name, value in ((left, "tokens", batch.num_tokens), (right, "experts", batch.num_experts)):
        low, high = LIMITS[name]
        if not lab.is_drawn:  # every logit of a table typed by hand must fit into the URL
            high = min(high, MOST_CELLS * value // batch.logits_TE.size)
        fill(name, value)
        column.number_input(
            name.capitalize(),
            int(low),
            max(int(high), value),
            step=1,
            key=f"{KEY}{name}",
            on_change=_resize,
            args=(name,),
            help="Rows of the table." if name == "tokens" else "Columns of the table; the bias starts again at 0.",
            disabled=not (lab.is_drawn or lab.is_editable),
        )


def _rows(settings: Settings) -> list[tuple[str, ...]]:
    """The fields that matter for this router and balancer."""
    rows: list[tuple[str, ...]] = [("renormalize", "scaling")]
    if settings.router != "expert-choice":
        rows += [("num_groups", "top_groups"), ("noise_std", "noise_seed")]
    rows.append(("drop_policy", "min_capacity"))
    if "aux" in settings.balancer:
        rows.append(("aux_coef", "push"))
        if "sequence" in settings.balancer:
            rows.append(("sequences",))
    elif settings.balancer == "z":
        rows.append(("z_coef", "push"))
    elif settings.balancer == "sign-bias":
        rows.append(("bias_rate",))
    elif settings.balancer == "quantile":
        rows += [("update",), ("method", "num_bins")]
    return [*rows, ("seed", "skew")]


def _value(name: str, settings: Settings, batch: Batch) -> None:
    value = getattr(settings, name)
    common: dict[str, Any] = {"key": f"{KEY}{name}", "on_change": set_value, "args": (name,), "help": HELP[name]}
    lists: dict[str, list[Any]] = {
        **{field: list(words) for field, words in CHOICES.items()},
        "num_groups": divisors(batch.num_experts),
        "top_groups": list(range(1, settings.num_groups + 1)),
        "sequences": divisors(batch.num_tokens),
    }
    fill(name, value)
    if name in lists:
        st.selectbox(LABELS[name], lists[name], **common)
        return
    low, high = (type(value)(end) for end in LIMITS[name])
    step = {"aux_coef": 0.01, "z_coef": 0.001, "bias_rate": 0.001, "push": 10.0}.get(name, 0.1)
    digits = "%.3f" if name in ("aux_coef", "z_coef", "bias_rate") else None
    whole = isinstance(value, int)
    st.number_input(LABELS[name], low, high, step=1 if whole else step, format=digits, **common)


def _resize(name: str) -> None:
    lab, value = current(), st.session_state[f"{KEY}{name}"]
    if value is None:
        return
    redrawn = lab.with_settings(**{name: value})
    if getattr(redrawn.batch, f"num_{name}") == value:  # a random batch is drawn anew
        change(redrawn)
        return
    size = {"num_tokens": lab.batch.num_tokens, "num_experts": lab.batch.num_experts, f"num_{name}": value}
    change(lab.with_batch(lab.batch.resized(**size)))
