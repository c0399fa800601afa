"""Every run on one page: how it ended, how well it learned, how balanced it is; and the way to open or compare them."""

import zlib
from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import data, navigation, pickers, state
from app.text import plain
from app.views import empty
from app.words import count, listed

WINDOW = data.ROW_WINDOW
_REFRESH_S = 3.0
_MOST_PROBLEMS = 5  # more stand behind a click
_TICKED = "_runs_ticked"

_RULE = (
    f"Judged are runs with at least {WINDOW} recorded training steps, over the last {WINDOW} of them; a run without "
    "any is judged by the phase it has, and named below the table. "
    "An expert is idle where it gets less than a tenth of the uniform share in that window, and busy where it does "
    "not; of a run with several MoE layers the worst one counts. A router z-loss alone is no balancer. "
    "A run has gone wrong, and is not judged, where in that window the loss is not finite, or tokens were not routed."
)


def render() -> None:
    """Draw the page."""
    head = st.container()
    runs = pickers.in_order(data.listed())
    if not runs:
        head.title("Runs")
        empty.no_runs()
        return
    rows = [data.row(run) for run in runs]
    head.title(headline(runs, rows), help=_RULE)
    actions = st.container(
        horizontal=True, vertical_alignment="center", gap="small", height=56, border=False, key="runs_actions"
    )
    ticked = _table(runs, rows)
    with actions:
        _offer([runs[place] for place in ticked], [rows[place] for place in ticked])
    if any(row["status"] == "running" for row in rows):
        st.fragment(_watch, run_every=_REFRESH_S)(_progress(runs))


def headline(runs: Sequence[data.Listed], rows: Sequence[dict[str, Any]]) -> str:
    """The answer in words: what the runs with and without a balancer have in common. Claims nothing of the others.

    runs, rows  the runs and their `data.row`, in the same order
    """
    pairs = [(run, row) for run, row in zip(runs, rows, strict=True) if is_judged(row)]
    total = count(len(runs), "run")
    wrong = sum(row.get("trouble") is not None for row in rows)
    if not pairs and wrong:
        other = ", none of the others long enough to judge the balance" if wrong < len(runs) else ""
        return f"{total}, {_gone_wrong(wrong)}{other}"
    if not pairs:
        return f"{total}, none long enough to judge the balance"
    without = [pair for pair in pairs if _has_balancer(pair[1]) is False]
    with_one = [pair for pair in pairs if _has_balancer(pair[1])]
    said = [_without(without)] if without else []
    said += [_with(with_one)] if with_one else []
    if not said:
        said = [_idle_among(pairs, "run", "runs")]
    said += [_gone_wrong(wrong)] if wrong else []
    judged = f", {len(pairs)} judged" if len(pairs) < len(runs) else ""
    return f"{total}{judged}: {'; '.join(said)}"


def is_judged(row: dict[str, Any]) -> bool:
    """Whether a run has recorded enough, and nothing that went wrong, to say which of its experts are idle."""
    return row["idle_experts"] is not None and row["num_steps"] >= WINDOW and row.get("trouble") is None


def _gone_wrong(runs: int) -> str:
    return f"{runs} {'has' if runs == 1 else 'have'} gone wrong (see below the table)"


def _has_balancer(row: dict[str, Any]) -> bool | None:
    """None where the run does not say."""
    if not row["balancer"]:
        return None
    return bool({part.strip() for part in str(row["balancer"]).split("+")} - {"none", "z"})


def _without(pairs: Sequence[tuple[data.Listed, dict[str, Any]]]) -> str:
    run, row = max(pairs, key=lambda pair: pair[1]["idle_experts"])
    idle = row["idle_experts"]
    if not idle:
        return "without a balancer all experts are busy too" if len(pairs) == 1 else "no idle expert without a balancer"
    experts = _experts(run)
    of_all = f" of {experts}" if experts else ""
    up_to = "up to " if len(pairs) > 1 else ""
    return f"without a balancer a layer leaves {up_to}{idle}{of_all} experts idle"


def _with(pairs: Sequence[tuple[data.Listed, dict[str, Any]]]) -> str:
    with_idle = sum(row["idle_experts"] > 0 for _, row in pairs)
    if len(pairs) == 1:
        return "the run with a balancer " + ("has idle experts" if with_idle else "keeps all experts busy")
    if not with_idle:
        return "every run with a balancer keeps all experts busy"
    return _idle_among(pairs, "run with a balancer", "runs with a balancer")


def _idle_among(pairs: Sequence[tuple[data.Listed, dict[str, Any]]], one: str, many: str) -> str:
    with_idle = sum(row["idle_experts"] > 0 for _, row in pairs)
    if not with_idle:
        return "all experts are busy"
    return f"{with_idle} of {count(len(pairs), one, many)} {'has' if with_idle == 1 else 'have'} idle experts"


def _experts(run: data.Listed) -> int | None:
    """Experts of a MoE layer, where all of the run's have the same number."""
    layers = ((run.info.manifest or {}).get("model") or {}).get("layers") or []
    numbers = {layer.get("num_experts") for layer in layers if layer.get("kind", "moe") == "moe"}
    return numbers.pop() if len(numbers) == 1 else None


