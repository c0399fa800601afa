"""The explanation below the picture: one section a stage, a formula, a sentence, and the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from app import charts
from app.lab import controls, frames, logit_table, steps
from app.lab.lab import Lab
from app.lab.run import Outcome
from app.words import NONE, count, percent, value

_MOST_ROWS = 64  # of a batch's table; the browser is not sent a thousand equal rows
_FOUR = st.column_config.NumberColumn(format="%.4f")


def given(lab: Lab) -> None:
    """The table of logits, and sliders for one logit and for the bias."""
    st.subheader("1. The router's logits", anchor=False)
    st.write(
        "A router is one matrix: it gives each token a number for each expert, its **logit**. The higher, the better "
        "the expert suits. Type other numbers into the table, or move one with the slider. The address of this page "
        "holds all of it: the table, the bias and every setting."
    )
    logit_table.table(lab)
    logit_table.one_logit(lab)


def one_token(lab: Lab, outcome: Outcome, ranking: steps.Ranking) -> None:
    """One token from its logits to its weights, a row a stage."""
    token, settings = lab.settings.spot_token, lab.settings
    st.subheader(f"2. Token {token}, from logits to weights", anchor=False)
    st.write(_followed_in_words(lab, outcome))
    st.latex(_score_formula(lab))
    frame = frames.as_text(frames.followed(outcome, ranking, settings, token))
    right = st.column_config.TextColumn(alignment="right")
    charts.table(frame, key="lab_token", columns=dict.fromkeys(map(str, frame.columns[2:]), right))


def all_tokens(lab: Lab, outcome: Outcome, ranking: steps.Ranking) -> None:
    """The same for the whole batch: scores, what was ranked, and every assignment's weight."""
    st.subheader("3. Every token: scores, ranking, weights", anchor=False)
    settings = lab.settings
    names = ["Scores", "What is ranked", "Weights", *["Noise"] * (outcome.noisy_TE is not None)]
    tabs = dict(zip(names, st.tabs(names), strict=True))
    with tabs["Scores"]:
        st.write("Before noise and bias: what the losses see.")
        _table(frames.by_expert(outcome.scores_TE, sum=outcome.scores_TE.sum(-1)), "lab_scores")
    with tabs["What is ranked"]:
        _ranked(lab, outcome, ranking)
    with tabs["Weights"]:
        st.write("How the outputs of the chosen experts are mixed. " + _weights_in_words(lab))
        _table(frames.assignments(outcome), "lab_weights")
    if outcome.noisy_TE is not None:
        with tabs["Noise"]:
            st.write(
                f"Logits with normal noise of standard deviation {value(settings.noise_std)}, as in training. "
                "Selection and weights see it, losses do not."
            )
            _table(frames.by_expert(outcome.noisy_TE), "lab_noisy")


def bias(lab: Lab, outcome: Outcome) -> None:
    """Sliders of the selection bias, and what it changed."""
    st.subheader("4. The bias moves the choice, never the weight", anchor=False)
    if lab.settings.router == "expert-choice":
        st.write("Under expert choice the load is even by construction, and a bias would change no expert's own list.")
        return
    changed = "No bias is set. Raise one and watch the frames in the picture move."
    if outcome.rerouted is not None:
        total = int(outcome.load_E.sum())
        changed = f"It changed {outcome.rerouted:,} of {count(total, 'choice')} here."
    st.write(
        "The balancer's handle: a number for each expert, added to the scores when experts are ranked. "
        f"{changed} Weights still come from the scores alone, so the bias does not distort what the model computes."
    )
    controls.bias(lab)


def load(lab: Lab, outcome: Outcome) -> None:
    """Load, max violation and capacity."""
    st.subheader("5. Load and capacity", anchor=False)
    k, E, T = lab.settings.top_k, lab.batch.num_experts, outcome.num_routed
    uniform = T * k / E
    st.write(
        f"The **load** counts assignments. Even use would give each expert T k / E = {T:,} x {k} / {E} = "
        f"{value(uniform)}. Max violation says how far the busiest is above that."
    )
    st.latex(r"\text{MaxVio} = \frac{\max_e c_e}{\frac{1}{E}\sum_e c_e} - 1 \;\le\; \frac{E}{k} - 1")
    fine = st.column_config.NumberColumn(format="%.5f")  # a step of the sign rule is small
    ratios = dict.fromkeys(["load / uniform", "load / uniform after"], _FOUR)
    _table(frames.loads(outcome), "lab_load", {**ratios, "bias": fine, "new bias": fine})
    left, right = st.columns([1, 2], gap="large")
    with left:
        controls.capacity(lab)
    with right:
        st.write(_capacity_in_words(lab, outcome))
    if outcome.capacity is not None:
        s = lab.settings
        st.latex(
            r"\text{capacity} = \min(\max(\lceil T k / E \cdot \text{factor} \rceil,\ \text{smallest}),\ T)"
            rf" = \min(\max(\lceil {uniform * s.capacity_factor:.4g} \rceil, {s.min_capacity}), {T}) "
            rf"= {outcome.capacity}"
        )


