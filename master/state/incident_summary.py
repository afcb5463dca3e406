"""An incident in one line: what failed or was slow, and how it ended. Pure."""

from oobleck.core.units import comma_separated
from oobleck.host.system.process import signal_name
from oobleck.master.events.jobs import (
    FirstStepCommitted,
    JobCancelled,
    JobCaughtUp,
    JobEnded,
    JobFailed,
    JobSucceeded,
    RateChanged,
    ReconfigurationStats,
)
from oobleck.master.events.unions import Journaled
from oobleck.master.state.incident import Incident, Setback, Slowdown, own_words


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


def summary_of(incident: Incident, event: Journaled, unix: float) -> str:
    """Describe the incident in one line: the root cause and how it ended."""
    return f"{headline_of(incident)}; {_how_it_ended(incident, event, unix)}"


def headline_of(incident: Incident) -> str:
    """Describe in half a sentence what failed: the root cause, and other setbacks that it does not
    explain."""
    root = incident.root_cause
    if root in incident.silenced and incident.head_is_cut_off is None:
        names = comma_separated({setback.node for setback in incident.silenced})
        return f"{names} fell silent together: the head is cut off from them, or they are lost"
    beside = [s for s in incident.setbacks if s is not root and not incident.is_consequence(s)]
    lost = {s.node for s in (root, *beside) if s.kind == root.kind == "node lost"}
    text = headline(root)
    if len(lost) > 1:
        text = f"nodes {comma_separated(lost)} were lost; {root.node}: {root.reason}"
    more = {_subject(s) for s in beside} - {_subject(root), "", *(f"node {n}" for n in lost)}
    return f"{text}; also lost: {comma_separated(more)}" if more else text


def _subject(setback: Setback) -> str:
    if setback.worker is not None:
        return f"worker {setback.worker}"
    return f"node {setback.node}" if setback.node else ""


def headline(setback: Setback) -> str:
    """Describe in half a sentence what failed."""
    match setback.kind:
        case "worker died":
            return f"worker {_label(setback)} {_end_of(setback)}"
        case "node lost" | "agent restarted":
            return f"node {_label(setback)} was lost: {setback.reason}"
        case "hang":
            what = "worker" if setback.worker is not None else "node"
            return f"{what} {_label(setback)} hung: {setback.reason}"
        case "node unfit":
            return f"node {_label(setback)} cannot take part: {setback.reason}"
        case "drained by force":
            return f"node {_label(setback)} was drained by force: {setback.reason or 'on demand'}"
        case (
            "network cut"
            | "peers disconnected"
            | "no progress"
            | "job failed"
            | "head cut off"
            | "site away"
        ):
            return setback.reason
        case "job error":
            return f"the job's own error on worker {_label(setback)}: {setback.reason}"
        case "slow worker":
            return f"slow worker {_label(setback)}: {setback.reason}"


def _label(setback: Setback) -> str:
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
    if isinstance(event, JobFailed) and own_words(event) is not None:
        known = any(s.kind in ("job error", "node unfit") for s in incident.setbacks)
        return _end_of_job(ended) if known else "then the job failed by another error"
    if ended != "recovered":
        return _end_of_job(ended)
    steps = redone_steps(incident)
    again = f"step {steps[-1]} done again" if len(steps) == 1 else f"{len(steps)} steps done again"
    if incident.lost_steps:
        again = f"{incident.lost_steps} committed steps done again"
    repeated = again if steps or incident.lost_steps else "no step done again"
    on_s = incident.stands_since - incident.opened_at
    trained_on = f"trained on for {on_s:.1f} s, " if on_s else ""
    return f"{trained_on}recovered in {stood_s(incident, unix):.3f} s, {repeated}"


def stood_s(incident: Incident, unix: float) -> float:
    return max(0.0, unix - incident.stands_since)


def all_stats(incident: Incident) -> list[ReconfigurationStats]:
    return [a.transition for a in incident.attempts if a.transition is not None]


def redone_steps(incident: Incident) -> list[int]:
    return sorted({s.redo_step for s in all_stats(incident) if s.redo_step is not None})


def _end_of_job(ended: str) -> str:
    return "the job was cancelled" if ended == "cancelled" else f"the job {ended}"


def slowdown_outcome(event: Journaled) -> str:
    if isinstance(event, JobEnded):
        return outcome(event)
    return "recovered" if isinstance(event, RateChanged) and event.is_measured else "gone"


def slowdown_summary(slowdown: Slowdown, event: Journaled, unix: float) -> str:
    """Describe in one line the slow workers, the plans that answered, and how it ended."""
    rules = ", ".join(dict.fromkeys(answer.rule for answer in slowdown.answers))
    ended = slowdown_outcome(event)
    after_s = f"after {unix - slowdown.opened_at:.1f} s"
    if ended in ("recovered", "gone"):
        how = "well again" if ended == "recovered" else "the last slow process is gone"
    else:
        how = _end_of_job(ended)
    answered = f"answered by {rules}" if rules else "no plan answered it"
    return f"{slowdown_headline(slowdown)}; {answered}, {how} {after_s}"


def slowdown_headline(slowdown: Slowdown) -> str:
    """Name the workers that are or were slow, in half a sentence."""
    first, *others = slowdown.workers
    more = comma_separated({str(one.worker) for one in others})
    text = headline(first.setback)
    return f"{text}; also slow: {more}" if more else text
