"""The replay of a step: when each stage of a pipeline computes, for many pipelines at once.

The order of compute comes from `oobleck.planner.programs.compiler.schedule`. A message takes time
on its way and keeps no stage from computing. Pipelines of one schedule are replayed as columns of
arrays; very long ones are extrapolated from their steady state. `oobleck.planner.cost.ends` owns
the rest of the step. Must not know plans or profiles.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oobleck.core.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from oobleck.core.schedules import Schedule
from oobleck.planner.cost.kinds import Kind
from oobleck.planner.programs.compiler.schedule import backward_slot, forward_slot, splits_backward

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
#: Seconds at which each stage of a pipeline finishes its compute.
Ends = tuple[float, ...]
Question = tuple[Schedule, Kind]

#: Pipelines replayed together: enough for a slot's arithmetic to outweigh its calls.
_MOST_COLUMNS = 64
#: Largest count of micro-batches that is replayed whole; 4 per stage if that is more.
_FEW_MICROBATCHES = 128


class Event(NamedTuple):
    """Compute of one stage on one micro-batch (counted from 0), with its begin and end."""

    kind: type[Compute]
    microbatch: int
    begun_s: float
    ended_s: float


def computed_s(
    questions: Iterable[Question], replayed: dict[Question, Ends] | None = None
) -> dict[Question, Ends]:
    """Return when each stage of each kind finishes its compute. For many micro-batches the times
    are right to within a fraction of a per cent. `replayed`: earlier replays, to which new ones are
    added."""
    counts = {question: _replayed(question[1]) for question in questions}
    known: dict[Question, Ends] = {} if replayed is None else replayed
    short = dict.fromkeys(
        asked
        for (schedule, kind), own in counts.items()
        for count in own
        if (asked := (schedule, kind._replace(microbatches=count))) not in known
    )
    # Replay pipelines of similar length together, so that few columns are padded.
    ordered = sorted(short, key=lambda q: (q[0], q[1].microbatches + len(q[1].cut.stages)))
    for schedule, group in groupby(ordered, key=lambda question: question[0]):
        kinds = [kind for _, kind in group]
        for first in range(0, len(kinds), _MOST_COLUMNS):
            some = kinds[first : first + _MOST_COLUMNS]
            ends = _SideBySide(schedule, some).ends()
            known.update(zip(((schedule, kind) for kind in some), ends, strict=True))
    return {
        (schedule, kind): _extrapolated(
            own,
            [known[schedule, kind._replace(microbatches=count)] for count in own],
            kind.microbatches,
        )
        for (schedule, kind), own in counts.items()
    }


def least_computed_s(kind: Kind) -> float:
    """Return a lower bound of the seconds until a kind's stages have finished, under any schedule.

    A stage waits for its first forward, then does all its work. If weight gradients come last, the
    last micro-batch still has to go back through the stages before.
    """
    least = before = behind = 0.0
    for number, stage in enumerate(kind.cut.stages):
        message_s = kind.cut.message_s[number - 1] if number else 0.0
        before += message_s
        behind += message_s if number else 0.0
        back_s = stage.backward_input_s if number else stage.backward_s
        whole = kind.microbatches * (stage.forward_s + stage.backward_s)
        passed = kind.microbatches * (stage.forward_s + back_s) + behind
        least = max(least, before + whole, before + passed)
        before += stage.forward_s
        behind += back_s
    return least


def timeline(schedule: Schedule, kind: Kind) -> list[list[Event]]:
    """Return what each stage computes, with start and end times."""
    return _SideBySide(schedule, [kind]).events()


def _replayed(kind: Kind) -> tuple[int, ...]:
    """Return the counts of micro-batches to replay for a kind: its own, or two in the steady state
    to extrapolate from. That bounds the work of a replay."""
    most = max(_FEW_MICROBATCHES, 4 * len(kind.cut.stages))
    return (kind.microbatches,) if kind.microbatches <= most else (most // 2, most)


def _extrapolated(counts: Sequence[int], ends: Sequence[Ends], wanted: int) -> Ends:
    if len(counts) == 1:
        return ends[0]
    (fewer, most), (before, after) = counts, ends
    return tuple(
        late + (wanted - most) * (late - early) / (most - fewer)
        for early, late in zip(before, after, strict=True)
    )


class _Wave(NamedTuple):
    """Compute that can run side by side: the forward or backward of micro-batch `batch[i]` on the
    stage that has `after[i]` stages after it."""

    slot: int
    backward: bool
    after: slice
    batch: Integers


@lru_cache(maxsize=64)
def _waves(schedule: Schedule, depth: int, most: int) -> tuple[_Wave, ...]:
    """List all compute of `depth` stages and `most` micro-batches, in the order of the slots."""
    after, batch = (grid.ravel() for grid in np.indices((depth, most)))
    waves = []
    for backward, slot_of in ((False, forward_slot), (True, backward_slot)):
        slots = slot_of(schedule, batch, after, most)
        order = np.lexsort((after, slots))
        batches, slot, row = batch[order], slots[order].tolist(), after[order].tolist()
        edges = [0, *(np.flatnonzero(np.diff(slots[order])) + 1).tolist(), len(row)]
        for first, stop in pairwise(edges):
            step = row[first + 1] - row[first] if stop - first > 1 else 1
            stages = slice(row[first], row[stop - 1] + 1, step)
            assert len(range(depth)[stages]) == stop - first, "stages are evenly spaced"
            waves.append(_Wave(slot[first], backward, stages, batches[first:stop]))
    return tuple(sorted(waves, key=lambda wave: wave[:2]))


class _SideBySide:
    """Replay of several pipelines as the columns of arrays; rows are stages, the last one first.

    Shorter pipelines are padded with stages that take no time before their first one. A padding
    stage has each micro-batch no later than the first stage can take it in.
    """

    def __init__(self, schedule: Schedule, kinds: Sequence[Kind]) -> None:
        depth = max(len(kind.cut.stages) for kind in kinds)
        shape = depth + 1, len(kinds)
        self._schedule, self._kinds, self._depth = schedule, kinds, depth
        self._microbatches: Integers = np.array([kind.microbatches for kind in kinds])
        self._fewest, self._most = min(self._microbatches), int(max(self._microbatches))
        self._forward_s, self._backward_s, self._weight_s = (np.zeros(shape) for _ in range(3))
        #: Seconds of the message between a stage and the next one.
        self._message_s = np.zeros(shape)
        #: Number of stages before it: the weight gradients of so many micro-batches are deferred.
        self._before = np.zeros(shape, dtype=np.int64)
        self._splits = splits_backward(schedule)
        for column, kind in enumerate(kinds):
            count = len(kind.cut.stages)
            stages = kind.cut.stages[::-1]
            self._forward_s[:count, column] = [stage.forward_s for stage in stages]
            self._backward_s[:count, column] = [stage.backward_s for stage in stages]
            if self._splits:
                # No stage needs the first stage's input gradient: its backward stays whole.
                self._backward_s[: count - 1, column] = [s.backward_input_s for s in stages[:-1]]
                self._weight_s[: count - 1, column] = [s.backward_weight_s for s in stages[:-1]]
            self._message_s[1:count, column] = kind.cut.message_s[::-1]
            self._before[:count, column] = range(count - 1, -1, -1)
        self._clock = np.zeros(shape)
        #: End of the last forward of a stage, and of the last backward of the stage after it.
        self._forward, self._backward = np.zeros(shape), np.zeros(shape)

    def ends(self) -> list[Ends]:
        for _ in self._played():
            pass
        left = np.minimum(self._before, self._microbatches)
        self._clock += left * self._weight_s
        return [
            tuple(self._clock[: len(kind.cut.stages), column][::-1].tolist())
            for column, kind in enumerate(self._kinds)
        ]

    def _played(self) -> Iterator[_Wave]:
        """Yield all waves in order; in each, a stage takes in its neighbour's last output."""
        for wave in _waves(self._schedule, self._depth, self._most):
            after = wave.after
            before = slice(after.start + 1, after.stop + 1, after.step)
            if wave.backward:
                arrived = self._backward[after] + self._message_s[after]
                self._backward[before] = self._done(wave, arrived, self._backward_s)
            else:
                arrived = self._forward[before] + self._message_s[before]
                self._forward[after] = self._done(wave, arrived, self._forward_s)
            yield wave
            if wave.backward and self._splits:
                batch = wave.batch[:, None]
                due = (batch >= self._before[after]) & (batch < self._microbatches)
                self._clock[after] += np.where(due, self._weight_s[after], 0.0)

    def _done(self, wave: _Wave, arrived: Floats, taken_s: Floats) -> Floats:
        """Advance these stages past the arrivals and return when they end. A stage without that
        micro-batch keeps its time."""
        clock, batch = self._clock[wave.after], wave.batch
        end = np.maximum(clock, arrived) + taken_s[wave.after]
        if max(batch[0], batch[-1]) >= self._fewest:
            end = np.where(batch[:, None] < self._microbatches, end, clock)
        self._clock[wave.after] = end
        return end

    def events(self) -> list[list[Event]]:
        """Return the events of one pipeline, by stage."""
        (kind,), depth = self._kinds, self._depth
        rows: list[list[Event]] = [[] for _ in range(depth)]

        def add(stage: int, what: type[Compute], microbatch: int, ended_s: float) -> None:
            taken_s = self._taken_s(what)[depth - 1 - stage, 0]
            rows[stage].append(Event(what, microbatch, ended_s - taken_s, ended_s))

        for wave in self._played():
            for after, microbatch in zip(
                range(depth)[wave.after], wave.batch.tolist(), strict=True
            ):
                stage, end = depth - 1 - after, float(self._clock[after, 0])
                split = self._splits and stage > 0
                whole: type[Compute] = BackwardInput if split else Backward
                add(stage, whole if wave.backward else Forward, microbatch, end)
                if wave.backward and split and microbatch >= stage:
                    end += self._weight_s[after, 0]
                    add(stage, BackwardWeight, microbatch - stage, end)
        for stage in range(1, depth) if self._splits else ():
            end = float(self._clock[depth - 1 - stage, 0])
            for microbatch in range(max(0, kind.microbatches - stage), kind.microbatches):
                end += self._weight_s[depth - 1 - stage, 0]
                add(stage, BackwardWeight, microbatch, end)
        return rows

    def _taken_s(self, what: type[Compute]) -> Floats:
        by_kind: Mapping[type[Compute], Floats] = {
            Forward: self._forward_s,
            BackwardWeight: self._weight_s,
        }
        return by_kind.get(what, self._backward_s)
