"""The interface of balancers, and what they share.

Shapes: T tokens, D model width, E experts, P past forwards.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .routers import Router
from .routing import Routing, in_backward


class Balancer(nn.Module):
    """The interface: losses with their coefficients, a selection bias, and state that moves with training.

    name: what the manifest of a run calls it. coefficients: loss name -> factor that `losses` applies.
    State keeps its dtype whatever `model.to(bfloat16)` does: a bias of 0.6 that moves by 0.001 would stand still
    in bfloat16.
    """

    name = "none"

    @property
    def coefficients(self) -> dict[str, float]:
        return {}

    def bind(self, router: Router) -> None:
        """Called by a layer as it is built. Raises ValueError where this balancer cannot work with that router."""

    def selection_bias(self, x_TD: Tensor) -> Tensor | None:
        """float32 (E,), what this forward adds to the scores for the selection; None = no bias."""
        return None

    def observe(self, routing: Routing) -> None:
        """Take note of a forward's decisions. Called by the layer after selection, in every mode."""

    def losses(self, routing: Routing, num_sequences: int | None = None) -> dict[str, Tensor]:
        """Scalars to add to the training loss, coefficient included; {} where there is none. After `observe`.

        num_sequences: the T tokens are that many sequences of equal length, one after the other.
        """
        return {}

    def step(self) -> None:
        """Called once after each optimizer step."""

    @property
    def counts_this_forward(self) -> bool:
        """Whether a forward now moves the state: in training, and not where activations are recomputed."""
        return self.training and not in_backward()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Balancer:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = new.to(old.dtype) if old.is_meta else old.to(new.device)
        return self


class NoBalancer(Balancer):
    """Nothing keeps the experts apart: for seeing collapse."""


class PastForwards:
    """What the training forwards since the last optimizer step went by, for when they are computed again.

    Activation checkpointing repeats a forward in the backward pass, when other micro-batches may have moved the
    state on; what this forward went by the first time is found by the fingerprint of its input. The nearest
    fingerprint counts, the latest of equal ones, since on a GPU recomputed activations may differ in their last
    bits. Nothing is read back from the device. A copy starts empty.
    """

    remembered = 64

    def __init__(self) -> None:
        self._past: deque[tuple[Tensor, Tensor]] = deque(maxlen=self.remembered)

    # a deque that grows would be traced anew at each length; both methods run as they are under torch.compile
    @torch.compiler.disable
    def note(self, x: Tensor, value: Tensor) -> None:
        """The forward with input x (T, any) goes by `value`, which is copied."""
        self._past.appendleft((_fingerprint(x), value.detach().clone()))

    @torch.compiler.disable
    def recall(self, x: Tensor) -> Tensor | None:
        """The value noted for the input nearest to x; None where nothing has been noted."""
        if not self._past:
            return None
        marks_P2 = torch.stack([mark for mark, _ in self._past])
        distance_P = (marks_P2 - _fingerprint(x)).abs().sum(-1)
        return torch.stack([value for _, value in self._past])[distance_P.argmin()]

    def clear(self) -> None:
        self._past.clear()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


def _fingerprint(x_TD: Tensor) -> Tensor:
    """float64 (2,): equal for the same activations computed again, different for others in practice."""
    # a NaN in one row must not make all inputs look alike
    x_TD = x_TD.detach().nan_to_num(0.0, 0.0, 0.0)
    return torch.stack([x_TD.sum(dtype=torch.float64), x_TD[:, ::3].sum(dtype=torch.float64)])


def check_coefficient(what: str, value: float) -> float:
    """The value; ValueError unless it is a finite number of at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{what} {value} is not a finite number of at least 0")
    return value
