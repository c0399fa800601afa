"""A fault inside the recorder never stops training: it warns once, becomes an event, and the rest is recorded."""

import errno
import os
import subprocess
import sys
import textwrap

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from moe_core import MoELayer, Routing
from recorder import RoutingRecorder, Run
from recorder.adapters import Observation, RouterAdapter, observed_routing, register_adapter
from recorder.verify import verify_run


def table(path, name):
    return pq.read_table(path / name).to_pandas()


class _OddRouter(nn.Module):
    def forward(self, x):
        return x[:, :4]


class _OddAdapter(RouterAdapter):
    classes = ("_OddRouter",)

    def describe(self, module, model):
        return {"num_experts": 4, "top_k": 1, "score_function": "softmax"}

    def read(self, module, args, kwargs, output):
        if len(output) % 2:
            raise ValueError("an odd output")
        ids = output.argmax(-1, keepdim=True) + (10 if len(output) == 8 else 0)  # of experts that there are not
        return Observation(routing=Routing(output, output.softmax(-1), ids, torch.ones(len(output), 1)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        register_adapter(_OddAdapter())
        self.layers = nn.ModuleList([MoELayer(8, 8, 4, 1), _OddRouter()])

    def forward(self, x):
        self.layers[1](x)
        return self.layers[0](x).hidden.square().mean()


def run_steps(recorder, model, sizes):
    for step, size in enumerate(sizes):
        with recorder.step(step):
            loss = model(torch.randn(size, 8))
            loss.backward()
            recorder.log(loss=loss)


@pytest.mark.parametrize(("size", "message"), [(5, "an odd output"), (8, "")])
def test_an_adapter_that_fails(tmp_path, size, message):
    model = Model()
    recorder = RoutingRecorder(model, tmp_path / "run")
    with pytest.warns(RuntimeWarning, match=f"routescope: .*{message}.*training goes on") as caught:  # noqa: PT031
        run_steps(recorder, model, [6, size, size, 6])
        recorder.close()
    assert len([w for w in caught if "routescope" in str(w.message)]) == 1 + (size == 5)  # that it was not seen, too
    stats = table(tmp_path / "run", "layer_stats")
    assert stats[stats.router == 0].step.tolist() == [0, 1, 2, 3]
    assert stats[stats.router == 1].step.tolist() == [0, 3]  # a load without the ids of no expert would be too low
    assert table(tmp_path / "run", "steps").step.tolist() == [0, 1, 2, 3]
    decisions = table(tmp_path / "run", "decisions")
    assert sorted(set(decisions[decisions.router == 0].step)) == [0, 1, 2, 3]
    assert sorted(set(decisions[decisions.router == 1].step)) == [0, 3]
    events = table(tmp_path / "run", "events")
    assert set(events.kind) == {"recorder_error"}
    assert events.step.tolist() == [1] * len(events)
    manifest = recorder.writer.manifest
    assert manifest["status"] == "finished"
    assert manifest["recorded"]["errors"] >= 2


def test_a_full_disk_loses_nothing_once_there_is_room_again(tmp_path, monkeypatch):
    model = Model()
    recorder = RoutingRecorder(model, tmp_path / "run", flush_steps=2)
    fsync, full = os.fsync, True

    def of_a_full_disk(descriptor):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_a_full_disk)
    with pytest.warns(RuntimeWarning, match="No space left on device.*training goes on") as caught:  # noqa: PT031
        run_steps(recorder, model, [6] * 6)
        recorder.flush()
    assert len([w for w in caught if "routescope" in str(w.message)]) == 1
    full = False
    with recorder.step(6):
        model(torch.randn(6, 8)).backward()
    recorder.close()
    assert sorted(table(tmp_path / "run", "layer_stats").step) == sorted([*range(7)] * 2)
    assert set(table(tmp_path / "run", "events").kind) == {"recorder_error"}
    assert Run(tmp_path / "run").manifest["status"] == "finished"


def test_a_disk_that_stays_full_leaves_a_run_that_opens(tmp_path, monkeypatch):
    model = Model()
    with pytest.warns(RuntimeWarning, match="could not be closed"):  # noqa: PT031
        with RoutingRecorder(model, tmp_path / "run", flush_steps=2) as recorder:
            run_steps(recorder, model, [6, 6])
            recorder.flush()

            def of_a_full_disk(descriptor):
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr(os, "fsync", of_a_full_disk)
            for step in (2, 3):
                with recorder.step(step):
                    model(torch.randn(6, 8)).backward()
        monkeypatch.undo()
    run = Run(tmp_path / "run")
    assert run.steps()["step"].tolist() == [0, 1]
    assert not [name for name in (tmp_path / "run" / "steps").iterdir() if name.suffix == ".tmp"]


def test_the_thread_dies(tmp_path):
    model = Model()
    recorder = RoutingRecorder(model, tmp_path / "run", max_buffer_mb=0.001)
    run_steps(recorder, model, [6])
    recorder.flush()

    def die(*_):
        raise SystemExit("as a thread may")

    recorder._step_writer.write = die
    with pytest.warns(RuntimeWarning, match="thread has died, nothing more is recorded.*as a thread may") as caught:  # noqa: PT031
        for step in range(1, 5):
            with recorder.step(step):
                model(torch.randn(6, 8)).backward()
        recorder.close()
    assert len([w for w in caught if "routescope" in str(w.message)]) == 1
    assert table(tmp_path / "run", "steps").step.tolist() == [0]
    assert recorder.writer.manifest["recorded"]["errors"] == 1


def test_a_script_that_never_closes_keeps_its_rows(tmp_path):
    code = f"""
        import torch
        from moe_core import MoELayer
        from recorder import RoutingRecorder
        layer = MoELayer(8, 8, 4, 1)
        recorder = RoutingRecorder(layer, {str(tmp_path / "run")!r}, flush_seconds=1e9)
        for step in range(3):
            with recorder.step(step):
                layer(torch.randn(4, 8))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
    assert table(tmp_path / "run", "steps").step.tolist() == [0, 1, 2]
    assert Run(tmp_path / "run").manifest["status"] == "running"  # shown as unfinished: its process is gone


def test_what_is_logged_is_checked_at_once(tmp_path):
    model = Model()
    with RoutingRecorder(model, tmp_path / "run") as recorder, recorder.step(0):
        model(torch.randn(6, 8))
        with pytest.raises(ValueError, match=r"loss must have one element, got a tensor of shape \(2,\)"):
            recorder.log(loss=torch.zeros(2))
        with pytest.raises(ValueError, match="loss must be a number, got 'low'"):
            recorder.log(loss="low")
        loss = torch.tensor(2.0)
        recorder.log(loss=loss)
        loss += 1  # changed later: what was logged stays
    assert table(tmp_path / "run", "steps").loss.tolist() == [2.0]
    with pytest.raises(ValueError, match="is closed"), recorder.step(1):
        pass


@pytest.mark.parametrize(("step", "phase"), [(-1, "train"), (1.5, "train"), (0, "test")])
def test_steps_that_cannot_be_are_refused_at_the_call(tmp_path, step, phase):
    with (
        RoutingRecorder(Model(), tmp_path / "run") as recorder,
        pytest.raises(ValueError, match="phase must be|step must be"),
        recorder.step(step, phase=phase),
    ):
        raise AssertionError("the block must not run")


def test_what_is_said_of_tokens_that_no_router_could_read_stops_nothing(tmp_path):
    model = Model().layers[1]
    with (
        pytest.warns(RuntimeWarning, match="an odd output.*training goes on"),
        RoutingRecorder(nn.ModuleList([model]), tmp_path / "run") as recorder,
        recorder.step(0, token_ids=torch.arange(5), text=list("abcde")),
    ):
        model(torch.randn(5, 8))
    run = Run(tmp_path / "run")
    assert run.status == "finished"
    assert "an odd output" in run.events().message[0]
    assert any("2 events recorder_error" in note for note in verify_run(tmp_path / "run").notes)


def test_a_tensor_that_is_missing_is_named():
    with pytest.raises(ValueError, match="_OddRouter: logits_TE is None, but a tensor is wanted"):
        observed_routing(_OddRouter(), logits_TE=None, weights_TK=torch.ones(2, 1), expert_ids_TK=torch.zeros(2, 1))
