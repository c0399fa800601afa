"""Where the tokens of one step and layer went: decisions joined with their tokens, counted, cut to what fits.

Shape suffixes: T tokens, K top-k, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from app import columns
from app.figures.theme import OKABE_ITO
from app.figures.token_text import TokenRows

Counting = Literal["first", "any"]


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Every token of one step with its experts in one layer, in order of sequence and position.

    rows      as the figures take them
    has_text  False where no token of the step has a text
    numbered  True where the run tells nothing about the tokens: they are then numbered in order, as one sequence
    left_out  decisions whose token was not recorded, and which are therefore not among `rows`
    ranks     how many ranks wrote them; sequences of the second and later ranks are numbered on
    """

    rows: TokenRows
    has_text: bool
    numbered: bool
    left_out: int
    ranks: int


def join(decisions: pd.DataFrame, tokens: pd.DataFrame) -> Routes:
    """Join `Run.decisions` with `Run.tokens` of the same step.

    Raises ValueError where decisions have fewer weights than experts, naming the numbers.
    """
    experts_TK = _matrix(decisions["experts"], fill=-1).astype(np.int64)
    weights_TK = _matrix(decisions["weights"], fill=np.nan, width=experts_TK.shape[1])
    kept = decisions["kept"]
    kept_TK = None if kept.isna().all() else _matrix(kept, fill=1, width=experts_TK.shape[1]).astype(bool)
    if tokens.empty:
        number_T = decisions["token"].to_numpy(np.int64)
        rows = TokenRows(
            text_T=[f"#{number}" for number in number_T],
            sequence_T=np.zeros(len(number_T), np.int64),
            position_T=number_T,
            experts_TK=experts_TK,
            weights_TK=weights_TK,
            kept_TK=kept_TK,
        )
        return Routes(rows=rows, has_text=False, numbered=True, left_out=0, ranks=1)
    places = decisions[["rank", "token"]].assign(row=np.arange(len(decisions)))
    joined = tokens.merge(places, on=["rank", "token"], how="inner")
    rank_T, sequence_T = (joined[name].to_numpy(np.int64, na_value=0) for name in ("rank", "sequence"))
    sequence_T = numbered_on(rank_T, sequence_T)
    position_T = joined["position"].to_numpy(np.int64, na_value=0)
    order = np.lexsort((position_T, sequence_T))
    row_T = joined["row"].to_numpy(np.int64)[order]
    sorted_ = joined.iloc[order]
    text_T, token_id_T = columns.values(sorted_["text"]), columns.values(sorted_["token_id"])
    has_text = any(text is not None for text in text_T)
    if not has_text and all(token_id is None for token_id in token_id_T):
        text_T = [f"#{position}" for position in position_T[order]]
    rows = TokenRows(
        text_T=text_T,
        sequence_T=sequence_T[order],
        position_T=position_T[order],
        experts_TK=experts_TK[row_T],
        weights_TK=weights_TK[row_T],
        kept_TK=None if kept_TK is None else kept_TK[row_T],
        domain_T=columns.values(sorted_["domain"]),
        token_id_T=token_id_T,
    )
    return Routes(
        rows=rows,
        has_text=has_text,
        numbered=False,
        left_out=len(decisions) - len(joined),
        ranks=len(np.unique(rank_T)),
    )


def numbered_on(rank_T: np.ndarray, sequence_T: np.ndarray) -> np.ndarray:
    """(T,) sequences of all ranks of a step as one count: those of the second and later ranks are numbered on."""
    return sequence_T + np.searchsorted(np.unique(rank_T), rank_T) * (int(sequence_T.max(initial=0)) + 1)


def take(rows: TokenRows, index_T: np.ndarray) -> TokenRows:
    """The tokens at these places, in this order."""
    return TokenRows(
        text_T=[rows.text_T[i] for i in index_T],
        sequence_T=rows.sequence_T[index_T],
        position_T=rows.position_T[index_T],
        experts_TK=rows.experts_TK[index_T],
        weights_TK=rows.weights_TK[index_T],
        domain_T=None if rows.domain_T is None else [rows.domain_T[i] for i in index_T],
        kept_TK=None if rows.kept_TK is None else rows.kept_TK[index_T],
        token_id_T=None if rows.token_id_T is None else [rows.token_id_T[i] for i in index_T],
    )


def domains_T(rows: TokenRows) -> np.ndarray:
    """The domain of each token as object array, None where none was recorded."""
    return np.array([rows.domain(i) for i in range(len(rows))], dtype=object)


def in_order(found: np.ndarray, known: Sequence[str]) -> list[str]:
    """The domains among `found`, those of `known` first and in its order; without None."""
    names = {str(name) for name in found if name is not None}
    return [name for name in known if name in names] + sorted(names - set(known))


def first_choice(experts_TK: np.ndarray) -> np.ndarray:
    """(T,) each token's best choice, -1 where it reached no expert."""
    has_TK = experts_TK >= 0
    best_T = has_TK.argmax(axis=1) if experts_TK.shape[1] else np.zeros(len(experts_TK), np.int64)
    return np.where(has_TK.any(axis=1), experts_TK[np.arange(len(experts_TK)), best_T], -1)


