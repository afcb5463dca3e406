"""A drill by the operator's command on a running job."""

import re
from pathlib import Path

import pytest

from bench.support.cluster import LocalCluster
from support.ssh_hosts import PYTHON, SshHosts

# Longer than any wait in vain, which ends with a report.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_a_job_takes_a_drill(own_cluster: LocalCluster, text: str, tmp_path: Path) -> None:
    cluster = own_cluster
    job_id = cluster.submit(
        {
            "name": "drilled",
            "model": {"layers": 2, "hidden": 16, "heads": 2, "sequence_length": 16},
            "data": {"text": [text]},
            "training": {"steps": 1_000_000, "global_batch": 6, "microbatch": 2},
            "fault_tolerance": 1,
            "profile": "estimate",
        }
    )
    cluster.wait_step(job_id, 3)
    drill = ("chaos", job_id, "--kinds", "kill-worker,stop-worker", "--seed", "3", "--mtbf", "2s")
    spans = ("--for", "6s", "--stop-for", "1s")
    told = cluster.oobleck(*drill, *spans, "--dry-run").stdout.splitlines()
    assert told[0] == "seed 3"
    strikes = [tuple(line.split()[-2:]) for line in told[1:]]
    assert {kind for kind, _ in strikes} == {"kill-worker", "stop-worker"}
    assert cluster.events(job_id, "worker_lost") == []

    before = cluster.worker_pids()
    output = cluster.oobleck(*drill, *spans, timeout_s=300).stdout
    struck = re.findall(r"(\S+-worker) (\S+) \(pid (\d+)\)", output)
    assert [(kind, node) for kind, node, _ in struck] == strikes
    killed = {int(pid) for kind, _, pid in struck if kind == "kill-worker"}
    assert killed & set(before.values())
    assert not killed & set(cluster.worker_pids().values())
    assert output.count("goes on; longest time without a new step") == len(strikes)
    assert f"{len(strikes)} faults in " in output
    assert re.search(r"[\d.]+ % of the time in useful steps", output)
    assert len(cluster.events(job_id, "worker_lost")) >= len(killed)
    over_ssh(cluster, job_id, tmp_path)
    steps = [line["step"] for line in cluster.metrics(job_id)]
    assert steps == list(range(1, len(steps) + 1))


def over_ssh(cluster: LocalCluster, job_id: str, folder: Path) -> None:
    """The same on nodes that are reached by ssh."""
    with SshHosts(folder, ["n1", "n2"]) as hosts:
        file = folder / "hosts.txt"
        file.write_text("".join(map(hosts.line, hosts.names)))
        login = ("--identity", hosts.identity, "--known-hosts", hosts.known_hosts)
        drill = ("chaos", job_id, "--kinds", "kill-worker", "--seed", "3", "--mtbf", "1s")
        drill += ("--for", "2s", "--ssh", str(file), *map(str, login), "--python", PYTHON)
        before = set(cluster.worker_pids().values())
        output = cluster.oobleck(*drill, timeout_s=300).stdout
        struck = re.findall(r"kill-worker (\S+) \(pid (\d+) on 127.0.0.1:(\d+)\)", output)
        assert struck, output
        assert {int(port) for _, _, port in struck} <= set(hosts.ports.values())
        assert int(struck[0][1]) in before
        assert output.count("goes on; longest time without a new step") == len(struck)
