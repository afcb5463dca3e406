"""Page *Cluster*: nodes, jobs, rates, and how many nodes may still be lost."""

from collections.abc import Sequence
from dataclasses import dataclass

from oobleck.cli.dashboard.parts import Part
from oobleck.cli.dashboard.site import ClusterBased
from oobleck.cli.output.colour import tone
from oobleck.cli.view.cluster import NodeRow, cluster

_MOST_JOBS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    node: NodeRow
    may_drain: bool


class ClusterPage(ClusterBased):
    title = "Cluster"
    template = "cluster.html"
    active = "cluster"

    def parts(self) -> Sequence[Part]:
        snapshot = self.site.snapshot()
        found = cluster(snapshot.nodes, snapshot.jobs)
        may_drain = self.role == "operator"
        return [
            self.part("summary", found=found, tone=tone),
            self.part(
                "jobs",
                jobs=found.jobs[:_MOST_JOBS],
                more=max(0, len(found.jobs) - _MOST_JOBS),
            ),
            self.site.templates.rows(
                "nodes",
                "parts/nodes.html",
                "parts/node.html",
                {f"node-{row.name}": _Row(node=row, may_drain=may_drain) for row in found.nodes},
                some=bool(found.nodes),
                may_drain=may_drain,
            ),
        ]
