"""Settling: saturation, churn and the last movers against the planted truth and against pandas on the files."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from opened import tables
from planted import Planted, write_planted
from streamlit import dataframe_util

from app import settling

TRUTH = Planted(num_experts=16, top_k=2, tokens=256, steps=80, moves=(0.4, 0.2, 0.1, 0.05), decisions_every=20)


def table(test, column):
    assert not test.exception, test.exception
    return next(frame for frame in tables(test) if column in frame)


def firsts(run: Path, layer: int) -> pd.DataFrame:
    """First choices from the files: a row for each token, a column for each probe step."""
    rows = pq.read_table(run / "decisions").to_pandas(ignore_metadata=True)
    rows = rows[(rows["phase"] == "probe") & (rows["layer"] == layer)]
    rows = rows.assign(first=[experts[0] for experts in rows["experts"]])
    return rows.pivot_table(index="token", columns="step", values="first")


@pytest.fixture
def opened(shown, open_page):
    run = write_planted(shown / "run", TRUTH)
    test = open_page("settling", run="run", layer=3)
    assert not test.exception, test.exception
    return run, test


def test_saturation_and_churn_are_the_planted_ones(opened):
    _, test = opened
    numbers = table(test, "saturation")
    moved_T = TRUTH.mover_of()
    for layer in (1, 3):
        rows = numbers[numbers["layer"] == layer]
        assert rows["step"].tolist() == TRUTH.probes == [0, 19, 38, 57, 76]
        # a token that has yet to move has none of its final experts
        expected = [1 - (moved_T > number).mean() for number in range(5)]
        np.testing.assert_allclose(rows["saturation"].to_numpy(np.float64), expected)
        churn = rows["churn"].to_numpy(np.float64, na_value=np.nan)
        np.testing.assert_allclose(churn[1:], [(moved_T == number).mean() for number in range(1, 5)])
        assert np.isnan(churn[0])
    # moved by then: 40% at step 19, 60% at 38, 70% at 57; still to move are .35, .15, .05
    assert test.title[0].value == (
        "80% of the final choices are in place from step 38 on in layer 1 and from step 38 on in layer 3"
    )


def test_the_tokens_that_moved_last_are_those_of_the_files(opened):
    run, test = opened
    first = firsts(run, 3)
    final = first.iloc[:, -1]
    last = first.ne(final, axis=0).apply(lambda row: row.index[row].max() if row.any() else None, axis=1)
    bars = table(test, "share (%)")
    assert bars["tokens"].tolist() == [
        int(last.isna().sum()),
        *(int((last == step).sum()) for step in TRUTH.probes[:-1]),
    ]
    movers = table(test, "final expert")
    assert len(movers) == int(last.notna().sum())
    assert movers["last other choice at"].is_monotonic_decreasing
    for row in movers.itertuples(index=False):
        step, token, there, to = row[0], row[1], row[2], row[3]
        assert last[token] == step
        assert (there, to) == (first.loc[token, step], final[token])
    texts = movers.set_index("token")["text"]
    assert all(text == f"probe{token}" for token, text in texts.items())
    button = next(one for one in test.button if one.key == "settling_tokens")
    button.click().run()
    assert "probe" in test.query_params["phase"]
    assert not test.exception, test.exception


def test_without_probes_it_says_what_to_do(shown, open_page):
    write_planted(shown / "run", Planted(steps=20))
    test = open_page("settling", run="run")
    assert not test.exception, test.exception
    assert "This run recorded no probe with its decisions" in test.info[0].value
    assert "--probe-every" in test.code[0].value
    assert test.title[0].value == "Settling"


def series(*values):
    return pd.Series(values, index=np.arange(len(values)) * 10, dtype=np.float64)


def test_settled_by_hand():
    assert settling.settled_at(series(0.2, 0.85, 0.7, 0.8, 0.9, 1)) == 30
    assert settling.settled_at(series(0.9, 0.9, 1)) == 0
    assert settling.settled_at(series(0.2, 0.5, 1)) is None  # the last probe agrees with itself
    assert settling.settled_at(series(0.9, np.nan, 0.9, 1)) == 20


def test_titles_by_hand():
    good, bad = series(0.2, 0.9, 0.9, 1), series(0.2, 0.5, 0.6, 1)
    assert "no layer has 80%" in settling.headline({0: bad, 1: bad})
    assert "layer 1 reached 80% of the final choices only at the last probe" in settling.headline({0: good, 1: bad})
    assert settling.headline(dict.fromkeys(range(5), good)).startswith(
        "All 5 layers have 80% of their final choices in place from step 10 on"
    )


def test_a_layer_with_two_routers_beside_one_with_one(shown, open_page, monkeypatch):
    """Their names, "1 (router 0)" and 3, stand in one column: Streamlit mends that after a traceback in the log."""
    mended = []
    monkeypatch.setattr(dataframe_util, "fix_arrow_incompatible_column_types", lambda *those: mended.append(those))
    write_planted(shown / "run", dataclasses.replace(TRUTH, layers=(1, 1, 3), steps=20, moves=(0.4, 0.2)))
    test = open_page("settling", run="run")
    assert set(table(test, "saturation")["layer"]) == {"1 (router 0)", "1 (router 1)", "3"}
    assert mended == []
