"""What people say about a run: another name, notes and tags, in `about.json` beside its run.json.

A file of its own, since run.json belongs to the run's writer, which replaces it while it runs.
"""

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from recorder import checks, storage
from recorder.storage import Place, StorageError

ABOUT_NAME = "about.json"
MOST_NAME, MOST_NOTES, MOST_TAG, MOST_TAGS = 200, 20_000, 40, 20
#: Notes of that length in four bytes a letter, escaped: a longer file is none of ours.
_MOST_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class About:
    """name: shown in place of the manifest's; None = that one. notes: free text. tags: in the order they were given."""

    name: str | None = None
    notes: str = ""
    tags: tuple[str, ...] = ()


def make_about(*, name: str | None = None, notes: str = "", tags: str | Iterable[str] = ()) -> About:
    """What a person typed, tidied: white space, empty tags and tags given twice.

    Args:
        name: one line; None or empty = the manifest's.
        notes: free text.
        tags: a list, or one text with commas between them.

    Raises:
        ValueError: something is too long; names it and the most there may be.
    """
    name = _line(name or "") or None
    notes = checks.encodable(notes).strip()
    pieces = tags.split(",") if isinstance(tags, str) else tags
    kept = tuple(dict.fromkeys(tag for tag in (_line(piece.replace(",", " ")) for piece in pieces) if tag))
    if name is not None and len(name) > MOST_NAME:
        raise ValueError(f"a name has at most {MOST_NAME} characters, got {len(name):,}")
    if len(notes) > MOST_NOTES:
        raise ValueError(f"notes have at most {MOST_NOTES:,} characters, got {len(notes):,}")
    for tag in kept:
        if len(tag) > MOST_TAG:
            raise ValueError(f"a tag has at most {MOST_TAG} characters, got {len(tag):,}: {tag[:MOST_TAG]}...")
    if len(kept) > MOST_TAGS:
        raise ValueError(f"a run has at most {MOST_TAGS} tags, got {len(kept)}")
    return About(name=name, notes=notes, tags=kept)


def read_about(run: Place) -> About:
    """What is said about the run in this folder; nothing where there is no file, or none that can be used.

    Raises:
        StorageError: the object store cannot be reached.
    """
    file = run / ABOUT_NAME
    if isinstance(file, Path) and not file.is_file():  # opening a pipe would wait for ever
        return About()
    try:
        content = file.read_bytes()
    except StorageError:
        raise
    except OSError:
        return About()
    return parse_about(content) or About()


def parse_about(content: bytes) -> About | None:
    """What such a file says; None where it is no such file. What is of the wrong kind or too long is left out."""
    if len(content) > _MOST_BYTES:
        return None
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    tags = said.get("tags")
    given: dict[str, Any] = {key: said[key] for key in ("name", "notes") if isinstance(said.get(key), str)}
    given["tags"] = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    about = About()
    for key, value in given.items():
        with contextlib.suppress(ValueError):
            about = replace(about, **{key: getattr(make_about(**{key: value}), key)})
    return about


def write_about(run: Place, about: About) -> None:
    """Replace what is said about a run, atomically; run.json and the tables stay as they are.

    Raises:
        OSError: it cannot be written; what was said before stays.
    """
    content = f"{json.dumps(asdict(about), indent=1)}\n".encode()
    storage.write(run / ABOUT_NAME, lambda target: target.write(content))


def _line(text: str) -> str:
    printable = "".join(letter if letter.isprintable() else " " for letter in checks.encodable(text))
    return " ".join(printable.split())
