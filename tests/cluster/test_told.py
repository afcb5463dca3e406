"""What an operator is told of failures, as it stands in events, statuses and logs."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from bench.support.cluster import LocalCluster
from bench.support.preloaded import Preloaded
from bench.support.separate import Daemons
from oobleck.core.job.spec import RecoveryPolicy
from support.clusters import PATIENT, bring_into, job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

MASTER_FLAGS = tuple(flag.removeprefix("--master-flag=") for flag in PATIENT)


@pytest.fixture
def daemons(tmp_path: Path, preloaded: Preloaded) -> Iterator[Daemons]:
    """A master and two agents."""
    cluster = Daemons(tmp_path / "cluster", preloaded)
    with contextlib.closing(cluster):
        start(cluster)
        yield cluster


def start(cluster: Daemons) -> None:
    cluster.start_master(*MASTER_FLAGS)
    start_agents(cluster)


def start_agents(cluster: Daemons) -> None:
    for name in ("n1", "n2"):
        cluster.start_node(name)
    cluster.wait(lambda: cluster.live() == {"n1", "n2"}, "two nodes")


def test_a_loss_and_a_return_are_sentences_and_warnings(
    small_cluster: LocalCluster, text: str, tmp_path: Path
) -> None:
    cluster = small_cluster
    job_id = cluster.submit(job(text))
    cluster.wait_step(job_id, 3)
    cluster.kill_node("n3")
    cluster.wait(lambda: cluster.planned(job_id) == {"n1", "n2"}, "the plan without n3")
    cluster.wait_step(job_id, cluster.last_step(job_id) + 3)
    bring_into(cluster, job_id, "n3")
    cluster.wait_step(job_id, cluster.last_step(job_id) + 3)
    cluster.wait(lambda: len(cluster.events(job_id, "reconfigured")) > 1, "the way back")
    told = cluster.oobleck("events", job_id).stdout
    assert re.search(r"generation 2 by \w+: goes on without n3, in \d", told), told
    assert re.search(r"generation 3 by \w+: n3 takes part again", told), told
    assert_names_and_estimates(cluster, job_id, told)
    master = (cluster.state_dir / "log" / "master.log").read_text()
    assert re.search(r" WARNING \S+ a node is lost node=n3 cause=\w+ reason=", master), master
    logs = cluster.oobleck("logs", job_id, "--node", "n1").stdout
    assert re.search(r"^n1/0 .* entering generation generation=2 gone=n3/0$", logs, re.M), logs
    for lost in re.findall(r" WARNING \S+ peer lost .*", logs):
        assert "n3/0" in lost or "n2/0 has left" in lost, logs
    agents = "".join(path.read_text() for path in (cluster.state_dir / "log").glob("agent-*.log"))
    assert not re.search(r"^[IWEF]\d{4} ", master + agents, re.M), "gRPC's own lines"

    gone = tmp_path / "gone.txt"
    gone.write_text(Path(text).read_text())
    fails = cluster.submit(job(str(gone), name="fails"))
    gone.unlink()
    cluster.oobleck("cancel", job_id)
    assert cluster.wait_end(fails) == "failed"
    master = (cluster.state_dir / "log" / "master.log").read_text()
    assert re.search(rf" ERROR \S+ the job failed job={fails} reason=", master), master


def assert_names_and_estimates(cluster: LocalCluster, job_id: str, told: str) -> None:
    """Workers have one form of name; the job's policy and that of a plan are named as such; what
    was computed is marked where it is beside what was measured."""
    status, shown = cluster.status(job_id), cluster.oobleck("status", job_id).stdout
    chosen = set(get_args(RecoveryPolicy)) - {"auto"}
    assert status["policy"] == "auto"
    assert status["plan_policy"] in chosen
    assert re.search(r"^policy +auto$", shown, re.M), shown
    made = rf"^generation +{status['generation']} by policy {status['plan_policy']}[,;]"
    assert re.search(made, shown, re.M), shown
    records = cluster.events(job_id, "reconfigured")
    assert {record["policy"] for record in records} <= chosen
    for record in records:
        assert record["expected"]["step_s"] > 0, "computed; beside it stands what happened"
        assert "stall_s" in record
    policies = cluster.oobleck("events", job_id, "--policies").stdout.splitlines()
    pair = r"EXPECTED +HAPPENED +RATIO"
    assert re.match(rf"POLICY +RULE +N +STALL {pair} +STEP {pair}$", policies[0]), policies
    by_rule = {tuple(line.split()[:2]) for line in policies[1:] if line}
    assert by_rule == {(record["policy"], record["rule"]) for record in records}
    table = shown.partition("WORKER ")[2].splitlines()
    assert table[0].split() == ["PEAK", "MEMORY", "PREDICTED"]
    assert [row.split()[0] for row in table[1:4]] == ["n1/0", "n2/0", "n3/0"]
    assert not re.search(r"\bn\d[:.]\d\b", shown + told)


def test_a_power_cut_of_all_hosts_is_one_cause(daemons: Daemons, text: str, tmp_path: Path) -> None:
    cluster = daemons
    folder = {"path": str(tmp_path / "saved"), "every": 5}
    job_id = cluster.submit(job(text, checkpoint=folder))
    cluster.wait_step(job_id, 3)
    cluster.wait(lambda: bool(cluster.events(job_id, "checkpoint_saved")), "a checkpoint")
    processes = cluster.processes()
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    for pid in (cluster.master_pid, *cluster.agents.values()):
        cluster.code(pid)
    cluster.start_master("--return-s=4", *MASTER_FLAGS)
    # Hosts take longer than a lease to boot. An agent that is here before shows that its host is
    # the one of before: this machine was not booted again.
    cluster.wait(lambda: {node["state"] for node in cluster.nodes().values()} == {"lost"}, "losses")
    start_agents(cluster)
    cluster.wait(lambda: bool(cluster.events(job_id, "incident")), "the recovery")
    cause = "power or network of the whole site: the master and n1, n2 were away together"
    told = cluster.oobleck("events", job_id, "--incidents").stdout
    assert told.partition("\n")[0].partition("incident 1: ")[2].startswith(cause), told
    assert told.count("because of that") == 1, told
    assert cause in " ".join(cluster.oobleck("status", job_id).stdout.split())
