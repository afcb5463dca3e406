"""metrics.jsonl, events.jsonl and the workers' logs: in order, exactly once, bounded."""

import itertools
import json
import random
import resource
import shutil
from pathlib import Path

import msgspec
import pytest

from oobleck.core.ids import JobId, NodeName, WorkerId
from oobleck.core.messages import StepRecord
from oobleck.host.detection import Detection
from oobleck.host.system.environment import Environment
from oobleck.master.config import MasterConfig
from oobleck.master.events.jobs import (
    JobCancelRequested,
    JobStarted,
    JobSubmitted,
    JobSucceeded,
)
from oobleck.master.storage.archive import Archive, LogStore
from oobleck.master.storage.disk import Storage, StorageFailed
from oobleck.master.storage.journal import Journal
from oobleck.master.storage.ledger import Ledger
from oobleck.master.storage.records import EvaluationLog, EventLog, MetricsLog, read_steps
from support.jobs import evaluation, job_spec, record

JOB = JobId("demo-1")


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def written(log: MetricsLog, *records: StepRecord) -> tuple[StepRecord, ...]:
    """What of the records is new, and then on disk."""
    new = log.append(records)
    log.write()
    return new


def test_a_line_has_the_agreed_fields(tmp_path: Path) -> None:
    written(MetricsLog(tmp_path / "m"), record(1, 3, 12.5))
    (line,) = (tmp_path / "m").read_text().splitlines()
    assert list(json.loads(line)) == [
        "step",
        "loss",
        "grad_norm",
        "tokens",
        "samples_digest",
        "generation",
        "step_seconds",
        "time",
    ]


def test_any_step_is_found_in_a_file_with_gaps(tmp_path: Path) -> None:
    path = tmp_path / "m"
    assert read_steps(path, 1) == ([], 1)
    steps = [step for step in range(3, 40) if step % 7]
    lines = [json.dumps({"step": step, "pad": "." * (step * step % 61)}) for step in steps]
    for torn in ("", '{"st', json.dumps({"step": 41})):
        path.write_text("".join(f"{line}\n" for line in lines) + torn)
        for first in range(1, 45):
            wanted = [line for line, step in zip(lines, steps, strict=True) if step >= first]
            assert read_steps(path, first) == (wanted, 40 if wanted else first)


def test_a_long_file_is_read_in_parts(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "pad": "." * 1000}) for step in range(1, 3001)]
    lines[1500] = json.dumps({"step": 1501, "pad": "." * 2_500_000})
    path = tmp_path / "m"
    path.write_text("".join(f"{line}\n" for line in lines))
    found, step, parts = [], 1, list[int]()
    while step <= 3000:
        some, step = read_steps(path, step)
        found += some
        parts.append(sum(map(len, some)))
    assert found == lines
    whole = [size for size in parts if size <= 16 << 10]
    assert len(parts) - len(whole) == 1, "only the line that is longer is"
    assert sum(whole) / len(whole) > 10_000


def test_skipped_steps_are_counted_over_a_restart(tmp_path: Path) -> None:
    skipped = [
        msgspec.structs.replace(record(step, 1, float(step)), skipped=True, loss=None)
        for step in (2, 4)
    ]
    first = MetricsLog(tmp_path / "m")
    written(first, record(1, 1, 1.0), skipped[0])
    (new,) = written(MetricsLog(tmp_path / "m"), record(3, 1, 3.0))
    assert new.skipped_steps == 1
    written(MetricsLog(tmp_path / "m"), skipped[1], skipped[0], record(5, 1, 5.0))
    lines = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [line.get("skipped_steps") for line in lines] == [None, 1, 1, 2, 2]
    assert [line.get("skipped") for line in lines] == [None, True, None, True, None]


