"""Balancers: what keeps the load of a layer's experts even, by a loss or by a bias on the selection.

Shapes: T tokens, E experts, K choices a token. Every balancer belongs to one layer: statistics of several layers
are never pooled, since layers that collapse onto different experts would look balanced together. Padding and
invalid rows never count.

How much a balancer sees: its losses in every forward, its state in training-mode forwards only. Recomputed
activations (checkpointing) are not counted again, and route with the bias of their first pass.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .routing import Routing, in_backward, mean_probabilities


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

    def losses(self, routing: Routing) -> dict[str, Tensor]:
        """Scalars to add to the training loss, coefficient included; {} where there is none."""
        return {}

    def selection_bias(self, x_TD: Tensor) -> Tensor | None:
        """float32 (E,), what this forward adds to the scores for the selection; None = no bias."""
        return None

    def observe(self, routing: Routing) -> None:
        """Take note of a forward's decisions. Called by the layer after selection, in every mode."""

    def step(self) -> None:
        """Called once after each optimizer step."""

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


class SwitchAuxLoss(Balancer):
    """coefficient * E * sum_i f_i P_i (Switch Transformer, arXiv 2101.03961, eq. 4 to 6).

    f_i = assignments of expert i / (T K), P_i = mean over tokens of the full distribution, before noise and bias.
    A uniform load gives the coefficient itself, for every E and K. An all-padding batch gives 0.
    """

    name = "aux"

    def __init__(self, coefficient: float = 1e-2) -> None:
        super().__init__()
        self.coefficient = _checked("aux loss coefficient", coefficient)

    @property
    def coefficients(self) -> dict[str, float]:
        return {"aux_loss": self.coefficient}

    def losses(self, routing: Routing) -> dict[str, Tensor]:
        load_E = routing.load()
        f_E = load_E / load_E.sum().clamp_min(1)
        balance = routing.num_experts * (f_E * mean_probabilities(routing)).sum()
        return {"aux_loss": self.coefficient * balance}


class RouterZLoss(Balancer):
    """coefficient * mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5), before noise."""

    name = "z"

    def __init__(self, coefficient: float = 1e-3) -> None:
        super().__init__()
        self.coefficient = _checked("z-loss coefficient", coefficient)

    @property
    def coefficients(self) -> dict[str, float]:
        return {"z_loss": self.coefficient}

    def losses(self, routing: Routing) -> dict[str, Tensor]:
        routed_T = routing.routed_T
        # masked before the logsumexp: a NaN row would send NaN back through the mask
        logits_TE = torch.where(routed_T[:, None], routing.logits_TE, 0)
        squared_T = torch.where(routed_T, logits_TE.logsumexp(-1) ** 2, 0)
        return {"z_loss": self.coefficient * squared_T.sum() / routed_T.sum().clamp_min(1)}


class SignBiasBalancer(Balancer):
    """A bias that moves a fixed step against each expert's load ("auxiliary-loss-free", arXiv 2408.15664).

    After each optimizer step: delta = rate * sign(mean(count) - count), delta -= mean(delta), bias += delta, with
    the counts of all training forwards since the last step.
    """

    name = "sign-bias"
    expert_bias: Tensor
    count: Tensor

    def __init__(self, num_experts: int, rate: float = 1e-3) -> None:
        super().__init__()
        self.rate = _checked("bias rate", rate)
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("count", torch.zeros(num_experts, dtype=torch.int64))

    def selection_bias(self, x_TD: Tensor) -> Tensor | None:
        return self.expert_bias

    @torch.no_grad()
    def observe(self, routing: Routing) -> None:
        if self.training and not in_backward():
            self.count += routing.load()

    @torch.no_grad()
    def step(self) -> None:
        # integer comparison: 30001 and 30000 are told apart however large the counts grow
        delta_E = self.rate * torch.sign(self.count.sum() - self.count * len(self.count)).float()
        self.expert_bias += delta_E - delta_E.mean()
        self.count.zero_()


