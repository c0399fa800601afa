"""What recording costs: step time, memory, and bytes on the disk, beside what others write.

    python benchmarks/recorder_cost.py [--only large|toy|memory] [--blocks 12] [--large-steps 3] [--toy-steps 40]

*Step time*: blocks of training steps with full recording (statistics and decisions of every step, token ids, and for
the toy run the domains and the text of every token) alternate with blocks without, in one process; a recorded block
ends when everything is on the disk. Medians over the blocks. *large*: a MoETransformer of 57 M parameters; *toy*: the
model, the text and the batches of `routescope record` by default. *memory*: growth of the process over 1,000 recorded
steps of a small model. *Size*: the decisions table after close, against the information in it (empirical entropy of
the expert ids, by router, plus 11 bits a weight), against int32 ids and float32 weights, and beside JSON lines,
torch.save and, where it is installed, a TensorBoard histogram per layer (which holds no decisions).

Bars: 2 % (large), 8 % (toy), 64 MB (memory), 1.3 times the information, a third of int32 + float32.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from moe_core import MoETransformer, MoETransformerConfig
from recorder import RoutingRecorder
from recorder.schema import lists_to_matrix
from recorder.training.config import ToyConfig
from recorder.training.loop import make_task

WEIGHT_BITS = 11  # 10 of the mantissa, one for exponent and sign
BARS = {"large": 1.02, "toy": 1.08}

Step = Callable[[int, RoutingRecorder | None], None]


def large_model() -> tuple[MoETransformer, Step]:
    """57 M parameters: 8 layers, 4 of them MoE with 16 experts of which 2 are active, 1,024 tokens a step."""
    torch.manual_seed(0)
    model = MoETransformer(
        MoETransformerConfig(
            vocab_size=8192, d_model=384, num_layers=8, num_heads=6, d_ff=1024, expert_d_ff=512, num_experts=16,
            top_k=2, balancer="sign-bias+aux",
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(number: int, recorder: RoutingRecorder | None) -> None:
        ids = torch.randint(8192, (4, 256), generator=torch.Generator().manual_seed(number))
        with nullcontext() if recorder is None else recorder.step(number, token_ids=ids):
            out = model(ids, labels=ids)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if recorder is not None:
                recorder.log(loss=out.loss, **out.losses)

    return model, step


def toy_model() -> tuple[torch.nn.Module, Step]:
    """What `routescope record` trains by default."""
    task = make_task(ToyConfig())
    task.model.train()

    def step(number: int, recorder: RoutingRecorder | None) -> None:
        batch = task.batch(number)
        with nullcontext() if recorder is None else recorder.step(number, **batch.tokens):
            losses = task.losses(batch)
            task.optimizer.zero_grad()
            losses["loss"].backward()
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
            task.optimizer.step()
            if recorder is not None:
                recorder.log(**losses)

    return task.model, step


def step_times(model: torch.nn.Module, step: Step, folder: Path, blocks: int, steps: int) -> dict[str, float]:
    """Median seconds a step with and without recording, and the median of the ratios of neighbouring blocks."""
    numbers = iter(range(10**9))

    def block(recorder: RoutingRecorder | None) -> float:
        gc.collect()
        started = time.perf_counter()
        for _ in range(steps):
            step(next(numbers), recorder)
        if recorder is not None:
            recorder.flush()
        return (time.perf_counter() - started) / steps

    def recorded() -> float:
        with RoutingRecorder(model, folder / f"run-{next(numbers)}") as recorder:
            return block(recorder)

    block(None)
    recorded()
    pairs = []
    for number in range(blocks):
        if number % 2:
            with_it, without = recorded(), block(None)
        else:
            without, with_it = block(None), recorded()
        pairs.append((without, with_it))
    return {
        "without": statistics.median(without for without, _ in pairs),
        "with": statistics.median(with_it for _, with_it in pairs),
        "ratio": statistics.median(with_it / without for without, with_it in pairs),
    }


def memory_growth(folder: Path, steps: int) -> float:
    """MB by which the process grows over so many recorded steps, after the first 100."""
    torch.manual_seed(0)
    model = MoETransformer(MoETransformerConfig(vocab_size=256, num_layers=4, num_experts=16, top_k=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    process = psutil.Process()
    with RoutingRecorder(model, folder / "memory") as recorder:
        for number in range(steps + 100):
            if number == 100:
                recorder.flush()
                before = process.memory_info().rss
            ids = torch.randint(256, (8, 64))
            with recorder.step(number, token_ids=ids):
                out = model(ids, labels=ids)
                out.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.log(loss=out.loss)
        recorder.flush()
        return (process.memory_info().rss - before) / 1e6


def recorded_decisions(run: Path) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """(step, layer, ids, weights) of a run, by router and step."""
    table = pq.read_table(run / "decisions")
    for step in pc.unique(table["step"]).to_pylist():
        of_step = table.filter(pc.equal(table["step"], step))
        for layer in pc.unique(of_step["layer"]).to_pylist():
            here = of_step.filter(pc.equal(of_step["layer"], layer))
            yield step, layer, lists_to_matrix(here["experts"]), lists_to_matrix(here["weights"])


def sizes(run: Path, folder: Path) -> dict[str, float]:
    """Bytes an assignment: the run's decisions, the information in them, and other forms of the same."""
    found = list(recorded_decisions(run))
    count = sum(ids.size for _, _, ids, _ in found)
    bits = 0.0
    for layer in {layer for _, layer, _, _ in found}:
        ids = np.concatenate([ids.reshape(-1) for _, of, ids, _ in found if of == layer])
        shares = np.unique(ids, return_counts=True)[1] / ids.size
        bits += ids.size * (-(shares * np.log2(shares)).sum() + WEIGHT_BITS)
    with (folder / "decisions.jsonl").open("w") as lines:
        for step, layer, ids, weights in found:
            for token, (experts, gates) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
                row = {"step": step, "layer": layer, "token": token, "experts": experts, "weights": gates}
                lines.write(json.dumps(row) + "\n")
    (folder / "torch").mkdir()
    for step, layer, ids, weights in found:
        tensors = {"ids": torch.from_numpy(ids.astype(np.int32)), "weights": torch.from_numpy(weights.copy())}
        torch.save(tensors, folder / "torch" / f"{step}-{layer}.pt")
    sizes = {
        "this run": _bytes(run / "decisions"),
        "information": bits / 8,
        "int32 + float32": 8.0 * count,
        "JSON lines": _bytes(folder / "decisions.jsonl"),
        "torch.save": _bytes(folder / "torch"),
    }
    if (histograms := _tensorboard(found, folder / "tensorboard")) is not None:
        sizes["TensorBoard histograms"] = histograms
    return {name: size / count for name, size in sizes.items()}


