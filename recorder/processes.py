"""Which rank this process is, and how the ranks of one launch find the run that their rank 0 has opened.

A run folder may hold the `run.json` of an earlier launch, killed or finished. A rank above 0 must not join that one, so
each launch marks the manifest with an id of its own (`launch` in run.json). Where torch.distributed is initialised,
rank 0 draws a random id and hands it out through the key-value store that the ranks have met in: no collective, so
nobody waits in a barrier, and no other launch can know it. Without torch.distributed the id is made from the host and
from what a launcher puts into the environment; that need not be unique, so then rank 0 must also be seen alive, or have
closed the run since this process began.

Nothing here imports torch: it is looked up where the training script has imported it.
"""

import hashlib
import json
import os
import platform
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from recorder import checks
from recorder.manifest import RunExistsError, RunNotFoundError, RunUnreadableError

_LAUNCH_VARIABLES = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)
_ERRORS = {kind.__name__: kind for kind in (RunExistsError, RunNotFoundError, RunUnreadableError, ValueError)}
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.25

Result = TypeVar("Result")


def this_rank(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """(rank, world size) of this process: as given, or else as found out.

    From torch.distributed where it is initialised, else from RANK and WORLD_SIZE as torchrun sets them, else (0, 1).

    Raises:
        ValueError: one given without the other, or a rank outside its world.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together, got rank={rank} and world_size={world_size}")
    if rank is not None and world_size is not None:
        if checks.whole("rank", rank) >= checks.whole("world_size", world_size, least=1):
            raise ValueError(f"rank must be at least 0 and below world_size={world_size}, got {rank}")
        return int(rank), int(world_size)
    distributed = _distributed()
    if distributed is not None:
        return distributed.get_rank(), distributed.get_world_size()
    texts = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if None in texts:
        return 0, 1
    try:
        found, size = (int(text or "") for text in texts)
    except ValueError:
        found, size = -1, 0
    if not 0 <= found < size:
        raise ValueError(f"the environment says RANK={texts[0]} and WORLD_SIZE={texts[1]}, which is no rank of a world")
    return found, size


def environment_launch() -> str:
    """What host and environment tell of this launch, the same on all its ranks; another launch may have it too."""
    told = "\0".join([platform.node(), *(os.environ.get(name, "") for name in _LAUNCH_VARIABLES)])
    return "env-" + hashlib.sha256(told.encode()).hexdigest()[:24]


def wait_for(look: Callable[[], Result | None], seconds: float) -> Result | None:
    """What `look` returns once it is not None; None when `seconds` have passed. Looks at least once."""
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE_S
    while True:
        found = look()
        if found is not None or time.monotonic() >= deadline:
            return found
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _LONGEST_PAUSE_S)


class Meeting:
    """Where the recorders of one launch meet before they open a run together: the store of torch.distributed.

    Every message is read once and then gone, so that a second recorder on the same path finds none of the first's.

    Args:
        store: a `torch.distributed.Store`.
        path: of the run, as all ranks spell it.
        rank, world_size: of this recorder.
        seconds: how long to wait for other ranks.
    """

    def __init__(self, store: Any, path: str, rank: int, world_size: int, seconds: float) -> None:
        self._store = store
        self._path = path
        self._prefix = f"routescope/{hashlib.sha256(path.encode()).hexdigest()[:24]}"
        self._rank = rank
        self._world_size = world_size
        self._seconds = seconds

    def gather(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """On rank 0, once all ranks have called this: what each of them gave, in order. Elsewhere an empty list.

        Raises:
            TimeoutError: naming the ranks that gave nothing in time.
        """
        if self._rank:
            self._put(f"share/{self._rank}", dict(mine))
            return []
        given = {0: dict(mine)}

        def look() -> bool | None:
            for rank in range(1, self._world_size):
                if rank not in given and (message := self._take(f"share/{rank}")) is not None:
                    given[rank] = message
            return True if len(given) == self._world_size else None

        if wait_for(look, self._seconds) is None:
            silent = ", ".join(str(rank) for rank in range(self._world_size) if rank not in given)
            raise TimeoutError(
                f"rank 0 waited {self._seconds:g} s for the recorders of all {self._world_size} ranks at {self._path}; "
                f"none came from rank {silent}"
            )
        return [given[rank] for rank in range(self._world_size)]

    def announce(self, launch: str, plans: list[Any] | None = None) -> None:
        """On rank 0, after it has opened the run: tell the others its launch id, and each its plan."""
        for rank in range(1, self._world_size):
            self._put(f"answer/{rank}", {"launch": launch, "plan": plans[rank] if plans else None})

    def decline(self, error: BaseException) -> None:
        """On rank 0, when it could not open the run: the others need not wait for it."""
        message = {"error": str(error), "kind": type(error).__name__}
        for rank in range(1, self._world_size):
            self._put(f"answer/{rank}", message)

    def answer(self) -> tuple[str, Any]:
        """On the other ranks: rank 0's launch id and this rank's plan.

        Raises:
            RunNotFoundError: nothing came in time.
            RunExistsError, RunUnreadableError, ValueError, RuntimeError: why rank 0 could not open the run.
        """
        message = wait_for(lambda: self._take(f"answer/{self._rank}"), self._seconds)
        if message is None:
            raise RunNotFoundError(
                f"rank {self._rank} waited {self._seconds:g} s for rank 0 to open the run at {self._path}; "
                "every rank must build its recorder, with the same `out`"
            )
        if "error" in message:
            raise _ERRORS.get(message["kind"], RuntimeError)(f"rank 0 could not open the run: {message['error']}")
        return message["launch"], message["plan"]

    def _put(self, name: str, message: dict[str, Any]) -> None:
        self._store.set(f"{self._prefix}/{name}", json.dumps(message))

    def _take(self, name: str) -> dict[str, Any] | None:
        key = f"{self._prefix}/{name}"
        if not self._store.check([key]):
            return None
        message: dict[str, Any] = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return message


def meeting(path: str, rank: int, world_size: int, seconds: float) -> Meeting | None:
    """The place where the ranks' recorders meet; None for one rank alone, or without torch.distributed."""
    distributed = _distributed()
    if world_size == 1 or distributed is None:
        return None
    store = distributed.distributed_c10d._get_default_store()
    return None if store is None else Meeting(store, path, rank, world_size, seconds)  # MPI has none


def new_launch() -> str:
    """An id that no other launch has."""
    return uuid.uuid4().hex


def _distributed() -> Any:
    """torch.distributed where the script has initialised it, else None; never imported from here."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed and distributed.is_available() and distributed.is_initialized() else None
