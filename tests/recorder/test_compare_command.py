"""`routescope compare`: what it says against numbers computed by hand from what was written."""

import json

import numpy as np
import pytest

from recorder.cli import main
from recorder.comparison import compare
from recorder.reader import Run
from recorder.writer import RunWriter


def moe(index, router, num_experts=4, top_k=1):
    return {"index": index, "kind": "moe", "router": router, "num_experts": num_experts, "top_k": top_k}


def write(folder, layers, losses, loads, steps=None):
    """losses: one a step; loads: layer index -> one load a step."""
    steps = steps or range(len(losses))
    with RunWriter(folder, manifest={"name": f"run {folder.name}", "model": {"layers": layers}}) as writer:
        for place, step in enumerate(steps):
            writer.log_step(step, tokens=8, loss=losses[place], ce_loss=losses[place])
            for layer in layers:
                load = np.array(loads[layer["index"]][place])
                writer.log_layer_stats(
                    step,
                    layer=layer["index"],
                    router=layer["router"],
                    tokens=int(load.sum()) // layer["top_k"],
                    load=load,
                    gate_mass=load * 0.5,
                    mean_prob=np.full(len(load), 1 / len(load)),
                )
    return Run(folder)


@pytest.fixture
def runs(tmp_path):
    """a: steps 0 to 3; b: 0 to 2, in layer 1 collapsed at the last, with another layer before it; c: later steps."""
    even, tilted, one = [2, 2, 2, 2], [4, 2, 2, 0], [8, 0, 0, 0]
    a = write(tmp_path / "a", [moe(1, 0)], [4.0, 3.0, 2.5, 1.0], {1: [even, even, tilted, even]})
    layers = [moe(0, 0, num_experts=2), moe(1, 1)]
    b = write(tmp_path / "b", layers, [4.0, 3.5, 3.25], {0: [[4, 4]] * 3, 1: [even, even, one]})
    c = write(tmp_path / "c", [moe(1, 0)], [1.0], {1: [even]}, steps=[9])
    return a, b, c


def test_differences_are_of_the_last_step_that_all_recorded(runs):
    a, b, _ = runs
    found = compare([a, b], window=2)
    assert found["shared_steps"] == {"count": 3, "first": 0, "last": 2}
    assert [one["losses"]["loss"] for one in found["runs"]] == [1.75, 3.375]  # (2.5 + 1) / 2, (3.5 + 3.25) / 2
    assert [one["path"] for one in found["runs"]] == [str(a.path), str(b.path)]
    at = found["last_shared_step"]
    assert at["step"] == 2
    assert [one["losses"]["ce_loss"] for one in at["runs"]] == [2.5, 3.25]
    [difference] = at["differences"]
    assert (difference["run_id"], difference["minus"]) == ("b", "a")
    assert difference["losses"] == {"loss": 0.75, "ce_loss": 0.75, "aux_loss": None, "z_loss": None}
    missing, layer = difference["layers"]
    assert (missing["layer"], layer["layer"]) == (0, 1)  # though layer 1 is router 0 of one and router 1 of the other
    assert {value for key, value in missing.items() if key not in ("layer", "router")} == {None}
    assert layer["max_violation"] == pytest.approx(3.0 - 1.0)  # 8 / 2 - 1, minus 4 / 2 - 1
    assert layer["dead_experts"] == 3 - 1
    assert layer["load_entropy"] == pytest.approx(0.0 - 0.75)  # shares 1/2, 1/4, 1/4 hold 1.5 of 2 bits
    assert layer["router_entropy"] is None


def test_another_top_k_or_number_of_experts_has_no_difference(runs, tmp_path):
    a, _, _ = runs
    wide = write(tmp_path / "wide", [moe(1, 0, top_k=2)], [1.0] * 4, {1: [[4, 4, 4, 4]] * 4})
    [difference] = compare([a, wide])["last_shared_step"]["differences"]
    assert difference["losses"]["loss"] == 0.0
    assert difference["layers"][0]["max_violation"] is None


def test_no_shared_step(runs):
    a, _, c = runs
    found = compare([a, c])
    assert found["shared_steps"] == {"count": 0, "first": None, "last": None}
    assert found["last_shared_step"] is None
    assert found["runs"][1]["losses"]["loss"] == 1.0


def test_a_run_without_losses_is_compared_by_its_loads(runs, tmp_path):
    a, _, _ = runs
    with RunWriter(tmp_path / "dump", manifest={"model": {"layers": [moe(1, 0)]}}) as writer:
        load = np.array([4, 4, 0, 0])
        writer.log_layer_stats(1, layer=1, router=0, tokens=8, load=load, gate_mass=load * 1.0, mean_prob=load / 8)
    at = compare([a, Run(tmp_path / "dump")])["last_shared_step"]
    assert at["step"] == 1
    assert at["differences"][0]["losses"]["loss"] is None
    assert at["differences"][0]["layers"][0]["max_violation"] == 1.0


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, arguments)])
    return ended.value.code, capsys.readouterr()


def test_json_is_what_compare_returns(runs, capsys):
    a, b, c = runs
    code, said = command(capsys, a.path, b.path, c.path, "--json", "--window", "2")
    assert code == 0
    assert json.loads(said.out) == compare([a, b, c], window=2)


def test_the_table_names_what_it_compares(runs, capsys):
    a, b, _ = runs
    code, said = command(capsys, a.path, b.path)
    assert code == 0
    assert "3 steps shared, 0 to 2; step 2 minus a:" in said.out
    assert "no difference where the first run has no such layer" in said.out
    code, said = command(capsys, a.path, runs[2].path)
    assert "no recorded step in common" in said.out


def test_one_run_or_one_that_is_not_there_is_one_line(runs, capsys):
    for arguments, needed in (([runs[0].path], "two runs or more"), ([runs[0].path, "nowhere"], "'nowhere'")):
        code, said = command(capsys, *arguments)
        assert code == 2
        assert needed in said.err
        assert said.err.count("\n") == 1
