"""What loads say: balance, collapse, drops. Numpy only; import them from `moe_core.metrics`.

A *load* counts assignments per expert before capacity drops any. Functions of a load take an array
whose last axis is the experts and keep the leading axes; one load (E,) gives a numpy scalar. They never
sum steps: to judge a window, sum it first with `window_load` or `rolling_window_load`.

Undefined is NaN (a layer without tokens has no balance, neither a good nor a bad one), and None in an
input reads as NaN. No function here warns on zeros.

Shapes: E experts, T tokens, K top-k, N steps; `...` any leading axes.
"""

from __future__ import annotations

import math
import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

WINDOW = 50
"""Recorded steps that loads are summed over where nobody says otherwise."""

IDLE_SHARE = 0.1
"""An expert below this part of the uniform share is idle."""


def load_ratio(load: ArrayLike) -> FloatArray:
    """Load over the uniform share, c / mean(c): 1 is balanced, 0 never used.

    Args:
        load: (..., E) assignments per expert.

    Returns:
        (..., E) float64, NaN where there are no tokens.

    Source: the ideal load of max_violation, Wang et al. 2408.15664.
    """
    load, total = _load_and_total(load)
    # c E / total, not c / (total / E): exact at whole ratios, so thresholds and colours do not flicker.
    return load * load.shape[-1] / total[..., None]


def max_violation(load: ArrayLike) -> FloatArray:
    """How far the busiest expert is above the uniform share, max(c) / mean(c) - 1.

    0 is balanced; `max_violation_bound` is the most it can be. Of one step's load it is the *batch*
    value and keeps the sampling noise; of a summed window it is the *window* value.

    Args:
        load: (..., E) assignments per expert.

    Returns:
        (...) float64, NaN where there are no tokens.

    Source: MaxVio, Wang et al. 2408.15664.
    """
    load, total = _load_and_total(load)
    return load.max(axis=-1) * load.shape[-1] / total - 1.0


def max_violation_bound(num_experts: int, top_k: int) -> float:
    """The most max_violation can be, E/k - 1: every token sends one of its k assignments to one expert.

    Raises:
        ValueError: not 1 <= top_k <= num_experts.

    Source: follows from the definition (Wang et al. 2408.15664), as a token's experts are distinct.
    """
    num_experts = at_least(1, "num_experts", num_experts)
    top_k = at_least(1, "top_k", top_k)
    if top_k > num_experts:
        raise ValueError(f"top_k={top_k} is more than num_experts={num_experts}")
    return num_experts / top_k - 1.0


def load_cv(load: ArrayLike) -> FloatArray:
    """Coefficient of variation, population std(c) / mean(c); 0 is balanced.

    Args:
        load: (..., E) assignments per expert.

    Returns:
        (...) float64, NaN where there are no tokens.
    """
    load, total = _load_and_total(load)
    return load.std(axis=-1) * load.shape[-1] / total


def load_entropy(load: ArrayLike) -> FloatArray:
    """Entropy of the load's shares, H(f) / ln E: 1 is balanced, 0 is one expert for all.

    Of the loads, not of the router's probabilities: that is `router_entropy`.

    Args:
        load: (..., E) assignments per expert.

    Returns:
        (...) float64, NaN where there are no tokens, and for E = 1 (0 / 0).
    """
    load, total = _load_and_total(load)
    return normalised_entropy(load / total[..., None])


def effective_experts(load: ArrayLike) -> FloatArray:
    """How many evenly used experts would have the load's entropy, exp(H(f)): between 1 and E.

    Args:
        load: (..., E) assignments per expert.

    Returns:
        (...) float64, NaN where there are no tokens.
    """
    load, total = _load_and_total(load)
    return np.exp(_entropy(load / total[..., None]))


def gini(load: ArrayLike) -> FloatArray:
    """Gini coefficient of the load, sum_ij |c_i - c_j| / (2 E^2 mean(c)): 0 is balanced, 1 - 1/E one for all.

    Args:
        load: (..., E) assignments per expert.

    Returns:
        (...) float64, NaN where there are no tokens.
    """
    load, total = _load_and_total(load)
    num_experts = load.shape[-1]
    # Sorted ascending, expert number i (from 1) is counted with weight 2 i - E - 1: the pairwise sum in O(E).
    weight_E = 2.0 * np.arange(1, num_experts + 1) - num_experts - 1.0
    return (np.sort(load, axis=-1) * weight_E).sum(axis=-1) / (num_experts * total)


def min_load(load: ArrayLike) -> FloatArray:
    """Assignments of the least used expert, min(c).

    Args:
        load: (..., E) assignments per expert.

    Returns:
        (...) float64, NaN where there are no tokens.
    """
    load, total = _load_and_total(load)
    return np.where(np.isnan(total), np.nan, load.min(axis=-1))[()]


