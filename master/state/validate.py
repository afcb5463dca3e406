"""Invariants of the master's state, each as a sentence beside its check.

No history that the rules allow leads to a state that breaks one. Any decision on it would be wrong,
so `oobleck-master --validate` ends. Pure: reads everything and changes nothing.
"""

from collections.abc import Collection, Iterator
from itertools import chain, pairwise

from oobleck.core.ids import NodeName, WorkerId
from oobleck.master.events.nodes import NodeYielded, WorkerLost
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import ENDED, CurrentPlan, Job, Loss
from oobleck.master.state.node import Node
from oobleck.planner.recovery.course import adds_holders


class InvariantViolation(Exception):
    """Violation of an invariant; the text is its sentence."""

    def __init__(self, sentence: str, subject: str) -> None:
        super().__init__(f"{subject} breaks an invariant: {sentence}")
        self.sentence, self.subject = sentence, subject
        #: The last events as text, the newest last; filled in by the owner of the events.
        self.last_events: tuple[str, ...] = ()


def validate(state: ClusterState, known: Collection[str] = ()) -> None:
    """Check all invariants. Raises InvariantViolation with the first one that does not hold, except
    the `known` texts of earlier violations."""
    for violation in violations(state):
        if str(violation) not in known:
            raise violation


def violations(state: ClusterState) -> Iterator[InvariantViolation]:
    """Yield a violation for each invariant that does not hold."""
    for sentence in _of_the_cluster(state):
        yield InvariantViolation(sentence, "the cluster")
    for job in state.jobs.values():
        sentences = (_of_a_job(state, job), _of_its_plans(state, job), _of_its_progress(job))
        for sentence in chain(*sentences):
            yield InvariantViolation(sentence, f"job {job.id}")
    for node in state.nodes.values():
        for sentence in _of_a_node(state, node):
            yield InvariantViolation(sentence, f"node {node.facts.node}")


def _under_way(job: Job) -> bool:
    return job.state != "queued" and job.state not in ENDED


def _hits_plan(job: Job, loss: Loss) -> bool:
    if isinstance(loss, WorkerLost):
        return loss.worker in job.current.processes() or (
            job.current.made is not None and loss.worker in job.current.made.leaving
        )
    return loss.node in _nodes_of_plan(job)


def _has_its_members(current: CurrentPlan) -> bool:
    nodes = current.made.plan.nodes if current.made is not None else ()
    return set(current.members) == set(nodes) - current.lost_nodes


def _nodes_of_plan(job: Job) -> set[NodeName]:
    """Return the nodes that the newest plan has or takes out, lost or not."""
    if job.current.made is None:
        return set()
    return {*job.current.made.plan.nodes, *(worker.node for worker in job.current.made.leaving)}


def _lists_match(job: Job) -> bool:
    made = job.current.made
    return made is None or (
        len(made.incarnations) == len(set(made.incarnations)) == len(made.plan.workers)
        and len(made.leaving) == len(made.leaving_incarnations)
        and set(made.starting) <= set(made.plan.workers)
        and not set(made.leaving) & set(made.plan.workers)
    )


def _generations_grow(job: Job) -> bool:
    before = 0 if job.lineage.before is None else job.lineage.before.generation
    return max(before, job.current.stepped, job.current.abrupt) <= job.current.generation and (
        job.lineage.before is None or before < job.current.generation
    )


def _has_base(current: CurrentPlan) -> bool:
    made = current.made
    if made is None or made.is_base:
        return current.base is None
    return current.base is not None or adds_holders(made.policy)


def _knows_slow(state: ClusterState, job: Job) -> bool:
    processes = job.current.processes()
    return all(
        0 < change.rate < 1
        and processes.get(worker, change.incarnation) == change.incarnation
        and worker.node in state.nodes
        and state.nodes[worker.node].registered
        for worker, change in job.slow.items()
    )


def _knows_stand_bys(job: Job) -> bool:
    processes = job.current.processes()
    return job.stand_bys.keys() <= job.seen.stand_by_times.keys() and all(
        processes.get(worker, last.process) == last.process
        for worker, last in job.stand_bys.items()
    )


def _numbers_incidents(job: Job) -> bool:
    known = (job.incident, job.slowdown, job.last_incident)
    numbers = [incident.number for incident in known if incident is not None]
    return len(numbers) == len(set(numbers)) and max(numbers, default=0) == job.incidents


def _still_slow(job: Job) -> set[WorkerId]:
    slowdown = job.slowdown
    return set() if slowdown is None else {one.worker for one in slowdown.workers if not one.until}


