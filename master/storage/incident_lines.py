"""Lines of events.jsonl about plans, incidents and slowdowns. Pure.

A slowdown's line has the same fields as a failure's, many of them empty, and those of slow workers.
Must not know files.
"""

from collections.abc import Iterator, Mapping

import msgspec

from oobleck.core.ids import Generation, NodeName
from oobleck.core.plan import Plan
from oobleck.host.system.process import signal_name
from oobleck.master.events.jobs import (
    PHASES,
    Expected,
    FirstStepCommitted,
    JobCancelled,
    JobFailed,
    JobSucceeded,
    PlanMade,
    ReconfigurationStats,
)
from oobleck.master.events.unions import Journaled
from oobleck.master.state.cluster import ClusterState, version_pairs
from oobleck.master.state.incident import Answer, Incident, Setback, Slowdown, SlowWorker
from oobleck.master.state.incident_summary import (
    all_stats,
    headline,
    outcome,
    redone_steps,
    slowdown_outcome,
    slowdown_summary,
    stood_s,
    summary_of,
)
from oobleck.master.state.job import Job
from oobleck.planner.recovery.course import MORPH

#: `event` and its fields.
EventLine = Mapping[str, object]
#: Phase of repeating steps after a return to a checkpoint.
REDO = "redo"


def plan_lines(state: ClusterState, event: PlanMade) -> list[EventLine]:
    job = state.jobs[event.job_id]
    if job.current.made is not None:
        overtaken = _reconfigured(state, job, event.overtaken, superseded_by=event.plan.generation)
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
    """Return a line on versions that differ on the plan's nodes, if they are new."""
    differences = state.versions_of(event.plan.nodes)
    if set(version_pairs(differences)) <= {*job.lineage.mixed}:
        return []
    return [{"event": "versions_differ", "versions": differences}]


def end_lines(
    state: ClusterState, event: FirstStepCommitted | JobSucceeded | JobFailed | JobCancelled
) -> list[EventLine]:
    job = state.jobs[event.job_id]
    lines, generation = _reconfigured(state, job, event.transition), job.current.generation
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
    state: ClusterState,
    job: Job,
    stats: ReconfigurationStats | None,
    superseded_by: Generation | None = None,
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
        "policy": MORPH if made.restore else made.policy,
        "rule": made.rule,
        "reason": made.reason,
        "nodes_lost": made.nodes_lost,
        "workers_lost": [str(worker) for worker in made.workers_lost],
        "nodes_joined": made.nodes_joined,
        "nodes_again": [name for name in made.nodes_joined if _has_failed(state, name)],
        "boundary": made.boundary,
        "phases": stats.phases,
        "total_s": stats.total_s,
        "redo_step": stats.redo_step,
        "rolled_forward": stats.rolled_forward,
        "salvaged_microbatches": stats.salvaged_microbatches,
        "received_bytes": stats.received_bytes,
        "fed_bytes": stats.fed_bytes,
        "stall_s": stats.stall_s,
        **_expected(made.expected),
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


def _has_failed(state: ClusterState, name: NodeName) -> bool:
    """Return whether the node was lost before."""
    return name in state.nodes and bool(state.nodes[name].failures.times)


def _expected(expected: Expected | None) -> dict[str, object]:
    """Return the fields of a line about what the planner expected."""
    if expected is None:
        return {"expected": None, "runner_up": None}
    fields = msgspec.to_builtins(expected)
    return {"runner_up": fields.pop("runner_up"), "expected": fields}


def pipelines(plan: Plan) -> list[list[dict[str, object]]]:
    """List the stages of each pipeline: node, first and last layer, and number of workers."""
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


def incident_line(job: Job, incident: Incident, event: Journaled, unix: float) -> dict[str, object]:
    """Build the line of `incident`, which `event` closes at `unix`; `job` is as before it."""
    root = incident.root_cause
    others = [s for s in incident.setbacks if s is not root]
    witnesses = _witnesses(incident)
    made, ended = job.current.made, outcome(event)
    return {
        "event": "incident",
        "incident": incident.number,
        "outcome": ended,
        "summary": summary_of(incident, event, unix),
        "root_cause": setback_line(root),
        "also_lost": [
            {**setback_line(other), "consequence": incident.is_consequence(other)}
            for other in others
        ],
        "first_seen": witnesses[0] if witnesses else None,
        "witnesses": witnesses,
        "opened_at": incident.opened_at,
        "closed_at": unix,
        "trained_until": incident.trained_until or None,
        "total_s": stood_s(incident, unix),
        "phases": _phases(incident, unix, job.waiting_since),
        "attempts": list(_attempts(incident)),
        "steps_redone": len(redone_steps(incident)) + incident.lost_steps,
        "redo_steps": redone_steps(incident),
        "salvaged_microbatches": _salvaged(incident),
        "salvaged_samples": _salvaged(incident) * job.spec.training.microbatch,
        "rolled_forward": any(s.rolled_forward for s in all_stats(incident)),
        "received_bytes": sum(s.received_bytes for s in all_stats(incident)),
        "from_generation": incident.from_generation,
        "to_generation": _last_generation(job, incident),
        "can_lose": made.can_lose if made is not None and ended == "recovered" else 0,
    }


def setback_line(setback: Setback) -> dict[str, object]:
    """Build a setback's fields; null: not applicable or not known."""
    return {
        "kind": setback.kind,
        "summary": headline(setback),
        "node": setback.node or None,
        "worker": str(setback.worker) if setback.worker is not None else None,
        "ranks": setback.ranks,
        "pid": setback.pid,
        "signal": signal_name(setback.signal) if setback.signal is not None else None,
        "exit_code": setback.exit_code,
        "exception": setback.exception or None,
        "log_tail": setback.log_tail,
        "reason": setback.reason,
        "time": setback.evidence_at,
        "declared_at": setback.declared_at,
    }


