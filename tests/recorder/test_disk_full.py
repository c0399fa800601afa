"""A full disk: a small tmpfs in a mount namespace of its own, in a process of its own."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HEAD = """
import os, signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import numpy as np
import pytest
from toy_runs import full_model, log_full_step
from recorder import writer as writer_module
from recorder.reader import Run
from recorder.verify import verify_run
from recorder.writer import RunWriter

disk, kilobytes = Path(sys.argv[2]), sys.argv[3]
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", disk], check=True)
run, filler = disk / "run", disk / "filler"

def open_run(**options):
    return RunWriter(run, manifest=full_model(), flush_steps=2, flush_seconds=1e9, **options)

def fill():
    '''Take all the space that is left.'''
    with filler.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

def log(writer, steps):
    '''Log the steps; the errors that were raised.'''
    errors = []
    for step in steps:
        try:
            log_full_step(writer, step)
        except OSError as error:
            errors.append(error)
    return errors

def temporaries():
    return [str(file) for file in run.rglob("*.tmp")]
"""


def namespace():
    """The command that gives a process mounts of its own; None where there is no such thing here."""
    for command in (["unshare", "-m"], ["unshare", "-rm"]):
        probe = [*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        if shutil.which("unshare") and subprocess.run(probe, capture_output=True).returncode == 0:
            return command
    return None


@pytest.fixture
def on_small_disk(tmp_path):
    own_mounts = namespace()
    if own_mounts is None:
        pytest.skip("neither root nor user namespaces: no small tmpfs can be mounted")

    def run(code, kilobytes=400, expect=0):
        line = [*own_mounts, sys.executable, "-c", HEAD + textwrap.dedent(code)]
        line += [str(Path(__file__).parent), str(tmp_path), str(kilobytes)]
        result = subprocess.run(line, capture_output=True, text=True, timeout=120, env=dict(os.environ))
        assert result.returncode == expect, result.stderr
        return result.stdout

    return run


def test_rows_wait_until_there_is_room_again(on_small_disk):
    on_small_disk(
        """
        writer = open_run()
        assert not log(writer, range(4))
        fill()
        errors = log(writer, range(4, 20))
        assert len(errors) == 1, "it is tried once a second, not at each step"
        assert errors[0].errno == 28
        assert str(run) in str(errors[0]) and "No space left on device" in str(errors[0])
        assert "\\n" not in str(errors[0])
        assert temporaries() == []
        seen = Run(run)
        assert (seen.status, seen.problems) == ("running", [])
        assert seen.steps()["step"].to_list() == [0, 1, 2, 3]
        assert verify_run(run).problems == ()
        with pytest.raises(OSError, match="No space left"):
            writer.flush()
        filler.unlink()
        assert not log(writer, range(20, 24))
        writer.finalize()
        seen = Run(run)
        assert (seen.status, seen.steps()["step"].to_list()) == ("finished", list(range(24)))
        report = verify_run(run)
        assert (report.problems, report.notes) == ((), ())
        assert Run(run).events().empty
        """
    )


def test_the_buffer_is_bounded_and_what_it_refuses_is_an_event(on_small_disk):
    on_small_disk(
        """
        writer = open_run(flush_bytes=20_000)
        assert not log(writer, range(4))
        fill()
        errors = log(writer, range(4, 200))
        assert writer._buffer.num_bytes < 3 * 20_000
        assert "rows were not recorded" in str(errors[-1]) and "No space left" in str(errors[-1])
        writer_module._RETRY_SECONDS = 0.0
        filler.unlink()
        assert not log(writer, range(200, 210))
        writer.finalize()
        seen = Run(run)
        assert seen.status == "finished"
        steps = seen.steps()["step"].to_list()
        assert steps[:5] == [0, 1, 2, 3, 4] and steps[-10:] == list(range(200, 210))
        [event] = seen.events().to_dict("records")
        assert event["kind"] == "recorder_error" and "rows were not recorded" in event["message"]
        """
    )


def test_killed_while_it_is_full(on_small_disk):
    on_small_disk(
        """
        pid = os.fork()
        if not pid:
            writer = open_run()
            log(writer, range(4))
            fill()
            log(writer, range(4, 20))
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        seen = Run(run)
        assert (seen.status, seen.problems) == ("unfinished", [])
        assert seen.steps()["step"].to_list() == [0, 1, 2, 3]
        assert verify_run(run).problems == ()
        """
    )


def test_closed_while_it_is_full(on_small_disk):
    on_small_disk(
        """
        writer = open_run()
        log(writer, range(4))
        fill()
        log(writer, range(4, 20))
        with pytest.raises(OSError, match="No space left"):
            writer.finalize()
        assert temporaries() == []
        seen = Run(run)
        assert seen.status in ("failed", "running"), "running: not even run.json could be replaced"
        assert seen.steps()["step"].to_list() == [0, 1, 2, 3]
        assert verify_run(run).problems == ()
        """
    )


def test_no_room_to_compact(on_small_disk):
    """The rows are all there: a run that stays in many parts is no failure."""
    on_small_disk(
        """
        writer = open_run()
        ids = np.random.default_rng(0).integers(0, 4, (60_000, 2))
        for step in range(4):
            writer.log_decisions(step, layer=1, router=0, experts_TK=ids, weights_TK=np.random.random(ids.shape))
            writer.log_step(step, tokens=len(ids))
        fill()
        with filler.open("r+b") as file:
            file.truncate(filler.stat().st_size - 8192)  # for run.json
        writer.finalize()
        assert temporaries() == []
        seen = Run(run)
        assert (seen.status, len(seen.steps())) == ("finished", 4)
        assert [len(seen.decisions(step, 1)) for step in range(4)] == [60_000] * 4
        assert len(list((run / "decisions").iterdir())) == 2
        """,
        kilobytes=6000,
    )
