"""What redundant computation costs and saves: the last table of `python -m bench.policies`.

In Bamboo (NSDI 2023) each worker holds its successor's stage too (here the last one the first), and
computes its forwards ahead of time, in bubbles as far as there are some. When the successor is lost
in the middle of a step, it goes on with that stage from there.

One pipeline is list-scheduled, in slots: on each worker backwards come before forwards, these
before weight gradients, and forwards ahead last; all are done by the end of the step. A stage has
as many micro-batches in flight as under 1F1B, or each one S where backwards are split. What the
forwards ahead keep costs no room, and links are free.

Then a worker is lost, each in its turn, at twelve moments of a step under 1F1B. Its predecessor
runs both stages from then on, and the step takes, on average over all:

- `anew`: if it is begun anew;
- `salvaged`: if it is done again but for what is in the sums of the others already, as here
  (`oobleck.planner.programs.compiler.compile`);
- `going on`: if the others go on from where they are, and send the gradients again that the lost
  worker had; the forwards of its stage are computed again;
- `ahead`: likewise, but those that were computed ahead are there.

`saved` is what `ahead` takes less than `anew`, and than `salvaged`, in steps. `pays` is how many
steps may pass between two losses for that to make up for what each step costs: against `anew`.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from statistics import fmean
from typing import Literal, NamedTuple

from bench.support.slots import no_loss
from oobleck.core.schedules import Schedule
from oobleck.planner.programs.compiler.schedule import splits_backward

Kind = Literal["backward", "forward", "weight", "ahead"]
#: Kinds of work, by priority.
KINDS: Sequence[Kind] = ("backward", "forward", "weight", "ahead")
#: Number of moments at which each worker is lost, evenly spaced over a step.
MOMENTS = 12
SCHEDULES: Sequence[Schedule] = ("1f1b", "zb-h1")


class Work(NamedTuple):
    """Work on a micro-batch at a stage. `ahead`: the stage's forward, on the previous worker."""

    kind: Kind
    microbatch: int
    stage: int


@dataclass(frozen=True, kw_only=True)
class Task:
    worker: int
    slots: int
    after: tuple[Work, ...]


@dataclass(frozen=True, kw_only=True)
class Span:
    begin: int
    end: int


Tasks = Mapping[Work, Task]
Spans = Mapping[Work, Span]


def step(
    workers: Sequence[int],
    microbatches: int,
    *,
    split: bool = False,
    ahead: bool = False,
    summed: Set[Work] = frozenset(),
) -> Tasks:
    """Return the tasks of a step of a pipeline whose stages these workers run. `summed`: backwards
    whose weight gradients are summed already; a micro-batch's backward ends at the lowest stage
    that lacks its gradient."""
    stages, tasks = len(workers), dict[Work, Task]()
    for m in range(microbatches):
        lowest = min(s for s in range(stages) if Work("backward", m, s) not in summed)
        for s, worker in enumerate(workers):
            forward, backward = Work("forward", m, s), Work("backward", m, s)
            # Nobody waits for an input gradient of the first stage.
            two = split and s > 0
            before = m - (stages if split else stages - s)
            last = [Work(kind, before, s) for kind in ("weight", "backward", "forward")]
            room = [work for work in last if work in tasks][:1]
            inputs = [Work("forward", m, s - 1)] if s else []
            tasks[forward] = Task(worker=worker, slots=1, after=(*inputs, *room))
            if s >= lowest:
                slots = 1 if two or backward in summed else 2
                gradients = [Work("backward", m, s + 1)] if s + 1 < stages else []
                tasks[backward] = Task(worker=worker, slots=slots, after=(forward, *gradients))
            if two:
                tasks[Work("weight", m, s)] = Task(worker=worker, slots=1, after=(backward,))
            if ahead:
                tasks[Work("ahead", m, s)] = Task(
                    worker=workers[s - 1], slots=1, after=tuple(inputs)
                )
    return tasks


def schedule(tasks: Tasks, ends: Mapping[Work, int] | None = None, now: int = 0) -> Spans:
    """Return when each task is computed, as soon as possible from `now` on. `ends`: ends of tasks
    that are done or under way."""
    known = ends or {}
    spans = dict[Work, Span]()
    running = [(end, work) for work, end in known.items() if end > now]
    heapify(running)
    busy = {tasks[work].worker for _, work in running}
    waits, users = dict[Work, int](), defaultdict[Work, list[Work]](list)
    ready = defaultdict[int, list[tuple[int, Work]]](list)

    def offer(work: Work) -> None:
        heappush(ready[tasks[work].worker], (KINDS.index(work.kind), work))

    for work in tasks.keys() - known.keys():
        left = [before for before in tasks[work].after if known.get(before, now + 1) > now]
        waits[work] = len(left)
        for before in left:
            users[before].append(work)
        if not left:
            offer(work)
    while True:
        for worker in ready.keys() - busy:
            if ready[worker]:
                _, work = heappop(ready[worker])
                spans[work] = Span(begin=now, end=now + tasks[work].slots)
                busy.add(worker)
                heappush(running, (spans[work].end, work))
        if not running:
            return spans
        now = running[0][0]
        while running and running[0][0] == now:
            _, work = heappop(running)
            busy.remove(tasks[work].worker)
            for user in users[work]:
                waits[user] -= 1
                if not waits[user]:
                    offer(user)


