"""Routers, balancers, dispatchers and layers for mixture-of-experts models, as plain PyTorch modules.

The names below are loaded on first use, so that `moe_core.metrics` and `moe_core.layout` can be imported
without torch by someone who only reads recorded runs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .balancers import NoBalancer, QuantileBalancer, RouterZLoss, SignBiasBalancer, SwitchAuxLoss
    from .expert_choice import ExpertChoiceRouter
    from .layers import LatentMoELayer, MoELayer
    from .routers import TopKRouter
    from .routing import Routing
    from .transformer import MoETransformer
    from .transformer_config import MoETransformerConfig

_HOME_OF = {
    "ExpertChoiceRouter": "expert_choice",
    "LatentMoELayer": "layers",
    "MoELayer": "layers",
    "MoETransformer": "transformer",
    "MoETransformerConfig": "transformer_config",
    "NoBalancer": "balancers",
    "QuantileBalancer": "balancers",
    "RouterZLoss": "balancers",
    "Routing": "routing",
    "SignBiasBalancer": "balancers",
    "SwitchAuxLoss": "balancers",
    "TopKRouter": "routers",
}
__all__ = [  # noqa: RUF022 (in the order of a forward pass)
    "TopKRouter",
    "ExpertChoiceRouter",
    "Routing",
    "NoBalancer",
    "SwitchAuxLoss",
    "RouterZLoss",
    "SignBiasBalancer",
    "QuantileBalancer",
    "MoELayer",
    "LatentMoELayer",
    "MoETransformer",
    "MoETransformerConfig",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
