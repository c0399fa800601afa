"""The second reading of a dump: its pieces summed step by step and written as a run.

Shapes: E experts, K choices a token, T tokens.
"""

import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recorder.importers.dump import Counts, Decisions, Dump, DumpError, Place, Tokens
from recorder.importers.models import ModelShape
from recorder.importers.scan import Contents, model_entry, scan
from recorder.run_ids import new_run_id
from recorder.writer import RunWriter

#: Pieces between two flushes: one of a single token takes as much memory as one of hundreds.
_FLUSH_PIECES = 5_000


def write_run(dump: Dump, out: Path, *, shape: ModelShape | None = None, name: str = "") -> Path:
    """Write `dump` as a new run under `out` and return its folder. All of it or nothing: where that fails, no trace.

    Raises:
        DumpError: the dump is not understood; then nothing was written.
        OSError: the run could not be written.
    """
    contents = scan(dump, shape)
    out.mkdir(parents=True, exist_ok=True)
    run_id = new_run_id(name or f"{dump.source.split()[0]}-{dump.file.stem}", lambda taken: (out / taken).exists())
    # one level further down than runs stand, so that nobody takes it for one before it is whole
    workshop = Path(tempfile.mkdtemp(prefix=".importing-", dir=out))
    try:
        _write(dump, contents, workshop / run_id, shape, name)
        (workshop / run_id).rename(out / run_id)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return out / run_id


@dataclass
class _Sums:
    """What one router did in one step, so far. Sums over tokens; None as soon as one part of the step lacks it."""

    load_E: np.ndarray
    tokens: int | None = 0
    prob_sum_E: np.ndarray | None = None
    entropy_sum: float = 0.0
    z_sum: float | None = None
    logit_tokens: int = 0


def _write(dump: Dump, contents: Contents, path: Path, shape: ModelShape | None, name: str) -> None:
    manifest = {
        "name": name or dump.file.stem,
        "source": f"import: {dump.source}",
        "config": {"imported_from": dump.file.name, "a_step_is": dump.a_step_is},
        "model": model_entry(contents, dump, shape),
        "recorded": {
            "stats_every": 1,
            "decisions_every": 1 if contents.has_decisions else None,
            "probe_every": None,
            "text": False,
        },
    }
    with RunWriter(path, manifest=manifest, flush_seconds=30.0) as writer:
        writer.update_manifest(recorded=writer.manifest["recorded"] | {"weights": None})
        step, sums = None, dict[Place, _Sums]()
        for number, piece in enumerate(dump.pieces(), 1):
            if piece.step != step:
                _finish_step(writer, dump, contents, step, sums)
                step, sums = piece.step, {}
            if number % _FLUSH_PIECES == 0:
                writer.flush()
            if isinstance(piece, Tokens):
                _log_tokens(writer, dump, piece)
            elif piece.place in contents.routers:
                of_place = sums.setdefault(piece.place, _Sums(load_E=np.zeros(contents.num_experts, np.int64)))
                if isinstance(piece, Counts):
                    _add_counts(of_place, piece, contents.top_k)
                else:
                    _add_decisions(writer, dump, contents, of_place, piece)
        _finish_step(writer, dump, contents, step, sums)
        writer.log_event(
            contents.first_step, "imported", f"{dump.source}, {dump.file.name}; a step is a {dump.a_step_is}"
        )
        for note in _nulls(contents) | dump.notes:
            writer.log_event(contents.first_step, "import_note", note)


def _nulls(contents: Contents) -> dict[str, None]:
    lines = {"gate weights are not in the dump: weights and gate_mass are null": None}
    if contents.top_k is None:
        lines["top_k and with it the number of tokens are not in the dump: null; --model tells"] = None
    return lines


def _log_tokens(writer: RunWriter, dump: Dump, piece: Tokens) -> None:
    count = len(piece.sequence_T)
    writer.log_tokens(
        piece.step,
        phase=dump.phase,
        sequence_T=piece.sequence_T,
        position_T=piece.position_T,
        token_id_T=piece.token_id_T,
        tokens_T=piece.first_token + np.arange(count),
    )


