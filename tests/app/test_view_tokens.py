"""The page of tokens: every number on it against the Parquet files, and what it says where something is missing."""

import html as html_
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from opened import tables
from streamlit.testing.v1 import AppTest

from app import token_routes
from app.figures.token_text import INK
from recorder.writer import RunWriter

Open = Callable[..., AppTest]
LAYER = 1


@pytest.fixture
def pages(recorded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, open_page: Open) -> Open:
    """`pages(run="aux")`: the page of tokens on the recorded runs."""
    monkeypatch.setenv("ROUTESCOPE_DIRS", str(recorded))
    monkeypatch.chdir(tmp_path)

    def open_(**choices: Any) -> AppTest:
        test = open_page("tokens", **choices)
        assert not test.exception, test.exception
        return test

    return open_


def tokens_of(run: Path, phase: str, step: int, layer: int = LAYER) -> pd.DataFrame:
    """One row a token with its lists of experts and weights, straight from the files."""
    decisions = pd.read_parquet(run / "decisions").query("phase == @phase and step == @step and layer == @layer")
    tokens = pd.read_parquet(run / "tokens").query("phase == @phase and step == @step")
    rows = tokens.merge(decisions[["token", "experts", "weights"]], on="token").sort_values(["sequence", "position"])
    return rows.assign(first=rows["experts"].str[0]).reset_index(drop=True)


def last_step(run: Path, phase: str) -> int:
    return int(pd.read_parquet(run / "decisions").query("phase == @phase")["step"].max())


def html_of(test: AppTest) -> str:
    return "".join(element.proto.body for element in test.get("html") if "rs-tokens" in element.proto.body)


def spans(test: AppTest) -> list[dict[str, Any]]:
    """The tokens of the text as the browser gets them: title, experts, whether coloured, text."""
    found = re.findall(
        r'<span class="rs-t[^"]*" data-e="([^"]*)" title="([^"]*)"([^>]*)>(.*?)<sub>.*?</sub></span>', html_of(test)
    )
    return [
        {"experts": experts, "title": html_.unescape(title), "coloured": INK in style, "style": style, "text": text}
        for experts, title, style, text in found
    ]


def figure(test: AppTest) -> dict[str, Any]:
    return json.loads(test.get("plotly_chart")[0].proto.spec)


def words(test: AppTest) -> str:
    kinds = (test.title, test.info, test.warning, test.error, test.markdown, test.caption, test.code)
    return "\n".join(element.value for kind in kinds for element in kind)


def legend(test: AppTest) -> list[str]:
    return [option.content for option in next(g for g in test.get("button_group") if g.key == "expert").proto.options]


@pytest.mark.parametrize("name", ["plain", "aux"])
def test_title_legend_and_tables_are_those_of_the_files(pages: Open, recorded: Path, name: str) -> None:
    test = pages(run=name, layer=LAYER)
    rows = tokens_of(recorded / name, "probe", last_step(recorded / name, "probe"))
    share = rows["first"].value_counts(normalize=True)
    by_domain = pd.crosstab(rows["first"], rows["domain"], normalize="columns")
    title = test.title[0].value
    assert f"these {len(rows)} tokens" in title
    assert f"{100 * share.max():.0f}%" in title
    most = by_domain.to_numpy().max()  # the corpus is this checkout's own text: how decided the router is may change
    assert f"{'for' if most > 0.5 else 'with'} {100 * most:.0f}%" in title
    assert ("Expert" if share.max() > 2 / 8 else "No expert stands out") in title
    assert f"{len(rows)} tokens of step 59, the same held-out batch at every probe. Uniform share: 12.5%" in words(test)

    entries = legend(test)
    assert entries[0] == "all"
    for entry in entries[1:]:
        expert, shown = entry.split(" · ")
        assert float(shown.strip("%")) == pytest.approx(100 * share[int(expert)], abs=0.5)
    assert [float(entry.split(" · ")[1].strip("%")) for entry in entries[1:]] == sorted(
        (float(entry.split(" · ")[1].strip("%")) for entry in entries[1:]), reverse=True
    )

    table = next(frame for frame in tables(test) if "all tokens, %" in frame)
    expected = by_domain.reindex(range(8), fill_value=0)
    assert table["expert"].tolist() == [str(e) for e in range(8)]
    for domain in by_domain:
        assert table[f"{domain}, %"].tolist() == pytest.approx((100 * expected[domain]).tolist(), abs=0.006)
    assert table["all tokens, %"].tolist() == pytest.approx(
        (100 * share.reindex(range(8), fill_value=0)).tolist(), abs=0.006
    )
    if name == "aux":
        any_ = [frame for frame in tables(test) if "all tokens, %" in frame][1]
        uses = pd.DataFrame({e: rows["experts"].map(lambda ids, e=e: e in ids) for e in range(8)})
        assert any_["all tokens, %"].tolist() == pytest.approx((100 * uses.mean()).tolist(), abs=0.006)
        for domain, group in uses.groupby(rows["domain"]):
            assert any_[f"{domain}, %"].tolist() == pytest.approx((100 * group.mean()).tolist(), abs=0.006)
        assert "any of its 2 choices" in "".join(test.subheader[-1].proto.help)


