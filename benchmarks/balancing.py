"""Balance by step: max_violation (busiest expert over the mean, minus 1) under every balancer, mean over seeds.

    python benchmarks/balancing.py [--seeds 3] [--steps 200] [--toy-steps 50] [--only stationary|toy]

Two settings. *Stationary scores*: 64 experts, top-8, 8192 new tokens a step, sigmoid(z + o) with o drawn once per
expert and z per token, both N(0, 1): 6.66 unbalanced, 0.21 after one quantile update and about 0.09 by the fifth; the
sign rule at 1e-3 still at 3.89 after 200 steps, all of one draw of o. Seed 0 here: 6.64, 0.17,
0.12 and 3.93; other draws start between 4 and 7. A loss has nothing to move there; it gets the offsets o as its
parameters (Adam, 1e-2), so that this row says what the loss alone would do. *Toy training*: the model and the text of
`routescope record`, from the same first weights under each balancer; mean over its MoE layers.

The load of a single step: it keeps the sampling noise of that step's tokens (about 0.07 in the first setting).

Shapes: T tokens, E experts, K choices a token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from moe_core import MoETransformer, MoETransformerConfig, QuantileBalancer, TopKRouter
from moe_core.balancers import BALANCER_NAMES, Balancer, attach_balancers, make_balancer
from moe_core.metrics import max_violation
from recorder.training.config import ToyConfig
from recorder.training.corpus import Corpus, build_corpus

E, K, T = 64, 8, 8192
NAMES = (*(name for name in BALANCER_NAMES if name not in ("z", "global-z")), "quantile-histogram")
SLOW = ("none", "sign-bias", "aux", "soft-aux")
"""The balancers that need the whole stationary run: one that works by the batch is done within ten steps, and other
levels of the aux loss are the same where there is one sequence, one rank and one micro-batch."""


def balancer_of(name: str, num_experts: int, top_k: int) -> Balancer:
    if name == "quantile-histogram":
        return QuantileBalancer(num_experts, top_k, method="histogram")
    return make_balancer(name, num_experts, top_k)


def stationary(name: str, seed: int, steps: int) -> list[float]:
    """max_violation of steps 0 to `steps`, each before the update of that step."""
    random = torch.Generator().manual_seed(seed)
    offset_E = torch.nn.Parameter(torch.randn(E, generator=random))
    router = TopKRouter(4, E, K, score_function="sigmoid")
    balancer = balancer_of(name, E, K)
    optimizer = torch.optim.Adam([offset_E], lr=1e-2)
    attach_balancers(balancer, optimizer)
    violations = []
    for _ in range(steps + 1):
        logits_TE = torch.randn(T, E, generator=random) + offset_E
        routing = router.route_logits(logits_TE, balancer.selection_bias(logits_TE))
        balancer.observe(routing)
        for loss in balancer.losses(routing, num_sequences=1).values():
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        violations.append(float(max_violation(routing.load().numpy())))
    return violations


def toy(name: str, seed: int, steps: int, corpus: Corpus) -> list[float]:
    """max_violation of steps 0 to `steps` of the toy run, mean over its MoE layers."""
    toy_run = ToyConfig(seed=seed)
    torch.manual_seed(seed)
    shape = {**toy_run.model_options(), "balancer": "none", "router_init_std": 0.005, "vocab_size": corpus.vocab_size}
    model = MoETransformer(MoETransformerConfig(**shape))
    for layer in model.layers:
        if hasattr(layer.mlp, "balancer"):
            layer.mlp.balancer = balancer_of(name, layer.mlp.num_experts, layer.mlp.top_k)
    optimizer = torch.optim.AdamW(model.parameters(), lr=toy_run.lr)
    attach_balancers(model, optimizer)
    violations = []
    for step in range(steps + 1):
        batch = corpus.batch(step, toy_run.batch_size, toy_run.seq_len, seed)
        input_ids = torch.from_numpy(batch.token_ids)
        out = model(input_ids, labels=input_ids)
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        by_layer = [float(max_violation(routing.load().numpy())) for routing in out.routings if routing is not None]
        violations.append(statistics.mean(by_layer))
    return violations


def table(title: str, names: Sequence[str], run: Callable[[str, int], list[float]], seeds: int, steps: int) -> None:
    """Print one row for each balancer as it is done: mean over seeds, and the range of the last step shown."""
    shown = [step for step in (0, 1, 2, 3, 5, 10, 20, 50, 100, 200) if step < steps] + [steps]
    print(f"\n{title}: max_violation by step, mean of {seeds} seeds", flush=True)
    print(f"{'balancer':20}" + "".join(f"{step:>8}" for step in shown) + "   range of the last    seconds", flush=True)
    for name in names:
        started = time.perf_counter()
        by_seed = [run(name, seed) for seed in range(seeds)]
        steps_here = [step for step in shown if step < len(by_seed[0])]
        means = [statistics.mean(violations[step] for violations in by_seed) for step in steps_here]
        last = [violations[steps_here[-1]] for violations in by_seed]
        cells = "".join(f"{mean:8.2f}" for mean in means) + " " * 8 * (len(shown) - len(means))
        seconds = time.perf_counter() - started
        print(f"{name:20}{cells}   {min(last):6.2f} to {max(last):6.2f} {seconds:9.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="max_violation by step under every balancer")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of the stationary setting")
    parser.add_argument("--toy-steps", type=int, default=50)
    parser.add_argument("--only", choices=("stationary", "toy"))
    options = parser.parse_args()
    # tensors this small gain nothing from a second thread, and lose a lot where another program wants its core
    torch.set_num_threads(1)
    if options.only != "toy":

        def stationary_run(name: str, seed: int) -> list[float]:
            return stationary(name, seed, options.steps if name in SLOW else min(options.steps, 10))

        title = f"Stationary scores, E={E}, k={K}, T={T}"
        table(title, NAMES, stationary_run, options.seeds, options.steps)
    if options.only != "stationary":
        toy_run = ToyConfig()
        corpora = [
            build_corpus((), vocab_size=toy_run.vocab_size, seed=seed, seq_len=toy_run.seq_len)
            for seed in range(options.seeds)
        ]
        title = f"Toy training, E={toy_run.num_experts}, k={toy_run.top_k}, T={toy_run.batch_size * toy_run.seq_len}"
        table(
            title,
            NAMES,
            lambda name, seed: toy(name, seed, options.toy_steps, corpora[seed]),
            options.seeds,
            options.toy_steps,
        )


if __name__ == "__main__":
    main()
