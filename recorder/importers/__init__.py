"""Dumps of other systems -> a run. One module a format, `KINDS` names them; no torch until a `.pt` file is read."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recorder.importers.dump import Dump, DumpError
from recorder.importers.megatron import open_trace
from recorder.importers.models import ModelShape, model_shape
from recorder.importers.routed_experts import SUFFIXES, open_routed_experts
from recorder.importers.sglang_distribution import open_distribution
from recorder.importers.write import write_run
from recorder.schema import PHASES


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a person said about a dump beside its name. phase None: the format's own."""

    shape: ModelShape | None = None
    phase: str | None = None
    token_ids: bool = False


def import_dump(
    kind: str,
    file: str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    name: str = "",
    phase: str | None = None,
    token_ids: bool = False,
) -> Path:
    """Import one dump as a new run.

    Args:
        kind: one of `KINDS`.
        file: the dump.
        out: folder of runs on this machine, created where there is none; nothing in it is overwritten.
        model: a published model's name or a config.json, where the dump does not tell layers, E or k.
        name: of the run; by default the file's.
        phase: train, probe, eval or generate; by default train for Megatron, generate for the others.
        token_ids: record ids of tokens, where the dump has them.

    Returns:
        The run's folder.

    Raises:
        DumpError: the dump is not understood, in one line; no run is left behind.
        ValueError: an unknown kind, model or phase, or an address of an object store as out.
        OSError: the dump cannot be read, or the run not written.
    """
    if kind not in KINDS:
        raise ValueError(f"KIND must be one of {', '.join(KINDS)}, got {kind!r}")
    if phase is not None and phase not in PHASES:
        raise ValueError(f"--phase must be one of {', '.join(PHASES)}, got {phase!r}")
    out = local_folder(out)
    file = Path(file)
    if not file.exists():
        raise DumpError(file, "there is no such file")
    if file.is_file() and not file.stat().st_size:
        raise DumpError(file, "is empty")
    options = Options(shape=None if model is None else model_shape(model), phase=phase, token_ids=token_ids)
    dump = KINDS[kind](file, options)
    dump.phase = phase or dump.phase
    return write_run(dump, out, shape=options.shape, name=name)


def local_folder(out: str | Path) -> Path:
    """The folder that runs are imported into. Raises ValueError for an address of an object store."""
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(out)):
        raise ValueError(f"--out must be a folder on this machine, got {str(out)!r}: copy the run there afterwards")
    return Path(out)


def _sglang(file: Path, options: Options) -> Dump:
    if file.suffix == ".pt":
        return open_distribution(file, token_ids=options.token_ids)
    return _routed(file, options, "SGLang", (".pt", *SUFFIXES))


def _vllm(file: Path, options: Options) -> Dump:
    return _routed(file, options, "vLLM", SUFFIXES)


def _routed(file: Path, options: Options, system: str, suffixes: tuple[str, ...]) -> Dump:
    if file.suffix not in suffixes or file.is_dir():
        raise DumpError(file, f"expected a file that ends in {', '.join(suffixes)}")
    return open_routed_experts(file, system, shape=options.shape, token_ids=options.token_ids)


def _megatron(file: Path, options: Options) -> Dump:
    if file.suffix != ".jsonl" and not file.is_dir():
        raise DumpError(file, "expected router_trace_rank*.jsonl, or the folder that holds it")
    return open_trace(file, phase=options.phase or "train")


#: How each kind of dump is opened.
KINDS: dict[str, Callable[[Path, Options], Dump]] = {"megatron": _megatron, "sglang": _sglang, "vllm": _vllm}

__all__ = ["KINDS", "DumpError", "import_dump", "local_folder"]
