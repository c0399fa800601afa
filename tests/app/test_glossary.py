"""The glossary: every name that a person meets has an entry, and the entries say what the code computes."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from app import comparison_metrics, glossary
from app.views import overview
from moe_core import RouterZLoss, SignBiasBalancer, TopKRouter, metrics
from moe_core.capacity import expert_capacity
from moe_core.ffn_shapes import ffn_parameters
from moe_core.placement import contiguous_placement
from recorder import run_metrics
from recorder.diagnosis.balance import effective_share
from recorder.reader import Run
from recorder.schema import SCHEMAS
from recorder.summary import run_row, summarise

SAMPLES = Path(__file__).resolve().parents[2] / "sample_runs"
LOAD = [6, 1, 1, 0]


def route(logits, top_k, **options):
    """The routing of tokens with exactly these logits."""
    logits_TE = torch.tensor(logits, dtype=torch.float32)
    router = TopKRouter(logits_TE.shape[1], logits_TE.shape[1], top_k, **options)
    with torch.no_grad():
        router.weight.copy_(torch.eye(logits_TE.shape[1]))
        return router(logits_TE)


def bias_after_a_step():
    balancer = SignBiasBalancer(4, rate=0.1)
    balancer.count.copy_(torch.tensor(LOAD))
    balancer.step()
    return balancer.expert_bias[0]


# What the code gives for each example; the entry works the same out by hand.
COMPUTED = {
    "load": lambda: sum(metrics.count_load([[0, 1], [0, 2]], 4)[0]),
    "uniform_share": lambda: LOAD[0] / metrics.load_ratio(LOAD)[0],
    "load_ratio": lambda: metrics.load_ratio(LOAD)[0],
    "max_violation": lambda: metrics.max_violation(LOAD),
    "max_violation_window": lambda: metrics.max_violation(metrics.window_load([[3, 1], [1, 3]], 2)),
    "max_violation_bound": lambda: metrics.max_violation_bound(8, 2),
    "load_cv": lambda: metrics.load_cv([3, 1]),
    "load_entropy": lambda: metrics.load_entropy([2, 2, 0, 0]),
    "effective_experts": lambda: metrics.effective_experts([2, 2, 0, 0]),
    "effective_share": lambda: effective_share(np.array([2, 2, 0, 0]), 1),
    "gini": lambda: metrics.gini([3, 1]),
    "min_load": lambda: metrics.min_load(LOAD),
    "max_load": lambda: metrics.max_load(LOAD),
    "dead_experts": lambda: metrics.dead_experts(LOAD),
    "idle_experts": lambda: metrics.idle_experts([90, 7, 2, 1]),
    "window": lambda: metrics.window_load([[3, 0], [1, 0], [2, 0]], 2)[0],
    "capacity": lambda: expert_capacity(100, 8, 1, 1.25),
    "drop_rate": lambda: metrics.drop_rate(12, 400),
    "rank": lambda: contiguous_placement(4, 2).rank_loads(np.array(LOAD))[0],
    "rank_balancedness": lambda: metrics.rank_balancedness([[6, 2]]),
    "slowest_rank_cost": lambda: metrics.slowest_rank_cost([6, 2]),
    "scores": lambda: route([[1, 0, -1]], 2).scores_TE[0, 0],
    "weights": lambda: route([[1, 0, -1]], 2).weights_TK[0, 0],
    "gate_mass": lambda: metrics.gate_mass([[0, 1], [2, 0]], [[0.7, 0.3], [0.8, 0.2]], 3)[0],
    "router_entropy": lambda: metrics.router_entropy([[0.5, 0.5, 0, 0]]),
    "aux_loss": lambda: metrics.aux_loss([3, 1], [0.6, 0.4]),
    "z_loss": lambda: RouterZLoss(1.0).losses(route(np.zeros((3, 4)), 1))["z_loss"],
    "sign_bias": bias_after_a_step,
    "rerouted_share": lambda: metrics.rerouted_share(30, 400),
    "parameters": lambda: ffn_parameters(64, 128, "swiglu"),
    "overlap": lambda: metrics.overlap([[0, 1]], [[1, 2]])[0],
    "saturation": lambda: metrics.saturation([[0], [1]], [[0], [2]]),
    "churn": lambda: metrics.churn([[[0], [1]], [[0], [2]]])[0],
    "last_fluctuation": lambda: metrics.last_fluctuation([[[3]], [[5]], [[3]], [[3]]])[0],
    "coactivation": lambda: metrics.coactivation(metrics.count_coactivation([[0, 1], [2, 0]], 3))[0, 1],
    "transition": lambda: metrics.transition([[3, 1], [0, 2]])[0, 0],
    "domain_specialisation": lambda: metrics.domain_specialisation([[30, 10]], [40])[0, 0],
    "domain_baseline": lambda: metrics.domain_baseline(8, 2),
    "vocab_specialisation": lambda: metrics.vocab_specialisation([[9, 3]], [12])[0],
    "repeat_rate": lambda: metrics.repeat_rate(*metrics.count_repeats([1, 1, 2, 2], [0] * 4, range(4))),
    "repeat_chance": lambda: metrics.repeat_chance([3, 1]),
}
# Definitions that no function of ours computes: counted by a model, or plain sums.
BY_HAND_ALONE = {"mean_prob", "threshold", "assignment", "loss", "ce_loss", "grad_norm"}
WORDS_OF_ARITHMETIC = {"ln": math.log, "exp": math.exp, "sqrt": math.sqrt, "ceil": math.ceil, "__builtins__": {}}
EXAMPLES = [key for key, entry in glossary.ENTRIES.items() if entry.example]


@pytest.mark.parametrize("key", EXAMPLES)
def test_the_arithmetic_of_an_example_is_right_and_is_what_the_code_computes(key):
    _, _, worked = glossary.ENTRIES[key].example.rpartition(": ")
    arithmetic, _, said = worked.rpartition(" = ")
    assert float(said) == pytest.approx(eval(arithmetic, dict(WORDS_OF_ARITHMETIC)), rel=1e-3)
    if key not in BY_HAND_ALONE:
        assert float(said) == pytest.approx(float(COMPUTED[key]()), rel=1e-3)


def test_every_formula_of_a_metric_has_an_example():
    computed = {name for name in metrics.__all__ if name in glossary.ENTRIES}
    assert computed >= {"max_violation", "gini", "saturation", "repeat_rate"}
    assert computed - set(EXAMPLES) == set()
    assert BY_HAND_ALONE | set(COMPUTED) == set(EXAMPLES)


# ------------------------------------------------------------------------------------------ nothing is undefined

NAMES_OF_THE_RUN = {"run_id", "name", "tags", "path", "losses", "layers", "diagnosis"}
HELPERS = re.compile(r"^(count_|rolling_|.*_mask$|[A-Z])")  # functions and constants behind a metric that has an entry
NAMES_OF_ROWS = {"kind", "message", "text", "token_id", "kept", "wall_time_s"}


def keys_of(report):
    """Every key of a JSON report, the diagnosis left out: each of its sentences carries its rule in words."""
    for key, value in report.items():
        yield key
        for one in value if isinstance(value, list) and key != "diagnosis" else [value]:
            if isinstance(one, dict):
                yield from keys_of(one)


def undefined(names):
    return sorted(name for name in names if glossary.find(name) is None)


def test_every_name_in_the_reports_of_a_run_has_an_entry():
    run = Run(SAMPLES / "top2-shared")
    assert undefined((set(keys_of(summarise(run))) | set(run_row(run))) - NAMES_OF_THE_RUN) == []


def test_every_metric_of_the_code_and_of_the_pages_has_an_entry():
    assert undefined(name for name in metrics.__all__ if not HELPERS.match(name)) == []
    assert undefined({*run_metrics.METRICS, *run_metrics.RECORDED, *run_metrics.SHARES}) == []
    assert undefined(metric.key for metric in comparison_metrics.METRICS) == []
    assert undefined(overview._LAYER_COLUMNS) == []


def test_every_column_of_the_run_format_has_an_entry():
    assert undefined({name for schema in SCHEMAS.values() for name in schema.names} - NAMES_OF_ROWS) == []


def test_entries_are_complete_and_lead_to_one_another():
    entries = glossary.ENTRIES.values()
    names = [name.lower() for entry in entries for name in {entry.key, entry.name.lower(), *entry.also}]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
    for entry in entries:
        assert len(re.findall(r"[.](?= [A-Z]|$)", entry.meaning)) >= 2, entry.key
        assert all(key in glossary.ENTRIES and key != entry.key for key in entry.see), entry.key
        assert not entry.example or entry.formula, entry.key


# ------------------------------------------------------------------------------------------------------- search


def test_search_puts_the_word_itself_first():
    assert glossary.search("MaxVio")[0].key == "max_violation"
    assert glossary.search("entropy")[:2] != []
    assert {entry.key for entry in glossary.search("entropy")} >= {
        "load_entropy",
        "router_entropy",
        "effective_experts",
    }
    assert glossary.search("load entropy")[0].key == "load_entropy"
    assert glossary.search("no such word") == []
    assert glossary.search("  ") == list(glossary.ENTRIES.values())


def test_a_help_text_has_meaning_formula_bound_and_what_the_page_adds():
    told = glossary.explain("gini", "Of the last 50 steps.")
    entry = glossary.ENTRIES["gini"]
    assert told.startswith(entry.meaning)
    assert f"`{entry.formula}`" in told
    assert entry.bound in told
    assert told.endswith("Of the last 50 steps.")


# --------------------------------------------------------------------------------------------------------- page


def headings(test):
    assert not test.exception, test.exception
    return [element.value for element in test.subheader]


def test_the_page_shows_every_word_and_a_link_opens_one(shown, open_page):
    test = open_page("glossary")
    assert headings(test) == [entry.name for entry in glossary.ENTRIES.values()]
    assert test.title[0].value.startswith(f"{len(glossary.ENTRIES)} words: ")

    test = open_page("glossary", term="max_violation_window")
    assert test.title[0].value == headings(test)[0] == "Max violation, window"
    test.button(key="see_max_violation_window_window").click().run()
    assert test.title[0].value == headings(test)[0] == "Window"
    assert test.text_input(key="term").value == "window"
    assert test.query_params["term"] == "window"

    test.text_input(key="term").set_value("overruled by nobody").run()
    assert headings(test) == []
    assert "No entry" in test.info[0].value
