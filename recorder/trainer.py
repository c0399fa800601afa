"""RoutingCallback: everything that RoutingRecorder does, for users of transformers' Trainer. Imports transformers."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from .hooks import RoutingRecorder
from .writer import status_after


class RoutingCallback(TrainerCallback):
    """Records a Trainer's run into `out`.

        trainer = Trainer(model, args, train_dataset=..., callbacks=[RoutingCallback("runs/mine")])

    Steps bear the Trainer's own numbers (its first is 1). One step holds all micro-batches of its gradient
    accumulation. Loss, learning rate and time are logged for every step, the gradient norm where the Trainer logs it.
    The loss is the Trainer's where it logs every step, else what the model returned. An evaluation is recorded as
    phase eval under the step that it follows: the statistics of all its batches, the decisions of the first
    `eval_batches`; `trainer.evaluate()` outside of training is not recorded.

    The run is closed when training ends. A Trainer tells its callbacks of no exception: use the callback as a context
    manager around `trainer.train()` to have the run marked as failed; without that it shows as unfinished.

    recorder_options: as of RoutingRecorder; the config in the manifest is the Trainer's arguments unless given.
    """

    def __init__(self, out: str | Path, *, eval_batches: int = 1, **recorder_options: Any) -> None:
        if eval_batches < 0:
            raise ValueError(f"eval_batches={eval_batches} is below 0")
        self.recorder: RoutingRecorder | None = None
        self._out, self._eval_batches, self._options = out, eval_batches, recorder_options
        self._context: AbstractContextManager[None] | None = None
        self._phase = ""
        self._losses = _ModelLosses()
        self._started = 0.0
        self._batches = 0
        self._logged_step = 0

    def close(self, error: BaseException | None = None) -> None:
        """Close the run, as failed where `error` says why. May be called twice."""
        self._leave(keep=error is None)
        self._losses.detach()
        if self.recorder is not None:
            self.recorder.close(*status_after(error))
            self.recorder = None

    def __enter__(self) -> RoutingCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        model: nn.Module = of_trainer["model"]
        self._leave(keep=False)
        if self.recorder is None:  # it is there where the Trainer starts anew with a smaller batch
            options = {"source": "transformers.Trainer", "config": _plain(args.to_dict()), **self._options}
            self.recorder = RoutingRecorder(model, self._out, **options)
            self._losses.attach(model)
        self._logged_step = state.global_step
        if args.eval_on_start:
            self._enter(state.global_step, "eval")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._leave()
        self._losses.clear()
        self._enter(state.global_step + 1, "train")
        self._started = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, optimizer: Any = None, **_: Any) -> None:
        if optimizer is not None:
            self._log(learning_rate=optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._log(wall_time_s=time.perf_counter() - self._started, loss=self._losses.of_step())
        if not control.should_log:  # else on_log comes next, with what belongs to this step
            self._step_is_over(state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        logs = logs or {}
        if self._phase == "train" and "loss" in logs:
            one_step = state.global_step - self._logged_step == 1
            names = ("loss", "grad_norm") if one_step else ("grad_norm",)
            self._log(**{name: float(logs[name]) for name in names if name in logs})
            self._logged_step = state.global_step
            self._step_is_over(state, control)
        elif self._phase == "eval" and "eval_loss" in logs:
            self._log(loss=float(logs["eval_loss"]))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._batches += 1
        if self._phase == "eval" and self.recorder is not None and self.recorder.open_step is not None:
            self.recorder.open_step.decisions &= self._batches < self._eval_batches

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not control.should_log:
            self._step_is_over(state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()

    def _step_is_over(self, state: Any, control: Any) -> None:
        """What the model does next is evaluation, where there is one."""
        if self._phase == "train":
            self._leave()
        if control.should_evaluate and not self._phase:
            self._enter(state.global_step, "eval")

    def _enter(self, step: int, phase: str) -> None:
        if self.recorder is None or self.recorder.has(step, phase):
            return
        self._phase, self._batches = phase, 0
        decisions = False if phase == "eval" and not self._eval_batches else None
        self._context = self.recorder.step(step, phase=phase, decisions=decisions)
        self._context.__enter__()

    def _leave(self, *, keep: bool = True) -> None:
        """End the open context; what it saw is recorded if it is to be kept and there is something."""
        if self._context is None or self.recorder is None:
            return
        context, capture = self._context, self.recorder.open_step
        self._context, empty = None, self._phase == "eval" and (capture is None or not capture.calls)
        self._phase = ""
        if keep and not empty:
            context.__exit__(None, None, None)
        else:
            context.__exit__(_GivenUpError, _GivenUpError(), None)

    def _log(self, **scalars: Any) -> None:
        if self._context is not None and self.recorder is not None:
            self.recorder.log(**scalars)


class _GivenUpError(Exception):
    """Ends a step context of which nothing is to be kept."""


class _ModelLosses:
    """The loss of a step, from what the model returned in each of its micro-batches.

    Given the number of items in the whole batch, each micro-batch's loss is its share; else each is a mean.
    """

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None
        self.clear()

    def attach(self, model: nn.Module) -> None:
        self._handle = model.register_forward_hook(self._note, with_kwargs=True)

    def detach(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def clear(self) -> None:
        self._losses: list[Tensor] = []
        self._shares = False

    def of_step(self) -> Tensor | None:
        if not self._losses:
            return None
        losses = torch.stack(self._losses)
        return losses.sum() if self._shares else losses.mean()

    @torch.compiler.disable
    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.numel() == 1 and torch.is_grad_enabled():
            self._losses.append(loss.detach().reshape(()))
            self._shares = kwargs.get("num_items_in_batch") is not None


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that JSON can hold; the rest by their names."""
    plain = (type(None), bool, int, float, str, list, tuple, dict)
    return {name: value if isinstance(value, plain) else str(value) for name, value in settings.items()}