def _add_counts(sums: _Sums, piece: Counts, top_k: int | None) -> None:
    sums.load_E += piece.load_E
    tokens, rest = divmod(int(sums.load_E.sum()), top_k) if top_k else (None, 1)
    sums.tokens = None if rest else tokens


def _add_decisions(writer: RunWriter, dump: Dump, contents: Contents, sums: _Sums, piece: Decisions) -> None:
    ids_TK = piece.experts_TK[:, : contents.top_k]
    held_T = (ids_TK >= 0).any(axis=1)
    if not held_T.all():
        dump.note("tokens without an expert in a layer were not captured there, and are left out of it")
    ids_TK, tokens_T = ids_TK[held_T], piece.first_token + np.flatnonzero(held_T)
    router = contents.routers[piece.place]
    writer.log_decisions(
        piece.step,
        phase=dump.phase,
        layer=contents.layers[piece.place],
        router=router,
        experts_TK=ids_TK,
        weights_TK=None,
        tokens_T=tokens_T,
    )
    sums.load_E += np.bincount(ids_TK[ids_TK >= 0], minlength=contents.num_experts)
    sums.tokens = (sums.tokens or 0) + len(ids_TK)
    if piece.logits_TE is not None:
        _add_logits(sums, piece.logits_TE[held_T].astype(np.float64), dump.score_functions.get(piece.place))


def _add_logits(sums: _Sums, logits_TE: np.ndarray, function: str | None) -> None:
    top_T = logits_TE.max(axis=1, keepdims=True)
    log_sum_T = top_T[:, 0] + np.log(np.exp(logits_TE - top_T).sum(axis=1))
    sums.z_sum = (sums.z_sum or 0.0) + float((log_sum_T**2).sum())
    sums.logit_tokens += len(logits_TE)
    if function is None:
        return
    if function == "softmax":
        probs_TE = np.exp(logits_TE - log_sum_T[:, None])
    else:
        probs_TE = 1 / (1 + np.exp(-logits_TE))
        probs_TE /= probs_TE.sum(axis=1, keepdims=True)
    sums.prob_sum_E = probs_TE.sum(axis=0) + (0 if sums.prob_sum_E is None else sums.prob_sum_E)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms_TE = np.where(probs_TE == 0, 0.0, probs_TE * np.log(probs_TE))
    sums.entropy_sum -= float(terms_TE.sum())


def _finish_step(writer: RunWriter, dump: Dump, contents: Contents, step: int | None, sums: dict[Place, _Sums]) -> None:
    if step is None:
        return
    tokens = [of_place.tokens for of_place in sums.values() if of_place.tokens is not None]
    for place, of_place in sums.items():
        writer.log_layer_stats(
            step,
            phase=dump.phase,
            layer=contents.layers[place],
            router=contents.routers[place],
            tokens=of_place.tokens,
            load=of_place.load_E,
            gate_mass=None,
            invalid=None,
            **_means(of_place),
        )
    writer.log_step(step, phase=dump.phase, tokens=max(tokens) if tokens else None)


def _means(sums: _Sums) -> dict[str, Any]:
    """Means over the tokens, of what is there for every one of them."""
    mean_prob_E, router_entropy, z_loss = None, None, None
    if sums.tokens and sums.logit_tokens == sums.tokens:
        z_loss = None if sums.z_sum is None else sums.z_sum / sums.tokens
        if sums.prob_sum_E is not None:
            mean_prob_E = sums.prob_sum_E / sums.tokens
            if len(mean_prob_E) > 1:
                router_entropy = sums.entropy_sum / sums.tokens / math.log(len(mean_prob_E))
    return {"mean_prob": mean_prob_E, "router_entropy": router_entropy, "z_loss": z_loss}


__all__ = ["DumpError", "write_run"]
