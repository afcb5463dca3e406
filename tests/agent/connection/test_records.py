"""Step records until the master has them, and lines of output: nothing twice, nothing unbounded."""

import pytest

from oobleck.agent.connection.outbox import BATCH, HOLD_S, NEXT_S, Outbox, RecordBuffer
from oobleck.agent.connection.reports import hold_s
from oobleck.agent.processes.output import LINE_BYTES, TAIL_LINES, LogQueue, Tail
from oobleck.core.ids import Generation, Incarnation, JobId, NodeName
from oobleck.proto.types import NodeStatus
from support.jobs import record
from support.plans import plan_of_cuts

JOB = JobId("demo-1")
FIRST = Generation(1)


def filled(steps: int, limit: int = 1000) -> RecordBuffer:
    buffer = RecordBuffer(limit)
    for step in range(1, steps + 1):
        buffer.add(JOB, record(step, FIRST), 0.0)
    return buffer


def steps(buffer: RecordBuffer, now: float, *, held_s: float) -> list[int]:
    records, _ = buffer.due(now, hold_s=held_s)
    return [record.step for record in records]


def test_two_nodes_send_at_once_and_the_others_one_after_the_other() -> None:
    plan = plan_of_cuts(([1, 1], 1), ([2], 1), ([1, 1], 1))
    holds = [hold_s(plan, NodeName(f"n{number}")) for number in range(5)]
    assert holds == [0.0, 0.0, HOLD_S, HOLD_S + NEXT_S, HOLD_S + 2 * NEXT_S]


def test_the_agent_of_rank_0_sends_each_record_at_once_and_once() -> None:
    buffer = filled(3)
    assert steps(buffer, 0.0, held_s=0.0) == [1, 2, 3]
    assert steps(buffer, 99.0, held_s=0.0) == []
    assert buffer.next_due(0.0, hold_s=0.0) is None


def test_other_agents_send_what_stays_unacknowledged() -> None:
    buffer = filled(3)
    assert steps(buffer, HOLD_S - 0.01, held_s=HOLD_S) == []
    assert buffer.next_due(0.5, hold_s=HOLD_S) == HOLD_S
    buffer.acknowledge(JOB, 2)
    assert steps(buffer, HOLD_S, held_s=HOLD_S) == [3]


def test_records_of_several_workers_and_late_repeats_count_once() -> None:
    buffer = filled(2)
    buffer.add(JOB, record(2, FIRST), 0.0)
    buffer.acknowledge(JOB, 2)
    buffer.add(JOB, record(1, FIRST), 0.0)
    assert len(buffer) == 0


def test_another_master_is_told_again_what_the_one_before_had() -> None:
    """A job that goes back to a checkpoint does steps again, which an old copy never had."""
    buffer = filled(5)
    buffer.acknowledge(JOB, 5)
    buffer.session_ended()
    buffer.add(JOB, record(4, FIRST), 0.0)
    buffer.session_began(0.0)
    assert steps(buffer, 0.0, held_s=0.0) == [4]
    buffer.acknowledge(JOB, 4)
    buffer.session_ended()
    buffer.session_began(0.0)
    buffer.acknowledge(JOB, 2)
    buffer.add(JOB, record(2, FIRST), 0.0)
    buffer.add(JOB, record(3, FIRST), 0.0)
    assert steps(buffer, 0.0, held_s=0.0) == [3]


def test_a_new_session_repeats_all_that_is_unacknowledged_in_step_order() -> None:
    buffer = filled(3)
    assert steps(buffer, 0.0, held_s=0.0) == [1, 2, 3]
    buffer.acknowledge(JOB, 1)
    buffer.session_began(5.0)
    assert steps(buffer, 5.0, held_s=HOLD_S) == []
    assert steps(buffer, 5.0 + HOLD_S, held_s=HOLD_S) == [2, 3]


