"""Routed-experts arrays that vLLM and SGLang return with each request: ids (tokens, layers, top_k), no weights.

Sources:
    vLLM  --enable-return-routed-experts (pull request 28284). vllm/model_executor/layers/fused_moe/
          routed_experts_capturer.py at 00bd1493: int32, prompt and generated tokens together, all layers counted,
          dense ones and tokens not captured 0. docs/training/routed_experts_replay.md at 0087e005 (v0.21): int16, MoE
          layers only, `prompt_routed_experts` of the response and `routed_experts` of each choice as nested lists,
          cached prompt tokens -1. tests/entrypoints/openai/test_return_routed_experts.py at 184bf813 (v0.22 on):
          `routed_experts` of each choice is base64 of a .npy. Offline: `CompletionOutput.routed_experts`, an ndarray.
    SGLang  --enable-return-routed-experts (pull requests 12162, 17434). python/sglang/srt/state_capturer/
          routed_experts.py at 024911f2, before in srt/layers/moe/routed_experts_capturer.py at 0837e911:
          `meta_info.routed_experts` (OpenAI endpoints: `sglext.routed_experts`) is base64 of bare int32, prompt and
          generated tokens but the last, all layers counted, dense ones 0.

Neither writes files: a person saves arrays (.npy one request, .npz one an entry) or responses (.json, .jsonl).
"""

import base64
import binascii
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recorder.importers import arrays
from recorder.importers.dump import LAYERS, Decisions, Dump, DumpError, Piece, Place, Tokens
from recorder.importers.models import ModelShape

SUFFIXES = (".npy", ".npz", ".json", ".jsonl")


@dataclass(frozen=True, kw_only=True)
class _Request:
    """blocks: ids (t, L, K) in order of token; first_position: of the first one; token_ids: of all, where known."""

    name: str
    blocks: Iterator[np.ndarray]
    first_position: int = 0
    token_ids: list[int] | None = None


def open_routed_experts(file: Path, system: str, *, shape: ModelShape | None, token_ids: bool = False) -> Dump:
    """A file of arrays or responses of `system` ("vLLM" or "SGLang").

    shape: of the model; needed where SGLang's bytes do not tell layers and k.
    token_ids: record the ids of the tokens too, where the responses hold them.
    """
    dump = Dump(
        file=file,
        source=f"{system} routed experts",
        a_step_is="request",
        pieces=lambda: _pieces(dump, system, shape, token_ids),
    )
    if not token_ids and file.suffix.startswith(".json"):
        dump.note("token ids are left out, if there are any; --token-ids records them")
    return dump


def _pieces(dump: Dump, system: str, shape: ModelShape | None, token_ids: bool) -> Iterator[Piece]:
    step = -1
    for step, request in enumerate(_requests(dump.file, system, shape)):
        first = 0
        for block_TLK in request.blocks:
            if not len(block_TLK):
                continue
            if dump.width is None:
                dump.width, dump.top_k = block_TLK.shape[1:]
            if block_TLK.shape[1:] != (dump.width, dump.top_k):
                raise DumpError(
                    dump.file,
                    f"{request.name} has {block_TLK.shape[1]} layers and top_k {block_TLK.shape[2]}, "
                    f"the first has {dump.width} and {dump.top_k}",
                )
            yield from _block(dump, step, request, block_TLK, first, token_ids)
            first += len(block_TLK)
        if not first:
            dump.note("requests without a token are left out")
    if step < 0:
        raise DumpError(dump.file, "holds no request")


