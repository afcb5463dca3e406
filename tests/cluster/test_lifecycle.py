"""What an operator sees of a running job when nodes and workers come and go."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.support.client import BIN, Record
from bench.support.cluster import LocalCluster
from bench.support.daemons import children_of, descendants
from bench.support.preloaded import Preloaded
from oobleck.agent import metrics as of_agent
from oobleck.host.metrics import Family
from oobleck.master import metrics as of_master
from oobleck.master.metrics import jobs, nodes, own
from support.clusters import bring_into, failures, job
from support.folders import ROOT
from support.waiting import PATIENCE_S, all_gone, until

_SERVED = re.compile(r"metrics are served address=(\S+)")


class Scraped:
    def __init__(self, address: str) -> None:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=240) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
        #: Also of those without a value.
        self.names = {f"{f.name}_total" if f.type == "counter" else f.name for f in families}
        self._values = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    def __call__(self, family: Family, end: str = "", **labels: str) -> float:
        """0: there is none."""
        key = family.name + end, tuple(sorted(labels.items()))
        return self._values.get(key, 0.0)


def address_of(log: Path) -> str:
    """Where the daemon that started last of those with this log serves them."""
    return _SERVED.findall(log.read_text())[-1]


# Longer than any wait in vain, which ends with a report.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def go_on(cluster: LocalCluster, job_id: str, steps: int = 3) -> None:
    cluster.wait_step(job_id, cluster.last_step(job_id) + steps)


def wait_for_waiting(cluster: LocalCluster, job_id: str) -> None:
    cluster.wait(
        lambda: cluster.status(job_id)["state"] == "waiting for nodes",
        "the job to wait",
        poll_s=0.3,
    )


def test_lost_node_and_its_return(small_cluster: LocalCluster, text: str) -> None:
    cluster = small_cluster
    job_id = cluster.submit(job(text))
    cluster.wait_step(job_id, 5)
    before = cluster.worker_pids()
    master = address_of(cluster.state_dir / "log" / "master.log")
    at_first = Scraped(master)
    assert at_first(jobs.STATE, job_id=job_id, state="running") == 1
    assert at_first(jobs.CHANGES, job_id=job_id) == at_first(jobs.RECOVERIES, job_id=job_id) == 0
    assert at_first(nodes.NODES, state="live") == 3
    cluster.kill_node("n2")
    cluster.wait(lambda: len(cluster.events(job_id, "reconfigured")) == 1, "the recovery")
    go_on(cluster, job_id)
    after = cluster.worker_pids()
    assert {w: pid for w, pid in after.items() if w in ("n1/0", "n3/0")} == {
        w: pid for w, pid in before.items() if w in ("n1/0", "n3/0")
    }, "survivors must keep their processes"
    record = cluster.events(job_id, "reconfigured")[0]
    assert record["nodes_lost"] == ["n2"]
    assert sum(record["phases"].values()) == pytest.approx(record["total_s"], abs=1e-6)
    assert_counted(cluster, job_id, master, at_first, record)

    bring_into(cluster, job_id, "n2", "--metrics-listen", "127.0.0.1:0")
    cluster.wait(lambda: len(cluster.events(job_id, "reconfigured")) == 2, "the return")
    record = cluster.events(job_id, "reconfigured")[1]
    assert (record["rule"], record["nodes_joined"], record["redo_step"]) == ("join", ["n2"], None)
    go_on(cluster, job_id)
    status = cluster.status(job_id)
    assert status["state"] == "running"
    assert status["generation"] == 3
    steps = [line["step"] for line in cluster.metrics(job_id)]
    assert steps == list(range(1, len(steps) + 1))

    agent = Scraped(address_of(cluster.log))
    assert {family.name for family in of_agent.FAMILIES} <= agent.names
    assert agent(of_agent.UP, slot="0") == agent(of_agent.HEARD) == 1
    assert agent(of_agent.RESIDENT, slot="0") > 1 << 20
    assert 0 < agent(of_agent.AVAILABLE) < agent(of_agent.MEMORY)
    assert agent(of_agent.SENT, interface="lo") > 0


def assert_counted(
    cluster: LocalCluster, job_id: str, master: str, at_first: Scraped, record: Record
) -> None:
    """The master's metrics tell the same of one lost node as the job's files do."""
    known = cluster.last_step(job_id)

    def read() -> bool:
        nonlocal page
        page = Scraped(master)
        return page(jobs.COMMITTED, job_id=job_id) >= known

    page = at_first
    cluster.wait(read, "metrics of the last step", poll_s=0.2)
    assert {family.name for family in of_master.FAMILIES} <= page.names
    committed = int(page(jobs.COMMITTED, job_id=job_id))
    lines = [line for line in cluster.metrics(job_id) if line["step"] <= committed]
    assert len(lines) == committed == page(jobs.COUNTED, job_id=job_id)
    trained_s = sum(line["step_seconds"] for line in lines)
    assert page(jobs.TRAINED, job_id=job_id) == pytest.approx(trained_s)
    assert page(jobs.TOKENS, job_id=job_id) == sum(line["tokens"] for line in lines)
    assert page(jobs.LOSS, job_id=job_id) == pytest.approx(lines[-1]["loss"])
    assert 0 < page(jobs.GOODPUT, job_id=job_id) <= 1

    assert page(jobs.CHANGES, job_id=job_id) == page(jobs.RECOVERIES, job_id=job_id) == 1
    told = {phase: page(jobs.PHASES, job_id=job_id, phase=phase) for phase in record["phases"]}
    assert told == pytest.approx(record["phases"])
    assert page(jobs.MOVED, job_id=job_id) == record["received_bytes"]
    assert page(jobs.REDONE, job_id=job_id) == (record["redo_step"] is not None)
    cause = record["cause"]
    ways = [one(jobs.RECONFIGURATION, "_count", cause=cause) for one in (at_first, page)]
    assert ways[1] == ways[0] + 1
    lost = [sum(one(nodes.LOST, cause=how) for how in nodes.LOST_BY) for one in (at_first, page)]
    assert lost[1] == lost[0] + 1
    assert page(nodes.NODES, state="live") == 2
    assert page(own.CALLS, method="Submit", code="OK") > 0
    assert page(own.COMMIT, "_count") > at_first(own.COMMIT, "_count") > 0


def test_worker_killed_alone_is_replaced(small_cluster: LocalCluster, text: str) -> None:
    cluster = small_cluster
    job_id = cluster.submit(job(text, training={"steps": 100_000, "global_batch": 8}))
    cluster.wait(lambda: len(cluster.worker_pids()) == 3, "all workers", poll_s=0.3)
    cluster.wait_step(job_id, 5)
    before = cluster.worker_pids()
    killed = cluster.kill_worker("n3")
    cluster.wait(lambda: bool(failures(cluster.events(job_id))), "the recovery")
    go_on(cluster, job_id)
    after = cluster.worker_pids()
    assert after.keys() == before.keys()
    assert after["n3/0"] != killed
    assert {w for w in after if after[w] == before[w]} == {"n1/0", "n2/0"}
    record = cluster.events(job_id, "reconfigured")[-1]  # a late node may have joined before
    assert (record["rule"], record["workers_lost"], record["nodes_lost"]) == (
        "replace",
        ["n3/0"],
        [],
    )
    (incident,) = failures(cluster.events(job_id))
    cause = incident["root_cause"]
    assert (cause["worker"], cause["pid"], cause["signal"]) == ("n3/0", killed, "SIGKILL")
    assert incident["outcome"] == "recovered"
    assert {seen["by"] for seen in incident["witnesses"]} >= {"agent"}
    assert [other for other in incident["also_lost"] if not other["consequence"]] == []
    told = cluster.oobleck("events", job_id, "--incidents").stdout
    assert f"pid {killed}) was killed by SIGKILL; recovered in " in told
    lines = cluster.oobleck("events", job_id, "--policies", "--json").stdout.splitlines()
    (replaced,) = [one for one in map(json.loads, lines) if one["rule"] == "replace"]
    assert (replaced["policy"], replaced["n"]) == ("templates", 1)
    assert replaced["stall_s"]["happened"] > 0 < replaced["step_s"]["expected"]
    assert cluster.status(job_id)["incidents"] >= incident["incident"]
    assert "incident    " in cluster.oobleck("status", job_id).stdout


def test_ctrl_c_of_an_agent_is_known_at_once(small_cluster: LocalCluster, text: str) -> None:
    cluster = small_cluster
    job_id = cluster.submit(job(text))
    cluster.wait_step(job_id, 5)
    os.kill(cluster.agents.pop("n3"), signal.SIGINT)
    cluster.wait(lambda: bool(cluster.events(job_id, "node_lost")), "the loss")
    (lost,) = cluster.events(job_id, "node_lost")
    assert (lost["node"], lost["cause"]) == ("n3", "left")
    assert lost["detect_s"] < 1.0, "no lease was waited for"
    go_on(cluster, job_id)


def test_a_node_with_another_torch_stays_out_and_is_told(
    small_cluster: LocalCluster, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = small_cluster
    job_id = cluster.submit(job(text))
    cluster.wait_step(job_id, 3)
    metadata = tmp_path / "torch-1.13.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.13.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cluster.start_node("n4")
    left_out = "cannot join the job: torch 1.13, "
    cluster.wait(
        lambda: cluster.nodes().get("n4", {}).get("reason", "").startswith(left_out), "n4 left out"
    )
    assert cluster.nodes()["n4"]["versions"]["torch"] == "1.13.0"
    assert "versions differ: torch 1.13.0 on n4, 2." in cluster.oobleck("nodes").stdout
    go_on(cluster, job_id)


def test_too_few_nodes_wait_and_say_so(small_cluster: LocalCluster, text: str) -> None:
    cluster = small_cluster
    needs_two = job(text, resources={"min_nodes_per_pipeline": 2})
    job_id = cluster.submit(needs_two)
    cluster.wait_step(job_id, 5)
    cluster.kill_node("n1")
    cluster.kill_node("n2")
    wait_for_waiting(cluster, job_id)
    status = cluster.status(job_id)
    assert "2" in status["reason"], status["reason"]
    # One pipeline of three nodes: what n1 and n2 held is gone, and no node can bring it back.
    cluster.start_node("n1")
    cluster.start_node("n2")
    assert cluster.wait_end(job_id) == "failed"
    reason = cluster.status(job_id)["reason"]
    assert "layer" in reason, reason
    assert "nor can any node that is away bring it back" in reason, reason


def test_job_waits_for_enough_nodes_to_start(small_cluster: LocalCluster, text: str) -> None:
    cluster = small_cluster
    few = {"recovery": {"shadows": "none"}, "resources": {"min_nodes_per_pipeline": 2}}
    job_id = cluster.submit(job(text, fault_tolerance=1, **few))
    wait_for_waiting(cluster, job_id)
    assert "4" in cluster.status(job_id)["reason"]
    cluster.start_node("n4")
    cluster.wait_step(job_id, 2)


def test_two_workers_on_each_node(wide_cluster: LocalCluster, text: str) -> None:
    cluster = wide_cluster
    job_id = cluster.submit(job(text, fault_tolerance=1))
    cluster.wait_step(job_id, 3)
    assert set(cluster.worker_pids()) == {"n1/0", "n1/1", "n2/0", "n2/1"}
    cluster.kill_node("n1")
    cluster.wait(lambda: len(cluster.events(job_id, "reconfigured")) == 1, "the recovery")
    go_on(cluster, job_id)


#: Streams end soon after an agent says nothing more, and leases long after.
LASTING = [
    *("--ping-every-s=1", "--ping-timeout-s=1", "--lease-s=100", "--return-s=100"),
    *("--hang-s=100", "--stall-s=100", "--meeting-s=100", "--start-timeout-s=100"),
]


@pytest.fixture(scope="module")
def lasting_cluster(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[LocalCluster]:
    state_dir = tmp_path_factory.mktemp("lasting") / "state"
    options = [f"--master-flag={flag}" for flag in LASTING]
    with LocalCluster(2, state_dir=state_dir, options=options, preloaded=preloaded) as cluster:
        yield cluster


def test_an_agent_that_is_stopped_for_less_than_the_lease_is_no_loss(
    lasting_cluster: LocalCluster, text: str
) -> None:
    cluster = lasting_cluster
    job_id = cluster.submit(job(text, fault_tolerance=1))
    cluster.wait_step(job_id, 5)
    pids, agent = cluster.worker_pids(), cluster.agents["n2"]
    os.kill(agent, signal.SIGSTOP)
    try:
        away = "the master to miss the agent"
        cluster.wait(lambda: cluster.live() == {"n1"}, away, poll_s=0.1)
        go_on(cluster, job_id)
    finally:
        os.kill(agent, signal.SIGCONT)
    cluster.wait(lambda: cluster.live() == {"n1", "n2"}, "the agent back", poll_s=0.1)
    go_on(cluster, job_id)
    assert cluster.worker_pids() == pids
    # On a busy machine a worker may be found slow.
    causes = {event["cause"] for event in cluster.events(job_id, "reconfigured")}
    assert causes <= {"worker slow", "worker well"}
    assert cluster.events(job_id, "node_lost") == []
    cluster.oobleck("cancel", job_id)


def test_master_killed_and_restarted_adopts_the_job_that_a_killed_local_takes_along(
    lasting_cluster: LocalCluster, text: str
) -> None:
    cluster = lasting_cluster
    job_id = cluster.submit(job(text))
    cluster.wait_step(job_id, 5)
    pids = cluster.worker_pids()
    before = psutil.Process(cluster.master_pid)
    its = [before, *before.children(recursive=True)]
    before.kill()
    all_gone(its)  # they hold the state directory and the port
    master = subprocess.Popen(
        [
            str(BIN / "oobleck-master"),
            "--listen",
            cluster.address,
            "--state-dir",
            str(cluster.state_dir),
            *LASTING,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        step = cluster.last_step(job_id)
        cluster.wait_step(job_id, step + 20)
        cluster.wait(lambda: cluster.worker_pids() == pids, "all agents back", poll_s=0.3)
        assert cluster.status(job_id)["generation"] == 1
        assert cluster.events(job_id, "reconfigured") == []
        steps = [line["step"] for line in cluster.metrics(job_id)]
        assert steps == list(range(1, len(steps) + 1))
        processes = cluster.processes()
        assert set(pids.values()) <= {process.pid for process in processes}
        cluster.process.kill()
        cluster.process.wait(timeout=PATIENCE_S)
        all_gone(processes)
    finally:
        master.terminate()
        master.wait(timeout=PATIENCE_S)


def test_end_of_local_leaves_nothing_behind(own_cluster: LocalCluster, text: str) -> None:
    cluster = own_cluster
    job_id = cluster.submit(job(text))
    cluster.wait_step(job_id, 3)
    processes = cluster.processes()
    assert len(processes) >= 1 + 1 + 2 * 3, "local, master, and agent + warm + worker per node"
    port = int(cluster.address.rpartition(":")[2])
    cluster.process.send_signal(signal.SIGINT)
    cluster.process.wait(timeout=PATIENCE_S)
    all_gone(processes)
    listening = {c.laddr[1] for c in psutil.net_connections("tcp") if c.status == "LISTEN"}
    assert port not in listening


def test_a_warm_process_that_was_forked_for_an_agent_ends_with_it(
    small_cluster: LocalCluster,
) -> None:
    cluster = small_cluster
    agent = cluster.agents["n3"]

    found: list[psutil.Process] = []

    def forked() -> bool:
        """One that one more process is forked to stand in for, and that runs."""
        children = children_of(agent)
        with contextlib.suppress(psutil.NoSuchProcess):
            if children and (pid := cluster.warm_pid("n3")) not in children:
                found[:] = [psutil.Process(pid)]
                return found[0].status() != psutil.STATUS_ZOMBIE
        return False

    cluster.wait(forked, "a warm process", poll_s=0.1)
    (stand_in,), (first,) = map(psutil.Process, children_of(agent)), found
    first.kill()
    all_gone([first, stand_in])
    cluster.wait(forked, "another warm process", poll_s=0.1)
    os.kill(cluster.agents.pop("n3"), signal.SIGKILL)
    all_gone(found)


def test_cancel_ends_the_workers_and_leaves_the_cluster(
    small_cluster: LocalCluster, text: str
) -> None:
    cluster = small_cluster
    job_id = cluster.submit(job(text))
    cluster.wait_step(job_id, 3)
    workers = [psutil.Process(pid) for pid in cluster.worker_pids().values()]
    cluster.oobleck("cancel", job_id)
    assert cluster.wait_end(job_id) == "cancelled"
    all_gone(workers)
    again = cluster.submit(job(text, name="again", training={"steps": 5, "global_batch": 8}))
    assert cluster.wait_end(again) == "succeeded"


def test_failure_of_the_job_itself_ends_it(small_cluster: LocalCluster, tmp_path: Path) -> None:
    cluster = small_cluster
    tokens = tmp_path / "tokens.bin"
    ids = np.ones(1_000_000, np.uint16)
    # Far above the vocabulary of 256, and not where a file is looked at before.
    ids[100_000:400_000] = 60_000
    ids.tofile(tokens)
    job_id = cluster.submit({**job("unused"), "data": {"tokens": str(tokens), "dtype": "uint16"}})
    assert cluster.wait_end(job_id) == "failed"
    assert "vocabulary" in cluster.status(job_id)["reason"]


def test_ctrl_c_ends_the_demo_and_its_cluster_with_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.demo", "--out", str(tmp_path)]
    demo = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: len(list(descendants(demo.pid))) > 3, "an agent of the demo's")
        processes = list(descendants(demo.pid))
        os.killpg(demo.pid, signal.SIGINT)
        told, wrong = demo.communicate(timeout=PATIENCE_S)
    finally:
        demo.kill()
    assert (demo.returncode, wrong) == (130, "")
    assert told.splitlines()[-1].startswith("interrupted; the cluster has ended, ")
    all_gone(processes)