@pytest.mark.parametrize("name", ["plain", "aux"])
def test_text_and_matrix_are_those_of_the_files(pages: Open, recorded: Path, name: str) -> None:
    run = recorded / name
    test = pages(run=name, layer=LAYER, phase="train", step=20, sequence=2)
    rows = tokens_of(run, "train", 20).query("sequence == 2")
    shown = spans(test)
    assert len(shown) == len(rows) == 32
    for span, (_, row) in zip(shown, rows.iterrows(), strict=True):
        assert span["experts"] == " ".join(map(str, row["experts"]))
        assert f"sequence 2, position {row['position']}" in span["title"]
        assert f"domain {row['domain']}" in span["title"]
        for expert, weight in zip(row["experts"], row["weights"], strict=True):
            assert f"expert {expert}: weight {weight:.4f}" in span["title"]
    assert f"these 32 tokens of sequence 2 ({rows['domain'].iloc[0]})" in test.title[0].value.replace("\\", "")

    numbers = next(frame for frame in tables(test) if "weight" in frame)
    assert numbers["expert"].tolist() == np.concatenate(rows["experts"].to_list()).tolist()
    assert numbers["weight"].tolist() == pytest.approx(np.concatenate(rows["weights"].to_list()).tolist())
    spec = figure(test)
    mass = np.zeros(8)
    for experts, weights in zip(rows["experts"], rows["weights"], strict=True):
        for expert, weight in zip(experts, weights, strict=True):
            mass[expert] += weight
    used = len({e for ids in rows["experts"] for e in ids})
    heading = spec["layout"]["title"]["text"]
    assert f"uses {used} of 8 experts" in heading
    assert f"expert {mass.argmax()} has {100 * mass.max() / mass.sum():.0f}% of its gate weight" in heading


def test_only_steps_with_decisions_can_be_chosen(pages: Open, recorded: Path) -> None:
    test = pages(run="plain", phase="train", step=34)
    assert (test.slider[0].min, test.slider[0].max, test.slider[0].step) == (0, 50, 10)
    assert test.slider[0].value == 30
    assert "Step 34 has no decisions; 30 is the nearest that has." in words(test)
    probe = pages(run="plain")
    assert list(probe.select_slider[0].options) == ["0", "20", "40", "59"]


def test_text_stays_in_place_when_step_and_layer_change(pages: Open) -> None:
    first = pages(run="plain", step=0, layer=0)
    text = [span["text"] for span in spans(first)]
    first.select_slider[0].set_value(40).run()
    assert [span["text"] for span in spans(first)] == text
    second = pages(run="plain", step=40, layer=1)
    assert [span["text"] for span in spans(second)] == text


def test_a_domain_and_an_expert_narrow_what_is_shown(pages: Open, recorded: Path) -> None:
    rows = tokens_of(recorded / "aux", "probe", 59)
    domain = rows["domain"].iloc[0]
    rows = rows[rows["domain"] == domain]
    expert = int(rows["first"].value_counts().index[1])
    test = pages(run="aux", layer=LAYER, sequence=f"domain:{domain}", expert=expert)
    first = (rows["first"] == expert).mean()
    any_ = rows["experts"].map(lambda ids: expert in ids)
    title = test.title[0].value
    assert title.startswith(f"Expert {expert} is the first choice of {100 * first:.0f}% of these {len(rows)} tokens")
    assert f"; {100 * any_.mean():.0f}% use it as any of their 2 choices" in title
    assert [span["coloured"] for span in spans(test)] == any_.tolist()
    assert test.query_params["expert"] == str(expert) or test.query_params["expert"] == [str(expert)]