def _counts_progress(job: Job) -> bool:
    recent = [record.step for record in job.seen.steps.recent]
    return recent == sorted(set(recent)) and job.seen.steps.committed_step >= max(recent, default=0)


def _desires(state: ClusterState, node: Node) -> bool:
    """Return whether the node's desired state is what the active job wants."""
    desired, job = node.desired, state.job
    if job is None or desired.job_id is None:
        nothing = desired.generation is None and not desired.attempt and not desired.alone
        return desired.job_id is None and nothing
    name = node.facts.node
    if desired.job_id != job.id or desired.alone > (name in job.standing_by):
        return False
    if desired.generation is not None:
        here = job.current.has_member(name) or name in job.current.leaving
        return desired.generation == job.current.generation and here and not desired.attempt
    measuring = job.profiling.under_way.wish.attempt if job.profiling.under_way is not None else 0
    return not desired.save and desired.attempt in (0, measuring)


def _of_the_cluster(state: ClusterState) -> Iterator[str]:
    """Yield the invariants of the cluster as a whole that do not hold."""
    active = [] if state.active is None else [state.active]
    if [job.id for job in state.jobs.values() if _under_way(job)] != active:
        yield "all and only the jobs that are neither queued nor ended have the turn: one at most"
    if not (
        all(name == job.id for name, job in state.jobs.items())
        and all(name == node.facts.node for name, node in state.nodes.items())
        and state.requests == {job.request_id: job.id for job in state.jobs.values()}
    ):
        yield "jobs and nodes are known by their own names, and jobs by their requests"
    if len(state.jobs) > state.submissions:
        yield "no more jobs are known than were submitted"
    sessions = [node.seen.session for node in state.nodes.values() if node.seen.session is not None]
    if len(set(sessions)) < len(sessions):
        yield "every stream belongs to one node"
    if not all((token.key == "") == (token.joined == "") for token in state.trust.tokens.values()):
        yield "a token that was used knows the key and the name that joined by it"


def _of_a_job(state: ClusterState, job: Job) -> Iterator[str]:
    """Yield the invariants of a job that do not hold."""
    current, profiling, saves = job.current, job.profiling, job.saves
    if (job.state in ENDED) != (job.finished_at > 0.0):
        yield "all and only ended jobs have a time of their end"
    opened = current.losses or job.incident or job.slowdown or job.waiting_since
    if job.state in ENDED and (opened or job.lineage.plans or job.lineage.before or current.base):
        yield "an ended job has no open loss, incident or wait, and keeps its newest plan alone"
    if (job.state == "profiling") != (profiling.under_way is not None):
        yield "all and only jobs that are profiling have an attempt at measuring"
    if profiling.under_way and profiling.under_way.wish.attempt != profiling.attempts:
        yield "the attempt under way is the newest"
    if job.state == "waiting for nodes" and not job.waiting_since:
        yield "a job that waits for nodes knows since when"
    if job.state == "running" and (current.made is None or current.on_the_way or current.losses):
        yield "a running job has committed a step in its newest generation, and has lost nothing"
    if job.state == "reconfiguring" and current.made is None:
        yield "a reconfiguring job has a plan"
    if (job.started_at > 0.0) != (current.trained is not None):
        yield "a job has started as soon as a step was committed"
    if job.incident is not None and not job.incident.setbacks:
        yield "an open failure has a setback"
    if not _numbers_incidents(job):
        yield (
            "incidents have numbers of their own, and the newest is open or the last one "
            "that is over"
        )
    if (job.slowdown is None) != (not job.slow) or _still_slow(job) != job.slow.keys():
        yield "a slowdown is open while there are slow workers, and tells of all of them"
    if job.slow and not (_under_way(job) and _knows_slow(state, job)):
        yield (
            "slow workers are of registered nodes and of processes that the newest plan has "
            "not replaced, and only a job that has the turn knows any"
        )
    if job.stand_bys and not (_under_way(job) and _knows_stand_bys(job)):
        yield (
            "processes that have stood by are none that the newest plan has replaced, only a "
            "job that has the turn knows any, and their times by this master's clock"
        )
    if job.rollback.redo_until and job.rollback.restored is None:
        yield "steps are done again only after a way back to a checkpoint"
    if max(saves.numbers.values(), default=0) > saves.requested:
        yield "the last requests for checkpoints have numbers up to the newest"
    if saves.checkpoint is None and saves.checkpoint_at:
        yield "only a checkpoint has a time at which it was told of"