class QuantileBalancer(Balancer):
    """A bias set anew from each batch so that every expert would take its K/E of the tokens.

    Route with the old bias; with s the scores that selection ranked and alpha_t the (K+1)-th highest corrected
    score of token t, r = alpha_t - s; bias_i = the K/E quantile ("higher") of r[:, i] over the batch; then
    bias -= mean(bias). The batch's quantile replaces the old bias; it is no moving average. Updated in
    training-mode forwards, also under `no_grad`, never in eval. Needs num_experts > top_k.
    """

    name = "quantile"
    expert_bias: Tensor
    remembered_forwards = 64  # of training since the last optimizer step, for recomputation

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__()
        if top_k >= num_experts:
            raise ValueError(
                f"the quantile balancer needs num_experts > top_k, not num_experts={num_experts}, top_k={top_k}: "
                "with every expert chosen there is no threshold to move"
            )
        self.top_k = top_k
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32))
        self._past: deque[tuple[Tensor, Tensor]] = deque(maxlen=self.remembered_forwards)

    def selection_bias(self, x_TD: Tensor) -> Tensor | None:
        if not (self.training and torch.is_floating_point(x_TD)):
            return self.expert_bias
        mark = _fingerprint(x_TD)
        if not in_backward():
            self._past.appendleft((mark, self.expert_bias.clone()))
            return self.expert_bias
        # The bias has moved since the first pass: find the one that this very input was routed with. argmax over
        # no match gives the latest forward. No value is read back from the device.
        if not self._past:
            return self.expert_bias
        same_P = (torch.stack([past_mark for past_mark, _ in self._past]) == mark).all(-1)
        return torch.stack([past_bias for _, past_bias in self._past])[same_P.int().argmax()]

    @torch.no_grad()
    def observe(self, routing: Routing) -> None:
        if not self.training or in_backward():
            return
        assert routing.threshold_T is not None  # num_experts > top_k
        threshold_T = routing.threshold_T
        counted_T = routing.routed_T & threshold_T.isfinite()
        r_TE = (threshold_T[:, None] - routing.unbiased_selection_TE)[counted_T]
        num_tokens, num_experts = r_TE.shape
        if num_tokens == 0:
            return
        # rank of the "higher" quantile in whole numbers: ceil(q (n - 1)) of q = K/E
        rank = -(-self.top_k * (num_tokens - 1) // num_experts)
        bias_E = r_TE.kthvalue(rank + 1, dim=0).values
        self.expert_bias.copy_(bias_E - bias_E.mean())

    def step(self) -> None:
        self._past.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_past": deque(maxlen=self.remembered_forwards)}


class CombinedBalancer(Balancer):
    """Several balancers at once, at most one of them with a bias (aux loss + z-loss, sign bias + aux loss, ...)."""

    def __init__(self, balancers: Iterable[Balancer]) -> None:
        super().__init__()
        self.parts = list(balancers)
        self._registered = nn.ModuleList(self.parts)  # for state_dict, devices and modes
        names = [part.name for part in self.parts]
        self.name = "+".join(names)
        if len(set(names)) < len(names):
            raise ValueError(f"balancers {self.name!r} name one kind twice")
        if sum(hasattr(part, "expert_bias") for part in self.parts) > 1:
            raise ValueError(f"balancers {self.name!r} would both own the selection bias; choose one of them")

    @property
    def coefficients(self) -> dict[str, float]:
        return {name: value for part in self.parts for name, value in part.coefficients.items()}

    def losses(self, routing: Routing) -> dict[str, Tensor]:
        return {name: value for part in self.parts for name, value in part.losses(routing).items()}

    def selection_bias(self, x_TD: Tensor) -> Tensor | None:
        biases = [part.selection_bias(x_TD) for part in self.parts]
        return next((bias for bias in biases if bias is not None), None)

    def observe(self, routing: Routing) -> None:
        for part in self.parts:
            part.observe(routing)

    def step(self) -> None:
        for part in self.parts:
            part.step()


BALANCER_NAMES = ("none", "aux", "z", "sign-bias", "quantile")


def make_balancer(
    names: str,
    num_experts: int,
    top_k: int,
    *,
    aux_coef: float = 1e-2,
    z_coef: float = 1e-3,
    bias_rate: float = 1e-3,
) -> Balancer:
    """The balancer of that name, or several joined by "+", such as "aux+z" or "sign-bias+aux".

    Raises ValueError for an unknown name, one named twice, "none" beside others, or two that own the bias.
    """
    makers: dict[str, Callable[[], Balancer]] = {
        "none": NoBalancer,
        "aux": lambda: SwitchAuxLoss(aux_coef),
        "z": lambda: RouterZLoss(z_coef),
        "sign-bias": lambda: SignBiasBalancer(num_experts, bias_rate),
        "quantile": lambda: QuantileBalancer(num_experts, top_k),
    }
    chosen = names.split("+")
    for name in chosen:
        if name not in makers:
            raise ValueError(f"balancer {name!r} is unknown; choose among {', '.join(BALANCER_NAMES)}, joined by '+'")
    if len(chosen) == 1:
        return makers[chosen[0]]()
    if "none" in chosen:
        raise ValueError(f"balancer {names!r}: 'none' cannot be combined with others")
    return CombinedBalancer(makers[name]() for name in chosen)


def attach_balancers(model: nn.Module, optimizer: torch.optim.Optimizer) -> RemovableHandle:
    """Call `step()` of every balancer in `model` after each step of `optimizer`; remove the handle to stop."""
    inside = {part for module in model.modules() if isinstance(module, CombinedBalancer) for part in module.parts}
    balancers = [m for m in model.modules() if isinstance(m, Balancer) and m not in inside]

    def after_step(*_: Any) -> None:
        for balancer in balancers:
            balancer.step()

    return optimizer.register_step_post_hook(after_step)


def _checked(what: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{what} {value} is not a finite number of at least 0")
    return value


def _fingerprint(x_TD: Tensor) -> Tensor:
    """float64 (2,): equal for the same activations computed again, different for others in practice."""
    x_TD = x_TD.detach()
    return torch.stack([x_TD.sum(dtype=torch.float64), x_TD[:, ::3].sum(dtype=torch.float64)])
