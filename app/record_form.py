"""The sidebar form that records a toy run: values in, checked; a `routescope record` command out."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from app import data, folders, jobs, navigation
from app.text import plain
from recorder import run_ids
from recorder.training.config import ROUTERS, ToyConfig

DEFAULTS = ToyConfig()
BALANCERS = {
    "none": "None",
    "aux": "Aux loss",
    "sign-bias": "Sign bias",
    "quantile": "Quantile",
    "aux+sign-bias": "Aux loss and sign bias",
    "aux+quantile": "Aux loss and quantile",
}
LABELS = {
    "balancer": "Balancer",
    "router": "Router",
    "num_experts": "Experts",
    "top_k": "Top-k",
    "num_shared_experts": "Shared experts",
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
_INTEGERS = {  # name -> least and greatest value the field takes; ToyConfig has the last word
    "num_experts": (1, 1024),
    "top_k": (1, 1024),
    "num_shared_experts": (0, 64),
    "num_layers": (1, 64),
    "moe_frequency": (1, 64),
    "steps": (1, 1_000_000),
    "seed": (0, 2**32 - 1),
    "decisions_every": (1, 1_000_000),
    "batch_size": (1, 4096),
    "seq_len": (2, 4096),
    "d_model": (8, 2048),
}
_HELP = {
    "top_k": "Experts for each token.",
    "num_shared_experts": "Experts that every token passes, beside the chosen ones.",
    "moe_frequency": "Every n-th layer is MoE, the others are dense.",
    "seed": "The same seed and settings give the same run.",
}
_LONGEST_SHOWN = 120  # letters of a path in a message
_LAST = "record_last_values"
_ADVANCED_FLOATS = ("aux_coef", "z_coef", "bias_rate", "lr")
_ADVANCED_INTEGERS = ("decisions_every", "batch_size", "seq_len", "d_model")


def render() -> None:
    """Draw the form; on a valid submission start the recording and go to its page."""
    with st.expander("Record a run", icon=":material/add_circle:", key="record_expander"):
        target = folders.recording_folder(data.shown_folders())
        if target is None:
            st.warning("None of the folders shown can be written to. Start the dashboard on one that can:")
            st.code("routescope app FOLDER", "bash")
            return
        with st.form("record", border=False):
            values = _fields()
            submitted = st.form_submit_button("Start", type="primary", icon=":material/play_arrow:", key="record_start")
        if not submitted:
            return
        st.session_state[_LAST] = dict(values)  # the change of page below takes the widgets' own values away
        wrong = problems(values)
        for line in wrong:
            st.error(plain(line))
        if wrong:
            return
        run_id = new_run_id(values, target)
        try:
            jobs.start(command(values, run_id=run_id, out=target), run_id=run_id, out=target, steps=values["steps"])
        except (OSError, ValueError) as error:
            st.error(f"The recording could not be started: {error}")
            return
    navigation.go("recording")


def problems(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with the values of the form, one line each; empty where they can be recorded.

    values  the fields of `LABELS`; corpus as a list of paths
    """
    found = []
    for path in values.get("corpus", []):
        if not _is_there(path):
            found.append(f"{LABELS['corpus']}: there is no file or folder {_shortened(path)}")
    settings = {name: value for name, value in values.items() if name != "corpus"}
    # ToyConfig names the first value it does not like; put the defaults there and ask again for the others.
    while True:
        missing = [name for name, value in settings.items() if value is None]
        if missing:
            found += [f"{LABELS[name]}: a number is missing" for name in missing]
            settings = {name: value for name, value in settings.items() if name not in missing}
        try:
            ToyConfig(**settings)
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
        elif value != "":
            # One argument, so that a name such as --help stays a name.
            options.append(f"{option}={value}")
    return [sys.executable, "-m", "recorder.cli", "record", *options, "--run-id", run_id, "--out", str(out)]


def new_run_id(values: Mapping[str, Any], out: Path) -> str:
    """A run id free in `out`, from the name (or else the balancer) and the time."""
    recordings = {job.run_id for job in jobs.jobs(out)}
    return run_ids.new_run_id(
        values["name"] or values["balancer"], lambda taken: taken in recordings or (out / taken).exists()
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


def _fields() -> dict[str, Any]:
    values: dict[str, Any] = {
        "balancer": st.selectbox(
            LABELS["balancer"],
            list(BALANCERS),
            format_func=BALANCERS.__getitem__,
            key="record_balancer",
            help="What keeps the load even. Without one, watch experts collapse.",
        ),
        "router": st.selectbox(
            LABELS["router"],
            ROUTERS,
            format_func=str.capitalize,
            key="record_router",
            help="How router logits become scores.",
        ),
    }
    for pair in (("num_experts", "top_k"), ("num_shared_experts", "num_layers"), ("moe_frequency", "steps")):
        for column, name in zip(st.columns(2, vertical_alignment="bottom"), pair, strict=True):
            with column:
                values[name] = _integer(name)
    values["seed"] = _integer("seed")
    values["name"] = st.text_input(LABELS["name"], key="record_name", max_chars=80, placeholder="the run's folder")
    corpus = st.text_area(
        LABELS["corpus"],
        key="record_corpus",
        height=68,
        placeholder="/path/to/file.txt",
        help="Files or folders of plain text on this machine, one a line; each becomes a domain beside the built-in "
        "ones. May be left empty.",
    )
    values["corpus"] = [line.strip() for line in corpus.splitlines() if line.strip()]
    with st.expander("Advanced", key="record_advanced"):
        for name in _ADVANCED_FLOATS:
            _fill(name)
            values[name] = st.number_input(LABELS[name], min_value=0.0, value=None, format="%g", key=f"record_{name}")
        for name in _ADVANCED_INTEGERS:
            values[name] = _integer(name)
    return values


def _integer(name: str) -> int | None:
    least, most = _INTEGERS[name]
    # Filled through the session: given as `value`, the default would come back, unseen, in a field that was emptied.
    _fill(name)
    return st.number_input(LABELS[name], least, most, None, step=1, key=f"record_{name}", help=_HELP.get(name))


def _fill(name: str) -> None:
    """Put the value last started with, else the default, into a field that Streamlit has emptied or never drawn."""
    last = st.session_state.get(_LAST, {})
    st.session_state.setdefault(f"record_{name}", last.get(name, getattr(DEFAULTS, name)))


def _in_words(message: str) -> str:
    """A message of ToyConfig with the form's labels in place of its field names."""
    text = re.sub(r"\b(\w+)=", lambda match: f"{LABELS.get(match[1], match[1])} ", message)
    return text[0].upper() + text[1:]
