"""Specialisation: planted domains and token ids come out, and every share is that of pandas on the files."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from opened import tables
from planted import Planted, write_planted

BLOCKS = ((0, 5, 9, 12), (1, 4, 10, 15), (2, 7, 8, 13), (3, 6, 11, 14))
TRUTH = Planted(steps=60, blocks=BLOCKS)


def table(test, column):
    assert not test.exception, test.exception
    return next(frame for frame in tables(test) if column in frame)


def joined(run: Path, layer: int) -> pd.DataFrame:
    """A row for each assignment of phase train in the files: step, token, expert, token_id, domain, text."""
    rows = pq.read_table(run / "decisions").to_pandas(ignore_metadata=True)
    rows = rows[(rows["layer"] == layer) & (rows["phase"] == "train")][["step", "token", "experts"]]
    tokens = pq.read_table(run / "tokens").to_pandas(ignore_metadata=True)
    tokens = tokens[tokens["phase"] == "train"][["step", "token", "token_id", "domain", "text"]]
    return rows.merge(tokens, on=["step", "token"]).explode("experts").rename(columns={"experts": "expert"})


@pytest.fixture
def run(shown):
    return write_planted(shown / "run", TRUTH)


def test_domains_are_those_of_the_files_and_own_their_planted_experts(run, open_page):
    test = open_page("specialisation", run="run", layer=3, phase="train")
    rows = joined(run, 3)
    tokens = rows.groupby("domain").size() / 2
    load = rows.groupby(["domain", "expert"]).size()
    numbers = table(test, "times k/E")
    assert len(numbers) == 4 * 16
    for row in numbers.itertuples(index=False):
        share = load.get((row[0], row[1]), 0) / tokens[row[0]]
        assert row[2] == pytest.approx(share)
        assert row[3] == pytest.approx(share / (2 / 16))
        others = [load.get((name, row[1]), 0) / tokens[name] for name in tokens.index if name != row[0]]
        assert row[4] == pytest.approx(np.mean(others))
    for number, block in enumerate(BLOCKS):
        mine = numbers[numbers["domain"] == f"domain {number}"].nlargest(4, "times k/E")
        assert set(mine["expert"]) == set(block)
    title = test.title[0].value
    name = next(name for name in tokens.index if name in title)
    expert = int(title.partition("use expert ")[2].partition(",")[0])
    assert expert in BLOCKS[int(name[-1])]
    assert "evenly it would be 12.5%" in title


def test_tokens_of_an_expert_and_experts_of_a_token_are_those_of_the_files(run, open_page):
    rows = joined(run, 3)
    expert, token = 7, int(rows["token_id"].iloc[0])
    test = open_page("specialisation", run="run", layer=3, phase="train", expert=expert, token=token)
    occurrences = rows.groupby("token_id").size() / 2
    mine = rows[rows["expert"] == expert]
    frame = table(test, "to this expert")
    expected = mine.groupby("token_id").size()
    assert dict(zip(frame["token_id"], frame["to this expert"], strict=True)) == expected.to_dict()
    for row in frame.itertuples(index=False):
        assert row[2] == occurrences[row[1]]
        assert row[4] == pytest.approx(100 * expected[row[1]] / occurrences[row[1]])
        assert row[5] == pytest.approx(100 * expected[row[1]] / len(mine))
    assert frame["share of the token's (%)"].is_monotonic_decreasing
    assert set(frame["token_id"].head(4)) == {8, 9, 10, 11}  # the four of domain 2, whose block holds expert 7

    where = next(e for e in tables(test) if list(e.columns) == ["expert", "occurrences", "share (%)"])
    went = rows[rows["token_id"] == token].groupby("expert").size()
    assert dict(zip(where["expert"], where["occurrences"], strict=True)) == went.to_dict()
    assert where["occurrences"].is_monotonic_decreasing

    examples = table(test, "before")
    last = rows[rows["step"] == 40]
    texts = last.drop_duplicates("token").set_index("token")["text"]
    chosen = set(last[last["expert"] == expert]["token"])
    for row in examples.itertuples(index=False):
        number = row[3] * 32 + row[4]
        assert number in chosen
        assert row[1] == texts[number]
        assert row[0] == "".join(texts[n] for n in range(max(row[3] * 32, number - 8), number))
    assert "counted together, those of early training too" in "\n".join(element.value for element in test.caption)
    button = next(one for one in test.button if one.key == "specialisation_tokens")
    button.click().run()
    assert not test.exception, test.exception
    assert {name: test.query_params[name] for name in ("step", "layer", "phase")} == {
        "step": "40",
        "layer": "3",
        "phase": "train",
    }


def test_without_domains_it_says_how_to_record_them(shown, open_page):
    write_planted(shown / "run", Planted(steps=40))
    test = open_page("specialisation", run="run", layer=1)
    assert not test.exception, test.exception
    assert "No domains were recorded" in "\n".join(element.value for element in test.caption)
    assert test.title[0].value == "Layer 1: which tokens its experts take"


def test_even_domains_have_no_experts_of_their_own(shown, open_page):
    write_planted(shown / "run", Planted(steps=60, blocks=BLOCKS, loyalty=1.0))
    test = open_page("specialisation", run="run", layer=1)
    assert "no domain has experts of its own" in test.title[0].value


def test_decisions_without_tokens(shown, open_page, write_run):
    write_run(shown, "run", range(20))
    test = open_page("specialisation", run="run")
    assert not test.exception, test.exception
    assert "No token ids were recorded" in test.info[0].value


def test_without_decisions_it_says_what_to_do(shown, open_page, write_run):
    write_run(shown, "run", range(1, 5))
    test = open_page("specialisation", run="run")
    assert not test.exception, test.exception
    assert "This run recorded no single decisions" in test.info[0].value
