"""Lines of events.jsonl, and of the cluster's events, that follow from a journaled event.

Pure: the same journal gives the same lines, so that a restarted master knows which of them the file
lacks. Must not know files; `oobleck.master.storage.records` numbers and writes the lines.
"""

from collections.abc import Iterator, Mapping

import msgspec

from oobleck.core.ids import JobId
from oobleck.master.events import jobs, nodes
from oobleck.master.events.trust import (
    CredentialIssued,
    CredentialsRevoked,
    TokenCreated,
    TokenRevoked,
)
from oobleck.master.events.unions import JournalCut, Journaled, MasterStarted, TermBegan
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.incidents import closes, incident_after, own_error_after
from oobleck.master.state.job import ENDED
from oobleck.master.state.slowdowns import slowdown_after
from oobleck.master.state.trust import token_id
from oobleck.master.storage.incident_lines import (
    EventLine,
    end_lines,
    incident_line,
    plan_lines,
    slowdown_line,
)

#: Events that are written as they are: the event's name in the file, and the fields.
_PLAIN: Mapping[type[Journaled], tuple[str, ...]] = {
    nodes.NodeDrainRequested: ("node_draining", "node", "reason", "force"),
    nodes.NodeKept: ("node_kept", "node", "reason"),
    nodes.NodeUndrained: ("node_undrained", "node"),
    nodes.NodeQuarantined: ("node_quarantined", "node", "reason", "seconds"),
    nodes.NodeReleased: ("node_released", "node", "reason"),
    nodes.NodeLeftOut: ("node_left_out", "node", "reason"),
    nodes.NodeReset: ("node_reset", "node", "reason"),
    jobs.ProfileChosen: ("profile", "source", "key", "reason"),
    jobs.RecordsDiffer: ("records_differ", "record", "step", "nodes", "fields"),
    jobs.RecordsLost: ("records_lost", "first", "last", "why"),
    jobs.JobPutBack: ("put_back", "instead"),
}
#: Events of the cluster about tokens and certificates, which only operators may list.
_OF_CREDENTIALS = frozenset(
    {"token_created", "token_revoked", "certificate_issued", "certificates_revoked"}
)


class _Named(msgspec.Struct, frozen=True):
    event: str


def is_of_credentials(line: str) -> bool:
    """Return whether a line of the cluster's events is about a token or a certificate."""
    return msgspec.json.decode(line, type=_Named).event in _OF_CREDENTIALS


def lines_of(state: ClusterState, event: Journaled, unix: float) -> list[tuple[JobId, EventLine]]:
    """Return the lines that follow from `event` at `unix`; `state` is as before it."""
    lines = _lines_of(state, event)
    over = list(_incidents(state, event, unix))
    last = (
        [lines.pop()] if over and isinstance(event, jobs.JobEnded) else []
    )  # the line of the job's end stays last
    return [*lines, *over, *last]


def _incidents(
    state: ClusterState, event: Journaled, unix: float
) -> Iterator[tuple[JobId, EventLine]]:
    """Yield a line for each incident or slowdown that ends with `event`."""
    incident = incident_after(state, event, unix)
    if incident is not None and closes(incident[0], event):
        yield incident[0].id, incident_line(*incident, event, unix)
    apart = own_error_after(state, event, unix)
    if apart is not None:
        yield apart[0].id, incident_line(*apart, event, unix)
    slow = slowdown_after(state, event, unix)
    if slow is not None and slow[1].is_over:
        yield slow[0].id, slowdown_line(*slow, event, unix)


def _lines_of(state: ClusterState, event: Journaled) -> list[tuple[JobId, EventLine]]:
    match event:
        case JournalCut():
            going_on = [job.id for job in state.jobs.values() if job.state not in ENDED]
            return [(job_id, _cut_line(event, job_id)) for job_id in going_on]
        case jobs.PlanMade():
            return [(event.job_id, line) for line in plan_lines(state, event)]
        case (
            jobs.FirstStepCommitted() | jobs.JobSucceeded() | jobs.JobFailed() | jobs.JobCancelled()
        ):
            return [(event.job_id, line) for line in end_lines(state, event)]
        case _:
            line = _line(state, event)
            # Events about nodes are reported to the active job.
            of_node = isinstance(event, nodes.DrainEvent)
            job_id: JobId | None = None if of_node else getattr(event, "job_id", None)
            job_id = job_id or state.active
            return [(job_id, line)] if line is not None and job_id is not None else []


def _with(name: str, source: object, *fields: str) -> dict[str, object]:
    """Build the line `name` with some fields of `source`."""
    return {"event": name, **{field: getattr(source, field) for field in fields}}


