"""A run as one zip file, out and in: run.json, about.json and the Parquet files of its tables, under one folder.

Whatever is in a zip from elsewhere is taken for hostile until it is checked: names are compared with the few that a run
has, and nothing is written for a name that is none of them.
"""

import itertools
import os
import re
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from recorder import storage
from recorder.about import ABOUT_NAME, make_about, read_about, write_about
from recorder.compact import refuse_other_ranks_at_work
from recorder.manifest import (
    MANIFEST_NAME,
    RunExistsError,
    RunUnreadableError,
    read_manifest,
    replace_manifest,
    run_status,
)
from recorder.parts import list_parts, read_footer
from recorder.schema import TABLES
from recorder.storage import NO_FILE, ObjectPath, Place, Where
from recorder.verify import Report, verify_run

#: Bytes that a zip may hold unpacked, its Parquet files decompressed.
MOST_BYTES = 64 << 30
_MOST_FILES = 100_000
_MOST_JSON_BYTES = 16 << 20
_MOST_NAME = 100
_COPY_BYTES = 1 << 20

_FOLDERS = (*TABLES, "analysis", "analysis/partials")
_JSON = (MANIFEST_NAME, ABOUT_NAME)
_PARQUET = re.compile(rf"({'|'.join(_FOLDERS)})/(?![._])[^/\\:\x00-\x1f]+\.parquet")
#: What the Mac's Finder adds to every zip.
_ADDED_BY_OTHERS = re.compile(r"__MACOSX/.*|(.*/)?\.DS_Store")
#: What zipfile raises for a file that is no zip, or a damaged one.
_UNSOUND = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, OverflowError, ValueError)
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
#: A run of any time is the same zip: the earliest date that a zip can hold.
_DATE = (1980, 1, 1, 0, 0, 0)


class ArchiveError(ValueError):
    """A zip that holds no run, or something that a run does not; one line."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What goes into a zip: the files by their names below the run's folder, with their bytes."""

    files: Mapping[str, int]

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(self.files.values())


def contents_of(run: Place) -> Contents:
    """The files of a run that a zip of it holds: no temporary ones, and none that are not the run's.

    Raises:
        ArchiveError: a part whose name not every system can unpack.
    """
    sizes = {name: len((run / name).read_bytes()) for name in _JSON if (run / name).is_file()}
    for folder in _FOLDERS:
        for name, part in list_parts(run / folder).items():
            if part.stored == NO_FILE:  # a pipe, or a link that leads nowhere
                continue
            if not _PARQUET.fullmatch(f"{folder}/{name}"):
                raise ArchiveError(f"{_shown(f'{folder}/{name}')} has a name that not every system can unpack")
            sizes[f"{folder}/{name}"] = part.size
    return Contents(files=sizes)


def export_zip(run: Where, target: Path | IO[bytes]) -> Contents:
    """Write a run as one zip: to a file, whole or not there, or into an open binary one. Memory holds a megabyte.

    A resume or a compaction of the run waits until this is done, where there are locks.

    Raises:
        FileExistsError: the file is there already.
        RunExistsError: somebody still writes to the run.
        RunNotFoundError, RunUnreadableError: no run there, or none that could be read again.
        OSError: the run cannot be read, or the file not be written.
    """
    place = storage.locate(run)
    read_manifest(place)  # a folder without a run cannot be locked
    with storage.lock(place):
        manifest = read_manifest(place)
        if run_status(manifest) == "running":
            raise RunExistsError(f"{place.name} is still being written; export it when it has ended")
        refuse_other_ranks_at_work(place, manifest)
        contents = contents_of(place)
        if not isinstance(target, Path):
            _zip(place, contents, target)
        elif target.exists():
            raise FileExistsError(f"{target} is there already")
        else:
            storage.write(target, lambda file: _zip(place, contents, file))
    return contents


