"""Findings of workers on a checkpoint or its place, as they tell each other, and whose fault it is.

Pure. Must not know how anything is read or written.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.units import comma_separated

#: unseen: what another worker sees does not appear here. unreadable: this node cannot read or
#: write it. damaged: a layer's file is not what was written. unfit: it can be used nowhere.
Kind = Literal["fine", "unseen", "unreadable", "damaged", "unfit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Finding of one worker."""

    worker: WorkerId
    kind: Kind = "fine"
    reason: str = ""
    #: Whose file is damaged.
    layer: int | None = None


def distinct_reasons(found: Iterable[Finding]) -> list[str]:
    """Each reason with the nodes that gave it."""
    nodes: dict[str, set[NodeName]] = {}
    for finding in found:
        if finding.kind != "fine":
            nodes.setdefault(finding.reason, set()).add(finding.worker.node)
    return [f"{reason} (on {comma_separated(names)})" for reason, names in nodes.items()]


def at_fault(found: Sequence[Finding]) -> frozenset[NodeName]:
    """The nodes without which the others could go on. None where those would not be at least as
    many; nor, of two nodes that see different things, where nobody knows which is right."""
    kinds = {finding.kind for finding in found}
    nodes = {finding.worker.node for finding in found}
    fault = {finding.worker.node for finding in found if finding.kind != "fine"}
    if not kinds <= {"fine", "unseen", "unreadable"} or 2 * len(fault) > len(nodes):
        return frozenset()
    if "unseen" in kinds and len(nodes) < 3:
        return frozenset()
    return frozenset(fault)


def second_readers(found: Sequence[Finding]) -> dict[int, WorkerId]:
    """Map each layer whose file a worker finds damaged to the first worker on another node. That
    one reads the file too, since the first reader's node may be at fault."""
    finders: dict[int, NodeName] = {}
    for finding in found:
        if finding.layer is not None:
            finders.setdefault(finding.layer, finding.worker.node)
    workers = [finding.worker for finding in found]
    return {
        layer: others[0]
        for layer, node in finders.items()
        if (others := [worker for worker in workers if worker.node != node])
    }