def shares(experts_TK: np.ndarray, num_experts: int, counting: Counting = "first") -> np.ndarray:
    """(E,) share of the tokens that use each expert: as their first choice, or as any of their k choices.

    Tokens that reached no expert count in the denominator. NaN where there are no tokens.
    """
    if len(experts_TK) == 0:
        return np.full(num_experts, np.nan)
    if counting == "first":
        chosen = first_choice(experts_TK)[:, None]
    else:
        chosen = np.sort(experts_TK, axis=1)  # so that an expert named twice counts once
        chosen = np.where(np.diff(chosen, axis=1, prepend=-2) == 0, -1, chosen)
    return np.bincount(chosen[chosen >= 0], minlength=num_experts) / len(experts_TK)


def by_domain(
    rows: TokenRows, num_experts: int, domains: Sequence[str], counting: Counting
) -> tuple[pd.DataFrame, np.ndarray]:
    """Share of each domain's tokens by expert, in per cent, as a table; and as shares, (domains, E).

    The table has a row per expert (beyond 64, per expert that is used) and a last one for tokens without a route,
    where there are any.
    """
    of_T = domains_T(rows)
    everywhere_E = shares(rows.experts_TK, num_experts, counting)
    share_DE = np.array([shares(rows.experts_TK[of_T == name], num_experts, counting) for name in domains])
    share_DE = share_DE.reshape(len(domains), num_experts)
    shown = np.arange(num_experts) if num_experts <= 64 else np.flatnonzero(everywhere_E)
    unrouted_T = first_choice(rows.experts_TK) < 0
    names = [str(expert) for expert in shown] + (["no expert"] if unrouted_T.any() else [])

    def column(share_E: np.ndarray, among_T: np.ndarray) -> list[float]:
        last = [float(unrouted_T[among_T].mean())] if unrouted_T.any() else []
        return [round(100 * value, 2) for value in [*share_E[shown].tolist(), *last]]

    table: dict[str, Any] = {"expert": names, "all tokens, %": column(everywhere_E, np.ones(len(rows), bool))}
    for name, share_E in zip(domains, share_DE, strict=True):
        table[f"{name}, %"] = column(share_E, of_T == name)
    return pd.DataFrame(table), share_DE


def busiest(share_E: np.ndarray, count: int, *, always: int | None = None) -> list[int]:
    """The experts with the greatest shares, busiest first, unused ones left out; `always` is among them."""
    order = [int(e) for e in np.lexsort((np.arange(len(share_E)), -share_E)) if share_E[e] > 0][:count]
    if always is not None and always not in order:
        order = [*order[: count - 1], always]
    return order


def colour_owners(total_E: np.ndarray) -> list[int]:
    """The experts that have a colour, in the order of the colours: the busiest of the whole run.

    total_E: their loads summed over all training steps. It depends on run and layer alone, so that an expert keeps
    its colour whatever step, phase or sequence is shown.
    """
    return [int(e) for e in np.lexsort((np.arange(len(total_E)), -total_E))[: len(OKABE_ITO)]]


def sequences(rows: TokenRows) -> list[tuple[int, str | None]]:
    """The sequences in order, each with the domain of its first token."""
    numbers, first = np.unique(rows.sequence_T, return_index=True)
    return [(int(number), rows.domain(int(i))) for number, i in zip(numbers, first, strict=True)]


def shorten(rows: TokenRows, chosen: Sequence[int], max_tokens: int) -> tuple[TokenRows, int]:
    """The beginnings of these sequences, at most about `max_tokens` together, and how many tokens each may have."""
    each = max(max_tokens // max(len(chosen), 1), 1)
    index = [np.flatnonzero(rows.sequence_T == sequence)[:each] for sequence in chosen]
    return take(rows, np.concatenate([np.zeros(0, np.int64), *index])), each


def numbers(rows: TokenRows) -> pd.DataFrame:
    """One row per choice of each token: what the token matrix draws."""
    num_tokens, k = rows.experts_TK.shape
    table = pd.DataFrame(
        {
            "sequence": np.repeat(rows.sequence_T, k),
            "position": np.repeat(rows.position_T, k),
            "token": np.repeat(np.array([rows.visible(i) for i in range(num_tokens)], dtype=object), k),
            "domain": np.repeat(domains_T(rows), k),
            "choice": np.tile(np.arange(1, k + 1), num_tokens),
            "expert": rows.experts_TK.reshape(-1),
            "weight": np.asarray(rows.weights_TK, np.float64).reshape(-1),
        }
    )
    if rows.kept_TK is not None:
        table["dropped"] = ~rows.kept_TK.reshape(-1)
    return table[table["expert"] >= 0]


def _matrix(column: pd.Series, *, fill: float, width: int | None = None) -> np.ndarray:
    """A column of lists as (T, K) float64; what is missing, or beyond the end of a shorter list, is `fill`."""
    lists = columns.array(column)
    if pa.types.is_null(lists.type):
        return np.full((len(lists), width or 0), fill)
    lengths_T = np.asarray(pc.list_value_length(lists).fill_null(0))
    widest = int(lengths_T.max(initial=0)) if width is None else width
    if lengths_T.max(initial=0) > widest:
        raise ValueError(f"a list of {lengths_T.max()} values where there are {widest} experts")
    matrix_TK = np.full((len(lists), widest), fill, dtype=np.float64)
    values = lists.drop_null().flatten().cast(pa.float64()).to_numpy(zero_copy_only=False)
    matrix_TK[np.arange(widest) < lengths_T[:, None]] = np.where(np.isnan(values), fill, values)
    return matrix_TK
