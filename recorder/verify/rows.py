"""Checks within one batch of rows, and the digest of it that the checks across parts need.

A digest is a frame of one row a step, phase, rank and segment (and router): some dozen numbers, however many tokens.
Sets of token numbers and vectors of loads are compared by *prints*: sums, modulo 2^64, of a hash of each member. Two
parts of one set have prints that add up to the whole's, and sets that differ have the same one by a chance of 2^-64.

Shapes: N rows, E experts, K choices a token.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from recorder.schema import PHASES, SCHEMAS
from recorder.verify.expected import Expected
from recorder.verify.findings import Findings

#: What names a row of `steps`; rows of the other tables have further columns in their key.
KEYS = ["rank", "segment", "phase", "step"]
_LISTS = ("load", "gate_mass", "mean_prob", "expert_bias", "dropped")


@dataclass
class Checker:
    """Checks the rows of one table, batch by batch, and says what is wrong by the part's name."""

    table: str
    expected: Expected
    findings: Findings

    def digest(self, rows: pa.Table, part: str) -> pd.DataFrame:
        """Check one batch of a part; its digest has the columns `KEYS` and what the table adds."""
        file = f"{self.table}/{part}"
        rows = self._prepared(rows, file)
        keys = self._keys(rows)
        wrong_phase = (keys["phase"] < 0).to_numpy()
        self.findings.add_rows(file, f"phase is none of {', '.join(PHASES)}", keys, wrong_phase)
        self.findings.add_rows(file, "step is below 0", keys, (keys["step"] < 0).to_numpy())
        late = (keys["segment"] > self.expected.segment).to_numpy()
        self.findings.add_rows(file, f"segment is above run.json's {self.expected.segment}", keys, late)
        if "layer" in rows.column_names and "router" in keys:
            self._check_layers(rows, keys, file)
        if self.table == "steps":
            return keys.assign(tokens=_whole(rows, "tokens", -1))
        if self.table == "layer_stats":
            return self._digest_stats(rows, keys, file)
        if self.table == "decisions":
            return self._digest_decisions(rows, keys, file)
        if self.table == "tokens":
            self._check_domains(rows, keys, file)
            return self._blocks(keys.assign(token=_whole(rows, "token", -1)), file)
        return keys

    def _prepared(self, rows: pa.Table, file: str) -> pa.Table:
        for field in SCHEMAS[self.table]:
            if field.name in rows.column_names and pa.types.is_null(rows[field.name].type):  # a writer that had none
                rows = rows.set_column(
                    rows.column_names.index(field.name), field.name, rows[field.name].cast(field.type)
                )
        needed = [name for name in ("step", "layer", "token", "load", "experts") if name in rows.column_names]
        for name in needed:
            if rows[name].null_count:
                self.findings.add(file, f"{rows[name].null_count} rows have no {name}")
                rows = rows.filter(rows[name].is_valid())
        return rows.combine_chunks()

    def _keys(self, rows: pa.Table) -> pd.DataFrame:
        columns = {name: _whole(rows, name, 0) for name in ("rank", "segment")}
        if "phase" in rows.column_names:
            phases = pc.index_in(rows["phase"].cast(pa.string()).fill_null("train"), pa.array(PHASES))
            columns["phase"] = phases.fill_null(-1).to_numpy().astype(np.int64)
        else:
            columns["phase"] = np.full(rows.num_rows, PHASES.index("train"))
        columns["step"] = _whole(rows, "step", -1)
        if self.table in ("layer_stats", "decisions"):
            columns["router"] = self.expected.routers(rows)
        return pd.DataFrame(columns)

    def _check_layers(self, rows: pa.Table, keys: pd.DataFrame, file: str) -> None:
        if not self.expected.layer_of:
            return
        layers = self.expected.by_router(
            {r: at + 1 for r, at in self.expected.layer_of.items()}, keys["router"].to_numpy()
        )
        unknown = layers == 0
        self.findings.add_rows(file, "router is none of run.json's", keys, unknown)
        other = ~unknown & (_whole(rows, "layer", -1) != layers - 1)
        self.findings.add_rows(file, "layer is not the one that run.json gives the router", keys, other)

    def _digest_stats(self, rows: pa.Table, keys: pd.DataFrame, file: str) -> pd.DataFrame:
        expected, routers = self.expected, keys["router"].to_numpy()
        load = _Lists(rows["load"])
        for router in np.unique(routers).tolist():
            if router not in expected.experts and (routers == router).any():
                expected.experts[router] = int(load.lengths[routers == router][0])
        num_experts = expected.by_router(expected.experts, routers)
        for name in _LISTS:
            if name in rows.column_names:
                column = rows[name]
                lengths = load.lengths if name == "load" else _lengths(column)
                wrong = (lengths != num_experts) & column.is_valid().to_numpy()
                self.findings.add_rows(file, f"{name} has another number of experts than its router", keys, wrong)
        self.findings.add_rows(file, "load is negative or not a number", keys, load.any(~(load.values >= 0)))
        tokens, sums = _whole(rows, "tokens", -1), load.sums()
        top_k = expected.by_router(expected.top_k, routers)
        # Under expert choice each expert takes as many tokens as the next, which need not come to k a token.
        tolerance = 0 if sums.dtype == np.int64 else 1e-6 * sums  # another writer's fractions
        off = np.abs(sums - tokens * top_k) > tolerance
        wrong = (tokens >= 0) & (top_k > 0) & off & ~load.flat()
        if "dropped" in rows.column_names:
            dropped = _Lists(rows["dropped"])
            same = dropped.lengths == load.lengths
            over = same & (dropped.sums() > sums)
            self.findings.add_rows(file, "dropped is more than load", keys, over)
        return keys.assign(
            tokens=tokens,
            invalid=_whole(rows, "invalid", 0),
            load_print=load.prints(),
            whole=load.whole(),
            wrong_sum=wrong,
        )

    def _digest_decisions(self, rows: pa.Table, keys: pd.DataFrame, file: str) -> pd.DataFrame:
        routers = keys["router"].to_numpy()
        keys = keys.assign(token=_whole(rows, "token", -1))
        ids_NK, lengths = _ids(rows["experts"])
        num_experts = self.expected.by_router(self.expected.experts, routers)
        limit = np.where(num_experts > 0, num_experts, np.iinfo(np.int64).max)[:, None]
        outside = np.any((ids_NK < -1) | (ids_NK >= limit), axis=1)
        self.findings.add_rows(file, "expert id is out of range", keys, outside)
        sorted_NK = np.sort(ids_NK, axis=1)
        twice = np.any((sorted_NK[:, 1:] == sorted_NK[:, :-1]) & (sorted_NK[:, 1:] >= 0), axis=1)
        self.findings.add_rows(file, "the same expert is chosen twice for a token", keys, twice)
        for name in ("weights", "kept"):
            if name in rows.column_names:
                wrong = (_lengths(rows[name]) != lengths) & rows[name].is_valid().to_numpy()
                self.findings.add_rows(file, f"{name} and experts are of different lengths", keys, wrong)
        prints = np.where(ids_NK >= 0, _hash(ids_NK), np.uint64(0)).sum(axis=1, dtype=np.uint64)
        choices = (ids_NK >= 0).sum(axis=1)
        top_k = self.expected.by_router(self.expected.top_k, routers)
        odd = (top_k > 0) & (choices > 0) & (choices != top_k)
        few, many = np.where(choices > 0, choices, np.iinfo(np.int64).max), choices
        extra: dict[str, tuple[np.ndarray, np.ufunc]] = {
            "load_print": (prints, np.add),
            "odd": (odd.astype(np.int64), np.add),
            "few": (few, np.minimum),
            "many": (many, np.maximum),
        }
        return self._blocks(keys, file, **extra)

    def _check_domains(self, rows: pa.Table, keys: pd.DataFrame, file: str) -> None:
        domains = self.expected.manifest.get("domains")
        if domains and "domain" in rows.column_names:
            column = rows["domain"].cast(pa.string())
            known = pc.or_(pc.is_in(column, pa.array(domains)), column.is_null())
            self.findings.add_rows(file, "domain is none of run.json's", keys, ~known.to_numpy())
        private = self.expected.recorded.get("text") is False and self.expected.closed
        if private and "text" in rows.column_names and rows["text"].null_count < rows.num_rows:
            self.findings.add(file, "holds text, which run.json says was not recorded")

    def _blocks(self, keys: pd.DataFrame, file: str, **extra: tuple[np.ndarray, np.ufunc]) -> pd.DataFrame:
        """Rows of one key as one row: how many, the print, least and greatest of their tokens, and `extra` reduced."""
        names = [name for name in keys.columns if name != "token"]
        order = _order(keys, names)
        if order is not None:
            keys = keys.iloc[order].reset_index(drop=True)
            extra = {name: (values[order], reduce) for name, (values, reduce) in extra.items()}
        starts = _starts(keys, names)
        tokens = keys["token"].to_numpy()
        if len(starts):
            self.findings.add_rows(file, "rows are there twice", keys, _repeated(tokens, starts))
        extra |= {"low": (tokens, np.minimum), "high": (tokens, np.maximum), "token_print": (_hash(tokens), np.add)}
        reduced = {
            name: reduce.reduceat(values, starts) if len(starts) else values for name, (values, reduce) in extra.items()
        }
        blocks = keys.iloc[starts][names].reset_index(drop=True)
        return blocks.assign(count=np.diff(np.append(starts, len(keys))), **reduced)


