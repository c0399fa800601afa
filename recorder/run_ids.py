"""The id of a new run: its folder's name."""

import re
from collections.abc import Callable
from datetime import datetime


def new_run_id(label: str, is_taken: Callable[[str], bool]) -> str:
    """An id made of `label` (a name, or the balancer) and the time, such as "aux-loss-20260131-093000".

    is_taken: says whether a folder or a recording has that id already; then a number is put behind it.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:40] or "run"
    first = f"{slug}-{datetime.now():%Y%m%d-%H%M%S}"
    run_id, number = first, 2
    while is_taken(run_id):
        run_id, number = f"{first}-{number}", number + 1
    return run_id
