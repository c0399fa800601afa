"""The `routescope` command."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import TyperException

from moe_core.recipe_catalog import RECIPES

from .run_ids import new_run_id
from .training.config import BALANCERS, DISPATCHERS, ROUTERS, TASKS, ToyConfig

if TYPE_CHECKING:
    from .storage import Place

DONE, FAILED, WRONG_ARGUMENTS, CANCELLED = 0, 1, 2, 130
RUNS_FOLDER = Path("runs")

cli = typer.Typer(
    name="routescope",
    help="Record, read and replay the routing of mixture-of-experts training runs.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class CommandError(Exception):
    """A failure that a person can act on: one line, and the exit code."""

    def __init__(self, message: str, exit_code: int = WRONG_ARGUMENTS) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; print one line and exit with its code on any error that a person can act on."""
    given = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    try:
        code = cli(args=given, standalone_mode=False)
    except CommandError as error:
        _fail(str(error), error.exit_code)
    except TyperException as error:
        _fail(_with_value(error.format_message().strip(), given) or "see routescope --help", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("cancelled", CANCELLED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone; say nothing more
        sys.exit(DONE)
    except OSError as error:  # output to a full disk, say
        _fail(str(error), FAILED)
    sys.exit(code if isinstance(code, int) else DONE)


def _with_value(message: str, given: Sequence[str]) -> str:
    """The parser's message with the value that was typed, which it leaves out of some."""
    match = re.match(
        r"Invalid value for '(?P<option>--[a-z-]+)': (?:Value error, )?(?P<why>.*)", message, flags=re.DOTALL
    )
    if match is None:
        return " ".join(message.split())
    option = match["option"]
    typed = [after for at, after in pairwise(given) if at == option]
    typed += [text.partition("=")[2] for text in given if text.startswith(f"{option}=")]
    value = f" {typed[-1]!r}" if typed and repr(typed[-1]) not in match["why"] else ""
    return " ".join(f"invalid value for {option}{value}: {match['why']}".split())


def _fail(message: str, code: int) -> None:
    print(f"routescope: {message}", file=sys.stderr)
    sys.exit(code)


Router = StrEnum("Router", [(name, name) for name in ROUTERS])  # type: ignore[misc]
TaskName = StrEnum("TaskName", [(name, name) for name in TASKS])  # type: ignore[misc]
DispatcherName = StrEnum("DispatcherName", [(name, name) for name in DISPATCHERS])  # type: ignore[misc]
DEFAULTS = ToyConfig()
DEFAULT_TASK = TaskName(DEFAULTS.task)
DEFAULT_ROUTER, DEFAULT_DISPATCHER = Router(DEFAULTS.router), DispatcherName(DEFAULTS.dispatcher)


@cli.command()
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
) -> None:
    """Train a small MoE model on real text, or on a toy regression, and record every routing decision."""
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
    run_path = _new_run_path(_place(out), run_id, config.name or config.full_balancer)
    _record(config, run_path)


def _typed(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _record(config: ToyConfig, run_path: Place) -> None:
    # SIGTERM (the dashboard's cancel) and Ctrl-C both end the run after the step that is under way
    stop: list[int] = []
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # not every system has all of them
        ignored = name == "SIGHUP" and number is not None and signal.getsignal(number) == signal.SIG_IGN
        if number is not None and not ignored:  # nohup ignores SIGHUP on purpose
            signal.signal(number, lambda received, _frame: stop.append(received))

    import torch  # loaded here, for this command alone
    from tqdm import tqdm

    from .training.loop import RunCancelledError, train
    from .writer import RunExistsError

    # At this size one thread is as fast as two; on a busy machine two wait for each other, twenty times as slow. And
    # the sums, and with them the run, are the same on every number of cores.
    torch.set_num_threads(1)

    with tqdm(total=config.steps, unit="step", file=sys.stderr, mininterval=0.5) as bar:

        def show(done: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update(done - bar.n)

        def tell(line: str) -> None:
            bar.write(line, file=sys.stderr)

        try:
            train(config, run_path, on_step=show, on_report=tell, should_stop=lambda: bool(stop))
        except RunCancelledError:
            bar.close()
            if not bar.n:
                raise CommandError("cancelled before the first step; nothing was recorded", CANCELLED) from None
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


@cli.command("import")
def import_(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="megatron | sglang | vllm: what wrote it.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The dump; see docs/import.md.")],
    out: Annotated[Path, typer.Option(help="Folder that holds runs.")] = RUNS_FOLDER,
    model: Annotated[
        str | None, typer.Option(help="Published model's name or config.json, for what a dump does not know.")
    ] = None,
    name: Annotated[str, typer.Option(help="Shown in the dashboard; the file's name by default.")] = "",
    phase: Annotated[str | None, typer.Option(help="train | probe | eval | generate; by default the format's.")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Record the ids of tokens, where there are any.")] = (
        False
    ),
) -> None:
    """Make a run of another system's dump of routing."""
    from .importers import import_dump

    # the run is moved to its place when it is whole; on the way out of here its workshop is cleared away
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        path = import_dump(kind, file, out, model=model, name=name, phase=phase, token_ids=token_ids)
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"importing {file} failed: {error}", FAILED) from None
    except KeyboardInterrupt:
        raise CommandError("cancelled; nothing was imported", CANCELLED) from None
    print(path)


