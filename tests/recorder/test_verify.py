"""`verify`: each fault, planted in the files of a real run, is found and named by file; good runs pass."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from in_process import routescope
from toy_runs import NEVER, add_part, bare_run, full_model, good_parts, log_full_step, start

from recorder.parts import part_name
from recorder.reader import Run
from recorder.training.config import ToyConfig
from recorder.training.loop import train
from recorder.verify import verify_run
from recorder.writer import RunWriter

SAMPLES = Path(__file__).parents[2] / "sample_runs"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of two MoE layers of 4 experts, top 2, as the recorder wrote it, with several parts a table."""
    path = tmp_path_factory.mktemp("verify") / "run"
    sizes = {"d_model": 16, "d_ff": 16, "expert_d_ff": 16, "num_heads": 2, "batch_size": 4, "seq_len": 16}
    train(ToyConfig.of(steps=6, num_experts=4, top_k=2, decisions_every=2, probe_every=3, **sizes), path)
    return path


@pytest.fixture
def run(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "run")


def part_of(path, table):
    [part] = sorted((path / table).iterdir())
    return part


def edit_rows(path, table, change):
    """Write a part anew with other rows; the footer keeps what the part replaces."""
    part = part_of(path, table)
    rows = pq.read_table(part)
    pq.write_table(change(rows).replace_schema_metadata(rows.schema.metadata), part)


def edit_manifest(path, change):
    manifest = json.loads((path / "run.json").read_text())
    change(manifest)
    (path / "run.json").write_text(json.dumps(manifest))


def set_column(rows, name, values, where=None):
    """A column with other values: in all rows, or in those where `where` is true."""
    old = rows[name].to_pylist()
    new = [values(value) if where is None or where(index) else value for index, value in enumerate(old)]
    return rows.set_column(rows.schema.get_field_index(name), name, pa.array(new, rows.schema.field(name).type))


def first_only(index):
    return index == 0


def faults(path):
    return [str(problem) for problem in verify_run(path).problems]


def expect(path, *lines):
    """Each of these begins a line of the list, and there is no other."""
    found = faults(path)
    assert len(found) == len(lines), found
    for line in lines:
        assert any(fault.startswith(line) for fault in found), (line, found)


# --- good runs


def test_a_recorded_run(recorded):
    report = verify_run(recorded)
    assert (report.problems, report.notes, report.status) == ((), (), "finished")
    read = [pq.read_metadata(part) for table in recorded.iterdir() if table.is_dir() for part in table.iterdir()]
    assert (report.parts, report.rows) == (len(read), sum(metadata.num_rows for metadata in read))


@pytest.mark.parametrize("name", ["none", "aux-loss", "sign-bias", "quantile", "top2-shared"])
def test_the_samples(name):
    assert faults(SAMPLES / name) == []


def test_regression_and_other_recipes(tmp_path):
    train(ToyConfig.of(task="regression", steps=3), tmp_path / "regression")
    assert faults(tmp_path / "regression") == []


def test_expert_choice(tmp_path):
    """Tokens get as many experts as want them: no K to hold the rows to, and loads that need not come to K a token."""
    import torch

    from moe_core.expert_choice import ExpertChoiceRouter
    from moe_core.layers import MoELayer
    from recorder.hooks import RoutingRecorder

    torch.manual_seed(0)
    for number, most in enumerate((None, 2)):
        router = ExpertChoiceRouter(8, 4, 2, max_experts_per_token=most, init_std=1.0)
        moe = MoELayer(8, 16, 4, 2, router=router)
        path = tmp_path / str(number)
        with RoutingRecorder(moe, path) as recorder:
            for step in range(4):
                with recorder.step(step):
                    moe(torch.randn(1, 33, 8))
        assert faults(path) == []


