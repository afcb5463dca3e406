"""Jobs, nodes and plans as pages show them: exceptional ones first, how many may be lost. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from oobleck.cli.output import text
from oobleck.cli.output.table import ORDER, Tone, tone, worst
from oobleck.core.units import count
from oobleck.proto import control_pb2 as pb

# ---- progress of a job, in words and as a share of the whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    #: Committed share of the job's steps, 0 to 1, and as text.
    done: float
    percent: str
    step: int
    steps: int
    #: Empty if unknown, here and below.
    loss: str
    #: Tokens per second; or the age of the last step if the job does not progress.
    speed: str
    eta: str
    #: Age and step of the newest checkpoint, or a remark that there is none; empty: none are taken.
    checkpoint: str
    #: True if the last checkpoint, or the output, could not be written.
    is_unsaved: bool
    #: How many more nodes it can lose.
    can_lose: str
    tone: Tone
    over: bool


def progress(job: pb.JobStatus) -> Progress:
    over = job.state in text.ENDED
    return Progress(
        done=job.committed_step / job.steps if job.steps else 0.0,
        percent=text.done(job),
        step=job.committed_step,
        steps=job.steps,
        loss=f"{job.loss:.4f}" if job.HasField("loss") else "",
        speed=_speed(job),
        eta=f"about {text.about(job.eta_s)} to go" if job.eta_s and not over else "",
        checkpoint=_checkpoint(job),
        is_unsaved=text.unsaved(job) != "",
        can_lose=text.can_lose(job) if job.HasField("plan") and not over else "",
        tone=tone(job.state),
        over=over,
    )


def open_incident(job: pb.JobStatus) -> str:
    """Return the first line of an open failure or slowdown; empty: there is none."""
    if not job.last_incident or job.last_incident_at:
        return ""
    return text.incident(job)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIncident:
    job_id: str
    number: int
    text: str


def open_incidents(jobs: Iterable[pb.JobStatus]) -> list[OpenIncident]:
    """Return the open failures and slowdowns of all jobs."""
    return [
        OpenIncident(job_id=job.job_id, number=job.incidents, text=sentence)
        for job in jobs
        if (sentence := open_incident(job))
    ]


def _speed(job: pb.JobStatus) -> str:
    if job.tokens_per_s:
        share = f", MFU {100 * job.mfu:.0f}%" if job.HasField("mfu") else ""
        return f"{job.tokens_per_s:,.0f} tokens/s{share}"
    return text.last_step(job, "last step ")


def _checkpoint(job: pb.JobStatus) -> str:
    if not job.checkpoint:
        none = "none" if job.state in text.ENDED else "none yet"
        return none if job.checkpoint_path else ""
    age = f", {text.ago(job.checkpoint_at)}" if job.checkpoint_at else ""
    return f"step {job.checkpoint_step:,}{age}"


# ---- nodes and jobs of a cluster


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
    #: Number of incidents so far.
    incidents: int
    incident: str
    #: When it ended; empty: it has not.
    ended: str


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
        workers=sum(node.worker_slots for node in nodes if node.state not in text.GONE),
        ready=sum(text.ready(node) for node in nodes if node.state not in text.GONE),
        tokens_per_s=sum(job.tokens_per_s for job in going),
        spare=sum(node.node not in planned for node in live),
        losses=tuple(loss(job) for job in going if has_prospect(job)),
        jobs=tuple(job_row(job) for job in _newest_first(jobs)),
        nodes=tuple(sorted(map(node_row, nodes), key=_urgency)),
        versions=text.versions_note(nodes),
    )


def members(plan: pb.Plan) -> list[str]:
    """Return the names of a plan's nodes, each once, in order."""
    return list(dict.fromkeys(node for pipeline in plan.pipelines for node in pipeline.nodes))


def node_row(node: pb.NodeInfo) -> NodeRow:
    found, left = text.pace(node), node.state == "left"
    remarks = not left and (found != "-" or node.reason)
    silent = node.last_heard_s > _SILENT_S or node.heard_before
    return NodeRow(
        name=node.node,
        state=node.state,
        reason=node.reason,
        tone=worst(tone(node.state), "warn") if remarks else tone(node.state),
        workers=f"{text.ready(node)}/{node.worker_slots}",
        device=node.device,
        memory_bytes=node.memory_per_worker_bytes,
        address=node.address,
        job_id=node.job_id,
        pace="" if found == "-" else found,
        silent=text.heard(node) if silent and not left else "",
        failures=node.failures,
        is_out=node.state in ("draining", "drained", "quarantined"),
    )


def job_row(job: pb.JobStatus) -> JobRow:
    return JobRow(
        id=job.job_id,
        name=job.name,
        state=job.state,
        why=text.why_so(job, with_incident=True),
        tone=tone(job.state),
        progress=progress(job),
        nodes=len(members(job.plan)),
        pipelines=len(job.plan.routes or job.plan.pipelines),
        incidents=job.incidents,
        incident=open_incident(job),
        ended=text.minute(job.finished_at) if job.finished_at else "",
    )


