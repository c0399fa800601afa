"""What the Dispatch page measures: the values of its controls, checked, as text in the URL, and as a command line.

Values are a dict with the fields of `DispatchShape`, "rounds" and "threads"; None where a field was emptied.
"""

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import psutil

from app.text import duration
from recorder.dispatch_shape import ACTIVATIONS, LIMITS, MAX_SKEW, PRESETS, DispatchShape

LABELS = {
    "d_model": "Width",
    "d_ff": "Expert width",
    "num_experts": "Experts",
    "top_k": "Top-k",
    "num_tokens": "Tokens",
    "activation": "Activation",
    "skew": "Skew",
    "rounds": "Rounds",
    "threads": "CPU threads",
}
MOST_ROUNDS = 1000
MOST_THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
WHOLE = {**LIMITS, "rounds": (1, MOST_ROUNDS), "threads": (1, MOST_THREADS)}
LONGEST_S = 1800.0  # what is estimated to take longer is refused
_MEMORY_SHARE = 0.8  # of the machine's memory, at most
_SEPARATOR = "_"
_SHAPE = tuple(name for name in LABELS if name not in ("rounds", "threads"))

Values = dict[str, Any]


def of_preset(shape: DispatchShape, *, rounds: int = 10, threads: int = MOST_THREADS) -> Values:
    """The values that measure a shape."""
    return {**{name: getattr(shape, name) for name in _SHAPE}, "rounds": rounds, "threads": threads}


DEFAULTS = of_preset(PRESETS[0])


def preset_of(values: Mapping[str, Any]) -> DispatchShape | None:
    """The preset that the values are; None for a shape of one's own."""
    return next((shape for shape in PRESETS if all(values[name] == getattr(shape, name) for name in _SHAPE)), None)


def preset_label(shape: DispatchShape) -> str:
    """A preset in a list: "512 x 256, top-8 of 128, 2,048 tokens"."""
    return f"{shape.d_model} x {shape.d_ff}, top-{shape.top_k} of {shape.num_experts}, {shape.num_tokens:,} tokens"


def as_text(values: Mapping[str, Any]) -> str:
    """The values as one URL parameter: "64_128_8_2_2048_swiglu_0_10_2"; nothing between two marks is an empty field."""
    return _SEPARATOR.join("" if values[name] is None else _written(values[name]) for name in LABELS)


def from_text(text: str | None) -> Values:
    """The values in a URL parameter; a default for each that is missing, no number, or no value of its field."""
    parts = (text or "").split(_SEPARATOR)
    if len(parts) != len(LABELS):
        return dict(DEFAULTS)
    return {name: _read(name, part) for name, part in zip(LABELS, parts, strict=True)}


def problems(values: Mapping[str, Any]) -> list[str]:
    """Why these values cannot be measured, one line each; empty where they can."""
    missing = [f"{LABELS[name]}: a number is missing" for name, value in values.items() if value is None]
    if missing:
        return missing
    try:
        shape = _shape(values)
    except ValueError as error:
        words = re.sub(r"\b(\w+)=", lambda match: f"{LABELS.get(match[1], match[1])} ", str(error))
        return [words[0].upper() + words[1:]]
    needed, memory = shape.estimated_bytes(), psutil.virtual_memory().total
    if needed > _MEMORY_SHARE * memory:
        return [f"This shape takes about {_gib(needed)} of memory; this machine has {_gib(memory)}."]
    seconds = estimated_seconds(values)
    if seconds > LONGEST_S:
        return [
            f"This would take about {duration(seconds)}; the page measures what takes up to "
            f"{LONGEST_S / 60:.0f} minutes. Fewer rounds or tokens take less."
        ]
    return []


def estimated_seconds(values: Mapping[str, Any]) -> float:
    """About how long measuring sound values takes."""
    return _shape(values).estimated_seconds(rounds=values["rounds"], threads=values["threads"])


def command(values: Mapping[str, Any]) -> list[str]:
    """The command line that measures sound values, report on stdout, progress on stderr."""
    options = [f"--{name.replace('num_tokens', 'tokens').replace('_', '-')}={values[name]}" for name in LABELS]
    return [sys.executable, "-m", "recorder.cli", "bench", "dispatch", *options, "--json", "--progress"]


def in_words(values: Mapping[str, Any]) -> str:
    """What was measured, as a line under the picture."""
    skew = f"skew {values['skew']:g}" if values["skew"] else "no skew"
    threads = "1 thread" if values["threads"] == 1 else f"{values['threads']} threads"
    return (
        f"width {values['d_model']:,}, expert width {values['d_ff']:,}, top-{values['top_k']} of "
        f"{values['num_experts']:,} experts, {values['num_tokens']:,} tokens, {values['activation']}, {skew}, {threads}"
    )


def _shape(values: Mapping[str, Any]) -> DispatchShape:
    return DispatchShape(**{name: values[name] for name in _SHAPE})


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read(name: str, part: str) -> Any:
    if name == "activation":
        return part if part in ACTIVATIONS else DEFAULTS[name]
    if part == "":
        return None
    least, most = (0.0, MAX_SKEW) if name == "skew" else WHOLE[name]
    try:
        value = float(part) if name == "skew" else int(part)
    except ValueError:
        return DEFAULTS[name]
    return value if least <= value <= most else DEFAULTS[name]


def _gib(size: float) -> str:
    return f"{size / 2**30:,.0f} GiB" if size >= 10 * 2**30 else f"{size / 2**30:.1f} GiB"
