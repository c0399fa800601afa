"""Recordings as a session sees them: which go on, which ended since it first saw them, and which it has opened."""

from typing import NoReturn

import streamlit as st

from app import data, folders, job_queue, jobs, navigation

_SEEN = "_recordings_seen"
_DONE_WITH = "_recordings_done_with"


def all_jobs() -> list[jobs.Job]:
    """Every recording into a folder that is shown and can be written, newest first in each folder.

    Without those whose runs have been deleted since. Where some wait, it is seen to that they get their turn.
    """
    found = []
    for path in folders.recording_folders(data.shown_folders()):
        here = jobs.jobs(path)
        if waiting(here):
            job_queue.keep_going(path)
        found += [job for job in here if not jobs.is_deleted(job)]
    return found


def active(found: list[jobs.Job]) -> list[jobs.Job]:
    """Those of `found` whose process runs. From now on this session knows them, and those that wait."""
    running = [job for job in found if jobs.is_alive(job)]
    _names(_SEEN).update(job.run_id for job in (*running, *waiting(found)))
    return running


def waiting(found: list[jobs.Job]) -> list[jobs.Job]:
    """Those of `found` that wait for their turn, the next one first."""
    return sorted((job for job in found if job.waits), key=lambda job: job.place or 0.0)


def elsewhere(found: list[jobs.Job]) -> list[data.Listed]:
    """Running runs that none of these recordings writes: those of people's own scripts."""
    ours = {job.run_path for job in found}
    return [run for run in data.listed() if run.info.status == "running" and run.path not in ours]


def just_ended(found: list[jobs.Job]) -> list[jobs.Job]:
    """Those of `found` that this session saw running, that have ended, and that it is not done with."""
    expected = _names(_SEEN) - _names(_DONE_WITH)
    return [job for job in found if job.run_id in expected and not job.waits and not jobs.is_alive(job)]


def done_with(job: jobs.Job) -> None:
    """No more notice of this recording in this session."""
    _names(_DONE_WITH).add(job.run_id)


def name_of(job: jobs.Job) -> str:
    """What to call a recording: its run's name, else the one that it will have."""
    run, _ = data.open_run(job.run_path)
    if run is not None:
        return run.name
    given = [word.removeprefix("--name=") for word in job.command if word.startswith("--name=")]
    return given[-1] if given else job.run_id


def forget(run_id: str) -> None:
    """A run of this name is recorded anew: what was said of it before says nothing now."""
    _names(_SEEN).discard(run_id)
    _names(_DONE_WITH).discard(run_id)


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
