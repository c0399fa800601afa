"""Text of one's own, uploaded in the record form: checked, and kept beside the runs for the recording to read."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from recorder.training.texts import MAX_DOMAIN_BYTES, decode_text

FOLDER = ".uploads"
TYPES = ("txt", "md", "py")
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
    paths = []
    for upload in uploads:
        content = upload.getvalue()
        folder = out / FOLDER / hashlib.sha256(content).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _plain(upload.name)
        if not path.is_file() or path.read_bytes() != content:
            path.write_bytes(content)
        paths.append(str(path))
    return paths


def _plain(name: str) -> str:
    base = re.split(r"[/\\]", name)[-1]
    stem, _, kind = base.rpartition(".")
    stem = re.sub(r"[^\w .+-]+", "-", stem).strip(" .-")[:80]
    return f"{stem or 'text'}.{kind.lower()}"
