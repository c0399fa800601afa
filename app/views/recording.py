"""Recordings in progress: how far each is, its loss and load so far, and the way to stop it.

A recording belongs to no page: closing this one, reloading it, or stopping the server leaves it running.
"""

from typing import Any

import streamlit as st

from app import charts, data, folders, job_queue, jobs, layer_keys, navigation, record_again, record_form, state, watch
from app.figures.curves import metric_curves
from app.figures.inputs import Curve
from app.figures.load_heatmap import load_heatmap
from app.fragments import fragment
from app.text import duration, plain
from recorder.reader import Run
from recorder.training.config import ToyConfig

_REFRESH_S = 1.5
NOTHING = "Nothing is being recorded"
_RECENT = 5  # recordings that ended earlier and are still offered here


def render() -> None:
    """Draw the page: recordings in progress first, then those that have ended."""
    found = watch.all_jobs()
    if not found and not watch.elsewhere(found):
        st.title(NOTHING)
        st.markdown("Open *Record a run* in the sidebar and press *Start*, or in a terminal:")
        target = folders.recording_folder(data.shown_folders())
        st.code(f"routescope record --balancer none --steps 400 --out {target or 'runs'}", "bash")
        return
    going_on = _going_on(found)
    fragment(_live, run_every=_REFRESH_S if going_on else None)(going_on)


def _going_on(found: list[jobs.Job]) -> set[str]:
    ours = (*watch.active(found), *watch.waiting(found))
    return {*(job.run_id for job in ours), *(listed.reference for listed in watch.elsewhere(found))}


def headline(recorded: list[str], waiting: int) -> str:
    """What goes on: the runs that are being recorded, by name, and how many wait for their turn."""
    if not recorded:
        what = NOTHING
    else:
        what = f"Recording {recorded[0]}" if len(recorded) == 1 else f"Recording {len(recorded)} runs at once"
    return f"{what}; {waiting} {'waits' if waiting == 1 else 'wait'}" if waiting else what


def _live(expected: set[str]) -> None:
    """Draw what goes on. expected: what did when the page was drawn."""
    found = watch.all_jobs()
    active = watch.active(found)
    ended = watch.just_ended(found)
    waiting = watch.waiting(found)
    # Another page takes away what is being typed: a form that is being filled for the next recording keeps this one.
    if not active and not waiting and not record_form.is_being_filled():
        for job in ended:
            if jobs.state(job) == "finished" and watch.can_open(job):
                watch.open_run(job)
    if _going_on(found) != expected:
        state.draw_again()  # the run picker, and the clock of this fragment, belong to the whole page
    elsewhere = watch.elsewhere(found)
    st.title(
        plain(
            headline(
                [
                    *(watch.name_of(job) for job in active),
                    *(listed.info.name for listed in elsewhere),
                ],
                len(waiting),
            )
        )
    )
    for job in active:
        _progress(job)
    for listed in elsewhere:
        _elsewhere(listed)
    _queue(waiting)
    for job in ended:
        _result(job)
    earlier = [job for job in found if job not in active and job not in ended and not job.waits][:_RECENT]
    if earlier:
        st.subheader("Ended before", anchor=False)
        for job in earlier:
            _result(job)


def _progress(job: jobs.Job) -> None:
    run, _ = data.open_run(job.run_path)
    progress = jobs.progress(job, run)
    name = watch.name_of(job)
    with st.container(border=True, key=f"recording_{job.run_id}"):
        with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
            st.subheader(plain(name), anchor=False, width="content")
            if st.button("Stopping" if job.cancelled else "Cancel", key=f"cancel_{job.run_id}", disabled=job.cancelled):
                jobs.cancel(job)
                st.rerun(scope="fragment")
        st.progress(min(progress.done / max(progress.total, 1), 1.0), text=_progress_text(job, progress))
        if job.cancelled:
            st.caption("It stops after the step under way; what is recorded until then is kept.")
        else:
            st.caption(f"Cancelling keeps every step recorded so far, {progress.done} of {progress.total} now.")
        if run is not None and progress.done:
            _so_far(job.run_id, run)


