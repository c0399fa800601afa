"""Where runs live: a local folder, or a prefix in an object store. All that the recorder does to files is here.

A place is a `pathlib.Path`, or an `ObjectPath` that reads the same: `/`, name, parent, exists(), read_bytes() and so
on. `locate` makes either from what a person gave. The functions below are what differs between the two: an object
store has no rename, no locks and no folders, but puts a whole object at once or not at all.
"""

import contextlib
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from recorder.object_store import ObjectPath, StorageError, is_uri

try:
    import fcntl
except ImportError:  # no such locks on Windows, where two resumes at once are not guarded
    fcntl = None  # type: ignore[assignment]

Place = Path | ObjectPath
#: What a person may name a place by.
Where = str | os.PathLike[str] | ObjectPath

#: Requests at once to an object store: what one waits for is the way there and back. Below pyarrow's 25 connections.
_REQUESTS = 16
#: A footer comes with the last 64 KiB of its file: of smaller parts those are the rows too, which are wanted next.
_SMALL_BYTES = 64 << 10
_SMALL_KEPT = 512
_LOST_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")

Item = TypeVar("Item")
Result = TypeVar("Result")


class Stored(NamedTuple):
    """Size in bytes and time of change (ns) of a file or object, as a listing tells them."""

    size: int
    mtime_ns: int


#: What a listing tells of a name that no bytes can be read from: a link that leads nowhere, a pipe, a folder.
NO_FILE = Stored(0, -1)


def locate(where: Where, *, cwd: Path | None = None) -> Place:
    """The place that a person named: a local path, or a URI such as s3://bucket/prefix (see `ObjectPath.of`).

    A local path comes back absolute, `~` expanded: the process may change its folder while a run is written. cwd: what
    a relative one is relative to, None = the folder of the process.

    Raises:
        ValueError: a URI that cannot be used; a Path made of one, which takes a slash away; or a path with bytes that
            are no UTF-8, which pyarrow cannot open.
    """
    if isinstance(where, ObjectPath):
        return where
    if not isinstance(where, str):
        where = Path(where)
        if len(where.parts) > 1 and _LOST_SLASH.fullmatch(where.parts[0]) and os.name != "nt":
            raise ValueError(f"{where} was a URI before pathlib took one of its slashes: give it as a str")
        return _local(where, cwd)
    if where.lower().startswith("file://"):
        from urllib.parse import unquote, urlsplit

        return _local(Path(unquote(urlsplit(where).path)), cwd)
    return ObjectPath.of(where) if is_uri(where) else _local(Path(where), cwd)


def _local(path: Path, cwd: Path | None) -> Path:
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{str(path)!r} cannot be a path of runs: it has bytes that are no UTF-8") from None
    with contextlib.suppress(RuntimeError):  # ~someone whom the system does not know: a name like any other
        path = path.expanduser()
    return (path if cwd is None else cwd / path).absolute()


def is_remote(place: Place) -> bool:
    """Whether every look at the place is a request over the network."""
    return isinstance(place, ObjectPath)


def files(folder: Place, suffix: str) -> dict[str, Stored]:
    """Visible files of a folder whose names end in `suffix`; empty where there is no such folder.

    A local name that is no file, and no link to one, is `NO_FILE`: opening a pipe would wait for ever.
    """
    if isinstance(folder, ObjectPath):
        return {
            name: Stored(info.size, info.mtime_ns)
            for name, info in folder.entries().items()
            if info.is_file and name.endswith(suffix) and not name.startswith((".", "_"))
        }
    stored: dict[str, Stored] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(suffix) and not entry.name.startswith((".", "_")):
                    try:
                        told = entry.stat()
                    except OSError:
                        if entry.is_symlink():
                            stored[entry.name] = NO_FILE
                        continue
                    is_file = stat.S_ISREG(told.st_mode)
                    stored[entry.name] = Stored(told.st_size, told.st_mtime_ns) if is_file else NO_FILE
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return stored


def names(folder: Place) -> list[str]:
    """Names of all that is in a folder; none where there is no such folder."""
    if isinstance(folder, ObjectPath):
        return list(folder.entries())
    return os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 (names are all that is wanted)


def snapshots(folder: Place, suffix: str) -> dict[str, Stored]:
    """`files`, such that a file is seen that replaced others while the listing went on.

    While a compaction renames one file in and others away, a single local scan can miss both. Two scans where nothing
    vanished between them cannot. An object store lists in order of names, page by page, and the new part has a later
    name: where an early page misses the old ones, a later page has it.
    """
    before = files(folder, suffix)
    while not isinstance(folder, ObjectPath):
        after = files(folder, suffix)
        if before.keys() <= after.keys():
            return after
        before = after
    return before


def stamp(file: Place) -> Stored | None:
    """Size and time of change of a file that is replaced now and then; None where these tell too little.

    An object store gives whole seconds, in which a file can change twice: go by the content there.
    """
    if isinstance(file, ObjectPath):
        return None
    try:
        found = file.stat()
    except OSError:
        return Stored(0, 0)
    return Stored(found.st_size, found.st_mtime_ns)


def make_folder(folder: Place) -> None:
    """Create a folder in one that is there, to stay after a power cut; an object store needs none."""
    if isinstance(folder, Path) and not folder.is_dir():
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


