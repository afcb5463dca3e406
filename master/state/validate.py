"""Invariants of the master's state, each sentence beside its check.

A state that breaks one of them follows from no history that the rules allow. Any decision on it
would be wrong, so `oobleck-master --validate` ends. Pure; looks at everything and changes nothing.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import TypeVar

from oobleck.core.ids import NodeName, WorkerId
from oobleck.master.events.nodes import NodeYielded, WorkerLost
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import ENDED, CurrentPlan, Job, Loss
from oobleck.master.state.node import Node
from oobleck.planner.recovery.course import adds_holders

T = TypeVar("T")
#: Sentence, and whether it holds for one part of a state.
Invariant = tuple[str, Callable[[ClusterState, T], bool]]


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
    yield from _broken(OF_THE_CLUSTER, state, "the cluster", state)
    for job in state.jobs.values():
        yield from _broken(OF_A_JOB, state, f"job {job.id}", job)
    for node in state.nodes.values():
        yield from _broken(OF_A_NODE, state, f"node {node.facts.node}", node)


def _broken(
    invariants: tuple[Invariant[T], ...], state: ClusterState, subject: str, of: T
) -> Iterator[InvariantViolation]:
    for sentence, holds in invariants:
        if not holds(state, of):
            yield InvariantViolation(sentence, subject)


def _under_way(job: Job) -> bool:
    return job.state != "queued" and job.state not in ENDED


def _hits_plan(job: Job, loss: Loss) -> bool:
    if isinstance(loss, WorkerLost):
        return loss.worker in job.current.processes() or (
            job.current.made is not None and loss.worker in job.current.made.leaving
        )
    return loss.node in _nodes_of_plan(job)


def _trains(current: CurrentPlan) -> bool:
    return current.made is not None and not current.on_the_way and not current.losses


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
        0 < told.rate < 1
        and processes.get(worker, told.incarnation) == told.incarnation
        and worker.node in state.nodes
        and state.nodes[worker.node].registered
        for worker, told in job.slow.items()
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


OF_THE_CLUSTER: tuple[Invariant[ClusterState], ...] = (
    (
        "all and only the jobs that are neither queued nor ended have the turn: one at most",
        lambda state, _: (
            [job.id for job in state.jobs.values() if _under_way(job)]
            == ([] if state.active is None else [state.active])
        ),
    ),
    (
        "jobs and nodes are known by their own names, and jobs by their requests",
        lambda state, _: (
            all(name == job.id for name, job in state.jobs.items())
            and all(name == node.facts.node for name, node in state.nodes.items())
            and state.requests == {job.request_id: job.id for job in state.jobs.values()}
        ),
    ),
    (
        "no more jobs are known than were submitted",
        lambda state, _: len(state.jobs) <= state.submissions,
    ),
    (
        "every stream belongs to one node",
        lambda state, _: (
            max(
                Counter(
                    node.seen.session
                    for node in state.nodes.values()
                    if node.seen.session is not None
                ).values(),
                default=1,
            )
            == 1
        ),
    ),
    (
        "a token that was used knows the key and the name that joined by it",
        lambda state, _: all(
            (token.key == "") == (token.joined == "") for token in state.trust.tokens.values()
        ),
    ),
)

OF_A_JOB: tuple[Invariant[Job], ...] = (
    (
        "all and only ended jobs have a time of their end",
        lambda _, job: (job.state in ENDED) == (job.finished_at > 0.0),
    ),
    (
        "an ended job has no open loss, incident or wait, and keeps its newest plan alone",
        lambda _, job: (
            job.state not in ENDED
            or not (
                job.current.losses
                or job.incident
                or job.slowdown
                or job.waiting_since
                or job.lineage.plans
                or job.lineage.before
                or job.current.base
            )
        ),
    ),
    (
        "all and only jobs that are profiling have an attempt at measuring",
        lambda _, job: (job.state == "profiling") == (job.profiling.under_way is not None),
    ),
    (
        "the attempt under way is the newest",
        lambda _, job: (
            job.profiling.under_way is None
            or job.profiling.under_way.wish.attempt == job.profiling.attempts
        ),
    ),
    (
        "a job that waits for nodes knows since when",
        lambda _, job: job.state != "waiting for nodes" or job.waiting_since > 0.0,
    ),
    (
        "a running job has committed a step in its newest generation, and has lost nothing",
        lambda _, job: job.state != "running" or _trains(job.current),
    ),
    (
        "a reconfiguring job has a plan",
        lambda _, job: job.state != "reconfiguring" or job.current.made is not None,
    ),
    (
        "a job has started as soon as a step was committed",
        lambda _, job: (job.started_at > 0.0) == (job.current.trained is not None),
    ),
    (
        "generations only grow, and none has committed a step or was entered at once that is "
        "newer than the newest plan's",
        lambda _, job: _generations_grow(job),
    ),
    (
        "plans are kept by their generation, the newest one among them until the job ends",
        lambda _, job: (
            all(generation == plan.generation for generation, plan in job.lineage.plans.items())
            and (
                job.current.made is None
                or job.state in ENDED
                or job.current.generation in job.lineage.plans
            )
        ),
    ),
    (
        "all and only plans with other routes than of templates or recut have one that they come "
        "from, until the job ends",
        lambda _, job: job.state in ENDED or _has_base(job.current),
    ),
    (
        "what the plan comes from that is trained in is known, and the same if that is the newest",
        lambda _, job: (
            job.current.trained_base is None
            if job.current.trained is None
            else job.current.on_the_way or job.current.trained_base == job.current.base
        ),
    ),
    (
        "every worker of a plan has a process of its own, and leaves or takes part",
        lambda _, job: _lists_match(job),
    ),
    (
        "the newest plan counts on no process that was replaced",
        lambda _, job: (
            job.current.made is None
            or job.lineage.replaced.keys().isdisjoint(job.current.made.incarnations)
        ),
    ),
    (
        "every open loss is one of the newest plan's nodes or workers",
        lambda _, job: all(_hits_plan(job, loss) for loss in job.current.losses),
    ),
    (
        "members are the newest plan's nodes that are not lost",
        lambda _, job: _has_its_members(job.current),
    ),
    (
        "a node that is left out is no member of a job that goes on",
        lambda _, job: (
            job.state in ENDED or not any(job.current.has_member(name) for name in job.left_out)
        ),
    ),
    (
        "every member is known and registered, as long as the job has the turn",
        lambda state, job: (
            state.active != job.id
            or all(
                name in state.nodes and state.nodes[name].registered for name in job.current.members
            )
        ),
    ),
    (
        "the templates cover every plan",
        lambda _, job: (
            job.current.made is None or len(job.current.made.plan.nodes) <= job.lineage.most_nodes
        ),
    ),
    (
        "an open failure has a setback",
        lambda _, job: job.incident is None or bool(job.incident.setbacks),
    ),
    (
        "incidents have numbers of their own, and the newest is open or the last one that is over",
        lambda _, job: _numbers_incidents(job),
    ),
    (
        "a slowdown is open while there are slow workers, and tells of all of them",
        lambda _, job: (
            (job.slowdown is None) == (not job.slow) and _still_slow(job) == job.slow.keys()
        ),
    ),
    (
        "slow workers are of registered nodes and of processes that the newest plan has not "
        "replaced, and only a job that has the turn knows any",
        lambda state, job: not job.slow or (_under_way(job) and _knows_slow(state, job)),
    ),
    (
        "processes that have stood by are none that the newest plan has replaced, only a job that "
        "has the turn knows any, and their times by this master's clock",
        lambda _, job: not job.stand_bys or (_under_way(job) and _knows_stand_bys(job)),
    ),
    (
        "steps are done again only after a way back to a checkpoint",
        lambda _, job: not job.rollback.redo_until or job.rollback.restored is not None,
    ),
    (
        "lost records are counted, and their ranges follow on each other",
        lambda _, job: (
            sum(len(lost.steps) for lost in job.lost.last) <= job.lost.steps
            and all(a.last < b.first for a, b in pairwise(job.lost.last))
        ),
    ),
    (
        "the last requests for checkpoints have numbers up to the newest",
        lambda _, job: max(job.saves.numbers.values(), default=0) <= job.saves.requested,
    ),
    (
        "only a checkpoint has a time at which it was told of",
        lambda _, job: job.saves.checkpoint is not None or not job.saves.checkpoint_at,
    ),
    (
        "only the recovery into a generation that has committed no step has a timeline",
        lambda _, job: job.seen.timeline is None or job.current.on_the_way,
    ),
    (
        "a loss has its first evidence before its declaration",
        lambda _, job: (
            job.seen.loss is None or job.seen.loss.evidence_at <= job.seen.loss.declared_at
        ),
    ),
    (
        "a loss that no plan has answered has been declared",
        lambda _, job: (
            job.seen.loss is not None
            or all(isinstance(loss, NodeYielded) for loss in job.current.losses)
        ),
    ),
    (
        "records follow each other, and none is newer than the newest committed step",
        lambda _, job: _counts_progress(job),
    ),
    (
        "processes have entered generations whose plans are kept alone, and received for these",
        lambda _, job: (
            all(e <= job.lineage.plans.keys() for e in job.seen.processes.entered.values())
            and all(r.generation in job.lineage.plans for r in job.seen.processes.received.values())
        ),
    ),
)

OF_A_NODE: tuple[Invariant[Node], ...] = (
    (
        "a lost node has no stream, is to do nothing, and says why and since when",
        lambda _, node: (
            node.registered
            or (
                node.seen.session is None
                and node.desired.job_id is None
                and node.lost_at > 0.0
                and node.reason != ""
            )
        ),
    ),
    (
        "stale workers are those of a registered node, which is to do nothing until they are gone",
        lambda _, node: not node.stale_workers or (node.registered and node.desired.job_id is None),
    ),
    (
        "a held node is to do nothing, and has no workers of this master's",
        lambda _, node: (
            node.held is None or (not node.stale_workers and node.desired.job_id is None)
        ),
    ),
    (
        "a node does what the active job wants: its newest generation if it is a member, else "
        "to get ready, or to measure",
        _desires,
    ),
    (
        "all and only nodes whose drain is done are told that they may end",
        lambda _, node: node.desired.drained == (node.drain is not None and node.drain.done),
    ),
    (
        "a drain that is done is kept from nothing",
        lambda _, node: node.drain is None or not (node.drain.done and node.drain.kept),
    ),
    (
        "all and only quarantines end by themselves",
        lambda _, node: (
            node.drain is None or (node.drain.by == "quarantine") == (node.drain.until > 0.0)
        ),
    ),
    (
        "all and only nodes that are to do something have had the time since to prepare",
        lambda _, node: (node.seen.assigned_at is None) == (node.desired.job_id is None),
    ),
    (
        "an open stream has a beginning and no end",
        lambda _, node: (
            node.seen.session is None
            or (node.seen.opened_at is not None and node.seen.closed_at is None)
        ),
    ),
)
