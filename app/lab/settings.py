"""The controls of the Routing lab: their names, what they may be, and how they are fitted to a batch. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

ROUTERS = {
    "softmax": "Softmax, top-k",
    "softmax-after": "Top-k, softmax",
    "sigmoid": "Sigmoid, top-k",
    "expert-choice": "Expert choice",
}
BALANCERS = {
    "none": "None",
    "aux": "Aux loss",
    "sequence-aux": "Aux, by sequence",
    "global-aux": "Aux, whole step",
    "soft-aux": "Soft aux",
    "soft-sequence-aux": "Soft, by sequence",
    "z": "Z-loss",
    "sign-bias": "Sign bias",
    "quantile": "Quantile bias",
}
BIASES = ("sign-bias", "quantile")  # balancers that move the selection bias; the others but "none" are losses
MOST_TOKENS = 1024
MOST_EXPERTS = 64


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything but the batch and the balancer's state.

    top_k: experts for a token; under expert choice what a token gets on average. capacity_factor 0 = no limit.
    push: how far a gradient moves the logits, where the balancer is a loss. tokens, experts, seed, skew: of the
    random batch. spot_token, spot_expert: the cell that the slider moves, and the token followed step by step.
    """

    router: str = "softmax"
    balancer: str = "none"
    top_k: int = 1
    renormalize: str = "yes"
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    noise_std: float = 0.0
    noise_seed: int = 0
    capacity_factor: float = 0.0
    min_capacity: int = 1
    drop_policy: str = "position"
    aux_coef: float = 0.01
    z_coef: float = 0.001
    bias_rate: float = 0.001
    method: str = "exact"
    update: str = "forward"
    num_bins: int = 1024
    push: float = 100.0
    sequences: int = 1
    seed: int = 0
    tokens: int = 8
    experts: int = 4
    skew: float = 1.0
    spot_token: int = 0
    spot_expert: int = 0

    @property
    def moves_bias(self) -> bool:
        """Whether the balancer owns the selection bias."""
        return self.balancer in BIASES

    @property
    def is_loss(self) -> bool:
        """Whether the balancer acts through the loss."""
        return self.balancer != "none" and not self.moves_bias

    @property
    def takes_micro_batches(self) -> bool:
        """Whether the balancer adds up several forwards until the optimizer's step."""
        by_step = self.balancer == "quantile" and self.update == "step"
        return by_step or self.balancer in ("sign-bias", "global-aux")

    @property
    def renormalizes(self) -> bool:
        """Whether chosen weights are divided by their sum: with one expert they would all become 1."""
        return self.router in ("softmax", "sigmoid") and self.renormalize == "yes" and self.top_k > 1

    def fitted(self, num_tokens: int, num_experts: int) -> Settings:
        """These settings with numbers that the batch has room for."""
        top_k = min(self.top_k, num_experts)
        num_groups = self.num_groups if num_experts % self.num_groups == 0 else 1
        least_groups = math.ceil(top_k * num_groups / num_experts)  # that leave top_k experts to choose from
        return replace(
            self,
            top_k=top_k,
            num_groups=num_groups,
            top_groups=min(max(self.top_groups, least_groups), num_groups),
            sequences=self.sequences if num_tokens % self.sequences == 0 else 1,
            spot_token=min(self.spot_token, num_tokens - 1),
            spot_expert=min(self.spot_expert, num_experts - 1),
        )


CHOICES: dict[str, tuple[str, ...]] = {
    "router": tuple(ROUTERS),
    "balancer": tuple(BALANCERS),
    "renormalize": ("yes", "no"),
    "drop_policy": ("position", "probs"),
    "method": ("exact", "histogram"),
    "update": ("forward", "step"),
}
LIMITS: dict[str, tuple[float, float]] = {
    "top_k": (1, MOST_EXPERTS),
    "scaling": (0.1, 10.0),
    "num_groups": (1, MOST_EXPERTS),
    "top_groups": (1, MOST_EXPERTS),
    "noise_std": (0.0, 4.0),
    "noise_seed": (0, 9999),
    "capacity_factor": (0.0, 4.0),
    "min_capacity": (1, MOST_TOKENS),
    "aux_coef": (0.0, 1.0),
    "z_coef": (0.0, 1.0),
    "bias_rate": (0.0, 1.0),
    "num_bins": (1, 4096),
    "push": (0.0, 10_000.0),
    "sequences": (1, MOST_TOKENS),
    "seed": (0, 9999),
    "tokens": (1, MOST_TOKENS),
    "experts": (2, MOST_EXPERTS),
    "skew": (0.0, 4.0),
    "spot_token": (0, MOST_TOKENS - 1),
    "spot_expert": (0, MOST_EXPERTS - 1),
}
"""Least and greatest value of each number; whole where the setting is."""


def read(name: str, text: str) -> Any:
    """The value that text of the URL gives a setting, within its limits; None where it is none."""
    if name in CHOICES:
        return text if text in CHOICES[name] else None
    low, high = LIMITS[name]
    whole = isinstance(getattr(Settings(), name), int)
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        return None
    return None if math.isnan(number) else type(number)(min(max(number, low), high))


def divisors(number: int) -> list[int]:
    """The whole numbers that divide `number`, ascending."""
    return [part for part in range(1, number + 1) if number % part == 0]
