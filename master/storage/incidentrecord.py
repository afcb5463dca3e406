"""The record of an incident in events.jsonl, and the one line that names it. Pure."""

from collections.abc import Iterator, Mapping

from oobleck.host.system.process import signal_name
from oobleck.master.events.jobs import JobCancelled, JobCaughtUp, JobFailed, JobSucceeded
from oobleck.master.events.plans import FirstStepCommitted, Transition
from oobleck.master.events.unions import Journaled
from oobleck.master.state.incident import Incident, Setback
from oobleck.master.state.incidentphases import phases
from oobleck.master.state.job import Job
from oobleck.planner.ids import Generation
from oobleck.planner.units import listed


def outcome(event: Journaled) -> str:
    match event:
        case FirstStepCommitted() | JobCaughtUp():
            return "recovered"
        case JobSucceeded():
            return "succeeded"
        case JobFailed():
            return "failed"
        case JobCancelled():
            return "cancelled"
        case _:
            raise ValueError(f"{type(event).__name__} closes no incident")


def record(job: Job, incident: Incident, event: Journaled, unix: float) -> dict[str, object]:
    """All about `incident`, which `event` closes at `unix`; `job` as the event finds it."""
    root = incident.root_cause
    others = [s for s in incident.setbacks if s is not root]
    witnesses = _witnesses(incident)
    made, ended = job.made, outcome(event)
    return {
        "event": "incident",
        "incident": incident.number,
        "outcome": ended,
        "summary": summary_of(incident, event, unix),
        "root_cause": _setback(root),
        "also_lost": [
            {**_setback(other), "consequence": incident.is_consequence(other)} for other in others
        ],
        "first_seen": witnesses[0] if witnesses else None,
        "witnesses": witnesses,
        "opened_at": incident.opened_at,
        "closed_at": unix,
        "trained_until": incident.trained_until or None,
        "total_s": _stood_s(incident, unix),
        "phases": phases(incident, unix, job.waiting_since),
        "attempts": list(_attempts(incident)),
        "steps_redone": len(_redone(incident)) + incident.lost_steps,
        "redo_steps": _redone(incident),
        "salvaged_microbatches": _salvaged(incident),
        "salvaged_samples": _salvaged(incident) * job.spec.training.microbatch,
        "rolled_forward": any(way.rolled_forward for way in _ways(incident)),
        "received_bytes": sum(way.received_bytes for way in _ways(incident)),
        "from_generation": incident.from_generation,
        "to_generation": _last_generation(job, incident),
        "can_lose": made.can_lose if made is not None and ended == "recovered" else 0,
    }


def summary_of(incident: Incident, event: Journaled, unix: float) -> str:
    """One line: the root cause and how it ended."""
    return f"{headline_of(incident)}; {_how_it_ended(incident, event, unix)}"


def headline_of(incident: Incident) -> str:
    """What failed, in half a sentence: the root cause, and all that failed beside it."""
    root = incident.root_cause
    if root in incident.silenced and incident.head_is_cut_off is None:
        names = listed({setback.node for setback in incident.silenced})
        return f"{names} fell silent together: the head is cut off from them, or they are lost"
    beside = [s for s in incident.setbacks if s is not root and not incident.is_consequence(s)]
    lost = {s.node for s in (root, *beside) if s.kind == root.kind == "node lost"}
    told = headline(root)
    if len(lost) > 1:
        told = f"nodes {listed(lost)} were lost; {root.node}: {root.reason}"
    more = {_subject(s) for s in beside} - {_subject(root), "", *(f"node {n}" for n in lost)}
    return f"{told}; also lost: {listed(more)}" if more else told


def _subject(setback: Setback) -> str:
    if setback.worker is not None:
        return f"worker {setback.worker}"
    return f"node {setback.node}" if setback.node else ""


