"""Mistakes of operators and strangers: each gets an answer, and the running job none of it."""

import socket
import subprocess
from pathlib import Path

import pytest

from bench.support.cluster import LocalCluster
from support.forked import run_forked

# Longer than any wait in vain, which ends with a report.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

JOB = """\
name: {name}
model: {{kind: gpt, layers: 4, hidden: 32, heads: 2, sequence_length: 32}}
data: {{text: ["{text}"]}}
training: {{steps: 100000, global_batch: 8, microbatch: {microbatch}}}
fault_tolerance: 0
{more}
"""


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


@pytest.mark.usefixtures("quick_start")
def test_mistakes_are_answered_and_do_not_disturb_a_running_job(
    small_cluster: LocalCluster, text: str, tmp_path: Path
) -> None:
    cluster = small_cluster
    master = ("--master", cluster.address)

    others = {job["job_id"] for job in cluster.jobs()}
    defaults = {"microbatch": "1", "more": ""}
    good = tmp_path / "good.yaml"
    good.write_text(JOB.format(name="good", text=text, **defaults))
    job_id = run_forked("oobleck", "submit", str(good), *master).stdout.strip()
    cluster.wait_step(job_id, 3)
    workers = cluster.worker_pids()

    make_mistakes(cluster, text, tmp_path)
    cluster.wait_step(job_id, cluster.last_step(job_id) + 5)
    assert cluster.worker_pids() == workers
    assert cluster.status(job_id)["generation"] == 1
    assert {job["job_id"] for job in cluster.jobs()} - others == {job_id}


def make_mistakes(cluster: LocalCluster, text: str, tmp_path: Path) -> None:
    """Each is answered."""
    master = ("--master", cluster.address)
    defaults = {"microbatch": "1", "more": ""}
    bad = tmp_path / "bad.yaml"
    for changes, expected in [
        ({"more": "trainig: 1"}, "bad.yaml:6: unknown key 'trainig'; did you mean 'training'?"),
        ({"microbatch": "3"}, "does not divide global_batch"),
        ({"microbatch": "many"}, "bad.yaml:4: "),
        ({"text": "/nowhere/*.txt"}, "/nowhere/*.txt"),
    ]:
        bad.write_text(JOB.format(**{"name": "bad", "text": text, **defaults, **changes}))
        done = run_forked("oobleck", "submit", str(bad), *master)
        assert done.returncode == 2
        assert expected in one_line(done)

    twin = run_forked("oobleck-agent", *master, "--name", "n1")
    assert twin.returncode == 2
    # Before it is refused for good it says that it tries on: the other one might be dead.
    told = [line for line in twin.stderr.splitlines() if " INFO " not in line]
    *trying, last = [line for line in told if "the agent runs as root" not in line]
    assert "n1 is in use by a live agent" in last
    assert all("no session, retrying" in line for line in trying), twin.stderr
    assert "Traceback" not in twin.stderr
    second = run_forked(
        "oobleck-master", "--listen", cluster.address, "--state-dir", str(tmp_path / "s")
    )
    assert second.returncode == 2
    assert cluster.address in one_line(second)
    same_state = run_forked(
        "oobleck-master", "--listen", "127.0.0.1:0", "--state-dir", str(cluster.state_dir)
    )
    assert same_state.returncode == 2
    assert "another master" in one_line(same_state)
    missing = run_forked("oobleck", "status", "no-such-job", *master)
    assert missing.returncode == 3
    host, _, port = cluster.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 64)


def test_local_refuses_more_workers_than_sense() -> None:
    done = run_forked("oobleck", "local", "--nodes", "100000", "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert "--oversubscribe" in one_line(done)
