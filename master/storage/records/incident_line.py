"""The line of an incident in events.jsonl. Pure."""

from collections.abc import Iterator, Mapping

from oobleck.core.ids import Generation
from oobleck.host.system.process import signal_name
from oobleck.master.events.plans import PHASES
from oobleck.master.events.unions import Journaled
from oobleck.master.state.incidents.incident import Incident, Setback
from oobleck.master.state.incidents.incident_summary import (
    all_stats,
    headline,
    outcome,
    redone_steps,
    stood_s,
    summary_of,
)
from oobleck.master.state.job import Job

#: Steps of before are committed again, after all went back to a checkpoint.
REDO = "redo"


def incident_line(job: Job, incident: Incident, event: Journaled, unix: float) -> dict[str, object]:
    """Build the line of `incident`, which `event` closes at `unix`. `job` is as before the
    event."""
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
    """Every key in every line: null where it does not apply or is not known."""
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
    """List by time what agents, peers and streams reported, and what the master found by itself."""
    told = [
        (seen.at, seen.what.by, seen.what.observer, seen.what.about, seen.what.saw)
        for seen in incident.evidence
    ]
    found = [
        (setback.declared_at, setback.found_by, "master", setback.node, setback.reason)
        for setback in incident.setbacks
        if setback.found_by
    ]
    return [
        {"time": at, "by": by, "observer": observer, "about": about or None, "saw": saw}
        for at, by, observer, about, saw in sorted([*told, *found], key=lambda seen: seen[0])
    ]


def _last_generation(job: Job, incident: Incident) -> Generation:
    """The last one that answered it; nodes may have joined since."""
    return incident.attempts[-1].generation if incident.attempts else job.current.generation


def _salvaged(incident: Incident) -> int:
    """Return the salvaged micro-batches of the last repeated step. They include those salvaged in
    earlier attempts."""
    redone = [s for s in all_stats(incident) if s.redo_step is not None]
    return redone[-1].salvaged_microbatches if redone else 0


def _attempts(incident: Incident) -> Iterator[dict[str, object]]:
    """Each generation that answered, and whether another one overtook it."""
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
    """Seconds by phase; they add up to the time from `stands_since` to `closed_at`.

    A generation counts until the first evidence against it. `waiting_since`: the Unix time since
    when the job waits for nodes as the incident ends; 0: it does not.
    """
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
