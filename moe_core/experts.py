"""Feed-forward experts, and the bank that holds one of them per expert.

Shapes: N assigned tokens, D width, F expert width, H width of the first product (2F where gated, else F), E experts.

Every expert is y = activate(x W_in^T + b_in) W_out^T + b_out. Gated ones hold gate and up in one W_in, gate rows
first: they share their input, so that one product serves both. `dispatchers.py` and `fused.py` rely on that form.
"""

from __future__ import annotations

from typing import ClassVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F_

from .choices import Activation
from .routers import check_choice


class FeedForward(nn.Module):
    """One network D -> F -> D: a routed expert, a shared one, or a dense layer. Use a subclass, or `make_expert`.

    bias: biases on both products. dropout: share of the output that training sets to 0.
    Raises ValueError for a width below 1 or a dropout outside [0, 1).
    """

    activation: ClassVar[Activation]
    gated: ClassVar[bool] = True

    def __init__(self, d_model: int, d_ff: int, *, bias: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        if d_model < 1 or d_ff < 1:
            raise ValueError(f"d_model={d_model} and d_ff={d_ff} must both be at least 1")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} is not in [0, 1)")
        self.d_model, self.d_ff, self.dropout = d_model, d_ff, dropout
        rows = 2 * d_ff if self.gated else d_ff
        names = self.parameter_names(bias)
        shapes = [(rows, d_model), (d_model, d_ff), (rows,), (d_model,)]
        for name, shape in zip(names, shapes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.form = (d_model, d_ff, names)  # alike in two experts whose weights stack
        self.reset_parameters()

    @classmethod
    def parameter_names(cls, bias: bool) -> tuple[str, ...]:
        """Of W_in, W_out and, with biases, b_in and b_out."""
        first = "gate_up" if cls.gated else "up"
        return (first, "down", f"{first}_bias", "down_bias") if bias else (first, "down")

    def reset_parameters(self) -> None:
        """Draw the weights anew, normal with standard deviation 1 / sqrt(fan in); biases 0."""
        for weight, fan_in in zip(self.weights(), (self.d_model, self.d_ff), strict=False):
            nn.init.normal_(weight, std=fan_in**-0.5)
        for bias in self.weights()[2:]:
            nn.init.zeros_(bias)

    def weights(self) -> tuple[Tensor, ...]:
        """W_in (H, D), W_out (D, F) and, with biases, b_in (H,) and b_out (D,)."""
        return tuple(getattr(self, name) for name in self.form[-1])

    def forward(self, x_ND: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        w_in_HD, w_out_DF, *biases = self.weights()
        b_in_H, b_out_D = biases or (None, None)
        y_ND = F_.linear(self.activate(F_.linear(x_ND, w_in_HD, b_in_H)), w_out_DF, b_out_D)
        return F_.dropout(y_ND, self.dropout, self.training) if self.dropout else y_ND

    @classmethod
    def activate(cls, h_NH: Tensor) -> Tensor:
        """(N, H) -> (N, F), row by row."""
        raise NotImplementedError(f"{cls.__name__} names no activation")

    @classmethod
    def activate_backward(cls, h_NH: Tensor, da_NF: Tensor) -> tuple[Tensor, Tensor]:
        """activate(h) (N, F), and the gradient with respect to h (N, H) of a loss with gradient da there.

        da is scratch afterwards.
        """
        with torch.enable_grad():
            h_NH = h_NH.detach().requires_grad_()
            a_NF = cls.activate(h_NH)
        (dh_NH,) = torch.autograd.grad(a_NF, h_NH, da_NF)
        return a_NF.detach(), dh_NH

    def extra_repr(self) -> str:
        bias = "" if len(self.form[-1]) == 2 else ", bias=True"
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        return f"d_model={self.d_model}, d_ff={self.d_ff}{bias}{dropout}"


class SwiGLUExpert(FeedForward):
    """silu(gate) * up (Shazeer, arXiv 2002.05202); 3 D F weights."""

    activation = "swiglu"

    @classmethod
    def activate(cls, h_NH: Tensor) -> Tensor:
        gate_NF, up_NF = h_NH.chunk(2, dim=-1)
        return F_.silu(gate_NF).mul_(up_NF)  # in place: no second (N, F) where no gradient is tracked

    @classmethod
    def activate_backward(cls, h_NH: Tensor, da_NF: Tensor) -> tuple[Tensor, Tensor]:
        # what autograd would do, without its copies: most models spend their time here
        gate_NF, up_NF = h_NH.chunk(2, dim=-1)
        silu_NF = F_.silu(gate_NF)
        dh_NH = torch.empty_like(h_NH)
        d_gate_NF, d_up_NF = dh_NH.chunk(2, dim=-1)
        torch.mul(da_NF, silu_NF, out=d_up_NF)
        torch.ops.aten.silu_backward.grad_input(da_NF.mul_(up_NF), gate_NF, grad_input=d_gate_NF)
        return silu_NF.mul_(up_NF), dh_NH


class GELUExpert(FeedForward):
    """gelu(h), not gated (Hendrycks and Gimpel, arXiv 1606.08415, the exact form); 2 D F weights."""

    activation = "gelu"
    gated = False

    @classmethod
    def activate(cls, h_NH: Tensor) -> Tensor:
        return F_.gelu(h_NH)


class SiTUGLUExpert(FeedForward):
    """[b1 tanh(gate / b1) sigmoid(gate)] * [b2 tanh(up / b2)]: SwiGLU with both factors bounded, b1 = 4, b2 = 25.

    Close to SwiGLU near 0, where b tanh(v / b) is v; |activation| stays below b1 b2. 3 D F weights.
    (Named in the Stable LatentMoE recipe; the shape of the bound is the soft cap of Gemma 2, arXiv 2408.00118.)
    """

    activation = "situ-glu"
    gate_bound: ClassVar[float] = 4.0
    up_bound: ClassVar[float] = 25.0

    @classmethod
    def activate(cls, h_NH: Tensor) -> Tensor:
        gate_NF, up_NF = h_NH.chunk(2, dim=-1)
        bounded_gate_NF = cls.gate_bound * torch.tanh(gate_NF / cls.gate_bound) * torch.sigmoid(gate_NF)
        return bounded_gate_NF * (cls.up_bound * torch.tanh(up_NF / cls.up_bound))


class ClampedGLUExpert(FeedForward):
    """(clamp(up, +-limit) + 1) * g sigmoid(alpha g), g = min(gate, limit); alpha = 1.702, limit = 7.

    The GLU of GPT-OSS (OpenAI, arXiv 2508.10925), whose experts have biases: `bias=True` there. Its published
    weights interleave gate and up rows; here the gate rows come first. 3 D F weights.
    """

    activation = "clamped-glu"
    alpha: ClassVar[float] = 1.702
    limit: ClassVar[float] = 7.0

    @classmethod
    def activate(cls, h_NH: Tensor) -> Tensor:
        gate_NF, up_NF = h_NH.chunk(2, dim=-1)
        gate_NF = gate_NF.clamp(max=cls.limit)
        up_NF = up_NF.clamp(min=-cls.limit, max=cls.limit)
        return (up_NF + 1) * (gate_NF * torch.sigmoid(cls.alpha * gate_NF))


_EXPERT_CLASSES: dict[Activation, type[FeedForward]] = {
    cls.activation: cls for cls in (SwiGLUExpert, GELUExpert, SiTUGLUExpert, ClampedGLUExpert)
}


def make_expert(
    d_model: int, d_ff: int, activation: Activation = "swiglu", *, bias: bool = False, dropout: float = 0.0
) -> FeedForward:
    """One feed-forward network D -> F -> D: a routed expert, a shared one, or a dense layer.

    Raises ValueError for an unknown activation, naming the known ones, and what FeedForward raises.
    """
    check_choice("activation", activation, get_args(Activation))
    return _EXPERT_CLASSES[activation](d_model, d_ff, bias=bias, dropout=dropout)


class ExpertBank(nn.ModuleList):
    """E separate feed-forward networks; `bank[e](x_ND)` runs expert e.

    One parameter per expert, not one stacked tensor: an expert without tokens then gets no gradient at all
    (None), so that the optimizer leaves its weights, weight decay and momentum alone.

    zero_idle_gradients: give the parameters of experts without tokens a gradient of zeros instead. DistributedData-
    Parallel needs that (it waits for every parameter's gradient); momentum and weight decay then act on them too.
    The rest as in FeedForward.
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_ff: int,
        activation: Activation = "swiglu",
        *,
        bias: bool = False,
        dropout: float = 0.0,
        zero_idle_gradients: bool = False,
    ) -> None:
        super().__init__(make_expert(d_model, d_ff, activation, bias=bias, dropout=dropout) for _ in range(num_experts))
        self.zero_idle_gradients = zero_idle_gradients

    def weights_by_role(self) -> list[list[Tensor]]:
        """All experts' W_in, all their W_out and, with biases, b_in and b_out; only for a bank with a `kind`."""
        experts = self._modules.values()
        names = cast(FeedForward, self[0]).form[-1]
        return [[cast(Tensor, expert._parameters[name]) for expert in experts if expert] for name in names]

    @property
    def kind(self) -> type[FeedForward] | None:
        """The class of all experts, where computing its formula on their weights is all that calling them does.

        None where they are no FeedForward, differ in class or shape, carry hooks, or have dropout to draw.
        """
        experts = list(self._modules.values())
        first = experts[0] if experts else None
        if not isinstance(first, FeedForward) or type(first).forward is not FeedForward.forward:
            return None
        cls, form = type(first), first.form
        alike = all(
            type(expert) is cls
            and expert.form == form
            and not (expert.dropout and expert.training)
            and not (expert._forward_hooks or expert._forward_pre_hooks)
            and not (expert._backward_hooks or expert._backward_pre_hooks)
            for expert in experts
        )
        return cls if alike else None