def test_another_expert_can_be_chosen_from_the_list(pages: Open) -> None:
    test = pages(run="aux", layer=LAYER, step=0)  # hardly trained: every expert is used
    other = test.selectbox(key="tokens_other_expert")
    chosen = other.options[0].split()[1]
    other.select_index(0).run()
    assert not test.exception
    assert test.title[0].value.startswith(f"Expert {chosen} is the first choice of")
    assert any(entry.startswith(f"{chosen} · ") for entry in legend(test))


# ------------------------------------------------------------------------------------------- what may be missing


def write_strange(
    folder: Path,
    run_id: str,
    *,
    text: bool = True,
    ids: bool = True,
    tokens: bool = True,
    unrouted: bool = False,
    k: int = 1,
    status: Any = "finished",
) -> Path:
    """One step, one layer of 3 experts, two sequences of 8 tokens; token t chooses t % 3 (and the next)."""
    layer = {"index": 0, "kind": "moe", "router": 0, "num_experts": 3, "top_k": k}
    writer = RunWriter(folder / run_id, manifest={"name": "<b>run</b>", "model": {"layers": [layer]}})
    experts_TK = (np.arange(16)[:, None] + np.arange(k)) % 3
    if unrouted:
        experts_TK[:4] = -1
    load_E = np.bincount(experts_TK[experts_TK >= 0], minlength=3)
    writer.log_step(7, tokens=16, loss=1.0)
    writer.log_layer_stats(7, layer=0, router=0, tokens=16, load=load_E, gate_mass=load_E, mean_prob=np.full(3, 1 / 3))
    weights_TK = np.where(experts_TK >= 0, 1 / k, 0.0)
    writer.log_decisions(7, layer=0, router=0, experts_TK=experts_TK, weights_TK=weights_TK)
    if tokens:
        nasty = ["<script>alert(1)</script>", "*a*", "\u202e", '"onmouseover="x']
        writer.log_tokens(
            7,
            sequence_T=np.repeat([0, 1], 8),
            position_T=np.tile(np.arange(8), 2),
            token_id_T=np.arange(100, 116) if ids else None,
            text_T=nasty * 4 if text else None,
            domain_T=["<img src=x>"] * 8 + ["*d*"] * 8 if text else None,
        )
    if status == "running":
        writer.flush()
    else:
        writer.finalize(status, error="disk full" if status == "failed" else None)
    return writer.path


@pytest.fixture
def strange(shown: Path, open_page: Open) -> Callable[..., AppTest]:
    def open_(**settings: Any) -> AppTest:
        write_strange(shown, "a", **settings)
        test = open_page("tokens", run="a")
        assert not test.exception, test.exception
        return test

    return open_


def test_text_of_a_run_is_escaped_everywhere(strange: Callable[..., AppTest]) -> None:
    test = strange()
    body = html_of(test)
    assert "<script>" not in body
    assert "&lt;script&gt;" in body
    assert "<img" not in body
    assert 'title="token “"' not in body
    assert "⟨U+202E⟩" in body
    assert "No expert stands out" in test.title[0].value


def test_one_step_draws_no_slider(strange: Callable[..., AppTest]) -> None:
    test = strange()
    assert not test.slider
    assert not test.select_slider
    assert "16 tokens of step 7, phase train." in words(test)


def test_without_text_the_ids_are_shown(strange: Callable[..., AppTest]) -> None:
    test = strange(text=False)
    assert "no text; tokens are shown by their id" in words(test)
    assert "It names no domains" in words(test)
    assert [span["text"] for span in spans(test)] == [f"[id {number}]" for number in range(100, 116)]
    assert test.title[0].value == r"No expert stands out\: the busiest, 0, takes 38% of these 16 tokens"


def test_without_tokens_they_are_numbered(strange: Callable[..., AppTest]) -> None:
    test = strange(tokens=False)
    assert "does not tell which tokens these are" in words(test)
    assert [span["text"] for span in spans(test)] == [f"#{number}" for number in range(16)]


def test_tokens_without_a_route_are_counted(strange: Callable[..., AppTest]) -> None:
    test = strange(unrouted=True)
    assert "4 tokens reached no expert" in words(test)
    assert "takes 25% of these 16 tokens" in test.title[0].value
    table = tables(test)[-1]
    assert table["expert"].tolist() == ["0", "1", "2", "no expert"]
    assert table["all tokens, %"].tolist() == [25, 25, 25, 25]


def test_a_run_without_decisions_says_what_to_record(shown: Path, open_page: Open, write_run: Any) -> None:
    shutil.rmtree(write_run(shown, "a", range(3)) / "decisions")
    test = open_page("tokens", run="a")
    assert not test.exception
    assert "recorded no single decisions" in words(test)
    assert "--decisions-every 10" in words(test)


