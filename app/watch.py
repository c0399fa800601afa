"""Recordings as a session sees them: which go on, which ended since it first saw them, and which it has opened."""

from typing import NoReturn

import streamlit as st

from app import data, folders, jobs, navigation

_SEEN = "_recordings_seen"
_DONE_WITH = "_recordings_done_with"


def all_jobs() -> list[jobs.Job]:
    """Every recording into a folder that is shown and can be written, newest first in each folder.

    Without those whose runs have been deleted since.
    """
    return [
        job
        for path in folders.recording_folders(data.shown_folders())
        for job in jobs.jobs(path)
        if not jobs.is_deleted(job)
    ]


def active(found: list[jobs.Job]) -> list[jobs.Job]:
    """Those of `found` whose process runs. From now on this session knows them."""
    running = [job for job in found if jobs.is_alive(job)]
    _names(_SEEN).update(job.run_id for job in running)
    return running


def elsewhere(found: list[jobs.Job]) -> list[data.Listed]:
    """Running runs that none of these recordings writes: those of people's own scripts."""
    ours = {job.run_path for job in found}
    return [run for run in data.listed() if run.info.status == "running" and run.path not in ours]


def just_ended(found: list[jobs.Job]) -> list[jobs.Job]:
    """Those of `found` that this session saw running, that have ended, and that it is not done with."""
    waiting = _names(_SEEN) - _names(_DONE_WITH)
    return [job for job in found if job.run_id in waiting and not jobs.is_alive(job)]


def done_with(job: jobs.Job) -> None:
    """No more notice of this recording in this session."""
    _names(_DONE_WITH).add(job.run_id)


def can_open(job: jobs.Job) -> bool:
    """Whether its run is among those listed."""
    return any(run.path == job.run_path for run in data.listed())


def open_run(job: jobs.Job) -> NoReturn:
    """Make the recording's run the selected one and go to its overview. Needs `can_open`."""
    done_with(job)
    run = next(run for run in data.listed() if run.path == job.run_path)
    # The step and layer chosen for another run would hide the end of this one.
    navigation.go("overview", run=run.reference, step=None, layer=None)


def _names(key: str) -> set[str]:
    names: set[str] = st.session_state.setdefault(key, set())
    return names
