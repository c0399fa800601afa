"""The sidebar form that records a toy run: values in, checked; a `routescope record` command out."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from app import data, folders, jobs, navigation
from app.text import plain
from moe_core.recipe_catalog import RECIPES
from recorder import run_ids
from recorder.training.config import LM_ONLY, ROUTERS, ToyConfig

DEFAULTS = ToyConfig()
TASKS = {"lm": "Language model", "regression": "Regression"}
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
    "task": "Task",
    "recipe": "Recipe",
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
_INTEGERS = {  # name -> least and greatest value the field takes; ToyConfig has the last word
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
_HELP = {
    "top_k": "Experts for each token.",
    "num_shared_experts": "Experts that every token passes, beside the chosen ones.",
    "latent_size": "Width that the routed experts work in; tokens are compressed to it and expanded again. Empty: the "
    "recipe's, and without one the model's own width.",
    "moe_frequency": "Every n-th layer is MoE, the others are dense.",
    "seed": "The same seed and settings give the same run.",
}
#: What a run of the default settings showed, 400 steps from seed 0.
EXPECTATIONS = {
    "three-tier": "Expect early layers to even out and the last to lag: its busiest expert stays above 2x its share.",
    "noisy-top-k": "Expect every expert busy, the busiest at about 1.4x its share.",
    "stable-latent": "Expect the evenest load of all: within 5% of uniform, soon and to the end.",
    "sorted-swiglu": "Expect a calm picture from the first steps, the busiest expert below 1.3x its share.",
    "switch": "Expect an early collapse that is pulled back; 5 to 10% of assignments are dropped for lack of room.",
    "mixtral": "Expect every expert busy, the busiest at about 1.1x its share.",
    "deepseek-v3": "Expect the last layer to tip over in the first steps and the bias to bring it back.",
    "olmoe": "Expect no idle expert of 64, the busiest at 1.5 to 1.8x its share. The slowest of all to record.",
}
_LONGEST_SHOWN = 120  # letters of a path in a message
_LAST = "record_last_values"
_BASIS = "record_basis"
_OPTIONAL = ("latent_size",)  # fields that may be left empty
#: Settings that a recipe is not about: choosing another one leaves them as they are, unless their default changes.
_OF_THE_RUN = ("steps", "seed", "decisions_every", "batch_size", "seq_len", "lr")
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
        basis = _basis()
        with st.form("record", border=False):
            values = basis | _fields(basis)
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

    values  the fields of `LABELS` that the task has; corpus as a list of paths
    """
    found = []
    for path in values.get("corpus", []):
        if not _is_there(path):
            found.append(f"{LABELS['corpus']}: there is no file or folder {_shortened(path)}")
    settings = {name: value for name, value in values.items() if name != "corpus"}
    # ToyConfig names the first value it does not like; put the defaults there and ask again for the others.
    while True:
        missing = [name for name, value in settings.items() if value is None and name not in _OPTIONAL]
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


def _basis() -> dict[str, Any]:
    """Draw the choice of task and recipe, which say what the fields begin with; outside the form, to act at once."""
    last = st.session_state.get(_LAST, {})
    st.session_state.setdefault("record_task", last.get("task", DEFAULTS.task))
    task = st.selectbox(
        LABELS["task"], list(TASKS), format_func=TASKS.__getitem__, key="record_task", on_change=_take_task
    )
    st.session_state.setdefault("record_recipe", last.get("recipe", ToyConfig.of(task=task).recipe))
    recipe = st.selectbox(
        LABELS["recipe"],
        ["", *RECIPES],
        format_func=lambda name: name or "None",
        key="record_recipe",
        on_change=_take_recipe,
        help="A named combination of router, balancer, experts and layout. It fills the fields below, and what it "
        "fixes beyond them stays.",
    )
    st.caption(expectation(task, recipe))
    st.session_state[_BASIS] = {"task": task, "recipe": recipe}
    return {"task": task, "recipe": recipe}