def _zip(run: Place, contents: Contents, target: IO[bytes]) -> None:
    with zipfile.ZipFile(target, "w") as archive:
        for name, size in contents.files.items():
            entry = zipfile.ZipInfo(f"{run.resolve().name}/{name}", _DATE)
            entry.file_size = size  # tells whether it needs the larger format, which not every tool reads
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            # Parquet files are compressed in themselves.
            entry.compress_type = zipfile.ZIP_DEFLATED if name in _JSON else zipfile.ZIP_STORED
            with _opened(run / name) as source, archive.open(entry, "w") as file:
                shutil.copyfileobj(source, file, _COPY_BYTES)


def _opened(file: Place) -> Any:
    return file.open() if isinstance(file, ObjectPath) else file.open("rb")


# --------------------------------------------------------------------------------------------------------------- in


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A run that came out of a zip: its new folder, and what `verify_run` says of it."""

    path: Path
    report: Report


def import_zip(file: Path | IO[bytes], out: Path, *, name: str = "", most_bytes: int = MOST_BYTES) -> Imported:
    """Unpack a zipped run as a new folder of `out`. All of it or nothing; nothing is overwritten.

    The folder is called as in the zip, with a number behind where that is taken; run.json's run_id follows. A run with
    damaged parts is taken all the same, since the rest of it can be read: the report tells.

    Args:
        file: the zip, closed or open.
        out: folder of runs on this machine, created where there is none.
        name: shown in place of the run's own.
        most_bytes: unpacked, and again with its Parquet files decompressed.

    Raises:
        ArchiveError: no zip, no run, or something in it that is not a run's; nothing is left behind.
        ValueError: the name is too long.
        OSError: it cannot be read or unpacked; nothing is left behind.
    """
    about = make_about(name=name)
    try:
        with zipfile.ZipFile(file) as archive:
            folder, members = _members(archive, most_bytes)
            out.mkdir(parents=True, exist_ok=True)
            # one level further down than runs stand, so that nobody takes it for one before it is whole
            workshop = Path(tempfile.mkdtemp(prefix=".importing-", dir=out))
            try:
                _unpack(archive, members, workshop / "run", most_bytes)
                if about.name:
                    write_about(workshop / "run", replace(read_about(workshop / "run"), name=about.name))
                path = _settle(workshop / "run", out, folder or _stem(file))
            finally:
                shutil.rmtree(workshop, ignore_errors=True)
    except ArchiveError:
        raise
    except _UNSOUND as error:
        raise ArchiveError(f"this is no sound zip file: {error}") from None
    return Imported(path=path, report=verify_run(path))


def _members(archive: zipfile.ZipFile, most_bytes: int) -> tuple[str, dict[str, zipfile.ZipInfo]]:
    """The run's folder in the zip ("" for none), and its files by their names below that. Raises ArchiveError."""
    entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    entries = [entry for entry in entries if not _ADDED_BY_OTHERS.fullmatch(entry.filename)]
    if len(entries) > _MOST_FILES:
        raise ArchiveError(f"the zip holds {len(entries):,} files; a run has at most {_MOST_FILES:,}")
    manifests = [entry.filename for entry in entries if re.fullmatch(rf"([^/]+/)?{MANIFEST_NAME}", entry.filename)]
    if not manifests:
        raise ArchiveError("the zip holds no run: there is no run.json at its top or in one folder")
    if len(set(manifests)) > 1:
        raise ArchiveError(
            f"the zip holds several runs ({_shown(manifests[0])}, {_shown(manifests[1])}); zip each alone"
        )
    root = manifests[0].removesuffix(MANIFEST_NAME)
    members: dict[str, zipfile.ZipInfo] = {}
    seen: set[str] = set()
    for entry in entries:
        name = entry.filename.removeprefix(root) if entry.filename.startswith(root) else ""
        if name not in _JSON and not _PARQUET.fullmatch(name):
            raise ArchiveError(
                f"{_shown(entry.filename)} in the zip is no file of a run (run.json, Parquet of a table)"
            )
        if name.casefold() in seen:  # names that differ in case alone are one on some systems
            raise ArchiveError(f"{_shown(entry.filename)} is in the zip twice")
        _check_kind(entry)
        if name in _JSON and entry.file_size > _MOST_JSON_BYTES:
            raise ArchiveError(f"{_shown(entry.filename)} has {entry.file_size:,} bytes; at most {_MOST_JSON_BYTES:,}")
        seen.add(name.casefold())
        members[name] = entry
    size = sum(entry.file_size for entry in members.values())
    if size > most_bytes:
        raise ArchiveError(f"the zip unpacks to {_megabytes(size)}; at most {_megabytes(most_bytes)} are taken here")
    return root.removesuffix("/"), members


