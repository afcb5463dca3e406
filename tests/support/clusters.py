"""What tests do to real clusters, beyond what an operator would."""

from collections.abc import Iterable, Set

from bench.support.client import ENDED, Record
from bench.support.cluster import Cluster, LocalCluster
from bench.support.daemons import alive

_WAITS = ("hang", "stall", "meeting", "replacement-grace", "start-timeout", "profile-timeout")
#: While training is held up for a node that starts, nobody shall take it for a hang; no job shall
#: start without a node that is slow to get ready, and have it join later, nor go on without a
#: process that is slow to replace another; and none by the estimate where the measurement takes a
#: minute. What comes once a minute comes every other second.
PATIENT = (
    *(f"--master-flag=--{name}-s=100" for name in _WAITS),
    "--master-flag=--stand-by-s=2",
)

#: Flag of a master that waits 5 s, not a minute, for records that nobody has.
FORGETFUL = "--records-wait-s=5"


def job(text: str, name: str = "job", **changes: object) -> dict[str, object]:
    """A small job that goes on until it is cancelled. `changes`: of its keys."""
    return {
        "name": name,
        "model": {"layers": 4, "hidden": 32, "heads": 2, "sequence_length": 32},
        "data": {"text": [text]},
        "training": {"steps": 100_000, "global_batch": 8, "microbatch": 1},
        "fault_tolerance": 0,
        "profile": "estimate",
        **changes,
    }


def end_jobs(cluster: Cluster) -> None:
    """So that no job goes on training while other tests run."""
    for job in cluster.jobs():
        if job["state"] not in ENDED:
            cluster.oobleck("cancel", job["job_id"], check=False)


def failures(records: Iterable[Record]) -> list[Record]:
    """The incidents among them, without those of slow workers, which a busy machine has."""
    incidents = (record for record in records if record["event"] == "incident")
    return [one for one in incidents if one["root_cause"]["kind"] != "slow worker"]


def make_whole(cluster: LocalCluster, wanted: Set[str], *options: str) -> None:
    """Just the nodes `wanted`, all live; those that are missing start with `options` (and, like
    all of the cluster, with its fault plan). An agent that is not live, as one that still starts or
    has another way to the master, ends first: of two with a name one would be refused. Drains and
    quarantine are over."""
    if out := sorted((wanted & set(cluster.nodes())) - cluster.live()):
        cluster.oobleck("node", "undrain", *out, check=False)
    present = cluster.live() & wanted & {n for n, pid in cluster.agents.items() if alive(pid)}
    for name in sorted(set(cluster.agents) - present):
        cluster.kill_node(name)
    for name in sorted(wanted - present):
        cluster.start_node(name, *options)
    cluster.wait(lambda: cluster.live() == wanted, f"{sorted(wanted)} live", poll_s=0.1)


def bring_into(cluster: LocalCluster, job_id: str, name: str, *options: str) -> None:
    """Start the node while training is held up, until the plan with it is made: whatever the
    machine's speed, the node is neither late nor does it cost many steps, and training does not
    take the processor that the node needs to start."""
    with cluster.frozen("n1"):
        before = cluster.status(job_id)["generation"]
        cluster.start_node(name, *options)
        cluster.wait(
            lambda: cluster.status(job_id)["generation"] > before,
            f"a plan with {name}",
            poll_s=0.1,
        )
