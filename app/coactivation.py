"""Which experts fire together, in what order to show them, and in words.

Shapes: E experts of a layer, F of the next MoE layer.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from app.words import count, percent, value
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


def even_pair_share(num_experts: int, top_k: int) -> float:
    """Share of all tokens that use both experts of a pair, were all pairs used alike: k (k - 1) / (E (E - 1))."""
    return top_k * (top_k - 1) / (num_experts * (num_experts - 1)) if num_experts > 1 else float("nan")


def strongest(share: NDArray[np.float64], baseline: NDArray[np.float64], named: NDArray[np.bool_]) -> tuple[int, int]:
    """The pair (row, column) whose share is the most times its baseline; rows and columns not `named` do not count."""
    with np.errstate(divide="ignore", invalid="ignore"):
        lift = np.where(named, share / baseline, np.nan)
    row, column = np.unravel_index(int(np.nanargmax(np.where(np.isfinite(lift), lift, -1))), lift.shape)
    return int(row), int(column)


def commonest_pair(together_EE: NDArray[np.int64]) -> tuple[int, int]:
    """The two experts, lower number first, that most tokens use together; the first of equals."""
    first, second = np.triu_indices(len(together_EE), k=1)
    most = int(together_EE[first, second].argmax())
    return int(first[most]), int(second[most])


def commonest_title(layer: int | str, together_EE: NDArray[np.int64], tokens: int, top_k: int) -> str:
    """The pair that most tokens use, of all `tokens`. together_EE: tokens that use both experts."""
    one, other = commonest_pair(together_EE)
    number = int(together_EE[one, other])
    if not number:
        return f"Layer {layer}: no token uses two experts"
    even = percent(even_pair_share(len(together_EE), top_k), 1)
    return (
        f"Layer {layer}: experts {one} and {other} fire together most, for {number:,} of {count(tokens, 'token')} "
        f"({percent(number / tokens, 1)}; each pair would get {even} if all were even)"
    )


def closest_title(layer: int | str, share_EE: NDArray[np.float64], load_E: NDArray, chance: float) -> str:
    """The expert whose own tokens use another one most. share_EE: NaN on the diagonal."""
    enough = load_E >= _MIN_TOKENS_SHARE * load_E.mean()
    named = enough[:, None] & enough[None, :]
    one, other = strongest(share_EE, np.full_like(share_EE, chance), named)
    share = share_EE[one, other]
    times = value(float(share / chance), 2)
    said = f"{percent(share)} of the tokens of expert {one} use expert {other} too, {times} times chance"
    if share < MUCH * chance:
        return f"Layer {layer}: no expert shares its tokens with another much more than by chance; most: {said}"
    return f"Layer {layer}: {said}, the most of all pairs"


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


def together_table(together_EE: NDArray[np.int64], tokens: int, top_k: int) -> pd.DataFrame:
    """A row for each two experts, the pair that most tokens use first, at most MAX_PAIRS.

    together_EE: tokens that use both experts, those of each expert on the diagonal; tokens: all there are.
    """
    first, second = np.triu_indices(len(together_EE), k=1)
    order = np.argsort(-together_EE[first, second], kind="stable")[:MAX_PAIRS]
    first, second = first[order], second[order]
    both, alone_E = together_EE[first, second].astype(np.float64), np.diagonal(together_EE)
    with np.errstate(divide="ignore", invalid="ignore"):
        return pd.DataFrame(
            {
                "expert": first,
                "with expert": second,
                "tokens": together_EE[first, second],
                "share of all tokens": both / tokens,
                "times an even share": both / tokens / even_pair_share(len(together_EE), top_k),
                "of the expert's tokens": both / alone_E[first],
                "of the other's tokens": both / alone_E[second],
            }
        )


def flow_table(share_EF: NDArray[np.float64], taken_F: NDArray[np.float64]) -> pd.DataFrame:
    """A row for each expert and each of the next layer, greatest share first, at most MAX_PAIRS.

    taken_F: share of all choices that goes to each expert of the next layer.
    """
    rows, columns = np.nonzero(~np.isnan(share_EF))
    values = share_EF[rows, columns]
    most = np.argsort(-values, kind="stable")[:MAX_PAIRS]
    rows, columns, values = rows[most], columns[most], values[most]
    with np.errstate(divide="ignore", invalid="ignore"):
        times = values / taken_F[columns]
    frame = pd.DataFrame({"from expert": rows, "to expert": columns, "share": values})
    frame["times chance"] = np.where(np.isfinite(times), times, np.nan)
    return frame


def _used_first(similarity: NDArray[np.float64], used: NDArray[np.bool_]) -> NDArray[np.int64]:
    there = np.flatnonzero(used)
    return np.concatenate([there[cluster_order(similarity[np.ix_(there, there)])], np.flatnonzero(~used)])
