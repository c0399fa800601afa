"""What can be done to the runs that are ticked: name, tags and notes, a zip to take away, the trash and the way back.

Each stands in a panel that opens from a button, so that what is closed costs nothing, and closes when it is done.
"""

import io
import shlex
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from app import data, navigation, state
from app.text import plain
from app.words import count, listed, size
from recorder import archive, trash
from recorder.about import MOST_NAME, MOST_NOTES, make_about, write_about
from recorder.storage import is_remote

MOST_DOWNLOAD_BYTES = 128 << 20  # held in the server's memory while the browser fetches it
_MOST_NAMED = 5
_PANEL_WIDTH = 400  # pixels
_NEWS = "_housekeeping_news"
_UNDO = "_housekeeping_undo"


def offer(runs: Sequence[data.Listed]) -> None:
    """Draw the buttons for the ticked runs."""
    if len(runs) == 1:
        run = runs[0]
        with panel("Edit", key="panel_edit", icon=":material/edit:") as is_open:
            if is_open:
                _edit(run)
        with panel("Zip", key="panel_zip", icon=":material/folder_zip:") as is_open:
            if is_open:
                _zip(run)
    with panel("Delete", key="panel_delete", icon=":material/delete:") as is_open:
        if is_open:
            _delete(runs)


@contextmanager
def panel(label: str, *, key: str, icon: str) -> Any:
    """A button that opens a panel; whether it is open. `close(key)` in a callback closes it."""
    popover = st.popover(label, icon=icon, key=key, on_change="rerun")
    # A width of its own: the browser places the panel before it knows what will be in it.
    with popover, st.container(width=_PANEL_WIDTH):
        yield bool(popover.open)


def close(key: str) -> None:
    """Close the panel of this key. Only in a callback, before it is drawn again."""
    st.session_state[key] = False


def tell(text: str, *, good: bool = True, keep: bool = False, below: bool = False) -> None:
    """Say what an action came to, in place of what was said before.

    good   False is a problem, and stays at the head of the page until it is dismissed
    keep   True stays there too
    below  it was done below the table, from where the head of the page may be out of sight
    """
    st.session_state[_NEWS] = _News(text=plain(text), good=good, keep=keep or not good, below=below)
    st.session_state.pop(_UNDO, None)


@dataclass(kw_only=True)
class _News:
    text: str
    good: bool
    keep: bool
    below: bool
    is_new: bool = True


def say_what_happened() -> None:
    """Draw what the last action came to, with the way back where there is one."""
    news: _News | None = st.session_state.get(_NEWS)
    if news is None:
        return
    undo = st.session_state.get(_UNDO)
    stays = news.keep or undo
    if news.is_new and (news.below or not stays):  # not twice where it is seen at once
        st.toast(news.text, icon=":material/info:" if news.good else ":material/warning:")
    news.is_new = False
    if not stays:
        return
    with st.container(horizontal=True, vertical_alignment="center", key="runs_news"):
        (st.info if news.good else st.warning)(news.text, width="stretch")
        if undo:
            st.button("Undo", key="undo_delete", icon=":material/undo:", on_click=_put_back)
        st.button("Dismiss", key="dismiss_news", type="tertiary", on_click=lambda: st.session_state.pop(_NEWS, None))


def why_fixed(run: data.Listed) -> str | None:
    """Why nothing of a run can be changed, as Markdown; None where it can."""
    if not run.read_only:
        return None
    return (
        f"{plain(run.label)} is in {plain(str(run.path.parent))}, which is read-only here: it can be neither renamed "
        "nor deleted. To have one of your own, take it as a zip and bring that in again below the table."
    )


# ----------------------------------------------------------------------------------------------- name, tags, notes


def _edit(run: data.Listed) -> None:
    fixed = why_fixed(run)
    if fixed:
        st.markdown(fixed)
        return
    about = run.info.about
    recorded = str((run.info.manifest or {}).get("name") or run.path.name)
    with st.form(f"about_{run.reference}", border=False):
        keys = {part: f"about_{part}_{run.reference}" for part in ("name", "tags", "notes")}
        st.text_input(
            "Name",
            about.name or "",
            key=keys["name"],
            placeholder=recorded,
            max_chars=MOST_NAME,
            help="Shown everywhere in place of the name it was recorded under. Empty: that name again.",
        )
        st.text_input("Tags, with commas between them", ", ".join(about.tags), key=keys["tags"])
        st.text_area("Notes", about.notes, key=keys["notes"], max_chars=MOST_NOTES, height=150)
        st.form_submit_button(
            "Save", key=f"about_save_{run.reference}", type="primary", on_click=_save, args=(run, keys)
        )
    st.caption(f"Kept in `about.json` beside the run; `run.json` stays as it was recorded, as {plain(recorded)}.")


