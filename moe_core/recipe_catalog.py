"""Named combinations of router, balancer, experts and layout: what each one fixes, and where it is from. No torch.

A recipe says what defines it and leaves widths, depth and vocabulary to the caller. Expert counts are those of a model
that trains on a laptop's processor; where they differ from the published ones, the description says so.
`moe_core.recipes` builds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One combination.

    name: what it is called. summary: one line. description: what defines it, and its source.
    options: fields of MoETransformerConfig; all others keep their defaults.
    """

    name: str
    summary: str
    description: str
    options: Mapping[str, Any]


_ALL = (
    Recipe(
        name="three-tier",
        summary="shared experts always on, routed ones beside them, and a balancer outside the router",
        description="""\
Shared experts see every token. A bias-free linear router picks the routed ones by logits + the bias of an external
balancer, and weights them by a softmax over the selected logits; that bias lives in the balancer, moves with the layer
to another device and stands in its checkpoint. Dispatch goes expert by expert, whether it has 0, 1 or many tokens.

`bias_in_weights=True` is the teaching variant in which the bias enters the weights as well. It is not the default:
the bias is there to even the load, and in the weights it would change what each token computes. An expert would be
turned down for being busy, also where it is the best one, and every step of the balancer would move the output
without any gradient knowing of it (arXiv 2408.15664 keeps the two apart for that reason).""",
        options={
            "num_experts": 8,
            "top_k": 2,
            "num_shared_experts": 2,
            "moe_frequency": 1,
            "softmax_after_top_k": True,
            "balancer": "sign-bias",
            "dispatcher": "masked",
        },
    ),
    Recipe(
        name="noisy-top-k",
        summary="noise on the logits in training, GELU experts, aux loss and z-loss, every second layer MoE",
        description="""\
Normal noise on the router's logits in training only; selection and weights see it, aux loss and z-loss do not. Softmax
over the selected logits (Shazeer et al., arXiv 1701.06538, with a fixed standard deviation in place of a learned one).
The two losses are reported apart. `balancer="soft-aux+z"` puts the mean probabilities in place of the load, as teaching
code does; `moe_frequency=n` makes every n-th layer MoE.""",
        options={
            "num_experts": 8,
            "top_k": 2,
            "moe_frequency": 2,
            "activation": "gelu",
            "softmax_after_top_k": True,
            "noise_std": 0.1,
            "balancer": "aux+z",
            "aux_coef": 1e-2,
            "z_coef": 1e-3,
        },
    ),
    Recipe(
        name="stable-latent",
        summary="sigmoid router with a quantile bias, SiTU-GLU experts in a latent space, one wide shared network",
        description="""\
A float32 sigmoid router sees the full width; tokens are compressed once for the routed experts, whose weighted sum is
RMS-normalised and expanded again. Each training forward selects with the bias it finds, then replaces it by the
batch's quantile; evaluation leaves it alone (`moe_core.collection.collect_loads` watches both). `renormalize=False` and
`latent_norm=False` switch those two off.""",
        options={
            "num_experts": 16,
            "top_k": 4,
            "num_shared_experts": 2,
            "moe_frequency": 1,
            "latent_size": 32,
            "latent_norm": True,
            "activation": "situ-glu",
            "score_function": "sigmoid",
            "renormalize": True,
            "routed_scaling_factor": 2.5,
            "balancer": "quantile",
            "dispatcher": "grouped",
        },
    ),
    Recipe(
        name="sorted-swiglu",
        summary="renormalised softmax top-2 of 8, sorted dispatch, SwiGLU experts, one shared, Switch aux loss",
        description="""\
The plain modern layer, in pre-norm blocks with attention. It also trains on the toy regression y = tanh(xW), as
`routescope record --task regression` does.""",
        options={
            "num_experts": 8,
            "top_k": 2,
            "num_shared_experts": 1,
            "moe_frequency": 1,
            "renormalize": True,
            "balancer": "aux",
            "aux_coef": 1e-2,
            "dispatcher": "sorted",
        },
    ),
    Recipe(
        name="switch",
        summary="top-1 with the raw probability as weight, aux loss 0.01, capacity 1.25, every second layer MoE",
        description="""\
Switch Transformer (Fedus et al., arXiv 2101.03961). One expert a token, weighted by its softmax probability, which is
what gives the router its gradient; what is over capacity is dropped, earlier tokens first.""",
        options={
            "num_experts": 16,
            "top_k": 1,
            "moe_frequency": 2,
            "activation": "gelu",
            "renormalize": False,
            "capacity_factor": 1.25,
            "drop_policy": "position",
            "balancer": "aux",
            "aux_coef": 1e-2,
        },
    ),
    Recipe(
        name="mixtral",
        summary="top-2 of 8 renormalised, SwiGLU experts in every layer, aux loss 0.02, nothing shared or dropped",
        description="""\
Mixtral of Experts (Jiang et al., arXiv 2401.04088): softmax over the two selected logits, which is the same as the
softmax over all, renormalised.""",
        options={
            "num_experts": 8,
            "top_k": 2,
            "moe_frequency": 1,
            "renormalize": True,
            "balancer": "aux",
            "aux_coef": 0.02,
        },
    ),
    Recipe(
        name="deepseek-v3",
        summary="sigmoid scores, best 2 of 4 groups, sign bias and a small sequence aux loss, first layer dense",
        description="""\
DeepSeek-V3 (arXiv 2412.19437): sigmoid scores renormalised over the chosen experts and scaled by 2.5; selection with
the bias, inside the best groups; one shared expert. Published: 8 of 256 experts in the best 4 of 8 groups, and 3 dense
layers of 61; here 4 of 16, 2 of 4 groups, and 1 dense layer.""",
        options={
            "num_experts": 16,
            "top_k": 4,
            "num_groups": 4,
            "top_groups": 2,
            "num_shared_experts": 1,
            "moe_frequency": 1,
            "first_k_dense": 1,
            "score_function": "sigmoid",
            "renormalize": True,
            "routed_scaling_factor": 2.5,
            "balancer": "sign-bias+sequence-aux",
            "bias_rate": 1e-3,
            "aux_coef": 1e-4,
        },
    ),
    Recipe(
        name="olmoe",
        summary="top-8 of 64 small experts, weights not renormalised, aux loss 0.01 and z-loss 0.001, all layers MoE",
        description="""\
OLMoE (Muennighoff et al., arXiv 2409.02060), expert counts as published: fine-grained experts, softmax probabilities
as weights as they are, nothing shared or dropped.""",
        options={
            "num_experts": 64,
            "top_k": 8,
            "expert_d_ff": 32,
            "moe_frequency": 1,
            "renormalize": False,
            "balancer": "aux+z",
            "aux_coef": 1e-2,
            "z_coef": 1e-3,
        },
    ),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _ALL})
"""Every recipe by its name."""


def recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError that names the known ones."""
    if name not in RECIPES:
        raise ValueError(f"recipe={name!r} is unknown; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]