def _tensorboard(found: list[tuple[int, int, np.ndarray, np.ndarray]], folder: Path) -> float | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    with SummaryWriter(str(folder)) as writer:
        for step, layer, ids, _ in found:
            writer.add_histogram(f"experts/{layer}", ids.reshape(-1), step)
    return _bytes(folder)


def _bytes(path: Path) -> float:
    return float(sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["large", "toy", "memory"])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--large-steps", type=int, default=3, help="steps in a block of the large model")
    parser.add_argument("--toy-steps", type=int, default=40, help="steps in a block of the toy run")
    parser.add_argument("--size-steps", type=int, default=100, help="steps of the toy run whose size is taken")
    parser.add_argument("--memory-steps", type=int, default=1000)
    given = parser.parse_args()
    missed = []
    made: dict[str, tuple[Callable[[], tuple[Any, Step]], int, int]] = {
        "large": (large_model, given.large_steps, 5 * given.large_steps),
        "toy": (toy_model, given.toy_steps, given.size_steps),
    }
    for name, (make, steps, size_steps) in made.items():
        if given.only not in (None, name):
            continue
        model, step = make()
        parameters = sum(p.numel() for p in model.parameters())
        with tempfile.TemporaryDirectory() as path:
            times = step_times(model, step, Path(path), given.blocks, steps)
            print(
                f"{name}: {parameters / 1e6:.1f} M parameters; {1e3 * times['without']:.2f} ms a step, recorded "
                f"{1e3 * times['with']:.2f} ms: {100 * (times['ratio'] - 1):+.2f} % (bar {BARS[name] - 1:.0%})"
            )
            missed += [f"{name}: step time"] * int(times["ratio"] > BARS[name])
            with RoutingRecorder(model, Path(path) / "size") as recorder:
                for number in range(size_steps):
                    step(number, recorder)
            found = sizes(Path(path) / "size", Path(path))
        print(f"{name}: bytes an assignment: " + ", ".join(f"{what} {size:.2f}" for what, size in found.items()))
        over, under = found["this run"] / found["information"], found["int32 + float32"] / found["this run"]
        print(f"{name}: {over:.2f} times the information (bar 1.3), int32 + float32 {under:.2f} times as large (bar 3)")
        missed += [f"{name}: size"] * int(over > 1.3 or under < 3)
    if given.only in (None, "memory"):
        with tempfile.TemporaryDirectory() as path:
            grown = memory_growth(Path(path), given.memory_steps)
        print(f"memory: {grown:+.1f} MB over {given.memory_steps} recorded steps (bar 64 MB)")
        missed += ["memory"] * int(grown > 64)
    if missed:
        sys.exit("missed: " + ", ".join(missed))


if __name__ == "__main__":
    main()