def _save(run: data.Listed, keys: dict[str, str]) -> None:
    try:
        write_about(run.path, make_about(**{part: st.session_state[key] for part, key in keys.items()}))
    except (ValueError, OSError) as error:
        tell(f"{run.label} could not be changed: {error}", good=False)
        return
    if is_remote(run.path):
        data.look_again()
    close("panel_edit")


# ------------------------------------------------------------------------------------------------------------- zip


def _zip(run: data.Listed) -> None:
    try:
        contents = archive.contents_of(run.path)
    except (ValueError, OSError) as error:
        st.warning(plain(str(error)))
        return
    if run.info.status in ("running", "unreadable"):
        why = "still being written; take it when it has ended" if run.info.status == "running" else "unreadable"
        st.markdown(f"{plain(run.label)} is {why}.")
        return
    st.markdown(f"{count(len(contents.files), 'file')}, {size(contents.size)}: Parquet and JSON, nothing else.")
    if contents.size <= MOST_DOWNLOAD_BYTES:
        st.download_button(
            "Download the run",
            data=lambda: _zipped(run),
            file_name=f"{run.path.name}.zip",
            mime="application/zip",
            key=f"download_{run.reference}",
            icon=":material/download:",
            type="primary",
            on_click="ignore",
        )
        st.caption("Bring it in elsewhere below the table of runs, or with `routescope import zip`.")
    else:
        st.markdown(f"More than {size(MOST_DOWNLOAD_BYTES)} do not go through the browser. In a terminal:")
        st.code(f"routescope export {shlex.quote(str(run.path))} --out {shlex.quote(run.path.name)}.zip", "bash")


def _zipped(run: data.Listed) -> bytes:
    target = io.BytesIO()
    archive.export_zip(run.path, target)
    return target.getvalue()


# -------------------------------------------------------------------------------------------------- trash and back


def _delete(runs: Sequence[data.Listed]) -> None:
    fixed = [reason for run in runs if (reason := why_fixed(run))]
    remote = [run for run in runs if is_remote(run.path)]
    running = [run for run in runs if run.info.status == "running"]
    if fixed:
        st.markdown("\n\n".join(fixed[:_MOST_NAMED]))
    elif remote:
        names = listed([plain(run.label) for run in remote[:_MOST_NAMED]])
        st.markdown(f"{names}: an object store cannot move a run into a trash. Delete it with the store's own tools.")
    elif running:
        names = listed([plain(run.label) for run in running[:_MOST_NAMED]])
        st.markdown(f"{names}: still being written. Cancel it first; what is recorded until then is kept.")
        if st.button("See the recording", key="see_recording"):
            navigation.go("recording")
    else:
        said = f"**{plain(runs[0].label)}**" if len(runs) == 1 else f"these **{len(runs):,} runs**"
        st.markdown(f"Move {said} to the trash? Until that is emptied, there is a way back.")
        st.button("Move to the trash", key="delete_now", type="primary", on_click=_discard, args=(list(runs),))


def _discard(runs: Sequence[data.Listed]) -> None:
    moved: list[trash.Trashed] = []
    problems: list[str] = []
    for run in runs:
        try:
            moved.append(trash.discard(run.path))
        except (ValueError, OSError) as error:
            problems.append(f"{run.label}: {error}")
    close("panel_delete")
    _forget(run.reference for run in runs)
    names = listed([run.name for run in moved[:_MOST_NAMED]]) if len(moved) <= _MOST_NAMED else f"{len(moved):,} runs"
    done = f"{names}, {size(sum(run.size for run in moved))}, moved to the trash. " if moved else ""
    tell(f"{done}{'; '.join(problems[:_MOST_NAMED])}", good=not problems)
    st.session_state[_UNDO] = moved


def _put_back() -> None:
    put_back(st.session_state.pop(_UNDO, []))


def put_back(runs: Sequence[trash.Trashed]) -> None:
    """Restore runs from the trash and say so. For a callback."""
    names, problems = [], []
    for run in runs:
        try:
            trash.restore(run)
            names.append(run.name)
        except OSError as error:
            problems.append(f"{run.name}: {error}")
    done = f"{listed(names[:_MOST_NAMED]) if len(names) <= _MOST_NAMED else f'{len(names):,} runs'} put back. "
    tell(f"{done if names else ''}{'; '.join(problems)}", good=not problems)


def _forget(references: Any) -> None:
    """A run in the trash is no longer chosen: no page shall look for it."""
    gone = set(references)
    if state.wanted("run") in gone:
        state.choose(run=None)
    left = [reference for reference in state.wanted_list("runs") if reference not in gone]
    state.choose(runs=left if len(left) > 1 else None)


def local_folders() -> list[Path]:
    """The shown folders whose runs can be changed and moved."""
    return [folder.path for folder in data.shown_folders() if isinstance(folder.path, Path) and not folder.read_only]
