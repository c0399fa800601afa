"""The MoE layers: router, balancer, dispatcher, experts and shared experts in the order they act.

Shapes: B batch, S sequence, T = B*S tokens, D model width, L latent width, E experts, K choices a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .balancers import Balancer, NoBalancer
from .capacity import drop_over_capacity, expert_capacity
from .choices import Activation, DropPolicy
from .dispatchers import make_dispatcher
from .experts import ExpertBank, make_expert
from .routers import Router, TopKRouter
from .routing import Routing


@dataclass(frozen=True)
class MoEOutput:
    """What an MoE layer returns.

    hidden: same shape as the input. routing: the decisions, over the flattened tokens.
    losses: scalars to add to the training loss, coefficient included: "aux_loss", "z_loss", where there are any.
    """

    hidden: Tensor
    routing: Routing
    losses: dict[str, Tensor]


class MoELayer(nn.Module):
    """A mixture-of-experts feed-forward layer, without residual and norm.

    d_ff: width of each expert. num_shared_experts: experts that every token passes, run as one network of width
    num_shared_experts * d_ff. router, balancer: modules of your own; by default a softmax TopKRouter and no
    balancer. experts: a bank of your own. dispatcher: a name of `moe_core.dispatchers`. capacity_factor: None = no
    expert ever drops a token. activation, bias, dropout: of all experts, shared ones too; zero_idle_gradients: of the
    routed ones; see `moe_core.experts`.

    `layer(x_BSD, token_mask=None)` returns a MoEOutput; x may have any leading shape, its last dimension but
    one being the sequence; the mask has that shape, True = a real token. Padding is routed nowhere and counted
    nowhere. Raises ValueError for shapes or numbers that do not fit, or a balancer that does not fit the router.
    """

    latent_size: int | None = None  # the width that routed experts work in, where it is not d_model

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        top_k: int,
        num_shared_experts: int = 0,
        *,
        router: Router | None = None,
        balancer: Balancer | None = None,
        experts: ExpertBank | None = None,
        dispatcher: str = "auto",
        capacity_factor: float | None = None,
        drop_policy: DropPolicy = "position",
        activation: Activation = "swiglu",
        bias: bool = False,
        dropout: float = 0.0,
        zero_idle_gradients: bool = False,
    ) -> None:
        super().__init__()
        if num_shared_experts < 0:
            raise ValueError(f"num_shared_experts={num_shared_experts} is below 0")
        self.router = router if router is not None else TopKRouter(d_model, num_experts, top_k)
        if (self.router.num_experts, self.router.top_k) != (num_experts, top_k):
            raise ValueError(
                f"the router picks {self.router.top_k} of {self.router.num_experts} experts, "
                f"the layer has top_k={top_k} of num_experts={num_experts}"
            )
        if experts is not None and len(experts) != num_experts:
            raise ValueError(f"there are {len(experts)} experts, but the layer has num_experts={num_experts}")
        if capacity_factor is not None:
            expert_capacity(1, num_experts, top_k, capacity_factor)  # refuses a bad factor here and now
        self.d_model, self.d_ff, self.activation = d_model, d_ff, activation
        self.num_experts, self.top_k, self.num_shared_experts = num_experts, top_k, num_shared_experts
        self.capacity_factor, self.drop_policy = capacity_factor, drop_policy
        self.balancer = balancer if balancer is not None else NoBalancer()
        self.balancer.bind(self.router)
        self.dispatcher = make_dispatcher(dispatcher)
        options: dict[str, Any] = {"activation": activation, "bias": bias, "dropout": dropout}
        if experts is None:
            experts = ExpertBank(num_experts, d_model, d_ff, zero_idle_gradients=zero_idle_gradients, **options)
        self.experts = experts
        self.shared = make_expert(d_model, num_shared_experts * d_ff, **options) if num_shared_experts else None

    def forward(self, x_BSD: Tensor, token_mask: Tensor | None = None) -> MoEOutput:
        if token_mask is not None and token_mask.shape != x_BSD.shape[:-1]:
            raise ValueError(
                f"token_mask has shape {tuple(token_mask.shape)}, the tokens have {tuple(x_BSD.shape[:-1])}"
            )
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        mask_T = None if token_mask is None else token_mask.reshape(-1)
        routing = self.router(x_TD, expert_bias=self.balancer.selection_bias(x_TD), token_mask=mask_T)
        self.balancer.observe(routing)
        losses = self.balancer.losses(routing, num_sequences=math.prod(x_BSD.shape[:-2]))
        if self.capacity_factor is not None:
            # after the balancer: dropping must not hide a collapse
            capacity = expert_capacity(int(routing.routed_T.sum()), self.num_experts, self.top_k, self.capacity_factor)
            routing = drop_over_capacity(routing, capacity, self.drop_policy)
        y_TD = self.routed(x_TD, routing)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return MoEOutput(y_TD.view(x_BSD.shape), routing, losses)

    def routed(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """The weighted sum (T, D) of each token's experts; zeros where it has none."""
        return self.dispatcher(x_TD, routing, self.experts)


class LatentMoELayer(MoELayer):
    """An MoE layer whose routed experts work in a narrower latent space ("Stable LatentMoE").

    Router and shared experts see the full width D. Tokens are compressed once, D -> L; the experts, L -> L, are
    combined with the router's weights (its `routed_scaling_factor` in them); the sum is RMS-normalised in L where
    `latent_norm` says so, then expanded, L -> D. Output = shared(x) + routed(x), without residual and norm.

    latent_size: L. latent_norm: a learned RMSNorm over the sum. It keeps the expansion's input at one size whatever
    the weights add up to, and with that takes the size of `routed_scaling_factor` out again. experts: a bank of your
    own, L -> L. The rest as in MoELayer. Raises ValueError for numbers that do not fit.

    Source: LatentMoE (Elango et al., 2026), the layer of Nemotron 3.
    """

    latent_size: int

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        top_k: int,
        num_shared_experts: int = 0,
        *,
        latent_size: int,
        latent_norm: bool = True,
        router: Router | None = None,
        balancer: Balancer | None = None,
        experts: ExpertBank | None = None,
        dispatcher: str = "auto",
        capacity_factor: float | None = None,
        drop_policy: DropPolicy = "position",
        activation: Activation = "swiglu",
        bias: bool = False,
        dropout: float = 0.0,
        zero_idle_gradients: bool = False,
    ) -> None:
        if latent_size < 1:
            raise ValueError(f"latent_size={latent_size} is below 1")
        if experts is None:
            experts = ExpertBank(
                num_experts,
                latent_size,
                d_ff,
                activation,
                bias=bias,
                dropout=dropout,
                zero_idle_gradients=zero_idle_gradients,
            )
        super().__init__(
            d_model,
            d_ff,
            num_experts,
            top_k,
            num_shared_experts,
            router=router,
            balancer=balancer,
            experts=experts,
            dispatcher=dispatcher,
            capacity_factor=capacity_factor,
            drop_policy=drop_policy,
            activation=activation,
            bias=bias,
            dropout=dropout,
        )
        self.latent_size = latent_size
        self.compress = nn.Linear(d_model, latent_size, bias=False)
        self.latent_norm = nn.RMSNorm(latent_size) if latent_norm else None
        self.expand = nn.Linear(latent_size, d_model, bias=False)

    def routed(self, x_TD: Tensor, routing: Routing) -> Tensor:
        y_TL = self.dispatcher(self.compress(x_TD), routing, self.experts)
        if self.latent_norm is not None:
            y_TL = self.latent_norm(y_TL)
        return self.expand(y_TL)
