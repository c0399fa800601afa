"""The numbers between moe_core's results, by the formulas that the page writes beside them. Numpy only.

Shapes: T tokens, E experts, K choices a token, R ranked choices (K + 1 where there is one more), G groups,
B sequences, N tokens that count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.lab.run import Outcome
from app.lab.settings import Settings

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    """How selection ranks the experts of each token.

    corrected_TE: scores + bias, -inf where an expert is out (its group lost, or its logit is -inf), NaN in rows
    without a route. group_scores_TG: None without groups. order_TR: the first k + 1 experts, best first, -1 in rows
    without a route.
    """

    corrected_TE: NDArray[np.float32]
    group_scores_TG: NDArray[np.float32] | None
    order_TR: NDArray[np.int64]


def ranking(outcome: Outcome, settings: Settings) -> Ranking:
    """Selection by hand: add the bias, drop the lost groups, sort; equal values in the order of their ids."""
    corrected_TE = outcome.selection_TE
    if outcome.bias_E is not None:
        corrected_TE = corrected_TE + outcome.bias_E
    group_scores_TG = None
    if settings.top_groups < settings.num_groups:
        corrected_TGM = corrected_TE.reshape(len(corrected_TE), settings.num_groups, -1)
        counted = 1 if outcome.bias_E is None else 2
        group_scores_TG = np.sort(corrected_TGM, axis=-1)[..., -counted:].sum(-1)
        lost_TG = np.ones_like(group_scores_TG, dtype=bool)
        np.put_along_axis(lost_TG, _descending(group_scores_TG)[:, : settings.top_groups], False, axis=-1)
        corrected_TE = np.where(lost_TG[..., None], -np.inf, corrected_TGM).reshape(corrected_TE.shape)
        corrected_TE[~outcome.routed_T] = np.nan
    order_TR = _descending(corrected_TE)[:, : settings.top_k + 1]
    order_TR[~outcome.routed_T] = -1
    return Ranking(corrected_TE=corrected_TE, group_scores_TG=group_scores_TG, order_TR=order_TR)


def rank_in_column(values_TE: NDArray[np.float32]) -> NDArray[np.int64]:
    """Each token's place in its expert's own list, 1 = first (expert choice); NaN comes last."""
    return _places(values_TE, axis=0) + 1


def at_ids(values_TE: NDArray[np.float32], expert_ids_TK: NDArray[np.int64]) -> NDArray[np.float32]:
    """The values of the experts in each slot, (T, K); NaN where there is no choice."""
    found_TK = np.take_along_axis(values_TE, np.maximum(expert_ids_TK, 0), axis=-1)
    return np.where(expert_ids_TK >= 0, found_TK, np.nan)


def taken_by_each(num_routed: int, settings: Settings, num_experts: int) -> int:
    """Tokens that each expert takes under expert choice: ceil(T c / E)."""
    return -(-num_routed * settings.top_k // num_experts)


def sequence_shares(outcome: Outcome, settings: Settings) -> tuple[Array, Array]:
    """f and P of the aux loss in each sequence, (B, E); NaN in a sequence without tokens.

    The batch is one sequence, where the level does not say otherwise. At the global level f counts the micro-batches
    since the last optimizer step too.
    """
    T, E = outcome.logits_TE.shape
    B = settings.sequences if "sequence" in settings.balancer else 1
    f_BE, P_BE = np.full((B, E), np.nan), np.full((B, E), np.nan)
    for b, tokens in enumerate(np.array_split(np.arange(T), B)):
        routed = tokens[outcome.routed_T[tokens]]
        if not len(routed):
            continue
        P_BE[b] = outcome.probabilities_TE[routed].astype(np.float64).mean(0)
        ids = outcome.expert_ids_TK[tokens]
        load_E = np.bincount(ids[ids >= 0], minlength=E)
        f_BE[b] = load_E / max(load_E.sum(), 1)
    if settings.balancer == "global-aux" and outcome.observed.count_E.any():
        f_BE[0] = outcome.observed.count_E / outcome.observed.count_E.sum()
    return (P_BE if settings.balancer.startswith("soft") else f_BE), P_BE


def logsumexp(logits_TE: NDArray[np.float32]) -> Array:
    """ln of the sum of exp(logits), (T,), as the z-loss squares it; NaN in rows that hold NaN."""
    logits_TE = logits_TE.astype(np.float64)
    highest_T = np.max(logits_TE, axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return highest_T + np.log(np.exp(logits_TE - highest_T[:, None]).sum(-1))


@dataclass(frozen=True, kw_only=True, eq=False)
class SignUpdate:
    """The sign rule: below_E = mean(count) - count, delta_E = rate * sign(below), step_E = delta - mean(delta)."""

    below_E: Array
    delta_E: Array
    step_E: Array


def sign_update(outcome: Outcome, settings: Settings) -> SignUpdate:
    """The update of the sign bias, from the counts since the last optimizer step, this batch included."""
    count_E = outcome.observed.count_E.astype(np.float64)
    below_E = count_E.mean() - count_E
    delta_E = settings.bias_rate * np.sign(below_E)
    return SignUpdate(below_E=below_E, delta_E=delta_E, step_E=delta_E - delta_E.mean())


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantileUpdate:
    """The quantile rule: gap_TE = threshold - score, NaN in rows that do not count; sorted_NE each column ascending.

    rank: the place, from 0, of the quantile in a sorted column. quantile_E, mean, bias_E = quantile - mean.
    lowest_E, width_E, bin_E: the histogram's, None where the quantile is exact.
    """

    gap_TE: Array
    sorted_NE: Array
    rank: int
    quantile_E: Array
    mean: float
    bias_E: Array
    lowest_E: Array | None = None
    width_E: Array | None = None
    bin_E: NDArray[np.int64] | None = None


def quantile_update(outcome: Outcome, settings: Settings) -> QuantileUpdate | None:
    """The quantile of this batch and the bias it gives; None without tokens or threshold."""
    if outcome.threshold_T is None:
        return None
    counted_T = outcome.routed_T & np.isfinite(outcome.threshold_T)
    if not counted_T.any():
        return None
    gap_TE = np.where(counted_T[:, None], outcome.threshold_T[:, None] - outcome.selection_TE, np.nan).astype(
        np.float64
    )
    # an expert that a token must not take counts as the worst of those it may
    finite_TE = np.where(np.isposinf(gap_TE), -np.inf, gap_TE)
    worst_T = np.max(finite_TE, axis=1, keepdims=True)
    gap_TE = np.minimum(gap_TE, worst_T)
    sorted_NE = np.sort(gap_TE[counted_T], axis=0)
    num_tokens, num_experts = sorted_NE.shape
    rank = -(-settings.top_k * (num_tokens - 1) // num_experts)
    quantile_E, lowest_E, width_E, bin_E = sorted_NE[rank], None, None, None
    if settings.method == "histogram":
        lowest_E = sorted_NE[0]
        width_E = (sorted_NE[-1] - lowest_E) / settings.num_bins
        with np.errstate(invalid="ignore", divide="ignore"):
            place_E = np.where(width_E > 0, (quantile_E - lowest_E) / width_E, 0)
        bin_E = np.clip(place_E.astype(np.int64), 0, settings.num_bins - 1)
        quantile_E = lowest_E + (bin_E + 0.5) * width_E
    mean = float(quantile_E.mean())
    return QuantileUpdate(
        gap_TE=gap_TE,
        sorted_NE=sorted_NE,
        rank=rank,
        quantile_E=quantile_E,
        mean=mean,
        bias_E=quantile_E - mean,
        lowest_E=lowest_E,
        width_E=width_E,
        bin_E=bin_E,
    )


def _descending(values: NDArray[np.float32]) -> NDArray[np.int64]:
    return np.argsort(-values, axis=-1, kind="stable")


def _places(values: NDArray[np.float32], axis: int) -> NDArray[np.int64]:
    return np.argsort(np.argsort(-values, axis=axis, kind="stable"), axis=axis, kind="stable")
