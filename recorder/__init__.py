"""Record the routing of a training run as Parquet, and read it back.

Names are loaded on first use: reading runs needs no torch, recording does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hooks import RoutingRecorder
    from .reader import Run, list_runs
    from .writer import RunWriter

_HOME_OF = {"RoutingRecorder": "hooks", "Run": "reader", "RunWriter": "writer", "list_runs": "reader"}
__all__ = ["RoutingRecorder", "Run", "RunWriter", "list_runs"]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