def _witnesses(incident: Incident) -> list[Mapping[str, object]]:
    """List by time the reports of agents, peers and streams, and the master's own findings."""
    reported = [
        (seen.at, seen.what.by, seen.what.observer, seen.what.about, seen.what.saw)
        for seen in incident.evidence
    ]
    own = [
        (setback.declared_at, setback.found_by, "master", setback.node, setback.reason)
        for setback in incident.setbacks
        if setback.found_by
    ]
    return [
        {"time": at, "by": by, "observer": observer, "about": about or None, "saw": saw}
        for at, by, observer, about, saw in sorted([*reported, *own], key=lambda seen: seen[0])
    ]


def _last_generation(job: Job, incident: Incident) -> Generation:
    """Return the last generation that answered the incident, which need not be the newest: nodes
    may have joined since."""
    return incident.attempts[-1].generation if incident.attempts else job.current.generation


def _salvaged(incident: Incident) -> int:
    """Return the salvaged micro-batches of the last repeated step, over all attempts."""
    redone = [s for s in all_stats(incident) if s.redo_step is not None]
    return redone[-1].salvaged_microbatches if redone else 0


def _attempts(incident: Incident) -> Iterator[dict[str, object]]:
    """Yield each generation that answered, with the one that replaced it before its first step, if
    any."""
    for number, attempt in enumerate(incident.attempts):
        stats, following = attempt.transition, incident.attempts[number + 1 : number + 2]
        yield {
            "generation": attempt.generation,
            "cause": attempt.cause,
            "rule": attempt.rule,
            "phases": stats.phases if stats is not None else None,
            "total_s": stats.total_s if stats is not None else None,
            "superseded_by": following[0].generation if following else None,
        }


def _phases(incident: Incident, closed_at: float, waiting_since: float) -> dict[str, float]:
    """Return the seconds of each phase, from `stands_since` to `closed_at`; a generation counts
    until the first evidence against it. `waiting_since`: Unix time at which the job began to wait
    for nodes; 0: it does not."""
    spans: dict[str, float] = dict.fromkeys((*PHASES, REDO), 0.0)
    at = incident.stands_since

    def book(phase: str, until: float) -> None:
        nonlocal at
        if until > at:
            spans[phase] += until - at
            at = until

    attempts = [a for a in incident.attempts if a.transition is not None]
    between = "detect"
    for number, attempt in enumerate(attempts):
        assert attempt.transition is not None, "chosen so"
        end = min([closed_at, *(later.began_at for later in attempts[number + 1 :])])
        book(between, min(attempt.began_at, end))
        between = REDO if incident.lost_steps else "first_step"
        mark = attempt.began_at
        for phase, seconds in attempt.transition.phases.items():
            mark += seconds
            book(phase, min(mark, end))
    if waiting_since:
        book(between, min(waiting_since, closed_at))
        between = "waiting"
    book(between, closed_at)
    return spans


def slowdown_line(job: Job, slowdown: Slowdown, event: Journaled, unix: float) -> EventLine:
    """Build the line of `slowdown`, which ends with `event` at `unix`; `job` is as before it."""
    made, ended, answers = job.current.made, slowdown_outcome(event), slowdown.answers
    known = [answer.transition for answer in answers if answer.transition is not None]
    return {
        "event": "incident",
        "incident": slowdown.number,
        "outcome": ended,
        "summary": slowdown_summary(slowdown, event, unix),
        "root_cause": setback_line(slowdown.workers[0].setback),
        "also_lost": [],
        "slow": list(map(_slow, slowdown.workers)),
        "first_seen": None,
        "witnesses": [],
        "opened_at": slowdown.opened_at,
        "closed_at": unix,
        "trained_until": None,
        "total_s": sum(stats.stall_s or 0.0 for stats in known),
        "phases": {phase: sum(s.phases.get(phase, 0.0) for s in known) for phase in PHASES},
        "attempts": list(_answers(answers)),
        "steps_redone": 0,
        "redo_steps": [],
        "salvaged_microbatches": 0,
        "salvaged_samples": 0,
        "rolled_forward": False,
        "received_bytes": sum(stats.received_bytes for stats in known),
        "from_generation": slowdown.from_generation,
        "to_generation": answers[-1].generation if answers else slowdown.from_generation,
        "can_lose": made.can_lose if made is not None and ended == "recovered" else 0,
    }


def _slow(one: SlowWorker) -> dict[str, object]:
    return {
        "worker": str(one.worker),
        "node": one.worker.node,
        "ranks": one.ranks,
        "rate": one.slowest.rate,
        "step_s": one.slowest.step_s,
        "usual_s": one.slowest.usual_s,
        "since": one.since,
        "until": one.until,
        "well": one.well,
    }


def _answers(answers: tuple[Answer, ...]) -> Iterator[dict[str, object]]:
    for answer in answers:
        stats = answer.transition
        yield {
            "generation": answer.generation,
            "cause": answer.cause,
            "policy": answer.policy,
            "rule": answer.rule,
            "reason": answer.reason,
            "phases": stats.phases if stats is not None else None,
            "total_s": stats.total_s if stats is not None else None,
            "stall_s": stats.stall_s if stats is not None else None,
            "superseded_by": None,
        }