def makespan(spans: Spans) -> int:
    return max(span.end for span in spans.values())


# ---- a loss


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Loss of a stage's worker at a moment of a step whose tasks run as in `spans`."""

    stages: int
    microbatches: int
    stage: int
    at: int
    spans: Spans

    @property
    def workers(self) -> Sequence[int]:
        """Worker of each stage from then on."""
        own = list(range(self.stages))
        own[self.stage] = own[self.stage - 1]
        return own

    def anew(self) -> int:
        return self.at + makespan(schedule(step(self.workers, self.microbatches)))

    def salvaged(self) -> int:
        summed = {
            work
            for work, span in self.spans.items()
            if work.kind == "backward" and work.stage != self.stage and span.end <= self.at
        }
        left = step(self.workers, self.microbatches, summed=summed)
        return self.at + makespan(schedule(left))

    def going_on(self) -> int:
        """Return the slots if the others continue; forwards ahead of other stages stop at the
        loss."""
        over = {work: span.end for work, span in self.spans.items() if span.end <= self.at}
        ends = {
            work: span.end
            for work, span in self.spans.items()
            if span.begin < self.at and work.kind != "ahead" and work.stage != self.stage
        }
        for work, end in over.items():
            if work.kind == "ahead" and work.stage == self.stage:
                ends[work._replace(kind="forward")] = end
        tasks = {
            work: task if work.stage == self.stage else self._without_messages(task, over)
            for work, task in step(self.workers, self.microbatches).items()
        }
        return makespan(schedule(tasks, ends, self.at))

    def _without_messages(self, task: Task, over: Collection[Work]) -> Task:
        """Return the task without its dependencies on messages that the lost worker has sent."""
        left = [work for work in task.after if work.stage != self.stage or work not in over]
        return replace(task, after=tuple(left))


def losses(spans: Spans, stages: int, microbatches: int) -> Iterator[Loss]:
    """Yield the loss of each worker at each moment."""
    length = makespan(spans)
    for stage in range(stages):
        for moment in range(MOMENTS):
            at = (2 * moment + 1) * length // (2 * MOMENTS)
            yield Loss(stages=stages, microbatches=microbatches, stage=stage, at=at, spans=spans)


# ---- the table


def row(stages: int, microbatches: int) -> Iterator[str]:
    case = stages, microbatches
    yield f"{stages}, {microbatches}"
    costs = [_cost(name, *case) for name in SCHEDULES]
    for name, cost in zip(SCHEDULES, costs, strict=True):
        undisturbed = no_loss(name, *case)
        yield from (f"{undisturbed}", f"{undisturbed + cost}", f"{100 * cost / undisturbed:.0f} %")
    alone = schedule(step(range(stages), microbatches))
    assert makespan(alone) == no_loss("1f1b", *case), "as by the closed form"
    without = list(losses(alone, *case))
    spared = losses(schedule(step(range(stages), microbatches, ahead=True)), *case)
    anew = fmean(loss.anew() for loss in without)
    salvaged = fmean(loss.salvaged() for loss in without)
    going_on = fmean(loss.going_on() for loss in without)
    ahead = fmean(loss.going_on() for loss in spared)
    yield from (f"{slots:.1f}" for slots in (anew, salvaged, going_on, ahead))
    yield from (f"{(slots - ahead) / no_loss('1f1b', *case):.2f}" for slots in (anew, salvaged))
    yield f"{(anew - ahead) / costs[0]:.1f}" if costs[0] else "any"


def _cost(name: Schedule, stages: int, microbatches: int) -> int:
    """Return the slots that forwards ahead add to a step."""
    split = splits_backward(name)
    ahead = step(range(stages), microbatches, split=split, ahead=True)
    return makespan(schedule(ahead)) - no_loss(name, stages, microbatches)


HEADS = (
    "", "1F1B", "", "", "ZB-H1", "", "", "a loss:", "", "", "", "saved of", "", "",
)  # fmt: skip
BELOW = (
    "S, M", "alone", "ahead", "cost", "alone", "ahead", "cost", "anew", "salvaged", "going on",
    "ahead", "anew", "salvaged", "pays",
)  # fmt: skip


def table(cases: Iterable[tuple[int, int]]) -> Iterator[str]:
    """Yield the lines of the table, for each number of stages and micro-batches."""
    for cells in (HEADS, BELOW, *(tuple(row(*case)) for case in dict.fromkeys(cases))):
        yield "".join(f"{cell:>10}" for cell in cells)
