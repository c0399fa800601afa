"""How to read our own MoE layers: they hand over their Routing as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from torch import nn

from moe_core.layers import MoELayer
from moe_core.routing import Routing

from .adapter_base import Observation, RouterAdapter, batch_shape_of


class MoELayerAdapter(RouterAdapter):
    """MoELayer and LatentMoELayer; what it hooks is the layer, which returns a MoEOutput."""

    classes = ("MoELayer",)
    reads_block = True

    def describe(self, module: nn.Module, model: nn.Module) -> dict[str, Any]:
        assert isinstance(module, MoELayer)
        return {
            "num_experts": module.num_experts,
            "top_k": module.top_k,
            "num_shared_experts": module.num_shared_experts,
            "latent_size": module.latent_size,
            "score_function": module.router.score_function,
            "balancer": module.balancer.name,
            "expert_d_ff": module.d_ff,
            "activation": module.activation,
        }

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Observation:
        return Observation(
            routing=detached(output.routing),
            losses={name: loss.detach() for name, loss in output.losses.items()},
            batch_shape=batch_shape_of(args[0] if args else kwargs["x_BSD"]),
        )

    def coefficients(self, module: nn.Module) -> Mapping[str, float]:
        assert isinstance(module, MoELayer)
        return module.balancer.coefficients


def detached(routing: Routing) -> Routing:
    """The same routing, its tensors cut off from autograd."""
    present = {f.name: value for f in fields(routing) if (value := getattr(routing, f.name)) is not None}
    return replace(routing, **{name: value.detach() for name, value in present.items()})
