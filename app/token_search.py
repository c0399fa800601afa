"""One token through a run: where it occurs in the recorded steps, and which expert it goes to in every layer.

Work is bounded: where a phase has more recorded decisions than `MAX_ROWS`, steps spread evenly over it are searched.
Shape suffixes: O occurrences, L layers (routers), E experts, K top-k.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from app import layer_keys
from app.figures.token_text import MARKS
from app.token_routes import first_choice, numbered_on
from recorder import merge
from recorder.reader import Run
from recorder.schema import lists_to_matrix

MAX_ROWS = 6_000_000  # rows of decisions read for a search
MAX_LISTED = 2_000  # occurrences that are listed one by one; all are counted
NO_EXPERT = "no expert"
_SUGGESTED = 8
_LETTER_OF = {mark: letter for letter, mark in MARKS.items()} | {"·": " "}
_TOKEN_COLUMNS = ["step", "phase", "token", "sequence", "position", "token_id", "text", "domain", "rank", "segment"]
_DECISION_COLUMNS = ["step", "phase", "layer", "router", "token", "experts", "rank", "segment"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search found.

    searched     the steps looked at, ascending; `recorded` says how many there are
    occurrences  tokens found in them
    by_id        whether the token was found by its id and not its text
    spellings    of each token id found its text and occurrences, most first: " self" and "self" are two; empty where
                 no ids were recorded
    counts       (step, key of the layer) -> {expert: occurrences whose first choice it is}; -1 = no expert
    listed       a row for each of the first `MAX_LISTED` occurrences, the newest step first: step, sequence, position,
                 token, token_id, domain, and for each layer's key a column of its experts as text, best first
    suggestions  tokens that hold the text asked for, where none is the text asked for
    """

    searched: list[int]
    recorded: int
    occurrences: int = 0
    by_id: bool = False
    spellings: dict[int, tuple[str | None, int]] = field(default_factory=dict)
    counts: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    listed: pd.DataFrame = field(default_factory=pd.DataFrame)
    suggestions: list[str] = field(default_factory=list)

    def steps(self) -> list[int]:
        """The steps in which the token occurs."""
        return sorted({step for step, _ in self.counts})

    def shares(self, key: int, step: int) -> dict[int, float]:
        """Share of the token's occurrences by first choice in one step and layer."""
        counts = self.counts.get((step, key), {})
        total = sum(counts.values())
        return {expert: number / total for expert, number in counts.items()} if total else {}


@dataclass(frozen=True, kw_only=True)
class Query:
    """What is looked for: tokens of a text, or of an id. `words` is how it was asked."""

    words: str
    text: str | None
    token_id: int | None


def parse(words: str) -> Query | None:
    """The query that a person typed; None for nothing.

    "id:17" is an id, "17" a text or else an id; marks of white space as the pages show them (⏎, ⇥, ·) are taken back.
    """
    if not words:
        return None
    number = words.strip().removeprefix("id:").strip()
    token_id = int(number) if number.isdecimal() and len(number) < 10 else None
    if words.strip().startswith("id:"):
        return Query(words=words, text=None, token_id=token_id)
    return Query(words=words, text="".join(_LETTER_OF.get(letter, letter) for letter in words), token_id=token_id)


def matches(tokens: pa.Table, query: Query, *, by_id: bool) -> np.ndarray:
    """Which rows of `tokens` are meant, bool. Spaces around a text do not count, if there is anything else in it."""
    if by_id:
        found = pc.equal(tokens["token_id"], query.token_id)
    else:
        found = pc.equal(tokens["text"], query.text)
        if query.text is not None and (bare := query.text.strip()):
            found = pc.or_(found, pc.equal(pc.utf8_trim_whitespace(tokens["text"]), bare))
    return np.asarray(pc.fill_null(found, False))


def is_text(text: str | None, query: Query) -> bool:
    """`matches` of a single text."""
    if text is None or query.text is None:
        return False
    bare = query.text.strip()
    return text == query.text or bool(bare and text.strip() == bare)


def search(run: Run, words: str, phase: str, max_rows: int = MAX_ROWS) -> Search:
    """Look for a token in the recorded steps of a phase and follow it through all layers."""
    query = parse(words)
    recorded = run.decision_steps(phase)
    searched = _spread(recorded, _affordable(run, len(recorded), max_rows))
    if query is None or not searched:
        return Search(searched=searched, recorded=len(recorded))
    found: dict[int, pa.Table] = {}
    by_id = query.text is None
    tables = {step: _tokens(run, step, phase) for step in searched}
    if not by_id:
        found = {step: rows.filter(pa.array(matches(rows, query, by_id=False))) for step, rows in tables.items()}
        by_id = query.token_id is not None and not any(rows.num_rows for rows in found.values())
    if by_id and query.token_id is not None:
        found = {step: rows.filter(pa.array(matches(rows, query, by_id=True))) for step, rows in tables.items()}
    found = {step: rows for step, rows in found.items() if rows.num_rows}
    if not found:
        return Search(searched=searched, recorded=len(recorded), suggestions=_suggestions(tables[searched[-1]], query))
    counts: dict[tuple[int, int], dict[int, int]] = {}
    listed: list[pd.DataFrame] = []
    for step in sorted(found, reverse=True):
        rows = found[step]
        room = MAX_LISTED - sum(map(len, listed))
        frame = _occurrences(rows.slice(0, max(room, 0)))
        for key, first_O, experts in _routes(run, step, phase, rows, len(frame)):
            ids, numbers = np.unique(first_O, return_counts=True)
            counts[step, key] = dict(zip(ids.tolist(), numbers.tolist(), strict=True))
            frame[key] = experts
        listed.append(frame)
    return Search(
        searched=searched,
        recorded=len(recorded),
        occurrences=sum(rows.num_rows for rows in found.values()),
        by_id=by_id,
        spellings=_spellings(found.values()),
        counts=counts,
        listed=pd.concat([frame for frame in listed if len(frame)], ignore_index=True),
    )