def _block(
    dump: Dump, step: int, request: _Request, block_TLK: np.ndarray, first: int, token_ids: bool
) -> Iterator[Piece]:
    if block_TLK.min() < -1 or block_TLK.max() >= 2**31:
        wrong = block_TLK.min() if block_TLK.min() < -1 else block_TLK.max()
        raise DumpError(dump.file, f"{request.name} has expert id {wrong}, expected -1 (none) or an expert")
    ids_TLK = block_TLK.astype(np.int32)
    none_TLK = ids_TLK == -1
    partly_TL = none_TLK.any(axis=2) & ~none_TLK.all(axis=2)
    if partly_TL.any():
        token, layer = np.argwhere(partly_TL)[0].tolist()
        raise DumpError(
            dump.file,
            f"{request.name} has experts {ids_TLK[token, layer].tolist()} for token {first + token} in layer {layer}, "
            "expected as many experts as top_k, or -1 for all",
        )
    if ids_TLK.shape[2] > 1:  # no router takes expert 0 twice: the buffer was never written there
        ids_TLK[~ids_TLK.any(axis=2)] = -1
    here = slice(first, first + len(ids_TLK))
    known = request.token_ids[here] if token_ids and request.token_ids is not None else []
    yield Tokens(
        step=step,
        sequence_T=np.zeros(len(ids_TLK), np.int64),
        position_T=request.first_position + np.arange(here.start, here.stop),
        token_id_T=np.array(known, np.int64) if len(known) == len(ids_TLK) else None,
        first_token=first,
    )
    for layer in range(ids_TLK.shape[1]):
        yield Decisions(step=step, place=Place(LAYERS, layer), experts_TK=ids_TLK[:, layer], first_token=first)


def _requests(file: Path, system: str, shape: ModelShape | None) -> Iterator[_Request]:
    if file.suffix == ".npy":
        yield from (_Request(name=name, blocks=blocks) for name, blocks in arrays.npy_file(file))
    elif file.suffix == ".npz":
        yield from (_Request(name=name, blocks=blocks) for name, blocks in arrays.npz_file(file))
    else:
        read = _sglang_response if system == "SGLang" else _vllm_response
        for name, value in _json_values(file):
            if isinstance(value, list):
                yield _Request(name=name, blocks=iter([_nested(file, name, value)]))
            else:
                yield from read(file, name, value, shape)


def _json_values(file: Path) -> Iterator[tuple[str, Any]]:
    """(name, response or nested list) of each request in a .json or .jsonl file."""
    if file.suffix == ".jsonl":
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"line {number}", _parsed(file, f"line {number}", line)
        return
    value = _parsed(file, "the file", file.read_bytes())
    many = isinstance(value, list) and value and (isinstance(value[0], dict) or _depth(value) == 4)
    yield from ((f"entry {number}", item) for number, item in enumerate(value)) if many else [("the file", value)]


def _parsed(file: Path, name: str, text: bytes) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DumpError(file, f"{name} is not JSON: {str(error)[:120]}") from None
    if not isinstance(value, (dict, list)):
        raise DumpError(file, f"{name} is a {type(value).__name__}, expected a response or a nested list of ids")
    return value


def _vllm_response(file: Path, name: str, response: Any, shape: ModelShape | None) -> Iterator[_Request]:
    """A completion of the OpenAI endpoints, or the fields of a RequestOutput: one request a choice."""
    choices = _choices(file, name, response, ("routed_experts",))
    for number, choice in enumerate(choices):
        label = f"{name} choice {number}" if len(choices) > 1 else name
        parts = [response.get("prompt_routed_experts"), choice.get("routed_experts")]
        found = [_ids(file, label, part) for part in parts if part is not None]
        if not found:
            raise DumpError(file, f"{label} has routed_experts null: the server ran without recording them")
        prompt, own = response.get("prompt_token_ids") or choice.get("prompt_token_ids"), choice.get("token_ids")
        both = _token_ids(prompt) and _token_ids(own)  # without the prompt's, nobody knows where the others start
        ids = _token_ids(prompt) + _token_ids(own) if both else None
        yield _Request(name=label, blocks=iter([_joined(file, label, found)]), token_ids=ids)


