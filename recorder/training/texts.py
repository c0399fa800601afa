"""Where the toy corpus gets its text: four domains that need no download, and the user's own files. No torch.

Nothing here depends on PYTHONHASHSEED, the locale or the order in which a file system lists its files.
"""

from __future__ import annotations

import csv
import io
import json
import os
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

GENERATED_CHARACTERS = 500_000
"""Length of each generated domain: about as much text as the prose has."""

MAX_DOMAIN_BYTES = 32 * 2**20
"""The most a user's file or folder may hold: all of it is tokenized, and a toy run reads a fraction."""

# Hand-written modules that have been there for long, with neither tests nor generated tables: about 1 MB.
# fmt: off
STDLIB_MODULES = (
    "argparse", "bdb", "collections/__init__", "configparser", "contextlib", "csv", "dataclasses", "enum",
    "fractions", "functools", "gzip", "heapq", "json/decoder", "json/encoder", "os", "pprint", "queue",
    "random", "shelve", "shlex", "shutil", "socketserver", "statistics", "tempfile", "textwrap", "threading",
    "timeit", "tokenize", "traceback", "uuid", "weakref",
)

NAMES = ("ada", "alan", "barbara", "bob", "carol", "edsger", "erin", "frank", "grace", "heidi", "ivan", "judy",
         "ken", "margaret", "olga", "peggy")
CITIES = ("Accra", "Bergen", "Cusco", "Dakar", "Hanoi", "Kyoto", "Lima", "Oslo", "Perth", "Quito", "Riga")
GOODS = ("apple", "bolt", "candle", "drill", "envelope", "fork", "glove", "hammer", "inkpot", "jar", "kettle")
TAGS = ("new", "old", "sale", "rare", "heavy", "fragile", "local")
# fmt: on


def builtin_texts(seed: int) -> dict[str, str]:
    """The domains that are always there, name -> text.

    code: sources of the running Python's standard library. prose: its language reference
    (`pydoc_data.topics`). arithmetic and data: generated from the seed.

    Raises:
        ValueError: this Python comes without its library's sources or texts.
    """
    return {
        "code": stdlib_code(),
        "prose": language_reference(),
        # A string seeds by its hash digest, not by hash(): the same on every run.
        "arithmetic": _lines(arithmetic_line, random.Random(f"arithmetic {seed}")),
        "data": _lines(data_block, random.Random(f"data {seed}")),
    }


def stdlib_code() -> str:
    """Sources of a fixed choice of standard library modules, in alphabetical order.

    Raises:
        ValueError: none of them is there as a source file.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / f"{module}.py" for module in sorted(STDLIB_MODULES)]
    sources = [decode_text(file.read_bytes()) for file in files if file.is_file()]
    if not sources:
        raise ValueError(f"no standard library sources in {str(folder)!r}: the domain 'code' needs them")
    return "\n".join(source for source in sources if source)


def language_reference() -> str:
    """The English text of Python's language reference, topic after topic in alphabetical order.

    Raises:
        ValueError: this Python comes without `pydoc_data`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("this Python lacks the module pydoc_data.topics: the domain 'prose' needs it") from None
    return "\n".join(topics[name] for name in sorted(topics))


def arithmetic_line(rng: random.Random) -> str:
    """A line of correct expressions of two to four operands, such as `325+2=327; 4*12-7=41`."""
    return "; ".join(_expression(rng) for _ in range(rng.randint(3, 9))) + "\n"


def _expression(rng: random.Random) -> str:
    operand = rng.randrange(10 ** rng.randint(1, 3))
    text, done, term = str(operand), 0, operand
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        operator, operand = rng.choice("+-*"), rng.randrange(10 ** rng.randint(1, 3))
        text += f"{operator}{operand}"
        if operator == "*":  # binds tighter: belongs to the term that is still open
            term *= operand
        else:
            done, term = done + term, operand if operator == "+" else -operand
    return f"{text}={done + term}"


