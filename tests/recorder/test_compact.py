import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
from toy_runs import (
    NEVER,
    good_parts,
    part_names,
    small_parts,
    start,
)

import recorder.compact
import recorder.reader
from recorder import parts
from recorder.compact import compact_run
from recorder.parts import list_parts, read_footer
from recorder.reader import Run
from recorder.writer import RunExistsError, RunWriter


def test_compaction_keeps_row_groups_and_few_parts(tmp_path, monkeypatch):
    monkeypatch.setitem(parts._MIN_GROUP_ROWS_OF, "decisions", 600)  # a step's rows
    small_parts(tmp_path / "run").finalize()
    for table in ("steps", "layer_stats", "decisions"):
        assert len(part_names(tmp_path / "run", table)) == 1
    [part] = (tmp_path / "run" / "decisions").iterdir()
    groups = read_footer(part).groups
    assert groups.low["step"].tolist() == groups.high["step"].tolist() == list(range(12))


def test_tiny_row_groups_are_joined(tmp_path, monkeypatch):
    monkeypatch.setitem(parts._MIN_GROUP_ROWS_OF, "decisions", 512)
    with RunWriter(tmp_path / "run") as writer:
        for step in range(100):
            writer.log_decisions(
                step, layer=0, router=0, experts_TK=np.zeros((16, 1), int), weights_TK=np.ones((16, 1))
            )
    [part] = (tmp_path / "run" / "decisions").iterdir()
    assert pq.read_metadata(part).num_row_groups == 4  # 512 rows, 32 steps, or more in each but the last
    run = Run(tmp_path / "run")
    assert run.decision_steps().tolist() == list(range(100))
    assert len(run.decisions(57, 0)) == 16


def test_compacted_parts_keep_to_their_size(tmp_path):
    small_parts(tmp_path / "run").flush()
    folder = tmp_path / "run" / "decisions"
    recorder.compact.compact_table(folder, "decisions", 0, max_rows=3000)
    rows = [read_footer(folder / name).num_rows for name in list_parts(folder)]
    assert rows == [3000, 3000, 1200]
    assert Run(tmp_path / "run").decision_steps().tolist() == list(range(12))


@pytest.mark.parametrize("deleted", [0, 5, 12])
def test_killed_while_compacting(tmp_path, deleted):
    """The new part has its name, some of the old ones are gone: each row counts once; and a resume tidies up."""
    process = start(
        """
        import recorder.compact
        from recorder.parts import remove_parts
        def remove_some_and_die(folder, names):
            if names:
                remove_parts(folder, sorted(names)[: int(args[1])])
                os.kill(os.getpid(), signal.SIGKILL)
        recorder.compact.remove_parts = remove_some_and_die
        writer = RunWriter(args[0], flush_steps=1)
        for step in range(12):
            writer.log_step(step, tokens=step)
        writer.finalize()
        """,
        tmp_path / "run",
        deleted,
    )
    assert process.wait() == -signal.SIGKILL
    assert len(part_names(tmp_path / "run", "steps")) == 13 - deleted
    run = Run(tmp_path / "run")
    assert (run.status, run.problems) == ("unfinished", [])
    assert run.steps()["tokens"].to_list() == list(range(12))
    writer = RunWriter(tmp_path / "run", resume=True, **NEVER)
    writer.log_step(12, tokens=12)
    writer.finalize()
    assert len(part_names(tmp_path / "run", "steps")) == 1
    run = Run(tmp_path / "run")
    assert run.steps()["tokens"].to_list() == list(range(13))
    assert run.status == "finished"


def test_a_part_replaced_twice_over_never_comes_back(tmp_path):
    """A compacted part that is compacted again still stands for what the first one replaced."""
    small_parts(tmp_path / "run", range(3)).flush()
    folder = tmp_path / "run" / "steps"
    old = (folder / "part-r00000-000000.parquet").read_bytes()
    recorder.compact.compact_table(folder, "steps", 0)
    writer = RunWriter(tmp_path / "run", resume=True)
    writer.log_step(3, tokens=600)
    writer.finalize()
    (folder / "part-r00000-000000.parquet").write_bytes(old)  # as if its deletion had been lost in a crash
    assert Run(tmp_path / "run").steps()["step"].to_list() == [0, 1, 2, 3]