def losses(lab: Lab, outcome: Outcome) -> None:
    """The aux loss as f, P and their product, and the z-loss token by token."""
    st.subheader("6. Two losses that see the imbalance", anchor=False)
    left, right = st.columns(2, gap="large")
    s = lab.settings
    with left:
        st.write(
            f"**Aux loss = {value(outcome.aux_loss, 4)}**, and 1 for an even load. f is an expert's share of the "
            "assignments, P its mean probability; where both are high, the loss is."
            + (" Soft: P stands in for f." if s.balancer.startswith("soft") else "")
            + _level_in_words(lab, outcome)
        )
        st.latex(r"L = E \sum_e f_e P_e, \;\; f_e = \frac{c_e}{T k}, \;\; P_e = \frac1T \sum_t p_{t,e}")
        _table(frames.shares(outcome, s), "lab_aux")
    with right:
        st.write(
            f"**Z-loss = {value(outcome.z_loss, 4)}**: the mean of the last column. It keeps logits small, so that "
            "float arithmetic stays exact; it does not balance by itself."
        )
        st.latex(r"L_z = \frac1T \sum_t \Big( \ln \sum_e e^{z_{t,e}} \Big)^2")
        _table(frames.z_terms(outcome), "lab_z")


def update(lab: Lab, outcome: Outcome) -> None:
    """What the balancer makes of this batch, step by step."""
    s = lab.settings
    heading = {"none": "No balancer: nothing is updated", "sign-bias": "The sign rule", "quantile": "The quantile rule"}
    st.subheader(f"7. {heading.get(s.balancer, 'The loss pushes the logits')}", anchor=False)
    if s.balancer == "none":
        st.write("Choose a balancer above to see what it would do with this batch.")
    elif s.balancer == "sign-bias":
        _sign(lab, outcome)
    elif s.balancer == "quantile":
        _quantile(lab, outcome)
    else:
        _gradient(lab, outcome)


def _sign(lab: Lab, outcome: Outcome) -> None:
    st.write(
        "After each optimizer step the bias of an expert with less than the mean count rises by the rate, that of one "
        "with more falls by it. How much more does not matter: a collapse takes many steps, and near a tie one step "
        "can tip the load over to the other side. " + _pending(lab, outcome)
    )
    st.latex(
        r"\delta_e = \gamma \, \operatorname{sign}(\bar c - c_e), \qquad b_e \leftarrow b_e + \delta_e - \bar\delta"
    )
    frame = frames.sign_steps(outcome, lab.settings)
    decimals = max(5, int(np.ceil(-np.log10(max(lab.settings.bias_rate, 1e-9)))) + 2)
    fine = st.column_config.NumberColumn(format=f"%.{min(decimals, 9)}f")
    charts.table(frame, key="lab_sign", columns=dict.fromkeys(["delta", "delta - mean", "bias", "new bias"], fine))


