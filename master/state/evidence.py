"""Evidence of failures from agents, peers and streams, kept until an event carries it to the
journal.

Rules need only the fact of a failure; this keeps its witnesses and times for operators. Bounded,
oldest dropped first: some entries belong to no incident, such as a stream that closed and opened
again, or a peer's report without a loss.
"""

from statistics import median

import msgspec

from oobleck.core.ids import WorkerId
from oobleck.core.messages import Failed, PeerLost
from oobleck.master.events.jobs import PHASES, Evidence, ReconfigurationStats
from oobleck.master.events.unions import StreamClosed, WorkerReported
from oobleck.master.state.incident import MOST_EVIDENCE, describe_exit
from oobleck.master.state.job import Job
from oobleck.proto.types import Hung, WorkerExited

#: Seconds after which evidence is unrelated to a failure that is found now.
_STALE_S = 60.0
#: Lines of a dead process's output that are kept, and characters of each.
_TAIL_LINES = 12
_TAIL_WIDTH = 400


def note_closed(job: Job | None, event: StreamClosed, now: float) -> None:
    """Note that a stream closed, if `job` has the node in its plan."""
    if job is not None and job.current.has_member(event.node):
        _keep(job, now, "stream", "master", event.node, "its agent's stream closed")


def note(job: Job, event: WorkerReported, now: float) -> None:
    """Note the report if it is about a failure that concerns its `job`."""
    worker = str(event.worker)
    match event.what:
        case WorkerExited() as exited:
            if _of_plan(job, event) or _is_missed(job, event.worker):
                _add(job, now, _exit(event.worker, exited))
        case Hung() as hung:
            if _of_plan(job, event):
                _add(job, now, of_hang(event.worker, hung))
        case PeerLost(detail=detail):
            _keep(job, now, "peer", worker, "", detail)
        case Failed(message=message):
            _keep(job, now, "worker", worker, worker, message)
        case _:
            pass


def _of_plan(job: Job, event: WorkerReported) -> bool:
    return job.current.made is None or event.incarnation in job.current.processes().values()


def _is_missed(job: Job, worker: WorkerId) -> bool:
    """Return whether the worker's process was found gone and its exit is not yet known."""
    setbacks = job.incident.setbacks if job.incident is not None else ()
    return any(s.kind == "worker died" and s.worker == worker and s.pid is None for s in setbacks)


def forget_stream(job: Job, node: str) -> None:
    """Forget that the node's stream closed, since its agent is back."""
    job.seen.evidence = [
        (at, s) for at, s in job.seen.evidence if not (s.by == "stream" and s.about == node)
    ]


def forget_node(job: Job, node: str) -> None:
    """Forget the node's evidence: the job never used the node, and continues."""
    job.seen.evidence = [
        (at, s) for at, s in job.seen.evidence if s.observer.partition("/")[0] != node
    ]


def carried(job: Job, now: float) -> tuple[Evidence, ...]:
    """Return the evidence for an event that is decided now; applying the event clears it."""
    return tuple(
        msgspec.structs.replace(evidence, ago_s=now - at)
        for at, evidence in job.seen.evidence
        if now - at <= _STALE_S or job.incident is not None
    )


def of_exit(job: Job, worker: WorkerId, exited: WorkerExited, now: float) -> Evidence:
    """Return the agent's evidence of this exit."""
    for at, evidence in job.seen.evidence:
        known = evidence.exited
        if known is not None and evidence.about == str(worker) and known.pid == exited.pid:
            return msgspec.structs.replace(evidence, ago_s=now - at)
    return _exit(worker, exited)


def of_hang(worker: WorkerId, hung: Hung) -> Evidence:
    return Evidence(
        by="agent",
        observer=worker.node,
        about=str(worker),
        saw=hung.reason[:_TAIL_WIDTH],
        ago_s=hung.seconds,
    )


def _exit(worker: WorkerId, exited: WorkerExited) -> Evidence:
    return Evidence(
        by="agent",
        observer=worker.node,
        about=str(worker),
        saw=describe_exit(exited),
        exited=_short(exited),
    )


def _keep(job: Job, now: float, by: str, observer: str, about: str, saw: str) -> None:
    evidence = Evidence(
        by=by,  # type: ignore[arg-type]  # one of the literals above
        observer=observer,
        about=about,
        saw=saw[:_TAIL_WIDTH],
    )
    _add(job, now, evidence)


def _add(job: Job, now: float, evidence: Evidence) -> None:
    seen = job.seen
    if any(evidence == known for _, known in seen.evidence):
        return  # a repetition in a new session
    if len(seen.evidence) >= MOST_EVIDENCE:
        seen.evidence = [(at, s) for at, s in seen.evidence if now - at <= _STALE_S]
    if len(seen.evidence) < MOST_EVIDENCE:
        seen.evidence.append((now, evidence))


def _short(exited: WorkerExited) -> WorkerExited:
    lines = [line[:_TAIL_WIDTH] for line in exited.log_tail.splitlines()[-_TAIL_LINES:]]
    return msgspec.structs.replace(exited, log_tail="\n".join(lines))


def transition_stats(job: Job, now: float) -> ReconfigurationStats | None:
    """Return statistics of the transition into the newest generation; None: none is under way."""
    if job.current.made is None or not job.current.on_the_way:
        return None
    stats = _observed_stats(job, now, job.current.made.detect_s)
    return msgspec.structs.replace(stats, stall_s=_stall_s(job, now))


def _stall_s(job: Job, now: float) -> float | None:
    """Return the seconds between the last step before the newest generation and its first one, less
    one usual step; None: one of the two is not known."""
    seen = job.seen
    recent, generation = job.seen.steps.recent, job.current.generation
    before = [record for record in recent if record.generation < generation]
    if not before and job.seen.steps.last_before is not None:
        before = [job.seen.steps.last_before]  # the newest record may already be of later steps
    first = next((record for record in recent if record.generation >= generation), None)
    if first is not None:
        if before and first.step > before[-1].step + 1:
            return None  # records of steps between are late
        at = first.time
    elif seen.steps.redone is not None and seen.steps.redone[0] == generation:
        at = job.seen.unix(now)  # a repeated step has no second record
    else:
        return None
    if not before:
        return None
    usual_s = median(record.step_seconds for record in before)
    return max(0.0, at - before[-1].time - usual_s)


def _observed_stats(job: Job, now: float, detect_s: float) -> ReconfigurationStats:
    timeline = job.seen.timeline
    if timeline is not None:
        end = now if timeline.first_step_at is None else timeline.first_step_at
        return timeline.stats(end, job.unanswered())
    # An earlier master process made the plan, so only Unix time spans both.
    first = next(
        (r.time for r in job.seen.steps.recent if r.generation >= job.current.generation),
        job.seen.unix(now),
    )
    phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    phases["detect"], phases["waiting"] = detect_s, job.current.waited_s
    phases["first_step"] = max(0.0, first - job.current.made_at)
    return ReconfigurationStats(
        phases=phases,
        total_s=sum(phases.values()),
        redo_step=None,
        rolled_forward=False,
        received_bytes=0,
        master_restarted=True,
    )
