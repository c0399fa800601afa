"""A thread that works through a queue whose size is bounded in bytes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

_REST_SECONDS = 0.25


class Background:
    """Calls handle(item) for each item put, in order, in one thread of its own.

    It rests between bouts of work: woken for each item it would be in the way of whoever puts them, at the worst time.

    handle: must not raise; if it does, the thread ends and `error` says why. Once it has ended, so or by `close`, items
    are thrown away, and nobody waits for them. idle: called in the thread when nothing has come for `idle_seconds`.
    max_bytes: of the items not yet done with; a larger one has its turn when nothing else is there.
    """

    def __init__(
        self,
        handle: Callable[[Any], None],
        *,
        max_bytes: int,
        idle: Callable[[], object] = lambda: None,
        idle_seconds: float = 1.0,
    ) -> None:
        self.error: BaseException | None = None
        self._handle, self._idle = handle, idle
        self._max_bytes, self._idle_seconds = max_bytes, idle_seconds
        self._items: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        self._busy = False
        self._wanted = 0  # those who wait for it
        self._closing = self._ended = False
        self._changed = threading.Condition()
        # a daemon: a script that ends without closing its recorder ends all the same
        self._thread = threading.Thread(target=self._run, name="routescope-recorder", daemon=True)
        self._thread.start()

    def put(self, item: Any, nbytes: int, *, wait: bool = True) -> bool:
        """Queue the item. False where there is no room for it and `wait` is off; else waits for room."""
        with self._changed:
            # what takes no room never waits: the thread itself puts such items
            while nbytes and self._pending and self._bytes + nbytes > self._max_bytes and not self._ended:
                if not wait:
                    return False
                self._await()
            if not self._ended:
                self._items.append((item, nbytes))
                self._bytes += nbytes
                if self._bytes > self._max_bytes // 2:
                    self._changed.notify_all()
            return True

    def drain(self) -> None:
        """Return once everything put so far is done with."""
        with self._changed:
            while self._pending and not self._ended:
                self._await()

    def close(self) -> None:
        """Work through what is left and end the thread. May be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def _pending(self) -> bool:
        return bool(self._items) or self._busy

    def _await(self) -> None:
        """Have the thread work, and wait for news of it."""
        self._wanted += 1
        self._changed.notify_all()
        self._changed.wait()
        self._wanted -= 1

    def _rest(self) -> None:
        """Wait for a good reason to work: somebody waits, much is there, or some of it has waited long enough."""
        rested_at = time.monotonic() + min(_REST_SECONDS, self._idle_seconds)
        while not (self._closing or (self._pending and (self._wanted or self._bytes > self._max_bytes // 2))):
            left = rested_at - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(left)

    def _run(self) -> None:
        try:
            idle_at = time.monotonic() + self._idle_seconds
            while True:
                with self._changed:
                    self._rest()
                    if not self._items and self._closing:
                        self._ended = True
                        self._changed.notify_all()
                        return
                while self._items:
                    with self._changed:
                        item, nbytes = self._items.popleft()
                        self._busy = True
                    self._handle(item)
                    del item
                    with self._changed:
                        self._bytes -= nbytes
                        self._busy = False
                        if self._wanted:
                            self._changed.notify_all()
                    idle_at = time.monotonic() + self._idle_seconds
                if time.monotonic() >= idle_at:
                    self._idle()
                    idle_at = time.monotonic() + self._idle_seconds
        except BaseException as error:
            with self._changed:
                self.error, self._ended = error, True
                self._items.clear()
                self._bytes, self._busy = 0, False
                self._changed.notify_all()
