"""Our dispatchers against the experts of transformers and one dense product of the same FLOPs, forward + backward.

    python benchmarks/dispatch.py [--shapes 0123] [--rounds 15] [--threads 2] [--quiet-below 0.5]

Peers: `MixtralExperts` of transformers with `experts_implementation` "eager" and "grouped_mm", which hold the same
weights (extra `hf`). Everything takes turns within a round; figures are medians, ratios medians of ratios within a
round, so that a busy machine troubles all alike. The bars are those of the project: the default dispatcher at most
0.95 of the faster path of transformers, at most 1.5 (fourth shape: 2.1) times the dense product, the routing at most
15 % of the layer, and no more memory than the grouped path of transformers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler talks on stderr; read when torch is loaded
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from moe_core.experts import ExpertBank
from recorder.bench import DispatchReport, Peer, Timing, measure_dispatch, report_rows
from recorder.dispatch_shape import PRESETS

MOST_OF_PEER, MOST_OF_DENSE, MOST_ROUTING = 0.95, (1.5, 1.5, 1.5, 2.1), 0.15
PEERS = ("transformers eager", "transformers grouped_mm")


def transformers_experts(implementation: str, bank: ExpertBank) -> Peer:
    """The experts of transformers with the weights of our bank."""
    E, D, F = len(bank), bank[0].d_model, bank[0].d_ff
    config = transformers.MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E)
    config._experts_implementation = implementation
    experts = MixtralExperts(config)
    with torch.no_grad():
        for e, (w_in, w_out) in enumerate(zip(*bank.weights_by_role(), strict=True)):
            experts.gate_up_proj[e] = w_in
            experts.down_proj[e] = w_out
    return experts, list(experts.parameters())


def wait_until_quiet(load: float, patience: float = 120) -> None:
    """Wait until the machine's load average falls below `load`, at most `patience` seconds."""
    until = time.monotonic() + patience
    while os.getloadavg()[0] > load and time.monotonic() < until:
        time.sleep(2)


def verdicts(report: DispatchReport, most_of_dense: float) -> list[str]:
    """What the bars say, one line each."""
    timings: dict[str, Timing] = {timing.name: timing for timing in report.timings}
    auto, grouped = timings["auto"], timings["transformers grouped_mm"]
    peer = min((timings[name] for name in PEERS), key=lambda timing: timing.milliseconds)
    of_peer = auto.relative / peer.relative
    checks = [
        (f"auto / {peer.name}: {of_peer:.2f}", of_peer, MOST_OF_PEER),
        (f"auto / dense: {auto.relative:.2f}", auto.relative, most_of_dense),
        (f"routing / layer: {report.routing_share:.3f}", report.routing_share, MOST_ROUTING),
        (f"memory of auto / {grouped.name}: {auto.peak_mib / grouped.peak_mib:.2f}", auto.peak_mib, grouped.peak_mib),
    ]
    return [f"  {text} (at most {bar:.4g}) {'ok' if value <= bar else 'MISSED'}" for text, value, bar in checks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="0123", help="which of the four shapes, by place")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quiet-below", type=float, default=None, help="wait for a load average below this first")
    given = parser.parse_args()
    if len(given.shapes) > 1:  # each in a process of its own: what an allocator holds changes the next one's times
        for place in given.shapes:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--shapes", place], check=True)
        return
    torch.set_num_threads(given.threads)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {given.threads} threads, float32")
    place = int(given.shapes)
    if given.quiet_below is not None:
        wait_until_quiet(given.quiet_below)
    shape = PRESETS[place]
    peers = {name: lambda bank, name=name: transformers_experts(name.split()[1], bank) for name in PEERS}
    report = measure_dispatch(shape, names=("auto", "masked", "grouped"), peers=peers, rounds=given.rounds)
    print(
        f"\nwidth {shape.d_model}, expert width {shape.d_ff}, {shape.num_experts} experts, top {shape.top_k}, "
        f"{shape.num_tokens} tokens; load average {os.getloadavg()[0]:.1f}"
    )
    columns, rows = report_rows(report)
    for row in [columns, *rows]:
        print("  " + "  ".join(f"{cell if cell is not None else '-'!s:>24}" for cell in row).lstrip())
    print("\n".join(verdicts(report, MOST_OF_DENSE[place])))


if __name__ == "__main__":
    main()
