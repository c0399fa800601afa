"""Token text and token matrix: escaping, marks, categories, weights."""

import html.parser
import re

import numpy as np
import pandas as pd
import pytest

from app.figures.theme import OKABE_ITO
from app.figures.token_matrix import token_matrix
from app.figures.token_text import INK, TokenRows, busiest_experts, token_ground, token_html, visible_text


def rows(text, experts, weights=None, **settings):
    experts = np.asarray(experts)
    if experts.ndim == 1:
        experts = experts[:, None]
    weights = (
        np.full(experts.shape, 0.5) if weights is None else np.asarray(weights, dtype=float).reshape(experts.shape)
    )
    count = len(experts)
    defaults = {"sequence_T": np.zeros(count, dtype=int), "position_T": np.arange(count)}
    return TokenRows(text_T=text, experts_TK=experts, weights_TK=weights, **(defaults | settings))


class Tokens(html.parser.HTMLParser):
    """Collects the token spans: attributes and text, and every tag's name."""

    def __init__(self):
        super().__init__()
        self.tags, self.tokens, self._depth = [], [], 0

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        attributes = dict(attrs)
        if tag == "span" and "rs-t" in attributes.get("class", "").split():
            self.tokens.append(attributes | {"text": "", "sub": "", "struck": []})
            self._depth = 1
        elif self._depth:
            self._depth += 1
            if tag == "s":
                self.tokens[-1]["struck"].append(True)

    def handle_endtag(self, tag):
        self._depth = max(self._depth - 1, 0)

    def handle_data(self, data):
        if self._depth == 1:
            self.tokens[-1]["text"] += data
        elif self._depth > 1:
            self.tokens[-1]["sub"] += data


def parse(page):
    parser = Tokens()
    parser.feed(page)
    return parser


def ground_of(token):
    found = re.search(r"background:(#[0-9a-f]{6})", token.get("style") or "")
    return found.group(1) if found else None


def test_text_of_tokens_cannot_become_markup():
    evil = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "&lt;", "</style>", "'`${}"]
    page = token_html(rows(evil, [0, 1, 2, 3, 4], domain_T=["<script>d</script>"] * 5), title="<script>title</script>")
    parsed = parse(page)
    assert set(parsed.tags) <= {"style", "div", "h4", "span", "sub", "s", "p"}
    assert [t["text"] for t in parsed.tokens] == evil
    assert "<script" not in page
    assert "<img" not in page


def test_hover_tells_token_position_domain_experts_weights():
    page = token_html(
        rows(
            ["the"], [[14, 3]], [[0.75, 0.25]], position_T=np.array([41]), sequence_T=np.array([7]), domain_T=["prose"]
        ),
        title="t",
    )
    (token,) = parse(page).tokens
    assert token["title"].split("\n") == [
        "token “the”",
        "sequence 7, position 41",
        "domain prose",
        "expert 14: weight 0.7500",
        "expert 3: weight 0.2500",
    ]
    assert token["sub"] == "14,3"
    assert token["data-e"] == "14 3"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", " the"),
        ("the", "the"),
        ("  if", "··if"),
        (" ", "·"),
        ("a b", "a b"),
        ("a ", "a·"),
        ("\n    ", "⏎····"),
        ("\n\n", "⏎⏎"),
        ("\t x", "⇥·x"),
        ("\r\n", "␍⏎"),
        ("", "∅"),
        ("\u00a0", "⍽"),
        ("\u202eabc", "⟨U+202E⟩abc"),
        ("\x00", "⟨U+0000⟩"),
        ("\u200b", "⟨U+200B⟩"),
        ("é漢", "é漢"),
    ],
)
def test_white_space_and_invisible_characters_are_visible(text, shown):
    assert visible_text(text) == shown


def test_busiest_experts_by_hand():
    # 5 assignments: expert 2 three, expert 0 and 1 one each; -1 is none
    assert busiest_experts([[2, 0], [2, -1], [2, 1]]) == [(2, 0.6), (0, 0.2), (1, 0.2)]
    assert busiest_experts([[2, 0], [2, -1], [2, 1]], count=1) == [(2, 0.6)]
    assert busiest_experts([[-1]]) == []


def test_busiest_experts_have_colours_and_shares_the_rest_is_plain():
    experts = [0] * 9 + [1] * 8 + [2] * 7 + [3] * 6 + [4] * 5 + [5] * 4 + [6] * 3 + [7] * 2
    page = token_html(rows(["x"] * len(experts), experts), title="t")
    tokens = parse(page).tokens
    assert [ground_of(tokens[i]) for i in (0, 9, 17)] == [token_ground(c, "light") for c in OKABE_ITO[:3]]
    assert ground_of(tokens[-1]) is None  # the eighth expert
    assert "expert 0 · 20%" in page  # 9 of 44
    assert "other experts · 5%" in page  # 2 of 44


def test_colours_stay_when_the_order_is_given():
    page = token_html(rows(["a", "b"], [5, 9]), title="t", colour_experts=[9, 5])
    assert [ground_of(t) for t in parse(page).tokens] == [
        token_ground(OKABE_ITO[1], "light"),
        token_ground(OKABE_ITO[0], "light"),
    ]