def _of_its_plans(state: ClusterState, job: Job) -> Iterator[str]:
    """Yield the invariants of a job's plans that do not hold."""
    current, made, lineage = job.current, job.current.made, job.lineage
    if not _generations_grow(job):
        yield (
            "generations only grow, and none has committed a step or was entered at once "
            "that is newer than the newest plan's"
        )
    if not (
        all(generation == plan.generation for generation, plan in lineage.plans.items())
        and (made is None or job.state in ENDED or current.generation in lineage.plans)
    ):
        yield "plans are kept by their generation, the newest one among them until the job ends"
    if job.state not in ENDED and not _has_base(current):
        yield (
            "all and only plans with other routes than of templates or recut have one that "
            "they come from, until the job ends"
        )
    if not (
        current.trained_base is None
        if current.trained is None
        else current.on_the_way or current.trained_base == current.base
    ):
        yield (
            "what the plan comes from that is trained in is known, and the same if that is "
            "the newest"
        )
    if not _lists_match(job):
        yield "every worker of a plan has a process of its own, and leaves or takes part"
    if made is not None and not lineage.replaced.keys().isdisjoint(made.incarnations):
        yield "the newest plan counts on no process that was replaced"
    if not all(_hits_plan(job, loss) for loss in current.losses):
        yield "every open loss is one of the newest plan's nodes or workers"
    if not _has_its_members(current):
        yield "members are the newest plan's nodes that are not lost"
    if job.state not in ENDED and any(current.has_member(name) for name in job.left_out):
        yield "a node that is left out is no member of a job that goes on"
    if state.active == job.id and not all(
        name in state.nodes and state.nodes[name].registered for name in current.members
    ):
        yield "every member is known and registered, as long as the job has the turn"
    if made is not None and len(made.plan.nodes) > lineage.most_nodes:
        yield "the templates cover every plan"


def _of_its_progress(job: Job) -> Iterator[str]:
    """Yield the invariants of a job's records and observations that do not hold."""
    current, plans, seen = job.current, job.lineage.plans, job.seen
    if not (
        sum(len(lost.steps) for lost in job.lost.last) <= job.lost.steps
        and all(a.last < b.first for a, b in pairwise(job.lost.last))
    ):
        yield "lost records are counted, and their ranges follow on each other"
    if seen.timeline is not None and not current.on_the_way:
        yield "only the recovery into a generation that has committed no step has a timeline"
    if seen.loss is not None and seen.loss.evidence_at > seen.loss.declared_at:
        yield "a loss has its first evidence before its declaration"
    if seen.loss is None and not all(isinstance(loss, NodeYielded) for loss in current.losses):
        yield "a loss that no plan has answered has been declared"
    if not _counts_progress(job):
        yield "records follow each other, and none is newer than the newest committed step"
    if not (
        all(e <= plans.keys() for e in seen.processes.entered.values())
        and all(r.generation in plans for r in seen.processes.received.values())
    ):
        yield (
            "processes have entered generations whose plans are kept alone, and received for these"
        )


def _of_a_node(state: ClusterState, node: Node) -> Iterator[str]:
    """Yield the invariants of a node that do not hold."""
    drain, desired, seen = node.drain, node.desired, node.seen
    idle = desired.job_id is None
    if not node.registered and not (
        seen.session is None and idle and node.lost_at > 0.0 and node.reason
    ):
        yield "a lost node has no stream, is to do nothing, and says why and since when"
    if node.stale_workers and not (node.registered and idle):
        yield (
            "stale workers are those of a registered node, which is to do nothing until they "
            "are gone"
        )
    if node.held is not None and (node.stale_workers or not idle):
        yield "a held node is to do nothing, and has no workers of this master's"
    if not _desires(state, node):
        yield (
            "a node does what the active job wants: its newest generation if it is a member, "
            "else to get ready, or to measure"
        )
    if desired.drained != (drain is not None and drain.done):
        yield "all and only nodes whose drain is done are told that they may end"
    if drain is not None and drain.done and drain.kept:
        yield "a drain that is done is kept from nothing"
    if drain is not None and (drain.by == "quarantine") != (drain.until > 0.0):
        yield "all and only quarantines end by themselves"
    if (seen.assigned_at is None) != idle:
        yield "all and only nodes that are to do something have had the time since to prepare"
    if seen.session is not None and (seen.opened_at is None or seen.closed_at is not None):
        yield "an open stream has a beginning and no end"