def _line(state: ClusterState, event: Journaled) -> EventLine | None:
    """Return the line of an event about one node or job; None: it has none."""
    if (plain := _PLAIN.get(type(event))) is not None:
        return _with(plain[0], event, *plain[1:])
    match event:
        case nodes.NodeRegistered(facts=facts):
            return _with("node_joined", facts, "node", "hostname", "worker_slots")
        case nodes.NodeLost():
            in_plan = state.job is not None and state.job.current.has_member(event.node)
            lost = _with("node_lost", event, "node", "cause", "reason", "detect_s")
            return lost | {"in_plan": in_plan}
        case nodes.NodeDrained():
            drain = state.nodes[event.node].drain
            reason = drain.reason if drain is not None else ""
            forced = event.job_id is not None
            if drain is not None and drain.by == "quarantine" and not forced:
                return None  # no drain by an operator, and node_quarantined has its line
            return _with("node_drained", event, "node") | {"reason": reason, "abrupt": forced}
        case jobs.JobSubmitted(spec=spec):
            return _with("submitted", spec, "name")
        case jobs.JobAdopted(spec=spec):
            return {**_with("adopted", spec, "name"), "nodes": event.nodes}
        case nodes.WorkerLost(worker=worker):
            name = "worker_late" if event.late else "worker_lost"
            return _with(name, worker, "node", "slot") | {"reason": event.reason}
        case jobs.MeasuringStarted():
            workers = [str(worker) for worker, _ in event.workers]
            line = {"event": "profiling", "workers": workers, "attempt": event.wish.attempt}
            return line | ({"passed_over": event.passed_over} if event.passed_over else {})
        case jobs.CheckpointPublished(saved=saved):
            return _with("checkpoint_saved", saved, "step", "path", "bytes", "seconds", "request")
        case jobs.SaveProblem(failed=failed):
            return _with(f"{failed.what}_failed", failed, "step", "reason", "request")
        case jobs.JobRestored(restored=restored):
            return {
                **_with("resumed" if event.resumed else "restored", restored, "step", "path"),
                "passed_over": restored.passed_over,
                "lost_steps": event.lost_steps,
                "generation": restored.generation,
            }
        case jobs.RateChanged(worker=worker):
            line = _with("rate_changed", event, "rate", "step_s", "usual_s", "steps", "seconds")
            if event.alone:
                line["alone"] = True
            if event.hindrance:
                line["hindrance"] = event.hindrance
            return line | _with("rate_changed", worker, "node", "slot")
        case jobs.JobWaiting(causes=causes):
            return {"event": "waiting", "reason": "; ".join(causes), "causes": causes}
        case _:
            return None


def _cut_line(event: JournalCut, job_id: JobId | None) -> EventLine:
    reason = "the end of the master's journal was not whole"
    if event.bytes:
        reason += f": {event.bytes} bytes are cut off, and kept as {event.kept_as}"
    if job_id in event.records:
        reason += "; records before this one tell of events that it lacks"
    return _with("journal_cut", event, "bytes", "kept_as") | {"reason": reason}


def cluster_line(state: ClusterState, event: Journaled) -> EventLine | None:
    """Return the line for the cluster's events; None: `event` concerns only one job, or is too
    frequent, such as renewals of certificates. `state` is as before it."""
    match event:
        case MasterStarted():
            return {"event": "master_started"}
        case TermBegan():
            return _with("term_began", event, "number", "reason")
        case JournalCut():
            return _cut_line(event, None)
        case TokenCreated():
            made = _with("token_created", event, "role", "name", "expires_at")
            return made | {"token": token_id(event.fingerprint), "by": "/".join(event.maker)}
        case TokenRevoked():
            return {"event": "token_revoked", "token": token_id(event.fingerprint)}
        case CredentialIssued(token=token) if token:
            issued = _with("certificate_issued", event, "role", "name", "expires_at")
            return issued | {"token": token_id(token)}
        case CredentialsRevoked():
            return _with("certificates_revoked", event, "role", "name")
        case jobs.JobSubmitted() | jobs.JobAdopted():
            return {**(_line(state, event) or {}), "job": event.job_id}
        case jobs.JobSucceeded():
            return {"event": "succeeded", "job": event.job_id}
        case jobs.JobFailed():
            return {"event": "failed", "job": event.job_id, "reason": event.reason}
        case jobs.JobCancelled():
            return {"event": "cancelled", "job": event.job_id}
        case nodes.NodeForgotten():
            return _with("node_forgotten", event, "node")
        case nodes.WorkerLost():
            return None
        case _:
            return _line(state, event) if isinstance(event, nodes.NodeEvent) else None
