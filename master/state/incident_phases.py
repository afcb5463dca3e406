"""Where the seconds of an incident went, from its first evidence to its end. Pure."""

from oobleck.master.events.plans import PHASES
from oobleck.master.state.incident import Incident

#: Steps of before are committed again, after all went back to a checkpoint.
REDO = "redo"


def phases(incident: Incident, closed_at: float, waiting_since: float) -> dict[str, float]:
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