def max_load(load: ArrayLike) -> FloatArray:
    """Assignments of the busiest expert, max(c).

    Args:
        load: (..., E) assignments per expert.

    Returns:
        (...) float64, NaN where there are no tokens.
    """
    load, total = _load_and_total(load)
    return np.where(np.isnan(total), np.nan, load.max(axis=-1))[()]


def dead_mask(load: ArrayLike) -> NDArray[np.bool_]:
    """Which experts got nothing, c_e = 0.

    Args:
        load: (..., E), of ONE window per leading index: sum its steps first (`window_load`). A single
            step says little, as an expert may be passed over by chance.

    Returns:
        (..., E) bool; False everywhere where there are no tokens, since nothing can be said there.
    """
    load, total = _load_and_total(load)
    return (load == 0) & ~np.isnan(total)[..., None]


def idle_mask(load: ArrayLike) -> NDArray[np.bool_]:
    """Which experts got less than a tenth (IDLE_SHARE) of the uniform share; the dead ones are among them.

    Args:
        load: (..., E), of ONE window per leading index: sum its steps first (`window_load`).

    Returns:
        (..., E) bool; False everywhere where there are no tokens, since nothing can be said there.
    """
    return load_ratio(load) < IDLE_SHARE


def dead_experts(load: ArrayLike) -> FloatArray:
    """Number of experts that got nothing (see `dead_mask`).

    Args:
        load: (..., E), of ONE window per leading index.

    Returns:
        (...) whole numbers as float64, NaN where there are no tokens.
    """
    return _count_where_tokens(dead_mask(load), load)


def idle_experts(load: ArrayLike) -> FloatArray:
    """Number of experts with less than a tenth of the uniform share, dead ones included (see `idle_mask`).

    Args:
        load: (..., E), of ONE window per leading index.

    Returns:
        (...) whole numbers as float64, NaN where there are no tokens.
    """
    return _count_where_tokens(idle_mask(load), load)


def window_load(loads: ArrayLike, window: int = WINDOW) -> NDArray:
    """Loads of the last `window` recorded steps, summed.

    Args:
        loads: (..., N, E), one row per recorded step.
        window: how many of the last rows to sum, at least 1; fewer rows are all summed.

    Returns:
        (..., E), integer where the loads are; zeros where there are no rows.

    Raises:
        ValueError: window below 1, or loads without a step axis.
    """
    loads = _loads_by_step(loads)
    return loads[..., -at_least(1, "window", window) :, :].sum(axis=-2)


def rolling_window_load(loads: ArrayLike, window: int) -> NDArray:
    """At every step, the loads of up to `window` recorded steps that end there, summed.

    The last row is `window_load`. Early rows sum what there is. A NaN touches only windows that hold it.

    Args:
        loads: (..., N, E), one row per recorded step.
        window: rows in a full window, at least 1.

    Returns:
        (..., N, E), integer where the loads are.

    Raises:
        ValueError: window below 1, or loads without a step axis.
    """
    loads = _loads_by_step(loads)
    remaining = min(at_least(1, "window", window), max(loads.shape[-2], 1))
    # Sums of 1, 2, 4, ... rows, put together as the bits of `window` say: log(window) passes, and no
    # difference of running sums, which would leave rounding dust on experts that got nothing.
    block = loads if loads.dtype.kind == "f" else loads.astype(np.int64)
    summed = np.zeros_like(block)
    length, reached = 1, 0
    while remaining:
        if remaining & 1:
            summed[..., reached:, :] += block[..., : block.shape[-2] - reached, :]
            reached += length
        longer = block.copy()
        longer[..., length:, :] += block[..., :-length, :]
        block, length, remaining = longer, length * 2, remaining >> 1
    return summed


def aux_loss(load: ArrayLike, mean_prob: ArrayLike) -> FloatArray:
    """Load-balancing loss in its normalised form, E * sum_i f_i P_i with f = c / (T k): uniform gives 1.

    No coefficient. f sums to 1, so runs with different E and k compare; forms that divide counts by T
    alone read k when balanced. Per layer: never pass loads pooled over layers.

    Args:
        load: (..., E) assignments per expert, before drops.
        mean_prob: (..., E) mean router probability per expert, summing to 1.

    Returns:
        (...) float64, NaN where there are no tokens.

    Raises:
        ValueError: the two disagree on E.

    Source: Switch Transformer, Fedus et al. 2101.03961, eq. 4-6.
    """
    load, total = _load_and_total(load)
    mean_prob = np.asarray(mean_prob, dtype=np.float64)
    if mean_prob.ndim == 0 or mean_prob.shape[-1] != load.shape[-1]:
        raise ValueError(f"load has {load.shape[-1]} experts, mean_prob has shape {mean_prob.shape}")
    return load.shape[-1] * (load / total[..., None] * mean_prob).sum(axis=-1)


