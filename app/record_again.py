"""A recorded run as the beginning of another: its settings in the form again, or the run itself continued."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import streamlit as st

from app import data, folders, job_queue, jobs, navigation, record_settings, watch
from recorder.reader import Run
from recorder.training import continuing
from recorder.training.config import LM_ONLY, ToyConfig

#: Session state: {"name", "values"} of the run whose settings the form begins with.
COPIED = "_record_copied"
#: Session state, and the form's own key: whether it is open.
OPEN = "record_expander"
#: Session state: what the form holds, with its preset, where no change of page takes it away.
HELD = "_record_held"
PRESET = "record_preset"
LIKE = "like"  # the preset that stands for the copied run


def settings(run: Run) -> dict[str, Any]:
    """The settings of a run as values of the form, with those that the form has no field for.

    Raises ValueError, one line, for a run that `routescope record` did not make.
    """
    config = ToyConfig.from_manifest(run.manifest)
    values = asdict(config)
    if config.task == "regression":
        values = {name: value for name, value in values.items() if name not in LM_ONLY}
    else:
        values["corpus"] = list(config.corpus)
    plain = asdict(ToyConfig.of(task=config.task, recipe=config.recipe))
    fields = (*record_settings.LABELS, "task", "recipe")
    return {name: value for name, value in values.items() if name in fields or value not in (None, plain[name])}


def why_not_continued(run: Run) -> str | None:
    """Why the dashboard cannot continue a run, in one line; None where it can."""
    if not isinstance(run.path, Path):
        return "it lies in an object store; in a terminal: routescope record --continue URI"
    if run.path.parent not in folders.recording_folders(data.shown_folders()):
        return "its folder cannot be written to"
    job = jobs.job_of(run.path)
    if job is not None and job.waits:
        return "it waits for its turn already"
    if job is not None and jobs.is_alive(job):
        return "it is still being recorded"
    return continuing.why_not(run.path, run.manifest)


def buttons(run: Run, key: str) -> None:
    """Draw the ways on from a run: its settings again and, unless it has finished, going on with it.

    key  tells the buttons of several runs on one page apart
    """
    with st.container(horizontal=True, vertical_alignment="center"):
        try:
            values, reason = settings(run), None
        except ValueError as error:
            values, reason = {}, f"Not possible: {error}."
        st.button(
            "Record again with these settings",
            key=f"again_{key}",
            disabled=reason is not None,
            help=reason or "Fills the form in the sidebar; change there what you like, then start.",
            on_click=_fill,
            args=(run.name, values),
        )
        if run.status in ("running", "finished"):
            return
        reason = why_not_continued(run)
        pressed = st.button(
            "Continue",
            key=f"continue_{key}",
            disabled=reason is not None,
            help=f"Not possible: {reason}."
            if reason
            else "Goes on from the last checkpoint to the number of steps asked for, as if it had never stopped.",
        )
        if pressed:
            _continue(run)


def _fill(name: str, values: dict[str, Any]) -> None:
    """Widget callback: the form takes these values and opens."""
    st.session_state[COPIED] = {"name": name, "values": values}
    st.session_state.pop(HELD, None)
    st.session_state[PRESET] = LIKE
    st.session_state[OPEN] = True
    for field in record_settings.LABELS:
        st.session_state.pop(f"record_{field}", None)


def _continue(run: Run) -> None:
    assert isinstance(run.path, Path)
    command = [sys.executable, "-m", "recorder.cli", "record", "--continue", str(run.path)]
    steps = ToyConfig.from_manifest(run.manifest).steps
    try:
        job_queue.add(command, run_id=run.path.name, out=run.path.parent, steps=steps, continued=True)
    except (OSError, ValueError) as error:
        st.error(f"It could not be continued: {error}")
        return
    watch.forget(run.path.name)
    navigation.go("recording")
