"""Faults of every kind strike one running job, at exact points; what is trained is the same.

All of them share one cluster and one job: each finds what the ones before have left. What is held
against the plain loop at the end is therefore the whole run.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.support.drill import Drill, Use
from bench.support.faults import FAULTS
from bench.support.netcluster import NetCluster
from support.clusters import failures
from support.faulty import assert_equal_to_reference, job
from support.gates import Gatekeeper

# Longer than any wait in vain, which ends with a report.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

#: The worker that is killed to have a recovery that another fault strikes.
VICTIM = "n4"


@dataclass(frozen=True)
class Case:
    fault: str
    node: str
    #: A gate of `support.gates`; step: wherever the job is.
    phase: str = "step"

    def __str__(self) -> str:
        return f"{self.fault}-{self.phase}".replace(" ", "-")


CASES = [
    Case("garbage", "n4"),
    Case("garbage", "n4", "rendezvous"),
    Case("kill-worker", "n4", "rendezvous"),
    Case("kill-master", "n4", "transfer"),
    Case("unplug", "n4", "first step"),
    Case("no-control", "n4"),
    Case("no-data", "n4"),
    Case("kill-agent", "n4", "rendezvous"),
    Case("stop-master", "n4", "first step"),
    Case("disk-full", "n4"),
]


@pytest.fixture(scope="module")
def gatekeeper(cluster: NetCluster) -> Iterator[Gatekeeper]:
    with Gatekeeper(cluster) as keeper:
        yield keeper


@pytest.fixture(scope="module")
def drill(
    cluster: NetCluster, gatekeeper: Gatekeeper, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drill]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    drill = Drill(cluster, job(checkpoints=folder))
    drill.settle("at the start")
    before = Use.of(cluster)
    yield drill
    assert Use.of(cluster).grown(before, descriptors=10, megabytes=30) == []
    cluster.oobleck("cancel", drill.job_id)
    cluster.wait_end(drill.job_id)
    assert_equal_to_reference(drill)


def test_two_hosts_without_a_way_to_each_other(drill: Drill) -> None:
    """One of the two goes at once: the workers meet without it, and not once more in vain."""
    before = len(drill.cluster.events(drill.job_id))
    drill.strike(FAULTS["no-way"], "n4")
    events = drill.cluster.events(drill.job_id)[before:]
    incident = failures(events)[0]
    assert incident["root_cause"]["kind"] == "network cut"
    # Who goes is whoever leaves the cheaper plan, which depends on where the stages are.
    between = re.fullmatch(
        r"data network between (n\d) and (n\d) is cut", incident["root_cause"]["reason"]
    )
    assert between is not None
    assert set(between.groups()) == {"n2", "n4"}
    rules = [event["rule"] for event in events if event["event"] == "reconfigured"]
    assert "regroup" not in rules


@pytest.mark.parametrize("case", CASES, ids=str)
def test_struck(drill: Drill, gatekeeper: Gatekeeper, case: Case) -> None:
    fault = FAULTS[case.fault]
    if case.phase == "step":
        drill.strike(fault, case.node)
        return
    with contextlib.ExitStack() as gate:
        gate.enter_context(gatekeeper.hold(case.phase))
        if case.phase == "checkpoint":
            drill.cluster.save(drill.job_id)
        else:
            drill.cluster.kill_worker(VICTIM)
        gatekeeper.await_held()
        drill.strike(fault, case.node, phase=case.phase, then=gate.close)
