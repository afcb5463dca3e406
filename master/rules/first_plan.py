"""Rule about a job's first plan: the nodes it waits for, and the profile it is made by.

A profile is stored, measured by the job's workers, or estimated. All ready workers measure at the
same time, since all will compute at the same time. Two of them also measure the link between nodes,
and two of one node the link inside a node. A worker that ends meanwhile does not hold up the rest;
if it was to measure a link, the measurement begins anew with others. After a time-out the
measurements that are there count, or the estimate where no layers were measured. An incomplete
profile is not stored: it serves this job alone. Must not know later plans.
"""

from collections.abc import Sequence

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Incarnation, NodeName, WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import LinkPair, Measure, Rendezvous
from oobleck.core.profile import Scope
from oobleck.core.units import count
from oobleck.master.events.jobs import (
    JobFailed,
    JobStarted,
    JobSucceeded,
    MeasuringStarted,
    ProfileChosen,
)
from oobleck.master.planning import client
from oobleck.master.rules import questions
from oobleck.master.rules.decision import Context, Decision, left_out
from oobleck.master.rules.next_plan import getting_ready, wait, waits_for
from oobleck.master.rules.plan_made import plan_made
from oobleck.master.rules.questions import (
    is_away,
    key_of,
    names,
    next_generation,
    start_deadline,
)
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import ENDED, Job
from oobleck.master.state.node import Node
from oobleck.planner.profile.measurement import assemble_profile
from oobleck.planner.profile.memory import budget_bytes

#: Most attempts if workers that measure links end; then the other link's figures, or an estimate,
#: take the place of the missing ones.
_MOST_ATTEMPTS = 3
#: Most names of workers in a reason.
_MOST_NAMES = 8


def before_plan(context: Context, job: Job, ready: Sequence[Node]) -> Decision | None:
    """Decide what must happen on the `ready` nodes before the first plan; None: nothing."""
    if job.profiling.chosen is None and job.spec.profile == "measure":
        return _choose(context, job, ready)
    if not job.profile_only:
        return None
    if job.profiling.chosen is not None and job.profiling.chosen.profile is None:
        reason = f"the model could not be measured: {job.profiling.chosen.reason}"
        return Decision(actions=(JobFailed(job_id=job.id, reason=reason),), reason=reason)
    return Decision(actions=(JobSucceeded(job_id=job.id),), reason="the profile was all it wanted")


def _choose(context: Context, job: Job, ready: Sequence[Node]) -> Decision:
    asked = (
        {worker.node for worker, _ in job.profiling.under_way.workers}
        if job.profiling.under_way
        else set()
    )
    # Without nodes that have joined meanwhile, since they were no part of the measured load.
    key = key_of(job, [node for node in ready if node.facts.node in asked] or ready)
    stored = context.state.profiles.get(key)
    problem = questions.unusable_profile(context.state, job, ready, key)
    if stored is not None and not problem and not job.profile_only:
        chosen = ProfileChosen(
            job_id=job.id, source="stored", profile=stored, key=key, reason=f"profile {key}"
        )
        return Decision(actions=(chosen,), reason="a stored profile fits")
    measuring = job.profiling.under_way
    if measuring is None:
        return _begin(context, job, ready, "" if job.profile_only else problem)
    gone = _gone(context.state, measuring, ready)
    pending = {pair.scope: pair for pair in measuring.wish.meetings}
    for scope in job.seen.profiling.links_measured:
        pending.pop(scope, None)
    broken = {
        scope: pair
        for scope, pair in pending.items()
        if any(worker in gone for worker in pair.workers)
    }
    if broken and measuring.wish.attempt < _MOST_ATTEMPTS:
        return _begin(context, job, ready)
    silent = [
        worker
        for worker, process in measuring.workers
        if worker not in gone and process not in job.seen.profiling.measured
    ]
    waiting = bool(silent) or len(pending) > len(broken)
    due = (job.seen.profiling.measuring_since or context.now) + context.timing.profile_timeout_s
    if waiting and context.now < due:
        return Decision(wake_at=due, reason=f"{job.id}: the model is measured")
    return _conclude(context, job, ready, key, timed_out=waiting)


def _gone(
    state: ClusterState, measuring: MeasuringStarted, ready: Sequence[Node]
) -> frozenset[WorkerId]:
    """Return the measuring workers that have ended or been replaced."""
    names = {node.facts.node for node in ready}

    def here(worker: WorkerId, process: Incarnation) -> bool:
        if worker.node not in names:
            return False
        status = state.nodes[worker.node].seen.status.worker(worker.slot)
        return status is not None and status.incarnation == process

    return frozenset(worker for worker, process in measuring.workers if not here(worker, process))


def _begin(context: Context, job: Job, ready: Sequence[Node], passed_over: str = "") -> Decision:
    attempt = job.profiling.attempts + 1
    workers = [
        (WorkerId(node.facts.node, status.slot), status.incarnation)
        for node in ready
        for status in node.seen.status.workers
    ]
    event = MeasuringStarted(
        job_id=job.id,
        wish=Measure(
            attempt=attempt,
            meetings=tuple(_pairs(context, job, ready, attempt)),
            gpus=ready[0].facts.worker_slots,
        ),
        workers=tuple(workers),
        passed_over=passed_over,
    )
    again = f", attempt {attempt}" if attempt > 1 else ""
    return Decision(actions=(event,), reason=f"{count(len(workers), 'worker')} measure{again}")


