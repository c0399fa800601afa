"""What a recording will cost: parameters from its settings, seconds from what was measured on this machine.

A run of these sizes spends its time on many small operations as well as on FLOPs, so no single rate tells its
seconds. Runs of the same size recorded here tell them directly; from others only a range follows, between "as long
as that run" and "longer in proportion".
"""

import math
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from app import jobs, record_settings
from app.text import duration
from recorder.manifest import RunNotFoundError, RunUnreadableError, read_manifest
from recorder.reader import Run
from recorder.training.config import ToyConfig
from recorder.training.cost import Size, size

MEASURE_STEPS = 12
MEASURE_LIMIT_S = 120
MEASURE_HELP = (
    f"Records {MEASURE_STEPS} steps of these settings and throws them away: some ten seconds for small models."
)
_LEAST_STEPS = 20  # a run of fewer steps says little about long ones
_SAME = 1.1  # sizes within this factor count as the same
_SPREAD = 1.3  # between two recordings of the same settings, on a machine that also does other things
_RECORDING = 1.5  # a recorded step takes at most this many times as long as its training part


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Something that was timed on this machine.

    size, step_s, start_s   how large it was, seconds a step took, and seconds before the first one
    longest                 at most this many times `step_s`, for what its measurement leaves out
    """

    name: str
    size: Size
    step_s: float
    start_s: float
    longest: float = _SPREAD


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """An estimate: between `low` and `high` seconds, a clause that says what it rests on, and whether that is close."""

    low: float
    high: float
    basis: str
    close: bool


def size_words(of: Size) -> str:
    """The parameters, as a sentence."""
    return f"{_millions(of.parameters)} parameters, {_millions(of.active)} of them active for a token."


def seconds_words(seconds: Seconds | None) -> str:
    """The estimate, as a sentence."""
    if seconds is None:
        return "Nothing was recorded here yet that tells how long it takes on this machine."
    low, high = duration(seconds.low), duration(seconds.high)
    about = f"About {high}" if low == high else f"{low} to {high}"
    return f"{about} on this machine, {seconds.basis}."


def estimate(config: ToyConfig, measured: Iterable[Measured]) -> Seconds | None:
    """How long recording `config` will take, from what was measured; None where nothing was."""
    of = size(config)
    found = sorted(measured, key=lambda one: _distance(of, one.size))
    if not found:
        return None
    start = statistics.median(one.start_s for one in found)
    alike = [one for one in found if _is_same(of, one.size)]
    if alike:
        low = start + config.steps * min(one.step_s for one in alike) / _SPREAD
        high = start + config.steps * max(one.step_s * one.longest for one in alike)
        basis = f"judged by {len(alike)} runs of this size recorded here" if len(alike) > 1 else f"as {alike[0].name}"
        return Seconds(low=low, high=high, basis=basis, close=True)
    nearest = found[0]
    ratios = (1.0, of.flops_per_step / nearest.size.flops_per_step, of.experts / nearest.size.experts)
    return Seconds(
        low=start + config.steps * nearest.step_s * min(ratios) / _SPREAD,
        high=start + config.steps * nearest.step_s * max(ratios) * nearest.longest,
        basis=f"roughly: nothing of this size was recorded here, {nearest.name} comes nearest",
        close=False,
    )


def recorded_here(out: Path) -> list[Measured]:
    """What the recordings into a folder of runs that the dashboard started here and that finished tell."""
    found = (_of_job(job) for job in jobs.jobs(out) if not job.continued)
    return [one for one in found if one is not None]


def measure(values: Mapping[str, Any]) -> Measured:
    """Record a few steps of these values of the form, throw them away, and tell how long they took.

    Raises ValueError, one line, where that fails or takes too long.
    """
    few = {**values, "steps": MEASURE_STEPS}
    with tempfile.TemporaryDirectory(prefix="routescope-") as folder:
        out = Path(folder)
        command = record_settings.command(few, run_id="measured", out=out)
        began = datetime.now().astimezone().timestamp()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=MEASURE_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{MEASURE_STEPS} steps take longer than {MEASURE_LIMIT_S} s here") from None
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("routescope: ")]
            raise ValueError(said[-1].removeprefix("routescope: ") if said else "the recording ended without a word")
        run = Run(out / "measured")
        created = datetime.fromisoformat(run.manifest["created_at"]).timestamp()
        step_s = float(run.steps("train")["wall_time_s"].iloc[MEASURE_STEPS // 4 :].median())
    return Measured(
        name=f"{MEASURE_STEPS} steps that were measured just now",
        size=size(config_of(values)),
        step_s=step_s,
        start_s=created - began,
        longest=_RECORDING,
    )


def config_of(values: Mapping[str, Any]) -> ToyConfig:
    """The settings of values of the form without `record_settings.problems`."""
    return ToyConfig.of(**{name: value for name, value in values.items() if value is not None and name != "corpus"})


def _of_job(job: jobs.Job) -> Measured | None:
    try:
        manifest = read_manifest(job.run_path)
        steps = manifest["last_step"] + 1
        if manifest["status"] != "finished" or steps < _LEAST_STEPS:
            return None
        created, ended = (datetime.fromisoformat(manifest[key]).timestamp() for key in ("created_at", "heartbeat_at"))
        return Measured(
            name=str(manifest["name"]),
            size=size(ToyConfig.from_manifest(manifest)),
            step_s=(ended - created) / steps,
            start_s=max(created - job.started_at, 0.0),
        )
    except (RunNotFoundError, RunUnreadableError, OSError, ValueError, TypeError, KeyError):
        return None


def _is_same(one: Size, other: Size) -> bool:
    return one.experts == other.experts and 1 / _SAME <= one.flops_per_step / other.flops_per_step <= _SAME


def _distance(one: Size, other: Size) -> float:
    flops, experts = one.flops_per_step / other.flops_per_step, one.experts / other.experts
    return abs(math.log(flops)) + abs(math.log(experts))


def _millions(number: int) -> str:
    if number < 10_000:
        return f"{number:,}"
    return f"{number / 1e3:.0f} thousand" if number < 1e6 else f"{number / 1e6:.3g} million"
