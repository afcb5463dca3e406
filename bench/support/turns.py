"""Contenders, and their comparison in turns, round after round.

Times drift with the load of the machine, so only times of the same round are compared, and the
figure that counts is the median of their ratios over the rounds.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Largest figures of several processes; each figure may be of another process."""

    threads: int
    files: int
    #: Bytes of memory shared with no other process.
    own_bytes: int


def footprint(pids: Iterable[int]) -> Footprint:
    processes = [psutil.Process(pid) for pid in pids]
    return Footprint(
        threads=max(process.num_threads() for process in processes),
        files=max(process.num_fds() for process in processes),
        own_bytes=max(process.memory_full_info().uss for process in processes),
    )


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Result of one contender in one round."""

    #: Seconds from the end of a step to that of the next, on average.
    step_s: float
    #: Processor seconds of all its processes per step: hardly touched by other load.
    processor_s: float
    #: Footprint of its processes after the last step.
    footprint: Footprint


class Contender(Protocol):
    def run(self, steps: int) -> Turn:
        """Train that many steps, after one that does not count."""


def take_turns(
    contenders: Mapping[str, Contender], *, rounds: int, steps: int
) -> dict[str, list[Turn]]:
    """Run all contenders in turns; return each one's turns, by round. Each round begins with
    another one."""
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            turns[name].append(contenders[name].run(steps))
    return turns


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ratio of the speeds of two contenders, over all rounds."""

    median: float
    low: float
    high: float


def speed(ours: Sequence[Turn], theirs: Sequence[Turn]) -> Ratio:
    ratios = [b.step_s / a.step_s for a, b in zip(ours, theirs, strict=True)]
    return Ratio(median=statistics.median(ratios), low=min(ratios), high=max(ratios))


def saving(ours: Sequence[Turn], theirs: Sequence[Turn]) -> float:
    """Return the median ratio of processor times, theirs to ours."""
    return statistics.median(
        b.processor_s / a.processor_s for a, b in zip(ours, theirs, strict=True)
    )
