"""SGLang's expert-distribution dumps: counts, decisions and tokens come out as they went in; the rest is refused."""

import json
import pickle
import zipfile

import numpy as np
import pytest
import sglang_dumps as dumps
import torch

from recorder.importers import DumpError, import_dump
from recorder.reader import Run


def imported(file, tmp_path, **options):
    return Run(import_dump("sglang", file, tmp_path / "runs", **options))


def refused(file, tmp_path, expected, kind="sglang", **options):
    with pytest.raises(DumpError, match=expected) as caught:
        import_dump(kind, file, tmp_path / "runs", **options)
    message = str(caught.value)
    assert str(file) in message
    assert "\n" not in message
    assert not list((tmp_path / "runs").glob("*")), "a run was left behind"


def config(tmp_path, **changes):
    values = {"model_type": "toy", "num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 2}
    values |= {"first_k_dense_replace": 1, "moe_layer_freq": 1} | changes
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    return str(file)


def test_stat_counts_are_the_loads(tmp_path):
    run = imported(dumps.stat(tmp_path / "expert_distribution_recorder_1.5.pt"), tmp_path)
    assert run.status == "finished"
    assert run.manifest["source"] == "import: SGLang expert distribution, stat"
    assert run.manifest["recorded"]["weights"] is None
    assert [layer["index"] for layer in run.moe_layers] == [1, 2]
    assert [layer["num_experts"] for layer in run.moe_layers] == [4, 4]
    assert run.load_steps(1, "generate").tolist() == [3, 5]
    expected = np.array([[2, 2, 2, 2], [2, 2, 1, 3]])  # counted from CHOICES by hand
    for layer in (1, 2):
        np.testing.assert_array_equal(run.load(layer, "generate"), np.outer([3, 5], expected[layer - 1]))
    rows = run.layer_stats(phase="generate")
    for name in ("tokens", "gate_mass", "mean_prob", "expert_bias", "rerouted", "dropped", "invalid"):
        assert rows[name].isna().all(), name
    for name in ("router_entropy", "aux_loss", "z_loss"):
        assert rows[name].isna().all(), name
    assert run.steps("generate")["tokens"].isna().all()
    assert run.decision_steps("generate").size == 0
    notes = "\n".join(run.events()["message"])
    assert "a step is a forward pass, all ranks summed" in notes
    assert "6 of 8 slots" in notes
    assert "no assignment in layers 0" in notes


def test_a_config_tells_tokens_k_and_the_dense_layer(tmp_path):
    run = imported(dumps.stat(tmp_path / "a.pt"), tmp_path, model=config(tmp_path))
    assert [(layer["index"], layer["kind"]) for layer in run.manifest["model"]["layers"]] == [
        (0, "dense"),
        (1, "moe"),
        (2, "moe"),
    ]
    assert [layer["top_k"] for layer in run.moe_layers] == [2, 2]
    assert run.steps("generate")["tokens"].tolist() == [12, 20]  # 4 tokens a pass, times 3 and 5


def test_a_sum_without_steps_is_one_step(tmp_path):
    file = dumps.save(
        tmp_path / "sum.pt",
        {"rank": 0, "logical_count": dumps.counts(), "average_utilization_rate_over_window": 0.5},
    )
    assert imported(file, tmp_path).load(2, "generate").tolist() == [[2, 2, 1, 3]]


def test_per_pass_takes_the_pass_as_step_and_sums_replicas(tmp_path):
    physical = torch.tensor([[0, 1, 2, 3, 0]] * 3)  # expert 0 twice
    table = torch.zeros(3, 5, dtype=torch.int32)
    table[1] = torch.tensor([4, 1, 2, 3, 6])
    run = imported(dumps.per_pass(tmp_path / "a.pt", [dumps.per_pass_record(40, table)], physical), tmp_path)
    assert run.load_steps(1, "generate").tolist() == [40]
    assert run.load(1, "generate").tolist() == [[10, 1, 2, 3]]
    assert run.moe_layers[0]["num_experts"] == 4
    assert "5 physical experts" in "\n".join(run.events()["message"])


def test_per_token_decisions_and_tokens(tmp_path):
    run = imported(dumps.per_token(tmp_path / "a.pt"), tmp_path)
    assert run.decision_steps("generate").tolist() == [4, 5]
    for layer, choices in dumps.CHOICES.items():
        frame = run.decisions(4, layer, "generate")
        assert frame["experts"].tolist() == choices
        assert frame["weights"].isna().all()
        assert frame["kept"].isna().all()
        assert run.load(layer, "generate")[0].tolist() == dumps.counts()[layer].tolist()
    assert [layer["top_k"] for layer in run.moe_layers] == [2, 2]
    tokens = run.tokens(4, "generate")
    assert tokens["sequence"].tolist() == [0, 0, 0, 1]
    assert tokens["position"].tolist() == [0, 1, 2, 0]
    assert tokens["token_id"].isna().all()
    assert run.tokens(5, "generate")["sequence"].tolist() == [0, 1]  # decode: each token of its own sequence
    assert run.steps("generate")["tokens"].tolist() == [4, 2]


def test_token_ids_only_on_request(tmp_path):
    run = imported(dumps.per_token(tmp_path / "a.pt"), tmp_path, token_ids=True)
    assert run.tokens(4, "generate")["token_id"].tolist() == [100, 101, 102, 103]


def test_before_counts_joined_per_token_records(tmp_path):
    record = dumps.token_record(0)
    del record["global_physical_count"]
    run = imported(dumps.per_token(tmp_path / "a.pt", [record]), tmp_path)
    assert run.load(1, "generate").tolist() == [[2, 2, 2, 2]]


def test_physical_ids_become_logical_ones(tmp_path):
    physical = torch.tensor([[3, 2, 1, 0]] * 3)
    run = imported(dumps.per_token(tmp_path / "a.pt", physical=physical), tmp_path)
    assert run.decisions(4, 1, "generate")["experts"].tolist() == [[3 - a, 3 - b] for a, b in dumps.CHOICES[1]]


def test_a_token_that_was_not_captured_is_left_out(tmp_path):
    record = dumps.token_record(0)
    record["topk_ids_of_layer"][1, 2] = -1
    run = imported(dumps.per_token(tmp_path / "a.pt", [record]), tmp_path)
    assert run.decisions(0, 1, "generate")["token"].tolist() == [0, 1, 3]
    assert run.layer_stats(1, "generate")["tokens"].tolist() == [3]
    assert run.layer_stats(2, "generate")["tokens"].tolist() == [4]
    assert any("not captured" in message for message in run.events()["message"])


class Evil:
    def __reduce__(self):
        return (print, ("you have been pwned",))


def test_a_malicious_pickle_is_refused(tmp_path, capsys):
    refused(dumps.save(tmp_path / "evil.pt", {"records": Evil()}), tmp_path, "objects other than tensors")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Evil()))
    refused(tmp_path / "raw.pt", tmp_path, "no file of torch.save")
    assert "pwned" not in capsys.readouterr().out


