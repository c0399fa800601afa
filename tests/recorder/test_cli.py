"""The `routescope` command as a person runs it: real runs, and real processes wherever one of its own matters."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import routescope

from recorder import cli, summary

SMALL = ["--steps", "6", "--batch-size", "4", "--seq-len", "16", "--num-experts", "4", "--d-model", "16"]
SMALL += ["--d-ff", "16", "--expert-d-ff", "16", "--num-heads", "2", "--decisions-every", "2", "--probe-every", "3"]


def command(*arguments):
    return [sys.executable, "-m", "recorder.cli", *map(str, arguments)]


def run(*arguments):
    """A process of its own."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120)


def record(out, *arguments, run=routescope):
    result = run("record", *SMALL, "--out", out, *arguments)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "runs"
    result = record(out, "--run-id", "first", "--balancer", "aux", "--name", "A name", run=run)
    assert result.stdout.splitlines()[-1] == str(out / "first")
    return out


def tables(path):
    """Every table as plain rows, the times of this machine left out."""
    rows = {}
    for name in ("steps", "layer_stats", "decisions", "tokens"):
        frame = pq.read_table(path / name).drop_columns(["wall_time_s"] if name == "steps" else [])
        rows[name] = frame.to_pylist()
    return rows


def test_a_run_has_what_was_asked_for(recorded):
    manifest = json.loads((recorded / "first" / "run.json").read_text())
    assert (manifest["status"], manifest["last_step"], manifest["name"]) == ("finished", 5, "A name")
    assert manifest["config"]["balancer"] == "aux"
    rows = tables(recorded / "first")
    assert [(r["phase"], r["step"]) for r in rows["steps"] if r["phase"] == "train"] == [("train", s) for s in range(6)]
    assert [r["step"] for r in rows["steps"] if r["phase"] == "probe"] == [0, 3, 5]
    assert sorted({r["step"] for r in rows["decisions"] if r["phase"] == "train"}) == [0, 2, 4]
    assert sorted({r["step"] for r in rows["decisions"] if r["phase"] == "probe"}) == [0, 3, 5]
    assert {r["layer"] for r in rows["layer_stats"]} == {1, 3}
    probes = {}
    for row in rows["tokens"]:
        if row["phase"] == "probe":
            probes.setdefault(row["step"], []).append((row["token_id"], row["text"], row["domain"]))
    assert probes[0] == probes[3] == probes[5]
    assert {domain for _, _, domain in probes[0]} == {"code", "prose", "arithmetic", "data"}
    loss = [r for r in rows["steps"] if r["phase"] == "train"]
    assert all(r["loss"] == pytest.approx(r["ce_loss"] + r["aux_loss"], rel=1e-6) for r in loss)


def test_same_seed_same_run_and_another_seed_another(recorded, tmp_path):
    record(tmp_path, "--run-id", "again", "--balancer", "aux")
    record(tmp_path, "--run-id", "other", "--balancer", "aux", "--seed", "1")
    first = tables(recorded / "first")
    assert tables(tmp_path / "again") == first
    assert tables(tmp_path / "other") != first


def test_runs_differ_in_the_balancer_alone(recorded, tmp_path):
    record(tmp_path, "--run-id", "none", "--balancer", "none")
    ours, theirs = tables(recorded / "first"), tables(tmp_path / "none")
    # same data, same first weights: the first step's decisions are the same
    assert [r for r in ours["tokens"] if r["step"] == 0] == [r for r in theirs["tokens"] if r["step"] == 0]
    train = [[r for r in t["decisions"] if r["step"] == 0 and r["phase"] == "train"] for t in (ours, theirs)]
    assert train[0] == train[1]


