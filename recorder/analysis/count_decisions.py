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
_WAITING_IDS = 1 << 24

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
        return tuple(part for part, _, _ in self.stretch.pieces)

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
                self._count(counts, waiting, moment, tokens.of(moment) if with_tokens else {})
        waiting.count()
        return counts

    def _count(self, counts: Counts, waiting: "_Waiting", moment: Moment, tokens: Mapping[int, Tokens]) -> None:
        for rank in sorted({rank for rank, _ in moment.choices}):
            there = [router for other, router in moment.choices if other == rank]
            known = tokens.get(rank)
            if known is not None:
                _note_texts(counts, known)
            for router in there:
                choices = moment.choices[rank, router]
                place = (moment.phase, choices.layer, router)
                after = self.routers.next(router, there) if "transitions" in self.tables else None
                if after is not None:
                    then = moment.choices[rank, after]
                    pairs = _count_transitions(
                        choices,
                        then,
                        self.routers.experts_of(router, choices.expert_ids_TK),
                        self.routers.experts_of(after, then.expert_ids_TK),
                    )
                    counts.add(Key("transitions", *place, f"{then.layer},{after}"), pairs)
                token_id_T = None
                if known is not None:
                    rows = known.of(choices.token_T)
                    token_id_T = known.token_ids(rows)
                    num_experts = self.routers.experts_of(router, choices.expert_ids_TK)
                    _count_tokens(counts, place, choices, known, rows, num_experts)
                waiting.add(place, choices.expert_ids_TK, token_id_T)


class _Waiting:
    """Choices whose moment does not matter, of one router side by side until there are enough to count.

    Args:
        counts: what they are added to.
        routers: for E of each.
        with_pairs: count which experts were chosen together, too.
    """

    def __init__(self, counts: Counts, routers: RouterMap, *, with_pairs: bool) -> None:
        self._counts, self._routers, self._with_pairs = counts, routers, with_pairs
        self._ids: dict[tuple[Place3, int, bool], list[tuple[np.ndarray, np.ndarray]]] = {}
        self._waiting = 0

    def add(self, place: Place3, expert_ids_TK: np.ndarray, token_id_T: np.ndarray | None) -> None:
        """token_id_T: -1 where a token has none; None = of no token are any known."""
        nobody = np.empty(0, dtype=np.int64)
        pieces = (expert_ids_TK, nobody if token_id_T is None else token_id_T)
        self._ids.setdefault((place, expert_ids_TK.shape[1], token_id_T is not None), []).append(pieces)
        self._waiting += expert_ids_TK.size
        if self._waiting >= _WAITING_IDS:
            self.count()

    def count(self) -> None:
        """Count all that wait."""
        for (place, _, with_tokens), pieces in self._ids.items():
            ids_TK, token_id_T = (np.concatenate(column) for column in zip(*pieces, strict=True))
            num_experts = self._routers.experts_of(place[2], ids_TK)
            load_E, unrouted = metrics.count_load(ids_TK, num_experts)
            routed = int((ids_TK >= 0).any(axis=1).sum()) if unrouted else len(ids_TK)
            self._counts.add(Key("tokens", *place), np.array([routed], dtype=np.int64))
            self._counts.add(Key("load", *place), load_E)
            self._counts.add(Key("first_choices", *place), metrics.count_load(ids_TK[:, 0], num_experts)[0])
            if self._with_pairs:
                self._counts.add(Key("coactivation", *place), metrics.count_coactivation(ids_TK, num_experts))
            if with_tokens:
                self._count_vocabulary(place, ids_TK, token_id_T, num_experts)
        self._ids.clear()
        self._waiting = 0

    def _count_vocabulary(self, place: Place3, ids_TK: np.ndarray, token_id_T: np.ndarray, num_experts: int) -> None:
        width = self._routers.num_experts.get(place[2], 0) + 1
        width = width if width > num_experts else _WIDEST
        total_T1 = np.full((len(ids_TK), 1), width - 1)
        cells_TC = np.concatenate([ids_TK, total_T1], axis=1)  # C = K + 1
        there_TC = cells_TC >= 0
        cells_TC += token_id_T[:, None] * width
        if token_id_T.min() < 0 or not there_TC.all():
            there_TC[:, -1] = there_TC[:, :-1].any(axis=1)
            cells_TC = cells_TC[there_TC & (token_id_T >= 0)[:, None]]
        if cells_TC.size:
            self._counts.see(Key("vocabulary", *place, str(width)), cells_TC.ravel())


def _count_transitions(choices: Choices, then: Choices, num_experts: int, others: int) -> np.ndarray:
    now_TK, then_TK = choices.expert_ids_TK, then.expert_ids_TK
    if not np.array_equal(choices.token_T, then.token_T):
        _, mine, theirs = np.intersect1d(choices.token_T, then.token_T, assume_unique=True, return_indices=True)
        now_TK, then_TK = now_TK[mine], then_TK[theirs]
    return metrics.count_pairs(now_TK, then_TK, num_experts, others)


def _count_tokens(
    counts: Counts, place: Place3, choices: Choices, tokens: Tokens, rows: np.ndarray, num_experts: int
) -> None:
    ids_TK, kept_TK = choices.expert_ids_TK, choices.kept_TK
    known = rows >= 0
    if not known.all():
        rows, ids_TK = rows[known], ids_TK[known]
        kept_TK = None if kept_TK is None else kept_TK[known]
    routed = (ids_TK >= 0).any(axis=1)
    sequence_T, position_T = tokens.sequence_T[rows], tokens.position_T[rows]

    _count_domains(counts, place, tokens, rows[routed], ids_TK[routed], num_experts)

    if kept_TK is not None:
        drops = metrics.count_drops_by_position(ids_TK, kept_TK, position_T)
        counts.add(Key("positions", *place), np.stack(drops, axis=1))

    firsts_T = ids_TK[:, 0]
    if (sequence_T[1:] < sequence_T[:-1]).any() or (np.diff(position_T)[sequence_T[1:] == sequence_T[:-1]] < 0).any():
        order = np.lexsort([position_T, sequence_T])
        firsts_T, sequence_T, position_T = firsts_T[order], sequence_T[order], position_T[order]
    repeats = metrics.count_repeats(firsts_T, sequence_T, position_T)
    counts.add(Key("repeats", *place), np.array(repeats, dtype=np.int64))


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
