"""How much of the time goes into steps that count, and what the rest of it was lost to.

Useful is the time that the committed steps themselves took, in the attempt that counts, and of a
step that stood still only as much as a few usual ones. All else is lost. Spans are measured by this
machine's monotonic clock, and which steps belong to them by their numbers: the times in the job's
files are of clocks that a drill may put wrong. What is known of a loss is what the master recorded
of the changes of the plan; the rest is mostly the attempts that were cut off.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.support.client import Client, Record

#: Kinds of lost time: before a loss is known; entering a new plan; the same when a node joins; and
#: the rest: interrupted attempts, pauses between steps, steps that stood still.
LOSSES = ("detect", "recover", "rejoin", "redo")
#: Multiple of the usual step time beyond which a step counts as standing still.
_STANDSTILL = 3.0
#: Number of steps from which their median is the usual step time.
_KNOWN_STEPS = 3
_RECOVER = ("plan", "waiting", "abort", "rendezvous", "transfer")
#: Phases of a change at a step boundary that stop training; the others run beside it.
_REJOIN = ("rendezvous", "transfer")


@dataclass(frozen=True)
class Cost:
    """Use of the seconds of a span."""

    span_s: float
    useful_s: float
    steps: int
    #: Lost seconds, by `LOSSES`.
    lost_s: Mapping[str, float]

    @property
    def lost(self) -> float:
        return self.span_s - self.useful_s


class Span:
    """Span of time from now on."""

    def __init__(self, cluster: Client, job_id: str) -> None:
        self._cluster, self._job_id = cluster, job_id
        self._began_at = time.monotonic()
        self._step = cluster.last_step(job_id)
        self._events = len(cluster.events(job_id))

    def cost(self) -> Cost:
        """Return the cost of the span that ends now. The master must be recording."""
        span_s = time.monotonic() - self._began_at
        lines = self._cluster.metrics(self._job_id)
        events = self._cluster.events(self._job_id)[self._events :]
        return cost(span_s, lines[self._step :], usual_s(lines), events)


def usual_s(lines: Sequence[Record]) -> dict[int, float]:
    """Return the usual step time by generation, since plans differ; for a generation with few
    steps, that of one of the slowest."""
    taken: dict[int, list[float]] = {}
    for line in lines:
        taken.setdefault(line["generation"], []).append(float(line["step_seconds"]))
    known = {plan: median(times) for plan, times in taken.items() if len(times) >= _KNOWN_STEPS}
    slowest = max(known.values() or map(median, taken.values()), default=0.0)
    return {plan: known.get(plan, slowest) for plan in taken}


def cost(
    span_s: float,
    steps: Sequence[Record],
    usual: Mapping[int, float],
    events: Sequence[Record],
) -> Cost:
    """Return the cost of a span with these committed steps and these events.

    `usual`: usual step time, by generation.
    """
    useful_s = sum(
        min(float(step["step_seconds"]), _STANDSTILL * usual[step["generation"]]) for step in steps
    )
    useful_s = min(useful_s, span_s)  # the first step may have begun before
    changes = [event for event in events if event["event"] == "reconfigured"]
    known = {
        "recover": _phases((c for c in changes if not c["boundary"]), _RECOVER),
        "rejoin": _phases((c for c in changes if c["boundary"]), _REJOIN),
        # Count it last, since training may continue until a loss is known.
        "detect": _phases((c for c in changes if not c["boundary"]), ("detect",)),
    }
    left_s = span_s - useful_s
    lost_s = {}
    for loss, seconds in known.items():
        lost_s[loss] = min(seconds, left_s)
        left_s -= lost_s[loss]
    lost_s["redo"] = left_s
    return Cost(span_s=span_s, useful_s=useful_s, steps=len(steps), lost_s=lost_s)


def _phases(changes: Iterable[Record], names: Sequence[str]) -> float:
    return sum(float(change["phases"].get(name) or 0.0) for change in changes for name in names)


def report(whole: Cost, faults: Sequence[tuple[str, Cost]], undisturbed_step_s: float) -> list[str]:
    """Format the report. `whole`: cost of all the time; `faults`: kind and cost of each;
    `undisturbed_step_s`: time between commits without faults."""
    span_s = whole.span_s

    def share(seconds: float) -> str:
        return f"{100 * seconds / span_s:.1f} %"

    parts = {loss: sum(cost.lost_s[loss] for _, cost in faults) for loss in LOSSES}
    parts["between faults"] = max(0.0, whole.lost - sum(parts.values()))
    pace = whole.steps * undisturbed_step_s
    lines = [
        f"useful steps: {share(whole.useful_s)} of {span_s:.0f} s",
        f"steps: {whole.steps}, {share(pace)} of what so much undisturbed time gives",
        "lost: " + ", ".join(f"{loss} {share(seconds)}" for loss, seconds in parts.items()),
    ]
    by_kind: dict[str, list[Cost]] = {}
    for kind, each in faults:
        by_kind.setdefault(kind, []).append(each)
    mean_s = {kind: sum(c.lost for c in costs) / len(costs) for kind, costs in by_kind.items()}
    for kind in sorted(by_kind, key=lambda kind: -mean_s[kind] * len(by_kind[kind])):
        costs = by_kind[kind]
        of = {loss: sum(c.lost_s[loss] for c in costs) / len(costs) for loss in LOSSES}
        words = ", ".join(f"{loss} {of[loss]:.1f}" for loss in LOSSES)
        lines.append(f"  {kind:<13} {len(costs):>3} times, {mean_s[kind]:.1f} s each: {words}")
    return lines
