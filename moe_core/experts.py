"""Feed-forward experts, and the bank that holds one of them per expert.

Shapes: N assigned tokens, D width, F expert width, E experts.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F_

from .routers import check_choice

Activation = Literal["swiglu", "gelu"]


class SwiGLUExpert(nn.Module):
    """y = (silu(x Wg) * (x Wu)) Wd, 3 D F parameters, no biases (Shazeer, arXiv 2002.05202)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        # gate and up share their input, so that one product serves both
        self.gate_up = nn.Parameter(torch.empty(2 * d_ff, d_model))
        self.down = nn.Parameter(torch.empty(d_model, d_ff))
        _initialise(self.gate_up, fan_in=d_model)
        _initialise(self.down, fan_in=d_ff)

    def forward(self, x_ND: Tensor) -> Tensor:
        gate_NF, up_NF = F_.linear(x_ND, self.gate_up).chunk(2, dim=-1)
        return F_.linear(F_.silu(gate_NF) * up_NF, self.down)


class GELUExpert(nn.Module):
    """y = gelu(x W1) W2, 2 D F parameters, no biases."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(d_ff, d_model))
        self.down = nn.Parameter(torch.empty(d_model, d_ff))
        _initialise(self.up, fan_in=d_model)
        _initialise(self.down, fan_in=d_ff)

    def forward(self, x_ND: Tensor) -> Tensor:
        return F_.linear(F_.gelu(F_.linear(x_ND, self.up)), self.down)


def _initialise(weight: Tensor, fan_in: int) -> None:
    nn.init.normal_(weight, std=fan_in**-0.5)


def make_expert(d_model: int, d_ff: int, activation: Activation = "swiglu") -> nn.Module:
    """One feed-forward network D -> F -> D: a routed expert, a shared one, or a dense layer."""
    check_choice("activation", activation, get_args(Activation))
    if d_model < 1 or d_ff < 1:
        raise ValueError(f"d_model={d_model} and d_ff={d_ff} must both be at least 1")
    return SwiGLUExpert(d_model, d_ff) if activation == "swiglu" else GELUExpert(d_model, d_ff)


class ExpertBank(nn.ModuleList):
    """E separate feed-forward networks; `bank[e](x_ND)` runs expert e.

    One parameter per expert, not one stacked tensor: an expert without tokens then gets no gradient at all
    (None), so that the optimizer leaves its weights, weight decay and momentum alone.
    """

    def __init__(self, num_experts: int, d_model: int, d_ff: int, activation: Activation = "swiglu") -> None:
        super().__init__(make_expert(d_model, d_ff, activation) for _ in range(num_experts))