@pytest.mark.parametrize("closed", [True, False])
def test_ranks_segments_and_steps_in_several_parts(tmp_path, closed):
    """Two ranks, a resume that records steps again, and flushes in the middle of a step."""
    manifest = full_model() | {"world_size": 2}
    for segment, steps in ((0, range(8)), (1, range(5, 10))):
        for rank in range(2):
            resume = segment > 0
            writer = RunWriter(
                tmp_path / "run", manifest=manifest, rank=rank, resume=resume, flush_rows=5, flush_bytes=300, **NEVER
            )
            for step in steps:
                log_full_step(writer, step)
            if closed:
                writer.finalize()
            else:
                log_full_step(writer, steps[-1] + 1, ended=False)
                writer.flush()
    report = verify_run(tmp_path / "run")
    assert report.problems == ()
    assert len(Run(tmp_path / "run").segments) == 2


def test_an_imported_run(run):
    """A dump may not say where its tokens stood, or which experts some of them had."""
    edit_manifest(run, lambda manifest: manifest.update(source="import: another program's trace"))
    edit_rows(run, "decisions", lambda rows: rows.filter(pc.not_equal(rows["token"], 5)))
    assert faults(run) == []
    shutil.rmtree(run / "tokens")
    assert faults(run) == []


def test_an_old_writers_run(tmp_path):
    """No phase, rank, segment or router columns, no world size, and a bare model."""
    path = bare_run(tmp_path / "run")
    add_part(path, "steps", "a.parquet", {"step": [0, 1], "loss": [1.0, 0.5]})
    add_part(path, "layer_stats", "a.parquet", {"step": [0, 1], "layer": [3, 3], "load": [[1.0, 3.0], [2.0, 2.0]]})
    add_part(
        path, "decisions", "a.parquet", {"step": [1] * 4, "layer": [3] * 4, "token": [0, 1, 2, 3], "experts": [[0]] * 4}
    )
    add_part(
        path, "tokens", "a.parquet", {"step": [1] * 4, "token": [0, 1, 2, 3], "sequence": [0] * 4, "position": [0] * 4}
    )
    assert faults(path) == []


def test_empty_runs(tmp_path):
    RunWriter(tmp_path / "empty").finalize()
    assert faults(tmp_path / "empty") == []


# --- faults in the files


def test_truncated_part(run):
    part = part_of(run, "decisions")
    part.write_bytes(part.read_bytes()[:-1])
    [fault] = faults(run)
    assert fault.startswith(f"decisions/{part.name}: ")


def test_zero_byte_part(run):
    (run / "layer_stats" / part_name(0, 900)).write_bytes(b"")
    expect(run, f"layer_stats/{part_name(0, 900)}: ")


def test_part_that_is_not_parquet(run):
    (run / "tokens" / part_name(0, 900)).write_text("not Parquet at all, but long enough")
    expect(run, f"tokens/{part_name(0, 900)}: ")


@pytest.mark.parametrize("table", ["steps", "layer_stats", "decisions", "tokens"])
def test_a_changed_byte_among_the_values(run, table):
    """In every column. A column's last byte is one of its values; its first ones are a page header, part of which (the
    page's own minimum and maximum) no reader looks at, so that a change there changes no answer."""
    part = part_of(run, table)
    whole = part.read_bytes()
    columns = pq.read_metadata(part).row_group(0)
    for number in range(columns.num_columns):
        column = columns.column(number)
        first = column.data_page_offset if column.dictionary_page_offset is None else column.dictionary_page_offset
        content = bytearray(whole)
        content[first + column.total_compressed_size - 1] ^= 0xFF
        part.write_bytes(content)
        found = faults(run)
        expected = f"{table}/{part.name}: cannot be read: "
        assert any(fault.startswith(expected) for fault in found), (column.path_in_schema, found)


def test_foreign_schema(run):
    pq.write_table(pa.table({"iteration": [1], "value": [0.5]}), run / "steps" / part_name(0, 900))
    expect(run, f"steps/{part_name(0, 900)}: not a steps table: column step missing")


@pytest.mark.parametrize("table", ["steps", "layer_stats", "decisions", "tokens"])
def test_duplicate_rows_in_another_part(run, table):
    rows = pq.read_table(part_of(run, table))
    copy = rows.slice(rows.num_rows - 3).replace_schema_metadata(None)
    pq.write_table(copy, run / table / part_name(0, 900))
    found = faults(run)
    assert any(fault.startswith(f"{table}/{part_name(0, 900)}: ") for fault in found), found


