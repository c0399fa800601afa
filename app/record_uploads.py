"""Text of one's own, uploaded in the record form: checked, and kept beside the runs for the recording to read."""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from app import jobs
from recorder import trash
from recorder.reader import list_runs
from recorder.training.texts import MAX_DOMAIN_BYTES, decode_text

FOLDER = ".uploads"
_KEPT = re.compile(r"[0-9a-f]{16}")  # the name of the folder of a kept text
TYPES = ("txt", "md", "py")
_FRESH_S = 3600.0  # long enough for a recording to be written down that was started with it
LIMIT_MB = MAX_DOMAIN_BYTES >> 20


class Upload(Protocol):
    """A file as it came from the browser."""

    @property
    def name(self) -> str: ...

    def getvalue(self) -> bytes: ...


def problems(uploads: Iterable[Upload]) -> list[str]:
    """Why files cannot be recorded, one line for each that cannot."""
    found = []
    for upload in uploads:
        content = upload.getvalue()
        if not upload.name.lower().endswith(tuple(f".{kind}" for kind in TYPES)):
            found.append(f"{upload.name}: only {', '.join(TYPES)} files are taken")
        elif len(content) > MAX_DOMAIN_BYTES:
            found.append(f"{upload.name} has {len(content) / 2**20:.0f} MB, at most {LIMIT_MB} are taken")
        else:
            text = decode_text(content)
            if text is None:
                found.append(f"{upload.name} is not UTF-8 text: save it in that encoding")
            elif not text.strip():
                found.append(f"{upload.name} is empty")
    return found


def keep(uploads: Iterable[Upload], out: Path) -> list[str]:
    """Write files without `problems` under `out`, each in a folder named by its content; their paths.

    The file keeps its name, which becomes the domain's, freed of what no path should hold. The same content under the
    same name is kept once. Raises OSError.
    """
    remove_unused(out)
    paths = []
    for upload in uploads:
        content = upload.getvalue()
        folder = out / FOLDER / hashlib.sha256(content).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _plain(upload.name)
        if not path.is_file() or path.read_bytes() != content:
            path.write_bytes(content)
        os.utime(folder)  # in use from now on, though no run refers to it yet
        paths.append(str(path))
    return paths


def remove_unused(out: Path) -> None:
    """Remove the texts kept under `out` that no run there, none in its trash and no recording asked for refers to.

    None is removed where a run cannot be read, which might refer to it, nor what was kept within the last hour.
    """
    place = out / FOLDER
    if place.is_symlink():  # what a link leads to is not ours to remove
        return
    kept = [folder for folder in place.glob("*") if _KEPT.fullmatch(folder.name) and _age_s(folder) > _FRESH_S]
    if not kept:
        return
    places = [out, *{run.path.parent for run in trash.trashed(out)}]
    runs = [info for place in places for info in list_runs(place)]
    if any(info.manifest is None for info in runs):
        return
    used = {str(path) for info in runs for path in ((info.manifest or {}).get("config") or {}).get("corpus") or []}
    used |= {word for job in jobs.jobs(out) if job.waits or jobs.is_alive(job) for word in job.command}
    for folder in kept:
        if not any(Path(path).parent == folder for path in used):
            shutil.rmtree(folder, ignore_errors=True)


def _age_s(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:  # another session has removed it
        return 0.0


def _plain(name: str) -> str:
    base = re.split(r"[/\\]", name)[-1]
    stem, _, kind = base.rpartition(".")
    stem = re.sub(r"[^\w .+-]+", "-", stem).strip(" .-")[:80]
    return f"{stem or 'text'}.{kind.lower()}"
