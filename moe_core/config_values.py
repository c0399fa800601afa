"""Reading a config that somebody else wrote: each value checked, one clear line for each thing that can be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .counts import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH
from .whole import said, whole

_REQUIRED: Any = object()


class ConfigValues:
    """The fields of one config, a dict as JSON gives it. Null is the same as missing.

    Methods that take several names use the first one that the config has. All raise ValueError that names the field
    and its value where it is missing without a default, of another type, or out of range.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def number(self, *names: str, default: Any = _REQUIRED, least: int = 1, most: int = MAX_WIDTH) -> Any:
        """A whole number from least to most; `default` where it is missing."""
        name = self._present(names)
        if name is not None:
            # one entry for each layer, all the same, is how some configs write it
            value = self.fields[name]
            same = isinstance(value, list) and value and all(entry == value[0] for entry in value)
            return whole(name, value[0] if same else value, least, most)
        if default is _REQUIRED:
            raise ValueError(f"the config has no {' and no '.join(names)}")
        return default

    def experts(self, *names: str) -> int:
        """A number of experts."""
        return int(self.number(*names, most=MAX_EXPERTS))

    def layers(self, name: str) -> int:
        """A number of layers."""
        return int(self.number(name, most=MAX_LAYERS))

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false; `default` where it is missing."""
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{name}={said(value)} must be true or false")
        return value

    def part(self, name: str) -> ConfigValues:
        """An object inside the config, to be read in the same way."""
        value = self.fields.get(name)
        if value is None:
            raise ValueError(f"the config has no {name}")
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}={said(value)} must be an object")
        return ConfigValues(value)

    def indices(self, name: str) -> list[int]:
        """A list of layer indices; empty where it is missing."""
        value = self.fields.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise ValueError(f"{name}={said(value)} must be a list of layer indices")
        return [whole(f"an entry of {name}", entry, 0, MAX_LAYERS) for entry in value]

    def words(self, name: str, count: int, allowed: tuple[str, ...]) -> list[str] | None:
        """A list that gives each of the `count` layers one of the allowed words; None where it is missing."""
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            raise ValueError(f"{name}={said(value)} must be a list with a word for each of the {count} layers")
        for entry in value:
            if entry not in allowed:
                raise ValueError(f"{name} holds {said(entry)}; layers of these kinds can be read: {', '.join(allowed)}")
        return value

    def _present(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if self.fields.get(name) is not None), None)
