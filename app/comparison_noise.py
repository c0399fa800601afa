"""When a difference is more than noise: by how it wavers within the window, or between runs of a group.

Shape suffixes: B stretches of the window.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Two-sided 95% points of Student's t for 1, 2, 3, ... degrees of freedom; beyond the last, that of the normal.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_T_MORE = {11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000}
_NORMAL = 1.960


def t_95(freedom: float) -> float:
    """The t beyond which 5% lie, both sides together; between tabled degrees of freedom that of the lower one.

    Raises ValueError below one degree of freedom.
    """
    if not freedom >= 1:
        raise ValueError(f"freedom={freedom} must be at least 1")
    if freedom < len(_T) + 1:
        return _T[int(freedom) - 1]
    tabled = [degrees for degrees in _T_MORE if degrees <= freedom]
    return _T[-1] if not tabled else _NORMAL if freedom > 120 else _T_MORE[max(tabled)]


def pseudo_values(whole: float, without_B: Sequence[float]) -> NDArray[np.float64]:
    """What each stretch of a window adds to a number taken over all of it, (B,): B * whole - (B - 1) * without it.

    Of a mean over stretches of one length these are the means of the stretches. Of a number that is no mean, such as
    the max_violation of summed loads, they are on the scale of the number itself, which the numbers of single stretches
    are not.

    Source: the jackknife with blocks, Tukey 1958 and Künsch 1989.
    """
    without = np.asarray(without_B, dtype=np.float64)
    return without.size * whole - (without.size - 1) * without


def margin(differences_B: ArrayLike) -> float:
    """Half the width of the 95% interval of the mean of these differences; NaN for fewer than two of them."""
    values_B = np.asarray(differences_B, dtype=np.float64)
    if values_B.size < 2:
        return math.nan
    return float(t_95(values_B.size - 1) * values_B.std(ddof=1) / math.sqrt(values_B.size))


def group_as_good(best: Sequence[float], other: Sequence[float], better: str) -> bool | None:
    """The same of two groups of runs, by Welch's t.

    None where that is open: a group of one run, or runs that do not differ at all within their groups (copies, or one
    seed recorded twice), which tell nothing of how far others would.
    """
    if min(len(best), len(other)) < 2:
        return None
    behind = (float(np.mean(other)) - float(np.mean(best))) * (1 if better == "lower" else -1)
    parts = [float(np.var(group, ddof=1)) / len(group) for group in (best, other)]
    error = sum(parts)
    if error == 0:
        return True if behind == 0 else None
    spent = sum(part**2 / (len(group) - 1) for part, group in zip(parts, (best, other), strict=True))
    return behind <= t_95(max(error**2 / spent, 1.0)) * math.sqrt(error)
