"""The sidebar form that records a toy run: a preset, what it costs here, and the details folded away."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from app import data, folders, job_queue, jobs, navigation, record_again, record_cost, record_uploads, watch
from app.fragments import fragment
from app.record_presets import FIRST, PRESETS
from app.record_settings import BALANCERS, HELP, INTEGERS, LABELS, OPTIONAL, command, new_run_id, problems
from app.text import plain
from recorder.training.config import LM_ONLY, ROUTERS, ToyConfig

_FILLED, _WAS_OPEN = "_record_being_filled", "_record_was_open"
_BASIS = "record_basis"
_MEASURED = "record_measured"
#: Settings that a preset is not about: choosing another one leaves them as they are, unless their default changes.
_OF_THE_RUN = ("steps", "seed", "decisions_every", "batch_size", "seq_len", "lr")
_FLOATS = ("aux_coef", "z_coef", "bias_rate", "lr")
_SHAPE = ("num_experts", "top_k", "num_shared_experts", "latent_size", "num_layers", "moe_frequency")
_REST = ("decisions_every", "batch_size", "seq_len", "d_model")
_WAIT, _AT_ONCE = "Wait", "At once"


def render() -> None:
    """Draw the form; on a valid submission start the recording, or queue it, and go to its page."""
    # A change of page by a button takes every widget's state away, this one's and those of the fields (see `_hold`).
    st.session_state.setdefault(record_again.OPEN, st.session_state.get(_WAS_OPEN, False))
    with st.expander("Record a run", icon=":material/add_circle:", key=record_again.OPEN, on_change="rerun") as form:
        st.session_state[_WAS_OPEN] = form.open
        if form.open:
            fragment(_form)()  # so that a changed value draws this form anew and not the page


def _form() -> None:
    target = folders.recording_folder(data.shown_folders())
    if target is None:
        st.warning("None of the folders shown can be written to. Start the dashboard on one that can:")
        st.code("routescope app FOLDER", "bash")
        return
    basis = _preset()
    values = basis | _fields(basis)
    uploads: list[Any] = []
    if basis["task"] == "lm":
        values["corpus"], uploads = _text()
    with st.expander("All settings", key="record_advanced"):
        values |= _details(basis)
    _hold(values)
    wrong = problems(values) + record_uploads.problems(uploads)
    for line in wrong:
        st.error(plain(line))
    if not wrong:
        _cost(values, target)
    waits = _when(target)
    if not st.button("Start", type="primary", icon=":material/play_arrow:", key="record_start") or wrong:
        return
    try:
        if uploads:
            values["corpus"] = [*values["corpus"], *record_uploads.keep(uploads, target)]
        run_id = new_run_id(values, target)
        start = job_queue.add if waits else jobs.start
        start(command(values, run_id=run_id, out=target), run_id=run_id, out=target, steps=values["steps"])
    except (OSError, ValueError) as error:
        st.error(plain(f"The recording could not be started: {error}"))
        return
    _hold(values)  # with the files that were uploaded
    st.session_state[_FILLED] = False
    navigation.go("recording")


def is_being_filled() -> bool:
    """Whether the form is open and a person has changed a field since a recording was started from it last."""
    return bool(st.session_state.get(_FILLED) and st.session_state.get(record_again.OPEN))


def _hold(values: Mapping[str, Any]) -> None:
    """Remember what the form holds, for when its widgets have forgotten it."""
    held = {**values, "preset": st.session_state[record_again.PRESET]}
    before = st.session_state.get(record_again.HELD, held)
    # Files become paths at the start of a recording; that is no change of a person's.
    if {**before, "corpus": None} != {**held, "corpus": None}:
        st.session_state[_FILLED] = True
    st.session_state[record_again.HELD] = held


def _preset() -> dict[str, Any]:
    """Draw the choice of what to record; the settings that it fixes beyond the fields."""
    copied = st.session_state.get(record_again.COPIED)
    titles = {name: preset.title for name, preset in PRESETS.items()}
    if copied is not None:
        titles = {record_again.LIKE: f"Like {copied['name']}", **titles}
    st.session_state.setdefault(record_again.PRESET, st.session_state.get(record_again.HELD, {}).get("preset", FIRST))
    name = st.selectbox(
        "What to record",
        list(titles),
        format_func=titles.__getitem__,
        key=record_again.PRESET,
        on_change=_take_preset,
        help="A preset fills all settings below; any of them can be changed.",
    )
    if name == record_again.LIKE and copied is not None:
        settings = {key: value for key, value in copied["values"].items() if key != "name"}
        beyond = {key: value for key, value in settings.items() if key not in LABELS}
        st.caption(plain(_beyond_words(beyond)))
    else:
        settings = PRESETS[name].settings
        config = PRESETS[name].config
        beyond = {"task": config.task, "recipe": config.recipe}
        st.caption(PRESETS[name].summary)
    st.session_state[_BASIS] = settings
    return beyond


def _beyond_words(beyond: Mapping[str, Any]) -> str:
    more = [f"{name.replace('_', ' ')} {value}" for name, value in beyond.items() if name != "task" and value != ""]
    return f"All settings of that run, also {', '.join(more)}." if more else "All settings of that run."


def _take_preset() -> None:
    """Widget callback: the fields take what the preset says."""
    name = st.session_state[record_again.PRESET]
    copied = name == record_again.LIKE
    before = ToyConfig.of(**st.session_state[_BASIS])
    settings = st.session_state[record_again.COPIED]["values"] if copied else PRESETS[name].settings
    now = ToyConfig.of(**settings)
    for field in ("balancer", "router", *INTEGERS, *_FLOATS):
        if copied or field not in _OF_THE_RUN or getattr(now, field) != getattr(before, field):
            st.session_state[f"record_{field}"] = getattr(now, field)


def _fields(basis: Mapping[str, Any]) -> dict[str, Any]:
    """The few fields that every recording is about."""
    values: dict[str, Any] = {}
    for column, name in zip(st.columns(2, vertical_alignment="bottom"), ("steps", "seed"), strict=True):
        with column:
            values[name] = _integer(name, basis)
    _fill("name")
    values["name"] = st.text_input(LABELS["name"], key="record_name", max_chars=80, placeholder="the run's folder")
    return values


def _text() -> tuple[list[str], list[Any]]:
    """Text of one's own: paths on this machine, and uploads."""
    with st.expander(LABELS["corpus"], key="record_text"):
        uploads = st.file_uploader(
            "Files",
            type=list(record_uploads.TYPES),
            accept_multiple_files=True,
            max_upload_size=record_uploads.LIMIT_MB,
            key="record_uploads",
            help=f"Plain text in UTF-8, {', '.join(record_uploads.TYPES)}, up to {record_uploads.LIMIT_MB} MB each. "
            "Each becomes a domain beside the built-in ones; they are kept beside the runs, in .uploads.",
        )
        if "record_corpus" not in st.session_state:
            st.session_state["record_corpus"] = "\n".join(_begin().get("corpus", []))
        corpus = st.text_area(
            "Paths",
            key="record_corpus",
            height=68,
            placeholder="/path/to/file.txt",
            help="Files or folders of plain text on this machine, one a line; each becomes a domain too.",
        )
    return [line.strip() for line in corpus.splitlines() if line.strip()], uploads or []


