"""From what a step gathered to rows of the run, in the recorder's own thread.

Shapes: B batch, S sequence, T tokens, R routers alike, E experts, K choices a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from moe_core.routing import NO_CHOICE

from .host_copies import HostCopy
from .layer_stats import Alike, stats_row
from .step_capture import MicroBatch, SumsOnHost
from .writer import RunWriter

#: Called with what was being done and a function that does it; notes what goes wrong there.
Guard = Callable[[str, Callable[[], Any]], Any]


@dataclass(kw_only=True)
class GivenTokens:
    """What the caller said of the tokens of the step's first stream, one entry each (domains: also per sequence)."""

    ids_T: np.ndarray | HostCopy | None = None
    text_T: Sequence[str | None] | None = None
    domains: Sequence[str] | None = None


@dataclass(kw_only=True)
class StepRecord:
    """A step that is over, on its way to the disk."""

    step: int
    phase: str
    scalars: Mapping[str, float | HostCopy | None]
    streams: list[list[MicroBatch]]  # in the order in which their tokens are numbered
    sums: list[SumsOnHost]
    given: GivenTokens
    events: list[tuple[str, str]] = field(default_factory=list)  # kind, message

    @property
    def decisions_nbytes(self) -> int:
        """Bytes of what `drop_decisions` lets go."""
        kept = sum(kept.copy.nbytes for batches in self.streams for batch in batches for kept in batch.kept)
        text = sum(len(t or "") + 50 for t in self.given.text_T) if self.given.text_T is not None else 0
        tokens = sum(batch.num_tokens for batches in self.streams for batch in batches if batch.decisions)
        return kept + text + 4 * tokens

    @property
    def nbytes(self) -> int:
        return self.decisions_nbytes + sum(sums.copy.nbytes for sums in self.sums)

    def drop_decisions(self) -> None:
        """Leave decisions and tokens out; statistics and scalars stay."""
        self.given = GivenTokens()
        for batches in self.streams:
            for batch in batches:
                batch.decisions, batch.kept, batch.ids = False, [], None


