"""Overview of the cluster: jobs that have not ended, then nodes that need attention.

Ended jobs, and normal nodes of a large cluster, are only counted. Pure.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from oobleck.cli.output.table import ORDER, folded, tone
from oobleck.cli.output.text import ENDED, jobs_table, nodes_table, pace
from oobleck.core.units import count
from oobleck.host.display import inline
from oobleck.proto import control_pb2 as pb

#: Most nodes that are listed one by one.
MOST_NODES = 16
_ALL = "'oobleck status --all'"


def cluster_text(
    nodes: Sequence[pb.NodeInfo],
    jobs: Sequence[pb.JobStatus],
    *,
    width: int | None = None,
    wide: bool = False,
    everything: bool = False,
) -> str:
    """Format jobs and nodes. `everything`: list all of them."""
    ended = [job for job in jobs if job.state in ENDED]
    present = [job for job in jobs if job.state not in ENDED]
    listed = [*present, *ended] if everything else present
    parts = [jobs_table(listed, width=width, wide=wide)] if listed or not jobs else []
    if ended and not everything:
        parts.append(folded(_ended(ended), width))
    if everything or len(nodes) <= MOST_NODES:
        parts.append(nodes_table(nodes, width=width, wide=wide))
    else:
        odd = sorted(filter(_is_odd, nodes), key=lambda node: ORDER.index(tone(node.state)))
        parts += [nodes_table(odd[:MOST_NODES], width=width, wide=wide)] if odd else []
        parts.append(folded(_counted(nodes, len(odd) - MOST_NODES), width))
    return "\n\n".join(parts)


def _ended(jobs: Sequence[pb.JobStatus]) -> str:
    last = max(jobs, key=lambda job: job.finished_at)
    why = f": {inline(last.reason)}" if last.reason else ""
    return (
        f"{count(len(jobs), 'job')} ended: {_counts(job.state for job in jobs)}; the last, "
        f"{last.job_id}, {last.state}{why} ({_ALL} lists them)"
    )


def _is_odd(node: pb.NodeInfo) -> bool:
    return node.state != "live" or bool(node.reason) or pace(node) != "-"


def _counted(nodes: Sequence[pb.NodeInfo], unlisted: int) -> str:
    """Count the nodes by state and job. `unlisted`: how many need a look and are not listed."""
    counts = _counts(
        f"{node.state} in {node.job_id}" if node.job_id else node.state for node in nodes
    )
    more = f"; {unlisted} more need a look" if unlisted > 0 else ""
    return f"{count(len(nodes), 'node')}: {counts}{more} ({_ALL} lists them)"


def _counts(words: Iterable[str]) -> str:
    return ", ".join(f"{number} {word}" for word, number in Counter(words).most_common())
