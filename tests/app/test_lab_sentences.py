"""What the lab says in words, for batches whose numbers are known by hand."""

import pytest

from app.lab import run, sentences
from app.lab.lab import Lab

TITLES = {
    "collapse": "Expert 2 takes 6 of 8 tokens; its bias would go from 0 to -0.24",
    "balanced": "Every expert takes 2 of 8 tokens; no bias would move",
    "tie": "Experts 0 and 1 take 3 of 4 tokens each; the bias of the first would go from 0 to -0.00075",
    "padding": "Every expert takes 1 of 2 tokens; the aux loss is that of an even load",
    "six-of-eight": "Expert 0 takes 6 of 8 tokens; the aux loss is 2.4 times that of an even load",
    "bias-chooses": "Experts 0 and 2 take 1 of 1 token each; the bias changed 1 of 2 choices",
    "full": "Expert 0 takes 4 of 6 tokens; 2 assignments are dropped",
    "zero-router-64": "8 experts take 1,000 of 1,000 tokens each; the bias of the first would go from 0 to -0.00175",
}


@pytest.mark.parametrize(("preset", "title"), TITLES.items())
def test_titles(preset: str, title: str) -> None:
    lab = Lab.of(preset)
    assert sentences.title(run.run(lab), lab.settings) == title


def test_a_batch_without_a_token() -> None:
    lab = Lab.from_entries(["padding", "mask:0_0_0_0_0_0"])
    outcome = run.run(lab)
    assert sentences.title(outcome, lab.settings) == "No token can be routed"
    assert sentences.update(outcome, lab) == "There is no token to learn from."
    assert (outcome.aux_loss, outcome.z_loss) == (0, 0)


def test_tokens_that_no_expert_takes() -> None:
    lab = Lab.from_entries(["full", "router:expert-choice", "capacity_factor:0"])
    # six tokens, each expert takes two: expert 0 its first two, experts 1 and 2 their own and the first of the ties
    assert sentences.title(run.run(lab), lab.settings).startswith(
        "Every expert takes 2 of 6 tokens, and 2 tokens get none"
    )


def test_what_the_update_does() -> None:
    lab = Lab.of("collapse")
    assert sentences.update(run.run(lab), lab) == "The update takes max violation on this batch from 2 to 0."
    after = run.advance(lab)
    assert sentences.update(run.run(after), after).startswith("1 update applied so far. The next ")
    even = Lab.of("balanced")
    assert "leaves every choice in this batch as it is" in sentences.update(run.run(even), even)


def test_refusals_say_what_to_choose() -> None:
    lab = Lab.from_entries(["collapse", "router:softmax-after"])
    with pytest.raises(ValueError, match="top_k=1") as refused:
        run.run(lab)
    assert sentences.refusal(refused.value, lab.settings).endswith("Choose a higher k, or another router.")
    lab = Lab.from_entries(["collapse", "top_k:4"])
    with pytest.raises(ValueError, match="top_k=4") as refused:
        run.run(lab)
    assert sentences.refusal(refused.value, lab.settings).startswith("The quantile balancer needs num_experts > top_k")