@pytest.mark.parametrize(
    ("status", "said"), [("running", "Still recording"), ("failed", "failed after step 7: disk full")]
)
def test_a_run_that_is_not_finished_is_shown_all_the_same(
    strange: Callable[..., AppTest], status: str, said: str
) -> None:
    test = strange(status=status)
    assert said in words(test)
    assert len(spans(test)) == 16


def test_an_unreadable_run_and_no_run(shown: Path, open_page: Open) -> None:
    test = open_page("tokens")
    assert not test.exception
    assert "There are no runs here yet" in words(test)
    path = write_strange(shown, "a")
    (path / "run.json").write_text("{")
    test = open_page("tokens", run="a")
    assert not test.exception
    assert "cannot be read" in words(test)
    assert test.title[0].value == "Which expert does each token go to?"


# --------------------------------------------------------------------------------------------------- arithmetic


def test_shares_against_a_naive_count() -> None:
    experts_TK = np.array([[0, 2], [2, 0], [-1, 1], [-1, -1], [2, 2]])
    # first choices: 0, 2, 1, none, 2 of five tokens; any choice: 0 twice, 1 once, 2 three times
    assert token_routes.shares(experts_TK, 4).tolist() == [1 / 5, 1 / 5, 2 / 5, 0]
    assert token_routes.shares(experts_TK, 4, "any").tolist() == [2 / 5, 1 / 5, 3 / 5, 0]
    assert np.isnan(token_routes.shares(np.zeros((0, 2), int), 2)).all()


def test_colours_belong_to_the_busiest_experts_of_the_whole_run() -> None:
    assert token_routes.colour_owners(np.array([1, 9, 8, 7, 6, 5, 4, 3, 2])) == [1, 2, 3, 4, 5, 6, 7]
    assert token_routes.colour_owners(np.array([5, 5, 9])) == [2, 0, 1]


def test_an_expert_keeps_its_colour_at_every_step_and_in_every_sequence(pages: Open) -> None:
    grounds: dict[int, set[str]] = {}
    for choice in ({"step": 0}, {"step": 59}, {"step": 0, "sequence": 3}, {"step": 20, "phase": "train"}):
        for span in spans(pages(run="aux", layer=LAYER, **choice)):
            if span["coloured"]:
                first = int(span["experts"].split()[0])
                grounds.setdefault(first, set()).add(span["style"])
    assert len(grounds) > 3
    assert all(len(seen) == 1 for seen in grounds.values()), grounds


def test_the_legend_always_holds_the_chosen_expert() -> None:
    share_E = np.array([0.5, 0.3, 0.2, 0.0])
    assert token_routes.busiest(share_E, 2) == [0, 1]
    assert token_routes.busiest(share_E, 2, always=3) == [0, 3]
    assert token_routes.busiest(share_E, 7) == [0, 1, 2], "unused experts are no entries"


def test_tokens_of_several_ranks_do_not_mix() -> None:
    places = pd.DataFrame({"rank": [0, 0, 1, 1], "token": [0, 1, 0, 1]})
    decisions = places.assign(experts=[[0], [1], [2], [3]], weights=[[1.0]] * 4, kept=None)
    tokens = places.assign(sequence=[0, 0, 0, 0], position=[1, 0, 0, 1], text=list("abcd"), domain=None, token_id=None)
    arrow = [frame.convert_dtypes(dtype_backend="pyarrow") for frame in (decisions, tokens)]
    routes = token_routes.join(*arrow)
    assert routes.ranks == 2
    assert routes.rows.sequence_T.tolist() == [0, 0, 1, 1]
    assert list(routes.rows.text_T) == ["b", "a", "c", "d"]
    assert routes.rows.experts_TK[:, 0].tolist() == [1, 0, 2, 3]


def test_decisions_without_a_token_are_left_out_and_counted() -> None:
    decisions = pd.DataFrame(
        {"rank": 0, "token": [0, 1, 2], "experts": [[0]] * 3, "weights": [[1.0]] * 3, "kept": None}
    )
    tokens = pd.DataFrame({"rank": 0, "token": [0, 2], "sequence": 0, "position": [0, 1], "text": ["a", "c"]})
    tokens = tokens.assign(domain=None, token_id=None)
    arrow = [frame.convert_dtypes(dtype_backend="pyarrow") for frame in (decisions, tokens)]
    routes = token_routes.join(*arrow)
    assert routes.left_out == 1
    assert list(routes.rows.text_T) == ["a", "c"]
