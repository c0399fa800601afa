"""Co-activation: planted blocks come out, and every share is that of pandas on the files."""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from opened import tables
from planted import Planted, write_planted

from app.figures.pair_matrix import pair_matrix

BLOCKS = ((0, 5, 9, 12), (1, 4, 10, 15), (2, 7, 8, 13), (3, 6, 11, 14))
TRUTH = Planted(steps=60, blocks=BLOCKS, moves=(0.3, 0.2))


def table(test, column):
    assert not test.exception, test.exception
    return next(frame for frame in tables(test) if column in frame)


def figure(test, key):
    return next(
        json.loads(chart.proto.spec) for chart in test.get("plotly_chart") if chart.proto.id.rpartition("-")[2] == key
    )


def decisions(run: Path, layer: int, phase: str = "train"):
    rows = pq.read_table(run / "decisions").to_pandas(ignore_metadata=True)
    return rows[(rows["layer"] == layer) & (rows["phase"] == phase)].set_index(["step", "token"])["experts"]


@pytest.fixture
def run(shown):
    return write_planted(shown / "run", TRUTH)


def test_pairs_are_those_of_the_files_and_the_blocks_stand_together(run, open_page):
    test = open_page("coactivation", run="run", layer=3, phase="train")
    together: Counter = Counter()
    alone: Counter = Counter()
    for experts in decisions(run, 3):
        alone.update(int(expert) for expert in experts)
        together.update(itertools.permutations([int(expert) for expert in experts], 2))
    tokens = len(decisions(run, 3))
    numbers = table(test, "with expert")
    assert sorted(zip(numbers["expert"], numbers["with expert"], strict=True)) == list(
        itertools.combinations(range(16), 2)
    ), "each two experts once"
    assert numbers["tokens"].is_monotonic_decreasing
    for one, other, both, of_all, times, of_first, of_second in numbers.itertuples(index=False):
        assert both == together[one, other]
        assert of_all == pytest.approx(both / tokens)
        assert times == pytest.approx(both / tokens * 120), "16 * 15 / 2 pairs, one to each token"
        assert of_first == pytest.approx(both / alone[one])
        assert of_second == pytest.approx(both / alone[other])
    order = [int(label) for label in figure(test, "coactivation")["layout"]["xaxis"]["categoryarray"]]
    found = {frozenset(order[first : first + 4]) for first in range(0, 16, 4)}
    assert found == {frozenset(block) for block in BLOCKS}
    (one, other), most = max(together.items(), key=lambda item: item[1])
    assert any({one, other} <= set(block) for block in BLOCKS)
    assert test.title[0].value == (
        f"Layer 3: experts {min(one, other)} and {max(one, other)} fire together most, for {most:,} of {tokens:,} "
        f"tokens ({most / tokens:.1%}; each pair would get 0.8% if all were even)"
    )
    share, one, other = max((both / alone[one], one, other) for (one, other), both in together.items())
    said = figure(test, "coactivation")["layout"]["title"]["text"].replace("<br>", " ")
    assert f"Layer 3: {share:.0%} of the tokens of expert {one} use expert {other} too" in said
    assert "Layer 3 is the last MoE layer" in "\n".join(element.value for element in test.caption)


def test_flows_are_those_of_the_files_and_stay_within_the_blocks(run, open_page):
    test = open_page("coactivation", run="run", layer=1, phase="train")
    numbers = table(test, "to expert")
    flow = np.zeros((16, 16))
    following = decisions(run, 3)
    for place, experts in decisions(run, 1).items():
        for one, other in itertools.product(experts, following[place]):
            flow[one, other] += 1
    taken = flow.sum(axis=0) / flow.sum()
    flow /= flow.sum(axis=1, keepdims=True)
    assert len(numbers) == 256
    for row in numbers.itertuples(index=False):
        assert row[2] == pytest.approx(flow[row[0], row[1]])
        assert row[3] == pytest.approx(flow[row[0], row[1]] / taken[row[1]]), "times chance"
    order = [int(label) for label in figure(test, "transitions")["layout"]["yaxis"]["categoryarray"]]
    assert {frozenset(order[first : first + 4]) for first in range(0, 16, 4)} == {frozenset(block) for block in BLOCKS}


