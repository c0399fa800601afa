"""`routescope layout` end to end: models by name, config files, runs, and what it says to what is none of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe_core import MoETransformer, MoETransformerConfig
from moe_core.models import PUBLISHED
from recorder import cli, run_layout
from recorder.describe import describe_model
from recorder.writer import RunWriter

SAMPLES = Path(__file__).resolve().parents[2] / "sample_runs"
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}


def run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["layout", *arguments])
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def report(capsys: pytest.CaptureFixture, *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model(name: str, capsys: pytest.CaptureFixture) -> None:
    told = report(capsys, name.lower())
    model = PUBLISHED[name]
    assert told["name"] == name
    assert told["total_parameters"] == model.layout.total_parameters()
    assert set(told["active_parameters"]) == {"all", "minus_input_embedding", "minus_both_embeddings"}
    assert [layer["index"] for layer in told["layers"]] == list(range(len(model.layout.layers)))
    assert {"index", "kind", "num_experts", "top_k", "total", "active"} <= set(told["layers"][0])
    assert told["published"]["active"] == model.published_active
    code, out, err = run(capsys, name)
    assert (code, err) == (0, "")
    assert f"{model.layout.total_parameters():,}" in out
    assert len(out.splitlines()) < 40, "94 layers are no 94 lines"


def test_a_config_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MIXTRAL), encoding="utf-8-sig")
    assert report(capsys, str(file))["total_parameters"] == 46_702_792_704
    assert report(capsys, str(tmp_path)) == report(capsys, str(file)), "a folder with one"
    short = report(capsys, str(file), "--context", "16")
    assert short["cache_bytes"] == 16 * short["cache_bytes_per_token"]


def test_a_recorded_run_told_by_its_settings(capsys: pytest.CaptureFixture) -> None:
    folder = SAMPLES / "top2-shared"
    manifest = json.loads((folder / "run.json").read_text())
    told = report(capsys, str(folder))
    assert told["total_parameters"] == manifest["model"]["parameters_total"]
    assert told["active_parameters"]["all"] == manifest["model"]["parameters_active"]
    assert [layer["total"] for layer in told["layers"]] == [
        layer["block_parameters_total"] for layer in manifest["model"]["layers"]
    ]
    assert [layer["active"] for layer in told["layers"]] == [
        layer["block_parameters_active"] for layer in manifest["model"]["layers"]
    ]
    assert told["flops_per_token"] > 2 * (told["active_parameters"]["minus_input_embedding"] - 10_000)


def write(path: Path, **changes: Any) -> Path:
    """A run whose model nothing but its counts tells of."""
    config = MoETransformerConfig(vocab_size=50, d_model=16, num_layers=3, num_heads=2, d_ff=8, num_experts=4)
    model = describe_model(MoETransformer(config)) | changes
    with RunWriter(path, manifest={"name": "counted", "config": {}, "model": model}) as writer:
        writer.log_step(0, tokens=8, loss=1.0)
    return path


def test_a_run_of_another_model_is_told_by_its_counts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    # the settings that a MoETransformer has by default are another model's: nothing is made up from them
    path = write(tmp_path / "run")
    manifest = json.loads((path / "run.json").read_text())
    assert run_layout.run_layout(manifest) is None
    told = report(capsys, str(path))
    total = manifest["model"]["parameters_total"]
    assert told["total_by_convention"] == {
        "all": total,
        "minus_input_embedding": total - 800,
        "minus_both_embeddings": total - 1600,
    }
    assert told["active_parameters"]["minus_both_embeddings"] == manifest["model"]["parameters_active"] - 1600
    assert [layer["kind"] for layer in told["layers"]] == ["dense", "moe", "dense"]
    assert told["flops_per_token"] is None
    assert told["tied_embeddings"] is False
    code, out, _ = run(capsys, str(path))
    assert code == 0
    assert f"{total:,}" in out


def test_a_run_that_says_little(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write(tmp_path / "run", parameters_total=None, parameters_active=None, vocab_size=None, layers=[])
    told = report(capsys, str(path))
    assert told["total_parameters"] is None
    assert set(told["active_parameters"].values()) == {None}
    assert told["layers"] == []
    assert run(capsys, str(path))[0] == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is no JSON"),
        ("[" * 100_000, "it is nested too deeply"),
        ("{" * 10, "it is no JSON"),
        ("[]", "a config is an object"),
        ('{"model_type": "llama"}', "model_type='llama' is not known"),
        ('{"model_type": "mixtral"}', "the config has no "),
        (json.dumps({**MIXTRAL, "hidden_size": "4096"}), "hidden_size='4096' must be a whole number"),
        (json.dumps({**MIXTRAL, "num_local_experts": 10**12}), "num_local_experts=1000000000000 must be from 1"),
        (json.dumps(MIXTRAL).replace("4096", "9" * 5000), "it is no JSON"),
        (json.dumps(MIXTRAL).replace("4096", "NaN"), "hidden_size=nan must be a whole number"),
        (" " * 4_000_001, "a config has no more than 4,000,000"),
    ],
)
def test_hostile_files(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    code, out, err = run(capsys, str(file))
    assert (code, out) == (2, "")
    assert err.startswith(f"routescope: {file}: ")
    assert said in err
    assert len(err.splitlines()) == 1
    assert len(err) < 700


def test_a_file_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xff\xfe\x00{}")
    assert run(capsys, str(file)) == (2, "", f"routescope: {file}: it is no text\n")


def test_names_that_are_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, _, err = run(capsys, "mixtral")
    assert code == 2
    assert "near it: Mixtral-8x7B, Mixtral-8x22B" in err
    code, _, err = run(capsys, str(tmp_path / "gone.json"))
    assert (code, err) == (2, f"routescope: there is no file {tmp_path / 'gone.json'}\n")
    (tmp_path / "run.json").write_text("{")
    code, _, err = run(capsys, str(tmp_path))
    assert code == 1, "a run that cannot be read is no wrong argument"
    assert len(err.splitlines()) == 1