def _queue(waiting: list[jobs.Job]) -> None:
    """Those that wait for their turn, the next one first."""
    if not waiting:
        return
    st.subheader("Waiting for their turn", anchor=False)
    st.caption(
        "Each starts when nothing else is recorded into its folder, also when this page or the server is closed."
    )
    for place, job in enumerate(waiting, 1):
        with st.container(
            horizontal=True, vertical_alignment="center", border=True, key=f"waiting_{job.run_id}", gap="small"
        ):
            what = "goes on" if job.continued else f"{job.steps} steps"
            st.markdown(f"{place}. **{plain(watch.name_of(job))}**, {what}", width="stretch")
            if place > 1:
                st.button("Move up", key=f"up_{job.run_id}", on_click=job_queue.move_up, args=(job,))
            beside = "Beside what is being recorded."
            st.button("Start now", key=f"now_{job.run_id}", help=beside, on_click=job_queue.start_now, args=(job,))
            st.button("Cancel", key=f"cancel_{job.run_id}", on_click=job_queue.cancel, args=(job,))


def _elsewhere(listed: data.Listed) -> None:
    """A run that is recorded from a terminal or by a script of the person's own."""
    run, _ = data.open_run(listed.path)
    if run is None:
        return
    with st.container(border=True, key=f"elsewhere_{listed.reference}"):
        with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
            st.subheader(plain(run.name), anchor=False, width="content")
            if st.button("Open the run", key=f"open_{listed.reference}"):
                navigation.go("overview", run=listed.reference, step=None, layer=None)
        done = "no step so far" if run.last_step is None else f"step {run.last_step}"
        if run.last_step is not None and (total := _steps_asked_for(run)):
            done = f"step {run.last_step + 1} of {total}"
        st.caption(f"Recorded by a process that was not started here: {done}. It is stopped where it was started.")
        if run.last_step is not None:
            _so_far(listed.reference, run)


def _steps_asked_for(run: Run) -> int | None:
    """The steps that a run of `routescope record` will have; None of a script's, which does not say."""
    try:
        return ToyConfig.from_manifest(run.manifest).steps
    except ValueError:
        return None


def _so_far(key: str, run: Run) -> None:
    theme = charts.theme()
    frame = data.steps(run)
    loss = Curve(
        name=run.name,
        group=run.name,
        colour=0,
        steps_S=frame["step"].to_numpy(dtype="int64"),
        values_S=frame["loss"].to_numpy(dtype="float64", na_value=float("nan")),
    )
    series = [data.load_series(run, key) for key in layer_keys.keys(run)]
    st.caption("A falling loss means it learns. Pale colours: all experts are used; red and purple: a few take all.")
    left, right = st.columns([2, 3])
    with left:
        in_nats = bool(frame["ce_loss"].notna().any())
        figure = metric_curves(
            [loss],
            title="Loss so far",
            y_title="loss (nats per token)" if in_nats else "loss",
            theme=theme,
            wrap_at=40,
        )
        charts.show(figure, key=f"loss_{key}", alt=f"Training loss of {run.name} by step, so far.")
    with right:
        figure = load_heatmap(series, title="Load so far", theme=theme, wrap_at=60)
        charts.show(
            figure,
            key=f"load_{key}",
            alt=f"Load over the uniform share of each expert of {run.name} by step, so far.",
        )


def _result(job: jobs.Job) -> None:
    run, _ = data.open_run(job.run_path)
    progress = jobs.progress(job, run)
    name = watch.name_of(job)
    said = {
        "finished": f"finished, {_steps_in(progress)}",
        "cancelled": f"cancelled after {progress.done} of {progress.total} steps"
        + ("; they are kept" if progress.done else "; nothing had been recorded yet"),
        "failed": f"failed after {progress.done} of {progress.total} steps",
    }[progress.state]
    with st.container(border=True, key=f"ended_{job.run_id}"):
        with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
            st.markdown(f"**{plain(name)}** {said}", width="content")
            if progress.done and watch.can_open(job) and st.button("Open the run", key=f"open_{job.run_id}"):
                watch.open_run(job)
        if progress.message:
            st.error(plain(progress.message))
        if run is not None:
            record_again.buttons(run, job.run_id)


def _steps_in(progress: jobs.Progress) -> str:
    """The steps and how long they took; of a continued run, the steps since then."""
    taken = duration(progress.elapsed_s)
    if progress.before:
        return f"{progress.done} steps, the last {progress.done - progress.before} of them in {taken}"
    return f"{progress.done} steps in {taken}"


def _progress_text(job: jobs.Job, progress: jobs.Progress) -> str:
    if progress.state == "starting":
        return f"Preparing text and model, {duration(progress.elapsed_s)} so far"
    parts: list[Any] = [f"step {progress.done} of {progress.total}", f"{duration(progress.elapsed_s)} elapsed"]
    if progress.rate is not None:
        parts.append(f"{progress.rate:.1f} steps/s")
    if progress.left_s is not None and not job.cancelled:
        parts.append(f"about {duration(progress.left_s)} left")
    return ", ".join(parts)
