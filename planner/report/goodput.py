"""Account of a real job's time, from its events and its metrics.

Committed steps are useful from their begin to their commit; each line of metrics.jsonl is one step.
Evaluations, phases of changes, and waits explain the time between them, in this order. Owns which
record explains which time. Must not know how records are read.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from oobleck.planner.recovery.course import MORPH
from oobleck.planner.report.account import Cause, nested, spent_data, ticks

Record = Mapping[str, Any]

#: By phase of a change that something forced.
_CAUSES: Mapping[str, Cause] = {
    "detect": "detect",
    "plan": "plan",
    "waiting": "waiting",
    "abort": "abort",
    "rendezvous": "meeting",
    "transfer": "transfer",
    "first_step": "first_step",
}
#: Causes of the time from an event until the next of these events, or the next step.
_STATES: Mapping[str, Cause | None] = {
    "submitted": "queued",
    "adopted": "waiting",
    "put_back": "queued",
    "waiting": "waiting",
    "profiling": "startup",
    "profile": "startup",
    "started": "startup",
    "resumed": "startup",
    "reconfigured": None,
}
ENDS = ("succeeded", "failed", "cancelled")
_LOSSES = ("node_lost", "worker_lost", "node_left_out")
#: Steps whose longest one bounds the useful time of the step in progress.
_RECENT = 10


@dataclass(frozen=True, slots=True)
class _Span:
    begin: int
    end: int
    cause: Cause | Literal["useful"]


@dataclass(frozen=True, slots=True)
class _Change:
    """Change of plan: when it began and ended, and whether something forced it."""

    begin: int
    end: int
    forced: bool


class _Job:
    """Records of a job on one clock, in ticks from its submission."""

    def __init__(
        self,
        events: Iterable[Record],
        metrics: Iterable[Record],
        evaluations: Iterable[Record],
        until: float,
    ) -> None:
        self.events = [*events]
        if not self.events:
            raise ValueError("the job has no events")
        self._origin = float(self.events[0]["time"])
        self.ended = next((one for one in self.events if one["event"] in ENDS), None)
        last = until if self.ended is None else float(self.ended["time"])
        self.end = max(0, self.at(last))
        self.records = [*metrics]
        self.steps = self._spans(
            [(one["time"], one["step_seconds"]) for one in self.records], "useful"
        )
        self.evaluations = self._spans(
            [(one["time"], one["seconds"]) for one in evaluations], "evaluation"
        )
        #: Commit of the first step of each generation.
        self.first: dict[int, int] = {}
        for record, step in zip(self.records, self.steps, strict=True):
            self.first.setdefault(record["generation"], step.end)

    def at(self, unix: float) -> int:
        return ticks(unix - self._origin)

    def _spans(self, ends: Iterable[tuple[float, float]], cause: Any) -> list[_Span]:
        """Return spans by their ends and lengths. Hosts' clocks differ, so each is cut at the end
        of the one before."""
        spans, before = [], 0
        for end_s, long_s in ends:
            end = min(max(self.at(end_s), before), self.end)
            begin = min(max(end - ticks(long_s), before), end)
            spans.append(_Span(begin, end, cause))
            before = end
        return spans


def account(
    events: Iterable[Record],
    metrics: Iterable[Record],
    evaluations: Iterable[Record] = (),
    *,
    until: float,
) -> Mapping[str, Any]:
    """Return the account of a job as plain data, for JSON. Raises ValueError without events.

    `events`, `metrics` and `evaluations`: the records of its files. `until`: Unix time of the end
    if the job has not ended.
    """
    job = _Job(events, metrics, evaluations, until)
    changes, phases = _changes(job)
    free = [(0, job.end)]
    spent: Counter[Any] = Counter()
    for layer in (job.steps, job.evaluations, phases, _states(job)):
        free = _take(free, layer, spent)
    free = _take(free, _rest(job, changes), spent)
    spent["other"] += sum(end - begin for begin, end in free)
    useful = spent.pop("useful", 0)
    made = [one for one in job.events if one["event"] == "reconfigured"]
    counts = Counter((one["policy"], one["rule"]) for one in made)
    counts["templates", "first"] += sum(one["event"] == "started" for one in job.events)
    return {
        "steps": len(job.records),
        "tokens": sum(one.get("tokens", 0) for one in job.records),
        **spent_data(useful, spent, _stepped(job)),
        "events": sum(one["event"] in _LOSSES for one in job.events),
        "counts": nested(+counts),
        "returns": sum(one["event"] == "restored" for one in job.events),
        "moved_bytes": sum(one.get("received_bytes") or 0 for one in made),
    }


def _take(
    free: Sequence[tuple[int, int]], layer: Iterable[_Span], spent: Counter[Any]
) -> list[tuple[int, int]]:
    """Count the parts of the spans in `layer`, in order, that are in `free`; return what is left
    free."""
    left, rest = [], iter(free)
    begin, end = next(rest, (0, 0))
    for span in layer:
        while end <= span.begin and begin < end:
            left.append((begin, end))
            begin, end = next(rest, (0, 0))
        while begin < end and begin < span.end:
            first, last = max(begin, span.begin), min(end, span.end)
            if begin < first:
                left.append((begin, first))
            if first < last:
                spent[span.cause] += last - first
            begin = max(first, last)
            if begin >= end:
                begin, end = next(rest, (0, 0))
    if begin < end:
        left.append((begin, end))
    return [*left, *rest]


def _changes(job: _Job) -> tuple[list[_Change], list[_Span]]:
    """Return the changes of plan, and the spans of their phases."""
    changes: list[_Change] = []
    spans: list[_Span] = []
    before = 0
    again = {
        one["generation"] for one in job.events if one["event"] == "restored" and one["lost_steps"]
    }
    for event in job.events:
        if event["event"] != "reconfigured":
            continue
        generation, end = event["to_generation"], job.at(event["time"])
        committed = None if "superseded_by" in event else job.first.get(generation)
        # A first step that is done again has no record, and the record of the next step comes
        # later.
        if committed is not None and committed <= end:
            end = committed
        causes = dict(_CAUSES)
        if event["boundary"]:
            causes = dict.fromkeys(causes, "switch")
        if event["policy"] == MORPH:
            # Workers load before they say that they have met.
            causes["rendezvous"] = causes["transfer"] = "load"
        if generation in again:
            causes["first_step"] = "redone_checkpoint"
        end = max(before, end)
        begin = max(before, end - ticks(event["total_s"]))
        # Phases are laid backwards from the end, as the first of them may overlap with training.
        own: list[_Span] = []
        at, left = end, end - begin
        for phase in reversed(list(_CAUSES)):
            long = min(left, ticks(event["phases"].get(phase) or 0.0))
            own.append(_Span(at - long, at, causes[phase]))
            at, left = at - long, left - long
        spans += reversed(own)
        changes.append(_Change(begin, end, not event["boundary"]))
        before = end
    return changes, spans


def _states(job: _Job) -> Iterator[_Span]:
    """Yield the spans of waits and starts."""
    begins = [span.begin for span in job.steps]
    states = [(job.at(one["time"]), one["event"]) for one in job.events if one["event"] in _STATES]
    for (begin, event), (end, _) in pairwise([*states, (job.end, "")]):
        cause = _STATES[event]
        number = bisect_left(begins, begin)
        until = min([end, *begins[number : number + 1]])
        if cause is not None and begin < until:
            yield _Span(begin, until, cause)


def _rest(job: _Job, changes: Sequence[_Change]) -> Iterator[_Span]:
    """Yield spans for what nothing else explains in each time between two steps."""
    saved = {one["step"] for one in job.events if one["event"] == "checkpoint_saved"}
    returns = [
        job.at(one["time"])
        for one in job.events
        if one["event"] == "restored" and one["lost_steps"]
    ]
    forced = [change.begin for change in changes if change.forced]
    for number, (step, following) in enumerate(pairwise(job.steps)):
        begin, end = step.end, following.begin
        if begin >= end:
            continue
        done = job.records[number]["step"]
        back = bisect_left(returns, begin)
        if back < len(returns) and returns[back] < end:
            yield _Span(begin, returns[back], "redone_step")
            yield _Span(returns[back], end, "redone_checkpoint")
        elif job.records[number + 1]["step"] > done + 1:
            yield _Span(begin, end, "useful")  # the lines of these steps are lost
        elif (near := bisect_left(forced, begin)) < len(forced) and forced[near] < end:
            yield _Span(begin, end, "redone_step")
        elif done in saved:
            yield _Span(begin, end, "save")
    if job.steps and job.ended is None:
        yield from _newest(job, returns)


def _newest(job: _Job, returns: Sequence[int]) -> Iterator[_Span]:
    """Yield spans for the time since the newest step of a job that goes on."""
    begin = job.steps[-1].end
    lost = [
        job.at(one["time"])
        for one in job.events
        if one["event"] in _LOSSES and one.get("in_plan", True)
    ]
    back = [at for at in returns if at > begin]
    since = [at for at in lost if at > begin]
    if back:
        yield _Span(begin, back[0], "redone_step")
        yield _Span(back[0], job.end, "redone_checkpoint")
    elif since:
        yield _Span(begin, since[0], "redone_step")
        yield _Span(since[0], job.end, "plan")
    else:
        usual = max(span.end - span.begin for span in job.steps[-_RECENT:])
        yield _Span(begin, min(begin + usual, job.end), "useful")


def _stepped(job: _Job) -> float:
    """Return the mean share of nodes in useful time; the most nodes of any plan are the whole."""
    nodes: dict[int, int] = {}
    for event in job.events:
        if event["event"] == "started":
            nodes[event["generation"]] = _nodes(event["pipelines"])
        elif event["event"] == "reconfigured":
            nodes[event["to_generation"]] = _nodes(event["pipelines_after"])
    if not nodes or not job.steps:
        return 0.0
    most, worked, weighted = max(nodes.values()), 0, 0
    for record, step in zip(job.records, job.steps, strict=True):
        worked += step.end - step.begin
        # A plan whose record is still to come: its first step has just been committed.
        weighted += (step.end - step.begin) * nodes.get(record["generation"], most)
    return weighted / worked / most if worked else 0.0


def _nodes(pipelines: Iterable[Iterable[Record]]) -> int:
    return len({stage["node"] for pipeline in pipelines for stage in pipeline})