class _Lists:
    """A list column's rows over one flat array; null rows are empty."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.lengths = _lengths(column)
        values = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
        self.values = values.astype(np.int64 if values.dtype.kind in "iu" else np.float64)
        self._stops = np.cumsum(self.lengths)
        self._starts = self._stops - self.lengths

    def sums(self) -> np.ndarray:
        """Sum of each row, (N,); what is no number counts as 0."""
        return self._per_row(np.nan_to_num(self.values))

    def prints(self) -> np.ndarray:
        """Print of each row's counts, uint64 (N,): sum over experts of count times the expert's hash."""
        positions = np.arange(len(self.values)) - np.repeat(self._starts, self.lengths)
        counts = np.nan_to_num(self.values).astype(np.int64).astype(np.uint64)
        return self._per_row(counts * _hash(positions))

    def whole(self) -> np.ndarray:
        """Whether a row holds whole numbers only, bool (N,)."""
        if self.values.dtype == np.int64:
            return np.ones(len(self.lengths), dtype=bool)
        return ~self.any(self.values != np.floor(self.values))

    def any(self, wrong: np.ndarray) -> np.ndarray:
        """Whether any of a row's values is `wrong`, bool (N,)."""
        return self._per_row(wrong.astype(np.int64)) > 0

    def flat(self) -> np.ndarray:
        """Whether a row's values are all the same, bool (N,)."""
        same = np.ones(len(self.values), dtype=bool)
        same[1:] = self.values[1:] == self.values[:-1]
        same[self._starts[self.lengths > 0]] = True
        return ~self.any(~same)

    def _per_row(self, values: np.ndarray) -> np.ndarray:
        sums = np.concatenate([np.zeros(1, dtype=values.dtype), np.cumsum(values, dtype=values.dtype)])
        return sums[self._stops] - sums[self._starts]