def write(file: Place, serialise: Callable[[Any], object]) -> None:
    """Write or replace a file such that it is whole or not there, and still there after a power cut.

    Locally: under a temporary name, synced, then renamed. In an object store: put at
    once, after all of it has been serialised to memory, so that nothing that fails on the way leaves half an object.

    Args:
        file: its final place.
        serialise: writes the content into the binary file it is given.

    Raises:
        OSError: it could not be written; what was there before is as it was.
    """
    if isinstance(file, ObjectPath):
        sink = pa.BufferOutputStream()
        serialise(sink)
        file.put(sink.getvalue())
        return
    temporary = _temporary(file)
    try:
        with temporary.open("wb") as target:
            serialise(target)
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(file.parent)


def create(file: Place, content: bytes) -> None:
    """Write a file only if there is none.

    Locally one of two processes at once wins. An object store cannot be asked for that through pyarrow (S3 has
    conditional puts; pyarrow does not expose them): look, write, and read back what is there then. Of two that look
    before either has written, the one that reads back the other's content gives up; only where the second writes
    after the first has read back do both believe they have won.

    Raises:
        FileExistsError: there is one already.
    """
    if isinstance(file, ObjectPath):
        if file.exists():
            raise FileExistsError(f"{file} is there already")
        file.put(content)
        check_mine(file, content)
        return
    temporary = _temporary(file)
    try:
        with temporary.open("wb") as target:
            target.write(content)
            target.flush()
            os.fsync(target.fileno())
        try:
            os.link(temporary, file)  # fails if the name is taken, and the content is complete at once
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            with file.open("xb") as target:
                target.write(content)
                target.flush()
                os.fsync(target.fileno())
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(file.parent)


def check_mine(file: Place, content: bytes) -> None:
    """In an object store, which has no locks: raise FileExistsError where another process wrote this file after us."""
    if isinstance(file, ObjectPath) and file.read_bytes() != content:
        raise FileExistsError(f"{file} was written by another process at the same moment")


def remove(folder: Place, gone: Iterable[str]) -> None:
    """Delete files of a folder, where they are there; one that cannot be deleted (open elsewhere on Windows) stays."""
    if isinstance(folder, ObjectPath):
        each(folder, lambda name: (folder / name).unlink(), sorted(gone))
        return
    for name in sorted(gone):
        with contextlib.suppress(PermissionError):
            (folder / name).unlink(missing_ok=True)


def parquet_file(
    file: Place, metadata: pq.FileMetaData | None = None, stored: Stored | None = None, **options: Any
) -> pq.ParquetFile:
    """A Parquet file, opened by itself, so that path parts like `run=007` are no columns; to be closed.

    From an object store only the footer (unless given) and the column chunks asked for are fetched; all of a small
    one, once, where `stored` says that it is. `options` are ParquetFile's.

    Raises:
        FileNotFoundError: it is gone.
        StorageError: the store could not be reached; also from every later read.
        pa.ArrowException, OSError, ValueError: it is no whole Parquet file.
    """
    if isinstance(file, ObjectPath):
        return pq.ParquetFile(_source(file, stored), metadata=metadata, pre_buffer=True, **options)
    return pq.ParquetFile(file, metadata=metadata, **options)


def parquet_metadata(file: Place, stored: Stored | None = None) -> pq.FileMetaData:
    """The footer of a Parquet file. Raises as `parquet_file`."""
    if isinstance(file, ObjectPath):
        with _source(file, stored) as source:
            return pq.read_metadata(source)
    if stored == NO_FILE:
        raise OSError("it is no file, or a link that leads to none")
    return pq.read_metadata(file)


def _source(file: ObjectPath, stored: Stored | None) -> Any:
    small = stored is not None and stored.size <= _SMALL_BYTES
    return pa.BufferReader(_content(file, stored)) if small and stored else file.open()


@lru_cache(maxsize=_SMALL_KEPT)
def _content(file: ObjectPath, stored: Stored) -> bytes:
    return file.read_bytes()


def each(place: Place, do: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`do` of every item, in order; where `place` is in an object store, several at once."""
    items = list(items)
    if not isinstance(place, ObjectPath) or len(items) < 2:
        return [do(item) for item in items]
    with ThreadPoolExecutor(min(_REQUESTS, len(items)), thread_name_prefix="object store") as pool:
        return list(pool.map(do, items))


@contextlib.contextmanager
def lock(folder: Place) -> Iterator[None]:
    """Hold a folder for a moment against other processes; the system frees it if the holder dies.

    An object store has no locks, and a folder that is not there holds nothing: then nothing is held.
    """
    if fcntl is None or isinstance(folder, ObjectPath) or not folder.is_dir():
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: go on unguarded
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Make renames within a local folder durable (where the platform can open folders)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(file: Path) -> Path:
    return file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")


__all__ = [
    "NO_FILE",
    "ObjectPath",
    "Place",
    "StorageError",
    "Stored",
    "Where",
    "check_mine",
    "create",
    "each",
    "files",
    "fsync_folder",
    "is_remote",
    "is_uri",
    "locate",
    "lock",
    "make_folder",
    "names",
    "parquet_file",
    "parquet_metadata",
    "remove",
    "snapshots",
    "stamp",
    "write",
]