def _pairs(context: Context, job: Job, ready: Sequence[Node], attempt: int) -> list[LinkPair]:
    """Return the pairs that measure links: inside a node with two workers, and between nodes."""
    pairs: list[tuple[Scope, WorkerId, WorkerId]] = []
    roomy = [node.facts.node for node in ready if node.facts.worker_slots > 1]
    if roomy:
        pairs.append(("intra_node", WorkerId(roomy[0], 0), WorkerId(roomy[0], 1)))
    if len(ready) > 1:
        one, other = ready[0].facts.node, ready[1].facts.node
        pairs.append(("inter_node", WorkerId(one, 0), WorkerId(other, 0)))
    return [
        LinkPair(
            scope=scope,
            workers=(first, second),
            rendezvous=Rendezvous(
                host=_card(context.state, first),
                prefix=f"{job.id}/measure-{attempt}/{scope}/{context.nonce}",
            ),
        )
        for scope, first, second in pairs
    ]


def _card(state: ClusterState, worker: WorkerId) -> str:
    status = state.nodes[worker.node].seen.status.worker(worker.slot)
    assert status is not None, "a ready node has a worker in every slot"
    return status.card


def _conclude(
    context: Context, job: Job, ready: Sequence[Node], key: str, *, timed_out: bool
) -> Decision:
    """Make the measurements the job's profile, or say why the estimate takes its place."""
    answers = list(job.seen.profiling.measured.values())
    measurements = [answer.measurement for answer in answers if answer.measurement is not None]
    links = [
        link.link for link in job.seen.profiling.links_measured.values() if link.link is not None
    ]
    physical = min(node.facts.memory_per_worker_bytes for node in ready)
    missing = _unmeasured(job, ready)
    if timed_out:
        waited = f"not all had measured after {context.timing.profile_timeout_s:g} s"
        missing = [": ".join([waited, *missing[:1]]), *missing[1:]]
    try:
        profile, notes = assemble_profile(
            job.spec,
            measurements,
            links,
            gpus_per_node=ready[0].facts.worker_slots,
            memory_bytes=budget_bytes(None, physical),
        )
    except ValueError as error:
        why = "; ".join([*missing, str(error)] if measurements or not missing else missing)
        return _estimate(job, why if job.profile_only else f"the estimate is used: {why}")
    missing += _unlinked(job)
    reason = "; ".join([f"measured by {count(len(measurements), 'worker')}", *missing])
    if missing:
        # It must not serve all later jobs.
        reason += "; it is not stored"
        notes["missing"] = missing
    chosen = ProfileChosen(
        job_id=job.id,
        source="measured",
        profile=profile,
        key="" if missing else key,
        reason=reason,
        notes=notes,
    )
    return Decision(actions=(chosen,), reason=reason)


def _unmeasured(job: Job, ready: Sequence[Node]) -> list[str]:
    """List the workers of `ready` nodes that were asked to measure and did not, with the
    reasons."""
    assert job.profiling.under_way is not None, "this is asked at the end of a measurement"
    names = {node.facts.node for node in ready}
    by_reason: dict[str, list[str]] = {}
    for worker, process in job.profiling.under_way.workers:
        answer = job.seen.profiling.measured.get(process)
        if worker.node in names and (answer is None or answer.measurement is None):
            why = answer.problem if answer is not None else "no answer"
            by_reason.setdefault(why, []).append(str(worker))
    return [f"{_some(workers)}: {why}" for why, workers in sorted(by_reason.items())]


def _unlinked(job: Job) -> list[str]:
    """List the links that were to be measured and were not, with the reasons."""
    assert job.profiling.under_way is not None, "this is asked at the end of a measurement"
    missing = []
    for pair in job.profiling.under_way.wish.meetings:
        answer = job.seen.profiling.links_measured.get(pair.scope)
        if answer is None or answer.link is None:
            why = f": {answer.problem}" if answer is not None and answer.problem else ""
            ends = " and ".join(map(str, pair.workers))
            missing.append(f"the link between {ends} was not measured{why}")
    return missing


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _estimate(job: Job, reason: str) -> Decision:
    chosen = ProfileChosen(job_id=job.id, source="estimate", profile=None, key="", reason=reason)
    return Decision(actions=(chosen,), reason=reason)


