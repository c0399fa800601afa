"""Memory that is free, handed back to the system.

NumPy's and Arrow's allocators keep what is freed, in parts that larger arrays do not fit into: without this a process
grows to several times of what it holds at once, and a server stays so large.
"""

import ctypes
import sys
from collections.abc import Callable

import pyarrow as pa


def give_back() -> None:
    """Hand back what is free; some milliseconds, so for now and then."""
    pa.default_memory_pool().release_unused()
    _trim(0)


def _find_trim() -> Callable[[int], object]:
    """The C library's `malloc_trim`, which GNU's has; Arrow's pool of the system does not call it."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    found: Callable[[int], object] = getattr(libc, "malloc_trim", lambda _: None)
    return found


_trim = _find_trim()
