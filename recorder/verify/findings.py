"""What a verification found: one line a file and fault, however many rows show it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from recorder.schema import PHASES


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One fault of one file; `file` is relative to the run's folder."""

    file: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.text}"


@dataclass
class Findings:
    """Owns the faults found so far: by file and fault, how many rows show it and where the first one is."""

    _found: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)

    def add(self, file: str, fault: str) -> None:
        """A fault of the file as a whole."""
        self._found.setdefault((file, fault), (0, ""))

    def add_rows(self, file: str, fault: str, rows: pd.DataFrame, wrong: np.ndarray | None = None) -> None:
        """A fault of those `rows` that are `wrong` (bool, one a row; None = all), named by their key columns."""
        if wrong is not None:
            rows = rows.loc[wrong]
        if len(rows):
            count, first = self._found.get((file, fault), (0, place_of(rows.iloc[0])))
            self._found[file, fault] = (count + len(rows), first)

    def update(self, other: "Findings") -> None:
        """Take over what another one found."""
        self._found |= other._found

    def problems(self, order: Iterable[str]) -> tuple[Problem, ...]:
        """All of them, by the first part of the file's name in this order."""
        places = list(order)
        known = sorted(self._found.items(), key=lambda item: places.index(item[0][0].split("/")[0]))
        return tuple(Problem(file=file, text=_line(fault, *where)) for (file, fault), where in known)


def place_of(row: "pd.Series[int]") -> str:
    """The key columns of a row in words; rank and segment only where they are not 0."""
    words = [f"step {row['step']}"]
    if 0 <= row["phase"] < len(PHASES):
        words.append(PHASES[row["phase"]])
    if "router" in row.index:
        words.append(f"router {row['router']}")
    words += [f"{name} {row[name]}" for name in ("rank", "segment") if row[name]]
    if "token" in row.index:
        words.append(f"token {row['token']}")
    return ", ".join(words)


def _line(fault: str, count: int, first: str) -> str:
    if not count:
        return fault
    return f"{fault} ({first})" if count == 1 else f"{fault} ({count} times, first at {first})"