@pytest.mark.parametrize(
    "options",
    [
        ["--balancer", "sign-bias", "--balancer", "aux", "--z-coef", "0.001"],
        ["--balancer", "quantile", "--router", "sigmoid", "--top-k", "2", "--num-shared-experts", "1"],
        ["--noise-std", "0.1", "--capacity-factor", "1.0", "--dispatcher", "naive", "--moe-frequency", "1"],
    ],
)
def test_the_options_train(tmp_path, options):
    record(tmp_path, "--run-id", "run", *options)
    stats = pq.read_table(tmp_path / "run" / "layer_stats").to_pandas()
    top_k = 2 if "--top-k" in options else 1
    assert (stats.load.map(np.sum) == stats.tokens * top_k).all()
    assert (stats.tokens == 64).all()


def test_own_text_becomes_domains(tmp_path):
    (tmp_path / "poems.txt").write_text("roses are red, violets are blue; " * 200)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "one.md").write_text("a note about routers and experts.\n" * 200)
    record(tmp_path, "--run-id", "run", "--corpus", tmp_path / "poems.txt", "--corpus", tmp_path / "notes")
    domains = json.loads((tmp_path / "run" / "run.json").read_text())["domains"]
    assert domains == ["code", "prose", "arithmetic", "data", "poems", "notes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top-k", "9", "--num-experts", "4"], "--top-k 9 is more than --num-experts 4"),
        (["--balancer", "magic"], "--balancer 'magic' is unknown; choose one of none, aux, sign-bias, quantile"),
        (["--steps", "0"], "--steps 0 is not between 1 and"),
        (["--steps", "many"], "many"),
        (["--router", "relu"], "relu"),
        (["--lr", "nan"], "--lr nan"),
        (["--no-such-option"], "--no-such-option"),
        (["--corpus", "missing.txt"], "missing.txt"),
        (["--run-id", "../escape"], "'../escape'"),
        (["--moe-frequency", "5", "--num-layers", "4"], "--moe-frequency 5"),
        (["--vocab-size", "10"], "10"),
    ],
)
def test_wrong_arguments_are_one_clear_line_and_exit_2(tmp_path, options, message):
    result = routescope("record", "--out", tmp_path / "runs", *options)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2, result.stderr
    assert message in lines[-1]
    assert lines[-1].startswith("routescope: ")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_a_taken_run_id_is_refused_and_nothing_is_lost(recorded):
    before = tables(recorded / "first")
    result = routescope("record", *SMALL, "--out", recorded, "--run-id", "first")
    assert result.returncode == 2
    assert "first" in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert tables(recorded / "first") == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_cancelling_keeps_what_is_there(tmp_path, number):
    path = tmp_path / "run"
    process = subprocess.Popen(
        command("record", *SMALL, "--steps", "100000", "--out", tmp_path, "--run-id", "run"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list((path / "steps").glob("part-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.splitlines()[-1] == str(path)
    assert "cancelled" in err.splitlines()[-1]
    assert "Traceback" not in err
    manifest = json.loads((path / "run.json").read_text())
    assert manifest["status"] == "cancelled"
    steps = pq.read_table(path / "steps").to_pandas()
    assert len(steps[steps.phase == "train"]) == manifest["last_step"] + 1 > 0
    row = json.loads(run("runs", tmp_path, "--json").stdout)[0]
    assert (row["status"], row["last_step"]) == ("cancelled", manifest["last_step"])


def test_runs_and_summary_print_json_for_programs(recorded):
    rows = json.loads(routescope("runs", recorded, "--json").stdout)
    assert [row["run_id"] for row in rows] == ["first"]
    expected = {"run_id", "name", "path", "status", "balancer", "num_experts", "top_k", "last_step", "loss"}
    expected |= {"ce_loss", "max_violation", "max_violation_window", "dead_experts", "idle_experts", "tags"}
    assert set(rows[0]) == expected
    summary = json.loads(routescope("summary", recorded / "first", "--json", "--window", "4").stdout)
    stats = pq.read_table(recorded / "first" / "layer_stats").to_pandas()
    train = stats[(stats.phase == "train") & (stats.step >= 2)]
    full = json.loads(routescope("summary", recorded / "first", "--json").stdout)["layers"]
    for key in ("max_violation", "max_violation_window"):  # one name, one meaning: the worst layer's
        assert rows[0][key] == max(layer[key] for layer in full)
    for layer in summary["layers"]:
        loads = np.stack(train[train.layer == layer["layer"]].load)
        assert layer["max_violation_window"] == pytest.approx(loads.sum(0).max() / loads.sum(0).mean() - 1)
        assert layer["max_violation"] == pytest.approx((loads.max(1) / loads.mean(1) - 1).mean())
        assert layer["dead_ids"] == np.flatnonzero(loads.sum(0) == 0).tolist()
        assert layer["drop_rate"] is None
    steps = pq.read_table(recorded / "first" / "steps").to_pandas()
    last = steps[(steps.phase == "train") & (steps.step >= 2)]
    assert summary["losses"]["ce_loss"] == pytest.approx(last.ce_loss.mean())
    assert summary["window"] == 4
    assert "max_violation_window" in routescope("summary", recorded / "first").stdout
    assert "first" in routescope("runs", recorded).stdout


def test_summary_finds_a_run_by_its_id_and_says_where_it_looked(recorded):
    assert routescope("summary", "first", cwd=recorded.parent).returncode == 0
    missing = routescope("summary", "nope", cwd=recorded.parent)
    assert missing.returncode == 2
    assert "nope" in missing.stderr
    assert "runs/nope" in missing.stderr
    assert len(missing.stderr.strip().splitlines()) == 1


def test_unreadable_runs_and_empty_folders_are_said_in_one_line(tmp_path):
    assert "no runs in" in routescope("runs", tmp_path).stdout
    assert json.loads(routescope("runs", tmp_path, "--json").stdout) == []
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    listed = routescope("runs", tmp_path)
    assert listed.returncode == 0
    assert "broken" in listed.stderr
    assert "Traceback" not in listed.stderr
    opened = routescope("summary", tmp_path / "broken")
    assert opened.returncode == 1
    assert len(opened.stderr.strip().splitlines()) == 1
    missing = routescope("runs", tmp_path / "nowhere")
    assert missing.returncode == 2
    assert "nowhere" in missing.stderr


def test_a_reader_that_goes_away_is_no_error(recorded):
    text = f"{sys.executable} -m recorder.cli summary {recorded / 'first'} --json | head -1"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", text], capture_output=True, text=True, timeout=60)
    assert result.stderr == ""


def test_app_refuses_a_missing_folder(tmp_path):
    result = run("app", tmp_path / "nowhere")
    assert result.returncode == 2
    assert "nowhere" in result.stderr


def test_reading_commands_load_no_torch(recorded):
    code = (
        "import sys, recorder.cli\n"
        "try: recorder.cli.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    arguments = [sys.executable, "-c", code, "summary", str(recorded / "first")]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env={**os.environ})
    assert result.returncode == 0, result.stderr


ODD = {
    "layers-ints": lambda m: m["model"].update(layers=[1, 2]),
    "layers-text": lambda m: m["model"].update(layers="x"),
    "index-text": lambda m: m["model"]["layers"][1].update(index="one"),
    "parameters-text": lambda m: m["model"]["layers"][1].update(parameters_total="x"),
    "domains-number": lambda m: m.update(domains=5),
    "config-list": lambda m: m.update(config=[1]),
    "version-text": lambda m: m.update(format_version="1"),
    "index-huge": lambda m: m["model"]["layers"][1].update(index=2**70),
    "router-huge": lambda m: m["model"]["layers"][1].update(router=2**70),
    "recorded-list": lambda m: m.update(recorded=[1]),
}


@pytest.mark.parametrize("odd", list(ODD))
def test_an_odd_manifest_is_one_line_and_the_other_runs_are_listed(recorded, tmp_path, odd):
    for name in ("good", "odd"):
        shutil.copytree(recorded / "first", tmp_path / name)
    manifest = json.loads((tmp_path / "odd" / "run.json").read_text())
    ODD[odd](manifest)
    (tmp_path / "odd" / "run.json").write_text(json.dumps(manifest))
    listed = routescope("runs", tmp_path, "--json")
    assert listed.returncode == 0
    assert [row["path"] for row in json.loads(listed.stdout)] == [str(tmp_path / "good")]
    assert len(listed.stderr.strip().splitlines()) == 1
    opened = routescope("summary", tmp_path / "odd")
    assert opened.returncode == 1
    assert len(opened.stderr.strip().splitlines()) == 1
    assert str(tmp_path / "odd") in opened.stderr


def test_one_run_that_fails_in_any_way_hides_no_other(recorded, capsys, monkeypatch):
    def fail_for_one(opened, **options):
        if opened.run_id == "first":
            raise TypeError("no number\nat all")
        return run_row(opened, **options)

    run_row = summary.run_row
    monkeypatch.setattr(summary, "run_row", fail_for_one)
    with pytest.raises(SystemExit) as ended:
        cli.main(["runs", str(recorded)])
    told = capsys.readouterr()
    assert ended.value.code == 0
    assert told.err == f"routescope: {recorded / 'first'}: no number at all\n"
    assert len(told.out.splitlines()) == len(list(recorded.iterdir()))


def test_summary_of_a_phase_that_is_not_there_names_those_that_are(recorded):
    result = routescope("summary", recorded / "first", "--phase", "generate")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.endswith("first has no steps of --phase generate; it has train, probe\n"), result.stderr


def test_loads_that_are_all_null_are_one_line(recorded, tmp_path):
    shutil.copytree(recorded / "first", tmp_path / "run")
    (part,) = (tmp_path / "run" / "layer_stats").iterdir()
    rows = pq.read_table(part)
    place = rows.column_names.index("load")
    nulls = pa.nulls(len(rows), rows.schema.field("load").type)
    pq.write_table(rows.set_column(place, "load", nulls), part)
    for arguments in (["runs", tmp_path], ["summary", tmp_path / "run"]):
        result = routescope(*arguments)
        assert "Traceback" not in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


def test_parts_that_cannot_be_read_are_named(recorded, tmp_path):
    shutil.copytree(recorded / "first", tmp_path / "run")
    (part,) = (tmp_path / "run" / "steps").iterdir()
    part.write_bytes(b"")
    for arguments in (["runs", tmp_path], ["summary", tmp_path / "run"]):
        result = routescope(*arguments)
        assert result.returncode == 0
        assert part.name in result.stderr


def test_summary_says_how_many_steps_it_is_of(recorded):
    assert "over the last 6 recorded training steps" in routescope("summary", recorded / "first").stdout
    summary = json.loads(routescope("summary", recorded / "first", "--json").stdout)
    assert (summary["window"], summary["steps"]) == (50, 6)


@pytest.mark.slow
def test_no_memory_is_one_line(tmp_path):
    big = ["--num-experts", "1024", "--expert-d-ff", "16384", "--d-model", "2048", "--num-layers", "2"]
    command_line = " ".join(command("record", "--steps", 1, *big, "--out", tmp_path))
    result = subprocess.run(
        ["bash", "-c", f"ulimit -v 5000000; {command_line}"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "failed" in result.stderr.strip().splitlines()[-1]


def test_a_closed_terminal_closes_the_run(tmp_path):
    arguments = command("record", *SMALL, "--steps", "100000", "--out", tmp_path, "--run-id", "run")
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the suite itself may run under nohup
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "run" / "steps").glob("part-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 130
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "cancelled"


def test_cancelled_before_the_first_step_leaves_no_folder(tmp_path):
    arguments = command("record", *SMALL, "--out", tmp_path, "--run-id", "run")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # the progress bar stands while the text is prepared, before the run's folder is made
    assert process.stderr.read(1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "nothing was recorded" in err.splitlines()[-1]
    assert not (tmp_path / "run").exists()