def expectation(task: str, recipe: str) -> str:
    """What a recipe is and what to expect of a run with it, in a line or two."""
    if task == "regression":
        what = "A single MoE layer learns random vectors' y = tanh(xW): no text, no cross-entropy, done in seconds."
        return f"{what} {_sentence(RECIPES[recipe].summary)}" if recipe else what
    if not recipe:
        return "All is set below. Without a balancer, expect experts to collapse within the first hundred steps."
    return f"{_sentence(RECIPES[recipe].summary)} {EXPECTATIONS[recipe]}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _take_task() -> None:
    """Widget callback: another task begins with its own recipe."""
    st.session_state["record_recipe"] = ToyConfig.of(task=st.session_state["record_task"]).recipe
    _take_recipe()


def _take_recipe() -> None:
    """Widget callback: the fields take what the recipe says."""
    before = ToyConfig.of(**st.session_state[_BASIS])
    now = ToyConfig.of(task=st.session_state["record_task"], recipe=st.session_state["record_recipe"])
    for name in ("balancer", "router", *_INTEGERS, *_ADVANCED_FLOATS):
        if name not in _OF_THE_RUN or getattr(now, name) != getattr(before, name):
            st.session_state[f"record_{name}"] = getattr(now, name)


def _fields(basis: Mapping[str, Any]) -> dict[str, Any]:
    unused = LM_ONLY if basis["task"] == "regression" else ()
    values: dict[str, Any] = {}
    _fill("balancer", basis)
    values["balancer"] = st.selectbox(
        LABELS["balancer"],
        list(BALANCERS),
        format_func=BALANCERS.__getitem__,
        key="record_balancer",
        help="What keeps the load even. Without one, watch experts collapse.",
    )
    _fill("router", basis)
    values["router"] = st.selectbox(
        LABELS["router"],
        ROUTERS,
        format_func=str.capitalize,
        key="record_router",
        help="How router logits become scores.",
    )
    rows = (("num_experts", "top_k"), ("num_shared_experts", "latent_size"), ("num_layers", "moe_frequency"))
    for pair in (*rows, ("steps", "seed")):
        shown = [name for name in pair if name not in unused]
        for column, name in zip(st.columns(2, vertical_alignment="bottom"), shown, strict=False):
            with column:
                values[name] = _integer(name, basis)
    values["name"] = st.text_input(LABELS["name"], key="record_name", max_chars=80, placeholder="the run's folder")
    if "corpus" not in unused:
        values["corpus"] = _corpus()
    with st.expander("Advanced", key="record_advanced"):
        for name in _ADVANCED_FLOATS:
            _fill(name, basis)
            values[name] = st.number_input(LABELS[name], min_value=0.0, value=None, format="%g", key=f"record_{name}")
        for name in _ADVANCED_INTEGERS:
            if name not in unused:
                values[name] = _integer(name, basis)
    return values


def _corpus() -> list[str]:
    corpus = st.text_area(
        LABELS["corpus"],
        key="record_corpus",
        height=68,
        placeholder="/path/to/file.txt",
        help="Files or folders of plain text on this machine, one a line; each becomes a domain beside the built-in "
        "ones. May be left empty.",
    )
    return [line.strip() for line in corpus.splitlines() if line.strip()]


def _integer(name: str, basis: Mapping[str, Any]) -> int | None:
    least, most = _INTEGERS[name]
    # Filled through the session: given as `value`, the default would come back, unseen, in a field that was emptied.
    _fill(name, basis)
    label = "Samples per batch" if name == "batch_size" and basis["task"] == "regression" else LABELS[name]
    placeholder = "not used" if name in _OPTIONAL else None
    return st.number_input(
        label, least, most, None, step=1, key=f"record_{name}", help=_HELP.get(name), placeholder=placeholder
    )


def _fill(name: str, basis: Mapping[str, Any]) -> None:
    """Put the value last started with, else the default, into a field that Streamlit has emptied or never drawn."""
    last = st.session_state.get(_LAST, {})
    same = all(last.get(key) == value for key, value in basis.items())
    begins = last[name] if same and name in last else getattr(ToyConfig.of(**basis), name)
    st.session_state.setdefault(f"record_{name}", begins)


def _in_words(message: str) -> str:
    """A message of ToyConfig with the form's labels in place of its field names."""
    text = re.sub(r"\b(\w+)=", lambda match: f"{LABELS.get(match[1], match[1])} ", message)
    return text[0].upper() + text[1:]