@cli.command()
def runs(
    folder: Annotated[
        str, typer.Argument(metavar="[DIR]", help="Folder that holds runs, or a URI such as s3://bucket/runs.")
    ] = str(RUNS_FOLDER),
    as_json: Annotated[bool, typer.Option("--json", help="For programs: stable keys, null for no value.")] = False,
) -> None:
    """List the runs in a folder."""
    from .reader import Run, list_runs
    from .summary import run_row

    place = _place(folder)
    if not place.is_dir():
        samples = "; the samples: routescope runs sample_runs" if Path("sample_runs").is_dir() else ""
        raise CommandError(f"{_no_folder(place)}; record a run with: routescope record{samples}")
    rows: list[dict[str, Any]] = []
    for info in list_runs(place):
        if info.status == "unreadable":
            _warn(str(info.error))
            continue
        try:
            run = Run(info.path)
            rows.append(run_row(run))
        except Exception as error:  # whatever is wrong with one run, the others are listed
            _warn(f"{info.path}: {' '.join(str(error).split()) or type(error).__name__}")
            continue
        _warn_of_problems(run)
    if as_json:
        _print_json(rows)
    elif not rows:
        print(f"no runs in {folder}; record one with: routescope record --out {folder}")
    else:
        columns = ["run_id", "status", "balancer", "num_experts", "top_k", "last_step", "loss", "ce_loss"]
        columns += ["max_violation", "max_violation_window", "dead_experts", "idle_experts"]
        _print_table(columns, [[row[column] for column in columns] for row in rows])


@cli.command()
def summary(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's path or URI, or its id in runs/ or sample_runs/.")],
    window: Annotated[
        int, typer.Option(min=1, help="Over how many of the last recorded steps.")
    ] = 50,  # metrics.WINDOW, which would load numpy for every command
    phase: Annotated[
        str | None, typer.Option(help="train | probe | eval | generate; train unless the run has none.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: stable keys, null for no value.")] = False,
) -> None:
    """Final losses, per-layer metrics and a diagnosis of a run."""
    from .diagnosis import diagnose
    from .summary import summarise

    opened = _open_run(run)
    try:
        result = summarise(opened, window=window, phase=phase)
        findings = diagnose(opened, phase)
        has = opened.phases if phase is not None and not result["steps"] else [phase]
    except (OSError, ValueError) as error:
        raise CommandError(f"{opened.path}: {error}", FAILED) from None
    _warn_of_problems(opened)
    if phase not in has:
        raise CommandError(
            f"{opened.path} has no steps of --phase {phase}; it has {', '.join(opened.phases) or 'none at all'}"
        )
    if as_json:
        _print_json(result | {"diagnosis": [finding.as_dict() for finding in findings]})
        return
    print(f"{result['name']} ({result['run_id']}), {result['status']}, last step {result['last_step']}")
    of_phase = "training steps" if result["phase"] == "train" else f"steps of phase {result['phase']}"
    print(f"means over the last {result['steps']} recorded {of_phase}:")
    _print_table(list(result["losses"]), [list(result["losses"].values())])
    layers = [layer["layer"] for layer in result["layers"]]
    columns = [
        "layer",
        *(["router"] if len(set(layers)) < len(layers) else []),
        "num_experts",
        "top_k",
        "max_violation",
        "max_violation_window",
        "load_entropy",
    ]
    columns += ["router_entropy", "dead_experts", "idle_experts", "gini", "drop_rate", "aux_loss"]
    _print_table(columns, [[layer[column] for column in columns] for layer in result["layers"]])
    for finding in findings:
        print(f"{finding.level}: {finding.text}. [{finding.rule}]")


@cli.command()
def verify(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's path, or its id in runs/ or sample_runs/.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs: stable keys, null for no value.")] = False,
) -> int:
    """Read a run to its last byte and say whether its rows go together."""
    from .verify import verify_run

    report = verify_run(_run_path(run))
    if as_json:
        _print_json(report.as_json())
    else:
        for problem in report.problems:
            print(problem)
        for note in report.notes:
            _warn(f"{report.path}: note: {note}")
        if not report.problems:
            print(report.summary)
    return FAILED if report.problems else DONE


@cli.command()
def compact(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's path, or its id in runs/ or sample_runs/.")],
) -> None:
    """Join the many small parts of a run that crashed into few; runs that end do so by themselves."""
    from .compact import compact_run
    from .manifest import RunExistsError, RunUnreadableError

    path = _run_path(run)
    try:
        done = compact_run(path)
    except (RunExistsError, RunUnreadableError, OSError) as error:
        raise CommandError(str(error), FAILED) from None
    sizes = f"{done.bytes_before / 1e6:.1f} MB -> {done.bytes_after / 1e6:.1f} MB"
    print(f"{path}: {done.parts_before} parts -> {done.parts_after}, {sizes}")


