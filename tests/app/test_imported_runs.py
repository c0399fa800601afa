"""Imported runs, which have no weights, no probabilities and perhaps no tokens, on every page of the dashboard."""

import sys
from pathlib import Path

import numpy as np
import pytest

from recorder.importers import import_dump

sys.path.insert(0, str(Path(__file__).parents[1] / "recorder"))
import sglang_dumps as dumps

PAGES = ("overview", "replay", "tokens", "compare", "layouts", "runs")
PAGES += ("specialisation", "coactivation", "settling", "placement")


def counts(folder):
    return "sglang", dumps.stat(folder / "stat.pt")


def passes(folder):
    return "sglang", dumps.per_pass(folder / "per_pass.pt")


def decisions(folder):
    return "sglang", dumps.per_token(folder / "per_token.pt")


def arrays(folder):
    ids = np.argsort(np.random.default_rng(0).random((20, 3, 8)), axis=2)[:, :, :2]
    np.savez(folder / "requests.npz", ids, ids[:7])
    return "vllm", folder / "requests.npz"


@pytest.mark.parametrize("phase", [None, "train"])
@pytest.mark.parametrize("dump", [counts, passes, decisions, arrays])
@pytest.mark.slow
def test_every_page_opens(shown, open_page, tmp_path, dump, phase):
    kind, file = dump(tmp_path)
    run_id = import_dump(kind, file, shown, name="imported", phase=phase).name
    for page in PAGES:
        parameters = {"runs": [run_id]} if page == "compare" else {"run": run_id}
        test = open_page(page, **parameters)
        assert not test.exception, (page, [item.message for item in test.exception])


def test_a_token_page_without_weights(shown, open_page, tmp_path):
    kind, file = decisions(tmp_path)
    run_id = import_dump(kind, file, shown, name="imported").name
    test = open_page("tokens", run=run_id, layer=1)
    assert not test.exception
    assert not test.error
