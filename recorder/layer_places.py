"""Which layer of the whole model a module belongs to, from its name alone.

Two things hide in the names of modules. Wrappers put a part of their own in: under DistributedDataParallel and
torch.compile, `model.layers.3` is `module._orig_mod.model.layers.3`. And layers are counted per container, while a
model may have several: an encoder and a decoder, or layers for multi-token prediction after those of the body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_STREAMS = ("encoder", "decoder")
TOKENS = "tokens"  # the stream of a model that has one


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a module stands.

    container: name of the module whose numbered children are the layers, or of the module itself where no number is
    in its name (number is None then). inside: its name within the layer. index: of the layer in the whole model,
    dense layers counted; encoder and decoder count apart. stream: "tokens", or which of the two.
    """

    container: str
    number: int | None
    inside: str
    index: int
    stream: str

    @property
    def layer_name(self) -> str:
        """Name of the whole layer: the container's numbered child."""
        return self.container if self.number is None else join(self.container, str(self.number))


def plain_name(name: str) -> str:
    """A module's name without the parts that wrappers (DDP, FSDP, torch.compile, checkpointing) put in.

    >>> plain_name("module._orig_mod.model.layers.3._checkpoint_wrapped_module.mlp.gate")
    'model.layers.3.mlp.gate'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of the model by its plain name; of a wrapper and what it wraps, the wrapped one."""
    return {plain_name(name): module for name, module in model.named_modules()}


def join(*parts: str) -> str:
    """Parts of a module's name as one; the root's is empty."""
    return ".".join(part for part in parts if part)


def numbered_children(modules: Mapping[str, nn.Module], container: str) -> list[int]:
    """The numbers of the container's layers, ascending."""
    module = modules.get(container)
    children = () if module is None else (name for name, _ in module.named_children())
    return sorted({int(name) for name in map(plain_name, children) if name.isdecimal()})


def places(modules: Mapping[str, nn.Module], names: Iterable[str]) -> dict[str, Place]:
    """The place of each of `names`, by name, in the order of the model: stream, layer, then natural order of names.

    The layer's number is the first in a name (`encoder.block.1.layer.1.mlp` is layer 1) that tells modules of the
    same kind apart (`stages.0.blocks.3` is block 3 of its stage). A container whose numbers are taken already
    continues after them.
    """
    names = list(names)
    split = _split(names)
    streams = {name: _stream(name, modules) for name in names}
    order = {name: number for number, name in enumerate(modules)}
    first: dict[tuple[str, str], int] = {}  # by stream and container: what to add to its numbers
    taken: dict[str, set[int]] = {}
    for name in sorted(names, key=order.__getitem__):
        (container, number, _), stream = split[name], streams[name]
        if (stream, container) in first:
            continue
        numbers = {0} if number is None else {number, *numbered_children(modules, container)}
        used = taken.setdefault(stream, set())
        first[stream, container] = offset = max(used) + 1 if used & numbers else 0
        used |= {offset + n for n in numbers}
    found = {
        name: Place(
            container=container,
            number=number,
            inside=inside,
            index=first[streams[name], container] + (number or 0),
            stream=streams[name],
        )
        for name, (container, number, inside) in split.items()
    }
    return dict(sorted(found.items(), key=lambda entry: (_rank(entry[1].stream), entry[1].index, _natural(entry[0]))))


def _split(names: list[str]) -> dict[str, tuple[str, int | None, str]]:
    """Container, number and place inside of each name: layers.3.mlp -> ("layers", 3, "mlp")."""
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        parts = name.split(".")
        alike.setdefault(tuple("#" if part.isdecimal() else part for part in parts), []).append(parts)
    split: dict[str, tuple[str, int | None, str]] = {}
    for pattern, members in alike.items():
        at = [i for i, part in enumerate(pattern) if part == "#"]
        telling = [i for i in at if len({tuple(parts[: i + 1]) for parts in members}) == len(members)]
        for parts in members:
            name = ".".join(parts)
            if telling:
                i = telling[0]
                split[name] = (".".join(parts[:i]), int(parts[i]), ".".join(parts[i + 1 :]))
            else:
                split[name] = (name, None, "")
    return split


def _stream(name: str, modules: Mapping[str, nn.Module]) -> str:
    """ "encoder" or "decoder" for what lies in one of two such siblings: they see different tokens."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part in _STREAMS and all(join(*parts[:i], stream) in modules for stream in _STREAMS):
            return part
    return TOKENS


def _rank(stream: str) -> int:
    return _STREAMS.index(stream) if stream in _STREAMS else -1


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