def test_records_in_any_order_and_repeated_become_each_step_once(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    shuffled = random.Random(seed)
    records = [record(step, 1, float(step)) for step in range(1, 101)]
    told = records * 3
    shuffled.shuffle(told)
    metrics = MetricsLog(tmp_path / "m")
    found = []
    for start in range(0, len(told), 7):
        through_before = metrics.through_step
        new = written(metrics, *told[start : start + 7])
        assert [r.step for r in new] == list(range(through_before + 1, metrics.through_step + 1))
        if metrics.through_step:
            assert steps_in(tmp_path / "m") == list(range(1, metrics.through_step + 1))
        found += new
    assert found == records, f"seed {seed}"


def test_reopened_after_any_cut_it_goes_on_without_gap(tmp_path: Path) -> None:
    whole = MetricsLog(tmp_path / "whole")
    records = tuple(record(step, 1, float(step)) for step in range(1, 6))
    written(whole, *records)
    content = (tmp_path / "whole").read_bytes()
    for cut in range(len(content)):
        path = tmp_path / "cut"
        path.write_bytes(content[:cut])
        metrics = MetricsLog(path)
        assert metrics.through_step == content[:cut].count(b"\n")
        written(metrics, *records)
        assert path.read_bytes() == content


def test_a_tail_of_zeros_after_a_power_loss_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "m"
    metrics = MetricsLog(path)
    written(metrics, record(1, 1, 1.0), record(2, 1, 2.0))
    with path.open("ab") as file:
        file.write(b"\0" * 300)
    assert MetricsLog(path).through_step == 2
    assert steps_in(path) == [1, 2]


def test_rubbish_longer_than_the_tail_that_is_read_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "m"
    metrics = MetricsLog(path)
    written(metrics, record(1, 1, 1.0), record(2, 1, 2.0))
    with path.open("ab") as file:
        file.write(b"\0" * 200_000)
    assert MetricsLog(path).through_step == 2
    assert steps_in(path) == [1, 2]


def test_what_the_disk_takes_in_part_waits_and_is_written_later(tmp_path: Path) -> None:
    path = tmp_path / "m"
    metrics = MetricsLog(path)
    metrics.append((record(1, 1, 1.0),))
    metrics.write()
    whole = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, limits[1]))
    try:
        new = metrics.append((record(2, 1, 2.0),))
        assert [r.step for r in new] == [2]
        with pytest.raises(StorageFailed, match="too large"):
            metrics.write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == whole
    assert (metrics.through_step, metrics.stored_step) == (2, 1)
    metrics.append((record(2, 1, 2.0), record(3, 1, 3.0)))
    metrics.write()
    assert metrics.stored_step == 3
    assert steps_in(path) == [1, 2, 3]


def test_any_number_of_jobs_needs_no_more_files(tmp_path: Path) -> None:
    for number in range(300):
        log = MetricsLog(tmp_path / str(number))
        written(log, record(1, 1, 1.0))
    names = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [name for name in names if name.startswith(str(tmp_path))]


def look(archive: Archive, now: float, late_s: float = 0.0) -> list[int]:
    """Return the steps whose records go on, as the master has them do."""
    found = list(archive.held_up())
    for job_id, steps in archive.given_up(now, late_s).items():
        archive.lose(job_id, steps)
        found.append(job_id)
    return [record.step for job_id in found for record in archive.take_records(job_id, ())]


def test_records_wait_for_those_before_them_and_not_for_ever(tmp_path: Path) -> None:
    archive = Archive(MasterConfig(listen="127.0.0.1:0", state_dir=tmp_path, timing=Detection()))

    def take(*steps: int) -> None:
        archive.take_records(JOB, tuple(record(step, 1, float(step)) for step in steps))
        archive.write()

    def passed(now: float, late_s: float = 0.0) -> list[int]:
        new = look(archive, now, late_s)
        archive.write()
        return new

    take(1)
    assert passed(0.0) == []
    take(4, 5)
    assert passed(10.0) == []
    assert passed(69.0) == []
    take(3)
    assert passed(69.5) == [], "the first of them may come as well"
    assert passed(629.0, 500.0) == [], "the master was away itself"
    assert passed(630.0) == [3, 4, 5]
    take(2, 6)
    assert passed(800.0) == []
    assert steps_in(tmp_path / "jobs" / JOB / "metrics.jsonl") == [1, 3, 4, 5, 6]