def has_prospect(job: pb.JobStatus) -> bool:
    """Return whether a further loss matters: the job has a plan, and the nodes for it."""
    waits = job.state in (*text.ENDED, "waiting for nodes")
    return job.HasField("plan") and not waits


def loss(job: pb.JobStatus) -> Loss:
    """Return the prospect of a job that has one."""
    if job.can_lose:
        return Loss(job_id=job.job_id, text=f"can lose {text.can_lose(job)}", tone="good")
    if not job.checkpoint:
        sentence = "may lose a layer with the next node, and has no checkpoint"
        return Loss(job_id=job.job_id, text=sentence, tone="bad")
    behind = job.committed_step - job.checkpoint_step
    again = f"; {count(behind, 'step')} would be done again" if behind > 0 else ""
    sentence = (
        "may lose a layer with the next node; then the checkpoint of step "
        f"{job.checkpoint_step:,} takes over{again}"
    )
    return Loss(job_id=job.job_id, text=sentence, tone="warn")


def _newest_first(jobs: Iterable[pb.JobStatus]) -> list[pb.JobStatus]:
    """Sort jobs: running before ended ones, newest first."""
    return sorted(jobs, key=lambda job: (job.state in text.ENDED, -job.submitted_at))


def _urgency(row: NodeRow) -> tuple[int, list[tuple[int, int | str]]]:
    return ORDER.index(row.tone), _natural(row.name)


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts n2 before n10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts if part]


# ---- map of a plan: a row for each pipeline or route, a place for each stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Stage on workers of one node."""

    node: str
    #: `n1`, or `n1/0,1` if it has other workers than the first.
    workers: str
    first_layer: int
    last_layer: int
    #: Its share of the model's layers, 0 to 1.
    share: float
    state: str
    #: Rate of the slowest worker, relative to the others.
    rate: float
    tone: Tone

    @property
    def layers(self) -> str:
        if self.first_layer == self.last_layer:
            return f"layer {self.first_layer}"
        return f"layers {self.first_layer} to {self.last_layer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    name: str
    #: Micro-batches of a step, or another remark.
    share: str
    places: tuple[Place, ...]
    #: Whether the places lead from the first layer to the last.
    is_through: bool = True


def plan_rows(plan: pb.Plan, nodes: Iterable[pb.NodeInfo]) -> tuple[PlanRow, ...]:
    """Return pipelines in order, or routes if the plan has these; then shadows."""
    known = {node.node: node for node in nodes}
    through: Sequence[pb.Pipeline | pb.Route] = plan.routes or plan.pipelines
    layers = max((stage.last_layer + 1 for one in through for stage in _stages(one)), default=1)
    kind = "route" if plan.routes else "pipeline"
    found = [
        PlanRow(
            name=f"{kind} {number}",
            share=f"{one.microbatches} micro-batch{'' if one.microbatches == 1 else 'es'}",
            places=tuple(_place(stage, layers, known) for stage in _stages(one)),
        )
        for number, one in enumerate(through)
    ]
    if plan.shadows:
        held = tuple(_place(stage, layers, known) for stage in plan.shadows)
        found.append(PlanRow(name="shadows", share="held, not run", places=held, is_through=False))
    return tuple(found)


def plan_map(plan: pb.Plan, nodes: Iterable[pb.NodeInfo]) -> Mapping[str, object]:
    """Return the rows of a plan, its number of layers, its generation and its schedule."""
    rows = plan_rows(plan, nodes)
    through = [row.places for row in rows if row.is_through]
    return {
        "rows": rows,
        "layers": through[0][-1].last_layer + 1 if through else 0,
        "generation": plan.generation,
        "schedule": plan.schedule,
    }


def _stages(through: pb.Pipeline | pb.Route) -> Iterable[pb.Stage]:
    return through.hops if isinstance(through, pb.Route) else through.stages


def _place(stage: pb.Stage, layers: int, known: Mapping[str, pb.NodeInfo]) -> Place:
    name = stage.workers[0].node
    slots = tuple(worker.slot for worker in stage.workers)
    node = known.get(name)
    rates = [w.rate for w in node.workers if w.slot in slots and w.rate] if node else []
    rate = min(rates, default=1.0)
    state = node.state if node else "unknown"
    return Place(
        node=name,
        workers=text.holders(stage),
        first_layer=stage.first_layer,
        last_layer=stage.last_layer,
        share=(stage.last_layer - stage.first_layer + 1) / layers,
        state=state,
        rate=rate,
        tone=worst(tone(state), "warn") if rate < 1 else tone(state),
    )
