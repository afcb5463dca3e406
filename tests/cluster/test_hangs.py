"""What hangs is found out and replaced; what only has to wait is left alone."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import psutil
import pytest

from bench.support.client import Record
from bench.support.cluster import LocalCluster
from bench.support.preloaded import Preloaded
from oobleck.host.detection import DETECTIONS
from support import models_after_hang
from support.clusters import end_jobs, failures, make_whole
from support.visitor import Dashboard
from support.waiting import is_stopped, until

# Longer than any wait in vain, which ends with a report.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NODES = {"n1", "n2", "n3"}
#: Causes of plans that answer how fast a worker is.
PACE = {"worker slow", "worker well"}
#: Each in the jobs of one name alone, since agents learn of faults when they start.
FAULTS = [
    {
        "worker": {"node": "n2", "slot": 0},
        "point": "before:Forward",
        "step": 6,
        "job": "deadlocked",
        "action": "hang",
    },
    {
        "worker": {"node": "n3", "slot": 0},
        "point": "before:Vote",
        "step": 6,
        "job": "unanswered",
        "action": "hold",
    },
]


@pytest.fixture(scope="module")
def standing(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[LocalCluster]:
    state_dir = tmp_path_factory.mktemp("hangs") / "state"
    options = ["--detection", "fast", "--master-flag=--start-timeout-s=100"]
    with LocalCluster(
        3, state_dir=state_dir, fault_plan=FAULTS, options=options, preloaded=preloaded
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(standing: LocalCluster) -> Iterator[LocalCluster]:
    make_whole(standing, NODES)
    yield standing
    end_jobs(standing)


def submit(cluster: LocalCluster, text: str, name: str) -> str:
    """A job whose layers are each with several nodes."""
    return cluster.submit(
        {
            "name": name,
            "model": {"layers": 2, "hidden": 32, "heads": 2, "sequence_length": 32},
            "data": {"text": [text]},
            "training": {"steps": 100_000, "global_batch": 8, "microbatch": 1},
            "fault_tolerance": 1,
            "profile": "estimate",
        }
    )


def first(cluster: LocalCluster, job_id: str, kind: str) -> Record:
    cluster.wait(lambda: bool(cluster.events(job_id, kind)), f"an event {kind}")
    return cluster.events(job_id, kind)[0]


def cause_of_failure(cluster: LocalCluster, job_id: str) -> Record:
    """Of the first one that is over."""
    cluster.wait(lambda: bool(failures(cluster.events(job_id))), "the recovery")
    cause: Record = failures(cluster.events(job_id))[0]["root_cause"]
    return cause


def go_on(cluster: LocalCluster, job_id: str) -> None:
    cluster.wait_step(job_id, cluster.last_step(job_id) + 3)
    steps = [line["step"] for line in cluster.metrics(job_id)]
    assert steps == list(range(1, len(steps) + 1))


def test_a_stopped_process_is_replaced(cluster: LocalCluster, text: str) -> None:
    # Nothing tells of it: its process is there, its connections are open, its agent is well.
    job_id = submit(cluster, text, "stopped")
    cluster.wait_step(job_id, 5)
    before = cluster.worker_pids()
    os.kill(before["n2/0"], signal.SIGSTOP)
    record = first(cluster, job_id, "reconfigured")
    go_on(cluster, job_id)
    assert not psutil.pid_exists(before["n2/0"])
    assert (record["workers_lost"], record["nodes_lost"]) == (["n2/0"], [])
    cause = cause_of_failure(cluster, job_id)
    assert cause["kind"] == "hang"
    assert "a signal has stopped it" in cause["reason"]


def test_a_hang_and_the_jobs_own_error_are_two_incidents(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """The error strikes while the others go on without the worker that hangs."""
    shutil.copy(models_after_hang.__file__, tmp_path / "my_model.py")
    hung = tmp_path / "hung"
    made = {
        "name": "erring",
        "model": {"python": "my_model:model", "arguments": {"pid_file": str(hung)}},
        "data": {"python": "my_model:Points"},
        "training": {"steps": 100_000, "global_batch": 12, "microbatch": 1},
        "fault_tolerance": 1,
        "profile": "estimate",
    }
    (tmp_path / "job.yaml").write_text(json.dumps(made))
    job_id = cluster.oobleck("submit", str(tmp_path / "job.yaml")).stdout.strip()
    cluster.wait_step(job_id, 5)
    pid = cluster.worker_pids()["n2/0"]
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_stopped(pid), "the worker is stopped")
    (tmp_path / "pid").write_text(str(pid))
    (tmp_path / "pid").rename(hung)
    assert cluster.wait_end(job_id) == "failed"

    hang = r"worker n2/0 \(rank \d\) hung: .* for \d+ s"
    error = r"the job's own error on worker n\d/0 \(rank \d.*?\): model: .* .*ValueError: .*"
    told = cluster.oobleck("events", job_id, "--incidents").stdout
    blocks = re.findall(r"incident (\d): (.*)", told)
    assert [number for number, _ in blocks] == ["1", "2"], told
    assert re.match(hang, blocks[0][1]), told
    assert re.match(error, blocks[1][1]), told
    # The process in place of the hung one may have the error as well.
    assert "hung" not in told.partition("incident 2: ")[2], told
    status = " ".join(cluster.oobleck("status", job_id).stdout.split())
    assert re.search(rf"incident 2, \S+ \S+: {error}", status), status
    listed = r'<li class="bad"><a [^>]*>incident (\d)</a>.*?<br>(.*?)</li>'
    with Dashboard(tmp_path, "--master", cluster.address) as dashboard:
        visitor = dashboard.visitor()

        def shown() -> list[str]:
            return re.findall(listed, visitor.get(f"/jobs/{job_id}").text)

        until(lambda: len(shown()) > 1, "both on the page")
        (newer, _), (older, hung_then) = shown()
    assert (newer, older) == ("2", "1")
    assert re.match(rf"{hang}; then the job failed by another error", unescape(hung_then))


def test_a_thread_that_hangs_is_found_out_and_told_where(cluster: LocalCluster, text: str) -> None:
    job_id = submit(cluster, text, "deadlocked")
    record = first(cluster, job_id, "reconfigured")
    go_on(cluster, job_id)
    assert record["workers_lost"] == ["n2/0"]
    cause = cause_of_failure(cluster, job_id)
    assert cause["kind"] == "hang"
    assert "its training thread hangs" in cause["reason"]
    logs = cluster.oobleck("logs", job_id, "--node", "n2").stdout
    assert "worker/runtime/control.py" in logs.replace("oobleck/worker", "worker"), logs[-3000:]


def test_where_all_wait_for_each_other_they_meet_anew(cluster: LocalCluster, text: str) -> None:
    job_id = submit(cluster, text, "unanswered")
    record = first(cluster, job_id, "reconfigured")
    go_on(cluster, job_id)
    assert (record["rule"], record["workers_lost"], record["nodes_lost"]) == ("regroup", [], [])
    assert len(cluster.events(job_id, "reconfigured")) == 1


def test_a_master_that_was_stopped_convicts_nobody(cluster: LocalCluster, text: str) -> None:
    job_id = submit(cluster, text, "patient")
    cluster.wait_step(job_id, 5)
    pids = cluster.worker_pids()
    fast = DETECTIONS["fast"]
    os.kill(cluster.master_pid, signal.SIGSTOP)
    try:
        # Long enough for leases to end, and for agents to give up their streams.
        time.sleep(2 * fast.lease_s + fast.ping_every_s)
    finally:
        os.kill(cluster.master_pid, signal.SIGCONT)
    cluster.wait(lambda: cluster.live() == NODES, "all agents", poll_s=0.2)
    go_on(cluster, job_id)
    # On a busy machine a worker may be slow in truth, whoever was stopped.
    changes = [e for e in cluster.events(job_id, "reconfigured") if e["cause"] not in PACE]
    assert [(e["cause"], e["nodes_lost"], e["workers_lost"], e["reason"]) for e in changes] == []
    assert cluster.worker_pids() == pids
