"""How many ranks the numbers of a run come from, in one line."""

import pandas as pd

from app.words import count
from recorder.reader import Run


def ranks_line(run: Run, incomplete: pd.DataFrame) -> str | None:
    """What a reader of the loads must know of the ranks; None for a run of one.

    incomplete  `run.incomplete_steps()`: a load that falls there is no real fall
    """
    world_size = run.manifest.get("world_size")
    told = world_size if isinstance(world_size, int) else 1
    if max(run.ranks, told) < 2:
        return None
    if run.ranks < told:
        return f"Rows of {run.ranks} of {count(told, 'rank')}: loads are of the tokens that these saw."
    line = f"Rows of {count(run.ranks, 'rank')}, added up."
    if not len(incomplete):
        return line
    first, last = int(incomplete["step"].iloc[0]), int(incomplete["step"].iloc[-1])
    fewest = incomplete.sort_values("ranks", kind="stable").iloc[0]
    where = f"Step {first:,} has" if first == last else f"Of steps {first:,} to {last:,}, {len(incomplete):,} have"
    so_far = " so far" if run.status == "running" else ""
    of_ranks = f"{int(fewest['ranks'])} of {int(fewest['of_ranks'])} data-parallel ranks"
    return f"{line} {where} rows of only {of_ranks}{so_far}: a load that falls there is no real fall."
