"""Rows of several segments and ranks brought together: a later segment wins, ranks add up."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_STEP_SUMS = ("tokens",)
_STEP_MEANS = ("loss", "ce_loss", "aux_loss", "z_loss", "grad_norm", "learning_rate")
_LAYER_SUMS = ("tokens", "rerouted", "invalid")
_LAYER_MEANS = ("router_entropy", "aux_loss", "z_loss")
_LAYER_LIST_SUMS = ("load", "gate_mass", "dropped")
_LAYER_LIST_MEANS = ("mean_prob",)


def drop_superseded(rows: pa.Table, starts: Mapping[int, int]) -> pa.Table:
    """Without the rows of earlier segments at or after the first step of a later one.

    Args:
        rows: with columns step and segment.
        starts: each segment's first step.
    """
    if len(starts) < 2 or not rows.num_rows:
        return rows
    keep = kept_rows(rows["step"].to_numpy(), rows["segment"].to_numpy(), starts)
    return rows if keep.all() else rows.filter(pa.array(keep))


def kept_rows(steps: np.ndarray, segments: np.ndarray, starts: Mapping[int, int]) -> np.ndarray:
    """Which of these (step, segment) pairs no later segment has replaced, bool."""
    keep = np.ones(len(steps), dtype=bool)
    for segment, start in starts.items():
        keep &= (segments >= segment) | (steps < start)
    return keep


def sort_rows(rows: pa.Table, *columns: str) -> pa.Table:
    """Rows in ascending order of these columns; equal ones keep their order."""
    order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in columns])
    as_it_is = np.array_equal(order.to_numpy(), np.arange(len(order)))  # mostly so, and to move lists takes long
    return (rows if as_it_is else rows.take(order)).combine_chunks()


def merge_step_ranks(rows: pa.Table) -> pa.Table:
    """`steps` rows of several ranks as one row a step and phase.

    Tokens are summed; losses, grad_norm and learning_rate are means weighted by tokens over the ranks that
    recorded them (a value that all agree on stays to the last bit); wall_time_s is the slowest rank's; any other
    column is the lowest rank's, `rank` too.

    Several rows of one step, phase and rank come from processes that see the same tokens (tensor or pipeline
    parallel). They count as one: the greatest number of tokens, the longest time, and of every other column the
    first value that is there.
    """
    rows = _one_row_a_share(sort_rows(rows, "step", "phase", "rank"))
    starts = _group_starts(rows, ("step", "phase"))
    if len(starts) == rows.num_rows:
        return rows
    weights = _floats(rows["tokens"])
    columns = {name: rows[name].take(pa.array(starts)) for name in rows.column_names}
    for name in _STEP_SUMS:
        columns[name] = _summed(rows[name], starts)
    for name in _STEP_MEANS:
        columns[name] = _mean(rows[name], weights, starts)
    columns["wall_time_s"] = _greatest(rows["wall_time_s"], starts)
    return pa.table(columns).cast(rows.schema)


def _one_row_a_share(rows: pa.Table) -> pa.Table:
    """Sorted `steps` rows with those of one step, phase and rank brought together."""
    starts = _group_starts(rows, ("step", "phase", "rank"))
    if len(starts) == rows.num_rows:
        return rows
    columns = {name: _first(rows[name], starts) for name in rows.column_names}
    for name in ("tokens", "wall_time_s"):
        columns[name] = _greatest(rows[name], starts)
    return pa.table(columns).cast(rows.schema)


def merge_layer_ranks(rows: pa.Table) -> pa.Table:
    """`layer_stats` rows of several ranks as one row a step, phase and router.

    Loads, gate_mass, dropped, tokens, rerouted and invalid are summed; mean_prob, router_entropy, aux_loss and
    z_loss are means weighted by tokens; any other column (expert_bias) is the lowest rank's, `rank` too.
    """
    pieces = []
    # Router by router: the lists of one router are all of one length and make a matrix.
    for router in pc.unique(rows["router"]).to_pylist():
        pieces.append(_merge_router(rows.filter(pc.equal(rows["router"], router))))
    return pa.concat_tables(pieces) if pieces else rows


def incomplete_steps(rows: pa.Table) -> pa.Table:
    """Steps that fewer ranks recorded than others of their segment: columns step, ranks, of_ranks, by step.

    Args:
        rows: of one phase, with columns step, segment and rank.
    """
    pairs = rows.select(["step", "segment", "rank"]).group_by(["step", "segment", "rank"]).aggregate([])
    by_step = sort_rows(pairs.group_by(["step", "segment"]).aggregate([("rank", "count")]), "step", "segment")
    by_segment = pairs.group_by("segment").aggregate([("rank", "count_distinct")])
    expected = dict(zip(*(by_segment[name].to_pylist() for name in ("segment", "rank_count_distinct")), strict=True))
    of_ranks = np.array([expected[segment] for segment in by_step["segment"].to_pylist()], dtype=np.int64)
    found = pa.table({"step": by_step["step"], "ranks": by_step["rank_count"], "of_ranks": of_ranks})
    return found.filter(pc.less(found["ranks"], found["of_ranks"]))


def _merge_router(rows: pa.Table) -> pa.Table:
    rows = sort_rows(rows, "step", "phase", "layer", "rank")
    starts = _group_starts(rows, ("step", "phase", "layer"))
    if len(starts) == rows.num_rows:
        return rows
    weights = _floats(rows["tokens"])
    columns = {name: rows[name].take(pa.array(starts)) for name in rows.column_names}
    for name in _LAYER_SUMS:
        columns[name] = _summed(rows[name], starts)
    for name in _LAYER_MEANS:
        columns[name] = _mean(rows[name], weights, starts)
    for name in _LAYER_LIST_SUMS:
        columns[name] = _lists_summed(rows[name], np.ones(len(weights)), starts, mean=False)
    for name in _LAYER_LIST_MEANS:
        columns[name] = _lists_summed(rows[name], weights, starts, mean=True)
    return pa.table(columns).cast(rows.schema)


def _group_starts(rows: pa.Table, columns: tuple[str, ...]) -> np.ndarray:
    """Row numbers at which a new group of sorted rows starts, int64 (groups,)."""
    new = np.zeros(rows.num_rows, dtype=bool)
    new[:1] = True
    for name in columns:
        values = rows[name].to_numpy()
        new[1:] |= values[1:] != values[:-1]
    return np.flatnonzero(new)


def _floats(column: pa.ChunkedArray) -> np.ndarray:
    """As float64, null as 0."""
    return pc.fill_null(column, 0).cast(pa.float64()).to_numpy()


def _summed(column: pa.ChunkedArray, starts: np.ndarray) -> pa.Array:
    """Sums of the values that are there; null where none is."""
    present = column.is_valid().to_numpy()
    sums = np.add.reduceat(pc.fill_null(column, 0).to_numpy(), starts)
    return pa.array(sums, mask=~np.logical_or.reduceat(present, starts), from_pandas=False)


def _greatest(column: pa.ChunkedArray, starts: np.ndarray) -> pa.Array:
    """The greatest of the values that are there, float64; null where none is."""
    present = column.is_valid().to_numpy()
    greatest = np.maximum.reduceat(np.where(present, _floats(column), -np.inf), starts)
    return pa.array(greatest, mask=~np.logical_or.reduceat(present, starts), from_pandas=False)


def _first(column: pa.ChunkedArray, starts: np.ndarray) -> pa.ChunkedArray:
    """The first value that is there; null where none is."""
    present = column.is_valid().to_numpy()
    places = np.where(present, np.arange(len(present)), len(present))
    first = np.minimum.reduceat(places, starts)
    return column.take(pa.array(first, mask=first == len(present)))


def _mean(column: pa.ChunkedArray, weights: np.ndarray, starts: np.ndarray) -> pa.Array:
    """Weighted means of the values that are there; null where none is. NaN stays NaN."""
    present = column.is_valid().to_numpy()
    share = _shares(np.where(present, weights, 0.0), present, starts)
    # A rank without weight must not turn another's value into NaN (0 * inf).
    terms = np.where(share > 0, _floats(column), 0.0) * share
    means = np.add.reduceat(terms, starts)
    # What every rank logged alike (a learning rate, a global norm) must not come back rounded.
    least = np.minimum.reduceat(np.where(present, _floats(column), np.inf), starts)
    greatest = np.maximum.reduceat(np.where(present, _floats(column), -np.inf), starts)
    means = np.where(least == greatest, least, means)
    return pa.array(means, mask=~np.logical_or.reduceat(present, starts), from_pandas=False)


def _shares(weights: np.ndarray, present: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Each row's share of its group's weight; equal shares of the present rows where all weights are 0."""
    sizes = np.diff([*starts, len(weights)])
    totals = np.repeat(np.add.reduceat(weights, starts), sizes)
    counts = np.repeat(np.add.reduceat(present.astype(np.float64), starts), sizes)
    equal = present / np.maximum(counts, 1.0)
    return np.where(totals > 0, weights / np.where(totals > 0, totals, 1.0), equal)


def _lists_summed(column: pa.ChunkedArray, weights: np.ndarray, starts: np.ndarray, *, mean: bool) -> pa.Array:
    """Sums or weighted means over the ranks of list rows of one length; null where no rank has a list."""
    present = column.is_valid().to_numpy()
    filled = column.drop_null().combine_chunks()
    if not len(filled):
        return pa.nulls(len(starts), column.type)
    values = filled.flatten().to_numpy(zero_copy_only=False)
    if values.size % len(filled):
        raise ValueError(f"ranks disagree about the number of experts: {pc.unique(filled.value_lengths())}")
    whole = np.zeros((len(column), values.size // len(filled)), dtype=values.dtype)
    whole[present] = values.reshape(len(filled), -1)
    if mean:
        share = _shares(np.where(present, weights, 0.0), present, starts)[:, None]
        whole = np.where(share > 0, whole, 0.0) * share
    sums = np.add.reduceat(whole, starts, axis=0)
    has = np.logical_or.reduceat(present, starts)
    lengths = np.where(has, sums.shape[1], 0)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    flat = pa.array(sums[has].reshape(-1), from_pandas=False).cast(column.type.value_type)
    return pa.ListArray.from_arrays(offsets, flat, mask=pa.array(~has))
