"""A prefix or object in an object store, through pyarrow.fs, that reads like a pathlib.Path."""

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

#: For a store that does not answer: a connection, then the first byte, each tried this often.
_CONNECT_S = 5.0
_ANSWER_S = 10.0
_ATTEMPTS = 3

#: Stores that put an object at once or not at all; others (HDFS, say) get a temporary name and a rename.
_WHOLE_PUTS = ("s3", "gcs", "abfs")
_S3_TEXTS = ("region", "scheme", "endpoint_override", "tls_ca_file_path")
_S3_FLAGS = (
    "allow_bucket_creation",
    "allow_bucket_deletion",
    "check_directory_existence_before_creation",
    "force_virtual_addressing",
)
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


class StorageError(OSError):
    """An object store could not be reached or refused; one line that names the URI. Trying again later may help."""


class Entry(NamedTuple):
    """What a listing tells of one object or prefix."""

    is_file: bool
    size: int
    mtime_ns: int


def is_uri(text: str) -> bool:
    """Whether the text begins like a URI (s3://...), not like a path."""
    return _URI.match(text) is not None


class ObjectPath:
    """An object, or the prefix of several, in a store. Equal where the URI is; no request is made to build one.

    `str()` gives the URI without any secret in it. Beside the object itself nothing is remembered, except one client
    a store and process.
    """

    def __init__(self, base: str, options: str, key: str, secrets: str = "") -> None:
        self._base = base  # up to and with the bucket: "s3://bucket"
        self._options = options  # the query with its question mark, or ""
        self._key = key  # below the bucket, without slashes around it
        self._secrets = secrets  # "access-key:secret-key@", or ""

    @classmethod
    def of(cls, uri: str) -> Self:
        """The place a URI names: any that `pyarrow.fs.FileSystem.from_uri` takes.

        For s3:// credentials, region and endpoint come from the URI (s3://key:secret@bucket/prefix?region=...,
        ?endpoint_override=http://host:port) or else from the usual AWS_* variables and files; AWS_ENDPOINT_URL too.

        Raises:
            ValueError: no bucket, or an option that is not known.
        """
        scheme, _, rest = uri.partition("://")
        rest, mark, query = rest.partition("?")
        host, _, key = rest.partition("/")
        secrets = ""
        if "@" in host and ":" in host.partition("@")[0]:
            secrets, _, host = host.rpartition("@")
            secrets += "@"
        if scheme.lower() == "s3" and not host:
            raise ValueError(f"{uri} names no bucket; write s3://bucket/prefix")
        key = "/".join(unquote(part) for part in key.split("/") if part)
        if scheme.lower() == "s3":
            _s3_options(uri)
        return cls(f"{scheme.lower()}://{host}", f"{mark}{query}" if query else "", key, secrets)

    def __str__(self) -> str:
        return f"{self._base}/{quote(self._key, safe='/=+:@,;')}".rstrip("/") + self._options

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and (str(self), self._secrets) == (str(other), other._secrets)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return (ObjectPath, (self._base, self._options, self._key, self._secrets))

    def __truediv__(self, name: str) -> "ObjectPath":
        key = "/".join(part for part in (*self._key.split("/"), *name.split("/")) if part)
        return ObjectPath(self._base, self._options, key, self._secrets)

    @property
    def name(self) -> str:
        """The last part; the bucket's name at its root."""
        return self._key.rpartition("/")[2] or self._base.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        """One prefix up; the bucket is its own parent."""
        return ObjectPath(self._base, self._options, self._key.rpartition("/")[0], self._secrets)

    def resolve(self) -> "ObjectPath":
        """Itself: a URI is absolute and an object store has no links."""
        return self

    def exists(self) -> bool:
        """Whether there is an object of this name, or any below it."""
        return self._type() != fs.FileType.NotFound

    def is_dir(self) -> bool:
        """Whether there is any object below it."""
        return self._type() == fs.FileType.Directory

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return self._type() == fs.FileType.File

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Nothing: prefixes come with their objects."""

    def why_not(self) -> str:
        """Of a place that is not there: what is missing, for a message."""
        bucket = ObjectPath(self._base, self._options, "", self._secrets)
        if self._key and not bucket.exists():
            return f"there is no bucket {self._base}"
        return "nothing is stored under it"

    def read_bytes(self) -> bytes:
        """All of the object. Raises FileNotFoundError or StorageError."""
        with self.open() as source:
            return source.read()

    def open(self) -> "_Object":
        """The object as a binary file to be closed; each read fetches its range. Raises as `read_bytes`."""
        return _Object(self)

    def put(self, content: "bytes | pa.Buffer") -> None:
        """Store the object, replacing any of that name: all of it or, where that fails, nothing.

        Raises:
            StorageError: it could not be stored.
        """
        client, path = self._client()
        with self._named():
            if client.type_name in _WHOLE_PUTS:
                _send(client, path, content)
                return
            folder, _, name = path.rpartition("/")
            temporary = f"{folder}/.{name}.{uuid.uuid4().hex}.tmp"
            client.create_dir(folder, recursive=True)
            _send(client, temporary, content)
            client.move(temporary, path)

    def unlink(self) -> None:
        """Delete the object, where it is there."""
        client, path = self._client()
        with self._named():
            try:
                client.delete_file(path)
            except FileNotFoundError:
                return

    def entries(self) -> dict[str, Entry]:
        """Objects and prefixes right below this one, by name, in the store's order."""
        client, path = self._client()
        with self._named():
            found = client.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return {
            info.base_name: Entry(info.type == fs.FileType.File, info.size or 0, info.mtime_ns or 0) for info in found
        }

    def _type(self) -> fs.FileType:
        client, path = self._client()
        with self._named():
            return client.get_file_info([path])[0].type

    def _client(self) -> tuple[fs.FileSystem, str]:
        """The store's client, and this place's path as the client wants it."""
        base = self._base.replace("://", f"://{self._secrets}", 1)
        # A forked child must not go on with the threads and connections of its parent.
        try:
            client, root = _connect(base + self._options, os.getpid())
        except (pa.ArrowException, OSError, ValueError) as error:
            raise StorageError(f"{self}: {_reason(error)}") from None
        return client, f"{root.rstrip('/')}/{self._key}" if self._key else root

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the client as one line that names the URI."""
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no {self}") from None
        except (pa.ArrowException, OSError) as error:
            raise StorageError(f"{self}: {_reason(error)}") from None


class _Object:
    """An object opened for reading. A Python file around pyarrow's own, so that a failure of the store stays a
    `StorageError` through the Parquet reader, and is not taken for a damaged file."""

    def __init__(self, place: ObjectPath) -> None:
        client, path = place._client()
        self._place = place
        with place._named():
            self._file = client.open_input_file(path)

    def read(self, size: int = -1) -> bytes:
        with self._place._named():
            data: bytes = self._file.read(None if size is None or size < 0 else size)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        place: int = self._file.seek(offset, whence)
        return place

    def tell(self) -> int:
        place: int = self._file.tell()
        return place

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def flush(self) -> None:
        """Nothing to write."""

    @property
    def closed(self) -> bool:
        closed: bool = self._file.closed
        return closed

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _send(client: fs.FileSystem, path: str, content: "bytes | pa.Buffer") -> None:
    # No `with`: on an exception its exit would finish an upload of what had been written so far. All of it goes in
    # one call; where that fails, the client knows, and finishes nothing.
    stream = client.open_output_stream(path)
    stream.write(content)
    stream.close()


@lru_cache(maxsize=32)
def _connect(uri: str, pid: int) -> tuple[fs.FileSystem, str]:
    """The client for a store and the path of the URI in it; one a store, options and process."""
    if not uri.startswith("s3://"):
        client, path = fs.FileSystem.from_uri(uri)
        return client, path
    parts = urlsplit(uri)
    bucket = parts.netloc.rpartition("@")[2]
    options = _s3_options(uri)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        options.setdefault("endpoint_override", endpoint)
    if region:
        options.setdefault("region", region)
    if "region" not in options and "endpoint_override" not in options:
        options["region"] = fs.resolve_s3_region(bucket)
    if parts.username:
        options |= {"access_key": unquote(parts.username), "secret_key": unquote(parts.password or "")}
    client = fs.S3FileSystem(
        connect_timeout=_CONNECT_S,
        request_timeout=_ANSWER_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        allow_delayed_open=True,  # a small object is one request
        **options,
    )
    return client, bucket


def _s3_options(uri: str) -> dict[str, Any]:
    """What stands behind the question mark of an s3:// URI, as S3FileSystem takes it. Raises ValueError."""
    known = (*_S3_TEXTS, *_S3_FLAGS)
    options: dict[str, Any] = {}
    for name, value in parse_qsl(urlsplit(uri).query, keep_blank_values=True):
        if name not in known:
            raise ValueError(f"{uri}: option {name} is unknown; known are {', '.join(known)}")
        options[name] = value.lower() in ("1", "true") if name in _S3_FLAGS else value
    return options


def _reason(error: BaseException) -> str:
    """The client's message as one line, with what to do where that is known."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r" ?\(Request ID: [^)]*\)", "", text)
    text = re.sub(r"^When .*?: (?=AWS Error)", "", text).rstrip(".")
    for sign, advice in _ADVICE:
        if sign in text:
            return f"{advice} ({text})"
    return text


_ADVICE = (
    ("NETWORK_CONNECTION", "the store cannot be reached; look at the network, the region and endpoint_override"),
    ("NO_SUCH_BUCKET", "there is no such bucket"),
    ("Bucket '", "there is no such bucket"),
    (
        "ACCESS_DENIED",
        "access is denied; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile that may use it",
    ),
    ("INVALID_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID is not one that the store knows"),
    ("SIGNATURE_DOES_NOT_MATCH", "AWS_SECRET_ACCESS_KEY does not go with the key id"),
)
