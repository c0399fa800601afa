"""What the manifests of runs say they were made of: where they differ, and groups of runs that agree in a setting."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from app.comparison import Compared
from app.words import count, listed, value

_SAID = 3  # settings named in a sentence, the rest is counted
_MODEL = ("name", "d_model", "vocab_size")
_RESULTS = ("parameters_total", "parameters_active")  # they follow from the settings
_OF_LAYERS = ("num_experts", "top_k", "num_shared_experts", "latent_size", "score_function", "balancer")
_ALWAYS = ("balancer", "num_experts", "seed")  # named first; worth grouping by even where all runs agree in them
NOT_SAID, _NONE = "not recorded", "none"


def settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of a run by its name, each a number, a text or None.

    Those of its configuration; where that lacks them, what its layers say ("8, 16" where they differ); the model, the
    seed, where it was recorded with what.
    """
    config = {key: _plain(item) for key, item in (manifest.get("config") or {}).items() if key != "name"}
    model = manifest.get("model") or {}
    found: dict[str, Any] = dict(config)
    layers = [layer for layer in model.get("layers") or [] if layer.get("kind") == "moe"]
    found["MoE layers"] = ", ".join(str(layer.get("index")) for layer in layers) or None
    for key in _OF_LAYERS:
        several = dict.fromkeys(layer[key] for layer in layers if layer.get(key) is not None)
        if several and found.get(key) is None:
            found[key] = next(iter(several)) if len(several) == 1 else ", ".join(map(str, several))
    for key in (*_MODEL, *_RESULTS):
        if model.get(key) is not None:
            found.setdefault("model" if key == "name" else key, _plain(model[key]))
    for key in ("seed", "world_size", "source"):
        if manifest.get(key) is not None:
            found.setdefault(key, _plain(manifest[key]))
    versions = manifest.get("versions") or {}
    return found | {f"version of {name}": _plain(version) for name, version in versions.items()}


def differing(runs: Sequence[Compared]) -> dict[str, list[Any]]:
    """The settings in which these runs differ, those asked for most first, each with every run's value or NOT_SAID.

    A run that lacks a setting does not differ for that from one that has it at none.
    """
    each = [settings(one.run.manifest) for one in runs]
    names = dict.fromkeys([*_ALWAYS, *(name for one in each for name in one)])
    by_name = {name: [one.get(name, NOT_SAID) for one in each] for name in names}
    return {name: values for name, values in by_name.items() if _differ(set(map(_text, values)))}


def table(runs: Sequence[Compared]) -> pd.DataFrame:
    """A row for each setting in which the runs differ, a column for each run."""
    rows = [
        {"setting": name} | {one.label: _text(item) for one, item in zip(runs, values, strict=True)}
        for name, values in differing(runs).items()
    ]
    return pd.DataFrame(rows, columns=["setting", *(one.label for one in runs)])


def sentence(runs: Sequence[Compared]) -> str:
    """In which settings they differ, in words."""
    found = {name: values for name, values in differing(runs).items() if is_setting(name)}
    if not found:
        return "No recorded setting tells these runs apart."
    said = [f"{name} ({listed(list(dict.fromkeys(map(_text, values))), 'and')})" for name, values in found.items()]
    more = [count(len(said) - _SAID, "more setting")] if len(said) > _SAID else []
    text = f"They differ in {listed([*said[:_SAID], *more])}."
    if len(runs) == 2 and len(found) > 1:
        text += " More than one setting differs: what each of them did cannot be told from these two runs."
    return text


def is_setting(name: str) -> bool:
    """Whether a person chose it: sizes and versions are not settings."""
    return name not in _RESULTS and not name.startswith("version of ")


# ---------------------------------------------------------------------------------------------------------- groups


def group_fields(runs: Sequence[Compared], asked: str | None = None) -> list[str]:
    """The settings worth grouping by: some runs agree in them and others do not, or they are of common interest.

    asked  one that stays if any run has it, even where every run is a group of its own: a link or a person named it
    """
    each = [settings(one.run.manifest) for one in runs]
    fields = []
    for name in dict.fromkeys([*_ALWAYS, *(name for one in each for name in one)]):
        values = {_text(one.get(name, NOT_SAID)) for one in each}
        tells_some_apart = _differ(values) and len(values) < len(runs)
        common = name in _ALWAYS and len(values - {NOT_SAID}) == 1
        if is_setting(name) and (tells_some_apart or common or (name == asked and values != {NOT_SAID})):
            fields.append(name)
    return fields


def groups(runs: Sequence[Compared], field: str) -> dict[str, list[Compared]]:
    """The runs by what they have for `field`, as text: numbers first, in their order, then words: {"aux": [...]}."""
    members: dict[str, list[Compared]] = {}
    order: dict[str, Any] = {}
    for one in runs:
        item = settings(one.run.manifest).get(field, NOT_SAID)
        members.setdefault(_text(item), []).append(one)
        is_word, is_number = isinstance(item, str) and item != NOT_SAID, isinstance(item, int | float)
        order.setdefault(_text(item), (is_word, not is_number, item if is_word or is_number else 0))
    return {name: members[name] for name in sorted(members, key=order.__getitem__)}


def within_groups(grouped: Mapping[str, Sequence[Compared]]) -> list[str]:
    """The settings in which runs of one group differ: what the spread within the groups comes from."""
    found = (name for members in grouped.values() for name in differing(members) if is_setting(name))
    return list(dict.fromkeys(found))


def _plain(item: Any) -> Any:
    if item is None or isinstance(item, str | int | float):
        return item
    return ", ".join(map(str, item)) if isinstance(item, list) else str(item)


def _differ(texts: set[str]) -> bool:
    return len(texts) > 1 and texts != {NOT_SAID, _NONE}


def _text(item: Any) -> str:
    if item is None or item == "":
        return _NONE
    return value(item, 6) if isinstance(item, int | float) and not isinstance(item, bool) else str(item)
