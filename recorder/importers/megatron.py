"""Megatron-Core's router traces: `router_trace_rank{r}.jsonl` and binary files beside it.

Source: NVIDIA/Megatron-LM, megatron/core/transformer/moe/router_trace.py at 059f0f5c and 4addead2 (pull requests 5428
and 5220, `--moe-routing-trace-path`). A line a step, layer and micro-batch, steps ascending, a file a rank:

    {"step", "stage": "pre_dispatch", "block": "decoder" | "mtp", "layer", "rank", "num_tokens", "topk",
     "top_indices": [[id, ...], ...]}            MTP lines with "mtp_idx" too
    "logit_offset", "logit_bytes", "logit_shape" [tokens, E]   a slice of logits_rank{r}.bin, bfloat16, before top-k
    "hs_offset", "hs_bytes", "hs_shape"                        of hidden_states_rank{r}.bin: not read
    router_state_rank{r}.pt  {layer: {weight, expert_bias, score_function, topk}} of the first forward pass

The ids of a token mostly come from a boolean map: they ascend, whatever the choice's order was. The trace does not
say whether it is of training or of inference. Router replay itself (router_replay.py at 00caa53a) writes no files;
`RouterTracer.record_indices` writes its indices as the same lines.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recorder.importers.dump import Decisions, Dump, DumpError, Piece, Place
from recorder.importers.torch_file import load_torch

_KEYS = ("step", "block", "layer", "rank", "num_tokens", "topk", "top_indices")
_LOGITS = ("logit_offset", "logit_bytes", "logit_shape")
_OTHER = {"stage", "mtp_idx", "hs_offset", "hs_bytes", "hs_shape"}
DECODER = "decoder.layers"


def open_trace(file: Path, *, phase: str = "train") -> Dump:
    """One rank's trace: its JSONL file, or a folder that holds just one.

    Raises:
        DumpError: no such file, or several.
    """
    if file.is_dir():
        traces = sorted(file.glob("router_trace_rank*.jsonl"))
        if len(traces) != 1:
            names = ", ".join(trace.name for trace in traces) or "none"
            raise DumpError(file, f"holds {names}, expected one router_trace_rank*.jsonl: name the file of one rank")
        file = traces[0]
    dump = Dump(
        file=file,
        source="Megatron router trace",
        a_step_is="iteration of one rank",
        pieces=lambda: _pieces(dump),
        phase=phase,
    )
    dump.note("one rank's share: Megatron writes a file a rank; layers of a pipeline stage count from its own first")
    dump.note("experts stand in the trace's order, mostly ascending, not best first")
    dump.note(f"the trace does not tell its phase: recorded as {phase}, --phase names another")
    return dump


def _pieces(dump: Dump) -> Iterator[Piece]:
    file, last, rank = dump.file, -1, None
    first: dict[Place, int] = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"line {number}"
            record = _record(file, where, line)
            if rank is None:
                rank = record["rank"]
                _read_state(dump, rank)
            if record["rank"] != rank:
                raise DumpError(file, f"{where} is of rank {record['rank']}, the first of rank {rank}: one rank a file")
            if record["step"] < last:
                raise DumpError(file, f"{where} has step {record['step']} after {last}: steps must ascend")
            if record["step"] > last:
                last, first = record["step"], {}
            place = _place(record)
            if place in first:
                dump.note("a layer's further lines of one step are taken as micro-batches, recomputed ones too")
            for name in sorted(set(record) - set(_KEYS) - set(_LOGITS) - _OTHER):
                dump.note(f"{name[:60]} is left out")
            if "hs_offset" in record:
                dump.note("hidden states are left out")
            dump.top_k = record["topk"] if dump.top_k is None else dump.top_k
            if record["topk"] != dump.top_k:
                raise DumpError(file, f"{where} has topk {record['topk']}, the first has {dump.top_k}")
            ids_TK = _indices(file, where, record)
            logits_TE = _logits(dump, where, record)
            yield Decisions(
                step=record["step"],
                place=place,
                experts_TK=ids_TK,
                first_token=first.get(place, 0),
                logits_TE=logits_TE,
            )
            first[place] = first.get(place, 0) + len(ids_TK)
    if rank is None:
        raise DumpError(file, "holds no record, expected a line a step and layer")


def _record(file: Path, where: str, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DumpError(file, f"{where} is not JSON: {str(error)[:120]}") from None
    if not isinstance(record, dict) or not set(_KEYS) <= set(record):
        found = ", ".join(sorted(map(str, record))[:12]) if isinstance(record, dict) else type(record).__name__
        raise DumpError(file, f"{where} has {found[:200]}, expected {', '.join(_KEYS)}")
    for name in ("step", "layer", "rank", "num_tokens", "topk"):
        if type(record[name]) is not int or not 0 <= record[name] < 2**31:
            raise DumpError(file, f"{where} has {name} {str(record[name])[:40]!r}, expected a whole number")
    if record.get("stage", "pre_dispatch") != "pre_dispatch":
        raise DumpError(file, f"{where} has stage {str(record['stage'])[:40]!r}, expected 'pre_dispatch'")
    mtp_idx = record.get("mtp_idx")
    known = record["block"] == "decoder" or (record["block"] == "mtp" and (mtp_idx is None or type(mtp_idx) is int))
    if not known or not record["topk"]:
        raise DumpError(
            file,
            f"{where} has block {str(record['block'])[:40]!r} and topk {record['topk']}, "
            "expected 'decoder' or 'mtp' and at least 1",
        )
    return record


def _place(record: dict[str, Any]) -> Place:
    if record["block"] == "decoder":
        return Place(DECODER, record["layer"])
    return Place(f"mtp.layers.{record.get('mtp_idx') or 0}.mtp_model_layer.layers", record["layer"])


def _indices(file: Path, where: str, record: dict[str, Any]) -> np.ndarray:
    expected = (record["num_tokens"], record["topk"])
    try:
        ids = np.array(record["top_indices"])
    except (ValueError, OverflowError):
        ids = np.zeros(0, object)
    if ids.size == 0 and not record["num_tokens"]:
        return np.zeros(expected, np.int32)
    if ids.shape != expected or ids.dtype.kind != "i":
        raise DumpError(file, f"{where} has top_indices {ids.dtype} {ids.shape}, expected whole numbers {expected}")
    if ids.min() < -1 or ids.max() >= 2**31:
        wrong = ids.min() if ids.min() < -1 else ids.max()
        raise DumpError(file, f"{where} has expert id {wrong}, expected -1 (none) or an expert")
    return ids.astype(np.int32)


def _logits(dump: Dump, where: str, record: dict[str, Any]) -> np.ndarray | None:
    """float32 (T, E) of the binary file beside the trace; None where the line names none."""
    if not set(_LOGITS) & set(record):
        return None
    named: list[Any] = [record.get(name) for name in _LOGITS]
    offset, size, shape = named
    good = type(offset) is int and type(size) is int and isinstance(shape, list) and len(shape) == 2
    good = good and all(type(length) is int and length >= 0 for length in shape)
    if not good or offset < 0 or size != 2 * shape[0] * shape[1] or shape[0] != record["num_tokens"] or not shape[1]:
        raise DumpError(
            dump.file,
            f"{where} has {str(size)[:20]} bytes of logits at {str(offset)[:20]} of shape {str(shape)[:60]}, "
            f"expected bfloat16 of [{record['num_tokens']}, experts]",
        )
    if dump.num_experts not in (None, shape[1]):
        raise DumpError(dump.file, f"{where} has logits of {shape[1]} experts, those before have {dump.num_experts}")
    dump.num_experts = shape[1]
    binary = dump.file.with_name(f"logits_rank{record['rank']}.bin")
    if not binary.is_file():
        raise DumpError(dump.file, f"{where} names logits, and {binary.name} is not beside it")
    with binary.open("rb") as stream:
        if offset + size > binary.stat().st_size:
            raise DumpError(binary, f"has {binary.stat().st_size} bytes, {where} names {size} at {offset}: cut off")
        stream.seek(offset)
        half = np.frombuffer(stream.read(size), "<u2").reshape(shape)
    dump.note("mean_prob, router_entropy and z_loss are computed from bfloat16 logits, which the tracer computed anew")
    return (half.astype(np.uint32) << 16).view(np.float32)


def _read_state(dump: Dump, rank: int) -> None:
    """Score functions, from the router weights beside the trace if there are any."""
    file = dump.file.with_name(f"router_state_rank{rank}.pt")
    if not file.is_file() or dump.score_functions:
        return
    state = load_torch(file)
    if not isinstance(state, dict):
        raise DumpError(file, f"holds a {type(state).__name__}, expected the state of each layer's router")
    for layer, entry in state.items():
        function = entry.get("score_function") if isinstance(entry, dict) else None
        if isinstance(layer, int) and function in ("softmax", "sigmoid"):
            dump.score_functions[Place(DECODER, layer)] = function
    dump.note("router weights and biases are left out: they are of the first forward pass alone")
