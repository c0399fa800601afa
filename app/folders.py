"""Which folders of runs the dashboard shows, here or in an object store, and how a run is named in a URL.

They are given when the dashboard starts; a person can add others by typing their paths (`add`). Those are known to this
server until it ends, so that a reload and a link to one of their runs find them, and stand in no URL: a link must not
choose what a server lists.

A run reference never becomes a path: it is looked up among the runs that were found by listing the shown
folders, so that nothing outside them can be reached (`..`, absolute paths and links simply match nothing).
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recorder import storage
from recorder.storage import ObjectPath, Place

ENVIRONMENT = "ROUTESCOPE_DIRS"
MAIN = Path(__file__).with_name("main.py")
_added: list[Path] = []  # of this server, whoever looks at it
SAMPLES = Path(__file__).resolve().parent.parent / "sample_runs"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder whose children are runs.

    path       absolute, or in an object store; need not exist yet
    label      short and unique among the shown folders; prefix of a run reference where ids clash
    read_only  True where nothing may be recorded: the samples, and folders without write permission
    """

    path: Place
    label: str
    read_only: bool


def shown_folders(
    *,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    samples: Path = SAMPLES,
    added: Sequence[Path] | None = None,
) -> tuple[Folder, ...]:
    """The folders to show, in order, without repetition.

    They are the DIRs and URIs given after `streamlit run app/main.py --`, else those in ROUTESCOPE_DIRS (separated
    as in PATH), else `runs/` under the current directory and the checkout's `sample_runs/`. Where the dashboard
    cannot record into any of the given ones, `runs/` joins them: what is recorded must also be shown.

    argv      sys.argv by default; its first entry must be app/main.py for the rest to count (under pytest it
              is not)
    environ   os.environ by default
    added     folders added on the page, shown after these; those of this server by default
    """
    argv = sys.argv if argv is None else argv
    environ = os.environ if environ is None else environ
    cwd = Path.cwd() if cwd is None else cwd
    given = _given(argv, environ)
    own = cwd / "runs"
    paths: list[Place] = [_place(text, cwd) for text in given] or [
        own,
        *([samples] if samples.is_dir() else []),
    ]
    unique = list(dict.fromkeys(path.resolve() for path in paths))
    if all(isinstance(path, ObjectPath) or _is_read_only(path, samples) for path in unique):
        unique.append(own.resolve())
    unique += [path for path in (_added if added is None else added) if path not in unique]
    labels = _unique_labels(unique)
    return tuple(
        Folder(path=path, label=label, read_only=_is_read_only(path, samples))
        for path, label in zip(unique, labels, strict=True)
    )


def add(text: str) -> Path:
    """Show another folder of this machine, as a person typed it, until the server ends; its path.

    Raises ValueError, in one line, where it is no folder that holds runs, or is shown already.
    """
    text = text.strip()
    if not text:
        raise ValueError("Type the path of a folder that holds runs.")
    if storage.is_uri(text):
        raise ValueError(f"{text} is no folder of this machine. Show it from a terminal: routescope app {text}")
    try:
        path = Path(text).expanduser().resolve()
        names = sorted(entry.name for entry in path.iterdir())
    except (OSError, ValueError, RuntimeError):  # not told apart: what is not shown is nobody's business
        raise ValueError(f"{text} is no folder that can be read.") from None
    if any(folder.path == path for folder in shown_folders()):
        raise ValueError(f"{path} is shown already.")
    if "run.json" in names:
        raise ValueError(f"{path} is a run itself. Show the folder above it, {path.parent}.")
    if not any((path / name / "run.json").is_file() for name in names):
        raise ValueError(f"{path} holds no runs: none of its folders has a run.json.")
    _added.append(path)
    return path


def added() -> list[Path]:
    """The folders that were added on the page, in order."""
    return list(_added)


def hide(path: Path) -> None:
    """Show a folder no longer that was added on the page."""
    if path in _added:
        _added.remove(path)


def recording_folders(folders: Iterable[Folder]) -> list[Path]:
    """Where the dashboard can record: local folders, since its notes on a recording stand beside the run."""
    return [folder.path for folder in folders if isinstance(folder.path, Path) and not folder.read_only]


def recording_folder(folders: Iterable[Folder]) -> Path | None:
    """Where a new recording goes: the first of `recording_folders`, None where there is none."""
    return next(iter(recording_folders(folders)), None)


def references(paths: Sequence[Place], folders: Sequence[Folder]) -> dict[str, Place]:
    """A reference for each run folder: its name, or `folder/name` where several shown folders hold that name.

    Keeps the order of `paths`, which are children of the shown folders; others are left out.
    """
    label_of = {folder.path: folder.label for folder in folders}
    known = [path for path in paths if path.parent in label_of]
    count = Counter(path.name for path in known)
    return {path.name if count[path.name] == 1 else f"{label_of[path.parent]}/{path.name}": path for path in known}


def resolve(reference: str, known: Mapping[str, Place]) -> str | None:
    """The reference among `known` that a link means, or None.

    A bare name that has become ambiguous since the link was made means the first run of that name; a
    `folder/name` that has become unambiguous means the one left.
    """
    if reference in known:
        return reference
    folder, slash, name = reference.rpartition("/")
    for candidate, path in known.items():
        if path.name == name and (not slash or folder == path.parent.name):
            return candidate
    return None


def _given(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    if argv and Path(argv[0]).name == MAIN.name and Path(argv[0]).resolve() == MAIN.resolve() and argv[1:]:
        return list(argv[1:])
    return _split(environ.get(ENVIRONMENT, ""))


def _split(text: str) -> list[str]:
    """The places in a list as in PATH; a separator within a URI (s3://..., an endpoint's port) separates nothing."""
    pieces: list[str] = []
    for piece in text.split(os.pathsep):
        is_port = re.match(r"\d+(?=[/&?]|$)", piece) is not None
        if pieces and (piece.startswith("//") or (is_port and "://" in pieces[-1])):
            pieces[-1] += os.pathsep + piece
        else:
            pieces.append(piece)
    return [piece for piece in pieces if piece]


def _place(text: str, cwd: Path) -> Place:
    return storage.locate(text, cwd=cwd)


def _is_read_only(path: Place, samples: Path) -> bool:
    if isinstance(path, ObjectPath):
        return False
    if path == samples.resolve():
        return True
    nearest = next((candidate for candidate in (path, *path.parents) if candidate.exists()), path)
    return not (nearest.is_dir() and os.access(nearest, os.W_OK))


def _unique_labels(paths: Sequence[Place]) -> list[str]:
    labels: list[str] = []
    for path in paths:
        base = path.name or "root"
        label, number = base, 2
        while label in labels:
            label, number = f"{base}-{number}", number + 1
        labels.append(label)
    return labels