@pytest.mark.parametrize("table", ["steps", "layer_stats", "decisions", "tokens"])
def test_duplicate_rows_in_one_part(run, table):
    edit_rows(run, table, lambda rows: pa.concat_tables([rows, rows.slice(0, 1)]))
    assert any(fault.startswith(f"{table}/{part_of(run, table).name}: ") for fault in faults(run))


def test_rows_that_a_compaction_accounts_for_are_no_duplicates(tmp_path):
    """The small parts stay beside the part that replaces them, as after a crash in the middle."""
    good_parts(tmp_path / "run").flush()
    edit_manifest(tmp_path / "run", lambda manifest: manifest.update(model={}))
    old = {part: part.read_bytes() for part in (tmp_path / "run" / "steps").iterdir()}
    RunWriter(tmp_path / "run", resume=True).finalize()
    [new] = (tmp_path / "run" / "steps").iterdir()
    for part, content in old.items():
        part.write_bytes(content)
    assert not [fault for fault in faults(tmp_path / "run") if fault.startswith("steps")]
    rows = pq.read_table(new).replace_schema_metadata(None)
    pq.write_table(rows, new)
    assert [fault for fault in faults(tmp_path / "run") if fault.startswith(f"steps/{new.name}: a row of this key")]


def test_missing_rank(tmp_path):
    for rank in range(3):
        writer = RunWriter(tmp_path / "run", manifest={"world_size": 3}, rank=rank)
        writer.log_step(0, tokens=0)  # ranks without a router have `steps` alone
        writer.finalize()
    assert faults(tmp_path / "run") == []
    (tmp_path / "run" / "steps" / part_name(1, 0)).unlink()
    expect(tmp_path / "run", "run.json: world_size is 3, but rank 1 has no parts")
    edit_manifest(tmp_path / "run", lambda manifest: manifest.update(world_size=1))
    expect(tmp_path / "run", "run.json: world_size is 1, but rank 2 has parts")
    edit_manifest(tmp_path / "run", lambda manifest: manifest.update(world_size=2**30))
    expect(tmp_path / "run", f"run.json: world_size is {2**30}, but {2**30 - 2} ranks have no parts")


# --- faults in the rows


def change_experts(run, num_experts):
    def change(manifest):
        for entry in manifest["model"]["layers"]:
            if entry["kind"] == "moe":
                entry["num_experts"] = num_experts

    edit_manifest(run, change)


def test_wrong_expert_count_in_the_manifest(run):
    change_experts(run, 5)
    expect(
        run,
        *[
            f"layer_stats/{part_of(run, 'layer_stats').name}: {name} has another number of experts than its router"
            for name in ("load", "gate_mass", "mean_prob")
        ],
    )


@pytest.mark.parametrize("name", ["gate_mass", "mean_prob"])
def test_wrong_expert_count_in_one_row(run, name):
    edit_rows(run, "layer_stats", lambda rows: set_column(rows, name, lambda old: old[:-1], first_only))
    expect(run, f"layer_stats/{part_of(run, 'layer_stats').name}: {name} has another number of experts")


def shorten(run, name):
    edit_rows(run, "decisions", lambda rows: set_column(variable(rows), name, lambda old: old[:-1], first_only))


def variable(rows):
    for name in ("experts", "weights", "kept"):
        column = rows[name]
        rows = rows.set_column(rows.schema.get_field_index(name), name, column.cast(pa.list_(column.type.value_type)))
    return rows


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda old: [4, old[1]], "expert id is out of range"),
        (lambda old: [-2, old[1]], "expert id is out of range"),
        (lambda old: [old[0], old[0]], "the same expert is chosen twice for a token"),
        (lambda old: [old[0], -1], "tokens have another number of experts than top_k"),
    ],
)
def test_ids(run, change, fault):
    edit_rows(run, "decisions", lambda rows: set_column(rows, "experts", change, first_only))
    found = faults(run)
    assert any(line.startswith(f"decisions/{part_of(run, 'decisions').name}: {fault} (") for line in found), found
    assert any(line.startswith("layer_stats/") and "decisions of all tokens" in line for line in found)