def cut(share):
    def change(file):
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * share)])

    return change


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_cut_file_is_refused(tmp_path, share):
    file = dumps.per_token(tmp_path / "a.pt")
    cut(share)(file)
    refused(file, tmp_path, "empty|cut off|cannot read")


def test_packed_entries_are_refused(tmp_path):
    file = dumps.stat(tmp_path / "a.pt")
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    refused(tmp_path / "b.pt", tmp_path, "packed")


def test_more_declared_than_stored_is_refused(tmp_path):
    huge = torch.zeros(1, dtype=torch.int32).expand(10**9, 100, 256)
    content = {"rank": 0, "logical_count": huge, "average_utilization_rate_over_window": None}
    refused(dumps.save(tmp_path / "a.pt", content), tmp_path, "declares shape .* stores less")


def stat_of(value):
    return {"rank": 0, "logical_count": value, "average_utilization_rate_over_window": None}


WRONG = {
    "not a dict": ([1, 2], "holds a list"),
    "other keys": ({"model": torch.zeros(1)}, "has keys model, expected .*logical_count.*last_physical"),
    "a list for a tensor": (stat_of([[1, 2]]), "logical_count is a list"),
    "floats": (stat_of(torch.ones(2, 3, 4)), "dtype torch.float32"),
    "one axis": (stat_of(torch.ones(4, dtype=torch.int32)), "has shape"),
    "negative": (stat_of(-torch.ones(1, 3, 4, dtype=torch.int32)), "count of -1"),
    "nothing recorded": (stat_of(torch.zeros(2, 3, 4, dtype=torch.int32)), "no assignment"),
    "no records": ({"records": [], "last_physical_to_logical_map": dumps.identity_map()}, "records is empty"),
    "no map": ({"records": [dumps.token_record(0)], "last_physical_to_logical_map": None}, "is a NoneType"),
    "a map beyond E": (
        {"records": [dumps.token_record(0)], "last_physical_to_logical_map": dumps.identity_map() + 1},
        "expected logical ids",
    ),
}


