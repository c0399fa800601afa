"""`routescope record --task regression` and `--recipe`: what is trained, what is recorded, and what is left out."""

import contextlib
import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from in_process import routescope

from moe_core.balancers import BALANCER_NAMES
from moe_core.dispatchers import DISPATCHER_NAMES
from moe_core.recipe_catalog import RECIPES
from recorder.reader import Run
from recorder.summary import run_row, summarise
from recorder.training import language_model
from recorder.training.config import BALANCERS, DISPATCHERS, VARIANTS, ToyConfig
from recorder.training.language_model import LanguageModelTask, build_model
from recorder.training.loop import train
from recorder.training.regression import RegressionTask

TINY = ["--steps", "3", "--batch-size", "4", "--seq-len", "16", "--d-model", "32", "--d-ff", "16"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The task as the command runs it with nothing else said."""
    out = tmp_path_factory.mktemp("regression")
    result = routescope("record", "--task", "regression", "--run-id", "run", "--out", out)
    assert result.returncode == 0, result.stderr
    return out / "run", result


def test_the_defaults_are_those_of_the_task(recorded):
    config = Run(recorded[0]).config
    assert {name: config[name] for name in ("task", "d_model", "expert_d_ff", "num_experts", "top_k")} == {
        "task": "regression",
        "d_model": 32,
        "expert_d_ff": 64,
        "num_experts": 8,
        "top_k": 2,
    }
    assert (config["num_shared_experts"], config["batch_size"], config["lr"], config["steps"]) == (1, 256, 3e-3, 300)
    assert (config["recipe"], config["dispatcher"], config["balancer"]) == ("sorted-swiglu", "sorted", "aux")
    assert not {"vocab_size", "seq_len", "corpus", "num_layers"} & set(config)  # what it has not, it does not name
    assert isinstance(RegressionTask(ToyConfig.of(task="regression")).optimizer, torch.optim.Adam)


def test_it_learns(recorded):
    loss = Run(recorded[0]).steps(phase="train")["loss"].to_numpy()
    assert len(loss) == 300
    assert loss[-20:].mean() < 0.4 * loss[:5].mean()
    probe = Run(recorded[0]).steps(phase="probe")["loss"].to_numpy()
    assert probe[-1] < 0.4 * probe[0]


def test_the_target_is_tanh_of_x_times_w():
    task = RegressionTask(ToyConfig.of(task="regression"))
    batches = [task.batch(0), task.batch(1), task.probe]
    for batch in batches:
        x, y = batch.inputs
        assert x.shape == (256, 32)
        # y determines W: the same one for every batch
        w = torch.linalg.lstsq(x.double(), torch.atanh(y.double().clamp(-0.999999, 0.999999))).solution
        inside = y.abs() < 0.99
        torch.testing.assert_close(torch.tanh(x.double() @ w)[inside], y.double()[inside], atol=1e-2, rtol=1e-2)
    assert not torch.equal(batches[0].inputs[0], batches[1].inputs[0])
    assert torch.equal(task.batch(1).inputs[0], batches[1].inputs[0])


def test_shares_of_the_busiest_and_quietest_expert_every_100_steps(recorded):
    path, result = recorded
    lines = re.findall(
        r"steps (\d+) to (\d+): busiest expert ([\d.]+) %, quietest ([\d.]+) % of the assignments \(even: ([\d.]+) %\)",
        result.stderr,
    )
    loads = Run(path).load(0, phase="train")
    assert [(int(first), int(last)) for first, last, *_ in lines] == [(0, 99), (100, 199), (200, 299)]
    for first, last, busiest, quietest, even in lines:
        share = loads[int(first) : int(last) + 1].sum(0) / loads[int(first) : int(last) + 1].sum()
        assert float(busiest) == pytest.approx(100 * share.max(), abs=0.051)
        assert float(quietest) == pytest.approx(100 * share.min(), abs=0.051)
        assert float(even) == 12.5
    assert result.stdout.splitlines() == [str(path)]


def test_no_text_and_no_cross_entropy_but_decisions_and_loads(recorded):
    path, _ = recorded
    steps, tokens = pq.read_table(path / "steps"), pq.read_table(path / "tokens")
    assert steps["ce_loss"].null_count == len(steps)
    assert steps["loss"].null_count == steps["aux_loss"].null_count == 0
    for column in ("text", "token_id", "domain"):
        assert tokens[column].null_count == len(tokens), column
    stats = pq.read_table(path / "layer_stats").to_pandas()
    assert (stats.load.map(np.sum) == 512).all()
    assert (stats.layer == 0).all()
    run = Run(path)
    decisions = run.decisions(290, 0)
    assert len(decisions) == 256
    assert np.bincount(np.stack(decisions.experts).ravel(), minlength=8).tolist() == run.load(0)[290].tolist()
    manifest = json.loads((path / "run.json").read_text())
    assert (manifest["recorded"]["text"], manifest["domains"], manifest["model"]["vocab_size"]) == (False, [], None)
    assert [(layer["kind"], layer["d_ff"]) for layer in manifest["model"]["layers"]] == [("moe", None)]


def test_summary_and_runs_say_null_for_the_cross_entropy(recorded):
    path, _ = recorded
    losses = summarise(Run(path))["losses"]
    assert losses["ce_loss"] is None
    assert losses["loss"] > 0
    assert run_row(Run(path))["balancer"] == "aux"
    printed = routescope("summary", path, "--json")
    assert printed.returncode == 0, printed.stderr
    assert json.loads(printed.stdout)["losses"]["ce_loss"] is None
    assert routescope("summary", path).returncode == 0
    assert routescope("runs", path.parent).returncode == 0


@pytest.mark.parametrize("balancer", ["none", "quantile", "sign-bias+sequence-aux"])
def test_any_balancer_and_router_and_the_latent_layer(tmp_path, balancer):
    config = ToyConfig.of(
        task="regression", steps=3, batch_size=32, balancer=balancer, router="sigmoid", latent_size=8, z_coef=0.01
    )
    train(config, tmp_path / "run")
    [layer] = Run(tmp_path / "run").moe_layers
    assert (layer["latent_size"], layer["score_function"]) == (8, "sigmoid")
    assert layer["balancer"] == ("z" if balancer == "none" else f"{balancer}+z")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("task", ["lm", "regression"])
def test_every_recipe_records(tmp_path, name, task):
    tiny = {"num_layers": 2, "seq_len": 16, "num_heads": 2, "d_ff": 16} if task == "lm" else {}
    config = ToyConfig.of(task=task, recipe=name, steps=2, batch_size=4, d_model=32, expert_d_ff=16, **tiny)
    train(config, tmp_path / "run")
    run = Run(tmp_path / "run")
    options = RECIPES[name].options
    assert run.config["recipe"] == name
    assert run.config["balancer"] == options["balancer"]
    for layer in run.moe_layers:
        for field in ("num_experts", "top_k", "balancer"):
            assert layer[field] == options[field], field
        assert layer["latent_size"] == options.get("latent_size")
        assert layer["score_function"] == options.get("score_function", "softmax")
        assert layer["activation"] == options.get("activation", "swiglu")


def test_the_built_in_text_is_prepared_once_and_the_users_each_time(monkeypatch):
    tiny = {"num_layers": 2, "seq_len": 16, "d_model": 32, "d_ff": 16}
    none, aux = (LanguageModelTask(ToyConfig.of(balancer=name, **tiny)) for name in ("none", "aux"))
    assert aux._corpus is none._corpus
    monkeypatch.setattr(language_model, "build_corpus", lambda paths, **settings: pytest.fail(f"built of {paths}"))
    LanguageModelTask(ToyConfig.of(**tiny))
    with pytest.raises(pytest.fail.Exception, match="built of .'mine.txt'"):
        LanguageModelTask(ToyConfig.of(corpus=("mine.txt",), **tiny))


def test_what_is_typed_goes_before_the_recipe_and_the_rest_of_it_stays():
    config = ToyConfig.of(recipe="deepseek-v3", num_experts=32, bias_rate=0.5)
    router = build_model(config, 40).layers[1].mlp.router
    assert (router.num_experts, router.top_k, router.num_groups, router.top_groups) == (32, 4, 4, 2)
    assert (router.routed_scaling_factor, router.score_function) == (2.5, "sigmoid")
    assert config.as_manifest()["bias_rate"] == 0.5
    assert ToyConfig.of() == ToyConfig()


def test_names_are_those_of_moe_core():
    assert {*BALANCERS, *VARIANTS} <= set(BALANCER_NAMES)
    assert set(DISPATCHERS) == set(DISPATCHER_NAMES)


def test_the_command_takes_recipe_and_latent_size(tmp_path):
    result = routescope(
        "record",
        *TINY,
        "--recipe",
        "mixtral",
        "--num-layers",
        "2",
        "--latent-size",
        "8",
        "--run-id",
        "r",
        "--out",
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    run = Run(tmp_path / "r")
    assert [(layer["latent_size"], layer["num_experts"]) for layer in run.moe_layers] == [(8, 8)] * 2
    assert (run.config["recipe"], run.config["aux_coef"]) == ("mixtral", 0.02)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "dreams"}, "task='dreams' is unknown; choose one of lm, regression"),
        ({"recipe": "mixtrel"}, "recipe='mixtrel' is unknown; choose one of three-tier, noisy-top-k"),
        ({"recipe": "deepseek-v3", "num_layers": 1}, "num_layers=1 after the 1 dense ones .* leaves no MoE layer"),
        ({"task": "regression", "seq_len": 32}, "seq_len=32 means nothing to task='regression'"),
        ({"task": "regression", "corpus": ("a.txt",)}, "corpus=.*a.txt"),
        ({"latent_size": 0}, "latent_size=0 is not between 1 and"),
        ({"balancer": "quantile+sign-bias"}, "quantile and sign-bias would both own the bias"),
        ({"balancer": "aux+soft-aux"}, "aux and soft-aux would both give the aux loss"),
        ({"balancer": "magic"}, "'magic' is unknown; choose one of none, aux, .*quantile-step"),
    ],
)
def test_bad_settings_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        ToyConfig.of(**given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # found only when the model is built, still before anything is written
        (["--recipe", "mixtral", "--top-k", "1"], "--top-k 1 with renormalised weights"),
        (["--task", "regression", "--seq-len", "32"], "--seq-len 32 means nothing to --task 'regression'"),
    ],
)
def test_wrong_arguments_are_one_clear_line_and_exit_2(tmp_path, options, message):
    result = routescope("record", "--out", tmp_path / "runs", *options)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_the_settings_allow_can_be_built_and_what_they_refuse_cannot(recipe):
    small = {"d_model": 8, "num_heads": 1, "d_ff": 4, "expert_d_ff": 4, "num_layers": 2, "moe_frequency": 1}
    for changes in ({"top_k": 1}, {"router": "sigmoid"}, {"router": "softmax"}, {"num_experts": 6}, {"top_k": 7}):
        given = {"num_experts": 8, "top_k": 2, **changes}
        with contextlib.suppress(ValueError):
            build_model(ToyConfig.of(recipe=recipe, **small, **given), 300)
            continue  # allowed, and built
        with pytest.raises(ValueError, match="="):
            ToyConfig.of(recipe=recipe, **small, **given)
