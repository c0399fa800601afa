"""What one stretch of `decisions` part files adds to the counts of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_core import metrics
from recorder.analysis.counts import Counts, Key
from recorder.analysis.scan import COLUMNS, IDS_ONLY, Choices, Moment, Stretch, moments
from recorder.analysis.token_rows import TokenRows, Tokens
from recorder.merge import kept_rows
from recorder.parts import PartFile
from recorder.storage import Place

#: Cells of a count by token id: token id * width + expert, and the last one of each for the token's occurrences. The
#: width is in the key; this one where the number of experts is not known.
_WIDEST = 1 << 20

#: The tables that need what the `tokens` table tells, and those that need all decisions of a moment side by side.
TOKEN_TABLES = frozenset({"domains", "vocabulary", "repeats", "positions"})
MOMENT_TABLES = TOKEN_TABLES | {"transitions"}

#: So many ids wait before they are counted: many at once are counted faster, and more would be of no use.
_WAITING_IDS = 1 << 22

#: Phase, layer and router.
Place3 = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True)
class RouterMap:
    """What the manifest tells of the routers: their order, E of each, and the router of each layer."""

    order: Sequence[int]
    num_experts: Mapping[int, int]
    of_layer: Mapping[int, int]

    def next(self, router: int, there: Sequence[int]) -> int | None:
        """The router that tokens meet next, among those that recorded this moment."""
        order = self.order or sorted(there)
        later = order[order.index(router) + 1 :] if router in order else []
        return later[0] if later and later[0] in there else None

    def experts_of(self, router: int, expert_ids: np.ndarray) -> int:
        """E as the manifest tells it, or as many as are seen here: sums grow."""
        return max(self.num_experts.get(router, 0), int(expert_ids.max(initial=0)) + 1)


@dataclass(frozen=True, kw_only=True)
class DecisionTask:
    """One task: a stretch of `decisions` with which moments begin and end, and the parts of `tokens` to it."""

    run: Place
    stretch: Stretch
    token_parts: tuple[PartFile, ...]
    segment_starts: Mapping[int, int]
    routers: RouterMap
    tables: tuple[str, ...]

    @property
    def parts(self) -> tuple[PartFile, ...]:
        """The parts it reads of."""
        return tuple(part for part, _, _ in self.stretch)

    def count(self) -> Counts:
        """Read the stretch once and count.

        Raises:
            OSError, ValueError, pa.ArrowException: a part cannot be read.
        """
        counts = Counts()
        tokens = TokenRows(self.run / "tokens", self.token_parts)
        with_tokens = bool(TOKEN_TABLES.intersection(self.tables))
        columns = COLUMNS if MOMENT_TABLES.intersection(self.tables) else IDS_ONLY
        waiting = _Waiting(counts, self.routers, with_pairs="coactivation" in self.tables)
        for moment in moments(self.run / "decisions", self.stretch, self.routers.of_layer, columns):
            if kept_rows(np.array([moment.step]), np.array([moment.segment]), self.segment_starts).all():
                for (_, router), choices in moment.choices.items():
                    waiting.add((moment.phase, choices.layer, router), choices.expert_ids_TK)
                if columns is COLUMNS:
                    self._count(counts, moment, tokens.of(moment) if with_tokens else {})
        waiting.count()
        return counts

    def _count(self, counts: Counts, moment: Moment, tokens: Mapping[int, Tokens]) -> None:
        """What must be counted moment by moment."""
        for rank in sorted({rank for rank, _ in moment.choices}):
            there = [router for other, router in moment.choices if other == rank]
            if rank in tokens:
                _note_texts(counts, tokens[rank])
            for router in there:
                choices = moment.choices[rank, router]
                num_experts = self.routers.experts_of(router, choices.expert_ids_TK)
                place = (moment.phase, choices.layer, router)
                after = self.routers.next(router, there)
                if after is not None and "transitions" in self.tables:
                    then = moment.choices[rank, after]
                    others = self.routers.experts_of(after, then.expert_ids_TK)
                    pairs = _count_transitions(choices, then, num_experts, others)
                    counts.add(Key("transitions", *place, f"{then.layer},{after}"), pairs)
                if rank in tokens:
                    width = self.routers.num_experts.get(router, 0) + 1
                    width = width if width > num_experts else _WIDEST
                    _count_tokens(counts, place, choices, tokens[rank], num_experts, width)


class _Waiting:
    """Choices whose moment does not matter, of one router side by side until there are enough to count.

    Args:
        counts: what they are added to.
        routers: for E of each.
        with_pairs: count which experts were chosen together, too.
    """

    def __init__(self, counts: Counts, routers: RouterMap, *, with_pairs: bool) -> None:
        self._counts, self._routers, self._with_pairs = counts, routers, with_pairs
        self._ids: dict[tuple[Place3, int], list[np.ndarray]] = {}
        self._waiting = 0

    def add(self, place: Place3, expert_ids_TK: np.ndarray) -> None:
        self._ids.setdefault((place, expert_ids_TK.shape[1]), []).append(expert_ids_TK)
        self._waiting += expert_ids_TK.size
        if self._waiting >= _WAITING_IDS:
            self.count()

    def count(self) -> None:
        """Count all that wait."""
        for (place, _), pieces in self._ids.items():
            ids_TK = np.concatenate(pieces)
            num_experts = self._routers.experts_of(place[2], ids_TK)
            load_E, unrouted = metrics.count_load(ids_TK, num_experts)
            routed = int((ids_TK >= 0).any(axis=1).sum()) if unrouted else len(ids_TK)
            self._counts.add(Key("tokens", *place), np.array([routed], dtype=np.int64))
            self._counts.add(Key("load", *place), load_E)
            self._counts.add(Key("first_choices", *place), metrics.count_load(ids_TK[:, 0], num_experts)[0])
            if self._with_pairs:
                self._counts.add(Key("coactivation", *place), metrics.count_coactivation(ids_TK, num_experts))
        self._ids.clear()
        self._waiting = 0


def _count_transitions(choices: Choices, then: Choices, num_experts: int, others: int) -> np.ndarray:
    now_TK, then_TK = choices.expert_ids_TK, then.expert_ids_TK
    if not np.array_equal(choices.token_T, then.token_T):
        _, mine, theirs = np.intersect1d(choices.token_T, then.token_T, assume_unique=True, return_indices=True)
        now_TK, then_TK = now_TK[mine], then_TK[theirs]
    return metrics.count_pairs(now_TK, then_TK, num_experts, others)


def _count_tokens(
    counts: Counts, place: Place3, choices: Choices, tokens: Tokens, num_experts: int, width: int
) -> None:
    rows = tokens.of(choices.token_T)
    known = rows >= 0
    rows, ids_TK = rows[known], choices.expert_ids_TK[known]
    routed = (ids_TK >= 0).any(axis=1)
    sequence_T, position_T = tokens.sequence_T[rows], tokens.position_T[rows]

    _count_domains(counts, place, tokens, rows[routed], ids_TK[routed], num_experts)

    order = np.arange(len(rows))
    if (sequence_T[1:] < sequence_T[:-1]).any() or (np.diff(position_T)[sequence_T[1:] == sequence_T[:-1]] < 0).any():
        order = np.lexsort([position_T, sequence_T])
    repeats = metrics.count_repeats(ids_TK[order, 0], sequence_T[order], position_T[order])
    counts.add(Key("repeats", *place), np.array(repeats, dtype=np.int64))

    if choices.kept_TK is not None:
        drops = metrics.count_drops_by_position(ids_TK, choices.kept_TK[known], position_T)
        counts.add(Key("positions", *place), np.stack(drops, axis=1))

    named = routed & (tokens.token_id_T[rows] >= 0)
    token_id_T, named_TK = tokens.token_id_T[rows][named], ids_TK[named]
    if len(token_id_T):
        key = Key("vocabulary", *place, str(width))
        cells_TK = token_id_T[:, None] * width + named_TK
        counts.see(key, cells_TK[named_TK >= 0])
        counts.see(key, token_id_T * width + width - 1)


def _count_domains(
    counts: Counts, place: Place3, tokens: Tokens, rows: np.ndarray, ids_TK: np.ndarray, num_experts: int
) -> None:
    """For each domain its tokens, then its load, (1 + E,)."""
    domain_T = tokens.domain_T[rows]
    for index, domain in enumerate(tokens.domains):
        if domain is not None:
            mine = domain_T == index
            load, _ = metrics.count_load(ids_TK[mine], num_experts)
            counts.add(Key("domains", *place, domain), np.concatenate([[mine.sum()], load]))


def _note_texts(counts: Counts, tokens: Tokens) -> None:
    if tokens.text.null_count == len(tokens.text):
        return
    token_ids, first = np.unique(tokens.token_id_T, return_index=True)
    for token_id, row in zip(token_ids.tolist(), first.tolist(), strict=True):
        if token_id >= 0 and token_id not in counts.texts:
            text = tokens.text[row].as_py()
            if text is not None:
                counts.texts[token_id] = text
