"""Evidence of failures from agents, peers and streams, kept until an event carries it to the
journal.

Kept beside the rules' own evidence: a rule needs to know that something failed, an operator later
who saw what and when. Bounded, and the oldest entries are dropped: a stream that closed and came
back, or a peer's report without a loss, belongs to no incident.
"""

import msgspec

from oobleck.core.ids import WorkerId
from oobleck.core.messages import Failed, PeerLost
from oobleck.core.units import head
from oobleck.master.events.nodes import Evidence
from oobleck.master.events.reports import StreamClosed, WorkerReported
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.incidents.incident import MOST_EVIDENCE
from oobleck.master.state.job import Job
from oobleck.proto.types import Hung, WorkerExited

#: Older ones have nothing to do with a failure that is found now.
_STALE_S = 60.0
#: Of a dead process's output: lines and characters of a line that are kept.
_TAIL_LINES = 12
_TAIL_WIDTH = 400


def note_closed(state: ClusterState, event: StreamClosed, now: float) -> None:
    if state.job is not None and state.job.current.has_member(event.node):
        _keep(state.job, now, "stream", "master", event.node, "its agent's stream closed")


def note(state: ClusterState, event: WorkerReported, now: float) -> None:
    """Keep it if it tells of a failure that the job has to do with."""
    job, worker = state.jobs[event.job_id], str(event.worker)
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
    """The job goes on without ever having counted on it."""
    job.seen.evidence = [
        (at, s) for at, s in job.seen.evidence if s.observer.partition("/")[0] != node
    ]


def carried(job: Job, now: float) -> tuple[Evidence, ...]:
    """Return the evidence to put into an event that is decided on now. Applying the event to an
    open incident clears it."""
    return tuple(
        msgspec.structs.replace(evidence, ago_s=now - at)
        for at, evidence in job.seen.evidence
        if now - at <= _STALE_S or job.incident is not None
    )


def of_exit(job: Job, worker: WorkerId, exited: WorkerExited, now: float) -> Evidence:
    """The agent's word on this end."""
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
        return  # told again by a new session
    if len(seen.evidence) >= MOST_EVIDENCE:
        seen.evidence = [(at, s) for at, s in seen.evidence if now - at <= _STALE_S]
    if len(seen.evidence) < MOST_EVIDENCE:
        seen.evidence.append((now, evidence))


def _short(exited: WorkerExited) -> WorkerExited:
    lines = [line[:_TAIL_WIDTH] for line in exited.log_tail.splitlines()[-_TAIL_LINES:]]
    return msgspec.structs.replace(exited, log_tail="\n".join(lines))


def describe_exit(exited: WorkerExited) -> str:
    """Describe how a process ended."""
    if exited.out_of_memory:
        return (
            f"pid {exited.pid} was killed by the kernel, since its host is out of memory: lower "
            "training.microbatch or the agent's --memory-per-worker, or free memory there"
        )
    if exited.signal is not None:
        return f"pid {exited.pid} was killed by signal {exited.signal}"
    return f"pid {exited.pid} exited with code {exited.exit_code}"


def last_words(exited: WorkerExited) -> str:
    """Return the last line that a process printed; in a traceback it names the exception."""
    return head(exited.log_tail.strip().rpartition("\n")[2]) or "no output"
