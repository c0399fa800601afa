"""The settings of a toy training run: one place for names, defaults and limits. No torch, so that forms can ask it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from moe_core.layout import moe_layer_indices

ROUTERS = ("softmax", "sigmoid")
BALANCERS = ("none", "aux", "sign-bias", "quantile")
DISPATCHERS = ("auto", "naive", "sorted")


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    """One toy language-model run. Field names are the options of `routescope record`, with underscores.

    balancer: one of BALANCERS or several joined by "+". z_coef > 0 adds the router z-loss to whichever it is.
    d_ff: width of dense layers; expert_d_ff: of each expert. capacity_factor None = no expert drops tokens.
    Raises ValueError that names the value and what is allowed.
    """

    balancer: str = "none"
    aux_coef: float = 1e-2
    z_coef: float = 0.0
    bias_rate: float = 1e-3
    noise_std: float = 0.0
    router: str = "softmax"
    dispatcher: str = "auto"
    num_layers: int = 4
    moe_frequency: int = 2
    d_model: int = 64
    d_ff: int = 128
    expert_d_ff: int = 128
    num_heads: int = 4
    num_experts: int = 16
    top_k: int = 1
    num_shared_experts: int = 0
    capacity_factor: float | None = None
    steps: int = 400
    batch_size: int = 16
    seq_len: int = 64
    lr: float = 3e-3
    seed: int = 0
    decisions_every: int = 10
    probe_every: int = 20
    corpus: tuple[str, ...] = ()
    vocab_size: int = 1024
    name: str = ""

    def __post_init__(self) -> None:
        for field, least, most in (
            ("num_layers", 1, 64),
            ("moe_frequency", 1, 64),
            ("d_model", 8, 2048),
            ("d_ff", 1, 16384),
            ("expert_d_ff", 1, 16384),
            ("num_heads", 1, 64),
            ("num_experts", 1, 1024),
            ("top_k", 1, 1024),
            ("num_shared_experts", 0, 64),
            ("steps", 1, 1_000_000),
            ("batch_size", 1, 4096),
            ("seq_len", 2, 4096),
            ("seed", 0, 2**32 - 1),
            ("decisions_every", 1, 1_000_000),
            ("probe_every", 1, 1_000_000),
        ):
            value = getattr(self, field)
            if not least <= value <= most:
                raise ValueError(f"{field}={value} is not between {least} and {most}")
        for field in ("aux_coef", "z_coef", "bias_rate", "noise_std"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field}={value} is not a finite number of at least 0")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr={self.lr} is not a positive, finite number")
        if self.capacity_factor is not None and not (math.isfinite(self.capacity_factor) and self.capacity_factor > 0):
            raise ValueError(f"capacity_factor={self.capacity_factor} is not a positive, finite number")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} is more than num_experts={self.num_experts}")
        if self.d_model % self.num_heads or (self.d_model // self.num_heads) % 2:
            raise ValueError(
                f"d_model={self.d_model} does not split into num_heads={self.num_heads} heads of an even width"
            )
        for field, allowed in (("router", ROUTERS), ("dispatcher", DISPATCHERS)):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field}={getattr(self, field)!r} is unknown; choose one of {', '.join(allowed)}")
        check_balancer(self.balancer)
        if "quantile" in self.balancer and self.top_k == self.num_experts:
            raise ValueError(
                f"balancer='quantile' needs num_experts > top_k, not num_experts={self.num_experts}, top_k={self.top_k}"
            )
        if not moe_layer_indices(self.num_layers, moe_frequency=self.moe_frequency):
            raise ValueError(
                f"moe_frequency={self.moe_frequency} of num_layers={self.num_layers} leaves no MoE layer to record; "
                f"choose at most {self.num_layers}"
            )

    @property
    def full_balancer(self) -> str:
        """The balancer with the z-loss named in it, as `moe_core.make_balancer` takes it."""
        if self.z_coef == 0:
            return self.balancer
        return "z" if self.balancer == "none" else f"{self.balancer}+z"

    def as_manifest(self) -> dict[str, Any]:
        """The settings as they stand in a run's manifest."""
        return {"task": "lm", **asdict(self), "corpus": list(self.corpus), "balancer": self.full_balancer}


def check_balancer(balancer: str) -> None:
    """Raise a ValueError unless `balancer` is one of BALANCERS or several that may stand together."""
    parts = balancer.split("+")
    for part in parts:
        if part not in BALANCERS:
            raise ValueError(
                f"balancer={part!r} is unknown; choose one of {', '.join(BALANCERS)}, or several joined by '+'"
            )
    if len(parts) > 1 and "none" in parts:
        raise ValueError(f"balancer={balancer!r}: 'none' cannot be combined with others")
    if len(set(parts)) < len(parts):
        raise ValueError(f"balancer={balancer!r} names one kind twice")
    if {"sign-bias", "quantile"} <= set(parts):
        raise ValueError(f"balancer={balancer!r}: sign-bias and quantile would both own the bias; choose one of them")
