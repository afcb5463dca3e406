"""Faults of every kind in every phase of a job, and a long run of random ones."""

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.soak import Soak, tell
from bench.support.drill import Drill, Use
from bench.support.faults import FAULTS
from bench.support.netcluster import NetCluster
from bench.support.network import unusable
from oobleck.agent.state import FREE_STARTS, QUICK_S
from support.clusters import end_jobs
from support.faulty import JOB_NAME, assert_equal_to_reference, job
from support.gates import GATES, Gatekeeper

pytestmark = [pytest.mark.soak, pytest.mark.timeout(4 * 3600)]

RANDOM_FAULTS = 100
#: Share of them that strike in the recovery from another one.
COMPOUND = 1 / 3
#: Workers of gates are not to be killed.
VICTIM = "n4"
#: What the kernel says of the begin of processes is right to a second or so.
CLOCK_S = 2.0
LOST_WHEN_IDLE = ("kill-agent", "kill-node", "stop-agent", "unplug", "deaf", "mute", "no-control")
PHASES = ("step", *GATES)
#: Tests of a quarter of an hour would be too long to be shared out between processes.
KINDS = {
    "deadly": sorted(name for name, fault in FAULTS.items() if fault.deadly),
    "harmless": sorted(name for name, fault in FAULTS.items() if not fault.deadly),
}


@pytest.fixture(scope="module")
def gatekeeper(cluster: NetCluster) -> Iterator[Gatekeeper]:
    with Gatekeeper(cluster) as keeper:
        yield keeper


@pytest.fixture
def no_other_job(cluster: NetCluster) -> None:
    """Whatever the test before has left."""
    end_jobs(cluster)


def outlive_backoff(cluster: NetCluster) -> None:
    """A worker that ends sooner would be replaced at once only so many times in a row."""

    def is_old() -> bool:
        workers = [psutil.Process(pid) for pid in cluster.worker_pids_of(VICTIM)]
        return all(time.time() - worker.create_time() > QUICK_S + CLOCK_S for worker in workers)

    cluster.wait(is_old, f"the worker of {VICTIM} to be old enough", poll_s=0.1)


def end(drill: Drill) -> None:
    drill.cluster.oobleck("cancel", drill.job_id)
    assert drill.cluster.wait_end(drill.job_id) == "cancelled"
    assert_equal_to_reference(drill)


def test_random_faults(tmp_path: Path) -> None:
    if reason := unusable():
        pytest.skip(reason)
    with NetCluster(
        4, state_dir=tmp_path / "state", master_options=("--detection", "fast"), bytes_per_s=250_000
    ) as cluster:
        drill = Drill(cluster, job(checkpoints=tmp_path / "saved"))
        drill.settle("at the start")
        soak, before = Soak(drill, random.randrange(1_000_000), COMPOUND), Use.of(cluster)
        for _ in range(RANDOM_FAULTS):
            tell(soak.strike())
        assert len(drill.struck) == RANDOM_FAULTS
        assert Use.of(cluster).grown(before, descriptors=10, megabytes=30) == []
        end(drill)


@pytest.mark.usefixtures("no_other_job")
def test_every_fault_while_nothing_runs(cluster: NetCluster, tmp_path: Path) -> None:
    nodes = set(cluster.agents)
    cluster.wait(lambda: cluster.live() == nodes, "all nodes", poll_s=0.2)
    for name in sorted(FAULTS.keys() - {"kill-worker", "stop-worker"}):
        undo = FAULTS[name].strike(cluster, VICTIM)
        if name in LOST_WHEN_IDLE:
            cluster.wait(lambda: VICTIM not in cluster.live(), f"{name} to show", poll_s=0.1)
        undo()
        cluster.wait(lambda: cluster.live() == nodes, f"all nodes after {name}", poll_s=0.1)
    drill = Drill(cluster, job(checkpoints=tmp_path))
    drill.settle("after all that")
    end(drill)


@pytest.mark.usefixtures("no_other_job")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", PHASES)
def test_every_fault(
    cluster: NetCluster, gatekeeper: Gatekeeper, phase: str, kind: str, tmp_path: Path
) -> None:
    job_name = GATES[phase].job if phase in GATES else JOB_NAME
    drill = Drill(cluster, job(job_name, checkpoints=tmp_path))
    drill.settle("at the start")
    before = Use.of(cluster)
    for number, name in enumerate(KINDS[kind]):
        # Of harmless ones the gate alone ends a worker, and so many quick ends in a row are free.
        if kind == "deadly" or number % FREE_STARTS == 0:
            outlive_backoff(cluster)
        with contextlib.ExitStack() as gate:
            if phase != "step":
                gate.enter_context(gatekeeper.hold(phase))
                if phase == "checkpoint":
                    cluster.save(drill.job_id)
                else:
                    cluster.kill_worker(VICTIM)
                gatekeeper.await_held()
            tell(drill.strike(FAULTS[name], VICTIM, phase=phase, then=gate.close))
    assert Use.of(cluster).grown(before, descriptors=10, megabytes=30) == []
    end(drill)


@pytest.mark.usefixtures("no_other_job")
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_every_fault_while_a_job_starts(
    cluster: NetCluster, gatekeeper: Gatekeeper, name: str, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as gate:
        gate.enter_context(gatekeeper.hold("rendezvous"))
        drill = Drill(cluster, job(checkpoints=tmp_path))
        gatekeeper.await_held()
        tell(drill.strike(FAULTS[name], VICTIM, phase="launch", then=gate.close))
    end(drill)
