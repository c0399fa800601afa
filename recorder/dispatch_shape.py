"""What `routescope bench dispatch` times: shapes, limits and what they cost. No torch, so that forms can ask it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_core.layout import MATRICES

ACTIVATIONS = tuple(MATRICES)
CANDIDATES = 8  # what takes turns in a round: five dispatchers, the dense product, the routing, the layer
#: Field -> least and greatest value; top_k goes no further than num_experts either.
LIMITS = {
    "d_model": (1, 65536),
    "d_ff": (1, 65536),
    "num_experts": (1, 4096),
    "top_k": (1, 4096),
    "num_tokens": (1, 10_000_000),
}
MAX_SKEW = 10.0
_FLOPS_PER_SECOND = 70e9  # of one thread, roughly: the estimate is for telling seconds from minutes from hours
_MEAN_OVER_DENSE = 2  # a candidate's time over the dense product's, all candidates and shapes together
_START_S = 4.0  # loading torch, making the tensors


@dataclass(frozen=True, kw_only=True)
class DispatchShape:
    """What is timed: one MoE layer's experts on one batch. skew: standard deviation of the experts' popularity.

    Raises ValueError for numbers that do not fit together.
    """

    d_model: int = 64
    d_ff: int = 128
    num_experts: int = 8
    top_k: int = 2
    num_tokens: int = 2048
    activation: str = "swiglu"
    skew: float = 0.0

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)} is not between {least} and {most}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} is not between 1 and num_experts={self.num_experts}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} is unknown; choose one of {', '.join(ACTIVATIONS)}")
        if not (math.isfinite(self.skew) and 0 <= self.skew <= MAX_SKEW):
            raise ValueError(f"skew={self.skew} is not between 0 and {MAX_SKEW}")

    @property
    def assignments(self) -> int:
        """N = T*K."""
        return self.num_tokens * self.top_k

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return MATRICES[self.activation] * self.d_model * self.d_ff

    @property
    def flops(self) -> int:
        """Floating-point operations of the experts' matrix products, forward and backward: 6 a parameter and use."""
        return 6 * self.assignments * self.expert_parameters

    def estimated_bytes(self) -> int:
        """About how much memory the measurement takes at its peak, in bytes of float32.

        Weights, their gradients and those of the reference; the dense product's and one dispatcher's activations.
        """
        weights = 3 * self.num_experts * self.expert_parameters
        inner = self.assignments * (2 * self.d_model + 2 * MATRICES[self.activation] * self.d_ff)
        kept = self.assignments * (3 * self.d_model + MATRICES[self.activation] * self.d_ff)
        return 4 * (weights + inner + kept + 4 * self.num_tokens * (self.d_model + self.num_experts))

    def estimated_seconds(self, *, rounds: int, threads: int) -> float:
        """About how long the measurement takes: a guess within a factor of three or so on present machines."""
        dense = self.flops / (_FLOPS_PER_SECOND * threads)
        return _START_S + (rounds + 2) * CANDIDATES * _MEAN_OVER_DENSE * dense


#: Shapes measured throughout this project: small, many small experts, few large ones, very many.
PRESETS = (
    DispatchShape(d_model=64, d_ff=128, num_experts=8, top_k=2, num_tokens=2048),
    DispatchShape(d_model=256, d_ff=128, num_experts=64, top_k=8, num_tokens=4096),
    DispatchShape(d_model=512, d_ff=1024, num_experts=8, top_k=2, num_tokens=2048),
    DispatchShape(d_model=512, d_ff=256, num_experts=128, top_k=8, num_tokens=2048),
)
