"""Below the table of runs: bring in a zipped run, choose which folders are shown, and the trash of each.

A folder is added by typing its path on the page, and only where the dashboard can be reached from this machine alone;
never by a link, since whoever sends a link would then choose what the server lists. See `app.folders`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import streamlit as st

from app import data, folders, housekeeping, record_uploads
from app.text import plain
from app.words import count, size
from recorder import archive, trash

MOST_UNPACKED_BYTES = 2 << 30
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_UPLOAD = "_runs_upload"  # how many were brought in: the field starts anew with each


def show() -> None:
    """Draw the three, folded."""
    with st.container(gap="xsmall", key="runs_folders"):
        _folded("Bring in a run", "panel_bring_in", ":material/upload:", _bring_in)
        number = len(data.shown_folders())
        _folded(f"{count(number, 'folder')} shown", "panel_folders", ":material/folder_open:", _folders)
        held = sum(trash.held(folder) for folder in housekeeping.local_folders())
        if held:
            _folded(f"{count(held, 'run')} in the trash", "panel_trash", ":material/delete:", _trash)


def _folded(label: str, key: str, icon: str, draw: Callable[[], None]) -> None:
    place = st.expander(label, icon=icon, key=key, on_change="rerun")
    if place.open:
        with place:
            draw()


# ------------------------------------------------------------------------------------------------------- bring in


def _bring_in() -> None:
    targets = folders.recording_folders(data.shown_folders())
    if not targets:
        st.markdown("None of the folders shown can be written to, so there is no place for it.")
        return
    key = f"bring_in_{st.session_state.setdefault(_UPLOAD, 0)}"
    most = int(st.get_option("server.maxUploadSize"))
    file = st.file_uploader(
        f"A run as one zip, at most {most} MB",
        type="zip",
        key=key,
        help=f"As this page or `routescope export` makes it: Parquet and JSON alone, at most "
        f"{size(MOST_UNPACKED_BYTES)} unpacked. Larger ones: `routescope import zip FILE` in a terminal.",
    )
    target = targets[0]
    if len(targets) > 1:
        target = st.selectbox("Into the folder", targets, format_func=str, key="bring_in_folder")
    else:
        st.caption(f"Into `{target}`.")
    st.button(
        "Bring it in", key="bring_in_now", type="primary", disabled=file is None, on_click=_import, args=(file, target)
    )


def _import(file: Any, target: Path) -> None:
    try:
        imported = archive.import_zip(file, target, most_bytes=MOST_UNPACKED_BYTES)
    except (ValueError, OSError) as error:
        housekeeping.tell(f"{file.name} was not brought in: {error}", good=False, below=True)
        return
    st.session_state[_UPLOAD] += 1
    housekeeping.close("panel_bring_in")
    report = imported.report
    if report.problems:
        first = report.problems[0]
        housekeeping.tell(
            f"{imported.path.name} was brought in, with {count(len(report.problems), 'fault')}; the first is in "
            f"{first.file}: {first.text}. All of them: routescope verify {imported.path}",
            good=False,
            below=True,
        )
    else:
        read = f"{report.parts} parts, {report.rows:,} rows and {size(report.size)} read to the last byte"
        housekeeping.tell(f"{imported.path.name} was brought in: {read}, nothing wrong.", keep=True, below=True)


# -------------------------------------------------------------------------------------------------------- folders


def _folders() -> None:
    added = folders.added()
    held = [run.path.parent for run in data.listed()]
    for folder in data.shown_folders():
        with st.container(horizontal=True, vertical_alignment="center"):
            read_only = ", read-only" if folder.read_only else ""
            st.markdown(f"`{folder.path}`: {count(held.count(folder.path), 'run')}{read_only}", width="content")
            if folder.path in added:
                st.button("Hide", key=f"hide_{folder.label}", on_click=folders.hide, args=(folder.path,))
    if not is_private(st.get_option("server.address"), st.context.url):
        st.markdown("This dashboard can be reached from other machines. Other folders are shown from a terminal:")
        st.code("routescope app FOLDER FOLDER", "bash")
        return
    st.text_input("Show another folder of runs", key="add_folder", placeholder="path on this machine")
    st.button("Show it", key="add_folder_now", type="primary", on_click=_add)
    st.caption("Shown until the dashboard is stopped. To start with it next time: `routescope app FOLDER FOLDER`.")


def _add() -> None:
    typed = st.session_state["add_folder"]
    try:
        path = folders.add(typed)
    except ValueError as error:
        housekeeping.tell(str(error), good=False, below=True)
        return
    st.session_state["add_folder"] = ""
    housekeeping.close("panel_folders")
    housekeeping.tell(f"The runs in {path} are shown too.", below=True)


def is_private(address: str | None, url: str | None) -> bool:
    """Whether only this machine can reach the dashboard, as far as can be told.

    address  what the server listens on; None is every network
    url      what the browser asked for; another name than this machine's means that a proxy passes others on
    """
    host = urlsplit(url or "").hostname
    return address in _LOOPBACK and (host is None or host in _LOOPBACK)


# ---------------------------------------------------------------------------------------------------------- trash


def _trash() -> None:
    places = housekeeping.local_folders()
    runs = [run for place in places for run in trash.trashed(place)]
    for run in runs[:20]:
        with st.container(horizontal=True, vertical_alignment="center"):
            where = f" from {plain(str(run.folder))}" if len(places) > 1 else ""
            when = f"{run.deleted_at:%Y-%m-%d %H:%M} UTC"
            st.markdown(f"**{plain(run.name)}**{where}, {size(run.size)}, deleted {when}", width="content")
            st.button("Put back", key=f"put_back_{run.path.parent.name}", on_click=housekeeping.put_back, args=([run],))
    if len(runs) > 20:
        st.caption(f"And {len(runs) - 20:,} that were deleted before these.")
    total = f"{count(len(runs), 'run')}, {size(sum(run.size for run in runs))}"
    sure = st.checkbox(f"Remove all of it for good: {total}. There is no way back.", key="empty_trash_sure")
    st.button(
        "Empty the trash", key="empty_trash", type="primary", disabled=not sure, on_click=_empty, args=(runs, total)
    )


def _empty(runs: list[trash.Trashed], total: str) -> None:
    housekeeping.close("panel_trash")
    st.session_state["empty_trash_sure"] = False
    try:
        trash.remove_for_good(runs)
    except OSError as error:
        housekeeping.tell(f"Not all of the trash could be removed: {error}", good=False, below=True)
        return
    for folder in housekeeping.local_folders():
        record_uploads.remove_unused(folder)
    housekeeping.tell(f"Removed for good: {total}.", below=True)
