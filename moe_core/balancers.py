"""Balancers: what keeps the load of a layer's experts even, by a loss or by a bias on the selection.

Every balancer belongs to one layer: statistics of several layers are never pooled, since layers that collapse onto
different experts would look balanced together. Padding and invalid rows never count. All names are here; the interface
is in `balancer_base`, losses in `aux_losses`, biases in `bias_balancers`.

How much a balancer sees: its losses in every forward, its state in training-mode forwards only. Recomputed
activations (checkpointing) are not counted again, and go by the bias and the counts of their first pass.

Several ranks (torch.distributed): in training, sign-bias, quantile and the global losses exchange their statistics in
every forward, so that all ranks must run the same number of them, on an empty batch where one has no tokens. All ranks
end with the same biases, which are those of one process with all tokens. In evaluation nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .aux_losses import RouterZLoss, SwitchAuxLoss
from .balancer_base import Balancer, NoBalancer
from .bias_balancers import BiasBalancer, QuantileBalancer, SignBiasBalancer
from .routers import Router
from .routing import Routing

__all__ = [
    "BALANCER_NAMES",
    "Balancer",
    "CombinedBalancer",
    "NoBalancer",
    "QuantileBalancer",
    "RouterZLoss",
    "SignBiasBalancer",
    "SwitchAuxLoss",
    "attach_balancers",
    "make_balancer",
]


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
        if sum(isinstance(part, BiasBalancer) for part in self.parts) > 1:
            raise ValueError(f"balancers {self.name!r} would both own the selection bias; choose one of them")
        loss_names = [loss_name for part in self.parts for loss_name in part.coefficients]
        if len(set(loss_names)) < len(loss_names):
            raise ValueError(f"balancers {self.name!r} would give one loss twice ({', '.join(loss_names)})")

    @property
    def coefficients(self) -> dict[str, float]:
        return {name: value for part in self.parts for name, value in part.coefficients.items()}

    def bind(self, router: Router) -> None:
        for part in self.parts:
            part.bind(router)

    def selection_bias(self, x_TD: Tensor) -> Tensor | None:
        biases = [part.selection_bias(x_TD) for part in self.parts]
        return next((bias for bias in biases if bias is not None), None)

    def observe(self, routing: Routing) -> None:
        for part in self.parts:
            part.observe(routing)

    def losses(self, routing: Routing, num_sequences: int | None = None) -> dict[str, Tensor]:
        return {name: value for part in self.parts for name, value in part.losses(routing, num_sequences).items()}

    def step(self) -> None:
        for part in self.parts:
            part.step()


BALANCER_NAMES = (
    "none",
    "aux",
    "sequence-aux",
    "global-aux",
    "soft-aux",
    "soft-sequence-aux",
    "z",
    "global-z",
    "sign-bias",
    "quantile",
    "quantile-step",
)


def make_balancer(
    names: str,
    num_experts: int,
    top_k: int,
    *,
    aux_coef: float = 1e-2,
    z_coef: float = 1e-3,
    bias_rate: float = 1e-3,
) -> Balancer:
    """The balancer of that name, or several joined by "+", such as "aux+z" or "sign-bias+sequence-aux".

    Raises ValueError for an unknown name, one named twice, "none" beside others, two that own the bias, or two that
    give the same loss.
    """
    makers: dict[str, Callable[[], Balancer]] = {
        "none": NoBalancer,
        "aux": lambda: SwitchAuxLoss(aux_coef),
        "sequence-aux": lambda: SwitchAuxLoss(aux_coef, "sequence"),
        "global-aux": lambda: SwitchAuxLoss(aux_coef, "global"),
        "soft-aux": lambda: SwitchAuxLoss(aux_coef, soft=True),
        "soft-sequence-aux": lambda: SwitchAuxLoss(aux_coef, "sequence", soft=True),
        "z": lambda: RouterZLoss(z_coef),
        "global-z": lambda: RouterZLoss(z_coef, "global"),
        "sign-bias": lambda: SignBiasBalancer(num_experts, bias_rate),
        "quantile": lambda: QuantileBalancer(num_experts, top_k),
        "quantile-step": lambda: QuantileBalancer(num_experts, top_k, update="step"),
    }
    assert set(makers) == set(BALANCER_NAMES)
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
