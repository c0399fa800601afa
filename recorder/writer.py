"""Write a run: buffered rows, complete part files, and a manifest that is never half-written.

Shapes: E experts, K top-k, T tokens.
"""

import contextlib
import copy
import os
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa

from recorder import buffers, checks, claim, storage
from recorder.compact import compact_table
from recorder.manifest import STATUSES, RunExistsError, RunNotFoundError, now, plain, replace_manifest
from recorder.manifest_shape import check_manifest
from recorder.parts import next_sequence, part_name, write_part
from recorder.row_buffer import RowBuffer
from recorder.schema import SCHEMAS, TABLES
from recorder.storage import StorageError, Where

#: Most seconds between two flushes. Each is a handful of requests to an object store, and of objects to read back.
FLUSH_SECONDS, REMOTE_FLUSH_SECONDS = 1.0, 5.0
_LAST_ATTEMPTS = 3

#: `steps` last: a step that a reader finds there has its other rows already.
_FLUSH_ORDER = ("tokens", "decisions", "layer_stats", "events", "steps")
#: Where writing fails (a full disk) rows wait up to this many times `flush_bytes`, and a write is tried this often.
_WAITING_LIMIT = 2
_RETRY_SECONDS = 1.0
#: Seconds between two heartbeats while no rows come.
_REST_BEAT_S = 15.0
#: Of this process, by place and rank: two at once would overwrite each other's parts.
_open_writers: weakref.WeakValueDictionary[tuple[str, int], "RunWriter"] = weakref.WeakValueDictionary()


def status_after(error: BaseException | None) -> tuple[Literal["finished", "cancelled", "failed"], str | None]:
    """Status and error of a run whose `with` block ended with this exception (None = in peace)."""
    if error is None:
        return "finished", None
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "cancelled", None
    first_line = next(iter(str(error).splitlines()), "")
    return "failed", f"{type(error).__name__}: {first_line}".removesuffix(": ")


def check_last(status: str) -> None:
    """Raise ValueError for what is no status of a run that is over."""
    if status not in STATUSES[1:]:
        raise ValueError(f"status must be one of {', '.join(STATUSES[1:])}, got {status!r}")


