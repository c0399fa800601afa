"""The toy training run: one small MoE model, every routing decision recorded. What it learns is a `Task`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from moe_core.balancers import attach_balancers

from ..hooks import RoutingRecorder
from ..storage import Place
from .checkpoint import LEAST_SECONDS, Checkpoints, restore
from .config import SOURCE, ToyConfig
from .language_model import LanguageModelTask
from .regression import RegressionTask
from .task import Task

GRADIENT_CLIP = 1.0


class RunCancelledError(Exception):
    """The run was asked to stop; what was recorded until then is kept."""


def make_task(config: ToyConfig) -> Task:
    """The task that `config.task` names. Raises ValueError for a corpus or model that cannot be used."""
    return RegressionTask(config) if config.task == "regression" else LanguageModelTask(config)


def train(
    config: ToyConfig,
    out: Place,
    *,
    continued: bool = False,
    checkpoint_seconds: float = LEAST_SECONDS,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    on_report: Callable[[str], None] = lambda line: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train and record into the run folder `out` (created; FileExistsError if it is taken).

    continued: go on with the run that is there, of the same config, from its checkpoint, as its next segment.
    checkpoint_seconds: least time between two checkpoints, 0 = one after every step; cancelling writes one too.

    Calls on_step(steps done, loss) after each step, on_report(line) where the task has something to tell, and
    should_stop() before each step. Raises RunCancelledError after closing the run as cancelled, ValueError for a
    corpus, model or checkpoint that cannot be used, before anything is written, OSError where the last rows could not
    be written.
    """
    task = make_task(config)
    checkpoints = Checkpoints(out, task, least_seconds=checkpoint_seconds)
    if should_stop():
        raise RunCancelledError  # before the run's folder is there
    attach_balancers(task.model, task.optimizer)
    torch.manual_seed(config.seed)  # the router's noise
    first, rng = 0, torch.get_rng_state()
    if continued:
        resumption = restore(out, task)
        first, rng = resumption.step, resumption.rng
    with RoutingRecorder(
        task.model,
        out,
        name=None if continued else config.name or out.name,  # it may have been renamed since
        config={**config.as_manifest(), **task.settings},
        domains=task.domains,
        decisions_every=config.decisions_every,
        probe_every=config.probe_every,
        source=SOURCE,
        resume=continued,
    ) as recorder:
        torch.set_rng_state(rng)
        for step in range(first, config.steps):
            if step > first and should_stop():
                _keep(recorder, checkpoints, step, on_report)
                recorder.close("cancelled")
                raise RunCancelledError
            loss = _train_step(recorder, task, step)
            # the last probe sees the finished model: it is what saturation is measured against
            if step % config.probe_every == 0 or step == config.steps - 1:
                _probe(recorder, task, step)
            on_step(step + 1, loss)
            line = task.report(step + 1)
            if line is not None:
                on_report(line)
            if checkpoints.due:
                _keep(recorder, checkpoints, step + 1, on_report)
    # training goes on where rows cannot be written; a record does not
    if recorder.writer.manifest["status"] == "failed":
        raise OSError(recorder.writer.manifest["error"])
    checkpoints.remove()


def _keep(recorder: RoutingRecorder, checkpoints: Checkpoints, next_step: int, report: Callable[[str], None]) -> None:
    """Write a checkpoint, the rows of the steps before it first: without them the continued run would have a gap."""
    recorder.flush()
    try:
        checkpoints.write(next_step)
    except OSError as error:
        report(f"the run goes on, but no checkpoint could be written: {error}")


def _train_step(recorder: RoutingRecorder, task: Task, step: int) -> float:
    batch = task.batch(step)
    started = time.perf_counter()
    task.model.train()
    with recorder.step(step, **batch.tokens):
        losses = task.losses(batch)
        task.optimizer.zero_grad()
        losses["loss"].backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(task.model.parameters(), GRADIENT_CLIP)
        task.optimizer.step()
        recorder.log(
            **losses,
            grad_norm=grad_norm,
            learning_rate=task.optimizer.param_groups[0]["lr"],
            wall_time_s=time.perf_counter() - started,
        )
    return losses["loss"].item()


@torch.no_grad()
def _probe(recorder: RoutingRecorder, task: Task, step: int) -> None:
    """One fixed held-out batch in eval mode: the same tokens each time, after the update of that step."""
    task.model.eval()
    with recorder.step(step, phase="probe", **task.probe.tokens):
        recorder.log(**task.losses(task.probe))
