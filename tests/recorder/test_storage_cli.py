"""The `routescope` command on runs in an object store: a real S3 server, and a real process where it writes there."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from in_process import routescope
from test_cli import SMALL, command, run
from toy_runs import layer, model, small_parts

from recorder import Run, RunWriter, list_runs, storage
from recorder.manifest import read_manifest, replace_manifest
from recorder.storage import locate


def test_record_runs_and_summary(s3):
    out = f"{s3}/runs"
    result = run("record", *SMALL, "--out", out, "--run-id", "first", "--name", "A name")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"{out}/first"
    stored = Run(f"{out}/first")
    assert (stored.status, stored.name, stored.last_step) == ("finished", "A name", 5)
    [row] = json.loads(routescope("runs", out, "--json").stdout)
    assert (row["run_id"], row["path"], row["status"]) == ("first", f"{out}/first", "finished")
    told = json.loads(routescope("summary", f"{out}/first", "--json").stdout)
    assert (told["last_step"], [layer["layer"] for layer in told["layers"]]) == (5, [1, 3])
    again = routescope("record", *SMALL, "--out", out, "--run-id", "first")
    assert again.returncode == 2
    assert f"{out}/first already holds a run" in again.stderr


def test_a_local_folder_of_that_name_is_never_made(s3, tmp_path):
    result = routescope("record", *SMALL, "--out", f"{s3}/runs", "--steps", "2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == []
    assert len(list_runs(f"{s3}/runs")) == 1


UNREACHABLE = ("{s3}/runs?endpoint_override=http://127.0.0.1:1", "cannot be reached")
NO_BUCKET = ("s3://no-such-bucket/runs", "there is no")
RECORD = ["record", *SMALL, "--out"]


@pytest.mark.parametrize(
    ("words", "uri", "said"),
    [
        *((words, *case) for words in (["runs"], ["summary"], ["app"], RECORD) for case in (UNREACHABLE, NO_BUCKET)),
        (["runs"], "s3://", "names no bucket"),
        (["summary"], "nowhere://bucket/runs", "nowhere"),
        (RECORD, "s3://bucket/runs?speed=high", "option speed is unknown"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_is_said_in_one_line(s3, words, uri, said):
    uri = uri.format(s3=s3)
    started = time.monotonic()
    result = routescope(*words, uri)
    assert result.returncode in (1, 2)
    lines = [line for line in result.stderr.splitlines() if "step/s" not in line and line.strip()]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("routescope: ")
    assert said in lines[0]
    assert uri.partition("?")[0] in lines[0]
    assert time.monotonic() - started < 60


def test_nothing_is_there(s3):
    assert "nothing is stored under it" in routescope("runs", f"{s3}/none").stderr
    result = routescope("summary", f"{s3}/none")
    assert result.returncode == 1
    assert f"no run at {s3}/none: nothing is stored under it" in result.stderr


def test_no_credentials(s3, tmp_path):
    """moto asks nobody for credentials, so ask a server that refuses: whatever it is, one line and the URI."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
    refusing = """
import http.server
class Refuse(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()
    do_HEAD = do_PUT = do_GET
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
    with subprocess.Popen(
        [sys.executable, "-c", refusing], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        try:
            uri = f"s3://bucket/run?endpoint_override=http://127.0.0.1:{server.stdout.readline().decode().strip()}"
            result = subprocess.run(
                command("summary", uri), capture_output=True, text=True, timeout=60, env=environment
            )
        finally:
            server.kill()
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert "s3://bucket/run" in line
    assert "access is denied; set AWS_ACCESS_KEY_ID" in line


def test_damage_is_told(s3):
    writer = small_parts(f"{s3}/one", steps=range(3))
    (writer.path / "steps" / "part-r00000-000001.parquet").put(b"")
    result = routescope("summary", f"{s3}/one")
    assert result.returncode == 0
    assert f"{s3}/one: cannot be read, and is left out: steps/part-r00000-000001.parquet" in result.stderr
    assert (locate(s3) / "one" / "run.json").is_file()


def never_closed(uri):
    """Six steps in six parts of each table, by a writer that is gone."""
    writer = RunWriter(uri, manifest=model(layer(0, 0, 2, top_k=1)), flush_steps=1, flush_seconds=1e9)
    ids, numbers = np.array([[0], [1], [0], [1]]), np.arange(4)
    for step in range(6):
        writer.log_tokens(step, sequence_T=numbers // 2, position_T=numbers % 2)
        writer.log_decisions(step, layer=0, router=0, experts_TK=ids, weights_TK=np.ones((4, 1)))
        half = np.ones(2) / 2
        writer.log_layer_stats(
            step, layer=0, router=0, tokens=4, load=np.array([2, 2]), gate_mass=4 * half, mean_prob=half
        )
        writer.log_step(step, tokens=4)
    gone = {"process": None, "heartbeat_at": "2026-01-01T00:00:00+00:00"}
    replace_manifest(locate(uri), read_manifest(locate(uri)) | gone)


def test_verify_and_compact(s3):
    uri = f"{s3}/runs/killed"
    never_closed(uri)
    before = Run(uri).layer_stats()
    checked = json.loads(routescope("verify", uri, "--json").stdout)
    assert (checked["problems"], checked["status"], checked["path"], checked["parts"]) == ([], "unfinished", uri, 24)
    done = routescope("compact", uri)
    assert done.returncode == 0, done.stderr
    assert f"{uri}: 24 parts -> 4" in done.stdout
    assert Run(uri).layer_stats().equals(before)
    (part,) = storage.files(locate(uri) / "decisions", ".parquet")
    (locate(uri) / "decisions" / part).put(b"not Parquet")
    broken = routescope("verify", uri)
    assert broken.returncode == 1
    assert f"decisions/{part}: " in broken.stdout


def test_verify_and_compact_of_nothing(s3):
    for word in ("verify", "compact"):
        result = routescope(word, f"{s3}/runs/none")
        assert result.returncode == 1
        assert result.stderr == f"routescope: no run at {s3}/runs/none: nothing is stored under it\n"
