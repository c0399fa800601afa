"""Which experts fire together, in what order to show them, and in words.

Shapes: E experts of a layer, F of the next MoE layer.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from app.words import percent, value
from moe_core.ordering import cluster_order

MAX_PAIRS = 10_000  # rows of a table
MUCH = 2.0  # times chance, from which on a pair is called one
_MIN_TOKENS_SHARE = 0.1  # of the uniform share: an expert used less is not named in a title, its shares are noise


def together_order(share_EE: NDArray[np.float64]) -> NDArray[np.int64]:
    """Experts that fire together side by side. share_EE: N_ab / N_a; experts that nobody chose come last."""
    used = np.asarray(~np.isnan(share_EE).all(axis=1))
    return _used_first(np.sqrt(share_EE * share_EE.T), used)


def flow_orders(share_EF: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows that go to the same experts side by side; columns where most of their flow comes from.

    share_EF: rows sum to 1, or are NaN where nobody chose the expert; those come last.
    """
    used = np.asarray(~np.isnan(share_EF).any(axis=1))
    profile = np.nan_to_num(share_EF)
    length = np.sqrt((profile**2).sum(axis=1, keepdims=True))
    profile = profile / np.where(length > 0, length, 1)
    rows = _used_first(profile @ profile.T, used)
    flow = np.nan_to_num(share_EF)[rows]
    total_F = flow.sum(axis=0)
    centre_F = (flow * np.arange(len(rows))[:, None]).sum(axis=0) / np.where(total_F > 0, total_F, 1)
    return rows, np.argsort(np.where(total_F > 0, centre_F, np.inf), kind="stable")


def pair_chance(num_experts: int, top_k: int) -> float:
    """Share of an expert's tokens that use another one, where all are used evenly and at random: (k - 1) / (E - 1)."""
    return (top_k - 1) / (num_experts - 1) if num_experts > 1 else float("nan")


def strongest(share: NDArray[np.float64], baseline: NDArray[np.float64], named: NDArray[np.bool_]) -> tuple[int, int]:
    """The pair (row, column) whose share is the most times its baseline; rows and columns not `named` do not count."""
    with np.errstate(divide="ignore", invalid="ignore"):
        lift = np.where(named, share / baseline, np.nan)
    row, column = np.unravel_index(int(np.nanargmax(np.where(np.isfinite(lift), lift, -1))), lift.shape)
    return int(row), int(column)


def together_title(layer: int | str, share_EE: NDArray[np.float64], load_E: NDArray, chance: float) -> str:
    """The strongest pair of a layer. share_EE: NaN on the diagonal."""
    enough = load_E >= _MIN_TOKENS_SHARE * load_E.mean()
    named = enough[:, None] & enough[None, :]
    one, other = strongest(share_EE, np.full_like(share_EE, chance), named)
    share = share_EE[one, other]
    times = value(float(share / chance), 2)
    said = f"{percent(share)} of the tokens of expert {one} use expert {other} too, {times} times chance"
    if share < MUCH * chance:
        return f"Layer {layer}: no pair fires together much more than by chance; most: {said}"
    return f"Layer {layer}: {said}, the closest pair"


def flow_title(
    layer: int | str, following: int | str, share_EF: NDArray[np.float64], load_E: NDArray, taken_F: NDArray
) -> str:
    """The strongest flow. taken_F: share of all choices that goes to each expert of the next layer."""
    named = (load_E >= _MIN_TOKENS_SHARE * load_E.mean())[:, None] & (taken_F >= _MIN_TOKENS_SHARE / len(taken_F))[None]
    one, other = strongest(share_EF, np.broadcast_to(taken_F, share_EF.shape), named)
    share = share_EF[one, other]
    times = share / taken_F[other]
    said = f"{percent(share)} of the choices of expert {one} go on to expert {other}"
    said += f", which gets {percent(float(taken_F[other]))} of all"
    if times < MUCH:
        return f"Layer {layer} to {following}: no flow stands out; strongest: {said}"
    return f"Layer {layer} to {following}: {said}"


def pairs_table(share: NDArray[np.float64], names: tuple[str, str, str], baseline: NDArray[np.float64]) -> pd.DataFrame:
    """A row for each pair, greatest share first, at most MAX_PAIRS. names: of the row, the column and the share."""
    rows, columns = np.nonzero(~np.isnan(share))
    values = share[rows, columns]
    most = np.argsort(-values, kind="stable")[:MAX_PAIRS]
    rows, columns, values = rows[most], columns[most], values[most]
    with np.errstate(divide="ignore", invalid="ignore"):
        times = values / np.broadcast_to(baseline, share.shape)[rows, columns]
    frame = pd.DataFrame({names[0]: rows, names[1]: columns, names[2]: values})
    frame["times chance"] = np.where(np.isfinite(times), times, np.nan)
    return frame


def _used_first(similarity: NDArray[np.float64], used: NDArray[np.bool_]) -> NDArray[np.int64]:
    there = np.flatnonzero(used)
    return np.concatenate([there[cluster_order(similarity[np.ix_(there, there)])], np.flatnonzero(~used)])
