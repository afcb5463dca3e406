"""Which versions of torch the nodes of a job have: one series (major.minor), unless the job allows
others, and what is told of versions that differ all the same.

Another series may compute other numbers, and a checkpoint or a layer may not mean the same to it.
Pure. Must not know how a node is left out.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from oobleck.host.versions import Differences, differences, series
from oobleck.master.job import Job
from oobleck.master.node import Node
from oobleck.master.state import ClusterState
from oobleck.planner.ids import NodeName


def torch_of(node: Node) -> str:
    return series(node.facts.versions.torch)


def torch_for(state: ClusterState, job: Job) -> str:
    """The series that the job's nodes must have: its plan's while any node has that, else what most
    candidates have (of equally many, what the first one has); empty: any will do."""
    if job.spec.allow_mixed_versions:
        return ""
    if job.made is not None and job.made.torch:
        registered = (node for node in state.nodes.values() if node.registered)
        here = (node for node in registered if node.facts.node not in job.left_out)
        if any(torch_of(node) == job.made.torch for node in here):
            return job.made.torch
    counts = Counter(torch for node in state.candidates(job) if (torch := torch_of(node)))
    return counts.most_common(1)[0][0] if counts else ""


def why_not(node: Node, torch: str) -> str:
    """Why the node cannot be beside nodes with that series; empty: it can. An agent that does not
    tell what it has is taken for one that has the same."""
    if not torch or torch_of(node) in ("", torch):
        return ""
    return (
        f"torch {torch_of(node)}, where the job's other nodes have {torch}: install the same, or "
        "give the job allow_mixed_versions: true"
    )


def alike(state: ClusterState, job: Job) -> tuple[list[Node], list[tuple[Node, str]]]:
    """The candidates that can be beside each other, and the others with the reason."""
    torch = torch_for(state, job)
    found = [(node, why_not(node, torch)) for node in state.candidates(job)]
    return [node for node, why in found if not why], [(node, why) for node, why in found if why]


def among(state: ClusterState, nodes: Iterable[NodeName]) -> Differences:
    known = (state.nodes[name] for name in nodes if name in state.nodes)
    return differences((node.facts.node, node.facts.versions) for node in known)


def pairs(found: Differences) -> Sequence[str]:
    """Each version that differs, as the job remembers that it was told."""
    return [f"{package} {version}" for package, versions in found.items() for version in versions]