def test_records_that_come_behind_a_gap_in_the_last_message_are_written_too(tmp_path: Path) -> None:
    """What comes with them is not on disk yet when they are looked at first."""
    archive = Archive(MasterConfig(listen="127.0.0.1:0", state_dir=tmp_path, timing=Detection()))
    records = tuple(record(step, 1, float(step)) for step in (1, 3, 5))
    assert [new.step for new in archive.take_records(JOB, records)] == [1]
    found = []
    for now in (0.0, 1.0, 61.0, 62.0, 63.0, 123.0, 124.0):
        found += [(now, step) for step in look(archive, now)]
        archive.write()
    assert found == [(61.0, 3), (62.0, 5)], "the second gap is as old as the first"
    assert steps_in(tmp_path / "jobs" / JOB / "metrics.jsonl") == [1, 3, 5]


def test_records_that_a_job_ended_with_are_waited_for_and_then_given_up(tmp_path: Path) -> None:
    """Its master ended before it had written them."""
    archive = Archive(MasterConfig(listen="127.0.0.1:0", state_dir=tmp_path, timing=Detection()))
    archive.take_records(JOB, tuple(record(step, 1, float(step)) for step in (1, 2)))
    archive.write()
    archive.expect(JOB, 6)
    assert archive.given_up(0.0, 0.0) == {}
    archive.take_records(JOB, (record(3, 1, 3.0),))
    archive.write()
    assert [archive.given_up(now, 0.0) for now in (1.0, 60.0)] == [{}, {}]
    assert archive.given_up(61.0, 0.0) == {JOB: range(4, 7)}
    archive.lose(JOB, range(4, 7))
    archive.expect(JOB, 6)
    assert not archive.metrics(JOB).waits, "the next master knows"


def test_what_too_many_records_on_a_full_disk_held_up_is_written_once_there_is_room(
    tmp_path: Path,
) -> None:
    """Agents send it again only if it was left with them."""
    most = 10_000
    archive = Archive(MasterConfig(listen="127.0.0.1:0", state_dir=tmp_path, timing=Detection()))
    archive.storage.problem = "full"
    for first in (1, most + 1):
        steps = range(first, first + most)
        archive.take_records(JOB, tuple(record(step, 1, float(step)) for step in steps))
    archive.write()
    assert look(archive, 0.0) == []
    assert not archive.asks_again()
    archive.storage.problem = ""
    archive.write()
    assert look(archive, 1.0) == [*range(most + 1, 2 * most + 1)]
    assert look(archive, 2.0) == []
    archive.write()
    steps = steps_in(tmp_path / "jobs" / JOB / "metrics.jsonl")
    assert steps == [*range(1, 2 * most + 1)]


def test_lost_steps_are_passed_over_once_all_before_them_are_there(tmp_path: Path) -> None:
    """As after a restart, when the file lacks what came just before them."""
    metrics = MetricsLog(tmp_path / "m")
    metrics.lose(range(3, 6))
    new = metrics.append(tuple(record(step, 1, float(step)) for step in (1, 6, 4)))
    assert [one.step for one in new] == [1]
    assert metrics.missing == range(0), "what is lost is not told again"
    metrics.write()
    assert (metrics.missing, metrics.stored_step) == (range(2, 3), 1)
    new = metrics.append((record(2, 1, 2.0),))
    assert [one.step for one in new] == [2, 6]
    assert (metrics.through_step, metrics.stored_step) == (6, 1), "nothing is written yet"
    metrics.write()
    assert metrics.stored_step == 6
    assert steps_in(tmp_path / "m") == [1, 2, 6]

    metrics.lose(range(7, 10))
    assert (metrics.through_step, metrics.stored_step) == (9, 9)


def test_a_long_file_is_known_from_its_end(tmp_path: Path) -> None:
    records = tuple(record(step, 1, float(step)) for step in range(1, 2001))
    written(MetricsLog(tmp_path / "m"), *records)
    metrics = MetricsLog(tmp_path / "m")
    assert metrics.through_step == 2000
    assert metrics.recent == records[-10:]


def told(state_dir: Path, count: int) -> EventLog:
    """As after a replay of so many events."""
    log = EventLog(state_dir)
    for number in range(count):
        log.add(JOB, {"event": "waiting", "reason": str(number)}, 1000.0 + number)
    return log