def test_highlight_colours_only_the_given_experts():
    shown = rows(["a", "b", "c", "d"], [[1, 2], [3, 1], [2, 3], [4, 5]])
    tokens = parse(token_html(shown, title="t", highlight=[1], colour_experts=[2, 1])).tokens
    # first and second token went to expert 1 (as first and as second choice); it keeps its second colour
    own = token_ground(OKABE_ITO[1], "light")
    assert [ground_of(t) for t in tokens] == [own, own, None, None]
    nothing = parse(token_html(shown, title="t", highlight=[])).tokens
    assert [ground_of(t) for t in nothing] == [None] * 4


def test_c19_dropped_assignments_are_struck_through():
    page = token_html(
        rows(list("abcdef"), [0, 0, 1, 0, 0, 2], kept_TK=np.array([[1], [1], [1], [0], [0], [1]], bool)), title="t"
    )
    tokens = parse(page).tokens
    assert [bool(t["struck"]) for t in tokens] == [False, False, False, True, True, False]
    assert "dropped by capacity" in tokens[3]["title"]


def test_c28_no_route_is_marked():
    tokens = parse(token_html(rows(list("abcdef"), [0, 1, -1, 3, 3, -1]), title="t")).tokens
    assert ["rs-none" in t["class"] for t in tokens] == [False, False, True, False, False, True]
    assert "no route" in tokens[2]["title"]
    assert tokens[2]["sub"] == "–"


def test_missing_text_shows_the_id():
    values = pd.Series([None, "x", None], dtype="string")
    page = token_html(rows(values.tolist(), [0, 0, 0], token_id_T=[57, 3, None]), title="t")
    assert [t["text"] for t in parse(page).tokens] == ["[id 57]", "x", "[no text]"]


def test_long_text_is_cut_and_says_so():
    page = token_html(rows(["x"] * 30, [0] * 30), title="t", max_tokens=20)
    assert len(parse(page).tokens) == 20
    assert "first 20 of 30 tokens" in page


def test_sequences_keep_their_order_and_domains():
    page = token_html(
        rows(["a", "b", "c"], [0, 0, 0], sequence_T=np.array([4, 4, 1]), domain_T=["code", "code", "prose"]), title="t"
    )
    assert re.findall(r"(\w+) · sequence (\d+)", page) == [("code", "4"), ("prose", "1")]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_on_coloured_grounds_is_readable(theme):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return sum(
            w * (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4)
            for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    for colour in OKABE_ITO:
        ratio = (luminance(token_ground(colour, theme)) + 0.05) / (luminance(INK) + 0.05)
        assert ratio > 4.5


def test_nothing_to_show():
    empty = rows([], np.zeros((0, 2), dtype=int))
    assert "No tokens" in token_html(empty, title="t")
    token_matrix(empty, num_experts=8, title="t").to_json()


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="text_T has 1 entries for 2"):
        rows(["a"], [0, 1])
    with pytest.raises(ValueError, match="kept_TK"):
        rows(["a", "b"], [0, 1], kept_TK=np.ones((2, 2), bool))


# ------------------------------------------------------------------------------------------------ matrix


def test_matrix_by_hand():
    shown = rows(["the", "the", " cat"], [[0, 2], [1, 0], [2, -1]], [[0.7, 0.3], [0.6, 0.0], [1.0, 0.0]])
    fig = token_matrix(shown, num_experts=4, title="t")
    (trace,) = [t for t in fig.data if t.type == "heatmap"]
    n = np.nan
    # expert 0 was chosen by the second token with weight 0: a cell, not a gap
    np.testing.assert_equal(np.asarray(trace.z), [[0.7, 0.0, n], [n, 0.6, n], [0.3, n, 1.0], [n, n, n]])
    assert (trace.zmin, trace.zmax) == (0, 1)
    assert "expert 2, choice 2 of 2<br>weight 0.3000" in trace.text[2][0]
    assert len(set(trace.x)) == 3  # equal tokens stay apart


def test_a3_number_like_tokens_stay_categories():
    fig = token_matrix(rows(["00", "1e2", "00", "2"], [0, 1, 0, 10]), num_experts=11, title="t")
    axis = fig.layout.xaxis
    assert axis.type == "category"
    assert list(axis.ticktext) == ["00", "1e2", "00", "2"]
    assert len(set(axis.categoryarray)) == 4
    assert fig.layout.yaxis.type == "category"
    assert list(fig.layout.yaxis.categoryarray) == [str(e) for e in range(11)]


def test_matrix_of_many_experts_shows_the_used_ones():
    fig = token_matrix(rows(["a", "b"], [[700, 3], [3, 12]]), num_experts=896, title="t")
    assert list(fig.layout.yaxis.categoryarray) == ["3", "12", "700"]
    assert "3 of 896 experts" in fig.layout.title.text


def test_matrix_marks_dropped_and_escapes():
    shown = rows(["<b>x</b>", "b"], [0, 1], kept_TK=np.array([[True], [False]]), domain_T=["<i>d</i>", None])
    fig = token_matrix(shown, num_experts=2, title="t")
    (crosses,) = [t for t in fig.data if t.name == "dropped"]
    assert (list(crosses.x), list(crosses.y)) == (["1 b"], ["1"])
    text = fig.data[0].text[0][0]
    assert "&lt;b&gt;x&lt;/b&gt;" in text
    assert "<i>" not in text


def test_matrix_refuses_ids_beyond_the_layer():
    with pytest.raises(ValueError, match="expert id 8"):
        token_matrix(rows(["a"], [8]), num_experts=8, title="t")
