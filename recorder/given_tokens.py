"""What the caller of `step` says of its tokens: checked against what the model saw, and copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checks import shown
from .host_copies import HostCopy
from .model_calls import real_tokens
from .step_capture import MicroBatch
from .step_rows import GivenTokens


def mask_of(attention_mask: Any) -> Tensor | None:
    """bool (T,): the mask, as a sequence of tokens.

    Raises ValueError for what is no mask: other than numbers or booleans, ragged, of more than two dimensions, or
    with NaN (looked for on the host only).
    """
    if attention_mask is None:
        return None
    wanted = "attention_mask must hold numbers or booleans, (B, S)"
    try:
        tensor = (
            attention_mask.detach()
            if isinstance(attention_mask, Tensor)
            else torch.as_tensor(np.asarray(attention_mask))
        )
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{wanted}, got {shown(attention_mask)}") from None
    if tensor.dim() not in (1, 2) or tensor.is_complex():
        raise ValueError(f"{wanted}, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    if tensor.is_floating_point() and tensor.device.type == "cpu" and tensor.isnan().any():
        raise ValueError(f"{wanted}, got NaN among them")
    return real_tokens(tensor.reshape(-1))


def check_given(
    batches: Sequence[MicroBatch],
    *,
    decisions: bool,
    token_ids: Any,
    attention_mask: Any,
    domains: Any,
    text: Any | Callable[[], Any],
    declared: Sequence[str],
) -> GivenTokens:
    """The caller's words about the tokens of these micro-batches; {} of them where no decisions are kept.

    text may be a function, which is called only where decisions are kept. Raises ValueError where something does not
    fit what the model saw, or a domain is not among those declared; TypeError for ids or names of a wrong type.
    """
    num_tokens = sum(batch.num_tokens for batch in batches)
    num_sequences = batches[-1].first_sequence + batches[-1].shape[0] if batches else 0

    def check(name: str, shape: tuple[int, ...], sizes: Sequence[int]) -> None:
        if int(np.prod(shape)) not in sizes:
            raise ValueError(
                f"{name} has shape {shape}, but the model saw {num_tokens} tokens in {num_sequences} sequences"
            )

    given = GivenTokens()
    if attention_mask is not None:
        check("attention_mask", _shape(attention_mask), [num_tokens])
    if token_ids is not None:
        check("token_ids", _shape(token_ids), [num_tokens])
        given.ids_T = _whole_numbers("token_ids", token_ids)
    if domains is not None:
        array = np.asarray(domains, dtype=object)
        check("domains", array.shape, [num_tokens] + [num_sequences] * (array.ndim == 1))
        names = array.reshape(-1).tolist()
        unknown = sorted(map(str, set(names) - set(declared))) if declared else []
        if unknown:
            raise ValueError(f"domains {', '.join(unknown)} are not among those declared: {', '.join(declared)}")
        wrong = next((name for name in names if not isinstance(name, str)), None)
        if wrong is not None:
            raise ValueError(f"domains must be names, got {wrong!r}")
        given.domains = names
    if not decisions:
        return GivenTokens()
    if text is not None:
        text = text() if callable(text) else text
        if not (isinstance(text, list) and len(text) == num_tokens and isinstance(text[0], str | None)):
            array = np.asarray(text, dtype=object)
            check("text", array.shape, [num_tokens])
            text = array.reshape(-1).tolist()
        given.text_T = text
    return given


def _shape(values: Any) -> tuple[int, ...]:
    return tuple(values.shape) if isinstance(values, Tensor) else np.shape(values)


def _whole_numbers(name: str, values: Any) -> np.ndarray | HostCopy:
    """int32 (T,), a copy; on its way to the host where it lies on a device."""
    if isinstance(values, Tensor) and values.device.type != "cpu":
        if values.is_floating_point() or values.is_complex():
            raise ValueError(f"{name} must be integers, got {values.dtype}")
        return HostCopy([values.reshape(-1).to(torch.int32)], fresh=values.dtype != torch.int32)
    array = np.asarray(values.detach()) if isinstance(values, Tensor) else np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be integers, got {array.dtype}")
    limits = np.iinfo(np.int32)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise ValueError(f"{name} must fit 32 bits, got {array.min()} to {array.max()}")
    return array.reshape(-1).astype(np.int32, copy=True)
