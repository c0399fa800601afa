"""`routescope record`: one toy training run."""

from __future__ import annotations

import re
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_core.recipe_catalog import RECIPES

from ..manifest import RunNotFoundError, RunUnreadableError, read_manifest
from ..run_ids import new_run_id
from ..training.config import BALANCERS, DISPATCHERS, ROUTERS, TASKS, ToyConfig
from ..training.continuing import why_not
from .common import CANCELLED, FAILED, RUNS_FOLDER, CommandError, place_of, run_path_of

if TYPE_CHECKING:
    from ..storage import Place

Router = StrEnum("Router", [(name, name) for name in ROUTERS])  # type: ignore[misc]
TaskName = StrEnum("TaskName", [(name, name) for name in TASKS])  # type: ignore[misc]
DispatcherName = StrEnum("DispatcherName", [(name, name) for name in DISPATCHERS])  # type: ignore[misc]
DEFAULTS = ToyConfig()
DEFAULT_TASK = TaskName(DEFAULTS.task)
DEFAULT_ROUTER, DEFAULT_DISPATCHER = Router(DEFAULTS.router), DispatcherName(DEFAULTS.dispatcher)


def record(
    context: typer.Context,
    task: Annotated[
        TaskName, typer.Option(help="lm: a language model on text; regression: one MoE layer learns y = tanh(xW).")
    ] = DEFAULT_TASK,
    recipe: Annotated[
        str, typer.Option(help=f"{' | '.join(RECIPES)}: its values in place of the defaults.", metavar="NAME")
    ] = DEFAULTS.recipe,
    balancer: Annotated[
        list[str] | None,
        typer.Option(help=f"{' | '.join(BALANCERS)}; repeat it, or join by '+', to combine several.", metavar="NAME"),
    ] = None,
    aux_coef: Annotated[float, typer.Option(help="Coefficient of the Switch aux loss.")] = DEFAULTS.aux_coef,
    z_coef: Annotated[float, typer.Option(help="Coefficient of the router z-loss; 0 = off.")] = DEFAULTS.z_coef,
    bias_rate: Annotated[float, typer.Option(help="Step of the sign bias.")] = DEFAULTS.bias_rate,
    noise_std: Annotated[float, typer.Option(help="Noise on the router logits in training.")] = DEFAULTS.noise_std,
    router: Annotated[Router, typer.Option(help="Score function of the router.")] = DEFAULT_ROUTER,
    dispatcher: Annotated[DispatcherName, typer.Option(help="How tokens reach their experts.")] = DEFAULT_DISPATCHER,
    num_layers: Annotated[int, typer.Option(help="Layers, dense and MoE.")] = DEFAULTS.num_layers,
    moe_frequency: Annotated[int, typer.Option(help="Every n-th layer is MoE.")] = DEFAULTS.moe_frequency,
    d_model: Annotated[int, typer.Option(help="Model width.")] = DEFAULTS.d_model,
    d_ff: Annotated[int, typer.Option(help="Width of dense layers.")] = DEFAULTS.d_ff,
    expert_d_ff: Annotated[int, typer.Option(help="Width of each expert.")] = DEFAULTS.expert_d_ff,
    num_heads: Annotated[int, typer.Option(help="Attention heads.")] = DEFAULTS.num_heads,
    num_experts: Annotated[int, typer.Option(help="Experts in each MoE layer.")] = DEFAULTS.num_experts,
    top_k: Annotated[int, typer.Option(help="Experts for each token.")] = DEFAULTS.top_k,
    num_shared_experts: Annotated[
        int, typer.Option(help="Experts that every token passes.")
    ] = DEFAULTS.num_shared_experts,
    latent_size: Annotated[
        int | None, typer.Option(help="Width that routed experts work in; not given = the model's.")
    ] = DEFAULTS.latent_size,
    capacity_factor: Annotated[
        float | None,
        typer.Option(help="Drop what is over this many uniform shares (never below 4 tokens)."),
    ] = DEFAULTS.capacity_factor,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = DEFAULTS.steps,
    batch_size: Annotated[int, typer.Option(help="Sequences in a batch.")] = DEFAULTS.batch_size,
    seq_len: Annotated[int, typer.Option(help="Tokens in a sequence.")] = DEFAULTS.seq_len,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = DEFAULTS.lr,
    seed: Annotated[int, typer.Option(help="Same seed and versions, same run.")] = DEFAULTS.seed,
    decisions_every: Annotated[
        int, typer.Option(help="Keep single decisions every n steps.")
    ] = DEFAULTS.decisions_every,
    probe_every: Annotated[
        int, typer.Option(help="Route one fixed held-out batch every n steps, and at the end.")
    ] = DEFAULTS.probe_every,
    corpus: Annotated[
        list[Path] | None, typer.Option(help="Your own text: a file or folder, one domain each. Repeatable.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = DEFAULTS.vocab_size,
    name: Annotated[str, typer.Option(help="Shown in the dashboard; the run's folder by default.")] = "",
    run_id: Annotated[
        str, typer.Option(help="Folder of the run under --out; made from name and time by default.")
    ] = "",
    out: Annotated[
        str, typer.Option(help="Folder that holds runs, or a URI such as s3://bucket/runs.", metavar="DIR")
    ] = str(RUNS_FOLDER),
    continued: Annotated[
        str | None,
        typer.Option(
            "--continue",
            help="Go on with this cancelled or killed run of this command, with its own settings: a path, URI or id.",
            metavar="RUN",
        ),
    ] = None,
) -> None:
    """Train a small MoE model on real text, or on a toy regression, and record every routing decision."""
    if continued is not None:
        _continue(context, continued, place_of(out))
        return
    options = {key: value for key, value in locals().items() if key in ToyConfig.__dataclass_fields__}
    options |= {
        "task": str(task),
        "balancer": "+".join(balancer or []),
        "router": str(router),
        "dispatcher": str(dispatcher),
        "corpus": tuple(str(path) for path in corpus or []),
    }
    # only what was typed: for the rest, recipe and task have defaults of their own
    options = {key: value for key, value in options.items() if _typed(context, key)}
    try:
        config = ToyConfig.of(**options)
    except ValueError as error:
        raise CommandError(_as_options(str(error))) from None
    run_path = _new_run_path(place_of(out), run_id, config.name or config.full_balancer)
    _record(config, run_path)


def _continue(context: typer.Context, run: str, out: Place) -> None:
    others = [name for name in context.params if name not in ("continued", "out") and _typed(context, name)]
    if others:
        option = "--" + others[0].replace("_", "-")
        raise CommandError(f"--continue takes the settings of the run: leave out {option}")
    run_path = run_path_of(run, also_in=out)
    try:
        manifest = read_manifest(run_path)
    except (RunNotFoundError, RunUnreadableError) as error:
        raise CommandError(str(error), FAILED) from None
    reason = why_not(run_path, manifest)
    if reason is not None:
        raise CommandError(f"{run_path} cannot be continued: {reason}")
    _record(ToyConfig.from_manifest(manifest), run_path, continued=True)


def _typed(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _record(config: ToyConfig, run_path: Place, *, continued: bool = False) -> None:
    # SIGTERM (the dashboard's cancel) and Ctrl-C both end the run after the step that is under way
    stop: list[int] = []
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # not every system has all of them
        ignored = name == "SIGHUP" and number is not None and signal.getsignal(number) == signal.SIG_IGN
        if number is not None and not ignored:  # nohup ignores SIGHUP on purpose
            signal.signal(number, lambda received, _frame: stop.append(received))

    import torch  # loaded here, for this command alone
    from tqdm import tqdm

    from ..training.loop import RunCancelledError, train
    from ..writer import RunExistsError

    # At this size one thread is as fast as two; on a busy machine two wait for each other, twenty times as slow. And
    # the sums, and with them the run, are the same on every number of cores.
    torch.set_num_threads(1)

    with tqdm(total=config.steps, unit="step", file=sys.stderr, mininterval=0.5) as bar:

        def show(done: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if continued and not bar.n:
                bar.initial = bar.n = done - 1  # what was there before, and took none of this time
            bar.update(done - bar.n)

        def tell(line: str) -> None:
            bar.write(line, file=sys.stderr)

        try:
            train(
                config,
                run_path,
                continued=continued,
                on_step=show,
                on_report=tell,
                should_stop=lambda: bool(stop),
            )
        except RunCancelledError:
            bar.close()
            if not bar.n:
                what = "what was there stays" if continued else "nothing was recorded"
                raise CommandError(f"cancelled before the first step; {what}", CANCELLED) from None
            print(run_path)
            raise CommandError(f"cancelled after {bar.n} steps; what was recorded is kept", CANCELLED) from None
        except (ValueError, RunExistsError) as error:
            bar.close()
            raise CommandError(_as_options(str(error))) from None
        except (OSError, RuntimeError, MemoryError) as error:  # a full disk, no memory for a model of this size
            bar.close()
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise CommandError(f"recording into {run_path} failed: {reason}", FAILED) from None
    print(run_path)


def _new_run_path(out: Place, run_id: str, label: str) -> Place:
    if run_id:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+-]*", run_id):
            raise CommandError(f"--run-id {run_id!r} is not a plain folder name of letters, digits and . _ = + -")
        return out / run_id
    return out / new_run_id(label, lambda taken: (out / taken).exists())


def _as_options(message: str) -> str:
    """Field names of the settings as the options that a person typed: top_k=9 -> --top-k 9."""
    fields = "|".join(ToyConfig.__dataclass_fields__)
    return re.sub(rf"\b({fields})=", lambda match: "--" + match[1].replace("_", "-") + " ", message)
