"""The diagnosis on the pages: its sentences, their rules, and the way to the view that shows each."""

from pathlib import Path

import pytest
from planted import Collapse, Planted, write_planted

from recorder.diagnosis import diagnose
from recorder.reader import Run

COLLAPSED = Planted(steps=60, collapse={3: Collapse(step=20, experts=(1, 2))})


def sentences(test):
    return [element for element in test.markdown if ":material/" in element.value]


def chosen(test, name):
    value = test.query_params[name]
    return value[-1] if isinstance(value, list) else value


def by_text(test, text):
    return next(element for element in sentences(test) if text in element.value)


def test_overview_shows_every_sentence_with_its_rule_and_leads_to_the_step(shown: Path, open_page):
    path = write_planted(shown / "run", COLLAPSED)
    findings = diagnose(Run(path))
    assert [finding.rule for finding in findings] == ["collapsed", "balanced"]
    test = open_page("overview", run="run")
    assert not test.exception, test.exception
    assert len(sentences(test)) == len(findings)
    for finding in findings:
        element = by_text(test, finding.text.replace("_", "\\_").replace(":", "\\:"))
        assert f"Rule `{finding.rule}`" in element.help
    assert "threshold 0.5" in by_text(test, "Layer 3 collapsed").help
    step = findings[0].step
    button = next(one for one in test.button if one.label == f"Replay layer 3 at step {step}")
    button.click().run()
    assert not test.exception, test.exception
    assert test.title[0].value.startswith(f"Step {step}, layer 3:")
    assert chosen(test, "step") == str(step)
    assert chosen(test, "layer") == "3"


def test_compare_leads_to_the_run_that_a_sentence_is_about(shown: Path, open_page):
    write_planted(shown / "balanced", Planted(steps=60))
    write_planted(shown / "collapsed", COLLAPSED)
    test = open_page("compare", runs=["balanced", "collapsed"])
    assert not test.exception, test.exception
    assert len(sentences(test)) == 4
    button = next(one for one in test.button if one.key == "diagnosis_collapsed_0")
    button.click().run()
    assert chosen(test, "run") == "collapsed"
    assert chosen(test, "layer") == "3"


def test_more_sentences_than_fit_stand_behind_a_click(shown: Path, open_page):
    write_planted(shown / "run", Planted(steps=60, layers=tuple(range(9)), num_experts=4, tokens=128))
    test = open_page("overview", run="run")
    assert [one.label for one in test.expander if "more" in one.label] == ["3 more"]


@pytest.mark.parametrize("phase", ["generate", "eval"])
def test_a_run_without_training_steps_says_so_and_is_judged(shown: Path, open_page, phase):
    write_planted(shown / "run", Planted(steps=60, phase=phase, collapse=COLLAPSED.collapse))
    test = open_page("overview", run="run")
    assert not test.exception, test.exception
    captions = "\n".join(one.value for one in test.caption)
    assert f"This run has no training steps: it is judged by its {phase} steps." in captions
    assert f"the last 50 recorded {phase} steps" in captions
    assert "least balanced is layer 3" in test.title[0].value
    write_planted(shown / "other", Planted(steps=60))
    test = open_page("compare", runs=["run", "other"])
    assert not test.exception, test.exception
    assert f"judged by its {phase} steps" in "\n".join(one.value for one in test.caption)
    test = open_page("runs")
    assert f"judged by another phase: run ({phase})" in "\n".join(one.value for one in test.caption)
