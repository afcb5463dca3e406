"""Nodes and jobs of a cluster: exceptional ones first, and how many may be lost. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from oobleck.cli.output import text
from oobleck.cli.output.colour import ORDER, Tone, tone, worst
from oobleck.cli.view.job import Progress, open_incident, progress
from oobleck.core.units import count
from oobleck.proto import control_pb2 as pb

#: Silence after which a node's row shows it.
_SILENT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    name: str
    state: str
    reason: str
    tone: Tone
    #: Ready workers of all slots, as `2/2`.
    workers: str
    device: str
    memory_bytes: int
    address: str
    job_id: str
    #: Pace of slow workers; empty: none is slow.
    pace: str
    #: Time since it was last heard; empty: recently.
    silent: str
    failures: int
    #: Whether it is out or on its way out, and can be undrained.
    is_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    id: str
    name: str
    state: str
    #: Remarks beside the state.
    why: str
    tone: Tone
    progress: Progress
    #: Number of nodes in its plan.
    nodes: int
    pipelines: int
    incident: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Prospect of a job: how many nodes it may lose, or what the next loss causes."""

    job_id: str
    text: str
    tone: Tone


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    #: Number of nodes by state, most frequent first.
    states: Mapping[str, int]
    workers: int
    ready: int
    tokens_per_s: float
    #: Number of live nodes in no job's plan.
    spare: int
    #: Prospect of each running job.
    losses: tuple[Loss, ...]
    jobs: tuple[JobRow, ...]
    #: Exceptional ones first.
    nodes: tuple[NodeRow, ...]
    versions: str


def cluster(nodes: Sequence[pb.NodeInfo], jobs: Sequence[pb.JobStatus]) -> Cluster:
    going = [job for job in jobs if job.state not in text.ENDED]
    planned = {name for job in going for name in members(job.plan)}
    live = [node for node in nodes if node.state == "live"]
    return Cluster(
        states=dict(Counter(node.state for node in nodes).most_common()),
        workers=sum(node.worker_slots for node in nodes if node.state != "lost"),
        ready=sum(_ready(node) for node in nodes if node.state != "lost"),
        tokens_per_s=sum(job.tokens_per_s for job in going),
        spare=sum(node.node not in planned for node in live),
        losses=tuple(loss(job) for job in going if job.HasField("plan")),
        jobs=tuple(job_row(job) for job in _newest_first(jobs)),
        nodes=tuple(sorted(map(node_row, nodes), key=_urgency)),
        versions=text.versions_note(nodes),
    )


def members(plan: pb.Plan) -> list[str]:
    """Return the names of a plan's nodes, each once, in order."""
    return list(dict.fromkeys(node for pipeline in plan.pipelines for node in pipeline.nodes))


def node_row(node: pb.NodeInfo) -> NodeRow:
    found = text.pace(node)
    return NodeRow(
        name=node.node,
        state=node.state,
        reason=node.reason,
        tone=worst(tone(node.state), "warn") if found != "-" or node.reason else tone(node.state),
        workers=f"{_ready(node)}/{node.worker_slots}",
        device=node.device,
        memory_bytes=node.memory_per_worker_bytes,
        address=node.address,
        job_id=node.job_id,
        pace="" if found == "-" else found,
        silent=text.heard(node) if node.last_heard_s > _SILENT_S or node.heard_before else "",
        failures=node.failures,
        is_out=node.state in ("draining", "drained", "quarantined"),
    )


def job_row(job: pb.JobStatus) -> JobRow:
    return JobRow(
        id=job.job_id,
        name=job.name,
        state=job.state,
        why=text.why_so(job),
        tone=tone(job.state),
        progress=progress(job),
        nodes=len(members(job.plan)),
        pipelines=len(job.plan.routes or job.plan.pipelines),
        incident=open_incident(job),
    )


def _ready(node: pb.NodeInfo) -> int:
    return sum(bool(worker.card) for worker in node.workers)


def loss(job: pb.JobStatus) -> Loss:
    """Return the prospect of a running job with a plan."""
    if job.can_lose:
        return Loss(job_id=job.job_id, text=f"can lose {text.can_lose(job)}", tone="good")
    if not job.checkpoint:
        told = "may lose a layer with the next node, and has no checkpoint"
        return Loss(job_id=job.job_id, text=told, tone="bad")
    behind = job.committed_step - job.checkpoint_step
    again = f"; {count(behind, 'step')} would be done again" if behind > 0 else ""
    told = (
        "may lose a layer with the next node; then the checkpoint of step "
        f"{job.checkpoint_step} takes over{again}"
    )
    return Loss(job_id=job.job_id, text=told, tone="warn")


def _newest_first(jobs: Iterable[pb.JobStatus]) -> list[pb.JobStatus]:
    """Sort jobs: running before ended ones, newest first."""
    return sorted(jobs, key=lambda job: (job.state in text.ENDED, -job.submitted_at))


def _urgency(row: NodeRow) -> tuple[int, list[tuple[int, int | str]]]:
    return ORDER.index(row.tone), _natural(row.name)


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts n2 before n10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts if part]