def test_top_k_of_the_manifest(run):
    edit_manifest(run, lambda manifest: [entry.update(top_k=1) for entry in manifest["model"]["layers"]])
    found = faults(run)
    assert any("tokens have another number of experts than top_k" in fault for fault in found)
    assert any("load does not sum to tokens * top_k" in fault for fault in found)


def test_a_weights_list_of_another_length(run):
    shorten(run, "weights")
    expect(run, f"decisions/{part_of(run, 'decisions').name}: weights and experts are of different lengths")


def test_load_that_is_not_what_was_decided(run):
    def swap(load):
        return [load[0] - 1, load[1] + 1, *load[2:]]

    with_decisions = {(r["step"], r["phase"]) for r in pq.read_table(part_of(run, "decisions")).to_pylist()}
    rows = pq.read_table(part_of(run, "layer_stats")).to_pylist()
    [place, *_] = [i for i, row in enumerate(rows) if (row["step"], row["phase"]) in with_decisions]
    edit_rows(run, "layer_stats", lambda rows: set_column(rows, "load", swap, lambda index: index == place))
    name = part_of(run, "layer_stats").name
    expect(run, f"layer_stats/{name}: load is not what the decisions of all tokens add up to (step")


def test_load_sum(run):
    edit_rows(run, "layer_stats", lambda rows: set_column(rows, "tokens", lambda old: old + 1, first_only))
    expect(run, f"layer_stats/{part_of(run, 'layer_stats').name}: load does not sum to tokens * top_k (step 0")


def test_decisions_without_tokens(run):
    shutil.rmtree(run / "tokens")
    expect(run, "tokens: no rows for what decisions has")


def test_token_numbers_that_do_not_match(run):
    edit_rows(run, "tokens", lambda rows: set_column(rows, "token", lambda old: old + 1000, first_only))
    found = faults(run)
    assert any(line.startswith("decisions/") and "token numbers have no row in tokens" in line for line in found)
    assert any(line.startswith("tokens/") and "token numbers have no decisions" in line for line in found)


def test_a_step_without_the_stats_of_a_router(run):
    def drop(rows):
        return rows.filter(pc.invert(pc.and_(pc.equal(rows["step"], 3), pc.equal(rows["router"], 1))))

    edit_rows(run, "layer_stats", drop)
    expect(run, "layer_stats: no row of a router for a step (2 times, first at step 3, ")


def test_a_router_without_stats(run):
    edit_rows(run, "layer_stats", lambda rows: rows.filter(pc.equal(rows["router"], 0)))
    expect(run, "layer_stats: no rows of router 1, which run.json lists")


def test_lost_steps(run):
    edit_rows(run, "steps", lambda rows: rows.filter(pc.not_equal(rows["step"], 2)))
    expect(run, *[f"steps: no row for what {table} has" for table in ("layer_stats", "decisions", "tokens")])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"last_step": 99}, "last_step is 99, but the rows go on to step 5"),
        ({"world_size": 0}, "world_size is 0"),
        ({"segment": -1}, "segment is -1"),
        ({"status": "done"}, "status is 'done'"),
        ({"segment": 10**400}, "segment is 1000"),
        ({"recorded": [1, 2]}, "holds no recorded object"),
    ],
)
def test_manifest_that_does_not_fit(run, change, fault):
    edit_manifest(run, lambda manifest: manifest.update(change))
    assert any(line.startswith(f"run.json: {fault}") for line in faults(run)), faults(run)


@pytest.mark.parametrize("name", ["index", "router", "num_experts", "top_k", "parameters_total"])
def test_a_number_of_the_manifest_that_no_array_holds_is_one_finding(run, name):
    edit_manifest(run, lambda manifest: manifest["model"]["layers"][1].update({name: 10**400}))
    [line] = faults(run)
    assert line.startswith("run.json: describes a layer with 1000")
    assert line.endswith(f"... for {name}, no whole number")


