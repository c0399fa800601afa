"""Curves made readable without lying: smoothing that skips gaps, thinning that keeps extremes. Numpy only.

Shapes: N points, M points kept.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_SMOOTHING = 0.999
"""The largest weight `smooth` uses: at 1 an average would never move again."""


def smooth(values: ArrayLike, weight: float) -> NDArray[np.float64]:
    """Exponential moving average with bias correction: the first value counts in full.

    Args:
        values: (N,) in step order. NaN and infinities stay where they are in the result and do not
            enter the average.
        weight: of the past, 0 (no smoothing) to 1; capped at MAX_SMOOTHING.

    Returns:
        (N,) float64.

    Raises:
        ValueError: weight negative or NaN, or values not one-dimensional.

    Source: bias correction as in Adam, Kingma and Ba 1412.6980.

    >>> smooth([8, 2, 2, 2], 0.8).round(4).tolist()
    [8.0, 4.6667, 3.5738, 3.0407]
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"values must be one-dimensional, got shape {values.shape}")
    if not weight >= 0:
        raise ValueError(f"weight={weight} must be between 0 and 1")
    weight = min(float(weight), MAX_SMOOTHING)
    smoothed = values.tolist()
    # average += (value - average) / (1 + w + w^2 + ...): equal to the corrected average, but a constant
    # stays exactly that constant and nothing cancels for weights near 1.
    average, past = 0.0, 0.0
    for i, value in enumerate(smoothed):
        if math.isfinite(value):
            past = past * weight + 1.0
            average += (value - average) / past
            smoothed[i] = average
    return np.asarray(smoothed, dtype=np.float64)


def downsample(x: ArrayLike, y: ArrayLike, max_points: int) -> tuple[NDArray, NDArray]:
    """Thin out a curve for drawing, keeping the first and last point and each stretch's minimum and maximum.

    A spike of one step stays visible, at its own step. Where y has non-finite values, each stretch that
    has some keeps its first one too, so that a gap stays a gap.

    Args:
        x: (N,) positions in drawing order, any dtype.
        y: (N,) values.
        max_points: the most points to return, at least 5 (first, last, minimum, maximum, a gap).

    Returns:
        x and y, (M,) each, M <= max_points; unchanged where N <= max_points. The points returned are
        points of the input, in their order and dtype.

    Raises:
        ValueError: x and y differ in length or are not one-dimensional, or max_points below 5.
    """
    x, y = np.asarray(x), np.asarray(y)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"x and y must be one-dimensional and equally long, got {x.shape} and {y.shape}")
    if max_points < 5:
        raise ValueError(f"max_points={max_points} must be at least 5")
    if len(x) <= max_points:
        return x, y
    inner = y[1:-1].astype(np.float64)
    finite = np.isfinite(inner)
    kept_per_stretch = 2 if finite.all() else 3
    stretch = math.ceil(len(inner) / ((max_points - 2) // kept_per_stretch))
    padding = -len(inner) % stretch
    # (stretches, stretch): the last one filled up with what neither search can choose.
    lows = np.pad(np.where(finite, inner, np.inf), (0, padding), constant_values=np.inf).reshape(-1, stretch)
    highs = np.pad(np.where(finite, inner, -np.inf), (0, padding), constant_values=-np.inf)
    highs = highs.reshape(-1, stretch)
    gaps = np.pad(~finite, (0, padding)).reshape(-1, stretch)
    start = np.arange(len(lows)) * stretch
    has_finite = np.isfinite(lows).any(axis=1)
    has_gap = gaps.any(axis=1)
    kept = np.unique(
        np.concatenate(
            [
                (start + lows.argmin(axis=1))[has_finite] + 1,
                (start + highs.argmax(axis=1))[has_finite] + 1,
                (start + gaps.argmax(axis=1))[has_gap] + 1,
                [0, len(x) - 1],
            ]
        )
    )
    return x[kept], y[kept]
