"""The lines of events.jsonl about plans: a start, each reconfiguration, and a job's end.

Pure. Must not know files.
"""

from collections.abc import Mapping

from oobleck.core.ids import Generation
from oobleck.core.plan import Plan
from oobleck.master.events.jobs import JobCancelled, JobFailed, JobSucceeded
from oobleck.master.events.plans import FirstStepCommitted, PlanMade, ReconfigurationStats
from oobleck.master.state.cluster import ClusterState, version_pairs
from oobleck.master.state.job import Job

#: `event` and the fields that go with it.
EventLine = Mapping[str, object]


def plan_lines(state: ClusterState, event: PlanMade) -> list[EventLine]:
    job = state.jobs[event.job_id]
    if job.current.made is not None:
        overtaken = _reconfigured(job, event.overtaken, superseded_by=event.plan.generation)
        return [*overtaken, *_versions(state, job, event)]
    started = {
        "event": "started",
        "reason": event.reason,
        "generation": event.plan.generation,
        "pipelines": pipelines(event.plan),
        "can_lose": event.can_lose,
    }
    return [started, *_versions(state, job, event)]


def _versions(state: ClusterState, job: Job, event: PlanMade) -> list[EventLine]:
    """Return a line on the versions that differ on the plan's nodes, unless that was reported
    before."""
    found = state.versions_of(event.plan.nodes)
    if set(version_pairs(found)) <= {*job.lineage.mixed}:
        return []
    return [{"event": "versions_differ", "versions": found}]


def end_lines(
    state: ClusterState, event: FirstStepCommitted | JobSucceeded | JobFailed | JobCancelled
) -> list[EventLine]:
    job = state.jobs[event.job_id]
    lines, generation = _reconfigured(job, event.transition), job.current.generation
    match event:
        case FirstStepCommitted():
            pass
        case JobSucceeded():
            lines.append({"event": "succeeded", "generation": generation})
        case JobFailed():
            failed = {"event": "failed", "generation": generation, "reason": event.reason}
            lines.append(failed)
        case JobCancelled():
            lines.append({"event": "cancelled", "generation": generation})
    return lines


def _reconfigured(
    job: Job, stats: ReconfigurationStats | None, superseded_by: Generation | None = None
) -> list[EventLine]:
    """Return a line on the transition into `job`'s newest generation; none for the first one."""
    made, before = job.current.made, job.lineage.before
    if stats is None or made is None or before is None:
        return []
    line: dict[str, object] = {
        "event": "reconfigured",
        "from_generation": before.generation,
        "to_generation": made.plan.generation,
        "cause": made.cause,
        "policy": made.policy,
        "rule": made.rule,
        "reason": made.reason,
        "nodes_lost": made.nodes_lost,
        "workers_lost": [str(worker) for worker in made.workers_lost],
        "nodes_joined": made.nodes_joined,
        "boundary": made.boundary,
        "phases": stats.phases,
        "total_s": stats.total_s,
        "redo_step": stats.redo_step,
        "rolled_forward": stats.rolled_forward,
        "salvaged_microbatches": stats.salvaged_microbatches,
        "received_bytes": stats.received_bytes,
        "fed_bytes": stats.fed_bytes,
        "stall_s": stats.stall_s,
        "expected": None
        if made.expected is None
        else {"step_s": made.expected.step_s, "stall_s": made.expected.stall_s},
        "pipelines_before": pipelines(before),
        "pipelines_after": pipelines(made.plan),
        "can_lose": made.can_lose,
    }
    if superseded_by is not None:
        line["superseded_by"] = superseded_by
    if stats.unanswered:
        line["unanswered"] = [str(worker) for worker in stats.unanswered]
    if stats.master_restarted:
        line["master_restarted"] = True
    return [line]


def pipelines(plan: Plan) -> list[list[dict[str, object]]]:
    """Per pipeline its stages: node, first and last layer, and number of workers."""
    return [
        [
            {
                "node": stage.workers[0].node,
                "first_layer": stage.first_layer,
                "last_layer": stage.last_layer,
                "workers": len(stage.workers),
            }
            for stage in pipeline.stages
        ]
        for pipeline in plan.pipelines
    ]