@pytest.mark.parametrize("cut", range(0, 140, 7))
def test_the_event_file_gets_what_it_lacks_and_nothing_twice(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "jobs" / JOB / "events.jsonl"
    told(tmp_path, 3).write()
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    restarted = told(tmp_path, 3)
    restarted.write()
    assert path.read_bytes() == whole
    restarted.add(JOB, {"event": "cancelled"}, 2000.0)
    restarted.write()
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_an_event_file_that_is_ahead_of_the_journal_is_told_and_gone_on_with(
    tmp_path: Path,
) -> None:
    path = tmp_path / "jobs" / JOB / "events.jsonl"
    told(tmp_path, 5).write()
    log = told(tmp_path, 3)
    assert log.ahead() == {JOB: 5}
    log.resume(log.ahead())
    log.add(JOB, {"event": "cancelled"}, 2000.0)
    log.write()
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


def test_rubbish_behind_the_events_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "jobs" / JOB / "events.jsonl"
    told(tmp_path, 3).write()
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 3_000_000)
    assert told(tmp_path, 3).ahead() == {}
    assert path.read_bytes() == whole


def test_events_are_read_in_whole_lines_from_where_one_was(tmp_path: Path) -> None:
    log = told(tmp_path, 3)
    log.write()
    lines, offset = log.read(JOB, 0)
    assert [json.loads(line)["id"] for line in lines] == [1, 2, 3]
    assert log.read(JOB, offset) == ([], offset)
    log.add(JOB, {"event": "cancelled"}, 2000.0)
    log.write()
    assert [json.loads(line)["id"] for line in log.read(JOB, offset)[0]] == [4]
    assert log.read(JobId("none"), 0) == ([], 0)


def test_logs_of_several_workers_come_by_time_and_are_bounded(tmp_path: Path) -> None:
    logs = LogStore(tmp_path, most_bytes=2000)
    first, second = WorkerId(NodeName("n-1"), 0), WorkerId(NodeName("n-1"), 1)
    for number in range(100):
        logs.append(JOB, (first, second)[number % 2], [f"line {number}"], 1000.0 + number)
    lines = list(logs.snapshot(JOB, lambda worker: True))
    numbers = [int(line.text.removeprefix("line ")) for line in lines]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 99
    assert {line.worker for line in lines} == {first, second}
    own = [int(line.text.split()[1]) for line in logs.snapshot(JOB, lambda w: w == second)]
    assert own == list(range(own[0], 100, 2))
    sizes = [path.stat().st_size for path in (tmp_path / "jobs" / JOB / "logs").iterdir()]
    assert len(sizes) == 4
    assert all(size < 2100 for size in sizes)


def test_a_follower_gets_each_line_after_the_snapshot_once(tmp_path: Path) -> None:
    logs = LogStore(tmp_path)
    worker = WorkerId(NodeName("n1"), 0)
    logs.append(JOB, worker, ["before"], 1.0)
    with logs.follow(JOB, lambda w: w == worker) as follower:
        past = logs.snapshot(JOB, lambda w: True)
        logs.append(JOB, worker, ["after"], 2.0)
        logs.append(JOB, WorkerId(NodeName("n2"), 0), ["other"], 3.0)
        assert [line.text for line in past] == ["before"]
        new = follower.take()
        assert new is not None
        assert new.text == "after"
        assert follower.take() is None
    assert list(itertools.islice(logs.snapshot(JobId("none"), lambda w: True), 1)) == []


def test_followers_share_the_newest_lines_and_lose_the_oldest_that_are_too_many(
    tmp_path: Path,
) -> None:
    logs, worker = LogStore(tmp_path), WorkerId(NodeName("n1"), 0)

    def left(text: str, times: int) -> int:
        with (
            logs.follow(JOB, lambda w: True) as slow,
            logs.follow(JOB, lambda w: True) as quick,
            logs.follow(JOB, lambda w: w != worker) as elsewhere,
        ):
            for number in range(times):
                logs.append(JOB, worker, [f"{number} {text}"], 1.0)
                line = quick.take()
                assert line is not None
                assert line.text.split()[0] == str(number)
            assert elsewhere.take() is None
            last = line
            found = list(iter(slow.take, None))
            assert found[-1] is last
            assert [int(line.text.split()[0]) for line in found] == list(range(times))[
                -len(found) :
            ]
            return len(found)

    assert left("x", 10_001) == 10_000
    assert 255 <= left("x" * 16_000, 300) <= 265
    assert logs._newest == {}


