"""One token through a run: its occurrences and experts against the Parquet files, and what the search bounds."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from opened import tables
from streamlit.testing.v1 import AppTest

from app import token_search
from app.figures.token_paths import token_paths
from recorder.reader import Run
from recorder.writer import RunWriter

Open = Callable[..., AppTest]


def occurrences(run: Path, phase: str, meant: Callable[[pd.DataFrame], pd.Series]) -> pd.DataFrame:
    """Every occurrence of a phase joined with its decisions, a row for each layer, straight from the files."""
    tokens, decisions = (pq.read_table(run / name).to_pandas() for name in ("tokens", "decisions"))
    tokens = tokens[tokens["phase"] == phase]
    return tokens[meant(tokens)].merge(decisions, on=["step", "phase", "token", "rank", "segment"])


def common_token(run: Path, phase: str) -> tuple[str, int]:
    tokens = pq.read_table(run / "tokens").to_pandas().query("phase == @phase")
    text = next(text for text in tokens["text"].value_counts().index if len(text.strip()) > 1)
    return text, int(tokens[tokens["text"] == text]["token_id"].iloc[0])


@pytest.mark.parametrize("phase", ["probe", "train"])
def test_counts_and_experts_are_those_of_the_files(recorded: Path, phase: str) -> None:
    path = recorded / "aux"
    text, token_id = common_token(path, phase)
    rows = occurrences(path, phase, lambda tokens: tokens["text"].str.strip() == text.strip())
    found = token_search.search(Run(path), text.strip(), phase)
    assert found.occurrences == len(rows) / 2, "two layers"
    assert found.searched == sorted(
        pq.read_table(path / "decisions").to_pandas().query("phase == @phase").step.unique()
    )
    expected = {
        (int(step), int(layer)): Counter(group["experts"].map(lambda ids: int(ids[0])))
        for (step, layer), group in rows.groupby(["step", "layer"])
    }
    assert found.counts == expected
    layer = rows[rows["layer"] == 1].sort_values(["step", "sequence", "position"], ascending=[False, True, True])
    assert found.listed["step"].tolist() == layer["step"].tolist()
    assert found.listed["position"].tolist() == layer["position"].tolist()
    assert found.listed[1].tolist() == [", ".join(map(str, ids)) for ids in layer["experts"]]
    by_id = token_search.search(Run(path), f"id:{token_id}", phase)
    assert by_id.by_id
    assert by_id.occurrences == len(occurrences(path, phase, lambda tokens: tokens["token_id"] == token_id)) / 2


def test_the_work_is_bounded_and_evenly_spread(recorded: Path) -> None:
    run = Run(recorded / "plain")
    text, _ = common_token(recorded / "plain", "train")
    everything = token_search.search(run, text, "train")
    assert everything.searched == [0, 10, 20, 30, 40, 50]
    # 10 moments of 128 tokens in 2 layers: 256 decisions each, so 768 pay for three
    few = token_search.search(run, text, "train", max_rows=768)
    assert (few.searched, few.recorded) == ([0, 20, 50], 6) or (few.searched, few.recorded) == ([0, 30, 50], 6)
    assert set(few.steps()) <= set(few.searched)


def test_nothing_found_suggests_what_holds_it(recorded: Path) -> None:
    text, _ = common_token(recorded / "plain", "probe")
    found = token_search.search(Run(recorded / "plain"), text.strip()[:-1].upper() + "", "probe")
    if not found.occurrences:
        assert all(text.strip()[:-1].lower() in suggestion.lower() for suggestion in found.suggestions)
        assert text in found.suggestions or len(found.suggestions) == 8
    nothing = token_search.search(Run(recorded / "plain"), "no such token", "probe")
    assert (nothing.occurrences, nothing.suggestions) == (0, [])


def test_what_a_person_types() -> None:
    assert token_search.parse("") is None
    assert token_search.parse("id: 17") == token_search.Query(words="id: 17", text=None, token_id=17)
    assert token_search.parse("17") == token_search.Query(words="17", text="17", token_id=17)
    marked = token_search.parse("⏎·")
    assert marked is not None
    assert marked.text == "\n "
    nonsense = token_search.parse("id:x")
    assert nonsense is not None
    assert (nonsense.text, nonsense.token_id) == (None, None)


def test_ranks_and_tokens_without_an_expert(tmp_path: Path) -> None:
    layers = [{"index": 0, "kind": "moe", "router": 0, "num_experts": 4, "top_k": 2}]
    for rank in (0, 1):
        writer = RunWriter(
            tmp_path / "run", manifest={"model": {"layers": layers}, "world_size": 2}, rank=rank, launch="one"
        )
        writer.log_step(0, tokens=4, loss=1.0)
        ids_TK = np.array([[rank, 2], [3, 0], [-1, -1], [2, 1]])
        writer.log_decisions(0, layer=0, router=0, experts_TK=ids_TK, weights_TK=np.full((4, 2), 0.5))
        writer.log_tokens(0, sequence_T=[0, 0, 1, 1], position_T=[0, 1, 0, 1], text_T=["a", "b", "a", "c"])
        writer.finalize()
    found = token_search.search(Run(tmp_path / "run"), "a", "train")
    assert found.counts == {(0, 0): {0: 1, 1: 1, -1: 2}}
    assert found.listed["sequence"].tolist() == [0, 1, 2, 3], "sequences of the second rank are numbered on"
    assert found.listed[0].tolist() == ["0, 2", "no expert", "1, 2", "no expert"]


def test_the_page_shows_it_and_frames_it_in_the_text(
    recorded: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROUTESCOPE_DIRS", str(recorded))
    monkeypatch.chdir(tmp_path)
    path = recorded / "aux"
    text, _ = common_token(path, "probe")
    rows = occurrences(path, "probe", lambda tokens: tokens["text"].str.strip() == text.strip())
    test = open_page("tokens", run="aux", layer=1, find=text.strip())
    assert not test.exception, test.exception
    last = rows[(rows["layer"] == 1) & (rows["step"] == 59)]["experts"].map(lambda ids: int(ids[0]))
    top, number = sorted(Counter(last).items(), key=lambda item: (-item[1], item[0]))[0]
    heading = next(element.value for element in test.subheader if "goes to" in element.value)
    share = f"{100 * number / len(last):.0f}% of {len(last)} occurrences at step 59 in layer 1"
    assert f"goes to expert {top} for {share}" in heading
    assert any("Searched: 4 recorded steps of phase probe" in element.value for element in test.caption)
    specs = {chart.proto.id.rpartition("-")[2]: json.loads(chart.proto.spec) for chart in test.get("plotly_chart")}
    points = next(trace for trace in specs["token_layers"]["data"] if trace.get("name") == "cells")
    assert [1, 59, top] in points["customdata"]
    framed = sum(html.proto.body.count('class="rs-t rs-found"') for html in test.get("html"))
    assert framed > 0
    test.text_input(key="find").set_value("no such token").run()
    assert any("was not found" in element.value for element in test.subheader)
    assert test.query_params["find"] == "no such token" or test.query_params["find"] == ["no such token"]


def test_cells_say_the_expert_and_lead_to_layer_and_step() -> None:
    share_RS = np.array([[0.25, 1.0], [np.nan, 0.5]])
    figure = token_paths(
        share_RS, np.array([[3, 4], [-1, 5]]), [0, 1000], ["layer 1", "layer 3"], [1, 3], title="t", y_title="",
        numbered=True,
    )  # fmt: skip
    points = figure.data[1]
    assert [list(point) for point in points.customdata] == [[1, 0, 3], [1, 1000, 4], [3, 1000, 5]]
    assert list(points.text) == ["3", "4", "5"]
    assert list(points.x) == ["0", "1,000", "1,000"], "equal columns, whatever lies between the steps"
    assert "expert 3: 25.0% of its occurrences" in points.hovertext[0]


def test_token_ids_that_read_alike_are_counted_and_told_apart(
    samples: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = samples / "top2-shared"
    rows = pq.read_table(path / "tokens").to_pandas().query("phase == 'probe'")
    alike = rows[rows["text"].str.strip() == "self"]["token_id"].value_counts()
    texts = {int(token_id): rows[rows["token_id"] == token_id]["text"].iloc[0] for token_id in alike.index}
    assert sorted(texts.values()) == [" self", "self"]
    found = token_search.search(Run(path), "self", "probe")
    assert found.spellings == {token_id: (texts[token_id], number) for token_id, number in alike.items()}
    test = open_page("tokens", run="top2-shared", phase="probe", layer=1, find="self")
    assert not test.exception, test.exception
    said = "\n".join(element.value for element in test.caption).replace("\\", "")
    assert f"{alike.sum():,} occurrences of 2 token ids in" in said
    for token_id, text in texts.items():
        assert f"“{text.replace(' ', '·')}” (id {token_id}) {alike[token_id]:,} times" in said
    listed = next(frame for frame in tables(test) if "token_id" in frame)
    names = {token_id: text.replace(" ", "·") for token_id, text in texts.items()}
    assert listed["token"].tolist() == [names[token_id] for token_id in listed["token_id"]]
    one = max(texts)
    assert token_search.search(Run(path), f"id:{one}", "probe").spellings == {one: (texts[one], alike[one])}
