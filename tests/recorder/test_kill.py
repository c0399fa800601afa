"""A writer killed at any moment: its run opens, holds all that had been flushed, and shows as unfinished."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from toy_runs import full_model, full_step, log_full_step

from recorder.reader import Run, RunNotFoundError
from recorder.schema import lists_to_matrix
from recorder.verify import verify_run
from recorder.writer import RunWriter

HEAD = """
import os, random, signal, sys, time
sys.path.insert(0, sys.argv[1])
from toy_runs import compact_while_writing, full_model, log_full_step
from recorder.writer import RunWriter
import pandas  # which pyarrow loads when it first makes an array: here, before the forks
root, args = sys.argv[2], sys.argv[3:]

def child(work):
    '''Run work(tell) in a fork of this process, in which everything is loaded already: its pid and what it tells.'''
    told, tell = os.pipe()
    pid = os.fork()
    if pid:
        os.close(tell)
        return pid, os.fdopen(told)
    code = 1
    try:
        work(lambda what: os.write(tell, f"{what}\\n".encode()))
        code = 0
    finally:
        os._exit(code)

def write(path, tell, steps, finalize):
    writer = RunWriter(path, manifest=full_model(), flush_steps=3, flush_seconds=1e9)
    tell(-1)
    for step in range(steps):
        log_full_step(writer, step)
        if step % 3 == 2:
            tell(step)
        if step % 12 == 11:
            compact_while_writing(writer)
    if finalize:
        writer.finalize()
"""


def run_script(code, *arguments, timeout=240):
    """What the script prints, line by line as words."""
    here = str(Path(__file__).parent)
    line = [sys.executable, "-c", HEAD + textwrap.dedent(code), here, *map(str, arguments)]
    result = subprocess.run(line, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, result.stderr
    return [words.split() for words in result.stdout.splitlines()]


def check_killed(path, flushed):
    """All steps that were flushed are there, as they were logged, and none in part; how many steps there are."""
    run = Run(path)
    assert (run.status, run.problems) == ("unfinished", [])
    steps = run.steps()["step"].to_list()
    assert steps == list(range(len(steps)))
    assert len(steps) > flushed
    assert run.steps()["loss"].to_list() == [float(step) for step in steps]
    for router in (0, 1):
        loads = run.load(2 * router + 1)[: len(steps)]
        assert [load.tolist() for load in loads] == [full_step(step)[router][2].tolist() for step in steps]
        for step in steps[-1:]:
            decisions = run.decisions(step, 2 * router + 1)
            assert lists_to_matrix(decisions["experts"]).tolist() == full_step(step)[router][0].tolist()
    assert verify_run(path).problems == ()
    return len(steps)


def check_resumed(path, steps):
    """The run goes on from its end, and nothing half-done is left."""
    writer = RunWriter(path, resume=True)
    for step in range(steps, steps + 2):
        log_full_step(writer, step)
    writer.finalize()
    report = verify_run(path)
    assert (report.status, report.problems, report.notes) == ("finished", (), ())
    assert Run(path).steps()["step"].to_list() == list(range(steps + 2))


def test_a_resume_removes_what_a_kill_left_of_run_json(tmp_path):
    """Killed between the writing of a new run.json and its renaming; seldom met by random kills."""
    writer = RunWriter(tmp_path / "run", manifest=full_model())
    log_full_step(writer, 0)
    writer.finalize("cancelled")
    half = tmp_path / "run" / ".run.json.0123456789abcdef0123456789abcdef.tmp"
    half.write_text("{")
    assert verify_run(tmp_path / "run").notes != ()
    check_resumed(tmp_path / "run", 1)
    assert not half.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks of one process, to load everything once")
def test_killed_at_50_random_moments(tmp_path):
    killed = run_script(
        """
        chance = random.Random(int(args[0]))
        for number in range(50):
            pid, told = child(lambda tell: write(f"{root}/{number}", tell, 100_000, False))
            lines = [told.readline() for _ in range(chance.randint(1, 5))]  # so many flushes, and then some time more
            time.sleep(chance.uniform(0, 0.04))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            print(number, (lines + told.readlines())[-1].strip(), flush=True)
        """,
        tmp_path,
        20260101,
    )
    assert len(killed) == 50
    found = [check_killed(tmp_path / number, int(flushed)) for number, flushed in killed]
    assert len(set(found)) > 3, "the moments differ"
    for number, steps in list(enumerate(found))[::10]:
        check_resumed(tmp_path / str(number), steps)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks of one process, to load everything once")
@pytest.mark.parametrize("moment", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_killed_at_every_rename_and_removal(tmp_path, moment):
    """Each time a file gets or loses its name, of a short run from its creation to its last compaction."""
    killed = run_script(
        """
        def deadly(real, state):
            def call(*arguments, **options):
                state[0] -= 1
                if not state[0] and args[0] == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                result = real(*arguments, **options)
                if not state[0] and args[0] == "after":
                    os.kill(os.getpid(), signal.SIGKILL)
                return result
            return call

        def work(tell, number):
            state = [number + 1]
            for name in ("replace", "link", "unlink"):
                setattr(os, name, deadly(getattr(os, name), state))
            write(f"{root}/{number}", tell, 7, True)

        number = code = -1
        while code != 0:
            number += 1
            pid, told = child(lambda tell: work(tell, number))
            lines = told.readlines()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert code in (0, -signal.SIGKILL), code
            print(number, code, (lines or ["none"])[-1].strip(), flush=True)
        """,
        tmp_path,
        moment,
    )
    assert len(killed) > 30
    for number, code, flushed in killed:
        path = tmp_path / number
        if code == "0" or status_of(path) == "finished":  # the last kill comes when the run is closed already
            assert verify_run(path).problems == ()
            assert len(Run(path).steps()) == 7
        elif flushed == "none":
            try:
                assert Run(path).status == "unfinished"
            except RunNotFoundError:
                assert not list(path.glob("*/*.parquet"))
        else:
            steps = check_killed(path, int(flushed))
            if int(number) % 10 == 0:
                check_resumed(path, steps)


def status_of(path):
    try:
        return Run(path).status
    except RunNotFoundError:
        return None
