"""Whole-number arrays (T, L, K) of .npy and .npz files, a block of tokens at a time. Never a pickle. No torch.

Shapes: T tokens, L layers, K choices a token.
"""

import ast
import io
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from recorder.importers.dump import DumpError

#: About so many ids are held in memory at once.
_BLOCK_IDS = 1 << 20
_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a .npy file says of itself: shape (T, L, K), dtype, and where its bytes start."""

    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    start: int


def read_header(file: Path, name: str, stream: IO[bytes], size: int) -> Header:
    """The header of the .npy in `stream`, which holds `size` bytes.

    Raises:
        DumpError: no .npy of whole numbers (T, L, K), or one that declares more or less than it holds.
    """
    where = f"{name}: " if name else ""
    start = _read(file, where, stream, 8)
    if start[:6] != _MAGIC or len(start) < 8 or start[6] not in (1, 2, 3):
        raise DumpError(file, f"{where}is no .npy array, or is cut off")
    width, form = (2, "<H") if start[6] == 1 else (4, "<I")
    packed = _read(file, where, stream, width)
    length = struct.unpack(form, packed)[0] if len(packed) == width else size
    if length > min(size, _LONGEST_HEADER):
        raise DumpError(file, f"{where}has a header of {length} bytes in {size}, or is cut off")
    try:
        parsed = ast.literal_eval(_read(file, where, stream, length).decode("latin1").strip())
        shape, order, description = parsed["shape"], parsed["fortran_order"], parsed["descr"]
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError) as error:
        if isinstance(error, DumpError):
            raise
        raise DumpError(file, f"{where}has a .npy header that cannot be read") from None
    if not isinstance(description, str) or not re.fullmatch(r"[<>|=][iu][1248]", description):
        raise DumpError(file, f"{where}has dtype {str(description)[:60]!r}, expected whole numbers (expert ids)")
    dtype = np.dtype(description)
    counts = isinstance(shape, tuple) and all(type(length) is int and length >= 0 for length in shape)
    if not counts or len(shape) != 3 or not shape[1] or not shape[2]:
        raise DumpError(file, f"{where}has shape {shape}, expected (tokens, layers, top_k)")
    if order:
        raise DumpError(file, f"{where}is in Fortran order, expected C order")
    offset = 8 + width + length
    declared = shape[0] * shape[1] * shape[2] * dtype.itemsize
    if declared != size - offset:
        raise DumpError(file, f"{where}declares {declared} bytes of {shape} {dtype} and holds {size - offset}")
    return Header(shape=shape, dtype=dtype, start=offset)


def read_blocks(file: Path, name: str, stream: IO[bytes], size: int) -> Iterator[np.ndarray]:
    """The array in `stream`, a block of tokens at a time: (t, L, K), one empty block where there is no token."""
    header = read_header(file, name, stream, size)
    tokens, layers, top_k = header.shape
    row = layers * top_k
    block = max(1, _BLOCK_IDS // row)
    if not tokens:
        yield np.zeros(header.shape, header.dtype)
    for first in range(0, tokens, block):
        count = min(block, tokens - first)
        data = _read(file, f"{name}: " if name else "", stream, count * row * header.dtype.itemsize)
        if len(data) != count * row * header.dtype.itemsize:
            raise DumpError(file, f"{name or 'the array'} is cut off after {first} tokens")
        yield np.frombuffer(data, header.dtype).reshape(count, layers, top_k)


def npy_file(file: Path) -> Iterator[tuple[str, Iterator[np.ndarray]]]:
    """One request: the array of a .npy file, as (name, blocks)."""
    with file.open("rb") as stream:
        yield file.stem, read_blocks(file, "", stream, file.stat().st_size)


def npz_file(file: Path) -> Iterator[tuple[str, Iterator[np.ndarray]]]:
    """One request an array of a .npz file, in the file's order."""
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        raise DumpError(file, "is no .npz file, or is cut off") from None
    with archive:
        if not archive.infolist():
            raise DumpError(file, "holds no array")
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            try:
                stream = archive.open(entry)
            except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
                raise DumpError(file, f"{name}: cannot be unpacked: {str(error)[:120]}") from None
            with stream:
                yield name, read_blocks(file, name, stream, entry.file_size)


def npy_bytes(file: Path, name: str, data: bytes) -> Iterator[np.ndarray]:
    """The array whose .npy bytes these are, in blocks."""
    return read_blocks(file, name, io.BytesIO(data), len(data))


def _read(file: Path, where: str, stream: IO[bytes], count: int) -> bytes:
    try:
        return stream.read(count)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DumpError(file, f"{where}cannot be unpacked: {str(error)[:120]}") from None
