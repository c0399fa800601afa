"""The table of runs: its numbers and curves, its ticks, and what is said below it."""

import zlib
from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import charts, data, state
from app.runs_headline import WINDOW, is_judged
from app.text import plain
from app.words import count, listed

_MOST_PROBLEMS = 5  # more stand behind a click
_TICKED = "_runs_ticked"


def frame_of(runs: Sequence[data.Listed], rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """What the table shows, a row a run; null where there is no value. On a narrow window the last columns are cut."""
    frame = pd.DataFrame(
        {
            "run": [run.label for run in runs],
            "status": [row["status"] for row in rows],
            "balancer": [row["balancer"] for row in rows],
            "loss": [row["loss"] for row in rows],
            "ce_loss": [row["ce_loss"] for row in rows],
            "max_violation": [row["max_violation_window"] for row in rows],
            "violation_curve": [_curve(row["violation_curve"]) for row in rows],
            "idle_experts": [row["idle_experts"] for row in rows],
            "dead_experts": [row["dead_experts"] for row in rows],
            "loss_curve": [_curve(row["loss_curve"]) for row in rows],
            "experts": [f"{row['top_k']} of {row['num_experts']}" if row["num_experts"] else None for row in rows],
            "steps": [row["num_steps"] if row["status"] != "unreadable" else None for row in rows],
            "tags": [list(run.info.about.tags) or None for run in runs],
            "notes": [run.info.about.notes or None for run in runs],
            "problem": [_problem(row) for row in rows],
        }
    )
    types = dict.fromkeys(("steps", "idle_experts", "dead_experts"), "Int64")
    return frame.astype(types | dict.fromkeys(("loss", "ce_loss", "max_violation"), "Float64"))


def _curve(values: list[float]) -> list[float] | None:
    return values if len(values) > 1 else None  # a single value would be drawn as a level line


def _problem(row: dict[str, Any]) -> str | None:
    if row["error"]:
        return " ".join(str(row["error"]).split())
    ended = "its process ended without closing the run" if row["status"] == "unfinished" else None
    return "; ".join(part for part in (ended, row.get("trouble")) if part) or None


def _columns(frame: pd.DataFrame) -> dict[str, Any]:
    losses = [value for curve in frame["loss_curve"].dropna() for value in curve]
    violations = [value for curve in frame["violation_curve"].dropna() for value in curve]
    last = f"the last {WINDOW} recorded training steps (all of them where there are fewer)"
    column = st.column_config
    return {
        "run": column.TextColumn("Run", width=180, pinned=True),
        "status": column.TextColumn(
            "Status",
            width=76,
            help="finished; running; cancelled by a person; failed with an error; unfinished: its process ended "
            "without closing the run; unreadable: its run.json cannot be used.",
        ),
        "balancer": column.TextColumn("Balancer", width=80),
        "experts": column.TextColumn(
            "Experts", width=62, help="Experts each token uses (top-k) of the experts of a MoE layer (E)."
        ),
        "steps": column.NumberColumn(
            "Steps",
            width=50,
            format="localized",
            help="Recorded training steps; in a run without any, those of the phase it has.",
        ),
        "loss": column.NumberColumn(
            "Loss",
            width=52,
            format="%.3f",
            help=f"Training loss, auxiliary losses included, in nats per token for a language model: mean of {last}. "
            "No value where none was recorded or one of them is not finite.",
        ),
        "ce_loss": column.NumberColumn(
            "CE",
            width=52,
            format="%.3f",
            help=f"Cross-entropy alone, in nats per token: mean of {last}. Compare runs by this one: the loss of a run "
            "with an auxiliary loss holds that too.",
        ),
        "loss_curve": column.LineChartColumn(
            "Loss curve",
            width=80,
            y_min=min(losses, default=None),
            y_max=max(losses, default=None),
            help="Training loss over all recorded steps, one scale for all runs; at most 60 points, highest and lowest "
            "kept. Values that are not finite are left out.",
        ),
        "max_violation": column.NumberColumn(
            "max_violation",
            width=102,
            format="%.2f",
            help="max(load) / mean(load) - 1 of the loads summed over " + last + ", worst MoE layer. 0 is balanced, "
            "E/k - 1 the most there can be: all tokens on one expert.",
        ),
        "violation_curve": column.LineChartColumn(
            "Its curve",
            width=72,
            y_min=0.0 if violations else None,
            y_max=max(violations, default=None),
            help="max_violation of each step, worst MoE layer, over all recorded steps; one scale from 0 for all "
            "runs; at most 60 points, highest and lowest kept.",
        ),
        "idle_experts": column.NumberColumn(
            "Idle",
            width=38,
            help="Experts that get less than a tenth of the uniform share of the assignments in "
            + last
            + ", dead ones "
            "included; worst MoE layer.",
        ),
        "dead_experts": column.NumberColumn(
            "Dead", width=42, help="Experts that get no assignment at all in " + last + "; worst MoE layer."
        ),
        "tags": column.ListColumn("Tags", width=130),
        "notes": column.TextColumn("Notes", width=200),
    }


def table(runs: Sequence[data.Listed], rows: Sequence[dict[str, Any]]) -> list[int]:
    """Draw the table and return the places of the ticked rows."""
    frame = frame_of(runs, rows)
    order = [run.reference for run in runs]
    # Streamlit keeps a selection as row numbers: where other rows are listed it has to start anew.
    key = f"runs_table_{zlib.crc32(chr(0).join(order).encode()):08x}"
    before = [order.index(reference) for reference in _ticked() if reference in order]
    event = st.dataframe(
        frame.drop(columns=["problem", *(name for name in ("tags", "notes") if frame[name].isna().all())]),
        key=key,
        hide_index=True,
        width="stretch",
        column_config=_columns(frame),
        placeholder="-",
        on_select=lambda: _tick(order, key),
        selection_mode="multi-row",
        selection_default={"selection": {"rows": before}},
        alt="Runs with their status, losses and balance",
    )
    numbers = frame.drop(columns=["loss_curve", "violation_curve"])
    numbers["tags"] = [", ".join(run.info.about.tags) or None for run in runs]
    with st.container(horizontal=True, vertical_alignment="center"):
        charts.save_table(numbers, key="runs")
        st.caption(_scope(runs, rows))
    _problems(frame)
    selection: Any = event
    return [place for place in selection["selection"]["rows"] if place < len(order)]


def _problems(frame: pd.DataFrame) -> None:
    """One line for each run that ended early, went wrong or cannot be read."""
    bad = frame[frame["problem"].notna()]
    lines = [
        f"**{plain(run)}** ({status}): {plain(problem)}"
        for run, status, problem in bad[["run", "status", "problem"]].itertuples(index=False)
    ]
    place = st.container()
    if len(lines) > _MOST_PROBLEMS:
        place = st.expander(f"{len(lines)} runs ended early, went wrong or cannot be read", icon=":material/warning:")
    for line in lines:
        place.markdown(line)


def _scope(runs: Sequence[data.Listed], rows: Sequence[dict[str, Any]]) -> str:
    said = f"Numbers of the last {WINDOW} recorded training steps; max_violation, idle and dead: worst MoE layer."
    short = [run.label for run, row in zip(runs, rows, strict=True) if not is_judged(row) and not row.get("trouble")]
    if short and len(short) < len(rows):
        named = listed([plain(label) for label in short]) if len(short) <= 3 else count(len(short), "run")
        said += f" Not judged in the title, with fewer than {WINDOW} steps to go by: {named}."
    other = [
        (run.label, row["phase"]) for run, row in zip(runs, rows, strict=True) if row["phase"] not in (None, "train")
    ]
    if other:
        named = listed([f"{plain(label)} ({phase})" for label, phase in other[:3]])
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        said += f" Without training steps, judged by another phase: {named}{more}."
    return said


def _ticked() -> list[str]:
    """References of the rows to tick when the table is first drawn: what is compared, or the one last opened here."""
    several = state.wanted_list("runs")
    single = st.session_state.get(_TICKED)
    return several or ([single] if single is not None and single == state.wanted("run") else [])


def _tick(order: Sequence[str], key: str) -> None:
    # A callback, so that the run picker in the sidebar, which is drawn before the page, already knows.
    chosen = [order[place] for place in st.session_state[key]["selection"]["rows"] if place < len(order)]
    st.session_state[_TICKED] = chosen[0] if len(chosen) == 1 else None
    if len(chosen) == 1:
        state.choose(run=chosen[0])
    state.choose(runs=chosen if len(chosen) > 1 else None)
