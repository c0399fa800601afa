"""Build and train the named combinations of `recipe_catalog` in one call.

    layer = recipes.build_layer("mixtral", d_model=64, expert_d_ff=128)
    model = recipes.build("mixtral", vocab_size=1000, num_layers=6)
    model, losses = recipes.train("mixtral", batches, vocab_size=1000)

Every option is a field of MoETransformerConfig; those given go before the recipe's. `RECIPES` lists them all.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .balancers import attach_balancers
from .layers import MoELayer
from .recipe_catalog import RECIPES, Recipe, recipe
from .transformer import MoETransformer, MoETransformerConfig, make_moe_layer

__all__ = ["RECIPES", "Recipe", "build", "build_layer", "config", "recipe", "train"]


def config(name: str, **changes: Any) -> MoETransformerConfig:
    """The recipe as a MoETransformerConfig. vocab_size has to be among the changes.

    Raises ValueError for an unknown recipe, naming the known ones, and for numbers that do not fit together;
    TypeError for a field that the config has not.
    """
    return MoETransformerConfig(**{**recipe(name).options, **changes})


def build(name: str, **changes: Any) -> MoETransformer:
    """A transformer of that recipe; see `config`."""
    return MoETransformer(config(name, **changes))


def build_layer(name: str, **changes: Any) -> MoELayer:
    """One MoE layer of that recipe, to put into a model of your own; see `config`, vocab_size is not wanted here."""
    return make_moe_layer(config(name, **{"vocab_size": 1, **changes}))


def train(
    name: str, batches: Iterable[Tensor], *, lr: float = 3e-3, **changes: Any
) -> tuple[MoETransformer, list[dict[str, float]]]:
    """Build a transformer of that recipe and train it with AdamW, one step a batch of input_ids, int64 (B, S).

    Returns the model and the losses of each step by name ("loss" and its parts), coefficients included. The balancer
    moves with each step. Raises as `config` does.
    """
    model = build(name, **changes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    handle = attach_balancers(model, optimizer)
    history = []
    for input_ids in batches:
        out = model(input_ids, labels=input_ids)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        history.append({"loss": out.loss.item(), **{part: value.item() for part, value in out.losses.items()}})
    handle.remove()
    return model, history
