"""One layer at one recorded step, beside the step recorded before it: what Replay shows, as numbers.

Shape: E experts.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from app.layer_stats import LayerStats
from moe_core import metrics

_DIGITS = 9  # of points of per cent: beyond, two shares differ by rounding alone


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One layer at one recorded step, beside the step recorded before it (None at the first).

    The arrays (E,) are float64, NaN where not recorded; bias_E, before_bias_E None where there is none. The rest are
    numbers of the step, NaN where not recorded.
    """

    step: int
    top_k: int
    load_E: NDArray[np.float64]
    gate_mass_E: NDArray[np.float64]
    mean_prob_E: NDArray[np.float64]
    dropped_E: NDArray[np.float64]
    bias_E: NDArray[np.float64] | None
    tokens: float
    rerouted: float
    invalid: float
    router_entropy: float
    before_step: int | None
    before_load_E: NDArray[np.float64] | None
    before_bias_E: NDArray[np.float64] | None
    before_tokens: float

    @property
    def assignments(self) -> float:
        return float(self.load_E.sum())


def moment(stats: LayerStats, step: int) -> Moment:
    """What `stats` holds of `step`. Raises ValueError where that step was not recorded."""
    row = stats.at(step)
    before = row - 1 if row else None

    def bias(at: int | None) -> NDArray[np.float64] | None:
        if at is None or stats.expert_bias_SE is None or not np.isfinite(stats.expert_bias_SE[at]).any():
            return None
        return np.asarray(stats.expert_bias_SE[at], dtype=np.float64)

    return Moment(
        step=step,
        top_k=stats.top_k,
        load_E=stats.load_SE[row].astype(np.float64),
        gate_mass_E=stats.gate_mass_SE[row],
        mean_prob_E=stats.mean_prob_SE[row],
        dropped_E=stats.dropped_SE[row].astype(np.float64),
        bias_E=bias(row),
        tokens=float(stats.tokens_S[row]),
        rerouted=float(stats.rerouted_S[row]),
        invalid=float(stats.invalid_S[row]),
        router_entropy=float(stats.router_entropy_S[row]),
        before_step=None if before is None else int(stats.steps_S[before]),
        before_load_E=None if before is None else stats.load_SE[before].astype(np.float64),
        before_bias_E=bias(before),
        before_tokens=float("nan") if before is None else float(stats.tokens_S[before]),
    )


def share_E(load_E: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each expert's share of the assignments in per cent; NaN where there are none."""
    return np.asarray(100 * metrics.load_ratio(load_E) / len(load_E), dtype=np.float64)


def share_change_E(now: Moment) -> NDArray[np.float64]:
    """What each expert's share gained since the step before, in points of per cent; NaN at the first step.

    Shares and not counts: a step may have more tokens than the one before, and then every count grows.
    """
    if now.before_load_E is None:
        return np.full_like(now.load_E, np.nan)
    return np.round(share_E(now.load_E) - share_E(now.before_load_E), _DIGITS)


def changes(now: Moment, most: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The experts whose share of the assignments gained and lost most since the step before.

    At most `most` rows each, the greatest change first, ties by expert. Columns: expert, before (%), now (%),
    change (points), and bias change where there is a bias.
    """
    frame = pd.DataFrame({"expert": np.arange(len(now.load_E))})
    before_E = np.full_like(now.load_E, np.nan) if now.before_load_E is None else share_E(now.before_load_E)
    frame["before (%)"], frame["now (%)"], frame["change (points)"] = before_E, share_E(now.load_E), share_change_E(now)
    if now.bias_E is not None:
        frame["bias change"] = np.nan if now.before_bias_E is None else now.bias_E - now.before_bias_E
    by = "change (points)"
    gained = frame[frame[by] > 0].sort_values([by, "expert"], ascending=[False, True]).head(most)
    lost = frame[frame[by] < 0].sort_values([by, "expert"]).head(most)
    return gained, lost


def expert_numbers(now: Moment) -> pd.DataFrame:
    """Everything the bars are drawn from, a row an expert; columns that were not recorded are left out."""
    nothing_E = np.full_like(now.load_E, np.nan)
    before_E = nothing_E if now.before_load_E is None else now.before_load_E
    bias_E = nothing_E if now.bias_E is None else now.bias_E
    ratio_E = metrics.load_ratio(now.load_E)
    frame = pd.DataFrame(
        {
            "expert": np.arange(len(now.load_E)),
            "assignments": now.load_E,
            "load / uniform share": ratio_E,
            "share of assignments (%)": share_E(now.load_E),
            "gate weight (sum)": now.gate_mass_E,
            "share of gate weight (%)": share_E(now.gate_mass_E),
            "mean router probability": now.mean_prob_E,
            "bias": bias_E,
            "dropped": now.dropped_E,
            "assignments before": before_E,
            "share before (%)": share_E(before_E),
            "share change (points)": share_change_E(now),
            "bias change": nothing_E if now.before_bias_E is None else bias_E - now.before_bias_E,
        }
    )
    return _whole(frame.dropna(axis="columns", how="all"))


def _whole(frame: pd.DataFrame) -> pd.DataFrame:
    """Counts as whole numbers, where they are whole."""
    for name in ("assignments", "assignments before", "dropped"):
        if name in frame and (frame[name].isna() | (frame[name] % 1 == 0)).all():
            frame[name] = frame[name].astype("Int64")
    return frame
