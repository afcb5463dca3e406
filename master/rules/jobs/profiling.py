"""The job's profile before its first plan: stored, measured by its workers, or estimated.

All ready workers measure at the same time, as all will compute at the same time, and two of them
the link between nodes (two of one node that inside a node). A worker that ends meanwhile does not
hold up the rest; where it was to measure a link, the measurement begins anew with others. After a
time-out what is there counts, and where no layers are there, the estimate. What lacks a part that
was asked for is for this job alone. Pure.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from oobleck.core.ids import Incarnation, NodeName, WorkerId
from oobleck.core.messages import LinkPair, Measure, Rendezvous
from oobleck.core.profile import Scope
from oobleck.core.units import count
from oobleck.master.events.jobs import JobFailed, JobSucceeded, MeasuringStarted, ProfileChosen
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.planner.profile.measurement import assemble_profile, check_measured, profile_key
from oobleck.planner.profile.memory import budget_bytes

#: Measurements that lost a worker of a link begin anew so often; after that the link is filled in.
_MOST_ATTEMPTS = 3
#: Of workers in a reason.
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


def key_of(job: Job, nodes: Sequence[Node]) -> str:
    """Name of the measurements that hold for `job` on `nodes`."""
    per_host = Counter[str]()
    for node in nodes:
        per_host[node.facts.hostname] += node.facts.worker_slots
    return profile_key(
        job.spec,
        devices=[node.facts.device_kind for node in nodes],
        worker_slots=nodes[0].facts.worker_slots,
        workers_per_host=max(per_host.values()),
        several_nodes=len(nodes) > 1,
    )


def profile_of_adopted(state: ClusterState, job: Job, names: Iterable[NodeName]) -> ProfileChosen:
    """Return what plans of a job are made by that was taken over while it trained: a stored
    profile, or the estimate."""
    nodes = [state.nodes[name] for name in names]
    key = key_of(job, nodes)
    stored = state.profiles.get(key)
    if stored is None or _passed_over(state, job, nodes, key):
        reason = "the master that had the job had measured it, and this one has not"
        return ProfileChosen(job_id=job.id, source="estimate", profile=None, key="", reason=reason)
    reason = f"profile {key}"
    return ProfileChosen(job_id=job.id, source="stored", profile=stored, key=key, reason=reason)


def _choose(context: Context, job: Job, ready: Sequence[Node]) -> Decision:
    asked = (
        {worker.node for worker, _ in job.profiling.under_way.workers}
        if job.profiling.under_way
        else set()
    )
    # A node that has come meanwhile is not part of the load that was measured under.
    key = key_of(job, [node for node in ready if node.facts.node in asked] or ready)
    stored = context.state.profiles.get(key)
    passed_over = _passed_over(context.state, job, ready, key)
    if stored is not None and not passed_over and not job.profile_only:
        chosen = ProfileChosen(
            job_id=job.id, source="stored", profile=stored, key=key, reason=f"profile {key}"
        )
        return Decision(actions=(chosen,), reason="a stored profile fits")
    measuring = job.profiling.under_way
    if measuring is None:
        return _begin(context, job, ready, "" if job.profile_only else passed_over)
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


def _passed_over(state: ClusterState, job: Job, ready: Sequence[Node], key: str) -> str:
    """Why the stored profile of that name is not for `job`; empty: nothing speaks against it."""
    why = state.unusable_profiles.get(key, "")
    if (stored := state.profiles.get(key)) is not None:
        try:
            check_measured(stored, job.spec, gpus_per_node=ready[0].facts.worker_slots)
        except ValueError as error:
            why = str(error)
    return f"profiles/{key}.json: {why}" if why else ""


def _gone(
    state: ClusterState, measuring: MeasuringStarted, ready: Sequence[Node]
) -> frozenset[WorkerId]:
    """Return the measuring workers that are gone or are another process now."""
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
    """Inside the first node that has two workers, and between the first two nodes."""
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
    """Make what was measured the job's profile, or say why the estimate takes its place."""
    answers = list(job.seen.profiling.measured.values())
    found = [answer.measurement for answer in answers if answer.measurement is not None]
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
            found,
            links,
            gpus_per_node=ready[0].facts.worker_slots,
            memory_bytes=budget_bytes(None, physical),
        )
    except ValueError as error:
        why = "; ".join([*missing, str(error)] if found or not missing else missing)
        return _estimate(job, why if job.profile_only else f"the estimate is used: {why}")
    missing += _unlinked(job)
    reason = "; ".join([f"measured by {count(len(found), 'worker')}", *missing])
    if missing:
        # Others are not to be planned by it for good.
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
    found: dict[str, list[str]] = {}
    for worker, process in job.profiling.under_way.workers:
        answer = job.seen.profiling.measured.get(process)
        if worker.node in names and (answer is None or answer.measurement is None):
            why = answer.problem if answer is not None else "no answer"
            found.setdefault(why, []).append(str(worker))
    return [f"{_some(workers)}: {why}" for why, workers in sorted(found.items())]


def _unlinked(job: Job) -> list[str]:
    """List the links that were to be measured and were not, with the reasons."""
    assert job.profiling.under_way is not None, "this is asked at the end of a measurement"
    found = []
    for pair in job.profiling.under_way.wish.meetings:
        answer = job.seen.profiling.links_measured.get(pair.scope)
        if answer is None or answer.link is None:
            why = f": {answer.problem}" if answer is not None and answer.problem else ""
            ends = " and ".join(map(str, pair.workers))
            found.append(f"the link between {ends} was not measured{why}")
    return found


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _estimate(job: Job, reason: str) -> Decision:
    chosen = ProfileChosen(job_id=job.id, source="estimate", profile=None, key="", reason=reason)
    return Decision(actions=(chosen,), reason=reason)
