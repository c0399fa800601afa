"""When routing settles: every probe against the final one and against the one before.

Saturation looks back from the last probe, so a new one changes it everywhere: this is read anew whenever there are
more probes. Few rows are: a probe is one batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moe_core import metrics
from recorder.analysis.counts import Counts, Key
from recorder.analysis.scan import COLUMNS, moment_of
from recorder.catalog import TableReader
from recorder.merge import drop_superseded
from recorder.storage import Place

PHASE = "probe"
_RANK_SHIFT = 40
_NEVER = -1


@dataclass(frozen=True, kw_only=True)
class ProbeTask:
    """One task: some consecutive probes, each against the final one and the one before it.

    `before` is the probe before the first of `steps`; None = there is none.
    """

    run: Place
    before: int | None
    steps: tuple[int, ...]
    final: int
    segment_starts: Mapping[int, int]
    router_of_layer: Mapping[int, int]

    def count(self) -> Counts:
        """Read the probes and compare.

        Raises:
            OSError, ValueError, pa.ArrowException: a part cannot be read.
        """
        counts = Counts()
        table = TableReader(self.run / "decisions", "decisions")
        final = self._probe(table, self.final)
        previous = {} if self.before is None else self._probe(table, self.before)
        for step in self.steps:
            probe = final if step == self.final else self._probe(table, step)
            for place, now in probe.items():
                if place in final:
                    _compare(counts, place, step, now, final[place], previous.get(place))
            previous = probe
        return counts

    def _probe(self, table: TableReader, step: int) -> dict[tuple[int, int], "_Probe"]:
        """By layer and router."""
        rows = drop_superseded(table.scan(COLUMNS, phase=PHASE, step=step), self.segment_starts)
        moment = moment_of(rows, self.router_of_layer)
        if moment is None:
            return {}
        found: dict[tuple[int, int], list[_Probe]] = {}
        for (rank, router), choices in moment.choices.items():
            token_T = (rank << _RANK_SHIFT) + choices.token_T
            found.setdefault((choices.layer, router), []).append(_Probe(token_T, choices.expert_ids_TK))
        return {place: _Probe.joined(probes) for place, probes in found.items()}


@dataclass(frozen=True)
class _Probe:
    """One router's choices: token_T holds rank and number of each token, ascending."""

    token_T: np.ndarray
    expert_ids_TK: np.ndarray

    @classmethod
    def joined(cls, probes: list["_Probe"]) -> "_Probe":
        if len(probes) == 1:
            return probes[0]
        return cls(
            np.concatenate([probe.token_T for probe in probes]),
            np.concatenate([probe.expert_ids_TK for probe in probes]),
        )

    def with_same_tokens(self, other: "_Probe") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens that both have, and what each chose for them."""
        if np.array_equal(self.token_T, other.token_T):
            return self.token_T, self.expert_ids_TK, other.expert_ids_TK
        both, mine, others = np.intersect1d(self.token_T, other.token_T, assume_unique=True, return_indices=True)
        return both, self.expert_ids_TK[mine], other.expert_ids_TK[others]


def _compare(
    counts: Counts, place: tuple[int, int], step: int, now: _Probe, final: _Probe, previous: _Probe | None
) -> None:
    token_T, now_TK, final_TK = now.with_same_tokens(final)
    churn = np.nan
    if previous is not None:
        _, before_TK, after_TK = previous.with_same_tokens(now)
        churn = 1.0 - float(metrics.saturation(after_TK, before_TK))
    chosen = (final_TK >= 0).any(axis=1)
    row = [step, int(chosen.sum()), float(metrics.saturation(now_TK, final_TK)), churn]
    counts.add(Key("settling", PHASE, *place, f"{step:020d}"), np.array(row, dtype=np.float64))
    first = final_TK[:, 0] >= 0
    last = np.where(now_TK[:, 0] != final_TK[:, 0], step, _NEVER)
    key = Key("fluctuation", PHASE, *place)
    latest = np.stack([token_T, last, now_TK[:, 0], final_TK[:, 0]], axis=1)[first]
    there = counts.arrays.get(key)
    counts.arrays[key] = latest if there is None else later(there, latest)


def later(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Last fluctuations of two sets of probes as that of all of them.

    (T, 4): token, step or -1, the token's first choice there, and its final one.
    """
    rows = np.concatenate([one, other])
    rows = rows[np.lexsort([rows[:, 1], rows[:, 0]])]
    another = rows[1:, 0] != rows[:-1, 0]
    return rows[np.append(another, True)] if len(rows) else rows


def merge_probes(total: Counts, piece: Counts) -> None:
    """Add one task's results to those of others."""
    for key, counts in piece.arrays.items():
        there = total.arrays.get(key)
        total.arrays[key] = counts if there is None else later(there, counts)


def rank_and_token(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What `fluctuation` holds in its first column, taken apart."""
    return tokens >> _RANK_SHIFT, tokens & ((1 << _RANK_SHIFT) - 1)
