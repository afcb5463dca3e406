"""How long a worker computes in a step, by a clock that the test sets. What real workers tell of it
is in tests/worker/step/test_compute_time.py."""

import contextlib

import pytest

from oobleck.worker.runtime.timeline import AHEAD, Stopwatch


class Clock:
    """Goes on when the test says so. Its seconds are whole, so sums are exact."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def go(self, seconds: int) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stopwatch(clock: Clock) -> Stopwatch:
    stopwatch = Stopwatch(clock)
    stopwatch.begin()
    return stopwatch


def test_what_is_computed_counts_and_what_is_between_does_not(
    clock: Clock, stopwatch: Stopwatch
) -> None:
    assert stopwatch.seconds() == 0
    clock.go(64)
    with stopwatch.running():
        clock.go(1)
    clock.go(64)  # as for an activation of another stage
    with stopwatch.running():
        clock.go(2)
    clock.go(64)
    assert stopwatch.seconds() == 3


def test_pauses_inside_of_it_do_not_count(clock: Clock, stopwatch: Stopwatch) -> None:
    with stopwatch.running():
        clock.go(1)
        with stopwatch.paused():
            clock.go(64)
        clock.go(2)
        with stopwatch.paused():  # right behind the one before, and last of all
            clock.go(64)
    with stopwatch.running():
        clock.go(4)
    assert stopwatch.seconds() == 7


def test_a_pause_where_nothing_is_computed_begins_nothing(
    clock: Clock, stopwatch: Stopwatch
) -> None:
    """Whoever waits need not know whether it does so in a forward. A pause may be in another."""
    with stopwatch.paused():
        clock.go(64)
    clock.go(64)
    with stopwatch.running():
        clock.go(1)
        with stopwatch.paused():
            clock.go(64)
            with stopwatch.paused():
                clock.go(64)
            clock.go(64)
        clock.go(2)
    assert stopwatch.seconds() == 3


@pytest.mark.parametrize("waits", [False, True])
def test_a_step_that_is_left_in_the_middle_leaves_nothing_behind(
    clock: Clock, stopwatch: Stopwatch, waits: bool
) -> None:
    """A peer is lost in a forward, or while it waits for that peer."""

    def lose_a_peer() -> None:
        with stopwatch.running():
            clock.go(64)
        with stopwatch.running(), stopwatch.paused() if waits else contextlib.nullcontext():
            clock.go(64)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        lose_a_peer()
    clock.go(64)
    # It is done again, and only what is done then counts, though it waits before it computes.
    stopwatch.begin()
    with stopwatch.paused():
        clock.go(64)
    with stopwatch.running():
        clock.go(3)
    assert stopwatch.seconds() == 3


def test_the_host_does_not_queue_a_whole_step(clock: Clock) -> None:
    """It waits until the device has come to all but the last few."""
    waited: list[float] = []
    stopwatch = Stopwatch(clock, lambda mark: waited.append(float(mark)))
    for _ in range(2):
        stopwatch.begin()
        for _ in range(AHEAD + 3):
            with stopwatch.running():
                clock.go(1)
    began = 1000.0
    assert waited == [began, began + 1, began + 2, *(began + AHEAD + 3 + n for n in range(3))]


def test_every_step_counts_by_itself(clock: Clock, stopwatch: Stopwatch) -> None:
    for seconds in (5, 0, 2):
        stopwatch.begin()
        with stopwatch.running():
            clock.go(seconds)
        assert stopwatch.seconds() == seconds
