"""Metrics of the cluster's nodes, read from the state. Must not know jobs, except whose plan a node
is in."""

from collections import Counter
from collections.abc import Iterator

from oobleck.host.metrics import Family, Reading, single
from oobleck.master.api.view import node_state
from oobleck.master.metrics.tally import Tally
from oobleck.master.state.cluster import ClusterState

_STATES = ("live", "disconnected", "quarantined", "draining", "drained", "held", "lost", "left")
LOST_BY = ("witnesses", "lease", "restarted", "left")

NODES = Family(
    "gauge",
    "oobleck_nodes",
    "Nodes by state; left: lost on request.",
    ("state",),
)
FREE = Family(
    "gauge",
    "oobleck_nodes_without_work",
    "Live nodes in no plan: spare or about to join.",
)
STATE = Family("gauge", "oobleck_node_state", "1 for the node's state.", ("node", "state"))
SILENT = Family(
    "gauge",
    "oobleck_node_last_heard_age_seconds",
    "Time since the node's agent was heard.",
    ("node",),
)
SLOTS = Family("gauge", "oobleck_node_worker_slots", "Room for workers.", ("node",))
WORKERS = Family("gauge", "oobleck_node_workers", "Worker processes.", ("node",))
MEMORY = Family(
    "gauge",
    "oobleck_node_worker_memory_bytes",
    "Memory of each worker that a plan may use.",
    ("node",),
)
FAILURES = Family(
    "gauge",
    "oobleck_node_failures",
    "Losses of the node and its workers in ten minutes.",
    ("node",),
)
LOST = Family("counter", "oobleck_nodes_lost_total", "Lost nodes, by how.", ("cause",))
HELD = Family("gauge", "oobleck_held_nodes", "Nodes that train a job unknown to this master.")
QUARANTINES = Family("counter", "oobleck_nodes_quarantined_total", "Nodes put aside.")


def read(state: ClusterState, tally: Tally, now: float, unix: float) -> Iterator[Reading]:
    names = [node.facts.node for node in state.nodes.values()]
    nodes = list(state.nodes.values())
    states = list(map(node_state, nodes))
    counts = Counter(states)
    job = state.job
    busy = frozenset(job.current.members) if job is not None else frozenset()
    free = sum(
        state_of == "live" and name not in busy
        for name, state_of in zip(names, states, strict=True)
    )
    yield Reading(NODES, {(one,): counts[one] for one in _STATES})
    yield single(FREE, free)
    yield single(HELD, sum(node.held is not None for node in nodes))
    yield Reading(STATE, dict.fromkeys(zip(names, states, strict=True), 1))
    last = [n.seen.last_heard if n.seen.heard_at is None else n.seen.heard_at for n in nodes]
    keys = [(name,) for name in names]
    yield Reading(SILENT, dict(zip(keys, (max(0.0, now - at) for at in last), strict=True)))
    yield Reading(SLOTS, dict(zip(keys, (n.facts.worker_slots for n in nodes), strict=True)))
    workers = (len(n.seen.status.workers) if n.registered else 0 for n in nodes)
    yield Reading(WORKERS, dict(zip(keys, workers, strict=True)))
    memory = (n.facts.memory_per_worker_bytes for n in nodes)
    yield Reading(MEMORY, dict(zip(keys, memory, strict=True)))
    failures = (node.failures.recent(unix) for node in nodes)
    yield Reading(FAILURES, dict(zip(keys, failures, strict=True)))
    yield Reading(LOST, {(cause,): tally.nodes_lost[cause] for cause in LOST_BY})
    yield single(QUARANTINES, tally.quarantines)
