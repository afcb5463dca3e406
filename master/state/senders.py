"""Permissions of agents: which of their reports count.

An agent speaks for the processes of its own node, and only about their part in a plan. A process is
known by its incarnation, a random id that its agent makes and sends to the master alone. So an
agent that names the incarnation of a plan's process speaks for that process.

`why_refused` holds the table: kind of report -> permitted senders and content. Pure.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from oobleck.core.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.core.messages import (
    CheckpointSaved,
    Evaluated,
    Failed,
    LinkMeasured,
    Measured,
    PeerLost,
    PhaseReached,
    Restored,
    SaveFailed,
)
from oobleck.core.plan import Plan
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.proto.types import Hung, NodeStatus, WorkerExited, WorkerReport, WorkerStatus

#: Refuted reports of lost peers after which further ones of the node are refused.
MOST_UNTRUE = 3


def why_refused(state: ClusterState, node: NodeName, report: WorkerReport) -> str:
    """Return why the agent's report is refused, with one text per kind and cause; empty: it
    counts."""
    job, worker = state.jobs[report.job_id], WorkerId(node, report.slot)
    kind = _KINDS[type(report.what)]
    if not kind.sender(job, worker, report.incarnation):
        return f"{kind.name} of a process that {_WANTED[kind.sender]}"
    if kind.sender is _is_no_others and not has_part(state, node, report.job_id):
        return f"{kind.name} of a node that has no part in the job"
    if not kind.may_say(job, report.what):
        return f"{kind.name} with what cannot be"
    if isinstance(report.what, PeerLost) and job.seen.untrue[node] >= MOST_UNTRUE:
        return f"{kind.name} of a node whose reports of lost peers were refuted"
    return ""


def has_part(state: ClusterState, node: NodeName, job_id: JobId) -> bool:
    """Return whether the node has or recently had workers of the job, and so their output."""
    job, known = state.jobs[job_id], state.nodes[node]
    return known.desired.job_id == job_id or node in job.left_out or node in _planned(job)


def committing_nodes(job: Job, generation: Generation) -> frozenset[NodeName] | None:
    """Return the nodes whose workers commit the steps of that generation; None: the plan is not
    known."""
    if generation < 1 or generation > job.newest_known:
        return None
    for plan in _plans(job):
        if plan.generation == generation:
            return frozenset(plan.nodes)
    # An old generation: an agent that was away sends its old records.
    return _planned(job)


def believed(state: ClusterState, node: NodeName, status: NodeStatus) -> NodeStatus:
    """Return the status with credible claims only: without processes that other slots have, and
    without progress that is impossible or of processes in no plan."""
    job = state.jobs.get(status.job_id) if status.job_id is not None else None
    if job is None or not status.workers:
        return status
    workers = tuple(
        _believed(job, node, worker)
        for worker in status.workers
        if _is_no_others(job, WorkerId(node, worker.slot), worker.incarnation)
    )
    return msgspec.structs.replace(status, workers=workers)


def is_member(job: Job, worker: WorkerId, process: Incarnation) -> bool:
    """Return whether the worker has this process in the newest plan, or in the one last trained
    in."""
    current, trained = job.current, job.current.trained
    if process in (current.processes().get(worker), current.leaving_processes().get(worker)):
        return True
    if trained is None:
        return False
    return (worker, process) in zip(trained.plan.workers, trained.incarnations, strict=True)


# ---- permitted senders


def _is_no_others(job: Job, worker: WorkerId, process: Incarnation) -> bool:
    """Return whether no plan has the process in another slot."""
    counted = job.current.processes(), job.current.leaving_processes()
    own = any(places.get(worker) == process for places in counted)
    return own or all(process not in places.values() for places in counted)


def _was_member(job: Job, worker: WorkerId, process: Incarnation) -> bool:
    """Return whether a plan has or had the process: its checkpoints outlive its part in a plan."""
    return is_member(job, worker, process) or process in job.lineage.replaced


def _publishes(job: Job, worker: WorkerId, process: Incarnation) -> bool:
    """Return whether the process is or was rank 0 of a plan, which writes manifests."""
    first = any(plan.workers[0] == worker for plan in _plans(job))
    return bool(job.lineage.replaced.get(process)) or (first and _was_member(job, worker, process))


def _was_asked(job: Job, worker: WorkerId, process: Incarnation) -> bool:
    """Return whether the process stands by, or takes part in the newest attempt at measuring."""
    measuring, slow = job.profiling.under_way, job.slow.get(worker)
    if measuring is not None and (worker, process) in measuring.workers:
        return True
    return slow is not None and slow.incarnation == process


Sender = Callable[[Job, WorkerId, Incarnation], bool]
_WANTED: Mapping[Sender, str] = {
    _is_no_others: "is another node's",
    is_member: "no plan counts on",
    _was_member: "no plan has counted on",
    _publishes: "was the first of no plan",
    _was_asked: "was not asked",
}


# ---- permitted content


def _anything(job: Job, what: Any) -> bool:
    return True


def _is_step(job: Job, step: int | None) -> bool:
    return step is None or 0 <= step <= job.spec.training.steps


def _is_generation(job: Job, generation: Generation) -> bool:
    return 1 <= generation <= job.newest_known


def _may_measure_link(job: Job, what: LinkMeasured) -> bool:
    measuring = job.profiling.under_way
    return measuring is not None and any(p.scope == what.scope for p in measuring.wish.meetings)


def _may_reach(job: Job, what: PhaseReached) -> bool:
    layers = job.spec.model.layer_count
    return (
        _is_generation(job, what.generation)
        and _is_step(job, what.committed_step)
        and all(0 <= layer < layers for layer in what.layers)
    )


def _may_miss(job: Job, what: PeerLost) -> bool:
    return _is_generation(job, what.generation) and _is_step(job, what.step)


def _may_save(job: Job, what: CheckpointSaved | SaveFailed) -> bool:
    saves_output = isinstance(what, SaveFailed) and what.what == "output"
    due = job.spec.output is not None if saves_output else job.spec.checkpoint is not None
    return due and _is_step(job, what.step) and what.request <= job.saves.requested


def _may_restore(job: Job, what: Restored) -> bool:
    allowed = job.spec.checkpoint is not None or not what.path
    return allowed and _is_generation(job, what.generation) and _is_step(job, what.step)


def _may_evaluate(job: Job, what: Evaluated) -> bool:
    evaluation, step = job.spec.evaluation, what.record.step
    due = evaluation is not None and evaluation.due(step, job.spec.training.steps)
    return due and _is_step(job, step)


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    sender: Sender
    may_say: Callable[[Job, Any], bool]


_KINDS: Mapping[type, _Kind] = {
    WorkerExited: _Kind("an exit", _is_no_others, _anything),
    Hung: _Kind("a hang", _is_no_others, _anything),
    Failed: _Kind("a failure", _is_no_others, _anything),
    Measured: _Kind("a measurement", _was_asked, _anything),
    LinkMeasured: _Kind("a link's measurement", _was_asked, _may_measure_link),
    PhaseReached: _Kind("a phase", is_member, _may_reach),
    PeerLost: _Kind("a lost peer", is_member, _may_miss),
    CheckpointSaved: _Kind("a checkpoint", _publishes, _may_save),
    SaveFailed: _Kind("a failed save", _was_member, _may_save),
    Restored: _Kind("a restore", is_member, _may_restore),
    Evaluated: _Kind("an evaluation", _was_member, _may_evaluate),
}


def _planned(job: Job) -> frozenset[NodeName]:
    kept = frozenset(name for plan in _plans(job) for name in plan.nodes)
    return kept | job.lineage.had_part


def _plans(job: Job) -> Iterator[Plan]:
    """Yield the plans that are kept."""
    for made in (job.current.made, job.current.trained):
        if made is not None:
            yield made.plan
    if job.lineage.before is not None:
        yield job.lineage.before
    yield from job.lineage.plans.values()


_NOTHING_DONE = {
    "generation": Generation(0),
    "also_entered": (),
    "committed_step": -1,
    "stepped": Generation(0),
    "finished": False,
    "compute_steps": 0,
    "compute_s": 0.0,
}


def _believed(job: Job, node: NodeName, worker: WorkerStatus) -> WorkerStatus:
    place = WorkerId(node, worker.slot)
    if not _was_member(job, place, worker.incarnation) and not _has_entered(job, place, worker):
        return msgspec.structs.replace(worker, **_NOTHING_DONE)
    steps, newest = job.spec.training.steps, job.newest_known
    entered = (worker.generation, *worker.also_entered)
    if worker.committed_step <= steps and max(worker.stepped, *entered) <= newest:
        return worker
    return msgspec.structs.replace(worker, **_NOTHING_DONE)


def _has_entered(job: Job, place: WorkerId, worker: WorkerStatus) -> bool:
    """Return whether a kept plan has that worker; the processes of kept plans are not known."""
    plan = job.lineage.plans.get(worker.generation)
    return plan is not None and place in plan.workers