def data_block(rng: random.Random) -> str:
    """A few records of one kind as a JSON array, as JSON lines or as a CSV table, and a blank line."""
    record = rng.choice((_product, _person, _reading))
    records = [record(rng) for _ in range(rng.randint(3, 12))]
    form = rng.choice(("array", "lines", "csv"))
    if form == "array":
        return json.dumps(records) + "\n\n"
    if form == "lines":
        return "".join(json.dumps(record) + "\n" for record in records) + "\n"
    table = io.StringIO()
    writer = csv.DictWriter(table, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return table.getvalue() + "\n"


def _product(rng: random.Random) -> dict[str, object]:
    return {
        "id": rng.randrange(100_000),
        "name": rng.choice(GOODS),
        "price": rng.randrange(100, 10_000) / 100,
        "tags": rng.sample(TAGS, rng.randint(0, 3)),
        "stock": rng.random() < 0.5,
    }


def _person(rng: random.Random) -> dict[str, object]:
    name = rng.choice(NAMES)
    return {
        "id": rng.randrange(100_000),
        "name": name,
        "email": f"{name}{rng.randrange(100)}@example.org",
        "city": rng.choice(CITIES),
        "age": rng.randint(18, 90),
    }


def _reading(rng: random.Random) -> dict[str, object]:
    return {
        "time": f"20{rng.randint(10, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        f"T{rng.randrange(24):02}:{rng.randrange(60):02}",
        "sensor": f"{rng.choice('abc')}-{rng.randrange(20)}",
        "value": rng.randrange(-200, 400) / 10,
        "unit": "C",
        "ok": rng.random() < 0.9,
    }


def _lines(make: Callable[[random.Random], str], rng: random.Random) -> str:
    parts, length = [], 0
    while length < GENERATED_CHARACTERS:
        parts.append(make(rng))
        length += len(parts[-1])
    return "".join(parts)


def user_texts(paths: Iterable[str | Path], taken: Iterable[str]) -> dict[str, str]:
    """The user's text, one domain per file or folder, name -> text in the order given.

    A file's domain is named by its stem, a folder's by its name; a name that is taken gets -2, -3, ...
    A folder gives its text files, recursively and in sorted order; hidden, binary and empty ones are
    passed over, and links to folders are not followed. Text is UTF-8; line ends become newlines.

    Args:
        paths: files and folders; ~ stands for the home folder.
        taken: names that are in use already.

    Raises:
        ValueError: a path is missing, neither file nor folder, cannot be read, has no text, is binary, or
            holds more than MAX_DOMAIN_BYTES. One line that names it.
    """
    texts: dict[str, str] = {}
    used = set(taken)
    for given in paths:
        path = Path(os.path.expanduser(given))  # noqa: PTH111 (Path's raises for a name without a home)
        try:
            name = _unused(_domain_name(path), used)
            texts[name] = _read_folder(path) if path.is_dir() else _read_file(path)
        except OSError as error:
            failed = str(error.filename or path)
            raise ValueError(f"corpus {failed!r} cannot be read: {error.strerror}") from None
        used.add(name)
    return texts


def _domain_name(path: Path) -> str:
    # "." and ".." name their folder only once resolved.
    named = path if path.name not in ("", "..") else path.resolve()
    name = (named.name if path.is_dir() else named.stem) or "corpus"
    # A file name need not be UTF-8, and a domain's name is stored as text.
    return name.encode("utf-8", "replace").decode()


def _unused(stem: str, used: set[str]) -> str:
    name, number = stem, 2
    while name in used:
        name, number = f"{stem}-{number}", number + 1
    return name


def _read_file(path: Path) -> str:
    if not path.exists():
        raise ValueError(f"corpus {str(path)!r} does not exist")
    if not path.is_file():
        raise ValueError(f"corpus {str(path)!r} is neither a file nor a folder")
    text = decode_text(_read_bytes(path, MAX_DOMAIN_BYTES, path))
    if text is None:
        raise ValueError(f"corpus {str(path)!r} is binary or not UTF-8 text")
    if not text.strip():
        raise ValueError(f"corpus {str(path)!r} is empty")
    return text


def _read_folder(folder: Path) -> str:
    texts, left = [], MAX_DOMAIN_BYTES
    for file in _visible_files(folder):
        data = _read_bytes(file, left, folder)
        text = decode_text(data)
        if text is not None and text.strip():
            texts.append(text)
            left -= len(data)
    if not texts:
        raise ValueError(f"corpus folder {str(folder)!r} has no text files (hidden and binary ones do not count)")
    return "\n".join(texts)


def _visible_files(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    # os.walk and not Path.rglob: it can leave out hidden folders before it enters them.
    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            file = Path(parent, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _read_bytes(path: Path, limit: int, named: Path) -> bytes:
    """The file, or only its beginning where that shows that it is binary."""
    with path.open("rb") as file:
        data = file.read(8192)
        if b"\0" not in data:
            data += file.read(limit)
    if len(data) > limit:
        raise ValueError(f"corpus {str(named)!r} has more than {MAX_DOMAIN_BYTES >> 20} MiB of text: use a part")
    return data


def decode_text(data: bytes) -> str | None:
    """UTF-8 text with plain newlines and without a byte order mark; None where it is no text."""
    if b"\0" in data:
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n")
