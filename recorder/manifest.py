"""`run.json`: created exclusively, replaced atomically, read with one clear line when it is unusable."""

import json
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from recorder import checks, storage
from recorder.manifest_shape import check_manifest
from recorder.schema import FORMAT_VERSION
from recorder.storage import Place, StorageError

MANIFEST_NAME = "run.json"
STATUSES = ("running", "finished", "cancelled", "failed")
#: Seconds without a heartbeat after which a run of another machine counts as unfinished.
STALE_AFTER_S = 60.0
#: What `plain` keeps as it is: json reads no integer of more than 4300 digits, nor any depth.
_LONGEST_INT_BITS = 1024
_DEEPEST = 50
#: Two reports of one process's start may differ by clock adjustments; a reused pid within this is improbable.
_START_TOLERANCE_S = 2.0


class RunExistsError(FileExistsError):
    """The folder already holds a run, or a live process writes to it."""


class RunNotFoundError(FileNotFoundError):
    """There is no run at this path."""


class RunUnreadableError(ValueError):
    """There is something at this path, but its run.json cannot be used."""


def now() -> str:
    """The time in UTC as an ISO 8601 string with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: non-finite floats become None, numpy values and paths plain ones.

    What JSON has no form for (a dtype, a function, what holds itself, more than 50 levels) becomes its text, shortened:
    a setting that is odd to keep is no reason to keep a training from starting.
    """
    return _plain(value, ())


def _plain(value: Any, inside: tuple[int, ...]) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return checks.encodable(value)
    if isinstance(value, int) and value.bit_length() <= _LONGEST_INT_BITS:
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if id(value) not in inside and len(inside) < _DEEPEST:
        inside += (id(value),)
        if isinstance(value, Mapping):
            return {checks.encodable(_key(key)): _plain(item, inside) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [_plain(item, inside) for item in value]
        if is_dataclass(value) and not isinstance(value, type):
            return _plain(fields_of(value), inside)
    return checks.encodable(checks.shown(value, str))


def _key(key: Any) -> str:
    return str(key) if isinstance(key, str) else checks.shown(key, str)


def fields_of(config: Any) -> dict[str, Any]:
    """The settings of a config: a mapping, a dataclass, or what keeps them as attributes (argparse.Namespace).

    Raises:
        ValueError: anything else.
    """
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    if is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in fields(config)}
    if hasattr(config, "__dict__") and not callable(config):
        return dict(vars(config))
    raise ValueError(f"config must be a mapping, a dataclass or a Namespace, got {checks.shown(config)}")


def library_versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that shape a run, read without importing them."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "numpy", "pandas", "pyarrow", "routescope"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def this_process() -> dict[str, Any]:
    """Identity of this process: pid, start time (seconds since the epoch) and host."""
    return {
        "pid": os.getpid(),
        "started_at": psutil.Process().create_time(),
        "host": platform.node(),
    }


def process_alive(process: Any) -> bool | None:
    """Whether the process a manifest names still runs; None when that cannot be told from here."""
    if not isinstance(process, dict) or process.get("host") != platform.node():
        return None
    pid, started_at = process.get("pid"), process.get("started_at")
    if not isinstance(pid, int) or not isinstance(started_at, (int, float)):
        return None
    try:
        found = psutil.Process(pid)
        if found.status() == psutil.STATUS_ZOMBIE:  # killed, not yet reaped by its parent
            return False
        return abs(found.create_time() - started_at) <= _START_TOLERANCE_S
    except (psutil.NoSuchProcess, ValueError, OverflowError):  # no process has such a number, or started then
        return False
    except psutil.AccessDenied:
        return None


def run_status(manifest: dict[str, Any]) -> str:
    """The manifest's status, or "unfinished" where it says running but nobody writes any more.

    That is the case when its process is gone (same host: pid and start time), or, when that cannot be told,
    when its heartbeat is older than `STALE_AFTER_S`.
    """
    status = manifest.get("status")
    if status != "running":
        return status if status in STATUSES else "unfinished"
    alive = process_alive(manifest.get("process"))
    if alive is None:
        alive = heartbeat_age(manifest) <= STALE_AFTER_S
    return "running" if alive else "unfinished"


