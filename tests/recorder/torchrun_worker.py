"""One rank of tests/recorder/test_torchrun.py, started by torchrun: `torchrun_worker.py MODE OUT FOLDER KEY=VALUE...`.

It records what it does into the run OUT, and saves to FOLDER what it saw itself, without the recorder:
`FOLDER/LAUNCH-RANK.pt` holds, by step, the expert ids of each layer (before the step is recorded) and the loss.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_core import MoELayer, MoETransformer, MoETransformerConfig
from recorder import RoutingRecorder

VOCAB, SEQUENCE, EXPERTS = 32, 6, 4
EVERY_STEP = {"flush_steps": 1, "flush_seconds": 1e9}


def tiny_model():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 16, "num_heads": 2, "num_layers": 2, "moe_frequency": 1}
    return MoETransformer(MoETransformerConfig(vocab_size=VOCAB, num_experts=EXPERTS, top_k=2, **sizes))


def batch(launch, step, share):
    """Tokens of one step; every share has a number of sequences of its own."""
    data = torch.Generator().manual_seed(1000 * int(launch) + 10 * step + share)
    return torch.randint(VOCAB, (2 + share, SEQUENCE), generator=data)


def save(seen, folder, launch, rank):
    file = folder / f"{launch}-{rank}.pt"
    torch.save(seen, file.with_suffix(".tmp"))
    file.with_suffix(".tmp").replace(file)


def die_once_the_others_have(step, folder, launch, rank, world_size):
    """Killed once all others have recorded a step."""
    for other in range(world_size):
        while other != rank and not (folder / f"{launch}-{other}-{step}.done").exists():
            time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def train(out, folder, launch, first, last, victim=-1, dies_at=-1):
    """Data parallel: a mean of gradients over ranks that see tokens of their own."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(tiny_model(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 0:
        time.sleep(0.5)  # the others look first, and may find what an earlier launch has left
    seen = {}
    with RoutingRecorder(model, out=out, resume="auto", **EVERY_STEP) as recorder:
        for step in range(int(first), int(last)):
            ids = batch(launch, step, rank)
            with recorder.step(step, token_ids=ids):
                result = model(ids, labels=ids)
                result.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen[step] = {
                    "ids": [routing.expert_ids_TK.clone() for routing in result.routings if routing is not None],
                    "loss": float(result.loss),
                }
                save(seen, folder, launch, rank)
                if (rank, step) == (int(victim), int(dies_at)):
                    die_once_the_others_have(step, folder, launch, rank, dist.get_world_size())
                recorder.log(loss=result.loss, learning_rate=0.1 / 3, grad_norm=2.0, wall_time_s=1.0 + rank)
            recorder.flush()
            (folder / f"{launch}-{rank}-{step}.done").touch()
    dist.destroy_process_group()


def without_process_group(out, folder):
    """Ranks that torchrun has numbered, and that never initialise torch.distributed.

    In torchrun's first attempt rank 0 is killed after two steps; started again, all go on with a third.
    """
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model, seen = tiny_model(), {}
    if rank == 0:
        time.sleep(0.5)
    with RoutingRecorder(model, out=out, resume="auto", **EVERY_STEP) as recorder:
        for step in range(2) if attempt == 0 else range(2, 3):
            with recorder.step(step):
                result = model(batch(attempt, step, rank))
            seen[step] = {"ids": [routing.expert_ids_TK for routing in result.routings if routing is not None]}
            save(seen, folder, attempt, rank)
            recorder.flush()
            (folder / f"{attempt}-{rank}-{step}.done").touch()
        if (rank, attempt) == (0, 0):
            die_once_the_others_have(1, folder, attempt, rank, 2)


class Stage(nn.Module):
    """Two layers of a pipeline under the names that they have in the whole model."""

    def __init__(self, first, layers):
        super().__init__()
        self.layers = nn.ModuleDict({str(first + i): layer for i, layer in enumerate(layers)})

    def forward(self, x):
        routings = []
        for layer in self.layers.values():
            out = layer(x)
            if isinstance(layer, MoELayer):
                routings.append(out.routing)
                out = out.hidden
            x = x + out
        return x, routings


def parallel(out, folder):
    """4 ranks, 2 data-parallel: once with two replicas of each, once with a dense and an MoE stage of each."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    share, part = divmod(rank, 2)
    seen = {}
    model = tiny_model()
    options = {"data_parallel_rank": share, **EVERY_STEP}
    with RoutingRecorder(model, out=f"{out}-replicas", **options) as recorder:
        for step in range(2):
            ids = batch(0, step, share)
            with recorder.step(step, token_ids=ids):
                result = model(ids, labels=ids)
                recorder.log(loss=result.loss)
            seen[step] = {
                "ids": [r.expert_ids_TK for r in result.routings if r is not None],
                "loss": float(result.loss),
            }
    save(seen, folder, "replicas", rank)

    torch.manual_seed(0)
    d_model, seen = 8, {}
    layers = [nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)]
    layers += [MoELayer(d_model, 8, EXPERTS, 2), MoELayer(d_model, 8, EXPERTS, 2)]
    model = Stage(2 * part, layers[2 * part : 2 * part + 2])
    with RoutingRecorder(model, out=f"{out}-stages", **options) as recorder:
        for step in range(2):
            data = torch.Generator().manual_seed(10 * step + share)
            x = torch.randn(2 + share, SEQUENCE, d_model, generator=data)
            with recorder.step(step):
                if part:
                    dist.recv(x, rank - 1)
                x, routings = model(x)
                if part == 0:
                    dist.send(x.detach(), rank + 1)
                else:
                    recorder.log(loss=float(step + share))
            seen[step] = {"ids": [routing.expert_ids_TK for routing in routings]}
    save(seen, folder, "stages", rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, out, folder, *settings = sys.argv[1:]
    modes = {"train": train, "without_process_group": without_process_group, "parallel": parallel}
    modes[mode](out, Path(folder), **dict(setting.split("=") for setting in settings))
