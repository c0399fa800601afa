"""What the `tokens` table tells of a moment's tokens: sequence, position, token id, domain, text."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recorder import storage
from recorder.analysis.scan import Moment
from recorder.catalog import fill_defaults, first_line
from recorder.parts import Footer, PartFile, read_footer
from recorder.schema import SCHEMAS, conform
from recorder.storage import Place, StorageError

_KEPT_GROUPS = 4
_NO_ID = -1


class TokensError(ValueError):
    """A part of `tokens` cannot be read: `part` is its name."""

    def __init__(self, part: str, error: Exception) -> None:
        self.part = part
        super().__init__(f"tokens/{part}: {first_line(error)}")


@contextmanager
def _reading(part: PartFile) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, StorageError):
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise TokensError(part.name, error) from error


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Of one moment and rank, (T,) each, by token number.

    token_id_T is -1 where none was recorded. domain_T holds indices into `domains`, -1 for none.
    """

    token_T: np.ndarray
    sequence_T: np.ndarray
    position_T: np.ndarray
    token_id_T: np.ndarray
    domain_T: np.ndarray
    domains: Sequence[str]
    text: pa.ChunkedArray

    def of(self, token_T: np.ndarray) -> np.ndarray:
        """Their rows here, (T,); -1 where a token is not known."""
        if np.array_equal(token_T, self.token_T):
            return np.arange(len(token_T))
        places = np.minimum(np.searchsorted(self.token_T, token_T), len(self.token_T) - 1)
        return np.where(self.token_T[places] == token_T, places, -1)

    def token_ids(self, rows: np.ndarray) -> np.ndarray:
        """Token ids of these rows, (T,), -1 for none and where the row is -1; no copy where all are asked for."""
        if np.array_equal(rows, np.arange(len(self.token_id_T))):
            return self.token_id_T
        return np.where(rows >= 0, self.token_id_T[rows], _NO_ID)


class TokenRows:
    """Looks tokens up in part files, a few row groups of which are kept: moments come in the order of the rows.

    Args:
        folder: the folder of `tokens`.
        parts: all that may hold tokens of the moments asked for.

    Raises:
        TokensError: a part cannot be read; later, from `of`, too.
        FileNotFoundError, StorageError: as reading does.
    """

    def __init__(self, folder: Place, parts: Sequence[PartFile]) -> None:
        self._folder = folder
        self._footers: list[tuple[PartFile, Footer]] = []
        for part in parts:
            with _reading(part):
                self._footers.append((part, read_footer(folder / part.name, part.stored)))
        self._kept: OrderedDict[tuple[PartFile, int], pa.Table] = OrderedDict()

    def of(self, moment: Moment) -> dict[int, Tokens]:
        """The tokens of a moment, by rank; none where none were recorded."""
        at = {"step": moment.step, "phase": moment.phase, "segment": moment.segment}
        found = [
            _equal(self._read(part, footer, group), at)
            for part, footer in self._footers
            for group in footer.groups.select(phase=moment.phase, step=moment.step, segment=moment.segment)
        ]
        if not found:
            return {}
        rows = pa.concat_tables(found)
        ranks = rows["rank"].to_numpy()
        if not len(ranks):
            return {}
        if (ranks == ranks[0]).all():
            return {int(ranks[0]): _tokens(rows)}
        return {rank: _tokens(rows.filter(pa.array(ranks == rank))) for rank in np.unique(ranks).tolist()}

    def _read(self, part: PartFile, footer: Footer, group: int) -> pa.Table:
        place = (part, group)
        if place not in self._kept:
            with _reading(part), storage.parquet_file(self._folder / part.name, footer.metadata, part.stored) as file:
                rows = fill_defaults(conform(file.read_row_group(group, use_threads=False), SCHEMAS["tokens"]))
            self._kept[place] = rows
            if len(self._kept) > _KEPT_GROUPS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(place)
        return self._kept[place]


def _equal(rows: pa.Table, at: dict[str, object]) -> pa.Table:
    mask = np.ones(rows.num_rows, dtype=bool)
    for name, value in at.items():
        mask &= pc.equal(rows[name], value).to_numpy()
    return rows if mask.all() else rows.filter(pa.array(mask))


def _tokens(rows: pa.Table) -> Tokens:
    token_T = rows["token"].to_numpy()
    if (token_T[1:] < token_T[:-1]).any():
        order = pa.array(np.argsort(token_T, kind="stable"))
        rows = rows.take(order)
        token_T = rows["token"].to_numpy()
    domain = pc.dictionary_encode(rows["domain"]).combine_chunks()
    return Tokens(
        token_T=token_T.astype(np.int64),
        sequence_T=rows["sequence"].to_numpy(),
        position_T=rows["position"].to_numpy(),
        token_id_T=pc.fill_null(rows["token_id"], _NO_ID).to_numpy().astype(np.int64),
        domain_T=pc.fill_null(domain.indices, -1).to_numpy(),
        domains=domain.dictionary.to_pylist(),
        text=rows["text"],
    )