def test_what_was_beside_a_checkpoint_goes_apart_and_never_in_place_of_a_workers_own() -> None:
    buffer = filled(2)
    for step in (1, 2, 3, 4):
        buffer.add(JOB, record(step, FIRST), 0.0, Generation(2))
    buffer.add(JOB, record(5, Generation(2)), 0.0)
    for _ in range(2):
        found = []
        while (sent := buffer.due(0.0, hold_s=0.0))[0]:
            found.append(([record.step for record in sent[0]], sent[1]))
        assert found == [([1, 2], 0), ([3, 4], 2), ([5], 0)]
        buffer.session_began(0.0)
    buffer.acknowledge(JOB, 3)
    (last,), restored_in = buffer.due(0.0, hold_s=0.0)
    assert (last.step, restored_in) == (4, 2)


def test_of_two_records_of_a_step_the_one_of_the_newer_generation_is_told() -> None:
    """A head that lost its disk has the steps before of that one, and takes none of an older one
    after them."""
    buffer = filled(3)
    assert steps(buffer, 0.0, held_s=0.0) == [1, 2, 3]
    buffer.add(JOB, record(3, Generation(7)), 1.0)
    buffer.add(JOB, record(3, Generation(4)), 2.0)
    (again,), _ = buffer.due(2.0, hold_s=0.0)
    assert (again.step, again.generation) == (3, 7)
    buffer.session_began(3.0)
    assert [one.generation for one in buffer.due(3.0, hold_s=0.0)[0]] == [1, 1, 7]


def test_batches_are_bounded() -> None:
    buffer = filled(BATCH + 1)
    assert len(steps(buffer, 0.0, held_s=0.0)) == BATCH
    assert len(steps(buffer, 0.0, held_s=0.0)) == 1


def test_a_full_buffer_keeps_the_oldest() -> None:
    buffer = filled(5, limit=3)
    assert buffer.lost == 2
    assert steps(buffer, 0.0, held_s=0.0) == [1, 2, 3]


def test_another_job_drops_the_old_records_and_ignores_old_acknowledgements() -> None:
    buffer = filled(3)
    buffer.add(JobId("next-1"), record(1, FIRST), 0.0)
    buffer.acknowledge(JOB, 3)
    assert steps(buffer, 0.0, held_s=0.0) == [1]


def test_output_is_cut_into_lines_and_the_last_ones_are_remembered() -> None:
    tail = Tail()
    assert tail.feed(b"one\ntw") == ["one"]
    assert tail.feed(b"o\n\xff\n") == ["two", "�"]
    assert tail.feed(b"x" * (LINE_BYTES + 1)) == ["x" * LINE_BYTES]
    assert tail.finish() == ["x"]
    tail.feed(b"".join(b"%d\n" % n for n in range(100)))
    assert tail.last_lines().split("\n") == [str(n) for n in range(100 - TAIL_LINES, 100)]


def test_lines_that_nobody_takes_are_dropped_oldest_first_and_counted() -> None:
    queue = LogQueue(limit=3)
    queue.add(0, [str(n) for n in range(5)])
    queue.add(1, ["other"])
    assert queue.take(2) == (0, ["2", "3"], 2)
    assert queue.take(2) == (0, ["4"], 0)
    assert queue.take(2) == (1, ["other"], 0)
    assert queue.take(2) is None


def test_steps_before_a_boundary_are_sent_at_once_by_who_had_rank_0_then() -> None:
    outbox = Outbox(Incarnation("0001"))
    outbox.status(NodeStatus(generation=FIRST), 0.0, hold_s=0.0)
    outbox.status(NodeStatus(generation=Generation(2)), 0.0, hold_s=HOLD_S)
    outbox.record(JOB, record(7, FIRST), 0.0)
    assert sent(outbox) == [7]
    outbox.record(JOB, record(8, Generation(2)), 0.1)
    assert sent(outbox) == []
    assert outbox.next_due(0.1) == pytest.approx(0.1 + HOLD_S)


def sent(outbox: Outbox) -> list[int]:
    messages = [m for m in outbox.take(0.1) if m.WhichOneof("body") == "records"]
    return [told.step for message in messages for told in message.records.records]
