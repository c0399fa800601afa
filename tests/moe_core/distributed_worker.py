"""One rank of tests/moe_core/test_distributed.py: `python distributed_worker.py RANK RANKS FOLDER`.

Trains small layers on its share of the tokens and saves what came out to FOLDER/RANKS-RANK.pt. With RANKS = 1 it is
the one process that sees all tokens, without a process group.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from moe_core import MoELayer, QuantileBalancer
from moe_core.balancers import attach_balancers, make_balancer
from moe_core.distributed import rows_of_all_ranks, token_share

D, E, K = 6, 8, 2
STEPS, MICRO_BATCHES, TOKENS = 3, 2, 40
SPLITS = {"even": (20, 20), "uneven": (33, 7), "one-rank-empty": (40, 0)}
KINDS = (
    "none",
    "sign-bias",
    "quantile",
    "quantile-step",
    "quantile-histogram",
    "global-aux",
    "global-z",
    "sign-bias+global-aux",
)


def balancer_of(kind):
    if kind == "quantile-histogram":
        return QuantileBalancer(E, K, method="histogram", num_bins=512)
    return make_balancer(kind, E, K, aux_coef=1.0, z_coef=1.0, bias_rate=0.01)


def sum_over_ranks(x, ranks):
    if ranks > 1:
        dist.all_reduce(x)
    return x


def train(kind, split, rank, ranks, ddp=False):
    """Loads, biases and router gradients of each step."""
    torch.manual_seed(0)
    layer = MoELayer(D, 8, E, K, balancer=balancer_of(kind))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    attach_balancers(layer, optimizer)
    model = DistributedDataParallel(layer, find_unused_parameters=True) if ddp and ranks > 1 else layer
    start = sum(SPLITS[split][:rank])
    mine = slice(start, start + SPLITS[split][rank]) if ranks > 1 else slice(None)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        load = torch.zeros(E, dtype=torch.int64)
        for micro in range(MICRO_BATCHES):
            data = torch.Generator().manual_seed(step * MICRO_BATCHES + micro)
            x = torch.randn(TOKENS, D, generator=data)[mine]
            mask = (torch.rand(TOKENS, generator=data) < 0.9)[mine]
            out = model(x, mask)
            load += out.routing.load()
            # over ranks, the mean of this is the mean over all tokens
            loss = out.hidden.square().sum() * ranks / TOKENS + sum(out.losses.values())
            if loss.requires_grad:
                (loss / MICRO_BATCHES).backward()
        for parameter in layer.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if not ddp:
                sum_over_ranks(parameter.grad, ranks).div_(ranks)
        gradient = layer.router.weight.grad.clone()
        optimizer.step()
        state = {name: value.clone() for name, value in layer.balancer.named_buffers()}
        steps.append({"load": sum_over_ranks(load, ranks), "gradient": gradient, "state": state})
    return steps


def evaluate_alone(rank):
    """Evaluation on one rank must wait for nobody."""
    for kind in KINDS:
        layer = MoELayer(D, 8, E, K, balancer=balancer_of(kind)).eval()
        if rank == 0:
            layer(torch.randn(5, D))


def main():
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    if ranks > 1:
        meeting_point = f"file://{folder / 'meeting_point'}"
        dist.init_process_group("gloo", meeting_point, timedelta(seconds=120), rank=rank, world_size=ranks)
    results = {(kind, split): train(kind, split, rank, ranks) for kind in KINDS for split in SPLITS}
    for kind in ("sign-bias", "quantile", "global-aux"):
        results["ddp", kind] = train(kind, "uneven", rank, ranks, ddp=True)
    evaluate_alone(rank)
    results["rows"] = rows_of_all_ranks(torch.arange(3.0 * rank).view(-1, 3) + 10 * rank)
    results["share"] = token_share(torch.tensor(3 * (rank + 1)))
    results["no share"] = token_share(torch.tensor(0))
    torch.save(results, folder / f"{ranks}-{rank}.pt")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