def drop_rate(dropped: ArrayLike, assignments: ArrayLike) -> FloatArray:
    """Share of assignments that capacity dropped, dropped / (T k).

    Args:
        dropped: (...) assignments dropped.
        assignments: (...) assignments wanted, T k.

    Returns:
        (...) float64, NaN where there are no assignments.
    """
    return ratio(dropped, assignments)


def rerouted_share(rerouted: ArrayLike, assignments: ArrayLike) -> FloatArray:
    """Share of assignments that the selection bias changed.

    Args:
        rerouted: (...) assignments that would have gone elsewhere without the bias.
        assignments: (...) all assignments, T k.

    Returns:
        (...) float64, NaN where there are no assignments.
    """
    return ratio(rerouted, assignments)


def rank_balancedness(rank_loads: ArrayLike) -> FloatArray:
    """How well experts on R ranks (devices) share the work: mean / max of the rank loads per layer, then the mean
    over layers. 1 is balanced, 1/R one rank for all.

    Args:
        rank_loads: (..., layers, R) assignments per rank (see `moe_core.placement`).

    Returns:
        (...) float64, NaN where there are no tokens; a layer without tokens is left out of the mean.

    Raises:
        ValueError: rank_loads without a layer axis.

    Source: balancedness as SGLang and vLLM log it for expert parallelism, but never averaged over layers first, which
    would hide that each layer waits for its own slowest rank.
    """
    if np.ndim(rank_loads) < 2:
        raise ValueError(f"rank_loads must have shape (..., layers, ranks), got {np.shape(rank_loads)}")
    balance = 1.0 / slowest_rank_cost(rank_loads)
    return mean_defined(balance)


def slowest_rank_cost(rank_loads: ArrayLike) -> FloatArray:
    """How much longer the slowest rank takes than each would in a perfect split: max / mean of the rank loads.

    Args:
        rank_loads: (..., R) assignments per rank.

    Returns:
        (...) float64 from 1 to R, NaN where there are no tokens.
    """
    return max_violation(rank_loads) + 1.0


def _load_and_total(load: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """The load as float64 (..., E) and its sum (...), NaN where there is nothing to divide by."""
    load = np.asarray(load, dtype=np.float64)
    if load.ndim == 0 or load.shape[-1] == 0:
        raise ValueError(f"a load needs its experts as last axis, got shape {load.shape}")
    total = np.asarray(load.sum(axis=-1))
    return load, np.where(total > 0, total, np.nan)


def _loads_by_step(loads: ArrayLike) -> NDArray:
    loads = np.asarray(loads)
    if loads.dtype == object:  # None among the numbers
        loads = loads.astype(np.float64)
    if loads.ndim < 2:
        raise ValueError(f"loads must have shape (..., steps, experts), got {loads.shape}")
    return loads


def _entropy(share: FloatArray) -> FloatArray:
    """-sum f ln f over the last axis, in nats, with 0 ln 0 = 0; NaN stays NaN."""
    log_share = np.log(share, out=np.zeros_like(share), where=share > 0)
    # Adding 0 turns the -0.0 of a one-hot share into 0.0.
    return -(share * log_share).sum(axis=-1) + 0.0


def normalised_entropy(share: FloatArray) -> FloatArray:
    """Entropy over the largest possible one, ln E; NaN for a single expert."""
    if share.shape[-1] == 1:
        return np.full(share.shape[:-1], np.nan)[()]
    # Rounding may leave a uniform share a hair above the most it can be.
    return np.minimum(_entropy(share) / math.log(share.shape[-1]), 1.0)


def _count_where_tokens(mask: NDArray[np.bool_], load: ArrayLike) -> FloatArray:
    _, total = _load_and_total(load)
    return np.where(np.isnan(total), np.nan, mask.sum(axis=-1))[()]


def mean_defined(values: FloatArray) -> FloatArray:
    """Mean over the last axis of what is not NaN; NaN where nothing is."""
    defined = ~np.isnan(values)
    return ratio(np.where(defined, values, 0.0).sum(axis=-1), defined.sum(axis=-1))


def ratio(part: ArrayLike, whole: ArrayLike) -> FloatArray:
    """part / whole, NaN where whole is 0."""
    part, whole = np.asarray(part, dtype=np.float64), np.asarray(whole, dtype=np.float64)
    return part / np.where(whole > 0, whole, np.nan)


def at_least(least: int, name: str, value: int) -> int:
    """`value` as an int. Raises ValueError naming it where it is no whole number or too small."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} must be a whole number") from None
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    return number
