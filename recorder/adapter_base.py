"""What an adapter is: how to read one family of routers.

Shapes: B batch, S sequence, T = B*S tokens, E experts, K choices a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from moe_core.routing import Routing


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one router did in one forward, cut off from autograd, over the tokens it saw, flattened.

    routing: ids and weights are those that the model used. losses: those of this router, coefficient included, by
    the names "aux_loss" and "z_loss"; a family that computes none has none. batch_shape: (B, S) where the module
    saw it, None where its input came flattened.
    """

    routing: Routing
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    batch_shape: tuple[int, int] | None = None


class RouterAdapter:
    """How to read one family of routers; subclass it and `register_adapter` an instance.

    classes: names of the module classes it reads, matched against a module's class and the classes that one derives
    from (by name, so that nothing need be imported). reads_block: True where these modules are whole MoE blocks,
    False where they are the routers inside them.
    """

    classes: tuple[str, ...] = ()
    reads_block: bool = False

    def bind(self, module: nn.Module, block: nn.Module | None) -> RouterAdapter:
        """The adapter of this one router; `block` is the module that holds it. By default the same for all."""
        return self

    def describe(self, module: nn.Module, model: nn.Module) -> dict[str, Any]:
        """What the manifest says of this router; an entry that is left out or None is not known.

        Keys: num_experts, top_k, num_shared_experts, latent_size, score_function, balancer, expert_d_ff, activation.
        """
        raise NotImplementedError(f"{type(self).__name__} has no describe()")

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Observation:
        """What a forward hook of the module was given, as an Observation. Called during training: no
        synchronisation with the device, no gradient. Raises ValueError for an output it does not understand.
        """
        raise NotImplementedError(f"{type(self).__name__} has no read()")

    def coefficients(self, module: nn.Module) -> Mapping[str, float]:
        """The factor in each of the observation's losses, by name; {} where there are none."""
        return {}


def batch_shape_of(x: Tensor) -> tuple[int, int]:
    """(B, S) of activations (..., S, width): leading dimensions count as batch, a lone vector as one token."""
    *leading, _width = x.shape
    *batch, length = leading or [1]
    rows = 1
    for size in batch:
        rows *= size
    return rows, length