def _sglang_response(file: Path, name: str, response: Any, shape: ModelShape | None) -> Iterator[_Request]:
    """A response of /generate, or of the OpenAI endpoints."""
    if not isinstance(response, dict):
        raise DumpError(file, f"{name} is a {type(response).__name__}, expected a response")
    meta, extra = response.get("meta_info"), response.get("sglext")
    meta, extra = (place if isinstance(place, dict) else {} for place in (meta, extra))
    counts = meta if "routed_experts" in meta else response.get("usage")
    given = meta.get("routed_experts", extra.get("routed_experts"))
    if given is None:
        raise DumpError(
            file, f"{name} has {_keys(response)}, expected routed_experts in meta_info or sglext that are not null"
        )
    if not isinstance(given, str):
        yield _Request(name=name, blocks=iter([_nested(file, name, given)]))
        return
    data = _decoded(file, name, given)
    if shape is None:
        raise DumpError(file, f"{name} holds bare bytes, which do not tell layers and top_k: name the model by --model")
    row = shape.num_layers * shape.top_k
    if len(data) % (4 * row):
        raise DumpError(
            file, f"{name} has {len(data)} bytes, expected int32 of {shape.num_layers} layers and top_k {shape.top_k}"
        )
    ids_TLK = np.frombuffer(data, "<i4").reshape(-1, shape.num_layers, shape.top_k)
    counts = counts if isinstance(counts, dict) else {}
    lengths = [n for n in (counts.get("prompt_tokens"), counts.get("completion_tokens")) if type(n) is int]
    first = 0
    if len(lengths) == 2:
        first = sum(lengths) - 1 - len(ids_TLK)  # the last token is never routed; a request may leave out the first
        if first < -1:
            raise DumpError(file, f"{name} has {len(ids_TLK)} tokens routed and says it has {sum(lengths)}")
    yield _Request(name=name, blocks=iter([ids_TLK]), first_position=max(first, 0))


def _choices(file: Path, name: str, response: Any, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    found = response.get("choices", response.get("outputs")) if isinstance(response, dict) else None
    choices = [response] if found is None and isinstance(response, dict) else found
    if isinstance(choices, list) and choices and all(isinstance(c, dict) and set(keys) <= set(c) for c in choices):
        return choices
    found = _keys(response) if isinstance(response, dict) else type(response).__name__
    raise DumpError(file, f"{name} has {found}, expected choices with {', '.join(keys)}")


def _ids(file: Path, name: str, value: Any) -> np.ndarray:
    if isinstance(value, str):
        blocks = list(arrays.npy_bytes(file, name, _decoded(file, name, value)))
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    return _nested(file, name, value)


def _nested(file: Path, name: str, value: Any) -> np.ndarray:
    try:
        ids = np.array(value)
    except (ValueError, OverflowError):
        raise DumpError(file, f"{name} is a nested list of uneven lengths, expected (tokens, layers, top_k)") from None
    if ids.size == 0 and isinstance(value, list):
        return np.zeros((0, 1, 1), np.int32) if ids.ndim != 3 else ids.astype(np.int32)
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise DumpError(file, f"{name} is {ids.dtype} {ids.shape}, expected whole numbers (tokens, layers, top_k)")
    return ids


def _joined(file: Path, name: str, parts: list[np.ndarray]) -> np.ndarray:
    filled = [part for part in parts if len(part)] or parts[:1]
    if len({part.shape[1:] for part in filled}) > 1:
        raise DumpError(file, f"{name} has {filled[0].shape[1:]} for the prompt and {filled[1].shape[1:]} after it")
    return filled[0] if len(filled) == 1 else np.concatenate(filled)


def _decoded(file: Path, name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise DumpError(file, f"{name} has routed_experts that are not base64") from None


def _token_ids(values: Any) -> list[int]:
    """The ids of a prompt or a completion; none where they are not there, or no ids."""
    good = isinstance(values, list) and all(type(value) is int and 0 <= value < 2**31 for value in values)
    return values if good else []


def _depth(value: Any) -> int:
    depth = 0
    while isinstance(value, list) and value and depth < 5:
        value, depth = value[0], depth + 1
    return depth


def _keys(value: dict[str, Any]) -> str:
    return ", ".join(sorted(str(key)[:40] for key in value)[:12]) or "no keys"
