"""Cached loads: what the pages read of the runs, keyed on the files behind it.

Shape suffixes: S recorded steps, E experts.

A `Run` is kept open and refreshed, so that a growing run never has its old parts read again. Sessions share
it, hence the lock around every read. Whatever is returned is a copy or cannot be written to.
"""

import copy
import json
import os
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import streamlit as st

from app import columns, folders, health, layer_keys, run_labels, token_search
from app.figures.inputs import LoadSeries
from app.layer_stats import LayerStats
from app.words import step_word
from moe_core import metrics
from moe_core.curves import downsample
from recorder.diagnosis import Finding, diagnose
from recorder.reader import Run, RunInfo, list_runs
from recorder.schema import TABLES
from recorder.storage import ObjectPath, Place
from recorder.summary import run_row, summarise

T = TypeVar("T")

MAIN = "main"  # in place of a phase: the one a run is judged by, see `main_phase`
SPARK_POINTS = 60
ROW_WINDOW = metrics.WINDOW  # recorded steps that a line of the table of runs is about, as in `run_row`
_STALE_CHECK_S = 5.0  # how old the status of a run that says "running" may be in a listing
_REMOTE_CHECK_S = 3.0  # how old may be what is known of an object store, where every look is a request


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A run of a shown folder.

    reference  what names it in a URL, unique among the listed runs
    label      what names it to a person, unique among them: see `app.run_labels`
    read_only  True for runs of a read-only folder, such as the samples
    """

    reference: str
    label: str
    path: Place
    read_only: bool
    info: RunInfo


# ------------------------------------------------------------------------------------------ which runs there are


def shown_folders() -> tuple[folders.Folder, ...]:
    """The folders this server shows; see `app.folders`."""
    return folders.shown_folders()


def listed() -> list[Listed]:
    """The runs of the shown folders, in the order of `list_runs` (oldest first). Cheap where nothing changed."""
    shown = shown_folders()
    paths = tuple(folder.path for folder in shown if isinstance(folder.path, Path))
    stamps = tuple(_folder_stamp(path) for path in paths)
    infos = _infos(paths, stamps, 0)
    if any(info.status == "running" for info in infos):
        # Whether a run that says so is still running is a matter of its process, not of its files.
        infos = _infos(paths, stamps, int(time.monotonic() / _STALE_CHECK_S))
    for folder in _remote_folders():
        infos = infos + _stored_infos(folder)[0]
    infos = sorted(infos, key=lambda info: str((info.manifest or {}).get("created_at") or ""))
    by_path = {info.path: info for info in infos}
    references = folders.references(list(by_path), shown)
    names = [by_path[path].name or path.name for path in references.values()]
    created = [(by_path[path].manifest or {}).get("created_at") for path in references.values()]
    labels = run_labels.labels(names, created, list(references))
    read_only = {folder.path: folder.read_only for folder in shown}
    return [
        Listed(
            reference=reference,
            label=label,
            path=path,
            read_only=read_only[path.parent],
            info=by_path[path],
        )
        for (reference, path), label in zip(references.items(), labels, strict=True)
    ]


def unreachable() -> list[str]:
    """One line for each object store among the shown folders that holds nothing or cannot be asked."""
    problems = (_stored_infos(folder)[1] for folder in _remote_folders())
    return [problem for problem in problems if problem is not None]


def look_again() -> None:
    """Forget what is known of object stores, where something has just been changed."""
    _stored_infos.clear()
    _refresh.clear()


def is_run(folder: Place) -> bool:
    """Whether a shown folder is no folder of runs but a run itself."""
    if isinstance(folder, ObjectPath):
        return any(info.path == folder for info in _stored_infos(folder)[0])
    return (folder / "run.json").is_file()


def find(reference: str | None) -> Listed | None:
    """The listed run that a reference of a URL means; None where there is none. Never leaves the folders."""
    runs = {run.reference: run for run in listed()}
    if reference is None:
        return None
    known = folders.resolve(reference, {name: run.path for name, run in runs.items()})
    return None if known is None else runs[known]


def row(run: Listed) -> dict[str, Any]:
    """One line of the table of runs: `recorder.summary.run_row`, and beside it

    reference, error (of the run or of reading it; None where all is well), num_steps (recorded steps),
    loss_curve and violation_curve (at most 60 points each, finite values only; the worst layer's
    max_violation, extremes kept), trouble (what went wrong in the last 50 recorded steps, None if nothing), phase (the
    one all this is about).
    """
    # Hashed here: Streamlit would walk through the times of every file of every run at each draw of the page.
    line = dict(_row(run.path, hash(_run_stamp(run))))
    # Not of the cache: a process that dies changes no file.
    return line | {"reference": run.reference, "status": run.info.status, "error": run.info.error or line["error"]}


# ---------------------------------------------------------------------------------------------- what is in a run


def open_run(path: Place) -> tuple[Run | None, str | None]:
    """The run at `path`, up to date, and None; or None and one line that says why it cannot be read."""
    with _lock(path):
        try:
            run = _run(path, _identity(path))
            if isinstance(path, ObjectPath):
                _refresh(path, run)
            else:
                run.refresh()
        except (OSError, ValueError) as error:
            return None, " ".join(str(error).split())
        return run, None


def main_phase(run: Run) -> str:
    """The phase that pages judge a run by: train, or what it has instead; see `Run.main_phase`."""
    with _lock(run.path):
        return run.main_phase


def linked_phase(run: Run) -> str | None:
    """That phase as a choice in a URL: None where it is train, as pages show that by themselves."""
    phase = main_phase(run)
    return None if phase == "train" else phase


def diagnosis(run: Run) -> list[Finding]:
    """`recorder.diagnosis.diagnose(run)`. Cached."""
    return _frame(*_key(run), "diagnosis", (), lambda: diagnose(run))


def of_run(run: Run, method: str, layer: int, *arguments: Any) -> Any:
    """`run.<method>` of `recorder.run_metrics` for one router, by its key: a question to the counts of all decisions.

    Cached. The arguments are those between the method's layer and its router.
    The first question counts them, in memory, where `routescope analyse` has not kept the counts with the run.
    """
    index, router = layer_keys.place_of(run, layer)
    key = (layer, *arguments)
    return _own(_counted(*_key(run), method, key, lambda: getattr(run, method)(index, *arguments, router)))


def load_of_decisions(run: Run, layer: int, phase: str) -> np.ndarray:
    """Assignments per expert in all recorded decisions of a router, by its key, int64 (E,); else zeros. Cached."""
    loads = [np.asarray(load, dtype=np.int64) for load in _of_decisions(run, "loads", layer, phase)["load"]]
    return loads[0] if loads else np.zeros(int(layer_keys.router(run, layer).get("num_experts") or 1), dtype=np.int64)


def pairs_of_decisions(run: Run, layer: int, phase: str) -> tuple[int, np.ndarray]:
    """Tokens with a recorded choice of a router, by its key, and how many of them chose both experts of a pair.

    The pairs are int64 (E, E), symmetric, with the tokens of each expert on the diagonal. Cached. Raises ValueError
    where no decision was recorded.
    """
    tokens = _of_decisions(run, "loads", layer, phase)["tokens"]
    if tokens.empty:
        raise ValueError(f"layer {layer_keys.label(run, layer)} has no recorded decision in phase {phase}")
    together = _of_decisions(run, "coactivation", layer, phase).sort_values("expert")["together"]
    return int(tokens.iloc[0]), np.stack([np.asarray(row, dtype=np.int64) for row in together])


def _of_decisions(run: Run, table: str, layer: int, phase: str) -> pd.DataFrame:
    index, router = layer_keys.place_of(run, layer)

    def read() -> pd.DataFrame:
        return run.analysis().frame(table, phase=phase, layer=index, router=router)

    return _own(_counted(*_key(run), f"analysis of {table}", (layer, phase), read))


def steps(run: Run, phase: str | None = MAIN) -> pd.DataFrame:
    """`run.steps(phase)`; all phases with None. Of a step recorded twice the later row. Cached."""
    phase = _phase(run, phase)
    return _frame(*_key(run), "steps", (phase,), lambda: _once(run.steps(phase), "step", "phase"))


def phases(run: Run) -> list[str]:
    """The recorded phases, train first."""
    found = set(steps(run, None)["phase"].unique())
    order = ("train", "probe", "eval", "generate")
    return [phase for phase in order if phase in found] + sorted(found - set(order))


def summary(run: Run, window: int = metrics.WINDOW) -> dict[str, Any]:
    """`recorder.summary.summarise(run, window)`, each layer with its `key` and `label` of `app.layer_keys`. Cached."""
    return _frame(*_key(run), "summary", (window,), lambda: _with_keys(run, summarise(run, window)))


def layer_stats(run: Run, layer: int, phase: str = MAIN) -> LayerStats:
    """Loads, biases and the rest of one router over all recorded steps. Cached.

    layer: its key, see `app.layer_keys`. Raises ValueError for one that no router of this run has.
    """
    return _layer_stats(*_key(run), layer, _phase(run, phase), run)


def load_series(run: Run, layer: int, phase: str = MAIN) -> LoadSeries:
    """The load of one router, by its key, as the figures take it."""
    stats = layer_stats(run, layer, phase)
    return LoadSeries(
        run=run.name,
        layer=layer,
        label=stats.label,
        steps_S=stats.steps_S,
        load_SE=stats.load_SE,
        top_k=stats.top_k,
        restarts=restarts(run) if phase in (MAIN, main_phase(run)) else (),
    )


def decisions(run: Run, step: int, layer: int, phase: str = "train") -> pd.DataFrame:
    """`run.decisions` of one step and router, by its key: empty where that step has none. Cached."""
    index, router = layer_keys.place_of(run, layer)
    return _frame(
        *_key(run),
        "decisions",
        (step, layer, phase),
        lambda: _once(run.decisions(step, index, phase, router=router), "rank", "token"),
    )


def tokens(run: Run, step: int, phase: str = "train") -> pd.DataFrame:
    """`run.tokens` of one step: empty where that step has none. Cached."""
    return _frame(*_key(run), "tokens", (step, phase), lambda: _once(run.tokens(step, phase), "rank", "token"))


def decision_steps(run: Run, phase: str = "train") -> np.ndarray:
    """The steps (ascending, int64) of a phase whose single decisions were recorded. Cached."""
    return _decision_steps(*_key(run), phase, run)


def search_token(run: Run, words: str, phase: str) -> token_search.Search:
    """`token_search.search(run, words, phase)`. Cached."""
    return _frame(*_key(run), "token_search", (words, phase), lambda: token_search.search(run, words, phase))


def loads_problem(run: Run) -> str | None:
    """One line that says why the loads of the steps it is judged by cannot be used; None where they can. Cached."""
    return _frame(*_key(run), "loads", (), lambda: _loads_problem(run))


def trouble(run: Run, window: int) -> health.Trouble:
    """What went wrong in the last `window` recorded steps; see `app.health`."""
    return health.trouble(steps(run), [layer_stats(run, key) for key in layer_keys.keys(run)], window)


def problems(run: Run) -> list[str]:
    """One line for each part file that was found to be unreadable so far."""
    with _lock(run.path):
        return run.problems


def incomplete_steps(run: Run) -> pd.DataFrame:
    """`run.incomplete_steps()` of the phase it is judged by. Cached."""
    phase = main_phase(run)
    return _frame(*_key(run), "incomplete_steps", (phase,), lambda: run.incomplete_steps(phase))


def lists_no_layers(run: Run) -> bool:
    """Whether the manifest names no layer although loads of some were recorded."""
    if (run.manifest.get("model") or {}).get("layers"):
        return False
    return _frame(*_key(run), "lists_no_layers", (), lambda: len(run.layer_stats(phase=None)) > 0)


def events(run: Run) -> pd.DataFrame:
    """`run.events()`. Cached."""
    return _frame(*_key(run), "events", (), run.events)


def restarts(run: Run) -> list[int]:
    """First recorded step of every segment after the first: where a resumed run started again."""
    with _lock(run.path):
        return [part.first_step for part in run.segments if part.segment > 0]


# ------------------------------------------------------------------------------------------------------- caches


@st.cache_resource(max_entries=8, show_spinner=False)
def _infos(paths: tuple[Path, ...], stamps: Hashable, tick: int) -> list[RunInfo]:
    return list_runs(*paths)


def _remote_folders() -> list[ObjectPath]:
    return [folder.path for folder in shown_folders() if isinstance(folder.path, ObjectPath)]


@st.cache_resource(max_entries=8, ttl=_REMOTE_CHECK_S, show_spinner=False)
def _stored_infos(folder: ObjectPath) -> tuple[list[RunInfo], str | None]:
    """The runs of a folder in an object store; and one line where it holds nothing or cannot be asked."""
    try:
        infos = list_runs(folder)
        problem = None if infos or folder.is_dir() else f"{folder}: {folder.why_not()}"
    except (OSError, ValueError) as error:
        return [], " ".join(str(error).split())
    return infos, problem


@st.cache_resource(max_entries=64, ttl=_REMOTE_CHECK_S, show_spinner=False)
def _refresh(path: ObjectPath, _run: Run) -> None:
    """Look for new parts, once in a while: a page opens its run several times."""
    _run.refresh()


@st.cache_resource(max_entries=1000, show_spinner=False)
def _lock(path: Place) -> threading.RLock:
    return threading.RLock()


@st.cache_resource(max_entries=32, show_spinner=False)
def _run(path: Place, identity: Hashable) -> Run:
    return Run(path)


@st.cache_resource(max_entries=1000, show_spinner=False)
def _row(path: Place, stamp: Hashable) -> dict[str, Any]:
    run, error = open_run(path)
    line: dict[str, Any] = {"run_id": path.name, "name": path.name, "path": str(path), "status": "unreadable"}
    line |= dict.fromkeys(
        (
            *("balancer", "num_experts", "top_k", "last_step", "loss", "ce_loss"),
            *("max_violation", "max_violation_window", "dead_experts", "idle_experts"),
        )
    )
    curves: dict[str, Any] = {"num_steps": 0, "loss_curve": [], "violation_curve": [], "trouble": None, "phase": None}
    if run is not None:
        error = loads_problem(run)
        try:
            if error is None:
                line |= run_row(run)
                curves |= _curves(run)
        except Exception as problem:  # whatever is wrong with one run, the others are listed
            error = str(problem) or type(problem).__name__
    return {**line, "error": error, **curves}


def _frame(path: Place, fingerprint: int, table: str, key: tuple[Any, ...], _read: Callable[[], T]) -> T:
    """What was read, kept and given out as one's own: pandas copies a frame's values when written to."""
    return _own(_kept(path, fingerprint, table, key, _read))


def _own(value: T) -> T:
    return value.copy(deep=False) if isinstance(value, (pd.DataFrame, pd.Series)) else copy.deepcopy(value)  # type: ignore[return-value]


@st.cache_resource(max_entries=64, show_spinner=False)
def _kept(path: Place, fingerprint: int, table: str, key: tuple[Any, ...], _read: Callable[[], T]) -> T:
    with _lock(path):
        return _read()


@st.cache_resource(max_entries=128, show_spinner="Counting every recorded decision, once ...")
def _counted(path: Place, fingerprint: int, question: str, key: tuple[Any, ...], _read: Callable[[], T]) -> T:
    with _lock(path):
        return _read()


@st.cache_resource(max_entries=64, show_spinner=False)
def _decision_steps(path: Place, fingerprint: int, phase: str, _run: Run) -> np.ndarray:
    with _lock(path):
        return _frozen(np.asarray(_run.decision_steps(phase), dtype=np.int64))


@st.cache_resource(max_entries=128, show_spinner=False)
def _layer_stats(path: Place, fingerprint: int, layer: int, phase: str, _run: Run) -> LayerStats:
    description = layer_keys.router(_run, layer)
    index, router = layer_keys.place_of(_run, layer)
    with _lock(path):
        frame = _once(_run.layer_stats(index, phase, router=router), "step")
    num_experts = description.get("num_experts") or max((len(load) for load in frame["load"].dropna()), default=0)
    tokens_S = _column(frame, "tokens")
    load_SE = _counts(_matrix(frame["load"], num_experts))
    # A foreign writer may leave k out; the loads tell it. Without tokens either (an imported dump of counts), 1 gives
    # the widest bounds.
    routed = np.nansum(tokens_S)
    top_k = description.get("top_k") or (round(load_SE.sum() / routed) if routed else 1) or 1
    bias_SE = _matrix(frame["expert_bias"], num_experts)
    return LayerStats(
        layer=layer,
        label=layer_keys.label(_run, layer),
        phase=phase,
        top_k=top_k,
        steps_S=_frozen(frame["step"].to_numpy(dtype=np.int64)),
        load_SE=load_SE,
        gate_mass_SE=_frozen(_matrix(frame["gate_mass"], num_experts)),
        mean_prob_SE=_frozen(_matrix(frame["mean_prob"], num_experts)),
        dropped_SE=_frozen(_matrix(frame["dropped"], num_experts)),
        expert_bias_SE=None if np.isnan(bias_SE).all() else _frozen(bias_SE),
        tokens_S=tokens_S,
        rerouted_S=_column(frame, "rerouted"),
        invalid_S=_column(frame, "invalid"),
        router_entropy_S=_column(frame, "router_entropy"),
        aux_loss_S=_column(frame, "aux_loss"),
        z_loss_S=_column(frame, "z_loss"),
    )


def _curves(run: Run) -> dict[str, Any]:
    frame = steps(run)
    worst: dict[int, float] = {}
    for key in layer_keys.keys(run):
        stats = layer_stats(run, key)
        violation_S = metrics.max_violation(stats.load_SE)
        for step, value in zip(stats.steps_S.tolist(), np.asarray(violation_S).tolist(), strict=True):
            if np.isfinite(value):
                worst[step] = max(value, worst.get(step, value))
    return {
        "num_steps": len(frame),
        "phase": main_phase(run),
        "trouble": trouble(run, ROW_WINDOW).words,
        "loss_curve": _spark(frame["step"].to_numpy(np.int64), _column(frame, "loss")),
        "violation_curve": _spark(np.array(sorted(worst), np.int64), np.array([worst[step] for step in sorted(worst)])),
    }


def _spark(steps_S: np.ndarray, values_S: np.ndarray) -> list[float]:
    finite_S = np.isfinite(values_S)
    if not finite_S.any():
        return []
    _, values = downsample(steps_S[finite_S], values_S[finite_S], SPARK_POINTS)
    return [float(value) for value in values]


def _with_keys(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    named = layer_keys.labels(run)
    layers = [(layer, layer_keys.key_of(run, layer["layer"], layer["router"])) for layer in found["layers"]]
    named = {key: named.get(key, key) for _, key in layers}
    return {**found, "layers": [{**layer, "key": key, "label": named[key]} for layer, key in layers]}


def _phase(run: Run, phase: Any) -> Any:
    return main_phase(run) if phase == MAIN else phase


def _once(frame: pd.DataFrame, *key: str) -> pd.DataFrame:
    """The last row of each key: a writer of another make may have recorded a step twice."""
    again = frame.duplicated(list(key), keep="last").to_numpy(dtype=bool)
    return frame[~again].reset_index(drop=True) if again.any() else frame


def _loads_problem(run: Run) -> str | None:
    for layer in run.moe_layers:
        column = run.layer_stats(int(layer["index"]), run.main_phase, router=layer.get("router"))["load"]
        lists = columns.array(column)
        where = f"in layer_stats, the loads of layer {layer['index']}"
        if lists.null_count:
            kind = step_word(run.main_phase).removesuffix(" step")
            return f"{where} are missing (null) in {lists.null_count:,} of {len(lists):,} {kind} rows"
        if len(lists) == 0:
            continue
        lengths = np.unique(np.asarray(lists.value_lengths())).tolist()
        expected = layer.get("num_experts")
        if len(lengths) > 1 or expected not in (None, lengths[0]):
            of_run = "" if expected is None else f"; its run.json says {expected} experts"
            return f"{where} are lists of {' and '.join(map(str, lengths))} numbers{of_run}"
    return None


def _matrix(column: pd.Series, num_experts: int) -> np.ndarray:
    """A column of lists as float64 (S, E); a row that is null or of another length becomes NaN."""
    lists = columns.array(column)
    matrix_SE = np.full((len(lists), num_experts), np.nan)
    if len(lists) == 0 or pa.types.is_null(lists.type):
        return matrix_SE
    whole_S = np.asarray(lists.value_lengths().fill_null(0)) == num_experts
    if whole_S.all():  # as it is
        return lists.flatten().to_numpy(zero_copy_only=False).astype(np.float64, copy=False).reshape(-1, num_experts)
    flat = lists.filter(pa.array(whole_S)).flatten()
    matrix_SE[whole_S] = flat.to_numpy(zero_copy_only=False).astype(np.float64).reshape(-1, num_experts)
    return matrix_SE


def _counts(matrix_SE: np.ndarray) -> np.ndarray:
    counts_SE = np.nan_to_num(matrix_SE)
    whole_SE = counts_SE.astype(np.int64)
    return _frozen(whole_SE if np.array_equal(whole_SE, counts_SE) else counts_SE)


def _column(frame: pd.DataFrame, name: str) -> np.ndarray:
    return _frozen(frame[name].to_numpy(dtype=np.float64, na_value=np.nan))


def _frozen(array: np.ndarray) -> np.ndarray:
    array = array.view()
    array.flags.writeable = False
    return array


def _key(run: Run) -> tuple[Place, int]:
    # Not the fingerprint itself: Streamlit would walk through every part file of it at every call.
    return run.path, hash(run.fingerprint)


def _identity(path: Place) -> Hashable:
    # A folder that was deleted and recorded anew is another run, whatever it is called.
    if isinstance(path, ObjectPath):
        infos, _ = _stored_infos(path.parent)
        return next(((info.manifest or {}).get("created_at") for info in infos if info.path == path), None)
    status = path.stat()
    return (status.st_dev, status.st_ino)


def _run_stamp(run: Listed) -> Hashable:
    """Changes whenever a part or the manifest of a run does: part files are only ever added to a folder.

    In an object store, where a folder has no time of change: the manifest, whose heartbeat follows every part.
    """
    path = run.path
    if isinstance(path, ObjectPath):
        return json.dumps(run.info.manifest)
    return tuple(_stat(f"{path}/{name}") for name in ("run.json", "about.json", *TABLES))


def _folder_stamp(path: Path) -> Hashable:
    """Changes whenever a run is added to or removed from a folder, or its run.json or about.json is replaced."""
    try:
        with os.scandir(path) as entries:
            return tuple(
                sorted(
                    (entry.name, _stat(f"{entry.path}/run.json"), _stat(f"{entry.path}/about.json"))
                    for entry in entries
                )
            )
    except OSError:
        return None


def _stat(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)  # noqa: PTH116 (a Path for each of a thousand files takes longer than the look)
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)
