"""The line of a slowdown in events.jsonl: an incident with the same fields as a failure's, of which
many say that nothing failed, and those of slow workers. Pure."""

from collections.abc import Iterator

from oobleck.master.events.plans import PHASES
from oobleck.master.events.unions import Journaled
from oobleck.master.state.incidents.incident_summary import (
    slowdown_outcome,
    slowdown_summary,
)
from oobleck.master.state.incidents.slowdown import Answer, Slowdown, SlowWorker
from oobleck.master.state.job import Job
from oobleck.master.storage.records.incident_line import setback_line
from oobleck.master.storage.records.plan_lines import EventLine


def slowdown_line(job: Job, slowdown: Slowdown, event: Journaled, unix: float) -> EventLine:
    """Build the line of `slowdown`, which ends with `event` at `unix`. `job` is as before the
    event."""
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
        "attempts": list(_attempts(answers)),
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


def _attempts(answers: tuple[Answer, ...]) -> Iterator[dict[str, object]]:
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
