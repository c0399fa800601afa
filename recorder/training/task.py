"""What a toy run learns: the interface between the training loop and its tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the model is given, and what the recorder is told of its tokens (keywords of `RoutingRecorder.step`)."""

    inputs: Any
    tokens: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """What is learnt: a model, its optimizer and its data.

    settings: what the manifest's config says beside the ToyConfig. probe: one fixed held-out batch.
    data_digest: of all that batches are drawn from, beside the settings; "" where there is nothing beside them.
    tallies: what `report` counts up, kept and changed in place.
    """

    @property
    def model(self) -> nn.Module: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def probe(self) -> Batch: ...
    @property
    def domains(self) -> Sequence[str]: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def data_digest(self) -> str: ...
    @property
    def tallies(self) -> Mapping[str, Tensor]: ...

    def batch(self, step: int) -> Batch:
        """The training batch of a step, the same for the same seed."""

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Run the model: "loss", the one to descend, and its parts by their names in the `steps` table."""

    def report(self, steps_done: int) -> str | None:
        """A line for the person who waits, where this step has one."""
