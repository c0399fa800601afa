"""The values of the record form: their names and limits, what is wrong with them, and the command they make."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app import jobs
from recorder import run_ids
from recorder.training.config import ToyConfig

BALANCERS = {
    "none": "None",
    "aux": "Aux loss",
    "sign-bias": "Sign bias",
    "quantile": "Quantile",
    "aux+sign-bias": "Aux loss and sign bias",
    "aux+quantile": "Aux loss and quantile",
    "sign-bias+sequence-aux": "Sign bias, sequence aux",
}
LABELS = {
    "balancer": "Balancer",
    "router": "Router",
    "num_experts": "Experts",
    "top_k": "Top-k",
    "num_shared_experts": "Shared experts",
    "latent_size": "Latent size",
    "num_layers": "Layers",
    "moe_frequency": "MoE frequency",
    "steps": "Steps",
    "seed": "Seed",
    "corpus": "Your own text",
    "name": "Name",
    "aux_coef": "Aux loss coefficient",
    "z_coef": "Router z-loss coefficient",
    "bias_rate": "Sign bias step",
    "lr": "Learning rate",
    "decisions_every": "Keep decisions every n steps",
    "batch_size": "Sequences per batch",
    "seq_len": "Tokens per sequence",
    "d_model": "Model width",
}
INTEGERS = {  # name -> least and greatest value the field takes; ToyConfig has the last word
    "num_experts": (1, 1024),
    "top_k": (1, 1024),
    "num_shared_experts": (0, 64),
    "latent_size": (1, 16384),
    "num_layers": (1, 64),
    "moe_frequency": (1, 64),
    "steps": (1, 1_000_000),
    "seed": (0, 2**32 - 1),
    "decisions_every": (1, 1_000_000),
    "batch_size": (1, 4096),
    "seq_len": (2, 4096),
    "d_model": (8, 2048),
}
HELP = {
    "top_k": "Experts for each token.",
    "num_shared_experts": "Experts that every token passes, beside the chosen ones.",
    "latent_size": "Width that the routed experts work in; tokens are compressed to it and expanded again. Empty: the "
    "recipe's, and without one the model's own width.",
    "moe_frequency": "Every n-th layer is MoE, the others are dense.",
    "seed": "The same seed and settings give the same run.",
}
_LONGEST_SHOWN = 120  # letters of a path in a message
#: Settings that may be left empty.
OPTIONAL = ("latent_size",)


def problems(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with the values of the form, one line each; empty where they can be recorded.

    values  the fields of `LABELS` that the task has; corpus as a list of paths
    """
    found = []
    for path in values.get("corpus", []):
        if not _is_there(path):
            found.append(f"{LABELS['corpus']}: there is no file or folder {_shortened(path)}")
    settings = {name: value for name, value in values.items() if name != "corpus"}
    # ToyConfig names the first value it does not like; put the defaults there and ask again for the others.
    while True:
        missing = [name for name, value in settings.items() if value is None and name not in OPTIONAL]
        if missing:
            found += [f"{LABELS[name]}: a number is missing" for name in missing]
            settings = {name: value for name, value in settings.items() if name not in missing}
        try:
            ToyConfig.of(**{name: value for name, value in settings.items() if value is not None})
        except ValueError as error:
            found.append(_in_words(str(error)))
            named = [name for name in settings if re.search(rf"\b{name}=", str(error))]
            if not named:
                return found
            settings = {name: value for name, value in settings.items() if name not in named}
        else:
            return found


def command(values: Mapping[str, Any], *, run_id: str, out: Path) -> list[str]:
    """The command line that records a run of these values into out/run_id, and nothing by a shell."""
    options: list[str] = []
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        if name == "corpus":
            for path in value:
                options += [option, str(_at_home(path))]
        elif name == "balancer":
            for part in value.split("+"):
                options += [option, part]
        elif value is not None and (value != "" or name == "recipe"):  # no recipe is one's choice, not the task's
            # One argument, so that a name such as --help stays a name.
            options.append(f"{option}={value}")
    return [sys.executable, "-m", "recorder.cli", "record", *options, "--run-id", run_id, "--out", str(out)]


def new_run_id(values: Mapping[str, Any], out: Path) -> str:
    """A run id free in `out`, from the name (or else the recipe, or the balancer) and the time."""
    recordings = {job.run_id for job in jobs.jobs(out)}
    return run_ids.new_run_id(
        values["name"] or values["recipe"] or values["balancer"],
        lambda taken: taken in recordings or (out / taken).exists(),
    )


def _at_home(text: str) -> Path:
    """The path that a person wrote, `~` and `~name` replaced; as it is where there is no such person."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def _is_there(text: str) -> bool:
    try:
        return _at_home(text).exists()
    except (OSError, ValueError):  # too long for a path, or in a folder that may not be entered
        return False


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _in_words(message: str) -> str:
    """A message of ToyConfig with the form's labels in place of its field names."""
    text = re.sub(r"\b(\w+)=", lambda match: f"{LABELS.get(match[1], match[1])} ", message)
    return text[0].upper() + text[1:]
