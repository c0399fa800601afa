"""Small runs to draw, written with the real writer, and pages to draw them on.

Shapes: E experts, T tokens, K top-k.
"""

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import plotly.graph_objects as go
import pytest
from in_process import routescope
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from app.figures.sheet import Sheet
from recorder.training import corpus as corpus_module
from recorder.writer import RunWriter

MAIN = Path(__file__).resolve().parents[2] / "app" / "main.py"
SAMPLES = MAIN.parents[1] / "sample_runs"
TIMEOUT_S = 60  # AppTest's own 3 s are too few on a busy machine
LAYERS = (1, 3)
# tests of figures, and of the pages that draw the others
FIGURES = (
    *("test_figures", "test_token_search", "test_view_coactivation", "test_view_compare_many", "test_view_dispatch"),
    *("test_view_layouts_models", "test_view_routing_lab", "test_view_settling", "test_view_specialisation"),
)


def _write_run(
    folder: Path,
    run_id: str,
    steps: Iterable[int] = range(100),
    *,
    num_experts: int = 4,
    name: str | None = None,
    bias: bool = False,
    decisions_every: int = 10,
    status: Literal["running", "finished", "cancelled", "failed"] = "finished",
) -> Path:
    """A run of 4 layers, 1 and 3 of them MoE (top-1), with 8 tokens a step in 2 sequences. Returns its folder.

    Step s sends token t of layer l to expert (s + t + l) % E.
    """
    manifest: dict[str, Any] = {
        "name": name or run_id,
        "config": {"balancer": "sign-bias" if bias else "none", "steps": 100},
        "domains": ["prose"],
        "model": {
            "layers": [
                {"index": index, "kind": "moe", "router": LAYERS.index(index), "num_experts": num_experts, "top_k": 1}
                if index in LAYERS
                else {"index": index, "kind": "dense", "router": None}
                for index in range(4)
            ]
        },
    }
    writer = RunWriter(folder / run_id, manifest=manifest)
    for step in steps:
        writer.log_step(step, tokens=8, loss=8.0 / (step + 1), ce_loss=8.0 / (step + 1), wall_time_s=0.01)
        with_decisions = step % decisions_every == 0
        for router, layer in enumerate(LAYERS):
            experts_T = (np.arange(8) + step + layer) % num_experts
            load_E = np.bincount(experts_T, minlength=num_experts)
            writer.log_layer_stats(
                step,
                layer=layer,
                router=router,
                tokens=8,
                load=load_E,
                gate_mass=load_E * 0.5,
                mean_prob=np.full(num_experts, 1 / num_experts),
                expert_bias=np.linspace(-0.1, 0.1, num_experts) if bias else None,
                router_entropy=0.9,
            )
            if with_decisions:
                writer.log_decisions(
                    step, layer=layer, router=router, experts_TK=experts_T[:, None], weights_TK=np.full((8, 1), 0.5)
                )
        if with_decisions:
            writer.log_tokens(
                step,
                sequence_T=np.repeat([0, 1], 4),
                position_T=np.tile(np.arange(4), 2),
                text_T=[f"w{token}" for token in range(8)],
            )
    if status == "running":
        writer.flush()
    else:
        writer.finalize(status)
    return writer.path


@pytest.fixture
def write_run() -> Callable[..., Path]:
    """`write_run(folder, run_id, steps, ...)`: see `_write_run`."""
    return _write_run


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs really recorded, 60 steps each: "plain" without a balancer, "aux" top-2 with the aux loss.

    Both of 2 MoE layers of 8 experts, decisions every 10 steps, a probe every 20. Only to be read.
    """
    folder = tmp_path_factory.mktemp("recorded")
    root = MAIN.parents[1]
    small = "--num-layers 2 --moe-frequency 1 --d-model 16 --d-ff 32 --num-heads 2 --num-experts 8 --batch-size 4"
    often = "--seq-len 32 --steps 60 --probe-every 20 --decisions-every 10"
    corpus = ["--corpus", str(root / "recorder"), "--corpus", str(root / "moe_core")]
    build_corpus = cache(corpus_module.build_corpus)  # both runs have the same text, which takes seconds
    for name, balancer in (("plain", "--balancer none"), ("aux", "--balancer aux --top-k 2")):
        options = [*small.split(), *often.split(), *balancer.split(), *corpus, "--name", name]
        with mock.patch("recorder.training.language_model.build_corpus", build_corpus):
            routescope("record", *options, "--out", folder).check_returncode()
        next(folder.glob(f"{name}-*")).rename(folder / name)
    return folder


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the only one shown; it is also the current directory."""
    folder = tmp_path / "runs"
    folder.mkdir()
    monkeypatch.setenv("ROUTESCOPE_DIRS", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the sample runs, the only one shown."""
    monkeypatch.setenv("ROUTESCOPE_DIRS", str(SAMPLES))
    monkeypatch.chdir(tmp_path)
    return SAMPLES


@pytest.fixture
def open_page() -> Callable[..., AppTest]:
    """`open_page("replay", run="a", step=57)`: that page of the real dashboard in a new session, drawn once."""

    def open_(page: str, **parameters: Any) -> AppTest:
        test = AppTest.from_file(MAIN, default_timeout=TIMEOUT_S)
        # AppTest.switch_page knows pages that are files; ours are functions, told apart by their url_path.
        test._page_hash = calc_hash(page)
        for name, value in parameters.items():
            test.query_params[name] = value if isinstance(value, list) else str(value)
        return test.run()

    return open_


@pytest.fixture(autouse=True)
def _figures_are_checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plotly checks every property of every figure, where each kind is drawn: `Sheet` itself does not."""
    if not request.path.name.startswith(FIGURES):
        return
    build = Sheet.figure

    def checked(sheet: Sheet) -> go.Figure:
        figure = build(sheet)
        go.Figure(figure.to_dict())  # raises ValueError for what is no property, or no value of it
        return figure

    monkeypatch.setattr(Sheet, "figure", checked)
