"""SGLang's expert-distribution dumps, `expert_distribution_recorder_*.pt`.

Source: sgl-project/sglang, python/sglang/srt/eplb/expert_distribution.py at 02295fe5 and dd780ab9 (before mid-2025 in
srt/managers/), its reader eplb_simulator/reader.py at 5d2c83e6, and expert_location.py (`init_by_eplb`), which takes
2-D counts too. L layers of the whole model, P physical experts (replicas that the expert-parallel load balancer
places), E logical ones.

    stat, stat_approx   {rank, logical_count, average_utilization_rate_over_window}: one file, rank 0's, summed over
                        all ranks; logical_count whole numbers (steps, L, E), int32, a ring buffer of forward passes
                        of which unused slots are 0 and whose first slot need not be the oldest; (L, E): the sum alone
    per_pass            {records, last_physical_to_logical_map (L, P)}, a file a rank; each record {forward_pass_id,
                        rank, gatherer_key, global_physical_count (L, P)}
    per_token           the same with {input_ids, positions, extend_seq_lens, forward_mode, topk_ids_of_layer
                        (L, T, 8) physical ids, -1 = none, misc_objects}; global_physical_count too from 02295fe5 on,
                        not before

Dense layers are counted in L and hold only zeros or -1. The first recorder of all (March 2025) wrote CSV sums without
steps, tokens or E: not read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recorder.importers.dump import LAYERS, Counts, Decisions, Dump, DumpError, Piece, Place, Tokens
from recorder.importers.torch_file import load_torch, stored

_STAT = {"rank", "logical_count"}
_DETAIL = {"records", "last_physical_to_logical_map"}
_RECORD = {"forward_pass_id", "rank", "gatherer_key"}
_READ = {"global_physical_count", "topk_ids_of_layer", "input_ids", "positions", "extend_seq_lens", "forward_mode"}


def open_distribution(file: Path, *, token_ids: bool = False) -> Dump:
    """Recognise one dump by its keys.

    token_ids: record the ids of the tokens too, where the dump has them.

    Raises:
        DumpError: not one of the three layouts.
    """
    content = load_torch(file)
    if not isinstance(content, dict):
        raise DumpError(file, f"holds a {type(content).__name__}, expected a dict as SGLang's recorder dumps it")
    keys = {str(key) for key in content}
    if keys >= _STAT:
        return _stat(file, content)
    if keys >= _DETAIL:
        return _detail(file, content, token_ids)
    raise DumpError(
        file,
        f"has keys {_listed(keys)}, expected {_listed(_STAT)} (mode stat) or {_listed(_DETAIL)} (per_pass, per_token)",
    )


def _stat(file: Path, content: dict[str, Any]) -> Dump:
    counts_SLE = stored(file, "logical_count", content["logical_count"])
    if counts_SLE.ndim == 2:
        counts_SLE = counts_SLE[None]
    if counts_SLE.ndim != 3 or not all(counts_SLE.shape[1:]):
        raise DumpError(file, f"logical_count has shape {counts_SLE.shape}, expected (steps, layers, experts)")
    dump = Dump(
        file=file,
        source="SGLang expert distribution, stat",
        a_step_is="forward pass, all ranks summed",
        pieces=lambda: _stat_pieces(dump, counts_SLE),
        num_experts=counts_SLE.shape[2],
        width=counts_SLE.shape[1],
    )
    dump.note("no single decisions: mode stat keeps counts only")
    dump.note("the dump is a ring buffer: where more passes were recorded than it holds, the step numbers are turned")
    return dump


def _stat_pieces(dump: Dump, counts_SLE: np.ndarray) -> Iterator[Piece]:
    empty = 0
    for step, load_LE in enumerate(counts_SLE):
        if not load_LE.any():
            empty += 1
            continue
        for layer, load_E in enumerate(load_LE):
            yield Counts(step=step, place=Place(LAYERS, layer), load_E=_loads(dump.file, step, layer, load_E))
    if empty:
        dump.note(f"{empty} of {len(counts_SLE)} slots of the buffer hold no assignment and are left out")


def _detail(file: Path, content: dict[str, Any], token_ids: bool) -> Dump:
    records = content["records"]
    if not isinstance(records, list) or not records:
        raise DumpError(file, "records is empty, expected a list of one dict a forward pass")
    map_LP = stored(file, "last_physical_to_logical_map", content["last_physical_to_logical_map"])
    if map_LP.ndim != 2 or not map_LP.size or map_LP.min() < 0 or map_LP.max() >= map_LP.shape[1]:
        raise DumpError(
            file, f"last_physical_to_logical_map has shape {map_LP.shape}, expected logical ids of (layers, experts)"
        )
    per_token = isinstance(records[0], dict) and "topk_ids_of_layer" in records[0]
    num_experts = int(map_LP.max()) + 1
    dump = Dump(
        file=file,
        source=f"SGLang expert distribution, {'per_token' if per_token else 'per_pass'}",
        a_step_is="forward pass of one rank",
        pieces=lambda: _detail_pieces(dump, records, map_LP, per_token, token_ids),
        num_experts=num_experts,
        width=len(map_LP),
    )
    if not per_token:
        dump.note("no single decisions: mode per_pass keeps counts only")
    elif not token_ids:
        dump.note("token ids are left out; --token-ids records them")
    dump.note("one rank's share: SGLang dumps a file a rank")
    if map_LP.shape[1] > num_experts:
        dump.note(
            f"{map_LP.shape[1]} physical experts are brought back to {num_experts} logical ones by the last map; "
            "passes before a rebalance had another"
        )
    return dump


def _detail_pieces(
    dump: Dump, records: list[Any], map_LP: np.ndarray, per_token: bool, token_ids: bool
) -> Iterator[Piece]:
    file, expected = dump.file, _RECORD | ({"topk_ids_of_layer", "input_ids", "positions"} if per_token else set())
    if not per_token:
        expected = expected | {"global_physical_count"}
    last, seen, first = -1, set[str](), 0
    for number, record in enumerate(records):
        where = f"records[{number}]"
        if not isinstance(record, dict) or not expected <= set(record):
            found = _listed(record) if isinstance(record, dict) else type(record).__name__
            raise DumpError(file, f"{where} has {found}, expected {_listed(expected)} as in the first")
        step = record["forward_pass_id"]
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63 or step < last:
            raise DumpError(file, f"{where} has forward_pass_id {step!r}, expected whole numbers that ascend")
        if record["rank"] != records[0]["rank"]:
            raise DumpError(file, f"{where} is of rank {record['rank']}, the first of {records[0]['rank']}")
        if step > last:
            seen, first, last = set(), 0, step
        if record["gatherer_key"] in seen:
            raise DumpError(file, f"{where} repeats forward_pass_id {step}")
        seen.add(record["gatherer_key"])
        for name in sorted(set(map(str, record)) - _RECORD - _READ):
            dump.note(f"{name} is left out")
        if per_token:
            yield from _token_record(file, where, record, map_LP, first, token_ids)
            first += len(record["input_ids"])
        else:
            yield from _count_record(file, where, record, map_LP)


def _count_record(file: Path, where: str, record: dict[str, Any], map_LP: np.ndarray) -> Iterator[Piece]:
    counts_LP = stored(file, f"{where} global_physical_count", record["global_physical_count"])
    if counts_LP.shape != map_LP.shape:
        raise DumpError(file, f"{where} has counts of shape {counts_LP.shape}, the map has {map_LP.shape}")
    num_experts, step = int(map_LP.max()) + 1, record["forward_pass_id"]
    for layer, (load_P, map_P) in enumerate(zip(counts_LP, map_LP, strict=True)):
        load_E = np.zeros(num_experts, np.int64)
        np.add.at(load_E, map_P, _loads(file, step, layer, load_P))  # several replicas of one expert
        yield Counts(step=step, place=Place(LAYERS, layer), load_E=load_E)


def _token_record(
    file: Path, where: str, record: dict[str, Any], map_LP: np.ndarray, first: int, token_ids: bool
) -> Iterator[Piece]:
    ids_LTK = stored(file, f"{where} topk_ids_of_layer", record["topk_ids_of_layer"])
    tokens = _integers(file, f"{where} input_ids", record["input_ids"])
    positions = _integers(file, f"{where} positions", record["positions"])
    layers, num_physical = map_LP.shape
    if ids_LTK.ndim != 3 or ids_LTK.shape[:2] != (layers, len(tokens)) or not ids_LTK.shape[2]:
        raise DumpError(
            file, f"{where} topk_ids_of_layer has shape {ids_LTK.shape}, expected ({layers}, {len(tokens)}, k)"
        )
    if positions.shape != tokens.shape:
        raise DumpError(file, f"{where} has {len(positions)} positions for {len(tokens)} tokens")
    if not len(tokens):
        return
    if ids_LTK.min() < -1 or ids_LTK.max() >= num_physical:
        wrong = ids_LTK.min() if ids_LTK.min() < -1 else ids_LTK.max()
        raise DumpError(file, f"{where} has expert id {wrong}, expected -1 (none) or 0 to {num_physical - 1}")
    yield Tokens(
        step=record["forward_pass_id"],
        sequence_T=_sequences(record.get("extend_seq_lens"), len(tokens)),
        position_T=positions,
        token_id_T=tokens if token_ids else None,
        first_token=first,
    )
    for layer, ids_TK in enumerate(ids_LTK):
        logical_TK = np.where(ids_TK >= 0, map_LP[layer][np.maximum(ids_TK, 0)], -1)
        yield Decisions(
            step=record["forward_pass_id"], place=Place(LAYERS, layer), experts_TK=logical_TK, first_token=first
        )


def _sequences(lengths: Any, num_tokens: int) -> np.ndarray:
    """Number of each token's sequence: runs of the given lengths in prefill; in decode each token is of another."""
    if isinstance(lengths, list) and all(isinstance(n, int) and n >= 0 for n in lengths) and sum(lengths) == num_tokens:
        return np.repeat(np.arange(len(lengths)), lengths)
    return np.arange(num_tokens)


def _loads(file: Path, step: int, layer: int, load: np.ndarray) -> np.ndarray:
    if load.min() < 0:
        raise DumpError(file, f"step {step}, layer {layer} has a count of {load.min()}, expected at least 0")
    return load.astype(np.int64)


def _integers(file: Path, name: str, values: Any) -> np.ndarray:
    if not isinstance(values, list) or not all(type(value) is int and -(2**31) <= value < 2**31 for value in values):
        raise DumpError(file, f"{name} is not a list of whole numbers")
    return np.array(values, np.int64)


def _listed(names: Any) -> str:
    return ", ".join(sorted(str(name)[:60] for name in names)[:12])
