"""Waits end with their operation or with the abort, whatever the operation does."""

import gc
import threading
import weakref

import pytest

from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.runtime.waiting import Waits
from support.waiting import until


def fail() -> None:
    raise RuntimeError("Connection closed by peer")


def test_ends_as_the_operation_does() -> None:
    waits = Waits()
    done = []
    waits.run(lambda: done.append(1))
    with pytest.raises(RuntimeError, match="closed by peer"):
        waits.run(fail)
    waits.run(lambda: done.append(2))
    assert done == [1, 2]
    waits.close()


def test_release_gives_up_an_operation_that_nothing_wakes() -> None:
    waits, never = Waits(), threading.Event()
    threading.Timer(0.1, waits.release).start()
    with pytest.raises(TransportError, match="given up"):
        waits.run(never.wait)
    never.set()
    waits.close()


def test_what_fails_after_it_was_given_up_keeps_nothing() -> None:
    class Group:
        """What the operation was to build."""

    waits, never = Waits(), threading.Event()
    built: list[weakref.ref[Group]] = []

    def fail_late() -> None:
        group = Group()
        built.append(weakref.ref(group))
        never.wait()
        fail()

    threading.Timer(0.1, waits.release).start()
    gc.disable()  # the collector would free it some time
    try:
        with pytest.raises(TransportError, match="given up"):
            waits.run(fail_late)
        never.set()
        until(lambda: built[0]() is None, "the group to be gone")
    finally:
        gc.enable()
        waits.close()


def test_limit_of_time_gives_up_this_call_and_those_behind_it() -> None:
    waits, never = Waits(), threading.Event()
    assert waits.run(lambda: 7, 60.0) == 7
    with pytest.raises(TransportError, match=r"no answer for 0\.1 s"):
        waits.run(never.wait, 0.1)
    with pytest.raises(TransportError, match="given up"):
        waits.run(lambda: 7, 60.0)
    never.set()
    waits.close()


def test_a_call_that_takes_long_is_looked_into() -> None:
    waits, enough, never = Waits(doubt_s=0.05), threading.Event(), threading.Event()
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            enough.set()

    assert waits.run(lambda: enough.wait(60), doubt=look)
    assert len(looks) >= 3

    def no_way() -> None:
        raise TransportError("no way")

    with pytest.raises(TransportError, match="no way"):
        waits.run(never.wait, doubt=no_way)
    with pytest.raises(TransportError, match="given up"):
        waits.run(lambda: 7)
    never.set()
    waits.close()


def test_operation_that_the_abort_does_wake_says_itself_what_happened() -> None:
    waits = Waits()
    waits.release()
    with pytest.raises(RuntimeError, match="closed by peer"):
        waits.run(fail)
    waits.close()


def test_thread_ends_with_close() -> None:
    before = threading.active_count()
    waits = Waits()
    waits.run(lambda: None)
    waits.close()
    until(lambda: threading.active_count() <= before, "the end of its thread")


def test_who_makes_no_call_has_no_thread() -> None:
    before = set(threading.enumerate())
    waits = Waits()
    waits.release()
    waits.close()
    assert set(threading.enumerate()) == before
