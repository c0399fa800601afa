"""An order in which similar things stand together, for pictures of pairs. Numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def cluster_order(similarity: ArrayLike) -> NDArray[np.int64]:
    """Leaves of an average-linkage clustering, so that what is similar stands together; deterministic.

    The two most similar clusters join, again and again; on joining, each is turned so that its more similar ends meet.
    Ties go to the lowest numbers. Takes O(n^2) memory, O(n^2) time a join at worst.

    Args:
        similarity: (n, n), higher = more alike; it is made symmetric, the diagonal and NaN count for nothing.

    Returns:
        (n,) int64, a permutation.

    Raises:
        ValueError: no square matrix.

    Source: average linkage, Sokal & Michener, "A statistical method for evaluating systematic relationships" (1958).

    >>> cluster_order([[0, 0, 9, 0], [0, 0, 0, 8], [9, 0, 0, 0], [0, 8, 0, 0]]).tolist()
    [0, 2, 1, 3]
    """
    given = np.asarray(similarity, dtype=np.float64)
    if given.ndim != 2 or given.shape[0] != given.shape[1]:
        raise ValueError(f"similarity must be a square matrix, got shape {given.shape}")
    single = np.nan_to_num(given + given.T) / 2
    between = single.copy()  # of clusters, in the row of each one's first number
    np.fill_diagonal(between, -np.inf)
    leaves: list[list[int]] = [[number] for number in range(len(given))]
    for _ in range(len(given) - 1):
        one, other = sorted(np.unravel_index(int(between.argmax()), between.shape))
        mine, others = len(leaves[one]), len(leaves[other])
        leaves[one] = _joined(leaves[one], leaves[other], single)
        mean = (mine * between[one] + others * between[other]) / (mine + others)
        between[one], between[:, one] = mean, mean
        between[one, one] = -np.inf
        between[other], between[:, other] = -np.inf, -np.inf
        leaves[other] = []
    return np.array(leaves[0] if leaves else [], dtype=np.int64)


def _joined(one: list[int], other: list[int], single: NDArray[np.float64]) -> list[int]:
    """One after the other, each turned so that the ends that meet are as similar as can be."""
    ways = [(one, other), (one, other[::-1]), (one[::-1], other), (one[::-1], other[::-1])]
    first, second = max(ways, key=lambda way: single[way[0][-1], way[1][0]])
    return first + second