def _quantile(lab: Lab, outcome: Outcome) -> None:
    found, gaps = frames.quantile_steps(outcome, lab.settings), frames.gaps(outcome, lab.settings)
    update = steps.quantile_update(outcome, lab.settings)
    if found is None or gaps is None or update is None:
        st.write("There is no token with a threshold in this batch, so the bias stays.")
        return
    k, E, n = lab.settings.top_k, lab.batch.num_experts, len(update.sorted_NE)
    st.write(
        "A token's threshold is its (k+1)-th highest corrected score: what an expert must beat to be chosen. The "
        "**gap** r is how much bias that would take. An expert should win k / E of the tokens, so its new bias is the "
        "gap that a share of k / E of the tokens stays at or below; the mean is taken off, since only differences "
        "matter. " + _pending(lab, outcome)
    )
    st.latex(
        r"r_{t,e} = \alpha_t - s_{t,e}, \qquad q_e = \text{quantile}_{k/E}(r_{\cdot,e}), \qquad b_e = q_e - \bar q"
    )
    by_token, in_order = st.tabs(["Gaps by token", "Gaps in order"])
    with by_token:
        _table(gaps, "lab_gaps")
    with in_order:
        _table(frames.gaps_in_order(update), "lab_gaps_in_order")
    bins = ""
    if update.bin_E is not None:
        bins = f", of which the histogram with {lab.settings.num_bins:,} bins keeps the middle of its bin"
    st.write(
        f"Of an expert's {n:,} gaps in ascending order the quantile is number 1 + ceil({k} x {n - 1:,} / {E}) = "
        f"{update.rank + 1:,}{bins}. Mean of the quantiles: {value(update.mean, 4)}."
    )
    _table(found, "lab_quantile")


def _gradient(lab: Lab, outcome: Outcome) -> None:
    what = "z-loss" if lab.settings.balancer == "z" else "aux loss"
    coefficient = lab.settings.z_coef if lab.settings.balancer == "z" else lab.settings.aux_coef
    st.write(
        f"The {what} adds {value(coefficient)} x {value(_unit(lab, outcome), 4)} = {value(outcome.loss, 4)} to the "
        "training loss, and acts through its gradient: a positive number below pushes that logit down. *Apply the "
        f"update* takes {value(lab.settings.push)} times the gradient off the logits, as a stand-in for the router's "
        "weights." + ("" if lab.is_editable else " This batch is too large to be moved by hand.")
    )
    st.latex(r"z_{t,e} \leftarrow z_{t,e} - \eta \, \frac{\partial L}{\partial z_{t,e}}")
    if outcome.gradient_TE is not None:
        frame = frames.by_expert(outcome.gradient_TE)
        fine = st.column_config.NumberColumn(format="%.6f")
        _table(frame, "lab_gradient", dict.fromkeys(map(str, frame.columns[1:]), fine))


# ------------------------------------------------------------------------------------------------ words


def _followed_in_words(lab: Lab, outcome: Outcome) -> str:
    token = lab.settings.spot_token
    which = "Another token can be chosen below the table of logits."
    if not lab.batch.mask_T[token]:
        return f"Token {token} is padding: it takes no expert and is counted nowhere. {which}"
    if outcome.invalid_T[token]:
        return (
            f"Token {token} cannot be routed: its logits hold NaN or infinity, or too few finite numbers. It gets no "
            f"expert, and its row is counted apart. {which}"
        )
    ids = [int(expert) for expert in outcome.expert_ids_TK[token] if expert >= 0]
    if not ids:
        return f"No expert takes token {token}: it passes by the layer. {which}"
    weights = [value(float(weight)) for weight in outcome.weights_TK[token][: len(ids)]]
    told = ", then ".join(f"expert {expert} (weight {weight})" for expert, weight in zip(ids, weights, strict=True))
    threshold = ""
    if outcome.threshold_T is not None:
        threshold = (
            f" The next best expert's corrected score, the threshold, is {value(float(outcome.threshold_T[token]))}."
        )
    return f"It goes to {told}.{threshold} {which}"


def _score_formula(lab: Lab) -> str:
    router, k = lab.settings.router, lab.settings.top_k
    scores = r"s_e = \frac{e^{z_e}}{\sum_j e^{z_j}}"
    chosen = rf"\text{{chosen}} = \text{{the {k} highest of }} s_e + b_e"
    weight = r"g_e = s_e"
    if router == "softmax-after":
        return (
            rf"\text{{chosen}} = \text{{the {k} highest of }} z_e + b_e, \qquad "
            r"g_e = \frac{e^{z_e}}{\sum_{j\ \text{chosen}} e^{z_j}}"
        )
    if router == "expert-choice":
        taken = r"\text{each expert takes its } \lceil T k / E \rceil \text{ best tokens}"
        return rf"{scores}, \qquad {taken}, \qquad g_e = s_e"
    if router == "sigmoid":
        scores = r"s_e = \frac{1}{1 + e^{-z_e}}"
    if lab.settings.renormalizes:
        weight = r"g_e = \frac{s_e}{\sum_{j\ \text{chosen}} s_j}"
    if lab.settings.scaling != 1:
        weight += rf" \cdot {lab.settings.scaling:g}"
    return rf"{scores}, \qquad {chosen}, \qquad {weight}"