def start(context: Context, job: Job) -> Decision | None:
    """Plan generation 1 once every node that may still become ready is."""
    state = context.state
    candidates, _ = state.alike(job)
    ready, unlike = questions.split_by_data(
        state, [node for node in candidates if state.is_ready(node, job)]
    )
    timeout_s = context.timing.start_timeout_s
    pending: list[Node] = []
    given_up: list[Node] = []
    for node in candidates:
        if not state.is_ready(node, job):
            (pending if start_deadline(context, node) > context.now else given_up).append(node)
    here = [node for node in pending if not is_away(context, node)]
    try:
        if len(here) < len(pending) and _enough(job, [*ready, *here]):
            pending = here
        _check_enough(job, [*ready, *pending])
        if job.state == "waiting for nodes":
            _check_shadows(context, job, [*ready, *pending])
            return Decision(actions=(JobStarted(job_id=job.id),), reason="enough nodes are here")
        if pending:
            return getting_ready(context, job, pending)
        if (due := _settled_at(context, job, ready)) is not None and context.now < due:
            return Decision(wake_at=due, reason="enough nodes are ready; more may follow")
        if (first := before_plan(context, job, ready)) is not None:
            return first
        plan = client.first_plan(context.planner, job, ready, next_generation(context, job))
    except PlanInfeasible as infeasible:
        if client.never_fits(job, candidates):
            reason = "; ".join(infeasible.causes)
            return Decision(actions=(JobFailed(job_id=job.id, reason=reason),), reason=reason)
        if given_up and (start := _still_starting(context, job, [*ready, *pending], given_up)):
            return start
        late = f"not ready after {timeout_s:g} s: {names(given_up)}"
        odd = f"{names(unlike)}: {questions.OTHER_DATA}"
        more = [*([late] if given_up else []), *([odd] if unlike else [])]
        return wait(state, job, infeasible, *more)
    reason = f"{count(len(ready), 'node')} {'is' if len(ready) == 1 else 'are'} ready"
    if idle := client.idle_slots(plan, ready[0].facts.worker_slots):
        reason += f"; {idle}"
    event = plan_made(
        context, job, plan, boundary=False, cause="start", rule="start", reason=reason
    )
    out = [left_out(job, node, questions.OTHER_DATA) for node in unlike]
    return Decision(actions=(*out, event), reason=reason)


def shortfall(state: ClusterState, job: Job) -> str:
    """Describe the nodes that the cluster lacks for a job without a plan, or why it failed at once;
    empty: it lacks none, as far as is known."""
    if job.state == "failed":
        return job.reason
    if job.current.made is not None or job.state in ENDED:
        return ""
    nodes = state.candidates(job)
    try:
        _check_enough(job, nodes)
    except PlanInfeasible as infeasible:
        causes = "; ".join(waits_for(state, infeasible))
        if client.never_fits(job, nodes):
            return causes
        too_large = client.exceeds_profile(job) if not nodes else ""
        return "; ".join([too_large] * bool(too_large) + [f"{causes}; the job waits until then"])
    return ""


def code_refused(state: ClusterState, spec: JobSpec) -> tuple[str, bool]:
    """Return which connected nodes do not run a new job's code and why, empty for none, and whether
    no node does."""
    by_reason: dict[str, list[NodeName]] = {}
    connected = [node for _, node in sorted(state.nodes.items()) if node.connected]
    for node in connected:
        if why := node.refuses(spec):
            by_reason.setdefault(why, []).append(node.facts.node)
    refusals = "; ".join(f"{why}: {', '.join(names)}" for why, names in by_reason.items())
    return refusals, bool(connected) and sum(map(len, by_reason.values())) == len(connected)


def _still_starting(
    context: Context, job: Job, nodes: list[Node], late: list[Node]
) -> Decision | None:
    """Wait for nodes that are slow to start, if they are needed and make progress; None: do not
    wait."""
    coming = [node for node in late if node.connected and _has_all(job, node)]
    if not coming or not _enough(job, [*nodes, *coming]):
        return None
    if job.state == "waiting for nodes":
        return Decision(actions=(JobStarted(job_id=job.id),), reason="enough nodes get ready")
    return Decision(reason=f"slow, but they get ready: {names(coming)}")


def _has_all(job: Job, node: Node) -> bool:
    """Return whether every slot has a process of the job, up or not. Processes that have ended do
    not count, even if the last status still lists them."""
    status = node.seen.status
    here = [worker for worker in status.workers if not job.seen.is_gone(worker.incarnation)]
    return status.job_id == job.id and len(here) == node.facts.worker_slots


def _check_enough(job: Job, nodes: list[Node]) -> None:
    """Check that the job can start on `nodes`; any node is enough to measure a model. Raises
    PlanInfeasible."""
    if job.profile_only and nodes:
        return
    client.check_enough(job, nodes)


def _check_shadows(context: Context, job: Job, nodes: list[Node]) -> None:
    """Check the memory for shadows, if `nodes` are enough only with shadows. This takes a plan.
    Raises PlanInfeasible."""
    if not job.profile_only and client.needs_shadows(job, nodes):
        client.first_plan(context.planner, job, nodes, next_generation(context, job))


def _settled_at(context: Context, job: Job, ready: list[Node]) -> float | None:
    """Return the time until which a start on fewer nodes than templates need waits for others.
    None: there are enough. When a cluster is switched on, all its nodes start at about the same
    time."""
    if job.profile_only or not client.needs_shadows(job, ready):
        return None
    return max(node.seen.ready_at or context.now for node in ready) + context.timing.join_settle_s


def _enough(job: Job, nodes: list[Node]) -> bool:
    try:
        _check_enough(job, nodes)
    except PlanInfeasible:
        return False
    return True
