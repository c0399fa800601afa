"""The lab's numbers as tables: a row for a token, an expert or an assignment.

Shapes: T tokens, E experts, K choices a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from app.lab import steps
from app.lab.run import Outcome
from app.lab.settings import Settings
from app.words import NONE
from moe_core.metrics import load_ratio

FOLLOWED = {  # the stages of one token, in order, and how each comes from those before
    "logit": "given",
    "logit with noise": "logit + noise",
    "score": "",  # of the router, see `_SCORE`
    "bias": "the balancer's, or set by hand",
    "corrected": "score + bias; out where its group lost",
    "place": "1 = highest corrected score",
    "weight, raw": "the chosen one's own score",
    "weight": "raw / sum of the chosen raw",
    "weight, scaled": "weight x scaling",
}
_SCORE = {
    "softmax": "exp(logit) / sum of exp(logits)",
    "softmax-after": "logit",
    "sigmoid": "1 / (1 + exp(-logit))",
    "expert-choice": "exp(logit) / sum of exp(logits)",
}


def by_expert(values_TE: NDArray[Any], **more: Any) -> pd.DataFrame:
    """A row for each token, a column for each expert, and further columns behind."""
    frame = pd.DataFrame(values_TE, columns=[f"expert {expert}" for expert in range(values_TE.shape[1])])
    frame.insert(0, "token", np.arange(len(frame)))
    return frame.assign(**more)


def followed(outcome: Outcome, ranking: steps.Ranking, settings: Settings, token: int) -> pd.DataFrame:
    """One token from its logits to its weights: a row for each stage, with its formula."""
    ids_K = outcome.expert_ids_TK[token]
    chosen = ids_K >= 0
    E = outcome.logits_TE.shape[1]

    def at_chosen(weights_TK: NDArray[np.float32]) -> NDArray[np.float64]:
        values_E = np.full(E, np.nan)
        values_E[ids_K[chosen]] = weights_TK[token][chosen]
        return values_E

    rows: dict[str, NDArray[Any]] = {"logit": outcome.logits_TE[token]}
    if outcome.noisy_TE is not None:
        rows["logit with noise"] = outcome.noisy_TE[token]
    rows["score"] = outcome.selection_TE[token]
    if outcome.bias_E is not None:
        rows["bias"] = outcome.bias_E
    if settings.router == "expert-choice":
        places_TE = steps.rank_in_column(outcome.selection_TE)
        rows["place"] = np.where(outcome.routed_T[token], places_TE[token], np.nan)
    else:
        if outcome.bias_E is not None or ranking.group_scores_TG is not None:
            rows["corrected"] = ranking.corrected_TE[token]
        place_E = np.full(E, np.nan)
        order_R = ranking.order_TR[token]
        place_E[order_R[order_R >= 0]] = 1 + np.flatnonzero(order_R >= 0)
        rows["place"] = place_E
    if settings.renormalizes or settings.router == "softmax-after":
        raw_TK = outcome.raw_TK if settings.renormalizes else steps.at_ids(outcome.selection_TE, outcome.expert_ids_TK)
        rows["weight, raw"] = at_chosen(raw_TK)
    rows["weight"] = at_chosen(outcome.unscaled_TK)
    if settings.scaling != 1:
        rows["weight, scaled"] = at_chosen(outcome.weights_TK)
    frame = pd.DataFrame(np.array(list(rows.values()), dtype=np.float64), columns=[f"expert {e}" for e in range(E)])
    frame.insert(0, "stage", list(rows))
    frame.insert(1, "how", [how(stage, settings) for stage in rows])
    return frame


def as_text(stages: pd.DataFrame) -> pd.DataFrame:
    """`followed` as the page shows it: places whole, other numbers with four decimals, "out" for -inf, "-" for none."""

    def written(number: float, digits: int) -> str:
        return NONE if np.isnan(number) else "out" if np.isneginf(number) else f"{number:.{digits}f}"

    shown = stages.copy()
    for name in shown.columns[2:]:
        digits_S = np.where(shown["stage"] == "place", 0, 4)
        shown[name] = [written(number, digits) for number, digits in zip(stages[name], digits_S, strict=True)]
    return shown


def how(stage: str, settings: Settings) -> str:
    """How a stage of `followed` comes about under these settings, in a few words."""
    after = settings.router == "softmax-after"
    if stage == "score":
        noisy = settings.noise_std > 0 and settings.router != "expert-choice"
        return _SCORE[settings.router] + (", with noise" if noisy else "")
    if stage == "place" and settings.router == "expert-choice":
        return "among the expert's tokens, 1 = highest score"
    if stage == "corrected" and settings.num_groups == settings.top_groups:
        return "score + bias"
    if stage == "weight, raw" and after:
        return "the chosen one's own logit"
    if stage == "weight":
        if after:
            return "exp(raw) / sum over the chosen"
        return FOLLOWED["weight"] if settings.renormalizes else "the chosen one's own score"
    return FOLLOWED[stage]


def assignments(outcome: Outcome) -> pd.DataFrame:
    """A row for each assignment: the token, its choice, the expert, its weights, and whether capacity kept it."""
    tokens, choices = np.nonzero(outcome.expert_ids_TK >= 0)
    frame = pd.DataFrame(
        {
            "token": tokens,
            "choice": choices + 1,
            "expert": outcome.expert_ids_TK[tokens, choices],
            "raw": outcome.raw_TK[tokens, choices],
            "weight": outcome.unscaled_TK[tokens, choices],
            "scaled": outcome.weights_TK[tokens, choices],
        }
    )
    if outcome.kept_TK is not None:
        frame["kept"] = outcome.kept_TK[tokens, choices]
    return frame


def loads(outcome: Outcome) -> pd.DataFrame:
    """A row for each expert: its load now and after the update, with the bias that belongs to each."""
    frame = pd.DataFrame(
        {
            "expert": np.arange(len(outcome.load_E)),
            "load": outcome.load_E,
            "load / uniform": load_ratio(outcome.load_E),
        }
    )
    if outcome.dropped_E is not None:
        frame["dropped"] = outcome.dropped_E
        frame["kept"] = outcome.load_E - outcome.dropped_E
    frame["bias"] = 0.0 if outcome.bias_E is None else outcome.bias_E
    frame["new bias"] = outcome.updated.bias_E
    frame["load after"] = outcome.next_load_E
    frame["load / uniform after"] = load_ratio(outcome.next_load_E)
    return frame


def shares(outcome: Outcome, settings: Settings) -> pd.DataFrame:
    """A row for each sequence and expert: f, P, their product, and E times it."""
    f_BE, P_BE = steps.sequence_shares(outcome, settings)
    B, E = f_BE.shape
    frame = pd.DataFrame(
        {
            "sequence": np.repeat(np.arange(B), E),
            "expert": np.tile(np.arange(E), B),
            "f": f_BE.ravel(),
            "P": P_BE.ravel(),
            "f x P": (f_BE * P_BE).ravel(),
            "E x f x P": (E * f_BE * P_BE).ravel(),
        }
    )
    return frame if B > 1 else frame.drop(columns="sequence")


def z_terms(outcome: Outcome) -> pd.DataFrame:
    """A row for each token: the logsumexp of its logits and its square; empty where the token does not count."""
    lse_T = np.where(outcome.routed_T, steps.logsumexp(outcome.logits_TE), np.nan)
    return pd.DataFrame({"token": np.arange(len(lse_T)), "logsumexp": lse_T, "squared": lse_T**2})


def sign_steps(outcome: Outcome, settings: Settings) -> pd.DataFrame:
    """A row for each expert: the sign rule, step by step."""
    update = steps.sign_update(outcome, settings)
    old_E = np.zeros(len(update.below_E)) if outcome.bias_E is None else outcome.bias_E
    return pd.DataFrame(
        {
            "expert": np.arange(len(old_E)),
            "count": outcome.observed.count_E,
            "mean - count": update.below_E,
            "sign": np.sign(update.below_E).astype(int),
            "delta": update.delta_E,
            "delta - mean": update.step_E,
            "bias": old_E,
            "new bias": outcome.updated.bias_E,
        }
    )


def quantile_steps(outcome: Outcome, settings: Settings) -> pd.DataFrame | None:
    """A row for each expert: its gaps in order, the quantile among them, and the bias; None where there is none."""
    update = steps.quantile_update(outcome, settings)
    if update is None:
        return None
    E = len(update.quantile_E)
    frame = pd.DataFrame({"expert": np.arange(E)})
    if update.bin_E is not None and update.lowest_E is not None and update.width_E is not None:
        frame = frame.assign(**{"lowest gap": update.lowest_E, "bin width": update.width_E, "bin": update.bin_E})
    old_E = np.zeros(E) if outcome.bias_E is None else outcome.bias_E
    return frame.assign(
        **{
            "quantile": update.quantile_E,
            "quantile - mean": update.bias_E,
            "bias": old_E,
            "new bias": outcome.updated.bias_E,
        }
    )


def gaps(outcome: Outcome, settings: Settings) -> pd.DataFrame | None:
    """A row for each token: its threshold and, for each expert, threshold - score; None where there is no threshold."""
    update = steps.quantile_update(outcome, settings)
    return None if update is None else by_expert(update.gap_TE, threshold=outcome.threshold_T)


def gaps_in_order(update: steps.QuantileUpdate) -> pd.DataFrame:
    """Each expert's gaps in ascending order, the row of the quantile marked."""
    frame = by_expert(update.sorted_NE).rename(columns={"token": "number"})
    frame["number"] += 1
    frame.insert(1, "which", np.where(frame["number"] == update.rank + 1, "quantile", ""))
    return frame
