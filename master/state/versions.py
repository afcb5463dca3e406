"""Which versions of torch the nodes of a job have: one series (major.minor), unless the job allows
others, and what is told of versions that differ all the same.

Another series may compute other numbers, and a checkpoint or a layer may not mean the same to it.
Pure. Must not know how a node is left out.
"""

from collections.abc import Iterable, Sequence

from oobleck.host.versions import Differences, differences
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.planner.ids import NodeName


def why_not(node: Node, torch: str) -> str:
    """Why the node cannot be beside nodes with that series; empty: it can."""
    if node.goes_with(torch):
        return ""
    return (
        f"torch {node.torch}, where the job's other nodes have {torch}: install the same, or "
        "give the job allow_mixed_versions: true"
    )


def alike(state: ClusterState, job: Job) -> tuple[list[Node], list[tuple[Node, str]]]:
    """Of the nodes that could take part in the job, those that can be beside each other, and the
    others with the reason."""
    torch = state.common_torch(job)
    found = [(node, why_not(node, torch)) for node in state.fit(job)]
    return [node for node, why in found if not why], [(node, why) for node, why in found if why]


def among(state: ClusterState, nodes: Iterable[NodeName]) -> Differences:
    known = (state.nodes[name] for name in nodes if name in state.nodes)
    return differences((node.facts.node, node.facts.versions) for node in known)


def pairs(found: Differences) -> Sequence[str]:
    """Each version that differs, as the job remembers that it was told."""
    return [f"{package} {version}" for package, versions in found.items() for version in versions]
