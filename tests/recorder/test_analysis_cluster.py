"""The same counts from a real Dask cluster of separate worker processes, also when one of them is killed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from analysed_runs import record

from recorder import Run
from recorder.analysis import analyse

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    record(path, steps=range(24), probes=(0, 10, 23), flush_every=1).flush()
    return Run(path)


@pytest.fixture(scope="module")
def cluster():
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None
    ) as made:
        yield made


def same_tables(one, other):
    for name in one.tables:
        assert one.table(name).equals(other.table(name)), name


def test_a_cluster_gives_the_same_to_the_last_digit(run, cluster):
    with distributed.Client(cluster) as client:
        found = analyse(run, executor=client.get_executor(pure=False), keep=False)
    assert found.counted_jobs > 24
    same_tables(found, analyse(run, keep=False))


def test_a_killed_worker_does_not_lose_the_job(run, cluster):
    killed = []

    def kill_one(done, of):
        if done == 3:
            pid = next(worker.process.pid for worker in cluster.workers.values() if worker.process)
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    with distributed.Client(cluster) as client:
        found = analyse(run, executor=client.get_executor(pure=False), keep=False, progress=kill_one)
        assert len(killed) == 1
        deadline = time.monotonic() + 60
        while killed[0] in {worker.process.pid for worker in cluster.workers.values() if worker.process}:
            assert time.monotonic() < deadline, "a new worker takes the place of the killed one"
            time.sleep(0.1)
    same_tables(found, analyse(run, keep=False))


@pytest.mark.slow
def test_the_command_on_a_cluster(run, cluster):
    command = [sys.executable, "-m", "recorder.cli", "analyse", str(run.path), "--json"]
    printed = subprocess.run(
        [*command, "--scheduler", cluster.scheduler_address], capture_output=True, text=True, timeout=120
    )
    assert printed.returncode == 0, printed.stderr
    report = json.loads(printed.stdout)
    assert report["kept"] is True
    assert report["counted_jobs"] > 24
    assert (run.path / "analysis" / "loads.parquet").exists()
    again = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120).stdout)
    assert again["counted_jobs"] == 0
    assert again["layers"] == report["layers"]


@pytest.mark.slow
def test_no_workers_and_a_scheduler_that_goes_are_told_in_a_line(run):
    shutil.rmtree(run.path / "analysis", ignore_errors=True)  # what another test has kept needs no worker
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    listening.close()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    host, port = address.removeprefix("tcp://").split(":")
    options = ["--host", host, "--port", port, "--no-dashboard"]
    scheduler = subprocess.Popen([sys.executable, "-m", "distributed.cli.dask_scheduler", *options], **quiet)
    try:
        command = [sys.executable, "-m", "recorder.cli", "analyse", str(run.path), "--scheduler", address]
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex((host, int(port))):
            assert time.monotonic() < deadline, "the scheduler starts"
            time.sleep(0.1)
        asked = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        first = asked.stderr.readline()
        assert first == f"routescope: {address} has no workers: waiting for one\n"
    finally:
        scheduler.kill()
        scheduler.wait()
    printed, errors = asked.communicate(timeout=120)
    assert (asked.returncode, printed) == (1, "")
    assert errors == f"routescope: --scheduler {address}: the scheduler has gone; what was kept so far stays\n"