def _weights_in_words(lab: Lab) -> str:
    settings = lab.settings
    if settings.router == "softmax-after":
        said = "A softmax over the chosen logits alone."
    elif settings.renormalizes:
        said = "The chosen scores (raw) divided by their sum."
    else:
        said = "The chosen scores as they are."
    return said + (f" Then times {value(settings.scaling)}." if settings.scaling != 1 else "")


def _capacity_in_words(lab: Lab, outcome: Outcome) -> str:
    if outcome.capacity is None or outcome.dropped_E is None:
        return "No limit: every expert takes all it is given. Raise the factor to set one."
    dropped, total = int(outcome.dropped_E.sum()), int(outcome.load_E.sum())
    share = percent(dropped / total, 1) if total else NONE
    return (
        f"An expert takes at most {count(outcome.capacity, 'assignment')}. Dropped: {dropped:,} of {total:,}, {share}. "
        "A dropped one adds nothing to the output; its token passes by, and the load still counts it."
    )


def _ranked(lab: Lab, outcome: Outcome, ranking: steps.Ranking) -> None:
    settings = lab.settings
    if settings.router == "expert-choice":
        taken = steps.taken_by_each(outcome.num_routed, settings, lab.batch.num_experts)
        st.write(
            "**Each expert's own list**, 1 = its best token. It takes "
            f"ceil({outcome.num_routed:,} x {settings.top_k} / {lab.batch.num_experts}) = {taken:,}."
        )
        places_TE = np.where(outcome.routed_T[:, None], steps.rank_in_column(outcome.selection_TE), np.nan)
        _table(frames.by_expert(places_TE), "lab_ranked", {})
        return
    what = "Logits" if settings.router == "softmax-after" else "Scores"
    said = f"**{what} + bias**, which are ranked"
    more: dict[str, Any] = {}
    if outcome.threshold_T is not None:
        said += "; behind them the threshold, the (k+1)-th highest"
        more["threshold"] = np.where(outcome.routed_T, outcome.threshold_T, np.nan)
    if ranking.group_scores_TG is not None:
        best = "sum of its two best" if outcome.bias_E is not None else "best"
        said += f". A group's score is the {best}; experts outside the best {settings.top_groups} groups are out"
        more |= {f"group {group}": column for group, column in enumerate(ranking.group_scores_TG.T)}
    st.write(f"{said}.")
    ranked_TE = np.where(np.isfinite(ranking.corrected_TE), ranking.corrected_TE, np.nan)
    _table(frames.by_expert(ranked_TE, **more), "lab_ranked")


def _level_in_words(lab: Lab, outcome: Outcome) -> str:
    balancer = lab.settings.balancer
    if "sequence" in balancer:
        return (
            f" Here f and P are taken in each of {count(lab.settings.sequences, 'sequence')}, and the losses averaged."
        )
    if balancer == "global-aux":
        total = int(outcome.observed.count_E.sum())
        return f" Here f counts all {total:,} assignments since the last optimizer step."
    return ""


def _pending(lab: Lab, outcome: Outcome) -> str:
    """How much the next step goes by, where micro-batches have been taken in."""
    if not lab.settings.takes_micro_batches or not lab.state.is_between_steps:
        return ""
    if lab.settings.balancer == "quantile":
        batches = count(outcome.observed.num_updates, "micro-batch", "micro-batches")
        return f"The next step takes the mean of {batches}, this one included, so the new bias is not this one's alone."
    return f"The counts are of all {int(outcome.observed.count_E.sum()):,} assignments since the last step."


def _unit(lab: Lab, outcome: Outcome) -> float:
    return outcome.z_loss if lab.settings.balancer == "z" else outcome.aux_loss


def _table(frame: pd.DataFrame, key: str, columns: dict[str, Any] | None = None) -> None:
    """A table of at most the first rows, numbers with four decimals; NaN shows as "-"."""
    if columns is None:
        columns = {str(name): _FOUR for name in frame if frame[name].dtype.kind == "f"}
    if len(frame) > _MOST_ROWS:
        st.caption(f"The first {_MOST_ROWS} of {len(frame):,} rows.")
    charts.table(frame.head(_MOST_ROWS), key=key, columns=columns)
