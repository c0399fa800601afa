"""What scripts do that nobody means: said in one line, or borne, and no row of the others is lost."""

import argparse
import math
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from moe_core import MoELayer, MoETransformer, MoETransformerConfig
from recorder import RoutingRecorder, Run
from recorder.background import Background
from recorder.verify import verify_run
from recorder.writer import RunWriter


def transformer():
    return MoETransformer(MoETransformerConfig(vocab_size=64, num_layers=2, num_experts=8, top_k=2, d_model=32))


def ids(batch=2, length=4):
    return torch.randint(64, (batch, length))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = MoELayer(8, 8, 4, 1)

    def forward(self, inputs_embeds, attention_mask=None):
        return self.layer(inputs_embeds).hidden


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_buffer_mb": math.inf}, "max_buffer_mb must be a finite number, above 0, got inf"),
        ({"max_buffer_mb": "1"}, "max_buffer_mb must be .* got '1'"),
        ({"stats_every": math.nan}, "stats_every must be .* got nan"),
        ({"stats_every": "a"}, "stats_every must be .* got 'a'"),
        ({"decisions_every": math.inf}, "decisions_every must be .* got inf"),
        ({"decisions_every": 1.5}, "decisions_every must be .* got 1.5"),
        ({"decisions_share": "x"}, "decisions_share='x'"),
        ({"probe_every": 0}, "probe_every must be .* got 0"),
        ({"data_parallel_rank": "a"}, "data_parallel_rank must be .* got 'a'"),
        ({"rank": "a", "world_size": 2}, "rank must be .* got 'a'"),
        ({"flush_seconds": "a"}, "flush_seconds must be .* got 'a'"),
        ({"domains": 5}, "domains must be a list of names, got 5"),
        ({"domains": [1, 2]}, r"domains must be a list of names, got \[1, 2\]"),
        ({"domains": "code"}, "domains must be a list of names, got 'code'"),
        ({"tokenizer": 5}, "tokenizer must have a method decode"),
        ({"config": 5}, "config must be a mapping, a dataclass or a Namespace, got 5"),
    ],
)
def test_options_are_checked_before_anything_is_written(tmp_path, option, message):
    with pytest.raises(ValueError, match=message):
        RoutingRecorder(transformer(), tmp_path / "run", **option)
    assert not (tmp_path / "run").exists()


@dataclass
class Settings:
    lr: float = 0.5
    dtype: object = torch.float32


@pytest.mark.parametrize("config", [Settings(), argparse.Namespace(lr=0.5, dtype=torch.float32), vars(Settings())])
def test_configs_of_any_kind(tmp_path, config):
    RoutingRecorder(transformer(), tmp_path / "run", config=config).close()
    assert Run(tmp_path / "run").manifest["config"] == {"lr": 0.5, "dtype": "torch.float32"}


@pytest.mark.parametrize("step", [math.inf, math.nan, None, [1], np.array(4), True, 2**63, 1.0, "1"])
def test_steps_that_are_no_whole_number_of_63_bits(tmp_path, step):
    with RoutingRecorder(transformer(), tmp_path / "run") as recorder:
        with pytest.raises(ValueError, match="^step must be a whole number"), recorder.step(step):
            pass
        with recorder.step(np.int64(3)):
            recorder.log(loss=1)
    assert Run(tmp_path / "run").steps().step.tolist() == [3]


@pytest.mark.parametrize("value", [torch.tensor(1j), torch.ones(1, device="meta"), 10**400, "3", 1j, np.array(1j)])
def test_what_is_logged_must_be_a_number(tmp_path, value):
    model = transformer()
    with RoutingRecorder(model, tmp_path / "run") as recorder, recorder.step(0):
        model(ids())
        with pytest.raises(ValueError, match="loss must be a number"):
            recorder.log(loss=value)


@pytest.mark.parametrize(
    "mask",
    [
        [["a"] * 4] * 2,
        [[None] * 4] * 2,
        [[object()] * 4] * 2,
        torch.ones(2, 4, dtype=torch.complex64),
        [[1, 1], [1]],
        torch.ones(2, 4, 1),
        torch.full((2, 4), math.nan),
        1,
    ],
)
def test_what_is_no_mask(tmp_path, mask):
    recorder = RoutingRecorder(transformer(), tmp_path / "run")
    said = r"^attention_mask must hold numbers or booleans, \(B, S\), got"
    with pytest.raises(ValueError, match=said), recorder.step(0, attention_mask=mask):
        pass
    recorder.close()


