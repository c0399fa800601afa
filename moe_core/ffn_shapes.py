"""Shapes of feed-forward networks, dense and MoE, and their parameters. No torch.

D model width, F width of a network, L latent width, E experts, K experts a token uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from .counts import MAX_EXPERTS, MAX_WIDTH, Count
from .whole import whole

MATRICES = {"swiglu": 3, "gelu": 2, "situ-glu": 3, "clamped-glu": 3}
"""Weight matrices of one feed-forward network: gate, up and down of a GLU; up and down of a plain one."""


def ffn_parameters(d_model: int, d_ff: int, activation: str, *, bias: bool = False) -> int:
    """Parameters of one feed-forward network: 3 D F as a GLU, 2 D F plain; with biases, F for each way in and D out.

    Args:
        d_model: D, at least 1.
        d_ff: F, at least 1.
        activation: "gelu" (up and down matrix), or one of the gated ones (gate, up and down).
        bias: biases on all products.

    Raises:
        ValueError: a width below 1, or an activation not among these.

    Source: SwiGLU, Shazeer, arXiv 2002.05202.
    """
    matrices = _matrices(activation)
    d_model, d_ff = whole("d_model", d_model, 1), whole("d_ff", d_ff, 1)
    return matrices * d_model * d_ff + ((matrices - 1) * d_ff + d_model if bias else 0)


def _matrices(activation: str) -> int:
    if activation not in MATRICES:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(map(repr, MATRICES))}")
    return MATRICES[activation]


@dataclass(frozen=True, kw_only=True)
class DenseFFN:
    """The feed-forward part of a dense layer: its width F, activation (`MATRICES`) and whether it has biases.

    Raises ValueError for a width out of range or an unknown activation.
    """

    d_ff: int
    activation: str = "swiglu"
    bias: bool = False

    def __post_init__(self) -> None:
        whole("d_ff", self.d_ff, 1, MAX_WIDTH)
        _matrices(self.activation)

    def components(self, d_model: int) -> dict[str, Count]:
        """Parameters at width D, by component."""
        return {"dense": _network(d_model, self.d_ff, self.activation, self.bias)}


@dataclass(frozen=True, kw_only=True)
class MoEFFN:
    """The feed-forward part of a MoE layer.

    Attributes:
        num_experts: E, routed experts. top_k: K, those a token uses, 1 to E.
        expert_d_ff: F of one routed expert.
        shared_d_ff: width of the one network that stands for all shared experts, which every token passes; 0 = none.
        activation: of all of them (`MATRICES`).
        expert_bias: biases in the routed experts. shared_bias: in the shared one.
        router_bias: a bias of the router's own. Balancer biases are no parameters.
        shared_gate: a learned scalar gate of the shared network, D weights (Qwen2-MoE).
        latent_size: L, the width that routed experts work in; None = D. Router and shared network keep D.
        latent_norm: a learned norm in that width; it counts only there.

    Raises ValueError for a number out of range or an unknown activation.
    """

    num_experts: int
    top_k: int
    expert_d_ff: int
    shared_d_ff: int = 0
    activation: str = "swiglu"
    expert_bias: bool = False
    shared_bias: bool = False
    router_bias: bool = False
    shared_gate: bool = False
    latent_size: int | None = None
    latent_norm: bool = True

    def __post_init__(self) -> None:
        whole("num_experts", self.num_experts, 1, MAX_EXPERTS)
        whole("top_k", self.top_k, 1, self.num_experts)
        whole("expert_d_ff", self.expert_d_ff, 1, MAX_WIDTH)
        whole("shared_d_ff", self.shared_d_ff, 0, MAX_WIDTH)
        if self.latent_size is not None:
            whole("latent_size", self.latent_size, 1, MAX_WIDTH)
        _matrices(self.activation)

    @property
    def num_shared_experts(self) -> int:
        """How many experts' width the shared network has; 1 where that is no whole number, 0 without one."""
        times, rest = divmod(self.shared_d_ff, self.expert_d_ff)
        return min(self.shared_d_ff, 1) if rest else times

    def components(self, d_model: int) -> dict[str, Count]:
        """Parameters at width D, by component: router, routed, shared and latent, 0 where there is none.

        Source: active counts replace E by K, as the published ones do (e.g. Mixtral, arXiv 2401.04088).
        """
        latent = Count()
        width = d_model
        if self.latent_size is not None:
            width = self.latent_size
            projections = 2 * d_model * width
            latent = Count.of_all(projections + (width if self.latent_norm else 0), projections)
        weights = d_model * self.num_experts
        expert = _network(width, self.expert_d_ff, self.activation, self.expert_bias)
        shared = Count()
        if self.shared_d_ff:
            gate = d_model if self.shared_gate else 0
            shared = _network(d_model, self.shared_d_ff, self.activation, self.shared_bias) + Count.of_all(gate, gate)
        return {
            "router": Count.of_all(weights + (self.num_experts if self.router_bias else 0), weights),
            "routed": Count(self.num_experts * expert.total, self.top_k * expert.total, self.top_k * expert.multiplied),
            "shared": shared,
            "latent": latent,
        }


FFN = DenseFFN | MoEFFN


def _network(d_model: int, d_ff: int, activation: str, bias: bool) -> Count:
    return Count.of_all(ffn_parameters(d_model, d_ff, activation, bias=bias), ffn_parameters(d_model, d_ff, activation))
