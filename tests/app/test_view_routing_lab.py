"""The Routing lab as a page: its numbers, every control, undo, and what the URL holds."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from opened import tables
from streamlit.testing.v1 import AppTest

from app.lab.lab import Lab
from app.lab.presets import PRESETS


def table(test: AppTest, column: str) -> pd.DataFrame:
    """The first table of the page with that column."""
    return next(frame for frame in tables(test) if column in frame)


def metrics(test: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in test.metric}


def test_a_first_visit_explains_the_collapse_number_by_number(shown: Path, open_page: Callable[..., AppTest]) -> None:
    test = open_page("routing_lab")
    assert not test.exception
    assert test.title[0].value == "Expert 2 takes 6 of 8 tokens; its bias would go from 0 to -0.24"
    # loads 1, 1, 6, 0 of 8: 6 / 2 - 1
    assert metrics(test)["Max violation"] == "2"
    assert metrics(test)["Dropped"] == "-"
    logits = PRESETS["collapse"].rows
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    names = [f"expert {expert}" for expert in range(4)]
    np.testing.assert_allclose(table(test, "sum")[names], scores, rtol=1e-5)
    threshold = np.sort(scores, axis=1)[:, -2]
    np.testing.assert_allclose(table(test, "threshold")["threshold"], threshold, rtol=1e-5)
    gaps = threshold[:, None] - scores
    quantile = np.quantile(gaps, 0.25, axis=0, method="higher")
    found = table(test, "quantile - mean")
    np.testing.assert_allclose(found["quantile"], quantile, atol=1e-6)
    np.testing.assert_allclose(found["new bias"], quantile - quantile.mean(), atol=1e-6)
    stages = table(test, "stage").set_index("stage")
    assert stages.loc["logit"].tolist()[1:] == ["0.4000", "0.1000", "2.0000", "0.3000"]
    assert stages.loc["score"].tolist()[1:] == [f"{score:.4f}" for score in scores[0]]
    assert stages.loc["weight"].tolist()[1:] == ["-", "-", f"{scores[0, 2]:.4f}", "-"]
    shares = table(test, "E x f x P")
    assert shares["f"].tolist() == [1 / 8, 1 / 8, 6 / 8, 0]
    np.testing.assert_allclose(shares["P"], scores.mean(0), rtol=1e-5)
    assert metrics(test)["Aux loss"] == f"{4 * (shares['f'] * scores.mean(0)).sum():.3g}"
    assert metrics(test)["Z-loss"] == f"{(np.log(np.exp(logits).sum(1)) ** 2).mean():.3g}"
    assert "lab" not in test.query_params


def test_apply_undo_reset_and_every_control(shown: Path, open_page: Callable[..., AppTest]) -> None:
    test = open_page("routing_lab")
    test.button(key="lab_apply_1").click().run()
    assert test.title[0].value.startswith("Every expert takes 2 of 8 tokens")
    assert "applied:1" in test.query_params["lab"]
    bias = Lab.from_entries(test.query_params["lab"]).state.bias_E
    assert test.slider(key="lab_bias_2").value == pytest.approx(bias[2], abs=1e-4)
    test.button(key="lab_undo").click().run()
    assert test.title[0].value.startswith("Expert 2 takes 6 of 8 tokens")
    assert "lab" not in test.query_params

    test.selectbox(key="lab_router").set_value("sigmoid")
    test.slider(key="lab_top_k").set_value(2)
    test.slider(key="lab_bias_3").set_value(0.5)
    test.slider(key="lab_capacity_factor").set_value(1.0)
    test.selectbox(key="lab_balancer").set_value("sign-bias")
    test.run()
    lab = Lab.from_entries(test.query_params["lab"])
    chosen = lab.settings
    assert (chosen.router, chosen.top_k, chosen.capacity_factor, chosen.balancer) == ("sigmoid", 2, 1.0, "sign-bias")
    assert lab.state.bias_E.tolist() == [0, 0, 0, 0.5]
    assert int(table(test, "load after")["load"].sum()) == 16
    assert metrics(test)["Dropped"] != "-"
    assert table(test, "delta - mean")["count"].sum() == 16

    test.button(key="lab_take_in").click().run()
    assert sum(Lab.from_entries(test.query_params["lab"]).state.count_E) == 16
    test.slider(key="lab_logit").set_value(-3.0).run()
    assert Lab.from_entries(test.query_params["lab"]).batch.logits_TE[0, 0] == -3
    test.number_input(key="lab_tokens").set_value(5).run()
    assert Lab.from_entries(test.query_params["lab"]).batch.logits_TE.shape == (5, 4)
    test.button(key="lab_random").click().run()
    assert not test.exception
    assert test.query_params["lab"][0] == "random"
    assert Lab.from_entries(test.query_params["lab"]).batch.logits_TE.shape == (5, 4)
    test.button(key="lab_reset").click().run()
    assert test.query_params["lab"] == "random"
    assert not test.exception


@pytest.mark.parametrize(
    "entries",
    [
        ["random", "router:softmax-after", "balancer:soft-sequence-aux", "sequences:2", "noise_std:0.5", "scaling:2"],
        ["random", "router:expert-choice", "balancer:global-aux"],
        ["groups", "capacity_factor:1"],
        ["broken", "balancer:quantile", "method:histogram", "num_bins:4", "update:step", "num_updates:1"],
        ["padding", "mask:0_0_0_0_0_0", "balancer:quantile"],
        ["zero-router-64", "balancer:aux"],
        ["collapse", "balancer:none", "spot_token:99", "<b>:1"],
    ],
    ids=lambda entries: entries[0],
)
def test_settings_from_a_link(shown: Path, open_page: Callable[..., AppTest], entries: list[str]) -> None:
    test = open_page("routing_lab", lab=entries)
    assert not test.exception
    assert not test.error
    assert test.query_params["lab"] == Lab.from_entries(entries).entries()
    for frame in tables(test):  # the browser is sent no thousand rows
        assert len(frame) <= 32 * 8


def test_a_refusal_is_one_line_and_leaves_the_controls(shown: Path, open_page: Callable[..., AppTest]) -> None:
    test = open_page("routing_lab", lab=["collapse", "router:softmax-after"])
    assert not test.exception
    assert test.title[0].value == "These settings do not go together"
    assert len(test.error) == 1
    assert "Choose a higher k" in test.error[0].value
    assert test.button(key="lab_apply_1").disabled
    test.slider(key="lab_top_k").set_value(2).run()
    assert not test.error
