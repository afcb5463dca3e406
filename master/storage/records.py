"""The lines of events.jsonl that follow from a journaled event.

Pure: the same journal gives the same lines, so that a restarted master can tell which of them the
file lacks. Must not know files; `oobleck.master.storage.event_log` numbers and writes the lines.
"""

from oobleck.master.events.jobs import (
    CheckpointPublished,
    JobCancelled,
    JobEnded,
    JobFailed,
    JobPutBack,
    JobRestored,
    JobSubmitted,
    JobSucceeded,
    JobWaiting,
    MeasuringStarted,
    ProfileChosen,
    SaveProblem,
)
from oobleck.master.events.nodes import (
    NodeDrained,
    NodeDrainRequested,
    NodeKept,
    NodeLeftOut,
    NodeLost,
    NodeQuarantined,
    NodeRegistered,
    NodeReleased,
    NodeReset,
    NodeUndrained,
    WorkerLost,
)
from oobleck.master.events.plans import FirstStepCommitted, PlanMade
from oobleck.master.events.unions import JournalCut, Journaled
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.drains import CordonEvent
from oobleck.master.state.incidents import closes, incident_after
from oobleck.master.state.job import ENDED, Job
from oobleck.master.storage.incident_record import record as incident_record
from oobleck.master.storage.plan_records import Record, end_records, plan_records
from oobleck.planner.ids import JobId


def records_of(state: ClusterState, event: Journaled, unix: float) -> list[tuple[JobId, Record]]:
    """The records that `event` gives when it comes to `state` (which it has not changed yet) at the
    Unix time `unix`."""
    records = _records_of(state, event)
    found = incident_after(state, event, unix)
    if found is not None and closes(found[0], event):
        job, incident = found
        last = [records.pop()] if isinstance(event, JobEnded) else []  # the end stays the last line
        records += [(job.id, incident_record(job, incident, event, unix)), *last]
    return records


def _records_of(state: ClusterState, event: Journaled) -> list[tuple[JobId, Record]]:
    match event:
        case NodeRegistered() | NodeLost():
            return [(state.job.id, _node_record(state.job, event))] if state.job else []
        case JournalCut():
            going_on = [job.id for job in state.jobs.values() if job.state not in ENDED]
            return [(job_id, _cut_record(event, job_id)) for job_id in going_on]
        case JobSubmitted():
            return [(event.job_id, {"event": "submitted", "name": event.spec.name})]
        case WorkerLost():
            return [(event.job_id, _worker_record(event))]
        case NodeLeftOut():
            out = {"event": "node_left_out", "node": event.node, "reason": event.reason}
            return [(event.job_id, out)]
        case MeasuringStarted():
            workers = [str(worker) for worker, _ in event.workers]
            profiling = {"event": "profiling", "workers": workers, "attempt": event.wish.attempt}
            if event.passed_over:
                profiling["passed_over"] = event.passed_over
            return [(event.job_id, profiling)]
        case ProfileChosen():
            fields = {"source": event.source, "key": event.key, "reason": event.reason}
            return [(event.job_id, {"event": "profile", **fields})]
        case (
            NodeDrainRequested()
            | NodeKept()
            | NodeDrained()
            | NodeUndrained()
            | NodeQuarantined()
            | NodeReleased()
        ):
            return [(state.job.id, _drain_record(state, event))] if state.job else []
        case NodeReset():
            reset = {"event": "node_reset", "node": event.node, "reason": event.reason}
            return [(event.job_id, reset)]
        case CheckpointPublished() | SaveProblem() | JobRestored():
            return [(event.job_id, _save_record(event))]
        case JobWaiting():
            reason = "; ".join(event.causes)
            record: Record = {"event": "waiting", "reason": reason, "causes": event.causes}
            return [(event.job_id, record)]
        case JobPutBack():
            return [(event.job_id, {"event": "put_back", "instead": event.instead})]
        case PlanMade():
            return [(event.job_id, record) for record in plan_records(state, event)]
        case FirstStepCommitted() | JobSucceeded() | JobFailed() | JobCancelled():
            return [(event.job_id, record) for record in end_records(state, event)]
        case _:
            return []


def _node_record(job: Job, event: NodeRegistered | NodeLost) -> Record:
    if isinstance(event, NodeRegistered):
        facts = event.facts
        return {
            "event": "node_joined",
            "node": facts.node,
            "hostname": facts.hostname,
            "worker_slots": facts.worker_slots,
        }
    return {
        "event": "node_lost",
        "node": event.node,
        "cause": event.cause,
        "reason": event.reason,
        "detect_s": event.detect_s,
        "in_plan": job.has_member(event.node),
    }


def _cut_record(event: JournalCut, job_id: JobId) -> Record:
    reason = "the end of the master's journal was not whole"
    if event.bytes:
        reason += f": {event.bytes} bytes are cut off, and kept as {event.kept_as}"
    if job_id in event.records:
        reason += "; records before this one tell of events that it lacks"
    return {
        "event": "journal_cut",
        "bytes": event.bytes,
        "kept_as": event.kept_as,
        "reason": reason,
    }


def _drain_record(state: ClusterState, event: CordonEvent) -> Record:
    match event:
        case NodeDrainRequested():
            return {
                "event": "node_draining",
                "node": event.node,
                "reason": event.reason,
                "force": event.force,
            }
        case NodeKept():
            return {"event": "node_kept", "node": event.node, "reason": event.reason}
        case NodeDrained():
            drain = state.nodes[event.node].drain
            reason = drain.reason if drain is not None else ""
            forced = event.job_id is not None
            return {"event": "node_drained", "node": event.node, "reason": reason, "abrupt": forced}
        case NodeUndrained():
            return {"event": "node_undrained", "node": event.node}
        case NodeQuarantined():
            return {
                "event": "node_quarantined",
                "node": event.node,
                "reason": event.reason,
                "seconds": event.seconds,
            }
        case NodeReleased():
            return {"event": "node_released", "node": event.node, "reason": event.reason}


def _worker_record(event: WorkerLost) -> Record:
    return {
        "event": "worker_late" if event.late else "worker_lost",
        "node": event.worker.node,
        "slot": event.worker.slot,
        "reason": event.reason,
    }


def _save_record(event: CheckpointPublished | SaveProblem | JobRestored) -> Record:
    match event:
        case CheckpointPublished(saved=saved):
            return {
                "event": "checkpoint_saved",
                "step": saved.step,
                "path": saved.path,
                "bytes": saved.bytes,
                "seconds": saved.seconds,
                "request": saved.request,
            }
        case SaveProblem(failed=failed):
            return {
                "event": f"{failed.what}_failed",
                "step": failed.step,
                "reason": failed.reason,
                "request": failed.request,
            }
        case JobRestored(restored=restored):
            return {
                "event": "resumed" if event.resumed else "restored",
                "step": restored.step,
                "path": restored.path,
                "passed_over": restored.passed_over,
                "lost_steps": event.lost_steps,
                "generation": restored.generation,
            }
