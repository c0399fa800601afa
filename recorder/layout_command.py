"""`routescope layout`: finds what was asked for, a model's name, a config file or a run, and tells its layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_core.hf_config import layout_from_hf_config
from moe_core.layout import CONVENTIONS
from moe_core.models import PUBLISHED, model_layout

from .run_layout import run_report

MAX_FILE_BYTES = 4_000_000  # a config.json has a few thousand
Row = Sequence[Any]


def model_report(what: str, context: int) -> dict[str, Any] | None:
    """What `Layout.as_dict` tells of a known model, or of a Hugging Face config file (or a folder with one).

    The report has `published` besides: the authors' own figures, or null. None where `what` is neither. Raises
    ValueError in one line for a file that is no config that can be read.
    """
    path = Path(what)
    if path.is_dir() and not (path / "run.json").exists() and (path / "config.json").exists():
        path = path / "config.json"
    if path.is_file():
        return {**_from_file(path).as_dict(context), "published": None}
    if path.suffix == ".json":
        raise ValueError(f"there is no file {what}")
    try:
        layout = model_layout(what)
    except ValueError:
        return None
    return {**layout.as_dict(context), "published": _published(layout.name)}


def report_of_run(run: Any, context: int) -> dict[str, Any]:
    """The same of an open run."""
    return {**run_report(run.manifest, context), "published": None}


def unknown(what: str) -> str:
    """What to say where nothing goes by this name."""
    try:
        model_layout(what)
    except ValueError as error:
        return f"{error}; and no config file or run goes by that name either"
    return f"{what} is a model"


def read_config(text: str) -> Any:
    """The JSON of a config; raises ValueError in one line for text that is none."""
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"it has {len(text):,} characters; a config has no more than {MAX_FILE_BYTES:,}")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply for a config") from None
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from None


def _from_file(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ValueError(f"it has {size:,} bytes; a config has no more than {MAX_FILE_BYTES:,}")
        config = read_config(path.read_text(encoding="utf-8-sig"))
        return layout_from_hf_config(config)
    except UnicodeDecodeError:
        raise ValueError(f"{path}: it is no text") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _published(name: str) -> dict[str, Any] | None:
    model = PUBLISHED.get(name)
    if model is None:
        return None
    return {
        "total": model.published_total,
        "active": model.published_active,
        "convention": model.convention,
        "convention_stated": model.convention_stated,
        "source": model.source,
        "note": model.note or None,
    }


def tables(report: Mapping[str, Any]) -> Iterator[tuple[str, list[str], list[Row]]]:
    """The report for people: (heading, columns, rows) of one table after another."""
    published = report["published"]
    rows: list[Row] = []
    for name, words in CONVENTIONS.items():
        total, active = report["total_by_convention"][name], report["active_parameters"][name]
        said = []
        if published is not None and name == "all" and published["total"]:
            said.append(f"{published['total']} total")
        if published is not None and name == published["convention"] and published["active"]:
            said.append(f"{published['active']} active")
        share = f"{active / total:.1%}" if total and active is not None else None
        rows.append([words, number(total), number(active), share, ", ".join(said) or None])
    columns = ["counted", "total", "active", "share", "published"]
    keep = 5 if published is not None else 4
    yield report["name"], columns[:keep], [row[:keep] for row in rows]
    if published is not None:
        yield _source(published), [], []
    if report["components"] is not None:
        parts = report["components"].items()
        named: list[Row] = [[name.replace("_", " "), number(p["total"]), number(p["active"])] for name, p in parts]
        yield "", ["component", "total", "active"], named
        yield "", ["cost of one token", ""], _costs(report)
    columns = ["layers", "kind", "experts", "top k", "shared", "latent", "width", "window", "total", "active"]
    yield "", columns, list(_grouped(report["layers"]))


def _source(published: Mapping[str, Any]) -> str:
    counted = "" if published["convention_stated"] else "; how they count active ones is not said, the nearest is shown"
    return f"published figures: {published['source']}{counted}. {published['note'] or ''}".rstrip()


def _costs(report: Mapping[str, Any]) -> list[Row]:
    context = f"{report['context']:,}"
    weights = report["weight_bytes"]
    return [
        [f"FLOPs forward, attending to {context} tokens", number(report["flops_per_token"])],
        ["bytes of weights, bfloat16", number(weights["bfloat16"])],
        ["bytes of weights, float8", number(weights["float8"])],
        ["bytes a token adds to the cache, bfloat16", number(report["cache_bytes_per_token"])],
        [f"bytes of cache at {context} tokens, bfloat16", number(report["cache_bytes"])],
    ]


def _grouped(layers: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """A row for each stretch of layers that are alike, or that alternate between two kinds."""
    start = 0
    while start < len(layers):
        period = 2 if _stretch(layers, start, 2) >= max(4, 2 * _stretch(layers, start, 1)) else 1
        stop = start + _stretch(layers, start, period)
        for first in range(start, start + period):
            last = max(range(first, stop, period))
            indices = (
                f"{layers[first]['index']}" if last == first else f"{layers[first]['index']}-{layers[last]['index']}"
            )
            every = ", every 2nd" if period == 2 else ""
            yield [f"{indices}{every}", *_of_layer(layers[first])]
        start = stop


def _stretch(layers: Sequence[Mapping[str, Any]], start: int, period: int) -> int:
    """How many layers from `start` on are like the one `period` before them."""
    stop = min(start + period, len(layers))
    while stop < len(layers) and _of_layer(layers[stop]) == _of_layer(layers[stop - period]):
        stop += 1
    return stop - start


def _of_layer(layer: Mapping[str, Any]) -> list[Any]:
    names = ("kind", "num_experts", "top_k", "num_shared_experts", "latent_size")
    width = layer["expert_d_ff"] if layer["kind"] == "moe" else layer["d_ff"]
    told = [layer[name] for name in names]
    return [*told, width, layer["window"], number(layer["total"]), number(layer["active"])]


def number(value: int | None) -> str | None:
    """A whole number with commas."""
    return None if value is None else f"{value:,}"