def heartbeat_age(manifest: dict[str, Any]) -> float:
    """Seconds since the last heartbeat; infinite when there is none that can be read."""
    try:
        heartbeat = datetime.fromisoformat(manifest["heartbeat_at"])
    except (KeyError, TypeError, ValueError):
        return math.inf
    if heartbeat.tzinfo is None:
        heartbeat = heartbeat.replace(tzinfo=UTC)
    return time.time() - heartbeat.timestamp()


def read_manifest(path: Place) -> dict[str, Any]:
    """The manifest of the run folder `path`.

    Raises:
        RunNotFoundError: no folder, or no run.json in it.
        StorageError: the object store cannot be reached or refuses.
        RunUnreadableError: run.json is not JSON, no manifest, or of a newer format.
    """
    file = path / MANIFEST_NAME
    try:
        if isinstance(file, Path) and file.exists() and not file.is_file():
            raise RunUnreadableError(f"{file} is no file")  # opening a pipe would wait for ever
        text = file.read_bytes().decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise RunNotFoundError(f"no run at {path}: {_what_is_missing(path)}") from None
    except StorageError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise RunUnreadableError(f"{file} cannot be read: {error}") from None
    try:
        manifest = json.loads(text)
        if r"\ud" in text.lower():  # perhaps half of a pair: no text that could be printed, or stored in Arrow
            manifest = json.loads(json.dumps(manifest, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise RunUnreadableError(f"{file} is not JSON: {error}") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format_version"), int):
        raise RunUnreadableError(f"{file} is no run manifest: it has no whole number as format_version")
    if manifest["format_version"] > FORMAT_VERSION:
        raise RunUnreadableError(
            f"{file} has format_version {manifest['format_version']}; this routescope reads up to {FORMAT_VERSION}"
        )
    try:
        check_manifest(manifest)
    except ValueError as error:
        raise RunUnreadableError(f"{path}: {error}") from None
    return manifest


def create_manifest(path: Place, manifest: dict[str, Any]) -> None:
    """Write run.json only if there is none: of two processes at once, one wins (see `storage.create`).

    Raises:
        RunExistsError: there is one already.
    """
    try:
        storage.create(path / MANIFEST_NAME, _as_bytes(manifest))
    except FileExistsError:
        raise RunExistsError(f"{path} already holds a run; resume it or choose another folder") from None


def replace_manifest(path: Place, manifest: dict[str, Any], *, alone: bool = False) -> None:
    """Replace run.json atomically: a reader sees the old or the new one, never a part.

    Args:
        path: the run's folder.
        manifest: what it shall hold.
        alone: look whether another process did the same at that moment, where no lock keeps it from that.

    Raises:
        RunExistsError: it did, after us.
    """
    content = _as_bytes(manifest)
    file = path / MANIFEST_NAME
    storage.write(file, lambda target: target.write(content))
    if alone:
        try:
            storage.check_mine(file, content)
        except FileExistsError:
            raise RunExistsError(f"{path} is being written by another process") from None


def leftover_manifests(path: Place) -> list[str]:
    """Names of the temporary files that a process left which was killed while it replaced run.json."""
    return sorted(
        name for name in storage.names(path) if name.startswith(f".{MANIFEST_NAME}.") and name.endswith(".tmp")
    )


def _what_is_missing(path: Place) -> str:
    if path.is_dir():
        return f"it holds no {MANIFEST_NAME}"
    return path.why_not() if isinstance(path, storage.ObjectPath) else "there is no such folder"


def _as_bytes(manifest: dict[str, Any]) -> bytes:
    return f"{json.dumps(plain(manifest), indent=1, allow_nan=False)}\n".encode()
