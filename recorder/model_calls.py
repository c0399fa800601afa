"""What a model's own call says of its tokens: their shape, their padding, their ids, what the cache holds already.

A router sees tokens flattened, often without their mask; the call of the whole model has it. Wrappers hand their
arguments on, so the modules looked at are all those whose call encloses every router of a stream: the model, its
body, the encoder, the decoder. What the outermost names counts.

Shapes: B batch, S tokens of this call, P tokens in the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .adapters import RouterSite
from .layer_places import modules_by_name


@dataclass(frozen=True, kw_only=True)
class Told:
    """Of one stream in one call; None = not told.

    shape: (B, S). mask: 2-D, S columns or, with a cache, more, of which the last S are these tokens'. ids: (B, S).
    past: P, 0 where there is no cache.
    """

    shape: tuple[int, int] | None = None
    mask: Tensor | None = None
    ids: Tensor | None = None
    past: int = 0

    def or_else(self, inner: Told) -> Told:
        """This, completed by what a module further in was told."""
        return Told(
            shape=self.shape or inner.shape,
            mask=self.mask if self.mask is not None else inner.mask,
            ids=self.ids if self.ids is not None else inner.ids,
            past=self.past or inner.past,
        )


@dataclass(frozen=True, kw_only=True)
class Entrance:
    """A module whose call encloses all routers of these streams; what its forward calls its positional arguments."""

    module: nn.Module
    streams: tuple[str, ...]
    arguments: tuple[str, ...]


def entrances(model: nn.Module, sites: Sequence[RouterSite]) -> list[Entrance]:
    """The modules to look at, outermost first; routers themselves are none."""
    names: dict[str, list[str]] = {}
    for site in sites:
        names.setdefault(site.stream, []).append(site.name)
    hooked = {id(site.module) for site in sites}
    found = []
    for name, module in modules_by_name(model).items():
        inside = f"{name}." if name else ""
        streams = tuple(stream for stream, of in names.items() if all(n.startswith(inside) for n in of))
        if streams and id(module) not in hooked and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            found.append(Entrance(module=module, streams=streams, arguments=_arguments(module)))
    return found


def told_by(entrance: Entrance, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Told]:
    """What this call says of each of the entrance's streams. Reads shapes only: nothing waits for the device."""
    given = {**dict(zip(entrance.arguments, args, strict=False)), **kwargs}
    if len(entrance.streams) == 1:
        return {entrance.streams[0]: _told(given, "", args)}
    return {stream: _told(given, "decoder_" if stream == "decoder" else "", ()) for stream in entrance.streams}


def real_tokens(mask: Tensor) -> Tensor:
    """bool: which tokens are no padding. Nothing waits for the device.

    Masks say 1 or True for a real token. Those of floats may be additive instead, 0 for a real one and very negative
    for padding: such a mask holds nothing above 0.
    """
    above = mask > 0
    return torch.where(above.any(), above, mask == 0) if mask.is_floating_point() else above


def _told(given: Mapping[str, Any], prefix: str, args: tuple[Any, ...]) -> Told:
    ids = given.get(f"{prefix}input_ids")
    if ids is None and not prefix and args and _whole_matrix(args[0]):
        ids = args[0]  # models of one's own call it tokens, idx, x ...
    ids = ids if _whole_matrix(ids) else None
    embeddings = given.get(f"{prefix}inputs_embeds")
    shape = None
    if ids is not None:
        shape = (ids.shape[0], ids.shape[1])
    elif isinstance(embeddings, Tensor) and embeddings.dim() == 3:
        shape = (embeddings.shape[0], embeddings.shape[1])
    mask = given.get(f"{prefix}attention_mask")
    mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    past = 0
    if mask is not None and shape is not None:
        past = max(0, mask.shape[1] - shape[1])
    if not past:
        past = _cached(given.get("past_key_values"))
    return Told(shape=shape, mask=mask, ids=ids, past=past)


def _cached(cache: Any) -> int:
    length = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
    return length if isinstance(length, int) else 0  # a tensor would make us wait for the device


def _whole_matrix(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dim() == 2
        and not value.is_floating_point()
        and not value.is_complex()
        and value.dtype != torch.bool
    )


def _arguments(module: nn.Module) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds)
