"""What experts specialise in, as numbers and in words: domains, and the token ids that go to them.

Shapes: D domains, E experts, V token ids.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow.compute as pc
from numpy.typing import NDArray

from app import columns
from app.words import percent, value

MUCH = 2.0  # times what other domains give an expert, from which on it is called theirs
_MIN_SHARE = 0.5  # of the baseline: an expert used less is not named, its ratios are noise
_CONTEXT = 8  # tokens on either side of an example


def of_other_domains(share_DE: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each domain the mean share of the others, (D, E); NaN where there is no other."""
    others = np.isfinite(share_DE).sum(axis=0, keepdims=True) - np.isfinite(share_DE)
    total = np.nansum(share_DE, axis=0, keepdims=True) - np.nan_to_num(share_DE)
    return np.where(others > 0, total / np.where(others > 0, others, 1), np.nan)


def own_expert(share_DE: NDArray[np.float64], baseline: float) -> tuple[int, int] | None:
    """The domain and expert whose share is furthest above that of the other domains; None with one domain or none."""
    gap_DE = share_DE - of_other_domains(share_DE)
    gap_DE = np.where(share_DE >= _MIN_SHARE * baseline, gap_DE, np.nan)
    if not np.isfinite(gap_DE).any():
        return None
    domain, expert = np.unravel_index(int(np.nanargmax(gap_DE)), gap_DE.shape)
    return int(domain), int(expert)


def headline(layer: int | str, share: pd.DataFrame) -> str:
    """The answer in words. share: of `Run.domain_specialisation`."""
    share_DE, baseline = share.to_numpy(np.float64), float(share.attrs["baseline"])
    found = own_expert(share_DE, baseline)
    if found is None:
        return f"Layer {layer}: one domain alone cannot be set against others"
    domain, expert = found
    mine, others = share_DE[domain, expert], of_other_domains(share_DE)[domain, expert]
    said = f"{percent(mine)} of the tokens of {share.index[domain]} use expert {expert}"
    said += f", {percent(others)} of those of other domains"
    if mine < MUCH * others:
        return f"Layer {layer}: no domain has experts of its own; the greatest difference: {said}"
    return f"Layer {layer}: {said}; evenly it would be {value(100 * baseline)}%"


def domain_numbers(share: pd.DataFrame) -> pd.DataFrame:
    """A row for each domain and expert: domain, expert, share, times k/E, share of the other domains."""
    share_DE, baseline = share.to_numpy(np.float64), float(share.attrs["baseline"])
    domains, experts = share_DE.shape
    frame = pd.DataFrame({"domain": np.repeat(share.index.to_numpy(), experts)})
    frame["expert"] = np.tile(np.arange(experts), domains)
    frame["share of the domain's tokens"] = share_DE.ravel()
    frame["times k/E"] = share_DE.ravel() / baseline
    frame["mean share in other domains"] = of_other_domains(share_DE).ravel()
    return frame


def tokens_of(vocabulary: pd.DataFrame, expert: int, load: int, min_occurrences: int) -> pd.DataFrame:
    """The token ids that go to an expert, the most faithful first; those seen less often are left out.

    Columns: token, token_id, occurrences, to this expert, share of the token's (%), share of the expert's (%).

    vocabulary  of `Run.vocabulary`
    load        all assignments of the expert
    """
    seen = vocabulary[(vocabulary["occurrences"] >= min_occurrences).to_numpy(bool)]
    rows, experts = _flat(seen["experts"])
    taken = experts == expert
    mine = np.zeros(len(seen), dtype=np.int64)
    mine[rows[taken]] = _flat(seen["counts"])[1][taken]
    frame = pd.DataFrame(
        {
            "token": seen["text"].to_numpy(object),
            "token_id": seen["token_id"].to_numpy(np.int64),
            "occurrences": seen["occurrences"].to_numpy(np.int64),
            "to this expert": mine,
        }
    )
    frame["share of the token's (%)"] = 100 * frame["to this expert"] / frame["occurrences"]
    frame["share of the expert's (%)"] = 100 * frame["to this expert"] / max(load, 1)
    frame = frame[frame["to this expert"] > 0]
    order = ["share of the token's (%)", "occurrences", "token_id"]
    return frame.sort_values(order, ascending=[False, False, True]).reset_index(drop=True)


def _flat(lists: pd.Series) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What stands in a column of lists, one after the other, with the row of each."""
    array = columns.array(lists)
    return pc.list_parent_indices(array).to_numpy(), pc.list_flatten(array).to_numpy()


def _pairs(rows: pd.DataFrame, *names: str) -> list[tuple[int | None, ...]]:
    """Two columns of whole numbers, row by row."""
    return list(zip(*(columns.values(rows[name]) for name in names), strict=True))


def experts_of(row: pd.Series) -> pd.DataFrame:
    """Where the occurrences of one token id went, most first: expert, occurrences, share (%). row: of a vocabulary."""
    frame = pd.DataFrame({"expert": list(row["experts"]), "occurrences": list(row["counts"])}).astype("int64")
    frame["share (%)"] = 100 * frame["occurrences"] / int(row["occurrences"])
    return frame


def examples(decisions: pd.DataFrame, tokens: pd.DataFrame, expert: int, most: int) -> pd.DataFrame:
    """Tokens that went to an expert at one step, with the text around them: before, token, after, sequence, position.

    Spread over all that there are, at most `most`. Empty where no text was recorded.
    """
    shown = ["before", "token", "after", "sequence", "position"]
    if tokens.empty or tokens["text"].isna().all():
        return pd.DataFrame(columns=shown)
    ordered = tokens.sort_values(["rank", "sequence", "position"])
    choices, experts = _flat(decisions["experts"])
    takes = decisions.iloc[np.unique(choices[experts == expert])]
    chosen = set(_pairs(takes, "rank", "token"))
    keys = _pairs(ordered, "rank", "token")
    places = [place for place, key in enumerate(keys) if key in chosen]
    every = max(1, -(-len(places) // most))
    texts = [text or "" for text in columns.values(ordered["text"])]
    sequences = _pairs(ordered, "rank", "sequence")
    rows = []
    for place in places[::every]:
        near = [n for n in range(max(place - _CONTEXT, 0), place + _CONTEXT + 1) if n < len(texts)]
        same = [n for n in near if sequences[n] == sequences[place]]
        before = "".join(texts[n] for n in same if n < place)
        after = "".join(texts[n] for n in same if n > place)
        rows.append((before, texts[place], after, sequences[place][1], int(ordered["position"].iloc[place])))
    return pd.DataFrame(rows, columns=shown)