def _affordable(run: Run, recorded: int, max_rows: int) -> int:
    """How many steps may be searched: their decisions together are at most `max_rows`, as far as footers can tell."""
    total = sum(footer.num_rows for _, footer in run.table("decisions").live())
    moments = sum(len(run.decision_steps(phase)) for phase in run.phases) or recorded
    a_step = max(total / max(moments, 1), 1.0)
    return max(int(max_rows / a_step), 2)


def _spread(steps_S: np.ndarray, most: int) -> list[int]:
    """At most `most` of the steps, evenly spread, first and last among them."""
    if len(steps_S) <= most:
        return [int(step) for step in steps_S]
    places = np.unique(np.linspace(0, len(steps_S) - 1, most).round().astype(np.int64))
    return [int(step) for step in steps_S[places]]


def _tokens(run: Run, step: int, phase: str) -> pa.Table:
    rows = run.table("tokens").scan(_TOKEN_COLUMNS, phase=phase, step=step)
    rows = merge.drop_superseded(rows, run.segment_starts)
    rank_T, sequence_T = (pc.fill_null(rows[name], 0).to_numpy().astype(np.int64) for name in ("rank", "sequence"))
    place = rows.schema.get_field_index("sequence")
    rows = rows.set_column(place, "sequence", pa.array(numbered_on(rank_T, sequence_T)))
    return merge.sort_rows(rows, "sequence", "position")


def _spellings(found: Iterable[pa.Table]) -> dict[int, tuple[str | None, int]]:
    rows = pa.concat_tables([rows.select(["token_id", "text"]) for rows in found], promote_options="permissive")
    counts = rows.group_by("token_id").aggregate([("text", "max"), ("token_id", "count")]).to_pylist()
    known = [row for row in counts if row["token_id"] is not None]
    known.sort(key=lambda row: (-row["token_id_count"], row["token_id"]))
    return {row["token_id"]: (row["text_max"], row["token_id_count"]) for row in known}


def _occurrences(rows: pa.Table) -> pd.DataFrame:
    names = ["step", "sequence", "position", "text", "token_id", "domain"]
    frame: pd.DataFrame = rows.select(names).to_pandas(integer_object_nulls=True).rename(columns={"text": "token"})
    if frame["token"].isna().all():
        frame["token"] = [f"[id {number}]" for number in rows["token_id"].to_pylist()]
    return frame


def _routes(run: Run, step: int, phase: str, tokens: pa.Table, written: int) -> list[tuple[int, np.ndarray, list[str]]]:
    """Of each layer that decided on these tokens: its key, their first choices (O,), -1 for none, and all choices of
    the first `written` of them as text."""
    rows = run.table("decisions").scan(_DECISION_COLUMNS, phase=phase, step=step)
    rows = rows.filter(pc.is_in(rows["token"], pc.unique(tokens["token"])))
    rows = merge.drop_superseded(rows, run.segment_starts)
    place_O, place_R = _places(tokens), _places(rows)
    order = np.argsort(place_O)
    nearest = np.minimum(np.searchsorted(place_O[order], place_R), len(place_O) - 1)
    at_R = np.where(place_O[order][nearest] == place_R, order[nearest], -1)
    layer_R = rows["layer"].to_numpy()
    router_R = pc.fill_null(rows["router"], -1).to_numpy()
    found = []
    for index, router in sorted(set(zip(layer_R.tolist(), router_R.tolist(), strict=True))):
        of_layer = np.flatnonzero((layer_R == index) & (router_R == router) & (at_R >= 0))
        if not of_layer.size:
            continue
        ids_RK = lists_to_matrix(rows["experts"].take(pa.array(of_layer))).astype(np.int64)
        first_O = np.full(tokens.num_rows, -1, dtype=np.int64)
        first_O[at_R[of_layer]] = first_choice(ids_RK)
        words = [NO_EXPERT] * written
        for row in np.flatnonzero(at_R[of_layer] < written).tolist():
            words[at_R[of_layer[row]]] = ", ".join(str(id_) for id_ in ids_RK[row] if id_ >= 0) or NO_EXPERT
        found.append((layer_keys.key_of(run, index, None if router < 0 else router), first_O, words))
    return found


def _places(rows: pa.Table) -> np.ndarray:
    """One number for each row that tells its token from all others of the step."""
    place: np.ndarray = rows["rank"].to_numpy().astype(np.int64) << 32 | rows["token"].to_numpy().astype(np.int64)
    return place


def _suggestions(tokens: pa.Table, query: Query) -> list[str]:
    """Tokens of one step that hold the text, whatever its case."""
    if query.text is None or not query.text.strip():
        return []
    texts = pc.drop_null(pc.unique(tokens["text"]))
    holds = pc.match_substring(texts, query.text.strip(), ignore_case=True)
    return sorted(texts.filter(holds).to_pylist(), key=lambda text: (len(text), text))[:_SUGGESTED]
