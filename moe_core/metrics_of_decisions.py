"""What decisions and scores say: who goes where, with whom, and when that settles. Numpy only; import them from
`moe_core.metrics`.

Counts add up and ratios do not. So each metric of many decisions is in two: a `count_...` that gives whole numbers,
to be summed over steps, part files or ranks, and the metric itself, a ratio of such counts.

Undefined is NaN, as it is for loads. An id of -1 is no choice: it counts nowhere, and a token without any choice is
left out.

Shapes: E experts, T tokens, K top-k, P probes, D domains, V token ids; `...` any leading axes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_core.metrics_of_loads import FloatArray, at_least, mean_defined, normalised_entropy, ratio

Counts = NDArray[np.int64]

MIN_OCCURRENCES = 10
"""A token id that occurred less often says nothing about where its occurrences go."""

#: Tokens whose pairs are counted at once, at least: they stay in the cache.
_BLOCK_TOKENS = 1 << 14


def count_load(expert_ids: ArrayLike, num_experts: int) -> tuple[NDArray[np.int64], int]:
    """Count assignments per expert.

    Args:
        expert_ids: integers of any shape, -1 where no choice was made.
        num_experts: E.

    Returns:
        load (E,) int64, and the number of ids that were -1 (assignments without a route).

    Raises:
        ValueError: an id is no integer, below -1, or not below num_experts.

    >>> load, unrouted = count_load([0, 1, -1, 3, 3, -1], 4)
    >>> load.tolist(), unrouted
    ([1, 1, 0, 2], 2)
    """
    num_experts = at_least(1, "num_experts", num_experts)
    ids = np.asarray(expert_ids).ravel()
    if ids.size == 0:
        return np.zeros(num_experts, dtype=np.int64), 0
    _check_range(ids, num_experts)
    if ids.min() >= 0:
        return np.bincount(ids.astype(np.int64, copy=False), minlength=num_experts), 0
    # One bin more, in front, catches the sentinel without a boolean copy of the ids.
    counts = np.bincount(ids.astype(np.int64) + 1, minlength=num_experts + 1)
    return counts[1:].astype(np.int64), int(counts[0])


def gate_mass(expert_ids: ArrayLike, weights: ArrayLike, num_experts: int) -> FloatArray:
    """Sum of the gate weights of each expert, to set beside its load: asked often and heard little?

    Sums of steps, part files or ranks add up.

    Args:
        expert_ids: (T, K) integers, -1 where no choice was made.
        weights: (T, K) gate values; those beside a -1 count nowhere.
        num_experts: E.

    Returns:
        (E,) float64; 0 for an expert that nobody chose, NaN for one with a weight that is NaN.

    Raises:
        ValueError: ids outside -1..E-1, or arrays of different shapes.

    >>> gate_mass([[0, 1], [0, -1]], [[0.5, 0.25], [0.25, 0.0]], 3).tolist()
    [0.75, 0.25, 0.0]
    """
    num_experts = at_least(1, "num_experts", num_experts)
    ids_TK, weights_TK = checked_ids(expert_ids, num_experts), np.asarray(weights, dtype=np.float64)
    if ids_TK.shape != weights_TK.shape:
        raise ValueError(f"expert_ids {ids_TK.shape} and weights {weights_TK.shape} do not go together")
    slots = ids_TK.ravel().astype(np.int64) + 1
    return np.bincount(slots, weights=weights_TK.ravel(), minlength=num_experts + 1)[1:].astype(np.float64)


def router_entropy(probs: ArrayLike) -> FloatArray:
    """How undecided the router is: mean over tokens of H(p_t) / ln E; 1 is no preference, 0 is certain.

    Args:
        probs: (..., T, E) router probabilities, rows summing to 1 (normalise sigmoid scores first).
            Rows with a non-finite value (tokens that could not be routed) are left out; leave out
            padding yourself or mark it NaN.

    Returns:
        (...) float64, NaN where no row is left, and for E = 1.

    Raises:
        ValueError: probs without a token axis.
    """
    probs = np.asarray(probs, dtype=np.float64)
    if probs.ndim < 2 or probs.shape[-1] == 0:
        raise ValueError(f"probs must have shape (..., tokens, experts), got {probs.shape}")
    usable = np.isfinite(probs).all(axis=-1)
    entropy = np.where(usable, normalised_entropy(np.where(usable[..., None], probs, 0.0)), 0.0)
    return ratio(entropy.sum(axis=-1), usable.sum(axis=-1))


def count_pairs(expert_ids: ArrayLike, other_ids: ArrayLike, num_experts: int, num_others: int | None = None) -> Counts:
    """How many tokens chose expert a in one router and expert b in another, all pairs.

    Args:
        expert_ids: (T, K) integers, distinct within a token, -1 where no choice was made.
        other_ids: (T, J) of the same tokens.
        num_experts: E of the first.
        num_others: E of the second; None = the same.

    Returns:
        (E, E of the second) int64.

    Raises:
        ValueError: ids outside -1..E-1, or of other shapes.
    """
    num_experts = at_least(1, "num_experts", num_experts)
    num_others = num_experts if num_others is None else at_least(1, "num_others", num_others)
    ids_TK, other_TJ = checked_ids(expert_ids, num_experts), checked_ids(other_ids, num_others)
    if len(ids_TK) != len(other_TJ):
        raise ValueError(f"ids of {len(ids_TK)} and of {len(other_TJ)} tokens cannot be paired")
    slots = list(range(other_TJ.shape[1]))
    return _count_slot_pairs(ids_TK, other_TJ, [slots] * ids_TK.shape[1], num_experts, num_others)


def count_coactivation(expert_ids: ArrayLike, num_experts: int) -> Counts:
    """How many tokens chose experts a and b together, N_ab, with N_a on the diagonal; symmetric.

    All pairs of a token's experts, not only neighbours in rank: OLMoE's published script pairs each with the next.

    Args:
        expert_ids: (T, K) integers, distinct within a token, -1 where no choice was made.
        num_experts: E.

    Returns:
        (E, E) int64.

    Raises:
        ValueError: ids outside -1..E-1, or not of shape (T, K).

    >>> count_coactivation([[0, 1], [2, 0]], 3).tolist()
    [[2, 1, 1], [1, 1, 0], [1, 0, 1]]
    """
    num_experts = at_least(1, "num_experts", num_experts)
    ids_TK = checked_ids(expert_ids, num_experts)
    k = ids_TK.shape[1]
    later = [list(range(slot + 1, k)) for slot in range(k)]
    counts = _count_slot_pairs(ids_TK, ids_TK, later, num_experts, num_experts)
    counts += counts.T
    np.fill_diagonal(counts, count_load(ids_TK, num_experts)[0])
    return counts


def coactivation(together: ArrayLike) -> FloatArray:
    """Of the tokens that chose expert a, the share that chose b too: N_ab / N_a. Row a, column b; not symmetric.

    Args:
        together: (..., E, E) tokens that chose both, N_a on the diagonal (see `count_coactivation`).

    Returns:
        (..., E, E) float64, 1 on the diagonal; NaN in the row of an expert that nobody chose.

    Raises:
        ValueError: the last two axes are no square.

    Source: OLMoE, Muennighoff et al. 2409.02060, section 5.2; there over neighbouring pairs, here over all.
    """
    together = np.asarray(together, dtype=np.float64)
    if together.ndim < 2 or together.shape[-1] != together.shape[-2]:
        raise ValueError(f"together must have shape (..., experts, experts), got {together.shape}")
    return ratio(together, np.diagonal(together, axis1=-2, axis2=-1)[..., None])


def transition(pairs: ArrayLike) -> FloatArray:
    """Of the choices of expert a in one layer, the share that went on to b in the next MoE layer.

    Args:
        pairs: (..., E, E of the next) tokens that chose a, then b (see `count_pairs`).

    Returns:
        (..., E, E of the next) float64, rows summing to 1; NaN in the row of an expert that nobody chose.
    """
    pairs = np.asarray(pairs, dtype=np.float64)
    return ratio(pairs, pairs.sum(axis=-1, keepdims=True))


def overlap(expert_ids: ArrayLike, reference_ids: ArrayLike) -> FloatArray:
    """For each token, the share of the reference's experts that are among its experts, whatever their order.

    Args:
        expert_ids: (..., T, K) integers, -1 where no choice was made.
        reference_ids: (..., T, J) of the same tokens.

    Returns:
        (..., T) float64, NaN where the reference chose nothing.

    Raises:
        ValueError: shapes that do not go together.
    """
    ids, reference = np.asarray(expert_ids), np.asarray(reference_ids)
    if ids.ndim < 2 or reference.ndim < 2 or ids.shape[-2] != reference.shape[-2]:
        raise ValueError(f"ids of the same tokens needed, got shapes {ids.shape} and {reference.shape}")
    chosen = reference >= 0
    # slot by slot: (T, J, K) at once would be K times as much memory
    found = np.zeros(np.broadcast_shapes(ids.shape[:-1], reference.shape[:-1]), dtype=np.int64)
    for slot in range(reference.shape[-1]):
        one = reference[..., slot, None]
        found += ((ids == one) & (one >= 0)).any(axis=-1)
    return ratio(found, chosen.sum(axis=-1))


def saturation(expert_ids: ArrayLike, final_ids: ArrayLike) -> FloatArray:
    """How much of its final routing a router has found: mean over tokens of overlap(now, final probe) / k.

    Args:
        expert_ids: (..., T, K) of one probe or several; the same tokens each time.
        final_ids: (T, K) of the run's final probe.

    Returns:
        (...) float64, 1 at the final probe; NaN where no token has a choice.

    Source: router saturation, OLMoE, Muennighoff et al. 2409.02060, section 5.1.
    """
    return mean_defined(overlap(expert_ids, final_ids))


def churn(expert_ids: ArrayLike) -> FloatArray:
    """How much the routing changed from each probe to the next: 1 - mean overlap / k.

    Args:
        expert_ids: (P, T, K) of consecutive probes, the same tokens each time.

    Returns:
        (P - 1,) float64; NaN where no token had a choice before.

    Source: 1 - saturation (OLMoE 2409.02060) between neighbours in time.
    """
    ids = np.asarray(expert_ids)
    return 1.0 - mean_defined(overlap(ids[1:], ids[:-1]))


def last_fluctuation(expert_ids: ArrayLike) -> FloatArray:
    """For each token, the last probe at which its first choice was not its final one.

    Args:
        expert_ids: (P, T, K) of consecutive probes, best first, the same tokens each time.

    Returns:
        (T,) number of that probe as float64; -1 where every probe chose as the final one did; NaN where the final
        probe made no choice.

    Source: StableMoE, Dai et al. 2204.08396, section 2.
    """
    first = np.asarray(expert_ids)[..., 0]
    other = first != first[-1]
    last = np.where(other.any(axis=0), len(other) - 1 - other[::-1].argmax(axis=0), -1).astype(np.float64)
    return np.where(first[-1] >= 0, last, np.nan)


def domain_specialisation(load: ArrayLike, tokens: ArrayLike) -> FloatArray:
    """Share of a domain's tokens that use each expert. Without specialisation it is k / E (`domain_baseline`).

    Args:
        load: (..., D, E) assignments of each domain's tokens per expert.
        tokens: (..., D) routed tokens of each domain.

    Returns:
        (..., D, E) float64, rows summing to k; NaN where a domain has no tokens.

    Source: domain specialization, OLMoE, Muennighoff et al. 2409.02060, section 5.3.
    """
    return ratio(load, np.asarray(tokens)[..., None])


def domain_baseline(num_experts: int, top_k: int) -> float:
    """What `domain_specialisation` is where all experts are used alike, k / E."""
    return at_least(1, "top_k", top_k) / at_least(1, "num_experts", num_experts)


def vocab_specialisation(load: ArrayLike, occurrences: ArrayLike, min_occurrences: int = MIN_OCCURRENCES) -> FloatArray:
    """Share of a token id's occurrences that go to its main expert.

    Args:
        load: (..., V, E) assignments of each token id per expert.
        occurrences: (..., V) how often each was routed.
        min_occurrences: below it nothing is said.

    Returns:
        (..., V) float64, NaN where the id occurred less often.

    Raises:
        ValueError: min_occurrences below 1.

    Source: vocabulary specialization, OLMoE, Muennighoff et al. 2409.02060, section 5.4.
    """
    occurrences = np.asarray(occurrences)
    enough = occurrences >= at_least(1, "min_occurrences", min_occurrences)
    return ratio(np.asarray(load).max(axis=-1), np.where(enough, occurrences, 0))


def count_repeats(first_choice: ArrayLike, sequence: ArrayLike, position: ArrayLike) -> tuple[int, int]:
    """How often a token's first choice is that of the token before it in its sequence.

    Args:
        first_choice: (T,) expert ids, -1 where no choice was made; sequence by sequence, in order of position.
        sequence: (T,) the number of its sequence.
        position: (T,) in the sequence. Where a position is missing in between there is no token before.

    Returns:
        repeats, and the pairs of neighbours in which both chose.

    Raises:
        ValueError: arrays of different shapes.
    """
    first, sequence, position = np.asarray(first_choice), np.asarray(sequence), np.asarray(position)
    if first.ndim != 1 or not first.shape == sequence.shape == position.shape:
        shapes = f"{first.shape}, {sequence.shape} and {position.shape}"
        raise ValueError(f"first_choice, sequence and position must be of one shape (tokens,), got {shapes}")
    neighbours = (sequence[1:] == sequence[:-1]) & (position[1:] - position[:-1] == 1)
    neighbours &= (first[1:] >= 0) & (first[:-1] >= 0)
    return int((neighbours & (first[1:] == first[:-1])).sum()), int(neighbours.sum())


def repeat_rate(repeats: ArrayLike, pairs: ArrayLike) -> FloatArray:
    """P(first choice of t = first choice of t-1) within a sequence. By chance: `repeat_chance`.

    Args:
        repeats, pairs: (...) as from `count_repeats`, summed.

    Returns:
        (...) float64, NaN where there are no pairs.

    Source: Mixtral, Jiang et al. 2401.04088, section 5.
    """
    return ratio(repeats, pairs)


def repeat_chance(first_choices: ArrayLike) -> FloatArray:
    """What `repeat_rate` is where neighbours choose independently: the sum of squared first-choice shares.

    Args:
        first_choices: (..., E) how often each expert was a first choice.

    Returns:
        (...) float64, NaN where there are none.
    """
    counts = np.asarray(first_choices, dtype=np.float64)
    return (ratio(counts, counts.sum(axis=-1, keepdims=True)) ** 2).sum(axis=-1)


def count_drops_by_position(expert_ids: ArrayLike, kept: ArrayLike, position: ArrayLike) -> tuple[Counts, Counts]:
    """Dropped and wanted assignments by position in the sequence: their ratio is the `drop_rate` there.

    Args:
        expert_ids: (T, K) integers, -1 where no choice was made.
        kept: (T, K) False where capacity dropped the assignment.
        position: (T,) in the sequence, from 0.

    Returns:
        dropped and assignments, each (greatest position + 1,) int64.

    Raises:
        ValueError: arrays of different shapes.
    """
    ids, kept, position = np.asarray(expert_ids), np.asarray(kept, dtype=bool), np.asarray(position, dtype=np.int64)
    if ids.shape != kept.shape or position.shape != ids.shape[:1]:
        raise ValueError(f"expert_ids {ids.shape}, kept {kept.shape} and position {position.shape} do not go together")
    wanted = (ids >= 0).sum(axis=-1)
    dropped = ((ids >= 0) & ~kept).sum(axis=-1)
    # weights are summed as float64: whole numbers, exact
    return tuple(np.bincount(position, weights=part).astype(np.int64) for part in (dropped, wanted))  # type: ignore[return-value]


def checked_ids(expert_ids: ArrayLike, num_experts: int) -> NDArray:
    """(T, K) ids, all of them whole numbers in -1..num_experts-1.

    Raises:
        ValueError: otherwise.
    """
    ids = np.asarray(expert_ids)
    if ids.ndim != 2:
        raise ValueError(f"expert_ids must have shape (tokens, k), got {ids.shape}")
    _check_range(ids, num_experts)
    return ids


def _check_range(ids: NDArray, num_experts: int) -> None:
    if ids.size == 0:
        return
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"expert_ids must be integers, got dtype {ids.dtype}")
    # Checked by the bounds before any cast: uint64 ids must not wrap round into -1.
    for extreme in (int(ids.min()), int(ids.max())):
        if not -1 <= extreme < num_experts:
            raise ValueError(f"expert id {extreme} is outside -1..{num_experts - 1} (num_experts={num_experts})")


def _count_slot_pairs(
    ids_TK: NDArray, other_TJ: NDArray, partners: list[list[int]], num_experts: int, num_others: int
) -> Counts:
    """Pairs of the ids in slot i with those in slots partners[i] of the other, (E, E of the other) int64."""
    # one row and column more, in front, take the pairs without a choice
    width = num_others + 1
    counts = np.zeros((num_experts + 1) * width, dtype=np.int64)
    # enough of them, too, to be worth adding up all the cells
    block = max(_BLOCK_TOKENS, counts.size // max(1, other_TJ.shape[1]))
    cell = np.min_scalar_type(-counts.size)  # small numbers are added faster
    for start in range(0, len(ids_TK), block):
        # slot by slot in memory, so that each slot is one plain array
        rows_KB = (ids_TK[start : start + block].T.astype(cell, order="C") + 1) * width
        other_JB = other_TJ[start : start + block].T.astype(cell, order="C") + 1
        for row_B, slots in zip(rows_KB, partners, strict=True):
            if slots:
                counts += np.bincount((row_B + other_JB[slots]).ravel(), minlength=counts.size)
    return counts.reshape(num_experts + 1, width)[1:, 1:].copy()
