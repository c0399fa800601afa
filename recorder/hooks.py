"""RoutingRecorder: attach to a model and record the routing of its training, one optimizer step at a time.

Shapes: B batch, S sequence, T = B*S tokens of one micro-batch, E experts, K choices a token.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from . import buffers, checks
from .adapters import RouterSite, find_routers
from .background import Background
from .describe import describe_model
from .given_tokens import check_given, mask_of
from .host_copies import HostCopy
from .joint_run import open_run
from .manifest import fields_of
from .model_calls import Entrance, told_by
from .model_hooks import ModelHooks
from .processes import this_rank
from .sampling import Sampling
from .step_capture import StepCapture
from .step_rows import GivenTokens, StepRecord, StepWriter
from .storage import Where
from .writer import RunWriter, check_last, status_after

LOGGED = ("loss", "ce_loss", "aux_loss", "z_loss", "grad_norm", "learning_rate", "wall_time_s")
_WHEN_FULL = ("wait", "drop")


class RoutingRecorder:
    """Records every router of `model` into the run folder `out` (created; FileExistsError if it holds a run).

    Open one `step` context per optimizer step; forwards outside a context are not recorded. All micro-batches
    inside one context belong to one step. Recomputed activations are not recorded again. `close()` (or leaving the
    `with` block) writes what is left and takes the hooks off the model.

        with RoutingRecorder(model, out="runs/mine", name="my run") as recorder:
            for step, batch in enumerate(batches):
                with recorder.step(step):
                    loss = model(**batch).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    recorder.log(loss=loss)

    Routers are found by their class (`recorder.adapters`). Padding is left out by the `attention_mask` that the model
    itself is called with. Rows are made and written in a thread of the recorder's own; nothing is read back from the
    device in the training thread. What goes wrong there (a full disk, a router's odd output) never stops training: it
    is warned of once, becomes an event `recorder_error` of the run, and what still works is recorded. A step in which
    the model ran but a router was not seen (compiled before the recorder was attached, say) is told the same way.

    out: the run's own folder, or a URI such as s3://bucket/runs/mine.
    name: shown in the dashboard (default: the folder's name). config: the full training configuration, a mapping,
    dataclass or Namespace, kept in the manifest (a value that JSON has no form for as text); its "balancer" and "seed"
    are shown with the run. domains: names that `step(domains=...)` may use.
    stats_every, decisions_every: of the train phase, record every n-th step's statistics and decisions.
    decisions_share: of those steps' sequences, record the decisions of this share (0 < share <= 1), the same ones in
    every layer. Other phases are recorded in full. probe_every: how often you record probes; noted in the manifest.
    tokens: record the token ids of the model's own `input_ids`. tokenizer: turns them into text, `decode([id])`.
    Without these two, and `step(token_ids=..., text=...)`, nothing of the text is kept.
    max_buffer_mb: most MB of decisions that wait for the disk. when_full: "wait" until there is room, or "drop" the
    step's decisions, never its statistics; each step dropped is an event `decisions_dropped`.
    resume: go on with the run that is there, as its next segment; "auto" = if there is one, which is what a script that
    a scheduler starts again wants. rank, world_size: by default those of torch.distributed, else of torchrun's
    environment; every rank builds a recorder with the same `out`, and rank 0 creates the run. data_parallel_rank: give
    it where ranks see the same tokens (tensor or pipeline parallel): each router is then recorded once for all ranks of
    one data-parallel rank, and of a scalar the first value that one of them logs (so log aux losses summed over all
    layers). That needs torch.distributed, initialised before, and layers under their names in the whole model.
    writer_options: passed on to RunWriter (join_seconds, flush_seconds, flush_rows, flush_steps, full_weights).

    Raises ValueError for an option out of range, a router of unknown class, or a single rank's model without any.
    """

    def __init__(
        self,
        model: nn.Module,
        out: Where,
        *,
        name: str | None = None,
        config: Any = None,
        domains: Sequence[str] = (),
        stats_every: int = 1,
        decisions_every: int = 1,
        decisions_share: float = 1.0,
        probe_every: int | None = None,
        tokens: bool = False,
        tokenizer: Any = None,
        max_buffer_mb: float = 64.0,
        when_full: Literal["wait", "drop"] = "wait",
        source: str = "RoutingRecorder",
        rank: int | None = None,
        world_size: int | None = None,
        data_parallel_rank: int | None = None,
        resume: bool | Literal["auto"] = False,
        **writer_options: Any,
    ) -> None:
        self._sampling = Sampling(
            stats_every=stats_every, decisions_every=decisions_every, decisions_share=decisions_share
        )
        checks.number("max_buffer_mb", max_buffer_mb, above=True, finite=True)
        if probe_every is not None:
            checks.whole("probe_every", probe_every, least=1)
        domains = checks.names("domains", domains)
        config = fields_of(config)
        text_of = _text_of(tokenizer)
        if when_full not in _WHEN_FULL:
            raise ValueError(f"when_full={when_full!r} is unknown; choose one of {', '.join(_WHEN_FULL)}")
        rank, world_size = this_rank(rank, world_size)
        found = find_routers(model, may_be_none=world_size > 1)
        coefficients = {site.router: site.adapter.coefficients(site.module) for site in found}
        described = describe_model(model, found)
        joint = open_run(
            out,
            {
                **({} if name is None else {"name": name}),
                "source": source,
                "seed": config.get("seed"),
                "config": config,
                "domains": domains,
                "recorded": {
                    "stats_every": stats_every,
                    "decisions_every": decisions_every,
                    "decisions_share": decisions_share,
                    "probe_every": probe_every,
                    "when_full": when_full,
                    "text": False,
                    "weights": "full" if writer_options.get("full_weights") else "rounded",
                },
                "versions": _versions(),
                "model": described,
            },
            rank=rank,
            world_size=world_size,
            data_parallel_rank=data_parallel_rank,
            resume=resume,
            **writer_options,
        )
        self._writer = joint.writer
        numbers = joint.numbers
        mine = [site for site in found if site.router in numbers]
        sites = [replace(site, router=numbers[site.router]) for site in mine]
        self._sites = {site.router: site for site in sites}
        self._step_writer = StepWriter(
            self._writer,
            {router: site.layer for router, site in self._sites.items()},
            {numbers[site.router]: coefficients[site.router] for site in mine},
            text_of,
            writes_tokens=joint.tokens,
        )
        self._domains, self._tokens, self._when_full = tuple(domains), tokens or tokenizer is not None, when_full
        self._top_k = {
            numbers[layer["router"]]: layer["top_k"] for layer in described["layers"] if layer.get("router") in numbers
        }
        self._open: StepCapture | None = None
        self._recorded: set[tuple[int, str]] = set()
        self._told_of: set[str] = set()
        self._warnings: list[str] = []
        self._notes = threading.Lock()
        self._errors = self._dropped = 0
        self._last_step = 0
        self._closed = False
        self._pid = os.getpid()
        flush_seconds = writer_options.get("flush_seconds")
        self._background = Background(
            lambda work: work(),
            max_bytes=int(max_buffer_mb * 2**20),
            idle=lambda: self._guarded("writing", self._writer.rest),
            idle_seconds=1.0 if flush_seconds is None else max(0.05, flush_seconds),
        )
        self._hooks = ModelHooks(model, sites, self)
        atexit.register(self._at_exit)

    @property
    def writer(self) -> RunWriter:
        """The run's writer, once all that was recorded so far has gone through it; it belongs to another thread."""
        if not self._forked:
            self._background.drain()
        return self._writer

    @contextmanager
    def step(
        self,
        step: int,
        *,
        phase: str = "train",
        token_ids: Any = None,
        attention_mask: Any = None,
        domains: Any = None,
        text: Any = None,
        decisions: bool | None = None,
    ) -> Iterator[None]:
        """Record the forwards inside as step `step` of `phase` (train, probe, eval or generate).

        A context of another phase may be opened inside (a generation in the middle of a training step): its forwards
        are its own. A forward in eval mode or without gradients inside a train step is recorded as training, and
        warned of once.

        token_ids, attention_mask, text: (B, S), those of several micro-batches concatenated along B; mask True or
        1 = a real token (an additive mask of floats: 0 real, negative padding); by default the model's own
        attention_mask. text may be a function that returns it, called only where decisions are kept. domains: one
        name per sequence (B) or per token (B, S). In an encoder-decoder model they are about the encoder's tokens;
        the decoder's are numbered after those. decisions: whether to keep single decisions; default by
        `decisions_every` in the train phase, always elsewhere. Nothing is written when the block raises.

        Raises ValueError for an unknown phase, a step that was recorded already, shapes that do not match what the
        model saw, or a closed recorder; RuntimeError inside another context of the same phase. In a process forked
        from the one that built the recorder nothing is recorded.
        """
        self._check_new(step, phase)
        outer = self._open
        if outer is None:
            self._hooks.start_anew()
        self._open = current = StepCapture(
            step,
            phase,
            stats=self._sampling.stats(step, phase),
            decisions=self._sampling.decisions(step, phase) if decisions is None else decisions,
            sampling=self._sampling,
            token_ids=self._tokens,
            mask_T=mask_of(attention_mask),
        )
        started = time.perf_counter()
        try:
            yield
        finally:
            self._open = outer
        if self._forked:
            return
        current.scalars.setdefault("wall_time_s", time.perf_counter() - started)
        given = GivenTokens()
        # a rank without routers to record saw no tokens to hold this against, nor one whose routers could not be read
        if self._sites and not current.misread:
            given = check_given(
                current.first_stream,
                decisions=current.decisions,
                token_ids=token_ids,
                attention_mask=attention_mask,
                domains=domains,
                text=text,
                declared=self._domains,
            )
        self._recorded.add((step, phase))
        self._last_step = step
        self._guarded("ending a step", lambda: self._hand_over(current, given))
        self._speak()

    @property
    def open_step(self) -> StepCapture | None:
        """What the open context has gathered so far; None outside."""
        return self._open

    def has(self, step: int, phase: str = "train") -> bool:
        """Whether this step of this phase has been recorded (in this segment of the run)."""
        return (step, phase) in self._recorded

    def log(self, **scalars: Any) -> None:
        """Numbers of the open step: loss, ce_loss, aux_loss, z_loss, grad_norm, learning_rate, wall_time_s.

        wall_time_s is the time spent inside the context, in seconds, unless it is logged.
        Tensors of one element, numbers, or None. A tensor on a device is copied without waiting for it. Raises
        RuntimeError outside a step context, ValueError for other names and values.
        """
        if self._open is None:
            raise RuntimeError("log() wants an open step: call it inside `with recorder.step(...)`")
        unknown = sorted(set(scalars) - set(LOGGED))
        if unknown:
            raise ValueError(f"log() does not know {', '.join(unknown)}; it takes {', '.join(LOGGED)}")
        self._open.scalars |= {name: _scalar(name, value) for name, value in scalars.items()}

    def flush(self) -> None:
        """Return once all steps so far are on the disk. Raises ValueError where the recorder is closed."""
        if self._closed:
            raise ValueError(f"the run at {self._writer.path} is closed")
        if self._forked:
            return
        self._background.drain()
        self._guarded("writing", self._writer.flush)
        self._speak()

    def close(self, status: Literal["finished", "cancelled", "failed"] = "finished", error: str | None = None) -> None:
        """Write what is left, set the run's status and take the hooks off the model. May be called twice.

        Where the last rows cannot be written, that is warned of, and the status is failed if even that can be. In a
        forked process this only takes the hooks off: the run is its parent's. Raises ValueError for another status.
        """
        check_last(status)
        if self._closed:
            return
        self._closed = True
        self._hooks.remove()
        if self._forked:
            return
        atexit.unregister(self._at_exit)
        self._background.close()
        self._check_thread()
        if self._errors or self._dropped:
            counts = {"errors": self._errors, "decisions_dropped": self._dropped}
            self._guarded("writing", partial(self._note_counts, counts))
        try:
            self._writer.finalize(status, error)
        except Exception as problem:
            self._warnings.append(f"the run at {self._writer.path} could not be closed: {problem}")
        self._speak()

    def __enter__(self) -> RoutingRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close(*status_after(error))
        except Exception as problem:
            if error is None:
                raise
            error.add_note(f"closing the run failed too: {problem}")

    # What the model's hooks tell; a fault in here must not reach the training.

    def model_called(
        self, entrance: Entrance, outermost: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        current = self._open
        if current is None:
            return
        if outermost:
            current.call_begins()
            if current.phase == "train" and not (entrance.module.training and torch.is_grad_enabled()):
                how = "without gradients" if entrance.module.training else "in eval mode"
                self._note(
                    "mixed_phase",
                    f"step {current.step}: a forward {how} inside a train step is recorded as training; "
                    "open `step(n, phase='eval')` or phase='generate' for it",
                    kind="mixed_phase",
                )
        self._guarded("reading the model's call", lambda: current.told(told_by(entrance, args, kwargs)))

    def model_returned(self) -> None:
        if self._open is not None:
            self._guarded("summing up a forward", self._open.call_ends)

    def router_ran(self, site: RouterSite, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        current = self._open
        if current is None or not current.wants(site):
            return

        def read() -> None:
            with torch.no_grad():
                observation = site.adapter.read(site.module, args, kwargs, output)
                current.router_ran(site, observation)
            said, top_k = self._top_k.get(site.router), observation.routing.top_k
            if said not in (None, top_k):
                self._note(
                    f"top_k of {site.name}",
                    f"router {site.name} chose {top_k} experts a token, but its adapter describes it with top_k={said}",
                )

        current.misread |= not self._guarded(f"reading router {site.name}", read)

    @property
    def _forked(self) -> bool:
        """Whether this is a copy in a forked process: the thread is the parent's, and so are run and files."""
        return os.getpid() != self._pid

    def _check_new(self, step: int, phase: str) -> None:
        buffers.key(step, phase)
        if self._closed:
            raise ValueError(f"the run at {self._writer.path} is closed")
        if (step, phase) in self._recorded:
            raise ValueError(f"step {step} of phase {phase!r} is recorded already; number steps through the whole run")
        if self._open is not None and phase == self._open.phase:
            raise RuntimeError(f"step {step} was opened inside step {self._open.step}; one context at a time")

    def _hand_over(self, current: StepCapture, given: Any) -> None:
        """Send the step on its way to the thread."""
        sums = current.end()
        for misfit in current.misfits:
            self._note(misfit, f"step {current.step}: {misfit}")
        self._note_unseen(current)
        record = StepRecord(
            step=current.step,
            phase=current.phase,
            scalars=current.scalars,
            streams=[batches for _, batches in current.in_order()],
            sums=sums,
            given=given,
        )
        write = partial(self._step_writer.write, record, partial(self._guarded, step=current.step))
        wait = self._when_full == "wait" or not record.decisions_nbytes
        if not self._background.put(write, record.nbytes, wait=wait):
            record.drop_decisions()
            self._dropped += 1
            message = f"phase {current.phase}: the disk was slower than training, max_buffer_mb was full"
            record.events.append(("decisions_dropped", message))
            self._background.put(write, 0)
        self._check_thread()

    def _note_unseen(self, current: StepCapture) -> None:
        """A router that says nothing must not pass for one without tokens."""
        seen = {router for batches in current.streams.values() for batch in batches for router in batch.seen}
        unseen = [site.name for router, site in self._sites.items() if router not in seen]
        partly = current.calls and current.phase == "train" and (current.stats or current.decisions)
        if unseen and (not seen or partly):
            calls = f"the model was called {current.calls} times, but" if current.calls else "the model was not called:"
            self._note(
                "unseen",
                f"step {current.step} of phase {current.phase}: {calls} {len(unseen)} of {len(self._sites)} routers "
                f"were not seen ({unseen[0]}, ...); modules that torch.compile had compiled before the recorder was "
                "attached stay silent until torch.compiler.reset()",
            )

    def _guarded(self, what: str, work: Callable[[], Any], *, step: int | None = None) -> bool:
        """Do it and say whether that worked; a fault is noted."""
        try:
            work()
            return True
        except Exception as error:
            kind = type(error).__name__
            first_line = next(iter(str(error).splitlines()), "")
            message = f"{what} failed: {kind}: {first_line}"
            self._note(f"{what}: {kind}", message, warn_once_for=kind, step=step)
            return False

    def _note(
        self,
        key: str,
        message: str,
        *,
        kind: str = "recorder_error",
        warn_once_for: str | None = None,
        step: int | None = None,
    ) -> None:
        """Make an event of it, once for each key, and warn of it, once for each `warn_once_for` (default: the key)."""
        if step is None:
            step = self._last_step if self._open is None else self._open.step
        warn_once_for = f"warned of {warn_once_for or key}"
        with self._notes:
            self._errors += kind == "recorder_error"
            new, aloud = key not in self._told_of, warn_once_for not in self._told_of
            self._told_of |= {key, warn_once_for}
            if aloud:
                self._warnings.append(f"{message}; training goes on" if kind == "recorder_error" else message)

        def write() -> None:
            with contextlib.suppress(Exception):  # where events cannot be written either
                self._writer.log_event(step, kind, message)

        if new:
            self._background.put(write, 0)

    def _speak(self) -> None:
        """Warn of what has been noted: here, in the training thread, since filters may turn warnings into errors."""
        with self._notes:
            messages, self._warnings = self._warnings, []
        for message in messages:
            warnings.warn(f"routescope: {message}", RuntimeWarning, stacklevel=4)

    def _check_thread(self) -> None:
        if self._background.error is not None:
            error = self._background.error
            with self._notes:
                if "thread" not in self._told_of:
                    self._told_of.add("thread")
                    self._errors += 1
                    self._warnings.append(f"the recorder's thread has died, nothing more is recorded: {error!r}")

    def _note_counts(self, counts: Mapping[str, int]) -> None:
        if self._writer.rank == 0:
            self._writer.update_manifest(recorded={**self._writer.manifest["recorded"], **counts})

    def _at_exit(self) -> None:
        """The script ends without close(): keep the rows. The run shows as unfinished, since nobody said it is not."""
        if self._forked:
            return
        self._background.close()
        with contextlib.suppress(Exception):
            self._writer.flush()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    transformers = sys.modules.get("transformers")  # never imported from here
    return found if transformers is None else found | {"transformers": transformers.__version__}


def _scalar(name: str, value: Any) -> float | HostCopy | None:
    if value is None:
        return None
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} must have one element, got a tensor of shape {tuple(value.shape)}")
    no_number = value.is_complex() or value.is_meta if isinstance(value, Tensor) else np.iscomplexobj(value)
    if no_number or isinstance(value, str | bytes):
        raise ValueError(f"{name} must be a number, got {checks.shown(value)}")
    if isinstance(value, Tensor):
        if value.is_cuda:
            return HostCopy([value.detach()])
        value = value.detach()
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {checks.shown(value)}") from None


def _text_of(tokenizer: Any) -> Callable[[int], str] | None:
    """A function from token id to text that asks the tokenizer once per id."""
    if tokenizer is None:
        return None
    if not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(f"tokenizer must have a method decode([id]), got {checks.shown(tokenizer)}")
    known: dict[int, str] = {}

    def text_of(token_id: int) -> str:
        if token_id not in known:
            known[token_id] = tokenizer.decode([token_id])
        return known[token_id]

    return text_of
