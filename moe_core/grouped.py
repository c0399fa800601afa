"""The experts of a bank through `torch.nn.functional.grouped_mm`, one call per product.

Shapes: N sorted assignments, D width, F expert width, H width of the first product, E experts.

Made for GPUs, where a loop over experts is one small launch after another. On CPU torch 2.13 runs the same loop inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .experts import ExpertBank

ALIGNMENT = 16  # bytes, which grouped_mm wants of every stride


def can_group(x_TD: Tensor, num_assignments: int, experts: ExpertBank) -> bool:
    """Whether `grouped_experts` can run: what grouped_mm refuses, on torch 2.13.

    It refuses to work without rows; in float64, and on GPU in anything but bfloat16; with widths whose strides are no
    multiple of 16 bytes; on a GPU before compute capability 8.0. Nor do banks without one `kind` stack.
    """
    kind, dtype = experts.kind, _compute_dtype(x_TD)
    on_gpu = x_TD.device.type == "cuda"
    allowed = (torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16, torch.float16)
    return (
        hasattr(nn.functional, "grouped_mm")
        and num_assignments > 0
        and kind is not None
        and dtype in allowed
        and all(width * dtype.itemsize % ALIGNMENT == 0 for width in experts.weights_by_role()[1][0].shape)
        and not (on_gpu and torch.cuda.get_device_capability(x_TD.device) < (8, 0))
    )


def grouped_experts(x_sorted_ND: Tensor, load_E: Tensor, unrouted_N1: Tensor, experts: ExpertBank) -> Tensor:
    """Each row through its expert, (N, D). Rows of no expert hold whatever memory held.

    x_sorted_ND: rows sorted by expert, those of no expert last. load_E int64: rows of each expert.
    unrouted_N1 bool: the rows of no expert.
    """
    kind, dtype = experts.kind, _compute_dtype(x_sorted_ND)
    assert kind is not None  # see can_group
    ends_E = load_E.cumsum(0).to(torch.int32)  # grouped_mm takes no int64
    may_stay_none = None if experts.zero_idle_gradients else load_E
    stacked = [_Stack.apply(may_stay_none, *role).to(dtype) for role in experts.weights_by_role()]
    w_in_EHD, w_out_EDF, *biases = stacked

    h_NH = nn.functional.grouped_mm(x_sorted_ND.to(dtype), w_in_EHD.transpose(-2, -1), offs=ends_E)
    if not biases:
        return nn.functional.grouped_mm(kind.activate(h_NH), w_out_EDF.transpose(-2, -1), offs=ends_E)
    row_N = torch.arange(len(x_sorted_ND), dtype=torch.int32, device=ends_E.device)
    expert_N = torch.searchsorted(ends_E, row_N, right=True).clamp_(max=len(experts) - 1)
    b_in_EH, b_out_ED = biases
    # rows of no expert get no gradient from the second product, but garbage, which must not reach a bias
    h_NH = (h_NH + b_in_EH[expert_N]).masked_fill(unrouted_N1, 0)
    y_ND = nn.functional.grouped_mm(kind.activate(h_NH), w_out_EDF.transpose(-2, -1), offs=ends_E)
    return y_ND + b_out_ED[expert_N]


def _compute_dtype(x: Tensor) -> torch.dtype:
    """grouped_mm does not know autocast: the dtype that autocast would choose, or that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class _Stack(torch.autograd.Function):
    """torch.stack, but parameters of experts without rows get no gradient (None) instead of zeros.

    load_E: rows of each expert; None = zeros for the idle, without waiting for the device.
    """

    @staticmethod
    def forward(ctx: Any, load_E: Tensor | None, *parameters: Tensor) -> Tensor:
        ctx.load_E = load_E
        return torch.stack(parameters)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = grad.unbind(0)
        if ctx.load_E is None:
            return None, *grads
        return None, *(g if n else None for g, n in zip(grads, ctx.load_E.tolist(), strict=True))