def test_even_routing_has_no_pair_that_stands_out(shown, open_page):
    write_planted(shown / "run", Planted(steps=60))
    test = open_page("coactivation", run="run", layer=1)
    assert not test.exception, test.exception
    said = figure(test, "coactivation")["layout"]["title"]["text"].replace("<br>", " ")
    assert "Layer 1: no expert shares its tokens with another much more than by chance" in said


def test_the_commonest_pair_is_not_the_one_of_the_greatest_share_and_the_phase_is_named(samples, open_page):
    path = samples / "top2-shared"
    test = open_page("coactivation", run="top2-shared", layer=1, phase="probe")
    rows = decisions(path, 1, "probe")
    together = Counter(frozenset(map(int, experts)) for experts in rows)
    pair, most = together.most_common(1)[0]
    assert (set(pair), most) == ({0, 3}, 1399)
    title = test.title[0].value
    assert title.startswith(f"Layer 1, phase probe: experts 0 and 3 fire together most, for 1,399 of {len(rows):,} ")
    assert f"({most / len(rows):.1%}; each pair would get {2 / 56:.1%}" in title
    assert tuple(table(test, "with expert").iloc[0, :3]) == (0, 3, 1399)
    said = figure(test, "coactivation")["layout"]["title"]["text"].replace("<br>", " ")
    alone = sum(number for two, number in together.items() if 2 in two)
    assert f"{together[frozenset({2, 6})] / alone:.0%} of the tokens of expert 2 use expert 6 too" in said


def test_one_expert_a_token(shown, open_page):
    write_planted(shown / "run", Planted(steps=40, top_k=1))
    test = open_page("coactivation", run="run", layer=1)
    assert not test.exception, test.exception
    assert test.title[0].value == "Layer 1: each token uses one expert, so none fire together"
    assert [element.value for element in test.subheader] == ["From layer 1 to layer 3"]


def test_without_decisions_it_says_what_to_do(shown, open_page, write_run):
    write_run(shown, "run", range(1, 5))
    test = open_page("coactivation", run="run")
    assert not test.exception, test.exception
    assert "This run recorded no single decisions" in test.info[0].value
    assert "--decisions-every" in test.code[0].value


def test_more_experts_than_pixels_are_pooled_by_their_maximum(shown, open_page):
    write_planted(shown / "run", Planted(num_experts=160, top_k=4, tokens=256, steps=21, layers=(0,)))
    test = open_page("coactivation", run="run")
    picture = figure(test, "coactivation")
    assert len(picture["layout"]["xaxis"]["categoryarray"]) == 80
    assert "pooled to 80 rows and 80 columns" in picture["layout"]["title"]["text"]
    assert len(table(test, "with expert")) == 10_000


@pytest.mark.parametrize("experts", [16, 64, 100, 160, 512])
def test_names_under_a_matrix_of_many_experts_do_not_run_into_each_other(experts):
    order_E = np.random.default_rng(0).permutation(experts)
    names = {"row_title": "of the tokens of", "column_title": "use", "hover": "", "title": "Pairs"}
    figure = pair_matrix(np.full((experts, experts), 0.1), order_E, order_E, limit=1.0, **names)
    labels = figure.layout.xaxis.ticktext
    assert len(labels) >= 8
    # a digit is 7 pixels wide; the cells are about 730 wide beside the menu in a window of 1,280
    assert set(figure.layout.xaxis.tickvals) <= set(figure.layout.xaxis.categoryarray)
    assert sum(7 * (len(label) + 1) for label in labels) <= 730
