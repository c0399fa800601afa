"""The table of logits to type into, and the slider that moves one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from app.lab.batch import Batch
from app.lab.choices import KEY, change, current, fill, set_value, slider
from app.lab.lab import Lab, number, written

_EDITOR = "_lab_editor"  # what the table of logits began with, and what it shows
# What a number looks like while it is typed, letter by letter: the browser drops a letter that fits no pattern.
_NUMBER = r"^\s*-?(\d*\.?\d*([eE][-+]?\d*)?|i(nf?)?|n(an?)?)\s*$"
_MOST_ROWS = 64  # of a batch that is only shown


def table(lab: Lab) -> None:
    """The logits as a table to type into; one too large for that is only shown."""
    batch = lab.batch
    columns: dict[str, Any] = {
        "real": st.column_config.CheckboxColumn("real", help="Off: padding, which takes no expert and never counts."),
        **{
            name: st.column_config.TextColumn(
                name, validate=_NUMBER, alignment="right", help='A number; also "nan", "inf" and "-inf".'
            )
            for name in _names(batch)
        },
    }
    if not lab.is_editable:
        shown = _as_table(Batch(logits_TE=batch.logits_TE[:_MOST_ROWS], mask_T=batch.mask_T[:_MOST_ROWS]))
        st.dataframe(shown, width="stretch", height=250, column_config=columns)
        st.caption(
            f"The first {len(shown)} of {batch.num_tokens:,} tokens. A batch of {batch.logits_TE.size:,} logits is too "
            "large to be changed by hand."
        )
        return
    editor = st.session_state.setdefault(_EDITOR, {"number": 0, "base": None, "shows": None})
    shows = "~".join(_as_text(batch))
    key = f"{KEY}table_{editor['number']}"
    # A new table begins where the batch is not what the old one shows, and on coming back to the page. While it is
    # typed into, the table keeps its first content: replaced after each number, it would lose the cell one is in.
    if editor["shows"] != shows or key not in st.session_state:
        editor["number"] += 1
        editor["base"], editor["shows"] = batch, shows
        key = f"{KEY}table_{editor['number']}"
    st.data_editor(
        _as_table(editor["base"]),
        key=key,
        on_change=_edit,
        args=(key,),
        num_rows="fixed",
        width="stretch",
        column_config=columns,
    )


def one_logit(lab: Lab) -> None:
    """A slider for one logit: to see at which value a token changes its mind."""
    batch, settings = lab.batch, lab.settings
    with st.container(horizontal=True, vertical_alignment="bottom"):
        for name, label, most in (
            ("spot_token", "Token", batch.num_tokens),
            ("spot_expert", "Expert", batch.num_experts),
        ):
            fill(name, getattr(settings, name))
            st.number_input(
                label, 0, most - 1, step=1, key=f"{KEY}{name}", on_change=set_value, args=(name,), width=110
            )
        logit = float(batch.logits_TE[settings.spot_token, settings.spot_expert])
        least, most_ = min(-6.0, np.floor(logit)), max(6.0, np.ceil(logit))
        if not np.isfinite(logit):
            st.caption(f"This logit is {logit}: no place on a slider.")
        elif lab.is_editable:
            slider("logit", "Its logit", float(least), float(most_), 0.1, round(logit, 4), store=_set_logit)


def apply_edits(base: Batch, edits: Mapping[int, Mapping[str, Any]]) -> tuple[Batch, bool]:
    """The batch with cells changed as Streamlit's editor reports them, and whether every cell could be read.

    edits: row to column name to value; the columns are "real" and those of the table. What is no number stays.
    """
    names = _names(base)
    logits_TE, mask_T, all_read = base.logits_TE.copy(), base.mask_T.copy(), True
    for row, cells in edits.items():
        for name, cell in cells.items():
            if name == "real":
                mask_T[int(row)] = bool(cell)
                continue
            logit = number("" if cell is None else str(cell))
            all_read &= logit is not None
            if logit is not None:
                logits_TE[int(row), names.index(name)] = logit
    return Batch(logits_TE=logits_TE, mask_T=mask_T), all_read


def _as_text(batch: Batch) -> list[str]:
    """A batch as text, to tell whether a table shows it."""
    return [
        "_".join(map(written, row_E)) + f"_{mask}" for row_E, mask in zip(batch.logits_TE, batch.mask_T, strict=True)
    ]


def _names(batch: Batch) -> list[str]:
    return [f"expert {expert}" for expert in range(batch.num_experts)]


def _as_table(batch: Batch) -> pd.DataFrame:
    frame = pd.DataFrame([[written(cell) for cell in row_E] for row_E in batch.logits_TE], columns=_names(batch))
    frame.insert(0, "real", batch.mask_T)
    frame.index.name = "token"
    return frame


def _edit(key: str) -> None:
    editor = st.session_state[_EDITOR]
    batch, all_read = apply_edits(editor["base"], st.session_state[key]["edited_rows"])
    editor["shows"] = "~".join(_as_text(batch)) if all_read else None  # what cannot be read must not stay on view
    change(current().with_batch(batch))


def _set_logit() -> None:
    lab = current()
    logits_TE = lab.batch.logits_TE.copy()
    logits_TE[lab.settings.spot_token, lab.settings.spot_expert] = st.session_state[f"{KEY}logit"]
    change(lab.with_batch(Batch(logits_TE=logits_TE, mask_T=lab.batch.mask_T)))