class StepWriter:
    """Writes records through `writer`; layers and coefficients are told by router. writes_tokens: the table too."""

    def __init__(
        self,
        writer: RunWriter,
        layer_of: Mapping[int, int],
        coefficients_of: Mapping[int, Mapping[str, float]],
        text_of: Callable[[int], str] | None = None,
        *,
        writes_tokens: bool = True,
    ) -> None:
        self._writer, self._layer_of, self._coefficients_of, self._text_of = writer, layer_of, coefficients_of, text_of
        self._writes_tokens, self._text_noted = writes_tokens, False

    def write(self, record: StepRecord, guard: Guard) -> None:
        """Every row of the step. A fault in one table does not keep the others from being written."""
        for kind, message in record.events:
            guard("writing events", partial(self._writer.log_event, record.step, kind, message))
        first_token = tokens = 0
        for number, batches in enumerate(record.streams):
            real = [None if batch.real is None else batch.real.arrays()[0] for batch in batches]
            tokens += sum(b.num_tokens if r is None else int(r.sum()) for b, r in zip(batches, real, strict=True))
            if any(batch.decisions for batch in batches):
                chosen = [_chosen(batch, real_T) for batch, real_T in zip(batches, real, strict=True)]
                given = record.given if number == 0 else GivenTokens()
                if self._writes_tokens:
                    guard("writing tokens", partial(self._tokens, record, batches, chosen, first_token, given))
                for routers, arrays in _joined(batches, chosen, first_token).items():
                    self._decisions(record, routers, arrays, guard)
            first_token += sum(batch.num_tokens for batch in batches)
        guard("writing layer_stats", lambda: self._stats(record, guard))
        guard("writing steps", lambda: self._step(record, tokens))

    def _tokens(
        self,
        record: StepRecord,
        batches: list[MicroBatch],
        chosen: list[np.ndarray],
        first_token: int,
        given: GivenTokens,
    ) -> None:
        places = [(b, np.flatnonzero(c)) for b, c in zip(batches, chosen, strict=True) if b.decisions]
        lengths = [(b.shape[1] or 1) for b, _ in places]
        of_stream = np.concatenate([b.first_token + at for b, at in places])
        sequences = [b.first_sequence + at // S for (b, at), S in zip(places, lengths, strict=True)]
        positions = [b.first_position + at % S for (b, at), S in zip(places, lengths, strict=True)]
        sequence_T = np.concatenate(sequences)
        ids_T = text_T = None
        if given.ids_T is not None:
            ids_T = given.ids_T.arrays()[0] if isinstance(given.ids_T, HostCopy) else given.ids_T
            ids_T = ids_T[of_stream]
        elif all(b.ids is not None for b, _ in places):
            ids_T = np.concatenate([b.ids.arrays()[0][at] for b, at in places if b.ids is not None])
        if given.text_T is not None:
            text_T = [given.text_T[i] for i in of_stream.tolist()]
        elif ids_T is not None and self._text_of is not None:
            text_T = [self._text_of(i) for i in ids_T.tolist()]
        domain_T = None
        if given.domains is not None:
            per_token = len(given.domains) == sum(b.num_tokens for b in batches)
            domain_T = [given.domains[i] for i in (of_stream if per_token else sequence_T).tolist()]
        self._writer.log_tokens(
            record.step,
            phase=record.phase,
            sequence_T=sequence_T + self._first_sequence(record, batches),
            position_T=np.concatenate(positions),
            token_id_T=ids_T,
            text_T=text_T,
            domain_T=domain_T,
            tokens_T=first_token + of_stream,
        )
        if text_T is not None and not self._text_noted:
            self._text_noted = True
            if self._writer.rank == 0:
                self._writer.update_manifest(recorded={**self._writer.manifest["recorded"], "text": True})

    @staticmethod
    def _first_sequence(record: StepRecord, batches: list[MicroBatch]) -> int:
        """The number of a stream's first sequence: those of the stream before it come first."""
        before = record.streams[: next(i for i, other in enumerate(record.streams) if other is batches)]
        return sum(other[-1].first_sequence + other[-1].shape[0] for other in before if other)

    def _decisions(
        self, record: StepRecord, routers: tuple[int, ...], arrays: Sequence[np.ndarray], guard: Guard
    ) -> None:
        """Rows of these routers: tokens (T,), ids and weights and perhaps kept (R, T, K)."""

        def write(first: int, last: int) -> None:
            experts, weights, *kept = (array[first:last] for array in arrays[1:])
            self._writer.log_decisions_of(
                record.step,
                phase=record.phase,
                layers=[self._layer_of[router] for router in routers[first:last]],
                routers=routers[first:last],
                experts_RTK=experts,
                weights_RTK=weights,
                kept_RTK=kept[0] if kept else None,
                tokens_T=arrays[0],
            )

        def all_or_each() -> None:
            try:
                write(0, len(routers))
            except ValueError:  # one router's odd ids do not take the others along
                for place in range(len(routers)):
                    guard("writing decisions", partial(write, place, place + 1))

        guard("writing decisions", all_or_each)

    def _stats(self, record: StepRecord, guard: Guard) -> None:
        of_router: dict[int, tuple[Any, ...]] = {}
        for sums in record.sums:
            arrays = sums.copy.arrays()
            for place, router in enumerate(sums.routers):
                counts, numbers = arrays[0][place], arrays[1][place]
                bias_E = arrays[2][place] if sums.alike.has_bias else None
                if router in of_router:
                    _, counts_before, numbers_before, _ = of_router[router]
                    counts, numbers = _added(counts_before, counts), _added(numbers_before, numbers)
                of_router[router] = (sums.alike, counts, numbers, bias_E)
        for router, sums_of_router in sorted(of_router.items()):
            guard(f"writing layer_stats of router {router}", partial(self._stats_of, record, router, *sums_of_router))

    def _stats_of(
        self,
        record: StepRecord,
        router: int,
        alike: Alike,
        counts: np.ndarray,
        numbers: np.ndarray,
        bias_E: np.ndarray | None,
    ) -> None:
        row = stats_row(alike, counts, numbers, bias_E, self._coefficients_of[router])
        self._writer.log_layer_stats(
            record.step, phase=record.phase, layer=self._layer_of[router], router=router, **row
        )

    def _step(self, record: StepRecord, tokens: int) -> None:
        scalars = {
            name: float(value.arrays()[0].reshape(())) if isinstance(value, HostCopy) else value
            for name, value in record.scalars.items()
        }
        self._writer.log_step(record.step, phase=record.phase, tokens=tokens, **scalars)


def _joined(
    batches: Sequence[MicroBatch], chosen: Sequence[np.ndarray], first_token: int
) -> dict[tuple[int, ...], list[np.ndarray]]:
    """By routers alike: the numbers of the chosen tokens (T,), and their ids, weights, perhaps kept (R, T, K)."""
    pieces: dict[tuple[int, ...], list[list[np.ndarray]]] = {}
    for batch, chosen_T in zip(batches, chosen, strict=True):
        tokens_T = first_token + batch.first_token + np.flatnonzero(chosen_T)
        if batch.chosen_B is not None:  # the copies hold the chosen sequences only
            chosen_T = chosen_T[np.repeat(batch.chosen_B, batch.shape[1])]
        for kept in batch.kept:
            arrays = [a if chosen_T.all() else a[:, chosen_T] for a in kept.copy.arrays()]
            pieces.setdefault(kept.routers, []).append([tokens_T, *arrays])
    joined = {}
    for routers, found in sorted(pieces.items()):
        top_k = max(arrays[1].shape[-1] for arrays in found)
        tokens, *columns = zip(*found, strict=True)
        joined[routers] = [np.concatenate(tokens)] + [
            np.concatenate([_widened(array, top_k, fill) for array in column], axis=1)
            for column, fill in zip(columns, (NO_CHOICE, 0, False), strict=False)
        ]
    return joined


def _chosen(batch: MicroBatch, real_T: np.ndarray | None) -> np.ndarray:
    """bool (T,): the tokens of which rows are written."""
    if not batch.decisions:
        return np.zeros(batch.num_tokens, dtype=bool)
    chosen_T = np.ones(batch.num_tokens, dtype=bool) if real_T is None else real_T.astype(bool)
    return chosen_T if batch.chosen_B is None else chosen_T & np.repeat(batch.chosen_B, batch.shape[1])


def _added(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The sum; the shorter one lacks what its micro-batches had none of (a loss, drops)."""
    length = max(len(first), len(second))
    return np.pad(first, (0, length - len(first))) + np.pad(second, (0, length - len(second)))


def _widened(values_RTK: np.ndarray, top_k: int, fill: Any) -> np.ndarray:
    """Slots of no choice added, up to K = top_k."""
    missing = top_k - values_RTK.shape[-1]
    return values_RTK if not missing else np.pad(values_RTK, ((0, 0), (0, 0), (0, missing)), constant_values=fill)