@pytest.mark.parametrize("padding", [-math.inf, -1e9])
@pytest.mark.parametrize("given", [False, True])
def test_additive_masks(tmp_path, given, padding):
    """0 is a real token there; also where nothing is padding."""
    model, masks = Masked(), torch.zeros(2, 2, 3)
    masks[0, 0, 0] = padding
    with RoutingRecorder(model, tmp_path / "run") as recorder:
        for step, mask in enumerate(masks):
            with recorder.step(step, attention_mask=mask if given else None):
                model(torch.randn(2, 3, 8), None if given else mask)
    assert Run(tmp_path / "run").steps().tokens.tolist() == [5, 6]
    assert not verify_run(tmp_path / "run").problems


def test_a_row_that_arrow_refuses_is_set_aside_and_told(tmp_path):
    with RunWriter(tmp_path / "run", flush_seconds=1e9) as writer:
        for step, tokens in enumerate([4, 2**70, 4]):
            writer.log_step(step, tokens=tokens)
        writer.log_event(2, "note", "bad \udcff")
        writer.flush()
        writer.log_step(3, tokens=4)
    run = Run(tmp_path / "run")
    assert run.steps().step.tolist() == [0, 2, 3]
    events = dict(zip(run.events().kind, run.events().message, strict=True))
    assert events["note"] == "bad ?"
    assert events["recorder_error"].startswith("1 rows of steps cannot be written: ")


class Surrogates:
    def decode(self, ids):
        return "\ud800" if ids[0] % 2 else "a"


def test_text_with_half_a_character_keeps_its_row(tmp_path):
    model = transformer()
    recorder = RoutingRecorder(model, tmp_path / "run", tokenizer=Surrogates(), domains=["\ud800"])
    with recorder.step(0, domains=["\ud800"] * 2):
        model(torch.arange(8).view(2, 4))
    recorder.close()
    tokens = Run(tmp_path / "run").tokens(step=0)
    assert tokens.text.tolist() == ["a", "?"] * 4
    assert set(tokens.domain) == {"?"}
    assert not verify_run(tmp_path / "run").problems


def test_a_model_that_saw_no_token_has_no_mean_prob(tmp_path):
    model = Masked()
    with RoutingRecorder(model, tmp_path / "run") as recorder, recorder.step(0):
        model(torch.randn(1, 2, 8), torch.zeros(1, 2, dtype=torch.int64))
    row = Run(tmp_path / "run").layer_stats().iloc[0]
    assert row.tokens == 0
    assert row.isna().mean_prob
    assert not verify_run(tmp_path / "run").problems


def test_an_interrupted_forward_does_not_spoil_the_next_steps(tmp_path):
    model, interrupted = Masked(), True

    def interrupt(*_):
        if interrupted:
            raise KeyboardInterrupt

    model.layer.register_forward_pre_hook(interrupt)
    with RoutingRecorder(model, tmp_path / "run") as recorder:
        with pytest.raises(KeyboardInterrupt), recorder.step(0):
            model(torch.randn(1, 3, 8))
        interrupted = False
        with recorder.step(1):
            for mask in ([[1, 0, 0]], [[1, 1, 1]]):
                model(torch.randn(1, 3, 8), torch.tensor(mask))
    assert Run(tmp_path / "run").steps().tokens.tolist() == [4]


def test_a_closed_recorder_says_so_and_does_not_hang(tmp_path):
    model = transformer()
    recorder = RoutingRecorder(model, tmp_path / "run")
    with recorder.step(0):
        model(ids())
    with pytest.raises(ValueError, match="status must be one of"):
        recorder.close("nonsense")
    recorder.close()
    for _ in range(2):
        with pytest.raises(ValueError, match="closed"):
            recorder.flush()
    assert Run(tmp_path / "run").steps().step.tolist() == [0]
    assert not verify_run(tmp_path / "run").problems


def test_what_is_put_after_the_end_is_thrown_away():
    background = Background(lambda item: None, max_bytes=1)
    background.close()
    for _ in range(2):
        assert background.put(0, 1)
        background.drain()


@pytest.mark.parametrize("child", ["sys.exit()", "recorder.close()", "train(4)", "recorder.flush()", "os._exit(0)"])
def test_a_forked_process_leaves_the_run_alone(tmp_path, child):
    script = f"""
    import os, sys, torch
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from test_misuse import RoutingRecorder, ids, transformer
    torch.set_num_threads(1)
    model = transformer()
    recorder = RoutingRecorder(model, {str(tmp_path / "run")!r}, flush_seconds=1e9)
    def train(step):
        with recorder.step(step):
            model(ids())
            recorder.log(loss=1.0)
    for step in range(4):
        train(step)
    recorder.writer
    pid = os.fork()
    if pid == 0:
        {child}
        sys.exit()
    assert os.waitpid(pid, 0)[1] == 0
    for step in range(4, 6):
        train(step)
    recorder.close()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)
    run = Run(tmp_path / "run")
    assert run.manifest["status"] == "finished"
    assert run.steps().step.tolist() == [0, 1, 2, 3, 4, 5]
    assert not verify_run(tmp_path / "run").problems
