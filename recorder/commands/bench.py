"""`routescope bench`: parts of the library, timed on this machine."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from .common import FAILED, AsJson, CommandError, print_json, print_table

bench = typer.Typer(help="Time parts of the library on this machine.", rich_markup_mode=None)


@bench.command()
def dispatch(
    d_model: Annotated[int, typer.Option(help="Model width.")] = 64,
    d_ff: Annotated[int, typer.Option(help="Width of each expert.")] = 128,
    num_experts: Annotated[int, typer.Option(help="Experts in the layer.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts for each token.")] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens in the batch.")] = 2048,
    activation: Annotated[str, typer.Option(help="swiglu | gelu | situ-glu | clamped-glu.")] = "swiglu",
    skew: Annotated[float, typer.Option(help="How unequally popular the experts are; 0 = equally.")] = 0.0,
    rounds: Annotated[int, typer.Option(help="Rounds, in each of which all take turns.")] = 10,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own choice by default.")] = None,
    as_json: AsJson = False,
    progress: Annotated[bool, typer.Option("--progress", help="Say on stderr which round is done.")] = False,
) -> None:
    """Time the dispatchers side by side, forward and backward, and show that they agree."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which sees the memory, talks on stderr
    from ..bench import measure_dispatch, report_rows, set_threads  # torch is loaded here
    from ..dispatch_shape import DispatchShape

    def tell(done: int) -> None:
        print(f"round {done} of {rounds}", file=sys.stderr, flush=True)

    set_threads(threads)
    sizes = {"d_model": d_model, "d_ff": d_ff, "num_experts": num_experts, "top_k": top_k, "num_tokens": tokens}
    try:
        shape = DispatchShape(**sizes, activation=activation, skew=skew)
        report = measure_dispatch(shape, rounds=rounds, on_round=tell if progress else None)
    except ValueError as error:
        message = str(error).replace("num_tokens=", "--tokens ")
        raise CommandError(re.sub(r"\b(\w+)=", lambda m: "--" + m[1].replace("_", "-") + " ", message)) from None
    except (RuntimeError, MemoryError) as error:  # no memory for a layer of this size
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CommandError(f"the measurement failed: {reason}", FAILED) from None
    if as_json:
        print_json(asdict(report))
        return
    load = report.load
    print(f"{report.threads} threads, float32, forward + backward, medians over {rounds} interleaved rounds")
    print(f"tokens per expert: {min(load)} to {max(load)}, {load.count(0)} idle of {num_experts}")
    print_table(*report_rows(report))
    print(f"routing is {report.routing_share:.1%} of the layer")
    print("ms: median time; x dense, and that share: medians of the ratios within a round")
