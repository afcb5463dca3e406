"""Which records a worker keeps for the next checkpoint, and what is made of a file of them."""

import threading

import pytest

from oobleck.core.checkpoint import MOST_RECORDS, InvalidCheckpoint
from oobleck.worker.runtime.records import RecordLog, Records, describe_file, read_lines
from support.jobs import evaluation, record, recorded


def steps(log: RecordLog, step: int) -> tuple[list[int], list[int]]:
    """Return the steps of a file's records, and of its evaluations."""
    found = read_lines(b"".join(log.lines(step, 0.0)), step)
    return [one.step for one in found.steps], [one.step for one in found.evaluations]


def test_what_the_master_has_is_forgotten_and_what_comes_later_is_left_out() -> None:
    log = recorded(5)
    for step in (2, 4):
        log.add_evaluation(evaluation(step))
    assert steps(log, 4) == ([1, 2, 3, 4], [2, 4])
    log.acknowledge(2, 2)
    assert steps(log, 5) == ([3, 4, 5], [4])
    log.add(record(2, 1, 2.0))
    assert steps(log, 5) == ([3, 4, 5], [4]), "it is known"
    log.acknowledge(9, 0)
    assert steps(log, 5) == ([], [4])


def test_after_a_way_back_the_records_beside_the_checkpoint_are_kept_too() -> None:
    log = RecordLog()
    for step in (5, 6, 7):
        log.add(record(step, 1, float(step)))
    beside = read_lines(b"".join(recorded(5).lines(5, 0.0)), 5)
    log.go_back(5, Records(steps=beside.steps, evaluations=(evaluation(3),)))
    log.add(record(6, 2, 60.0))
    found = read_lines(b"".join(log.lines(6, 0.0)), 6)
    assert [(one.step, one.generation) for one in found.steps] == [
        *((step, 1) for step in range(1, 6)),
        (6, 2),
    ]
    assert found.evaluations == (evaluation(3),)


def test_of_too_many_the_oldest_are_kept() -> None:
    log = RecordLog(most=3)
    for step in range(1, 6):
        log.add(record(step, 1, float(step)))
    assert steps(log, 5) == ([1, 2, 3], [])
    log.acknowledge(2, 0)
    log.add(record(6, 1, 6.0))
    log.add_evaluation(evaluation(6))
    log.add_evaluation(evaluation(7))
    assert steps(log, 7) == ([3, 6], [6])
    size = len(recorded(1).lines(1, 0.0)[0])
    small = RecordLog(most_bytes=2 * size)
    for step in (1, 2, 3):
        small.add(record(step, 1, float(step)))
    assert steps(small, 3) == ([1, 2], [])


def test_a_file_has_the_record_of_its_own_step_which_comes_right_after_it() -> None:
    log = recorded(2)
    later = threading.Timer(0.05, log.add, (record(3, 1, 3.0),))
    later.start()
    assert len(log.lines(3, 60.0)) == 3
    later.join()
    assert len(log.lines(4, 0.01)) == 3, "it does not come"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff\n", "line 1"),
        (b"[]\n", "line 1"),
        (b"{}\n", "no step up to 4"),
        (b'{"step":{"step":0}}\n', "line 1"),
        (b"".join(recorded(5).lines(5, 0.0)), "line 5: has no step up to 4"),
        (b"".join(recorded(4).lines(4, 0.0))[:-9], "line 4"),
        (b"\n" * (MOST_RECORDS + 1), f"has {MOST_RECORDS + 1} lines"),
    ],
)
def test_what_is_no_file_of_records_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=why):
        read_lines(content, 4)


def test_a_file_is_described_by_its_size_and_hash() -> None:
    lines = recorded(2).lines(2, 0.0)
    described = describe_file(lines)
    assert described.bytes == sum(map(len, lines))
    assert describe_file([]).bytes == 0
