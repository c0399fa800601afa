"""Small runs, written row by row or by another process, for the tests of the recorder."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recorder.compact import compact_table
from recorder.parts import next_sequence
from recorder.schema import TABLES
from recorder.writer import RunWriter

NEVER = {"flush_seconds": 1e9}


def layer(index, router, num_experts, top_k=2):
    return {"index": index, "kind": "moe", "router": router, "num_experts": num_experts, "top_k": top_k}


def model(*layers):
    return {"model": {"name": "toy", "layers": list(layers)}}


def log_stats(writer, step, *, router=0, load=(3, 1), **more):
    load = np.array(load)
    rest = {"gate_mass": load / 2, "mean_prob": load / load.sum()} | more
    writer.log_layer_stats(
        step, layer=rest.pop("layer", router), router=router, tokens=int(load.sum()), load=load, **rest
    )


def start(code, *arguments, **options):
    """A real process running `code`, with `args` as its arguments."""
    head = "import os, signal, sys, time\nimport numpy as np\nfrom recorder.writer import *\nargs = sys.argv[1:]\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def part_names(path, table):
    return sorted(file.name for file in (path / table).iterdir())


def small_parts(path, steps=range(12), **options):
    """A run of many small parts, not closed."""
    writer = RunWriter(path, manifest=model(layer(0, 0, 4)), flush_steps=1, **(NEVER | options))
    for step in steps:
        writer.log_decisions(
            step, layer=0, router=0, experts_TK=np.full((600, 2), step % 4), weights_TK=np.ones((600, 2))
        )
        log_stats(writer, step, load=(1, 2, 3, step))
        writer.log_step(step, tokens=600, loss=float(step))
    return writer


def log_toy_step(writer, step, value, *, layers=((0, 0),), decisions=True):
    """One step of a toy run whose every number tells `value`."""
    for layer, router in layers:
        writer.log_layer_stats(
            step,
            layer=layer,
            router=router,
            tokens=4,
            load=np.array([value, 8 - value]),
            gate_mass=np.ones(2),
            mean_prob=np.ones(2) / 2,
        )
        if decisions:
            ids = np.full((4, 1), value % 2)
            writer.log_decisions(step, layer=layer, router=router, experts_TK=ids, weights_TK=np.ones((4, 1)))
    writer.log_tokens(step, sequence_T=np.zeros(4, int), position_T=np.arange(4), text_T=[str(value)] * 4)
    writer.log_step(step, tokens=4, loss=float(value))


def full_model():
    """Two routers of 4 experts, 2 for each token."""
    return model(layer(1, 0, 4), layer(3, 1, 4))


def full_step(step, tokens=8):
    """By router: the ids (T, 2), weights (T, 2) and load (4,) of a step, the same whenever it is asked for."""
    rng = np.random.default_rng(step)
    found = {}
    for router in (0, 1):
        ids = rng.permuted(np.tile(np.arange(4), (tokens, 1)), axis=1)[:, :2]
        found[router] = (ids, np.ones(ids.shape) / 2, np.bincount(ids.reshape(-1), minlength=4))
    return found


def log_full_step(writer, step, *, ended=True):
    """A step as a recorder logs it, whose numbers go together; without its `steps` row where it has not `ended`."""
    routers = full_step(step)
    tokens = len(routers[0][0])
    writer.log_tokens(step, sequence_T=np.zeros(tokens, int), position_T=np.arange(tokens))
    for router, (ids, weights, load) in routers.items():
        where = {"layer": 2 * router + 1, "router": router}
        writer.log_layer_stats(
            step, **where, tokens=tokens, load=load, gate_mass=load / 2, mean_prob=np.ones(4) / 4, invalid=0
        )
        writer.log_decisions(step, **where, experts_TK=ids, weights_TK=weights)
    if ended:
        writer.log_step(step, tokens=tokens, loss=float(step))


def compact_while_writing(writer):
    """What a writer does when it closes, in the middle of its run."""
    writer.flush()
    for table in TABLES:
        compact_table(writer.path / table, table, writer.rank)
        writer._sequence[table] = next_sequence(writer.path / table, writer.rank)


def good_parts(path, parts=5):
    writer = RunWriter(path, flush_steps=1, **NEVER)
    for step in range(parts):
        log_toy_step(writer, step, step)
    return writer


def bare_run(path, **manifest):
    """A run as another program might have written it: a manifest and no more."""
    path.mkdir(parents=True)
    content = {"format_version": 1, "status": "finished", "created_at": "2026-01-01T00:00:00+00:00"} | manifest
    (path / "run.json").write_text(json.dumps(content))
    return path


def add_part(path, table, name, columns):
    (path / table).mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path / table / name)