def test_temporary_files_are_ignored_and_removed_on_resume(tmp_path):
    small_parts(tmp_path / "run", range(2)).flush()
    leftover = tmp_path / "run" / "steps" / ".part-r00000-000002.parquet.abc.tmp"
    leftover.write_bytes(b"half a part")
    run = Run(tmp_path / "run")
    assert (run.problems, len(run.steps())) == ([], 2)
    RunWriter(tmp_path / "run", resume=True)
    assert not leftover.exists()


def test_a_bad_part_survives_compaction_and_stays_named(tmp_path):
    writer = small_parts(tmp_path / "run")
    bad = tmp_path / "run" / "steps" / "part-r00000-000003.parquet"
    bad.write_bytes(bad.read_bytes()[:-1])
    writer.finalize()
    run = Run(tmp_path / "run")
    assert len(run.problems) == 1
    assert run.problems[0].startswith("steps/part-r00000-000003.parquet: ")
    assert run.steps()["step"].to_list() == [step for step in range(12) if step != 3]


def test_polling_while_a_process_writes_and_compacts(tmp_path):
    code = """
        import sys, time
        sys.path.insert(0, sys.argv[2])
        from toy_runs import log_toy_step
        from recorder.writer import RunWriter
        writer = RunWriter(sys.argv[1], flush_steps=1)
        for step in range(60):
            log_toy_step(writer, step, step % 8)
            if step % 20 == 19:  # as often as one could, a compaction in the middle
                from recorder.compact import compact_table
                from recorder.parts import next_sequence
                writer.flush()
                for table in ("steps", "layer_stats", "decisions", "tokens"):
                    compact_table(writer.path / table, table, 0)
                    writer._sequence[table] = next_sequence(writer.path / table, 0)
        writer.finalize()
    """
    here = str(__file__).rsplit("/", 1)[0]
    path = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(path), here])
    while not (path / "run.json").exists():
        time.sleep(0.005)
    kept, seen, polls = Run(path), [(0, 0, 0)], 0
    while process.poll() is None or polls < 3:
        kept.refresh()
        for run in (kept, Run(path)):
            steps = run.decision_steps()
            tokens = len(run.tokens(int(steps[0]))) if len(steps) else 4
            counts = (len(run.steps()), len(run.layer_stats()), len(steps))
            assert run.problems == []
            assert tokens == 4
            assert all(now >= before for now, before in zip(counts, seen[-1], strict=True)), (counts, seen[-1])
            seen.append(counts)
        polls += 1
        time.sleep(0.02)
    assert process.returncode == 0
    kept.refresh()
    assert kept.status == "finished"
    assert (len(kept.steps()), len(kept.layer_stats()), len(kept.decision_steps())) == (60, 60, 60)
    assert len({counts[0] for counts in seen}) > 3, "the reader saw the run grow"


def test_parts_replaced_between_listing_and_reading(tmp_path):
    """A reader that has listed the small parts, and reads after they are gone, finds the new one."""
    writer = good_parts(tmp_path / "run")
    listed, with_footers = Run(tmp_path / "run"), Run(tmp_path / "run")
    assert with_footers.problems == []
    writer.finalize()
    for run in (listed, with_footers):
        assert run.decision_steps().tolist() == list(range(5))
        assert [len(run.decisions(step, 0)) for step in range(5)] == [4] * 5
        assert run.steps()["loss"].to_list() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert run.problems == []
        assert run.refresh()
        assert run.status == "finished"


def unfinished(path, parts=9):
    """A run of small parts whose process is gone."""
    good_parts(path, parts=parts)
    forget_process(path)
    return path


def forget_process(path):
    manifest = json.loads((path / "run.json").read_text())
    manifest["process"]["pid"] = 2**22 + 1  # above the greatest that Linux gives
    (path / "run.json").write_text(json.dumps(manifest))


