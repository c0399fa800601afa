"""RoutingCallback under a real transformers Trainer."""

import json

import pyarrow.parquet as pq
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from recorder.trainer import RoutingCallback  # noqa: E402 (needs transformers)


class Texts(torch.utils.data.Dataset):
    def __init__(self, count):
        self.ids = torch.randint(1, 32, (count, 6), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        mask = torch.ones(6, dtype=torch.long)
        mask[: index % 3] = 0
        return {"input_ids": self.ids[index], "attention_mask": mask, "labels": self.ids[index]}


def model():
    torch.manual_seed(0)
    options = {
        **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    }
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**options))


def trainer(tmp_path, callback, **changes):
    options = {
        **{"output_dir": tmp_path / "out", "max_steps": 4, "per_device_train_batch_size": 2},
        **{"gradient_accumulation_steps": 2, "logging_steps": 1, "report_to": [], "save_strategy": "no"},
        **{"use_cpu": True, "disable_tqdm": True, "per_device_eval_batch_size": 2},
        **changes,
    }
    return transformers.Trainer(
        model(),
        transformers.TrainingArguments(**options),
        train_dataset=Texts(16),
        eval_dataset=Texts(6),
        callbacks=[callback],
    )


def hooks_of_ours(model):
    hooks = [[*m._forward_hooks.values(), *m._forward_pre_hooks.values()] for m in model.modules()]
    return [hook for of_module in hooks for hook in of_module if "recorder." in repr(hook)]


def table(path, name):
    return pq.read_table(path / name).to_pandas()


@pytest.mark.parametrize("logging_steps", [1, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_trainers_run(tmp_path, logging_steps, checkpointing):
    callback = RoutingCallback(tmp_path / "run", tokens=True)
    made = trainer(
        tmp_path, callback, eval_strategy="steps", eval_steps=2, logging_steps=logging_steps,
        gradient_checkpointing=checkpointing,
    )  # fmt: skip
    made.train()
    assert not hooks_of_ours(made.model)
    steps, stats = table(tmp_path / "run", "steps"), table(tmp_path / "run", "layer_stats")
    train, evaluated = steps[steps.phase == "train"], steps[steps.phase == "eval"]
    assert train.step.tolist() == [1, 2, 3, 4]
    assert train.tokens.sum() == sum(6 - i % 3 for i in range(16))  # one epoch
    assert evaluated.step.tolist() == [2, 4]
    assert evaluated.tokens.tolist() == [36 - 6, 36 - 6]
    assert len(stats) == 2 * 6
    decisions = table(tmp_path / "run", "decisions")
    assert len(decisions[decisions.phase == "eval"]) == 2 * 2 * (12 - 1)  # of the first of three batches
    history = {entry["step"]: entry for entry in made.state.log_history if "loss" in entry}
    for row in train.itertuples():
        assert row.learning_rate > 0
        assert row.wall_time_s > 0
        if logging_steps == 1:
            assert row.loss == pytest.approx(history[row.step]["loss"], abs=1e-3)
            assert row.grad_norm == pytest.approx(history[row.step]["grad_norm"], rel=1e-6)
    if logging_steps == 3:  # the Trainer's is the mean of three steps
        assert train.loss[train.step <= 3].mean() == pytest.approx(history[3]["loss"], abs=1e-3)
    eval_history = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    assert evaluated.loss.tolist() == pytest.approx(eval_history)
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (manifest["status"], manifest["source"]) == ("finished", "transformers.Trainer")
    assert manifest["config"]["gradient_accumulation_steps"] == 2


def test_an_exception_marks_the_run_failed_where_the_callback_is_a_context(tmp_path):
    class Fails(transformers.TrainerCallback):
        def on_substep_end(self, args, state, control, **_):
            if state.global_step == 2:
                raise RuntimeError("out of luck")

    callback = RoutingCallback(tmp_path / "run")
    made = trainer(tmp_path, callback)
    made.add_callback(Fails())
    with pytest.raises(RuntimeError, match="out of luck"), callback:
        made.train()
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (manifest["status"], manifest["error"]) == ("failed", "RuntimeError: out of luck")
    assert table(tmp_path / "run", "steps").step.tolist() == [1, 2]
    assert not hooks_of_ours(made.model)


@pytest.mark.parametrize("strategy", ["epoch", "start"])
def test_evaluations_at_other_moments(tmp_path, strategy):
    callback = RoutingCallback(tmp_path / "run", eval_batches=0)
    changes = {"eval_strategy": "epoch"} if strategy == "epoch" else {"eval_strategy": "no", "eval_on_start": True}
    trainer(tmp_path, callback, **changes, max_steps=8).train()
    steps = table(tmp_path / "run", "steps")
    assert steps[steps.phase == "eval"].step.tolist() == ([4, 8] if strategy == "epoch" else [0])
    assert set(table(tmp_path / "run", "decisions").phase) == {"train"}