@pytest.mark.parametrize(("content", "expected"), WRONG.values(), ids=WRONG)
def test_other_contents_are_refused(tmp_path, content, expected):
    refused(dumps.save(tmp_path / "a.pt", content), tmp_path, expected)


def wrong_record(**changes):
    return dumps.token_record(5) | changes


RECORDS = {
    "an id beyond E": ({"topk_ids_of_layer": torch.full((3, 4, 8), 4)}, "expert id 4"),
    "an id below -1": ({"topk_ids_of_layer": torch.full((3, 4, 8), -2)}, "expert id -2"),
    "fewer tokens": ({"topk_ids_of_layer": torch.zeros(3, 2, 8, dtype=torch.int32)}, r"expected \(3, 4, k\)"),
    "floats": ({"topk_ids_of_layer": torch.zeros(3, 4, 8)}, "torch.float32"),
    "an expert twice": ({"topk_ids_of_layer": torch.ones(3, 4, 2, dtype=torch.int32)}, "takes an expert twice|top_k 2"),
    "another rank": ({"rank": 3}, "of rank 3"),
    "back in time": ({"forward_pass_id": 1}, "that ascend"),
    "the same pass": ({"forward_pass_id": 4}, "repeats forward_pass_id 4"),
    "a text as pass": ({"forward_pass_id": "5"}, "'5'"),
    "positions missing": ({"positions": [0]}, "1 positions for 4 tokens"),
    "texts as tokens": ({"input_ids": ["a"] * 4}, "not a list of whole numbers"),
}


@pytest.mark.parametrize(("changes", "expected"), RECORDS.values(), ids=RECORDS)
def test_other_records_are_refused(tmp_path, changes, expected):
    records = [dumps.token_record(4), wrong_record(**changes)]
    refused(dumps.per_token(tmp_path / "a.pt", records), tmp_path, expected)


def test_modes_do_not_mix(tmp_path):
    records = [dumps.token_record(4), dumps.per_pass_record(5, dumps.counts())]
    refused(dumps.per_token(tmp_path / "a.pt", records), tmp_path, r"records\[1\] has .* expected .*topk_ids")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"n_routed_experts": 8}, "4 experts, toy has 8"),
        ({"num_hidden_layers": 5}, "3 layers, toy has 5, 4 of them MoE"),
        ({"first_k_dense_replace": 2}, "assignments in layer 1, which is no MoE layer"),
        ({"num_experts_per_tok": 3}, "top_k 2, toy has 3"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(tmp_path, changes, expected):
    refused(dumps.per_token(tmp_path / "a.pt"), tmp_path, expected, model=config(tmp_path, **changes))


def test_where_the_dump_counts_moe_layers_only_the_model_names_them(tmp_path):
    deeper = config(tmp_path, num_hidden_layers=4)  # layers 1 to 3 are MoE: as many as the dump has
    file = dumps.save(tmp_path / "a.pt", stat_of(torch.ones(2, 3, 4, dtype=torch.int32)))
    assert [layer["router"] for layer in imported(file, tmp_path, model=deeper).moe_layers] == [0, 1, 2]