def headline(setback: Setback) -> str:
    """What failed, in half a sentence."""
    match setback.kind:
        case "worker died":
            return f"worker {_who(setback)} {_end_of(setback)}"
        case "node lost":
            return f"node {_who(setback)} was lost: {setback.reason}"
        case "agent restarted":
            return f"node {_who(setback)} was lost: its agent was started anew"
        case "hang":
            return f"node {_who(setback)} hung: {setback.reason}"
        case "node unfit":
            return f"node {_who(setback)} cannot take part: {setback.reason}"
        case "drained by force":
            return f"node {_who(setback)} was drained by force: {setback.reason or 'on demand'}"
        case "network cut" | "peers disconnected" | "no progress" | "job failed" | "head cut off":
            return setback.reason
        case "job error":
            return f"the job's own error on worker {_who(setback)}: {setback.reason}"


def _who(setback: Setback) -> str:
    facts = []
    if setback.ranks:
        facts.append(f"rank {', '.join(map(str, setback.ranks))}")
    if setback.pid is not None:
        facts.append(f"pid {setback.pid}")
    name = str(setback.worker) if setback.worker is not None else setback.node
    return f"{name} ({', '.join(facts)})" if facts else name


def _end_of(setback: Setback) -> str:
    if setback.signal is not None:
        return f"was killed by {signal_name(setback.signal)}"
    if setback.exit_code is None:
        return f"is gone: {setback.reason}"
    words = f": {setback.exception}" if setback.exception else ""
    after = ", after it lost a peer" if setback.followed_others else ""
    return f"exited with code {setback.exit_code}{after}{words}"


def _how_it_ended(incident: Incident, event: Journaled, unix: float) -> str:
    ended = outcome(event)
    if ended != "recovered":
        return "the job was cancelled" if ended == "cancelled" else f"the job {ended}"
    steps = _redone(incident)
    again = f"step {steps[-1]} done again" if len(steps) == 1 else f"{len(steps)} steps done again"
    if incident.lost_steps:
        again = f"{incident.lost_steps} committed steps done again"
    redone = again if steps or incident.lost_steps else "no step done again"
    on_s = incident.stands_since - incident.opened_at
    trained_on = f"trained on for {on_s:.1f} s, " if on_s else ""
    return f"{trained_on}recovered in {_stood_s(incident, unix):.3f} s, {redone}"


def _stood_s(incident: Incident, unix: float) -> float:
    return max(0.0, unix - incident.stands_since)


def _setback(setback: Setback) -> dict[str, object]:
    """Every key in every record: null where it does not apply or is not known."""
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
    """By time: what agents, peers and streams told, and what the master found out by itself."""
    told = [
        (seen.at, seen.what.by, seen.what.observer, seen.what.about, seen.what.saw)
        for seen in incident.sightings
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


def _ways(incident: Incident) -> list[Transition]:
    return [a.transition for a in incident.attempts if a.transition is not None]


def _last_generation(job: Job, incident: Incident) -> Generation:
    """The last one that answered it; nodes may have joined since."""
    return incident.attempts[-1].generation if incident.attempts else job.generation


def _redone(incident: Incident) -> list[int]:
    return sorted({way.redo_step for way in _ways(incident) if way.redo_step is not None})


def _salvaged(incident: Incident) -> int:
    """Of the step that was done again last; what was salvaged before counts in it again."""
    ways = [way for way in _ways(incident) if way.redo_step is not None]
    return ways[-1].salvaged_microbatches if ways else 0


def _attempts(incident: Incident) -> Iterator[dict[str, object]]:
    """Each generation that answered, and whether another one overtook it."""
    for number, attempt in enumerate(incident.attempts):
        way, following = attempt.transition, incident.attempts[number + 1 : number + 2]
        yield {
            "generation": attempt.generation,
            "cause": attempt.cause,
            "rule": attempt.rule,
            "phases": way.phases if way is not None else None,
            "total_s": way.total_s if way is not None else None,
            "superseded_by": following[0].generation if following else None,
        }