def _whole(rows: pa.Table, name: str, missing: int) -> np.ndarray:
    """A column of whole numbers, int64; `missing` where there is none."""
    if name not in rows.column_names:
        return np.full(rows.num_rows, missing, dtype=np.int64)
    return rows[name].fill_null(missing).to_numpy().astype(np.int64)


def _lengths(column: pa.ChunkedArray) -> np.ndarray:
    return pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)


def _ids(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Ids as a matrix, -1 after the end of shorter rows, int64 (N, K); and each row's own length."""
    lengths = _lengths(column)
    width = int(lengths.max(initial=1))
    values = column.combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    if len(values) == len(lengths) * width:
        return values.reshape(len(lengths), width), lengths
    matrix = np.full((len(lengths), width), -1, dtype=np.int64)
    matrix[np.arange(width) < lengths[:, None]] = values
    return matrix, lengths


def _order(keys: pd.DataFrame, names: list[str]) -> np.ndarray | None:
    """The order that brings rows of one key together; None where they are already."""
    starts = _starts(keys, names)
    if not keys.iloc[starts].duplicated(names).any():
        return None
    return np.lexsort([keys[name].to_numpy() for name in names])


def _starts(keys: pd.DataFrame, names: list[str]) -> np.ndarray:
    """Row numbers at which another key than before begins."""
    new = np.zeros(len(keys), dtype=bool)
    new[:1] = True
    for name in names:
        values = keys[name].to_numpy()
        new[1:] |= values[1:] != values[:-1]
    return np.flatnonzero(new)


def _repeated(tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Which rows have a token that an earlier row of the same block has, bool (N,)."""
    repeated = np.zeros(len(tokens), dtype=bool)
    rising = tokens[1:] > tokens[:-1]
    rising[starts[1:] - 1] = True
    if rising.all():
        return repeated
    block = np.repeat(np.arange(len(starts)), np.diff([*starts, len(tokens)]))
    order = np.lexsort([tokens, block])
    same = (tokens[order][1:] == tokens[order][:-1]) & (block[order][1:] == block[order][:-1])
    repeated[order[1:][same]] = True
    return repeated


def _hash(numbers: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 over each number, uint64 (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