class RunWriter:
    """Owns one run folder: its `run.json` (rank 0) and this rank's part files.

    Rows are buffered and written as complete part files when `flush_seconds` have passed, when `flush_rows` rows or
    `flush_bytes` bytes wait, or every `flush_steps` calls of `log_step`. The time is looked at between steps where
    that is possible, so that a part holds whole steps. A process killed at any moment loses only the rows still
    buffered.

    Where a part cannot be written (a full disk) its rows wait and are tried again, once a second at most; `log_step`,
    `log_event` and `flush` raise the OSError each time. Once twice `flush_bytes` wait, a row more is refused with an
    OSError; how many were is an event of the run as soon as writing works again. An object store that cannot be
    reached for a while is only warned of by `log_step` and `log_event`, once.

    Args:
        path: the run's own folder; created, with its parents. Or a URI in an object store: see `storage.locate`.
        manifest: values for `run.json` (config, model, domains, ...); the rest is filled in. On resume they replace
            the values there. `run_id` is the folder's name unless given.
        rank: this process's rank. Ranks above 0 wait until rank 0 of the same launch has created or resumed the run,
            and write parts only.
        resume: go on with an existing run, as its next segment; "auto" = if there is one, else create it.
        share: number of the tokens that this process sees, written as `rank` of its rows: the same on ranks that hold
            replicas or other layers of the same tokens (the data-parallel rank). None = every rank sees its own.
        launch: what all ranks of this launch share and no other launch has, so that nobody joins the run of an earlier
            one. None = told by the environment, which works for ranks on one host.
        join_seconds: how long ranks above 0 wait for rank 0.
        flush_seconds: most seconds between two flushes while rows arrive; None = 1 on local disks, 5 in an object
            store.
        flush_rows: most rows buffered, all tables together.
        flush_bytes: most bytes buffered, and most bytes, uncompressed, in one part file.
        flush_steps: steps between two flushes; None = by time and rows only.
        full_weights: keep all 23 mantissa bits of the gate weights instead of 10.

    Raises:
        RunExistsError: the folder holds a run already; or, on resume, a live process or another writer of this one
            still writes to it.
        RunNotFoundError: resume without a run there, or rank 0 has opened none in time.
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        path: Where,
        *,
        manifest: dict[str, Any] | None = None,
        rank: int = 0,
        resume: bool | Literal["auto"] = False,
        share: int | None = None,
        launch: str | None = None,
        join_seconds: float = 60.0,
        flush_seconds: float | None = None,
        flush_rows: int = 200_000,
        flush_bytes: int = 64 << 20,
        flush_steps: int | None = None,
        full_weights: bool = False,
    ) -> None:
        rank = checks.whole("rank", rank)
        self.path = storage.locate(path)
        if flush_seconds is None:
            flush_seconds = REMOTE_FLUSH_SECONDS if storage.is_remote(self.path) else FLUSH_SECONDS
        share = rank if share is None else checks.whole("share", share)
        if resume not in (True, False, "auto"):
            raise ValueError(f"resume must be True, False or 'auto', got {resume!r}")
        join_seconds = checks.number("join_seconds", join_seconds)
        self.rank = rank
        self.share = share
        self._flush_seconds = checks.number("flush_seconds", flush_seconds)
        self._flush_rows = checks.whole("flush_rows", flush_rows, least=1)
        self._flush_bytes = checks.whole("flush_bytes", flush_bytes, least=1)
        self._flush_steps = None if flush_steps is None else checks.whole("flush_steps", flush_steps, least=1)
        self._full_weights = full_weights
        self._pid = os.getpid()
        given: dict[str, Any] = plain(manifest or {})
        other = _open_writers.get((str(self.path), rank))
        if resume and other is not None and other.is_open:
            raise RunExistsError(f"{self.path} is still being written by this process: close that writer first")
        if rank:
            self._manifest = claim.join_run(self.path, rank, resume=bool(resume), launch=launch, seconds=join_seconds)
        elif resume is True or (resume == "auto" and claim.holds_run(self.path)):
            self._manifest = claim.resume_run(self.path, given, launch=launch)
        else:
            weights = "full" if full_weights else "rounded"
            self._manifest = claim.create_run(self.path, given, weights=weights, launch=launch)
        self._resumed_pending = self.segment > 0 and rank == 0
        self._experts = buffers.experts_by_router(self._manifest)
        self._buffer = RowBuffer(flush_bytes)
        self._failure: OSError | None = None  # of the last flush
        self._reason = ""
        self._failure_is_told = True
        self._failed_at = 0.0
        self._refused = 0  # rows, since writing failed
        self._steps_since_flush = 0
        self._buffered_step: int | None = None
        self._logged: set[tuple[int, str]] = set()  # of this segment
        self._greatest_step = -1  # of this segment
        self._flushed_at = self._beat_at = time.monotonic()
        self._warned = False
        self._closed = False
        self._sequence = {table: next_sequence(self.path / table, rank) for table in TABLES}
        _open_writers[str(self.path), rank] = self

    @property
    def is_open(self) -> bool:
        """Whether rows can be added: not closed, and not in a process that was forked from the one that opened it."""
        return not self._closed and os.getpid() == self._pid

    @property
    def run_id(self) -> str:
        """The run's id, unique among runs side by side."""
        run_id: str = self._manifest["run_id"]
        return run_id

    @property
    def manifest(self) -> dict[str, Any]:
        """A copy of the manifest as last written."""
        return copy.deepcopy(self._manifest)

    @property
    def segment(self) -> int:
        """0, and one more at each resume."""
        segment: int = self._manifest["segment"]
        return segment

    def log_step(
        self,
        step: int,
        *,
        phase: str = "train",
        tokens: int | None,
        wall_time_s: float | None = None,
        loss: float | None = None,
        ce_loss: float | None = None,
        aux_loss: float | None = None,
        z_loss: float | None = None,
        grad_norm: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Record one step's scalars. None = not recorded; NaN and infinities are kept as they are.

        Args:
            step: optimizer step, at least 0.
            phase: train, probe, eval or generate.
            tokens: real tokens in the step; None where a source does not tell.
            wall_time_s: seconds the step took.
            loss: the total that was minimised.
            ce_loss: its cross-entropy part, nats a token.
            aux_loss: what was added for balance, coefficient included, summed over layers.
            z_loss: the same for the z-loss.
            grad_norm: global gradient norm.
            learning_rate: as used in this step.

        Raises:
            ValueError: unknown phase, negative or repeated step, or the run is closed.
        """
        scalars = {
            "wall_time_s": wall_time_s,
            "loss": loss,
            "ce_loss": ce_loss,
            "aux_loss": aux_loss,
            "z_loss": z_loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
        }
        row = buffers.key(step, phase) | {"tokens": None if tokens is None else int(tokens)}
        self.check_new_step(step, phase)
        self._logged.add((step, phase))
        row |= {name: None if value is None else float(value) for name, value in scalars.items()}
        self._add("steps", step, row, 1)
        self._steps_since_flush += 1
        by_steps = self._flush_steps is not None and self._steps_since_flush >= self._flush_steps
        self._flush_between_steps(by_steps or time.monotonic() - self._flushed_at >= self._flush_seconds)

    def check_new_step(self, step: int, phase: str) -> None:
        """Raise ValueError where `log_step` has had this step of this phase in this segment."""
        if (step, phase) in self._logged:
            raise ValueError(f"step {step} of phase {phase!r} is recorded already; number steps through the whole run")

    def log_layer_stats(
        self,
        step: int,
        *,
        phase: str = "train",
        layer: int,
        router: int,
        tokens: int | None,
        load: np.ndarray,
        gate_mass: np.ndarray | None,
        mean_prob: np.ndarray | None,
        expert_bias: np.ndarray | None = None,
        rerouted: int | None = None,
        dropped: np.ndarray | None = None,
        invalid: int | None = 0,
        router_entropy: float | None = None,
        aux_loss: float | None = None,
        z_loss: float | None = None,
    ) -> None:
        """Record what one router did in one step. Arrays are copied.

        Args:
            step: optimizer step, at least 0.
            phase: train, probe, eval or generate.
            layer: index in the whole model, dense layers counted.
            router: the router's own number.
            tokens: real tokens routed, or None where a source does not tell.
            load: assignments per expert before any drop, integers (E,).
            gate_mass: sum of weights per expert (E,), or None where a source has no weights.
            mean_prob: mean of the full score distribution (E,), or None where a source has none.
            expert_bias: selection bias used in this step (E,), or None.
            rerouted: assignments that the bias changed, or None.
            dropped: assignments dropped by capacity per expert (E,), or None.
            invalid: rows that could not be routed, or None.
            router_entropy: mean over tokens of H / ln E.
            aux_loss: normalised, uniform = 1; None when there is none.
            z_loss: mean squared logsumexp; None when there is none.

        Raises:
            ValueError: arrays of different lengths, an E other than the router's, a load that is not whole and
                at least 0, unknown phase, or the run is closed.
        """
        row = buffers.layer_stats_row(
            buffers.key(step, phase),
            layer=layer,
            router=router,
            tokens=tokens,
            vectors={
                "load": load,
                "gate_mass": gate_mass,
                "mean_prob": mean_prob,
                "expert_bias": expert_bias,
                "dropped": dropped,
            },
            num_experts=self._experts.get(router),
            scalars={
                "rerouted": rerouted,
                "invalid": invalid,
                "router_entropy": router_entropy,
                "aux_loss": aux_loss,
                "z_loss": z_loss,
            },
        )
        self._add("layer_stats", step, row, 1)
        self._experts.setdefault(router, len(row["load"]))

    def log_decisions(
        self,
        step: int,
        *,
        phase: str = "train",
        layer: int,
        router: int,
        experts_TK: np.ndarray,
        weights_TK: np.ndarray | None,
        kept_TK: np.ndarray | None = None,
        tokens_T: np.ndarray | None = None,
    ) -> None:
        """Record every token's choice in one router and step. Arrays are copied.

        Args:
            step: optimizer step, at least 0.
            phase: train, probe, eval or generate.
            layer: index in the whole model, dense layers counted.
            router: the router's own number.
            experts_TK: expert ids, best first; -1 = no choice made.
            weights_TK: gate values; rounded to 10 mantissa bits unless `full_weights`. None where a source has none.
            kept_TK: False where capacity dropped the assignment; None = nothing could be dropped.
            tokens_T: token numbers, unique within step and phase; None = 0 to T-1.

        Raises:
            ValueError: shapes that do not fit, ids outside [-1, E), unknown phase, or the run is closed.
        """
        ids_TK = np.asarray(experts_TK)
        if ids_TK.ndim != 2:
            raise ValueError(f"experts_TK must be integers of shape (T, K), got {ids_TK.dtype} {ids_TK.shape}")
        self.log_decisions_of(
            step,
            phase=phase,
            layers=[layer],
            routers=[router],
            experts_RTK=ids_TK[None],
            weights_RTK=None if weights_TK is None else np.asarray(weights_TK)[None],
            kept_RTK=None if kept_TK is None else np.asarray(kept_TK)[None],
            tokens_T=tokens_T,
        )

    def log_decisions_of(
        self,
        step: int,
        *,
        phase: str = "train",
        layers: Sequence[int],
        routers: Sequence[int],
        experts_RTK: np.ndarray,
        weights_RTK: np.ndarray | None = None,
        kept_RTK: np.ndarray | None = None,
        tokens_T: np.ndarray | None = None,
    ) -> None:
        """The same for several routers at once that have as many experts: one of each array per router."""
        experts = {self._experts.get(router) for router in routers}
        if len(experts) != 1:
            raise ValueError(f"routers {', '.join(map(str, routers))} differ in their number of experts: {experts}")
        rows = buffers.decision_rows(
            buffers.key(step, phase),
            layers=layers,
            routers=routers,
            experts_RTK=experts_RTK,
            weights_RTK=weights_RTK,
            kept_RTK=kept_RTK,
            tokens_T=tokens_T,
            num_experts=experts.pop(),
            full_weights=self._full_weights,
        )
        self._add("decisions", step, rows, rows.num_rows)

    def log_tokens(
        self,
        step: int,
        *,
        phase: str = "train",
        sequence_T: np.ndarray,
        position_T: np.ndarray,
        token_id_T: np.ndarray | None = None,
        text_T: Sequence[str | None] | None = None,
        domain_T: Sequence[str | None] | None = None,
        tokens_T: np.ndarray | None = None,
    ) -> None:
        """Record which tokens a step's decisions are about.

        Args:
            step: optimizer step, at least 0.
            phase: train, probe, eval or generate.
            sequence_T: number of the token's sequence in the batch.
            position_T: position in the sequence.
            token_id_T: vocabulary id, or None.
            text_T: the token's text, or None.
            domain_T: the domain's name, or None.
            tokens_T: token numbers as in `log_decisions`; None = 0 to T-1.

        Raises:
            ValueError: columns of different lengths, unknown phase, or the run is closed.
        """
        rows = buffers.token_rows(
            buffers.key(step, phase),
            sequence_T=sequence_T,
            position_T=position_T,
            token_id_T=token_id_T,
            text_T=text_T,
            domain_T=domain_T,
            tokens_T=tokens_T,
        )
        self._add("tokens", step, rows, rows.num_rows)

    def log_event(self, step: int, kind: str, message: str) -> None:
        """Record that something happened (`non_finite`, `invalid_rows`, `recorder_error`, ...) at a step."""
        row = _event(buffers.key(step, "train")["step"], kind, message)
        self._add("events", None, row, 1)
        self._flush_between_steps(time.monotonic() - self._flushed_at >= self._flush_seconds)

    def update_manifest(self, **changes: Any) -> None:
        """Replace values of `run.json`, atomically.

        Raises:
            ValueError: a key that identifies the run, a rank above 0, an unknown status, values of which a run could
                not be read, or the run is closed.
        """
        self._check_open()
        if self.rank:
            raise ValueError(f"only rank 0 writes run.json, this is rank {self.rank}")
        fixed = sorted(set(changes) & set(claim.FIXED_KEYS))
        if fixed:
            raise ValueError(f"{', '.join(fixed)} cannot be changed; fixed are {', '.join(claim.FIXED_KEYS)}")
        if changes.get("status", "running") not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {changes['status']!r}")
        manifest = self._manifest | plain(changes)
        check_manifest(manifest)
        self._manifest = manifest
        self._experts |= buffers.experts_by_router(self._manifest)
        self._beat()

    def flush(self) -> None:
        """Write every buffered row as part files and refresh the heartbeat and `last_step`.

        Raises:
            OSError: not all could be written; what was not still waits, and the next flush tries again.
        """
        self._check_open()
        try:
            self._write_buffered()
            if self._refused:
                self._add_event(self._buffered_step or 0, "recorder_error", self._refusal())
                self._refused = 0
                self._write_buffered()
            if self._buffer.set_aside:
                for message in self._buffer.set_aside:
                    self._add_event(self._buffered_step or 0, "recorder_error", message)
                self._buffer.set_aside.clear()
                self._write_buffered()
            self._beat()
        except OSError as problem:
            self._failed_at = time.monotonic()
            self._reason = problem.strerror or str(problem)
            message = f"{self.path} cannot be written, {self._buffer.num_rows} rows wait in memory: {self._reason}"
            kind = StorageError if isinstance(problem, StorageError) else OSError
            self._failure, self._failure_is_told = kind(problem.errno, message), True
            raise self._failure from problem
        self._failure, self._warned = None, False
        self._steps_since_flush = 0
        self._buffered_step = None
        self._flushed_at = time.monotonic()

    def rest(self) -> None:
        """For quiet times: write rows that have waited for `flush_seconds`, and show that the run is alive."""
        self._check_open()
        quiet = time.monotonic() - self._flushed_at
        if self._buffer.num_rows and quiet >= self._flush_seconds and self._may_flush():
            self.flush()
        elif time.monotonic() - self._beat_at >= max(self._flush_seconds, _REST_BEAT_S):
            self._beat()

    def finalize(
        self, status: Literal["finished", "cancelled", "failed"] = "finished", error: str | None = None
    ) -> None:
        """Flush, compact each table into few parts, then set the status. A second call does nothing.

        Nor does a call in a forked process: the run belongs to the process that opened it.

        Args:
            status: finished, cancelled or failed.
            error: one line for a failed run.

        Raises:
            ValueError: another status.
            OSError: the rows could not be written; the status is then failed, if that can be.
        """
        check_last(status)
        if not self.is_open:
            return
        try:
            if self._resumed_pending:
                self._log_resumed(self._manifest["last_step"] or 0)
            self._patiently(self.flush)
        except OSError:
            with contextlib.suppress(OSError):  # no room even for that: the run shows as unfinished
                self._close("failed", error or f"could not write: {self._reason}")
            raise
        with contextlib.suppress(OSError):  # no room for the new parts: all rows are in the old ones
            if self.rank and not any(self._sequence.values()):  # an empty share, told apart from a lost one
                self._write_part("steps", SCHEMAS["steps"].empty_table())
            for table in TABLES:
                self._patiently(partial(compact_table, self.path / table, table, self.rank))
        self._patiently(partial(self._close, status, error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finalize("finished")
            return
        try:
            self.finalize(*status_after(error))
        except Exception as problem:
            error.add_note(f"closing the run failed too: {problem}")

    def _add(self, table: str, step: int | None, rows: pa.Table | dict[str, Any], count: int) -> None:
        """Buffer rows; `step` is None for events, which do not tell how far the run is."""
        self._check_open()
        if not count:
            return
        if self._resumed_pending and step is not None:
            self._log_resumed(step)
        if self._failure is not None and self._buffer.num_bytes >= _WAITING_LIMIT * self._flush_bytes:
            self._retry_or_refuse(count)
        elapsed = time.monotonic() - self._flushed_at
        next_step = step is not None and self._buffered_step not in (None, step)
        if self._buffer.num_rows and elapsed >= self._flush_seconds and next_step:
            self._flush_inside_step()
        self._buffer.add(table, rows)
        if step is not None:
            self._buffered_step = int(step)
            self._greatest_step = self._manifest["last_step"] = max(self._greatest_step, int(step))
        full = self._buffer.num_rows >= self._flush_rows or self._buffer.num_bytes >= self._flush_bytes
        if full or time.monotonic() - self._flushed_at >= 2 * self._flush_seconds:
            self._flush_inside_step()
        elif time.monotonic() - self._beat_at >= self._flush_seconds:
            with contextlib.suppress(OSError):  # the next flush tells
                self._beat()

    def _write_buffered(self) -> None:
        for table in _FLUSH_ORDER:
            while (part := self._buffer.next_part(table, rank=self.share, segment=self.segment)) is not None:
                rows, entries = part
                self._write_part(table, rows)
                self._buffer.written(table, entries)

    def _may_flush(self) -> bool:
        """Whether a flush that nobody asked for is worth a try: after a failure, not before a while."""
        return self._failure is None or time.monotonic() - self._failed_at >= _RETRY_SECONDS

    def _flush_between_steps(self, due: bool) -> None:
        try:
            self._flush_or_tell(due)
        except StorageError as problem:  # comes back, mostly: no reason to stop a training
            if not self._warned:
                warnings.warn(f"not written yet, will be tried again: {problem}", RuntimeWarning, stacklevel=3)
            self._warned = True

    def _patiently(self, write: Callable[[], None]) -> None:
        """The last writes of a run: there is no later flush to repeat them, so wait for an object store a little."""
        for _ in range(_LAST_ATTEMPTS - 1):
            try:
                return write()
            except StorageError:
                time.sleep(min(self._flush_seconds, REMOTE_FLUSH_SECONDS))
        write()

    def _flush_or_tell(self, due: bool) -> None:
        if due and self._may_flush():
            self.flush()
        elif self._failure is not None and not self._failure_is_told:
            self._failure_is_told = True
            raise self._failure

    def _flush_inside_step(self) -> None:
        """Flush; a failure is told at the end of the step, so that the caller logs the rest of it first."""
        if self._may_flush():
            try:
                self.flush()
            except OSError:
                self._failure_is_told = False

    def _retry_or_refuse(self, count: int) -> None:
        """Make room in a buffer that is full because writing fails, or raise OSError."""
        if self._may_flush():
            with contextlib.suppress(OSError):
                self.flush()
        if self._failure is not None:
            self._refused += count
            raise OSError(self._failure.errno, self._refusal())

    def _refusal(self) -> str:
        return f"{self._refused} rows were not recorded, as {self.path} could not be written: {self._reason}"

    def _add_event(self, step: int, kind: str, message: str) -> None:
        self._buffer.add("events", _event(step, kind, message))

    def _write_part(self, table: str, rows: pa.Table) -> None:
        write_part(self.path / table / part_name(self.rank, self._sequence[table]), table, rows)
        self._sequence[table] += 1

    def _log_resumed(self, step: int) -> None:
        self._resumed_pending = False
        self._add_event(step, "resumed", f"segment {self.segment} starts at step {step}")

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        if self.rank == 0:
            self._manifest["heartbeat_at"] = now()
            replace_manifest(self.path, self._manifest)

    def _close(self, status: str, error: str | None) -> None:
        # a closed run has no process: whom it was written by is nobody's business once it can no longer be watched
        self._manifest |= {"status": status, "error": error, "process": None}
        self._closed = True
        self._beat()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the run at {self.path} is closed ({self._manifest['status']})")
        if not self.is_open:
            raise ValueError(f"the run at {self.path} is written by process {self._pid}, not by a fork of it")


def _event(step: int, kind: str, message: str) -> dict[str, Any]:
    return {"step": int(step), "kind": checks.encodable(str(kind)), "message": checks.encodable(str(message))}


__all__ = ["RunExistsError", "RunNotFoundError", "RunWriter"]