def test_domains_that_are_no_text_can_be_verified(run):
    edit_manifest(run, lambda manifest: manifest.update(domains=["\ud800"]))
    faults(run)  # whatever it finds, it can be said
    assert "ud800" in (run / "run.json").read_text()


def test_manifest_that_names_other_routers(run):
    edit_manifest(run, lambda m: [entry.update(router=7) for entry in m["model"]["layers"] if entry["router"] == 1])
    found = faults(run)
    assert any(line.startswith("decisions/") and "router is none of run.json's" in line for line in found)
    assert "layer_stats: no rows of router 7, which run.json lists" in found


def test_unreadable_manifest(run):
    (run / "run.json").write_text("{")
    expect(run, "run.json: is not JSON")


# --- runs that are not at rest


def test_while_a_process_writes_and_compacts(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path / "run"), str(Path(__file__).parent)])
    while not (tmp_path / "run" / "run.json").exists():
        pass
    seen = []
    while process.poll() is None:
        report = verify_run(tmp_path / "run")
        assert report.problems == ()
        seen.append(report.rows)
    assert process.returncode == 0
    assert seen == sorted(seen)
    assert len(set(seen)) > 2
    assert faults(tmp_path / "run") == []


WRITE = """
import sys
sys.path.insert(0, sys.argv[2])
from toy_runs import compact_while_writing, full_model, log_full_step
from recorder.writer import RunWriter
writer = RunWriter(sys.argv[1], manifest=full_model(), flush_rows=37)
for step in range(60):
    log_full_step(writer, step)
    if step % 20 == 19:
        compact_while_writing(writer)
writer.finalize()
"""


def test_killed_and_unfinished(tmp_path):
    process = start(
        """
        writer = RunWriter(args[0], flush_steps=2)
        for step in range(7):
            writer.log_step(step, tokens=8)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path / "run",
    )
    assert process.wait() == -signal.SIGKILL
    report = verify_run(tmp_path / "run")
    assert (report.problems, report.status, report.rows) == ((), "unfinished", 6)
    assert report.notes[0].startswith("the run was never closed")
    (tmp_path / "run" / "steps" / ".part-r00000-000009.parquet.abc.tmp").write_bytes(b"half")
    assert any("1 temporary file" in note for note in verify_run(tmp_path / "run").notes)


def test_the_commands(run):
    result = routescope("verify", run)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("\n") == 1
    assert "nothing wrong" in result.stdout
    result = routescope("compact", run)
    assert result.returncode == 0
    assert "4 parts -> 4" in result.stdout
    (run / "steps" / part_name(0, 900)).write_bytes(b"")
    result = routescope("verify", run)
    assert result.returncode == 1
    assert result.stdout.startswith(f"steps/{part_name(0, 900)}: ")
    result = routescope("verify", run, "--json")
    report = json.loads(result.stdout)
    assert (result.returncode, report["ok"], report["status"]) == (1, False, "finished")
    assert [problem["file"] for problem in report["problems"]] == [f"steps/{part_name(0, 900)}"]
    result = routescope("verify", run.parent / "none")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)


def test_memory_stays_flat(tmp_path):
    """Twenty parts take no more memory than two: they are read one by one."""
    peaks = []
    for parts in (2, 20):
        path = tmp_path / str(parts)
        writer = RunWriter(path, flush_steps=1, **NEVER)
        ids = np.random.default_rng(0).permuted(np.tile(np.arange(4), (40_000, 1)), axis=1)[:, :2]
        for step in range(parts):
            writer.log_decisions(step, layer=0, router=0, experts_TK=ids, weights_TK=np.ones(ids.shape))
            writer.log_tokens(step, sequence_T=np.zeros(len(ids), int), position_T=np.arange(len(ids)))
            writer.log_step(step, tokens=len(ids))
        pool = pa.proxy_memory_pool(pa.default_memory_pool())
        standard = pa.default_memory_pool()
        pa.set_memory_pool(pool)
        try:
            assert faults(path) == []
        finally:
            pa.set_memory_pool(standard)
        peaks.append(pool.max_memory())
    assert 0 < peaks[1] < 1.5 * peaks[0]