# ------------------------------------------------------------------------------------------------------ the table


def frame_of(runs: Sequence[data.Listed], rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """What the table shows, a row a run; null where there is no value."""
    frame = pd.DataFrame(
        {
            "run": [run.label for run in runs],
            "status": [row["status"] for row in rows],
            "balancer": [row["balancer"] for row in rows],
            "experts": [f"{row['top_k']} of {row['num_experts']}" if row["num_experts"] else None for row in rows],
            "steps": [row["num_steps"] if row["status"] != "unreadable" else None for row in rows],
            "loss": [row["loss"] for row in rows],
            "ce_loss": [row["ce_loss"] for row in rows],
            "loss_curve": [_curve(row["loss_curve"]) for row in rows],
            "max_violation": [row["max_violation_window"] for row in rows],
            "violation_curve": [_curve(row["violation_curve"]) for row in rows],
            "idle_experts": [row["idle_experts"] for row in rows],
            "dead_experts": [row["dead_experts"] for row in rows],
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
        "run": column.TextColumn("Run", width=95, pinned=True),
        "status": column.TextColumn(
            "Status",
            width=84,
            help="finished; running; cancelled by a person; failed with an error; unfinished: its process ended "
            "without closing the run; unreadable: its run.json cannot be used.",
        ),
        "balancer": column.TextColumn("Balancer", width=86),
        "experts": column.TextColumn(
            "Experts", width=62, help="Experts each token uses (top-k) of the experts of a MoE layer (E)."
        ),
        "steps": column.NumberColumn(
            "Steps",
            width=48,
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
            width=62,
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
            width=62,
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
    }


def _table(runs: Sequence[data.Listed], rows: Sequence[dict[str, Any]]) -> list[int]:
    """Draw the table and return the places of the ticked rows."""
    frame = frame_of(runs, rows)
    order = [run.reference for run in runs]
    # Streamlit keeps a selection as row numbers: where other rows are listed it has to start anew.
    key = f"runs_table_{zlib.crc32(chr(0).join(order).encode()):08x}"
    before = [order.index(reference) for reference in _ticked() if reference in order]
    event = st.dataframe(
        frame.drop(columns="problem"),
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
    with st.container(horizontal=True, vertical_alignment="center"):
        st.download_button(
            "Save as CSV",
            data=lambda: numbers.to_csv(index=False).encode(),
            file_name="runs.csv",
            mime="text/csv",
            key="runs_csv",
            icon=":material/download:",
            on_click="ignore",
        )
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


# ----------------------------------------------------------------------------------------------- what can be done


def _offer(runs: Sequence[data.Listed], rows: Sequence[dict[str, Any]]) -> None:
    if not runs:
        st.markdown("Tick one run to open it, or several to compare them.", width="content")
    elif len(runs) == 1:
        _offer_one(runs[0], rows[0])
    else:
        _offer_several(runs, rows)


def _offer_one(run: data.Listed, row: dict[str, Any]) -> None:
    st.markdown(f"**{plain(run.label)}**", width="content")
    if row["status"] == "unreadable":
        if st.button("See what to do about it", key="open_overview", icon=":material/error:", type="primary"):
            navigation.go("overview", run=run.reference)
        return
    buttons = (
        ("overview", "Open overview", ":material/monitoring:"),
        ("replay", "Replay its steps", ":material/play_circle:"),
        ("tokens", "See its tokens", ":material/text_fields:"),
    )
    for page, label, icon in buttons:
        kind = "primary" if page == "overview" else "secondary"
        if st.button(label, key=f"open_{page}", icon=icon, type=kind):  # type: ignore[arg-type]
            navigation.go(page, run=run.reference)


def _offer_several(runs: Sequence[data.Listed], rows: Sequence[dict[str, Any]]) -> None:
    good = [run for run, row in zip(runs, rows, strict=True) if row["status"] != "unreadable"]
    left_out = [run.label for run in runs if run not in good]
    if len(good) > 1:
        label = f"Compare these {len(good)} runs"
        if st.button(label, key="compare", icon=":material/compare_arrows:", type="primary"):
            navigation.go("compare", runs=[run.reference for run in good])
        st.markdown(listed([f"**{plain(run.label)}**" for run in good]), width="content")
    else:
        st.markdown("Two runs that can be read are needed for a comparison.", width="content")
    if left_out:
        st.markdown(f"Left out, unreadable: {listed([plain(label) for label in left_out])}.", width="content")


def _progress(runs: Sequence[data.Listed]) -> list[tuple[str, str, int]]:
    rows = [data.row(run) for run in runs]
    return [(row["reference"], row["status"], row["num_steps"]) for row in rows]


def _watch(drawn: list[tuple[str, str, int]]) -> None:
    """Draw the page again when a run has moved on, ended, or been added."""
    if _progress(pickers.in_order(data.listed())) != drawn:
        st.rerun()