def _check_kind(entry: zipfile.ZipInfo) -> None:
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):  # 0: zipped on a system without modes
        raise ArchiveError(f"{_shown(entry.filename)} in the zip is a link or a special file")
    if entry.flag_bits & 0x1:
        raise ArchiveError(f"{_shown(entry.filename)} in the zip is encrypted")
    if entry.compress_type not in _METHODS:
        raise ArchiveError(f"{_shown(entry.filename)} is compressed in another way than stored or deflated")


def _unpack(archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], run: Path, most_bytes: int) -> None:
    """Write the files and see that they are a run that nobody writes to. Raises ArchiveError or OSError."""
    run.mkdir()
    size = sum(entry.file_size for entry in members.values())
    if size > (free := shutil.disk_usage(run).free):
        raise OSError(f"the run takes {_megabytes(size)}, and {_megabytes(free)} are free in {run.parents[1]}")
    for name, entry in members.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entry) as source, (run / name).open("xb") as file:  # reads what the entry declares, no more
            shutil.copyfileobj(source, file, _COPY_BYTES)
    try:
        manifest = read_manifest(run)
    except RunUnreadableError as error:
        raise ArchiveError(str(error).replace(f"{run}/", "").replace(f"{run}: ", "")) from None
    if run_status(manifest) == "running":
        raise ArchiveError("run.json says that the run is still being written; zip it when it has ended")
    decompressed = sum(_decompressed(run / name) for name in members if name not in _JSON)
    if decompressed > most_bytes:
        raise ArchiveError(
            f"the Parquet files say that they decompress to {_megabytes(decompressed)}; "
            f"at most {_megabytes(most_bytes)} are taken here"
        )


def _decompressed(part: Path) -> int:
    """Bytes that a Parquet file says its pages hold; 0 where it is damaged, which is the report's to tell."""
    try:
        metadata = read_footer(part).metadata
    except (pa.ArrowException, OSError, ValueError):
        return 0
    return sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))


def _settle(run: Path, out: Path, wanted: str) -> Path:
    """Give a whole run its place, under the first name that is free."""
    base = re.sub(r"[^\w.=+-]+", "-", wanted).strip(".-")[:_MOST_NAME] or "run"
    for name in _numbered(base):
        path = out / name
        if os.path.lexists(path):
            continue
        manifest = read_manifest(run)
        if manifest.get("run_id") != name:
            replace_manifest(run, manifest | {"run_id": name})
        try:
            run.rename(path)
        except OSError:
            if os.path.lexists(path):  # taken in this moment
                continue
            raise
        storage.fsync_folder(out)
        return path
    raise AssertionError("names do not run out")


def _numbered(base: str) -> Iterator[str]:
    yield base
    for number in itertools.count(2):
        yield f"{base}-{number}"


def _stem(file: Path | IO[bytes]) -> str:
    named: Any = file if isinstance(file, Path) else getattr(file, "name", "")
    return Path(str(named)).stem


def _shown(name: str) -> str:
    text = ascii(name)
    return text if len(text) <= _MOST_NAME else f"{text[:_MOST_NAME]}...'"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


__all__ = ["MOST_BYTES", "ArchiveError", "Contents", "Imported", "contents_of", "export_zip", "import_zip"]
