"""`routescope report`: its words and figures against the Parquet files, its size, and every kind of run.

Shapes: S steps, E experts.
"""

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from app.export_page import page
from app.figures.inputs import LoadSeries
from app.report import pictures
from app.report.contents import MAX_RUNS, report_html
from recorder.cli import main
from recorder.reader import Run
from recorder.writer import RunWriter

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "sample_runs"
LIMIT = 10_000_000


def loads(run, layer):
    frame = pq.read_table(run / "layer_stats", filters=[("phase", "=", "train"), ("layer", "=", layer)]).to_pandas()
    return np.stack(frame.sort_values("step")["load"].to_list())


def figures_of(text):
    return json.loads(re.search(r"const figures = (\[\n.*?\n\]);\n", text, flags=re.DOTALL)[1])


def array(value):
    """An array as plotly.js reads it."""
    if not isinstance(value, dict):
        return np.array(value)
    flat = np.frombuffer(base64.b64decode(value["bdata"]), dtype=value["dtype"])
    return flat.reshape([int(size) for size in str(value.get("shape", flat.size)).split(",")])


def words(text):
    """A page without its scripts, styles and tags."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style)>.*?</\1>", "", text, flags=re.DOTALL))


def titles(figures):
    return [re.sub(r"<[^>]+>", " ", figure["light"]["layout"]["title"]["text"]) for figure in figures]


@pytest.fixture(scope="module")
def one():
    return report_html([Run(SAMPLES / "none")])


@pytest.fixture(scope="module")
def two():
    return report_html([Run(SAMPLES / "none"), Run(SAMPLES / "quantile")])


def test_the_answer_is_that_of_the_files(one):
    last_E = loads(SAMPLES / "none", 3)[-50:].sum(axis=0)
    idle = int((last_E < 0.1 * last_E.mean()).sum())
    violation = last_E.max() / last_E.mean() - 1
    assert f"Layer 3 is least balanced: {idle} of 16 experts idle, max_violation {violation:.3g}" in words(one)
    assert "Layer 3 collapsed" in words(one)


def test_the_heatmap_holds_every_load(one):
    heatmap = next(f for f in figures_of(one) if "16 of 32 experts idle" in f["light"]["layout"]["title"]["text"])
    panels = [trace for trace in heatmap["light"]["data"] if trace["type"] == "heatmap"]
    for layer, panel in zip((1, 3), panels, strict=True):
        load_SE = loads(SAMPLES / "none", layer).astype(np.float64)
        ratio_ES = (load_SE / load_SE.mean(axis=1, keepdims=True)).T
        np.testing.assert_allclose(array(panel["customdata"]), ratio_ES, rtol=1e-6)


def test_the_curves_are_the_losses(one):
    frame = pq.read_table(SAMPLES / "none" / "steps").to_pandas().sort_values("step")
    curve = next(f for f in figures_of(one) if "Cross-entropy" in f["light"]["layout"]["title"]["text"])
    training, probe = [array(trace["y"]) for trace in curve["light"]["data"]]
    np.testing.assert_allclose(training, frame[frame.phase == "train"]["ce_loss"].astype(float))
    np.testing.assert_allclose(probe, frame[frame.phase == "probe"]["ce_loss"].astype(float))


def test_two_runs_are_compared_on_one_scale_and_each_is_diagnosed(two):
    said = words(two)
    assert "Without a balancer 12 of 16 experts sit idle in layer 3; with quantiles none does" in said
    assert "last 50 steps that all these runs recorded (350 to 399)" in said
    assert said.count("Diagnosis") == 2
    side_by_side = figures_of(two)[0]["light"]
    assert sum(trace["type"] == "heatmap" for trace in side_by_side["data"]) == 4
    assert {trace.get("coloraxis") for trace in side_by_side["data"] if trace["type"] == "heatmap"} == {"coloraxis"}
    violation_E = loads(SAMPLES / "quantile", 1)[-50:].sum(axis=0)
    assert f"{violation_E.max() / violation_E.mean() - 1:.3g}" in said


def test_two_reports_of_samples_are_small_and_follow_the_theme(one, two):
    assert len(one) < len(two) < LIMIT
    assert all(figure["dark"] for figure in figures_of(two))


def test_12_layers_of_64_experts_over_3000_steps_stay_below_10_mb():
    random = np.random.default_rng(0)
    series = [
        LoadSeries(run=run, layer=layer, steps_S=np.arange(3000), load_SE=random.poisson(64, (3000, 64)), top_k=2)
        for run in ("a", "b")
        for layer in range(12)
    ]
    figures = [
        pictures.load(series, title="Load", alt="Load"),
        *pictures.balance(series, colours={"a": 0, "b": 1}, words="a and b"),
    ]
    text = page("large", figures)
    assert len(text) < LIMIT - 1_500_000  # the rest is for losses, maps and tables
    said = " ".join(titles(figures_of(text)))
    assert "Each column sums" in said
    assert "minima and maxima kept" in said


# ------------------------------------------------------------------------------------------- every kind of run


def write(folder, *, layers=({"index": 0, "kind": "moe", "router": 0, "num_experts": 4, "top_k": 1},), **settings):
    """A run of 3 steps; settings: status, loss, load, phase, name."""
    manifest = {"name": settings.get("name", folder.name), "model": {"layers": list(layers)}}
    writer = RunWriter(folder, manifest=manifest)
    load = np.array(settings.get("load", [5, 1, 1, 1]))
    phase = settings.get("phase", "train")
    for step in range(settings.get("steps", 3)):
        if phase == "train":
            writer.log_step(step, tokens=8, loss=settings.get("loss", 1.0))
        if load.size:
            some = {"tokens": int(load.sum()), "load": load, "gate_mass": load * 0.5, "mean_prob": np.full(4, 0.25)}
            writer.log_layer_stats(step, phase=phase, layer=0, router=0, **some)
    if settings.get("status") == "running":
        writer.flush()
    else:
        writer.finalize(settings.get("status", "finished"))
    return Run(folder)


KINDS = {
    "regression": ({}, "Loss over all 3 recorded training steps"),
    "running": ({"status": "running"}, "still recorded when this was written"),
    "failed": ({"status": "failed"}, "The run failed"),
    "nan": ({"loss": float("nan")}, "The loss is not finite"),
    "no tokens": ({"load": [0, 0, 0, 0]}, "No token was routed"),
    "no step": ({"steps": 0}, "no load was recorded"),
    "no layers": ({"layers": ()}, "run.json does not list the layers"),
    "dense": ({"layers": ({"index": 0, "kind": "dense", "router": None},), "load": []}, "it has no MoE layer"),
    "generate": ({"phase": "generate"}, "recorded generate steps"),
    "a </script><b>": ({"name": "a </script><b>"}, "a &lt;/script&gt;&lt;b&gt;"),
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    return {
        kind: write(folder / f"run-{number}", **settings) for number, (kind, (settings, _)) in enumerate(KINDS.items())
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_of_every_kind_of_run(kinds, kind):
    text = report_html([kinds[kind]])
    assert KINDS[kind][1] in words(text) + " ".join(titles(figures_of(text)))
    assert text.count("</script>") == 2


def test_a_report_of_all_of_them_says_what_is_not_compared(kinds):
    text = report_html(list(kinds.values()))
    said = words(text)
    assert "Not compared: " in said
    assert said.count("Diagnosis") == len(kinds)
    assert "run-3 not finite" in " ".join(titles(figures_of(text)))


def test_runs_that_cannot_be_compared_are_still_reported(kinds):
    said = words(report_html([kinds["no step"], kinds["dense"]]))
    assert "These runs cannot be compared" in said
    assert said.count("Diagnosis") == 2


# --------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_one_file_and_says_how_far_it_is(tmp_path):
    out = tmp_path / "report.html"
    result = subprocess.run(
        [sys.executable, "-m", "recorder.cli", "report", str(SAMPLES / "none"), "--out", str(out)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert (result.returncode, result.stdout) == (0, f"{out}\n")
    assert all(line.startswith("report: ") for line in result.stderr.splitlines())
    assert "Layer 3 is least balanced" in words(out.read_text())
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["nowhere", "--out", "a.html"], "'nowhere'"),
        ([str(SAMPLES / "none")], "--out"),
        ([str(SAMPLES / "none"), "--out", "."], "--out . is a folder"),
        ([str(SAMPLES / "none"), "--out", "nowhere/a.html"], "there is no folder nowhere"),
        ([str(SAMPLES / "none")] * (MAX_RUNS + 1) + ["--out", "a.html"], f"1 to {MAX_RUNS} runs, got {MAX_RUNS + 1}"),
    ],
)
def test_bad_input_is_one_line(arguments, needed, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert needed in said
    assert said.count("\n") == 1
