"""Where dense and MoE layers stand in a model, and how many parameters each one has. No torch.

D model width, F expert (or dense) feed-forward width, L latent width, E experts, K top-k.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

MATRICES = {"swiglu": 3, "gelu": 2, "situ-glu": 3, "clamped-glu": 3}
"""Weight matrices of one feed-forward expert: gate, up and down of a GLU; up and down of a plain one."""


@dataclass(frozen=True, kw_only=True)
class LayerParameters:
    """Parameters of one MoE layer's feed-forward part; attention and norms are not in it.

    Attributes:
        total: router + experts + shared + latent.
        active: what one token uses: router + K of the E experts + shared + latent.
        router: D E. Balancer biases are not parameters.
        experts: all E routed experts together.
        shared: all shared experts together; every token uses them.
        latent: the way into the latent space and back, 2 D L and the norm's L; 0 without one.
    """

    total: int
    active: int
    router: int
    experts: int
    shared: int
    latent: int = 0


def moe_layer_indices(
    num_layers: int,
    *,
    moe_frequency: int = 1,
    moe_offset: int | None = None,
    first_k_dense: int = 0,
    explicit: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Indices of the MoE layers; all others are dense.

    Layer i is MoE where i >= first_k_dense and (i - moe_offset) is a multiple of moe_frequency.

    Args:
        num_layers: layers in the model, dense ones counted, at least 1.
        moe_frequency: every so many layers one is MoE, at least 1 (1: all of them).
        moe_offset: the first MoE layer of the pattern, 0 to moe_frequency - 1. By default the last of each
            group, moe_frequency - 1, so that 2 gives dense, MoE, dense, MoE.
        first_k_dense: this many layers at the start stay dense whatever the pattern says.
        explicit: the MoE layers by index, in any order, instead of a pattern.

    Returns:
        Ascending indices, 0 to num_layers - 1; empty where the pattern leaves none.

    Raises:
        ValueError: a value is out of range, an explicit index comes twice, or explicit comes with a pattern.

    >>> moe_layer_indices(6, moe_frequency=2)
    (1, 3, 5)
    >>> moe_layer_indices(6, first_k_dense=3)
    (3, 4, 5)
    """
    num_layers = _whole("num_layers", num_layers, 1)
    moe_frequency = _whole("moe_frequency", moe_frequency, 1)
    first_k_dense = _whole("first_k_dense", first_k_dense, 0, num_layers)
    if explicit is not None:
        if moe_frequency != 1 or moe_offset is not None or first_k_dense != 0:
            raise ValueError(
                f"explicit={list(explicit)} names the MoE layers itself: leave out "
                f"moe_frequency={moe_frequency}, moe_offset={moe_offset} and first_k_dense={first_k_dense}"
            )
        indices = sorted(_whole("explicit layer", i, 0, num_layers - 1) for i in explicit)
        if len(set(indices)) < len(indices):
            raise ValueError(f"explicit={list(explicit)} names a layer twice")
        return tuple(indices)
    if moe_offset is None:
        moe_offset = moe_frequency - 1
    moe_offset = _whole("moe_offset", moe_offset, 0, moe_frequency - 1)
    return tuple(i for i in range(first_k_dense, num_layers) if (i - moe_offset) % moe_frequency == 0)


def ffn_parameters(d_model: int, d_ff: int, activation: str) -> int:
    """Parameters of one feed-forward network without biases: 3 D F as a GLU, 2 D F plain.

    Args:
        d_model: D, at least 1.
        d_ff: F, at least 1.
        activation: "gelu" (up and down matrix), or one of the gated ones (gate, up and down).

    Raises:
        ValueError: a width below 1, or an activation not among these.

    Source: SwiGLU, Shazeer 2002.05202.
    """
    if activation not in MATRICES:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(map(repr, MATRICES))}")
    return MATRICES[activation] * _whole("d_model", d_model, 1) * _whole("d_ff", d_ff, 1)


def moe_parameters(
    d_model: int,
    expert_d_ff: int,
    num_experts: int,
    top_k: int,
    num_shared_experts: int,
    activation: str,
    *,
    latent_size: int | None = None,
    latent_norm: bool = True,
) -> LayerParameters:
    """Parameters of one MoE layer's feed-forward part, without biases.

    Args:
        d_model: D.
        expert_d_ff: F, the width of one expert, routed or shared.
        num_experts: E, routed experts.
        top_k: K, experts a token uses, 1 to E.
        num_shared_experts: experts that every token uses beside them, at least 0.
        activation: see `ffn_parameters`.
        latent_size: L, the width that routed experts work in; by default D itself. Shared ones keep D.
        latent_norm: whether the latent space has a norm; it counts only there.

    Raises:
        ValueError: a value out of range, or an unknown activation.

    Source: active counts replace E by K, as the published ones do (e.g. Mixtral, 2401.04088).
    """
    num_experts = _whole("num_experts", num_experts, 1)
    top_k = _whole("top_k", top_k, 1, num_experts)
    shared = _whole("num_shared_experts", num_shared_experts, 0) * ffn_parameters(
        d_model, _whole("expert_d_ff", expert_d_ff, 1), activation
    )
    width, latent = d_model, 0
    if latent_size is not None:
        width = _whole("latent_size", latent_size, 1)
        latent = 2 * d_model * width + (width if latent_norm else 0)
    expert = ffn_parameters(width, expert_d_ff, activation)
    router = d_model * num_experts
    experts = num_experts * expert
    return LayerParameters(
        total=router + experts + shared + latent,
        active=router + top_k * expert + shared + latent,
        router=router,
        experts=experts,
        shared=shared,
        latent=latent,
    )


def _whole(name: str, value: int, least: int, most: int | None = None) -> int:
    """The value as an int, or a ValueError that names it and what is allowed."""
    allowed = f"at least {least}" if most is None else f"from {least} to {most}"
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} must be a whole number, {allowed}") from None
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name}={number} must be {allowed}")
    return number
