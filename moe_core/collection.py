"""Watch what MoE layers route for a while: loads and selection biases, only while a context is open.

Shapes: E experts, W forwards watched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .layers import MoELayer, MoEOutput
from .routing import in_backward


@dataclass(kw_only=True)
class Collected:
    """What `collect_loads` has seen, by the module name of the layer ("" for a model that is one layer itself).

    loads: int64 (E,), assignments per expert, summed over forwards; padding not counted, drops by capacity counted.
    biases: float32 (W, E), the bias that each forward selected with, in order; no entry where there is no bias.
    """

    loads: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def collect_loads(model: nn.Module) -> Iterator[Collected]:
    """Count the loads and keep the biases of every MoELayer in `model` while the context is open.

    Forwards in any mode count; recomputed activations do not count again. Nothing about the model changes, and
    nothing is kept or counted once the context is closed. Raises ValueError where the model holds no MoELayer.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
    if not layers:
        raise ValueError(f"{type(model).__name__} holds no MoELayer: there is nothing to collect")
    collected = Collected()

    def hook_of(name: str) -> Any:
        def note(_layer: nn.Module, _args: tuple[Any, ...], output: MoEOutput) -> None:
            if in_backward():
                return
            load_E, bias_E = output.routing.load(), output.routing.expert_bias_E
            collected.loads[name] = collected.loads[name] + load_E if name in collected.loads else load_E
            if bias_E is not None:
                seen_WE = [collected.biases[name]] if name in collected.biases else []
                collected.biases[name] = torch.cat([*seen_WE, bias_E[None]])

        return note

    handles = [layer.register_forward_hook(hook_of(name)) for name, layer in layers.items()]
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()
