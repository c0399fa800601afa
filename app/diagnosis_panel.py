"""What the diagnosis says of a run, sentence by sentence: each with its rule, and a way to the view that shows it."""

from collections.abc import Sequence

import streamlit as st

from app import data, layer_keys, navigation
from app.text import plain
from app.words import step_word, value
from recorder.diagnosis import RULES, Finding
from recorder.reader import Run

_MOST = 6
_SIGNS = {"alarm": ":material/error:", "note": ":material/info:", "good": ":material/check_circle:"}
_LEADS_TO = ":material/arrow_forward:"
_COLOURS = {"alarm": "red", "note": "gray", "good": "green"}


def show(run: Run, *, reference: str | None = None, label: str | None = None, most: int = _MOST) -> None:
    """Draw the sentences, alarms first; those past `most` stand behind a click.

    reference  the run's reference, where it is not the one picked in the sidebar
    label      its name, above the sentences
    """
    findings = data.diagnosis(run)
    if label is not None:
        st.markdown(f"**{plain(label)}**")
    key = "diagnosis" if reference is None else f"diagnosis_{reference}"
    with st.container(key=key, gap="xsmall"):
        _draw(run, findings[:most], key, 0, reference)
        if len(findings) > most:
            with st.expander(f"{len(findings) - most} more"):
                _draw(run, findings[most:], key, most, reference)


def instead_of_training(run: Run) -> str:
    """That a run has no training steps, and what it is judged by."""
    return f"This run has no training steps: it is judged by its {step_word(data.main_phase(run))}s."


def rule_of(finding: Finding) -> str:
    """The rule that fired, what was measured, and the most likely step where the sentence gives two, in Markdown."""
    rule = RULES[finding.rule]
    said = f"Rule `{finding.rule}`: {rule.when}."
    if finding.value is not None and rule.threshold is not None:
        said += f" Measured{_when(finding)}: {value(finding.value)}, threshold {value(rule.threshold)}."
    if finding.within and finding.step is not None:
        within = "1 recorded step" if finding.within == 1 else f"{finding.within:,} recorded steps"
        said += f" Most likely it was step {finding.step:,}, which is right to within {within}."
    return said


def _when(finding: Finding) -> str:
    """Of which steps the measured number is, where the evidence tells."""
    first, last = (finding.evidence.get(name) for name in ("first_step", "last_step"))
    if first is None or last is None:
        return ""
    return f" at step {last:,}" if first == last else f" over steps {first:,} to {last:,}"


def place_of(run: Run, finding: Finding) -> str | None:
    """The view that shows it, in words; None where it is the overview itself."""
    if finding.page != "replay" or finding.layer is None:
        return None
    named = layer_keys.label(run, layer_keys.key_of(run, finding.layer, finding.router))
    return f"Replay layer {named}" + ("" if finding.step is None else f" at step {finding.step:,}")


def _draw(run: Run, findings: Sequence[Finding], key: str, start: int, reference: str | None) -> None:
    for number, finding in enumerate(findings, start):
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            sign = f":{_COLOURS[finding.level]}[{_SIGNS[finding.level]}]"
            st.markdown(f"{sign} {plain(finding.text)}.", help=rule_of(finding), width="content")
            place = place_of(run, finding)
            if place is None and reference is not None:
                place = "Open its overview"
            if place is not None and st.button(place, key=f"{key}_{number}", type="tertiary", icon=_LEADS_TO):
                chosen = {} if reference is None else {"run": reference}
                layer = None if finding.layer is None else layer_keys.key_of(run, finding.layer, finding.router)
                where = {"layer": layer, "step": finding.step, "expert": None, "phase": data.linked_phase(run)}
                navigation.go(finding.page, **chosen, **(where if finding.page == "replay" else {}))
