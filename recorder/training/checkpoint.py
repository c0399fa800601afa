"""The training of a toy run between two steps, kept in the run's folder, so that it can be continued.

A run that is continued equals one that was never stopped, bit for bit, where text and library versions are the same:
batches follow from seed and step, all else that moves is kept here.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import storage
from ..storage import Place
from .continuing import CHECKPOINT
from .task import Task

#: At least this long between two checkpoints, and this many times as long as writing the last one took.
LEAST_SECONDS = 10.0
_SHARE = 20


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """Where to go on: the next step, and the state of torch's random generator before it."""

    step: int
    rng: Tensor


class Checkpoints:
    """Writes the checkpoint of one run, now and then.

    least_seconds: between one and the next that is due; 0 = one is due after every step.
    """

    def __init__(self, run: Place, task: Task, *, least_seconds: float = LEAST_SECONDS) -> None:
        self._file = run / CHECKPOINT
        self._task = task
        self._least_seconds = least_seconds
        self._pause_s = least_seconds
        self._written_at = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether enough time has passed since the last one for another."""
        return time.monotonic() - self._written_at >= self._pause_s

    def write(self, next_step: int) -> None:
        """Replace the checkpoint: `next_step` is the first step that is still to do. Raises OSError."""
        began = time.monotonic()
        content = io.BytesIO()
        torch.save(
            {
                "step": next_step,
                "rng": torch.get_rng_state(),
                "data": self._task.data_digest,
                "model": self._task.model.state_dict(),
                "optimizer": self._task.optimizer.state_dict(),
                "tallies": dict(self._task.tallies),
            },
            content,
        )
        storage.write(self._file, lambda target: target.write(content.getbuffer()))
        self._written_at = time.monotonic()
        if self._least_seconds:
            self._pause_s = max(self._least_seconds, _SHARE * (self._written_at - began))

    def remove(self) -> None:
        """Take it away, once there is no step left."""
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()


def restore(run: Place, task: Task) -> Resumption:
    """Put model, optimizer and tallies of the task where the checkpoint of the run has them.

    Raises ValueError, one line, where there is none, where it cannot be read, or where it is of other data or another
    model; OSError where the file cannot be read.
    """
    file = run / CHECKPOINT
    try:
        saved = torch.load(io.BytesIO(file.read_bytes()), weights_only=True)
        step, data = saved["step"], saved["data"]
    except FileNotFoundError:
        raise ValueError(f"{file} is not there: the run keeps no checkpoint to continue from") from None
    except (RuntimeError, EOFError, pickle.UnpicklingError, KeyError, TypeError):
        raise ValueError(f"{file} is not a checkpoint of a toy run") from None
    if data != task.data_digest:
        raise ValueError(
            f"{run} was recorded on other text than its settings give now (files changed, or another version of "
            "Python): it cannot be continued"
        )
    try:
        task.model.load_state_dict(saved["model"])
        task.optimizer.load_state_dict(saved["optimizer"])
        for name, tally in task.tallies.items():
            tally.copy_(saved["tallies"][name])
    except (RuntimeError, ValueError, KeyError):
        raise ValueError(f"{file} is of another model than the settings in {run / 'run.json'} describe") from None
    return Resumption(step=step, rng=saved["rng"])
