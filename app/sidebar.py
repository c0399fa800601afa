"""The recordings in progress, and those just ended, as a few lines in the sidebar of every page."""

import streamlit as st

from app import data, jobs, navigation, state, watch
from app.fragments import fragment
from app.text import plain

_REFRESH_S = 2.0


def recordings(page: str) -> None:
    """Draw the lines, kept up to date on their own; nothing where nothing is recorded.

    page  name of the page they stand beside; the page of recordings says all of it itself, and newer
    """
    if page == "recording":
        return
    found = watch.all_jobs()
    going_on = [job.run_id for job in (*watch.active(found), *watch.waiting(found))]
    fragment(_lines, run_every=_REFRESH_S if going_on else None)(going_on)


def _lines(expected: list[str]) -> None:
    found = watch.all_jobs()
    active, waiting = watch.active(found), watch.waiting(found)
    if {job.run_id for job in (*active, *waiting)} != set(expected):
        state.draw_again()  # one has ended: the run picker, and the clock of this fragment, belong to the whole page
    for job in active:
        run, _ = data.open_run(job.run_path)
        progress = jobs.progress(job, run)
        name = watch.name_of(job)
        text = "starting" if progress.state == "starting" else f"step {progress.done} of {progress.total}"
        st.progress(min(progress.done / max(progress.total, 1), 1.0), text=f"{plain(name)}: {text}")
    if waiting:
        names = ", ".join(plain(watch.name_of(job)) for job in waiting)
        st.caption(f"Waiting for their turn: {names}" if len(waiting) > 1 else f"Waiting for its turn: {names}")
    if (active or waiting) and st.button("Watch", key="watch", icon=":material/visibility:"):
        navigation.go("recording")
    for job in watch.just_ended(found):
        _ended(job)


def _ended(job: jobs.Job) -> None:
    ended = jobs.state(job)
    st.caption(f"{plain(watch.name_of(job))}: {ended}")
    with st.container(horizontal=True):
        if ended != "failed" and watch.can_open(job):
            if st.button("Open the run", key=f"notice_open_{job.run_id}"):
                watch.open_run(job)
        elif st.button("See why", key=f"notice_why_{job.run_id}"):
            watch.done_with(job)
            navigation.go("recording")
        if st.button("Dismiss", key=f"notice_dismiss_{job.run_id}", type="tertiary"):
            watch.done_with(job)
            st.rerun()