def _details(basis: Mapping[str, Any]) -> dict[str, Any]:
    unused = LM_ONLY if basis["task"] == "regression" else ()
    values: dict[str, Any] = {}
    _fill("balancer")
    values["balancer"] = st.selectbox(
        LABELS["balancer"],
        list(dict.fromkeys([*BALANCERS, st.session_state["record_balancer"]])),
        format_func=lambda name: BALANCERS.get(name, name),
        key="record_balancer",
        help="What keeps the load even. Without one, watch experts collapse.",
    )
    _fill("router")
    values["router"] = st.selectbox(
        LABELS["router"],
        ROUTERS,
        format_func=str.capitalize,
        key="record_router",
        help="How router logits become scores.",
    )
    for name in (*_SHAPE, *_FLOATS, *_REST):
        if name in _FLOATS:
            _fill(name)
            values[name] = st.number_input(LABELS[name], min_value=0.0, value=None, format="%g", key=f"record_{name}")
        elif name not in unused:
            values[name] = _integer(name, basis)
    return values


def _cost(values: Mapping[str, Any], target: Path) -> None:
    """How large the model is and how long its recording will take, with a way to know better."""
    config = record_cost.config_of(values)
    measured = [*record_cost.recorded_here(target), *st.session_state.get(_MEASURED, [])]
    seconds = record_cost.estimate(config, measured)
    st.caption(plain(f"{record_cost.size_words(record_cost.size(config))} {record_cost.seconds_words(seconds)}"))
    if seconds is not None and seconds.close:
        return
    if st.button("Measure it", key="record_measure", help=record_cost.MEASURE_HELP):
        try:
            with st.spinner(f"Recording {record_cost.MEASURE_STEPS} steps"):
                measured_now = record_cost.measure(values)
        except (OSError, ValueError) as error:
            st.error(plain(str(error)))
            return
        st.session_state.setdefault(_MEASURED, []).append(measured_now)
        st.rerun()


def _when(target: Path) -> bool:
    """Whether the recording shall wait for others; asked only where there are any."""
    found = [job for job in watch.all_jobs() if Path(job.out) == target]
    if not any(job.waits or jobs.is_alive(job) for job in found):
        return False
    choice = st.segmented_control(
        "Another is being recorded",
        [_WAIT, _AT_ONCE],
        default=_WAIT,
        required=True,
        key="record_when",
        help="One that waits starts by itself when it is its turn. Two at once share the processor: each takes "
        "longer, and neither its losses nor its loads change.",
    )
    return choice != _AT_ONCE


def _integer(name: str, basis: Mapping[str, Any]) -> int | None:
    least, most = INTEGERS[name]
    # Filled through the session: given as `value`, the default would come back, unseen, in a field that was emptied.
    _fill(name)
    label = "Samples per batch" if name == "batch_size" and basis["task"] == "regression" else LABELS[name]
    placeholder = "not used" if name in OPTIONAL else None
    return st.number_input(
        label, least, most, None, step=1, key=f"record_{name}", help=HELP.get(name), placeholder=placeholder
    )


def _begin() -> dict[str, Any]:
    """What the fields begin with: the values they held before or that were copied, where they are of this preset."""
    held = st.session_state.get(record_again.HELD, {})
    if held.get("preset") == st.session_state[record_again.PRESET]:
        return dict(held)
    copied = st.session_state.get(record_again.COPIED)
    if copied is not None and st.session_state[record_again.PRESET] == record_again.LIKE:
        return dict(copied["values"])
    return {}


def _fill(name: str) -> None:
    """Put what it begins with into a field that Streamlit has emptied or never drawn."""
    key = f"record_{name}"
    if key not in st.session_state:
        st.session_state[key] = {"name": "", **vars(ToyConfig.of(**st.session_state[_BASIS])), **_begin()}[name]
