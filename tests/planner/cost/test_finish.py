"""Pipelines side by side in arrays end when each would alone, by the plain recurrence."""

import random
from dataclasses import replace

import pytest

from oobleck.planner.cost import finish
from oobleck.planner.cost.finish import Run, finish_s
from oobleck.planner.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
)
from oobleck.planner.programs.schedule import compute_order
from oobleck.planner.schedules import Schedule

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe", "zb-h1")


def random_run(rng: random.Random, schedule: Schedule, most_stages: int) -> Run:
    stages = rng.randint(1, most_stages)
    split = schedule == "zb-h1"

    def times(count: int) -> tuple[float, ...]:
        return tuple(rng.choice([0.0, rng.uniform(0.1, 3)]) for _ in range(count))

    return Run(
        microbatches=rng.randint(1, 20),
        forward_s=times(stages),
        backward_s=times(stages),
        weight_s=(0.0, *times(stages - 1)) if split else (),
        message_s=times(stages - 1),
        all_forward_first=schedule == "gpipe",
    )


def alone_s(run: Run, schedule: Schedule) -> list[float]:
    """Whatever can be computed is, in the order of the schedule, one after the other."""
    stages = range(run.stages)
    orders = [
        list(compute_order(schedule, stages=run.stages, stage=s, microbatches=run.microbatches))
        for s in stages
    ]
    clock, done = [0.0] * run.stages, dict[tuple[int, bool, int], float]()
    at = [0] * run.stages
    while any(at[s] < len(orders[s]) for s in stages):
        for s in stages:
            while at[s] < len(orders[s]):
                kind, microbatch = orders[s][at[s]]
                begun = arrival(run, done, s, kind, microbatch)
                if begun is None:
                    break
                clock[s] = max(clock[s], begun) + taken_s(run, s, kind)
                if kind is not BackwardWeight:
                    done[s, kind is Forward, microbatch] = clock[s]
                at[s] += 1
    return clock


def arrival(
    run: Run, done: dict[tuple[int, bool, int], float], s: int, kind: type[Compute], m: int
) -> float | None:
    if kind is BackwardWeight or (kind is Forward and s == 0):
        return 0.0
    if kind is not Forward and s == run.stages - 1:
        return 0.0
    source, between = (s - 1, s - 1) if kind is Forward else (s + 1, s)
    end = done.get((source, kind is Forward, m))
    return None if end is None else end + run.message_s[between]


def taken_s(run: Run, s: int, kind: type[Compute]) -> float:
    if kind is Forward:
        return run.forward_s[s]
    if kind is BackwardWeight:
        return run.weight_s[s]
    assert kind in (Backward, BackwardInput)
    return run.backward_s[s]


@pytest.mark.parametrize("seed", range(10))
def test_side_by_side_is_as_alone(seed: int) -> None:
    rng = random.Random(seed)
    drawn = [(schedule, random_run(rng, schedule, 9)) for schedule in SCHEDULES for _ in range(30)]
    rng.shuffle(drawn)
    found = finish_s([run for _, run in drawn])
    for (schedule, run), ends in zip(drawn, found, strict=True):
        assert ends == pytest.approx(alone_s(run, schedule), rel=1e-12), run


def test_more_than_go_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    runs = [random_run(rng, rng.choice(SCHEDULES), 4) for _ in range(40)]
    together = finish_s(runs)
    monkeypatch.setattr(finish, "_MOST_ROWS", 3)
    assert finish_s(runs) == together
    assert finish_s([]) == []


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of very many micro-batches, what is between fewer ones goes on."""
    run = replace(random_run(random.Random(3), "1f1b", 5), forward_s=(1.0,) * 2, message_s=(0.0,))
    run = replace(run, backward_s=(2.0,) * 2, microbatches=60)
    alike = [run, replace(run, microbatches=10**6), replace(run, microbatches=10**7)]
    looked_at: list[int] = []

    class Counted(finish._SideBySide):
        def __init__(self, runs: list[Run]) -> None:
            looked_at.extend(run.microbatches for run in runs)
            super().__init__(runs)

    monkeypatch.setattr(finish, "_SideBySide", Counted)
    few, many, more = finish_s(alike)
    assert sorted(looked_at) == [60, 64, 128]
    each_s = (more[0] - many[0]) / 9e6
    assert each_s == pytest.approx(3.0)
    assert few[0] < many[0]
