"""What a page shows where there is nothing to draw: no runs, an unreadable run, a run without steps yet.

Each says what to do next. `require_run` is how every page gets its run.
"""

import shlex
from pathlib import Path

import streamlit as st

from app import data, folders, jobs, live, navigation, state
from app.fragments import fragment
from app.text import plain
from recorder.reader import Run
from recorder.storage import Place

_LOOK_AGAIN_S = 1.0
_MOST_NAMED = 5  # part files named in a line; all of them stand behind a click


def require_run(*, layers: bool = True, decisions: bool = False) -> Run | None:
    """The run picked in the sidebar, up to date; or None after drawing why there is none and what to do.

    A run that is still recorded, was cut off, failed, or has unreadable parts gets a line that says so and is
    returned all the same. Draw the page's title before, and return where this is None.

    layers     False accepts a run without any MoE layer
    decisions  True also looks into the part files of single decisions, so that damage there is told
    """
    reference = state.current("run")
    listed = data.find(reference)
    if listed is None:
        no_runs()
        return None
    run, error = data.open_run(listed.path)
    if run is None:
        unreadable(listed.path, error or "")
        return None
    if len(data.steps(run, None)) == 0:
        no_steps(run)
        return None
    if layers and data.lists_no_layers(run):
        _problems(run)
        no_layers_listed(run)
        return None
    if layers and not run.moe_layers:
        _problems(run)
        st.info("This run has no MoE layer, so there is no routing to show. Pick another run in the sidebar.")
        return None
    problem = data.loads_problem(run) if layers else None
    if decisions:
        data.decision_steps(run)
    _notes(run)
    if problem is not None:
        unusable_loads(run, problem)
        return None
    return run


def no_runs() -> None:
    """No run in any shown folder."""
    shown = data.shown_folders()
    st.info("There are no runs here yet.", icon=":material/inbox:")
    st.markdown("**Record one:** open *Record a run* in the sidebar and press *Start*, or in a terminal:")
    target = folders.recording_folder(shown)
    st.code(f"routescope record --balancer none --steps 400 --out {_quoted(target or Path('runs'))}", "bash")
    st.markdown("**Or show runs from elsewhere:** start the dashboard on the folder that holds them:")
    st.code("routescope app FOLDER", "bash")
    st.caption("Folders shown now: " + ", ".join(f"`{folder.path}`" for folder in shown))
    for line in data.unreachable():
        st.warning(plain(line), icon=":material/cloud_off:")
    for folder in shown:
        if data.is_run(folder.path):
            st.warning(f"`{folder.path}` is a run itself. Show the folder above it:")
            st.code(f"routescope app {_quoted(folder.path.parent)}", "bash")


def unreadable(path: Place, error: str) -> None:
    """A run whose manifest cannot be used."""
    st.error(f"The run `{path.name}` cannot be read.", icon=":material/error:")
    st.markdown(f"**Why:** {plain(error)}")
    st.markdown(
        "**What to do:** pick another run in the sidebar; or put back a sound `run.json` from a copy. "
        "Its tables are ordinary Parquet files and can be read without it:"
    )
    st.code(f"python -c \"import pandas; print(pandas.read_parquet('{path / 'steps'}'))\"", "bash")
    st.markdown("To be rid of the run, delete its folder:")
    st.code(str(path), None)


def unusable_loads(run: Run, problem: str) -> None:
    """A run whose manifest is sound and whose loads are not."""
    st.error(f"The loads of the run `{run.path.name}` cannot be used.", icon=":material/error:")
    st.markdown(f"**Why:** {plain(problem)}")
    st.markdown(
        "**What to do:** pick another run in the sidebar; or write the part files of `layer_stats` anew, "
        "with one count for each expert in every row:"
    )
    st.code(str(run.path / "layer_stats"), None)


def no_layers_listed(run: Run) -> None:
    """A run that recorded loads, but whose manifest names no layer."""
    st.info("The run.json of this run does not list the model's layers, so this page cannot show its routing.")
    st.markdown(
        "**What to do:** pick another run in the sidebar; or list the layers in its `run.json`, under `model`. "
        "The loads themselves are recorded and can be read as they are:"
    )
    st.code(f"routescope summary {_quoted(run.path)}", "bash")


def where_readable(run: Run) -> str:
    """What a sentence about something that is not there must add where part files cannot be read; else ""."""
    return " in the part files that can be read" if data.problems(run) else ""


def no_steps(run: Run) -> None:
    """A run that has recorded nothing yet, or never will; or whose steps cannot be read."""
    if data.problems(run) or (run.status != "running" and run.last_step is not None):
        _problems(run)
        st.markdown(
            f"No step of this run can be read; it is {run.status}"
            + ("." if run.last_step is None else f", its last step was {run.last_step:,}.")
        )
        st.markdown("**What to do:** put the files back from a copy, or pick another run in the sidebar.")
        st.code(str(run.path), None)
        return
    if run.status != "running":
        st.warning(f"This run is {run.status} and recorded no step.", icon=":material/hourglass_disabled:")
        if run.manifest.get("error"):
            st.markdown(f"**Why:** {plain(str(run.manifest['error']))}")
        st.markdown(
            "**What to do:** pick another run in the sidebar, or record again with *Record a run* there. "
            "The folder holds nothing else and can be deleted:"
        )
        st.code(str(run.path), None)
        return
    st.info("This run has just been started. Its first steps appear here by themselves.", icon=":material/timer:")
    fragment(_wait_for_steps, run_every=_LOOK_AGAIN_S)(run.path)


def _wait_for_steps(path: Place) -> None:
    run, _ = data.open_run(path)
    if run is None or run.status != "running" or len(data.steps(run, None)):
        state.draw_again()
    job = jobs.job_of(path)
    if job is not None and st.button("Watch the recording", key="watch_first_steps"):
        navigation.go("recording")


def _notes(run: Run) -> None:
    status, last = run.status, run.last_step
    if status == "running":
        live.keep_up(run)
    elif status == "unfinished":
        st.warning(
            f"This run ended at step {last} without being closed, for instance because its process was killed"
            + (f"; {sign}. " if (sign := live.last_sign(run)) else ". ")
            + "Everything recorded until then is shown."
        )
    elif status == "failed":
        st.warning(f"This run failed after step {last}: {plain(str(run.manifest.get('error') or 'no reason given'))}")
    _problems(run)


def _problems(run: Run) -> None:
    """Which part files cannot be read; nothing where all can."""
    lines = data.problems(run)
    if not lines:
        return
    many = "1 part file" if len(lines) == 1 else f"{len(lines)} part files"
    names = ", ".join(line.partition(": ")[0] for line in lines[:_MOST_NAMED])
    more = f" and {len(lines) - _MOST_NAMED} more" if len(lines) > _MOST_NAMED else ""
    st.warning(
        f"{many} cannot be read: {plain(names)}{more}. "
        f"What {'it holds' if len(lines) == 1 else 'they hold'} is missing here.",
        icon=":material/warning:",
    )
    with st.expander("Why they cannot be read"):
        st.code("\n".join(lines), None)


def _quoted(path: Place) -> str:
    text = str(path)
    return shlex.quote(text)