@cli.command("analyse")
def analyse_(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's path or URI, or its id in runs/ or sample_runs/.")],
    scheduler: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="A Dask scheduler (tcp://host:8786); threads by default."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: stable keys, null for no value.")] = False,
) -> int:
    """Count what all decisions of a run say, and keep the counts with the run."""
    from .analysis.command import ClusterError, analyse_run

    opened = _open_run(run)
    try:
        report = analyse_run(opened, scheduler, in_terminal=sys.stderr.isatty())
    except ClusterError as error:
        raise CommandError(str(error)) from None
    except (OSError, ValueError) as error:
        raise CommandError(f"{opened.path}: {error}", FAILED) from None
    for problem in report.problems:
        _warn(f"{opened.path}: cannot be read, and is left out: {problem}")
    if as_json:
        _print_json(report.as_json())
    else:
        print(report.headline)
        _print_table(report.columns, report.rows)
    return FAILED if report.problems else DONE


@cli.command()
def layout(
    what: Annotated[
        str, typer.Argument(metavar="NAME|FILE|RUN", help="A published model or size, a config.json, or a run.")
    ],
    context: Annotated[int, typer.Option(min=1, max=10**9, help="Tokens attended to, for FLOPs and cache.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: stable keys, null for no value.")] = False,
) -> None:
    """Layers and parameters, total and active, of a published model, a Hugging Face config or a run."""
    from .layout_command import model_report, report_of_run, tables, unknown

    try:
        report = model_report(what, context)
    except ValueError as error:
        raise CommandError(str(error)) from None
    if report is None:
        try:
            report = report_of_run(_open_run(what), context)
        except CommandError as error:
            raise CommandError(unknown(what)) if error.exit_code == WRONG_ARGUMENTS else error from None
    if as_json:
        _print_json(report)
        return
    for heading, columns, rows in tables(report):
        print(heading)
        if columns:
            _print_table(columns, rows)


@cli.command()
def app(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIR]...", help="Folders of runs, or URIs; runs/ and the samples by default."),
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the dashboard.")] = None,
) -> None:
    """Open the dashboard."""
    for place in map(_place, folders or []):
        if not place.is_dir():
            raise CommandError(_no_folder(place))
    spec = find_spec("app")
    if spec is None or not spec.submodule_search_locations:
        raise CommandError("the dashboard (package `app`) is not installed beside the recorder", FAILED)
    script = Path(next(iter(spec.submodule_search_locations))) / "main.py"
    command = [sys.executable, "-m", "streamlit", "run", str(script)]
    if port is not None:
        command += ["--server.port", str(port)]
    command += ["--", *(folders or [])]
    sys.stdout.flush()
    os.execv(sys.executable, command)


bench = typer.Typer(help="Time parts of the library on this machine.", rich_markup_mode=None)
cli.add_typer(bench, name="bench")


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
    as_json: Annotated[bool, typer.Option("--json", help="For programs: stable keys, null for no value.")] = False,
    progress: Annotated[bool, typer.Option("--progress", help="Say on stderr which round is done.")] = False,
) -> None:
    """Time the dispatchers side by side, forward and backward, and show that they agree."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which sees the memory, talks on stderr
    from .bench import measure_dispatch, report_rows, set_threads  # torch is loaded here
    from .dispatch_shape import DispatchShape

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
        _print_json(asdict(report))
        return
    load = report.load
    print(f"{report.threads} threads, float32, forward + backward, medians over {rounds} interleaved rounds")
    print(f"tokens per expert: {min(load)} to {max(load)}, {load.count(0)} idle of {num_experts}")
    _print_table(*report_rows(report))
    print(f"routing is {report.routing_share:.1%} of the layer")
    print("ms: median time; x dense, and that share: medians of the ratios within a round")


def _open_run(text: str) -> Any:
    """The run at a path, or with that id in the usual folders."""
    from .reader import Run, RunNotFoundError, RunUnreadableError

    try:
        return Run(_run_path(text))
    except (RunNotFoundError, RunUnreadableError) as error:
        raise CommandError(str(error), FAILED) from None


def _run_path(text: str) -> Place:
    """The folder at a path, or of that id in the usual folders, that holds a run.json; a URI is taken as it is."""
    place = _place(text)
    if not isinstance(place, Path):
        return place
    candidates = [place, RUNS_FOLDER / text, Path("sample_runs") / text]
    for path in candidates:
        if (path / "run.json").exists():
            return path
    looked = ", ".join(str(path) for path in candidates)
    raise CommandError(f"no run {text!r}: no run.json in any of {looked}; see: routescope runs")


def _place(text: str) -> Place:
    """The folder, or the place in an object store, that a person typed."""
    from .storage import locate

    try:
        return locate(text)
    except ValueError as error:
        raise CommandError(str(error)) from None


def _no_folder(place: Place) -> str:
    from .storage import ObjectPath

    return f"{place}: {place.why_not()}" if isinstance(place, ObjectPath) else f"{place} is not a folder"


def _warn(message: str) -> None:
    print(f"routescope: {message}", file=sys.stderr)


def _warn_of_problems(run: Any) -> None:
    for problem in run.problems:
        _warn(f"{run.path}: cannot be read, and is left out: {problem}")


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    cells = [list(columns)] + [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