def test_compact_run(tmp_path):
    path = unfinished(tmp_path / "run")
    leftover = path / "steps" / ".part-r00003-000009.parquet.abc.tmp"
    leftover.write_bytes(b"half a part")
    (path / ".run.json.abc.tmp").write_text("{")
    before = Run(path)
    frames = [before.steps(), before.layer_stats(), before.decisions(3, 0), before.tokens(3)]
    done = compact_run(path)
    assert (done.parts_before, done.parts_after) == (36, 4)
    assert done.bytes_after < done.bytes_before
    after = Run(path)
    assert (after.status, after.problems) == ("unfinished", [])
    again = [after.steps(), after.layer_stats(), after.decisions(3, 0), after.tokens(3)]
    assert all(old.equals(new) for old, new in zip(frames, again, strict=True))
    assert not list(path.rglob("*.tmp"))
    assert compact_run(path).parts_before == 4, "there is nothing to do a second time"


def test_a_run_that_is_being_written_is_left_alone(tmp_path):
    writer = good_parts(tmp_path / "run", parts=3)
    with pytest.raises(RunExistsError, match=r"is still being written by process \d+"):
        compact_run(tmp_path / "run")
    assert len(part_names(tmp_path / "run", "steps")) == 3
    writer.finalize()
    assert compact_run(tmp_path / "run").parts_before == 4


def test_other_ranks_may_outlive_rank_0(tmp_path):
    path = tmp_path / "run"
    good_parts(path)
    other = RunWriter(path, rank=1)
    other.log_step(0, tokens=1)
    other.flush()
    forget_process(path)
    with pytest.raises(RunExistsError, match="rank 1 wrote to .* s ago"):
        compact_run(path)
    part = path / "steps" / "part-r00001-000000.parquet"
    os.utime(part, (time.time() - 61,) * 2)
    assert compact_run(path).parts_after == 5


def test_a_resume_waits_for_a_compaction(tmp_path):
    """Both would write part files of the same numbers."""
    path = unfinished(tmp_path / "run")
    process = start(
        """
        from pathlib import Path
        import recorder.compact
        real = recorder.compact.compact_table
        def slow(folder, table, rank):
            print(table, flush=True)
            time.sleep(0.2)
            real(folder, table, rank)
        recorder.compact.compact_table = slow
        recorder.compact.compact_run(Path(args[0]))
        print("done", time.time(), flush=True)
        """,
        path,
    )
    assert process.stdout.readline() == "steps\n"
    writer = RunWriter(path, resume=True)
    resumed = time.time()
    writer.log_step(9, tokens=1)
    writer.finalize()
    out, err = process.communicate(timeout=60)
    assert not err
    assert float(out.splitlines()[-1].split()[1]) <= resumed
    assert Run(path).steps()["step"].to_list() == list(range(10))


def test_ctrl_c_while_compacting(tmp_path):
    path = unfinished(tmp_path / "run", parts=5)
    code = """
        import sys
        import recorder.compact
        from recorder.cli import main
        real = recorder.compact.write_part
        written = []
        def interrupted(*arguments, **options):
            if len(written) == int(sys.argv[2]):
                raise KeyboardInterrupt
            written.append(real(*arguments, **options))
        recorder.compact.write_part = interrupted
        main(["compact", sys.argv[1]])
    """
    for after in (2, 1):  # of what the first has left: two tables
        line = [sys.executable, "-c", textwrap.dedent(code), str(path), str(after)]
        result = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert result.returncode == 130
        assert "Traceback" not in result.stderr
        run = Run(path)
        assert run.steps()["step"].to_list() == run.decision_steps().tolist() == list(range(5))
        assert run.problems == []
    compact_run(path)
    assert [len(part_names(path, table)) for table in ("steps", "layer_stats", "decisions", "tokens")] == [1] * 4


def test_a_part_damaged_past_its_footer_stays(tmp_path):
    writer = small_parts(tmp_path / "run", range(4))
    writer.flush()
    part = tmp_path / "run" / "decisions" / "part-r00000-000001.parquet"
    content = bytearray(part.read_bytes())
    weights = pq.read_metadata(part).row_group(0).column(6)
    assert weights.path_in_schema.startswith("weights")
    content[weights.data_page_offset + weights.total_compressed_size - 1] ^= 0xFF
    part.write_bytes(content)
    writer.finalize()
    assert part.exists()
    assert len(part_names(tmp_path / "run", "decisions")) == 2
    assert [len(Run(tmp_path / "run").decisions(step, 0)) for step in (0, 2, 3)] == [600] * 3
