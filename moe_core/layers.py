"""The MoE layer: router, balancer, dispatcher, experts and shared experts in the order they act.

Shapes: B batch, S sequence, T = B*S tokens, D model width, E experts, K choices a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .balancers import Balancer, NoBalancer
from .capacity import DropPolicy, drop_over_capacity, expert_capacity
from .dispatchers import make_dispatcher
from .experts import Activation, ExpertBank, make_expert
from .routers import TopKRouter
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
    balancer. dispatcher: "auto", "naive" or "sorted". capacity_factor: None = no expert ever drops a token.

    `layer(x_BSD, token_mask=None)` returns a MoEOutput; x may have any leading shape, the mask has that shape,
    True = a real token. Padding is routed nowhere and counted nowhere. Raises ValueError for shapes or numbers
    that do not fit.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        top_k: int,
        num_shared_experts: int = 0,
        *,
        router: TopKRouter | None = None,
        balancer: Balancer | None = None,
        dispatcher: str = "auto",
        capacity_factor: float | None = None,
        drop_policy: DropPolicy = "position",
        activation: Activation = "swiglu",
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
        if capacity_factor is not None:
            expert_capacity(1, num_experts, top_k, capacity_factor)  # refuses a bad factor here and now
        self.d_model, self.d_ff, self.activation = d_model, d_ff, activation
        self.num_experts, self.top_k, self.num_shared_experts = num_experts, top_k, num_shared_experts
        self.capacity_factor, self.drop_policy = capacity_factor, drop_policy
        self.balancer = balancer if balancer is not None else NoBalancer()
        self.dispatcher = make_dispatcher(dispatcher)
        self.experts = ExpertBank(num_experts, d_model, d_ff, activation)
        self.shared = make_expert(d_model, num_shared_experts * d_ff, activation) if num_shared_experts else None

    def forward(self, x_BSD: Tensor, token_mask: Tensor | None = None) -> MoEOutput:
        if token_mask is not None and token_mask.shape != x_BSD.shape[:-1]:
            raise ValueError(
                f"token_mask has shape {tuple(token_mask.shape)}, the tokens have {tuple(x_BSD.shape[:-1])}"
            )
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        mask_T = None if token_mask is None else token_mask.reshape(-1)
        routing = self.router(x_TD, expert_bias=self.balancer.selection_bias(x_TD), token_mask=mask_T)
        losses = self.balancer.losses(routing)
        self.balancer.observe(routing)
        if self.capacity_factor is not None:
            # after the balancer: dropping must not hide a collapse
            capacity = expert_capacity(int(routing.routed_T.sum()), self.num_experts, self.top_k, self.capacity_factor)
            routing = drop_over_capacity(routing, capacity, self.drop_policy)
        y_TD = self.dispatcher(x_TD, routing, self.experts)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return MoEOutput(y_TD.view(x_BSD.shape), routing, losses)