@pytest.mark.parametrize(
    "rest", ['{"step": 6, "lo', "\0" * 90_000 + "\n"], ids=["torn", "of a power loss"]
)
def test_evaluations_come_once_each_and_survive_an_end_that_is_no_line(
    tmp_path: Path, rest: str
) -> None:
    path = tmp_path / "jobs" / "demo-1" / "evaluations.jsonl"
    log = EvaluationLog(path)
    assert log.last is None
    assert not path.exists()
    new = [log.append(evaluation(step)) for step in (2, 2, 4, 2, 4)]
    assert new == [True, False, True, False, False]
    log.write()
    with open(path, "a") as file:
        file.write(rest)
    again = EvaluationLog(path)
    assert again.last == evaluation(4)
    assert not again.append(evaluation(4))
    assert again.append(msgspec.structs.replace(evaluation(6), loss=None))
    again.write()
    assert steps_in(path) == [2, 4, 6]
    first, _, last = map(json.loads, path.read_text().splitlines())
    assert list(first) == [
        *("step", "loss", "perplexity", "samples", "generation", "seconds", "time")
    ]
    assert first["perplexity"] == pytest.approx(1.6487212707001282)
    assert (last["loss"], last["perplexity"]) == (None, None)


def test_a_disk_that_takes_and_gives_nothing_is_a_problem_and_no_end(tmp_path: Path) -> None:
    """As a file system that has become read-only, or is gone."""
    state = tmp_path / "state"
    (state / "reserve").mkdir(parents=True)  # nor can it be removed as a file
    storage = Storage(state)
    assert "new jobs are refused" in storage.problem
    assert not storage.give_way()
    shutil.rmtree(state)
    assert not storage.look(10.0)
    storage.problem = ""
    assert not storage.look(20.0)
    assert "cannot be looked at" in storage.problem


def test_records_that_are_in_no_file_keep_the_events_that_they_are_made_of(tmp_path: Path) -> None:
    config = MasterConfig(listen="127.0.0.1:0", state_dir=tmp_path, timing=Detection())

    def start() -> tuple[Ledger, Journal]:
        journal = Journal(tmp_path / "journal.log")
        return Ledger(config, journal, Environment()), journal

    in_the_way = tmp_path / "jobs"
    in_the_way.touch()
    ledger, journal = start()
    submitted = JobSubmitted(job_id=JOB, request_id="r1", spec=job_spec("demo"))
    ledger.journal(submitted)
    for _ in range(3):  # more than a journal has before it is worth a snapshot
        ledger.journal(JobCancelRequested(job_id=JOB, request_id="r" * (1 << 20)))
    assert ledger.commit()
    assert journal.wants_compaction
    ledger.compact()
    assert ledger.problem
    journal.close()

    in_the_way.unlink()
    journal = start()[1]
    journal.close()
    events = (tmp_path / "jobs" / JOB / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in events][:1] == [1]


@pytest.mark.parametrize("profile_only", [False, True])
def test_the_next_head_waits_for_what_a_job_has_trained_alone(
    tmp_path: Path, profile_only: bool
) -> None:
    """One that only measured has no steps."""
    config = MasterConfig(listen="127.0.0.1:0", state_dir=tmp_path, timing=Detection())
    journal = Journal(tmp_path / "journal.log")
    ledger = Ledger(config, journal, Environment())
    spec = job_spec("demo")
    submitted = JobSubmitted(job_id=JOB, request_id="r", spec=spec, profile_only=profile_only)
    for event in (submitted, JobStarted(job_id=JOB), JobSucceeded(job_id=JOB)):
        ledger.journal(event)
    ledger.commit()
    journal.close()
    after = Journal(tmp_path / "journal.log")
    metrics = Ledger(config, after, Environment()).archive.metrics(JOB)
    assert metrics.waits is not profile_only
    after.close()
