"""One thread for each process of the suite: at the sizes tested here more are no faster, and on a busy machine they
wait for each other, many times as slow. Set before torch is loaded; child processes inherit it."""

import gc
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "support"))  # shared by the tests of recorder and app
os.environ.setdefault("OMP_NUM_THREADS", "1")

# how long an example takes is no property of ours on a shared machine
settings.register_profile("routescope", deadline=None)
settings.load_profile("routescope")

LONG = ("test_docs.py", "test_torchrun.py")  # they come late by their names, and one worker would end alone with them


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: the garbage collector need not look at its 600,000 objects again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


_MAIN = sys.modules["__main__"]


@pytest.fixture(autouse=True)
def own_main() -> Iterator[None]:
    """AppTest leaves a page's script behind as `__main__`, which a process that is spawned later would run again."""
    sys.modules["__main__"] = _MAIN
    yield
    sys.modules["__main__"] = _MAIN


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A real S3 server on loopback: moto's, a process of its own, empty at first. Its address."""
    command = Path(sys.executable).with_name("moto_server")
    assert command.exists() or shutil.which("moto_server"), "moto_server comes with the extra `test`"
    with subprocess.Popen(
        [str(command) if command.exists() else "moto_server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as server:
        assert server.stderr is not None
        found = None
        while found is None:
            line = server.stderr.readline()
            assert line, f"moto_server ended with {server.wait()}"
            found = re.search(r"Running on (http://127\.0\.0\.1:\d+)", line)
        # It logs every request: a full pipe would stop it.
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield found[1]
        server.terminate()


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty bucket of that server; the environment says where it is and who asks."""
    import boto3

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"test-{uuid.uuid4().hex[:12]}"
    boto3.client("s3", endpoint_url=s3_endpoint).create_bucket(Bucket=bucket)
    return f"s3://{bucket}"


class Wire:
    """A wire to a server that can be cut: while `down`, every connection ends at once. With `bytes_left` it goes down
    by itself, once so much has been sent to the server."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._down = False
        self.bytes_left: int | None = None
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def down(self) -> bool:
        return self._down

    @down.setter
    def down(self, down: bool) -> None:
        self._down = down
        if down:
            for end in list(self._open):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.down = True
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self._down:
                    near.close()
                    continue
                far = socket.create_connection(self._target)
                self._open |= {near, far}
                for source, sink, sending in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pass_on, args=(source, sink, sending), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, sending: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if sending and self.bytes_left is not None:
                    self.bytes_left -= len(data)
                    if self.bytes_left < 0:
                        self.down = True
                        break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open -= {source, sink}


@pytest.fixture
def wire(s3_endpoint: str) -> Iterator[Wire]:
    """A wire to the S3 server, to be cut: give its `address` as endpoint_override."""
    made = Wire(s3_endpoint)
    yield made
    made.close()
