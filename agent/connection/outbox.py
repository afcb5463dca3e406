"""Queues of messages to the master: filled by the supervisor, emptied by the session.

Only the newest status counts; reports and log lines wait in bounded queues. Step records wait until
the master acknowledges them.

All agents of a job have the same step records, and the master accepts one that two nodes report
alike. Two agents send at once; the third sends records still unacknowledged after `HOLD_S`, each
further one `NEXT_S` later. So a record gets through whichever node dies. If more than `LIMIT` wait,
the *oldest* are kept, since the master writes them in step order.

Must not know processes or streams.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from oobleck.agent.processes.output import LogQueue
from oobleck.core.ids import Generation, Incarnation, JobId
from oobleck.core.messages import PhaseReached, Recording, StepRecord
from oobleck.core.orders import Answer, Unable
from oobleck.host.detection import GATHER_REPORTS_S
from oobleck.host.timeline import boot_id
from oobleck.proto import control_pb2 as pb
from oobleck.proto.bounds import MOST_RECEIVED_BYTES, check_bounds
from oobleck.proto.examinations import examined_message, read_answer
from oobleck.proto.reports import read_records, read_report, records_message, report_bytes
from oobleck.proto.status import status_message
from oobleck.proto.types import NodeStatus, WorkerReport

LIMIT = 65_536
#: Records per message.
BATCH = 256
#: Delay of the third sender, and the further delay of each next one: enough to see the
#: acknowledgement of the one before.
HOLD_S = 4.0
NEXT_S = 3.0
#: Longest delay of any sender.
MOST_HOLD_S = 60.0
_MADE_HERE = Generation(0)
REPORT_LIMIT = 1024
#: Answers to operators' questions. Old ones are useless, since operators give up waiting.
ANSWER_LIMIT = 512
#: A line has up to 12 KiB: each byte that is no text becomes a character of three.
LINES_PER_MESSAGE = 40
#: Characters of a recording per message; each may have four bytes.
_PART_CHARACTERS = MOST_RECEIVED_BYTES // 5
#: Time for which lines wait for others. When a peer is lost each worker prints some, and sending
#: each at once would slow the recovery.
GATHER_LINES_S = 0.2


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Record that the master has not acknowledged."""

    record: StepRecord
    since: float
    #: The generation that has found it beside a checkpoint; 0: a worker of this node made it.
    restored_in: Generation


class RecordBuffer:
    """Buffer of the unacknowledged records of one job."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._job_id: JobId | None = None
        self._kept: dict[int, _Waiting] = {}
        #: Not sent in this session, oldest first; a record no longer kept is skipped when taken.
        self._waiting: deque[_Waiting] = deque()
        self._through = 0
        self.lost = 0

    @property
    def job_id(self) -> JobId | None:
        return self._job_id

    def __len__(self) -> int:
        return len(self._kept)

    def add(
        self,
        job_id: JobId,
        record: StepRecord,
        now: float,
        restored_in: Generation = _MADE_HERE,
    ) -> None:
        """Keep `record` unless it is acknowledged already. Of two records of one step keep the
        newer generation's: a head accepts no older generation's records after it."""
        if job_id != self._job_id:
            self._job_id, self._through = job_id, 0
            self._kept.clear()
            self._waiting.clear()
        before = self._kept.get(record.step)
        if record.step <= self._through:
            return
        if before is not None and before.record.generation >= record.generation:
            return
        if before is None and len(self._kept) >= self._limit:
            self.lost += 1
            return
        kept = self._kept[record.step] = _Waiting(record, now, restored_in)
        self._waiting.append(kept)
        if len(self._waiting) > 2 * len(self._kept) + BATCH:  # most have been replaced
            self._waiting = deque(filter(self._is_kept, self._waiting))

    def acknowledge(self, job_id: JobId, through_step: int) -> None:
        if job_id != self._job_id:
            return
        self._through = max(self._through, through_step)
        for step in [step for step in self._kept if step <= through_step]:
            del self._kept[step]

    def session_ended(self) -> None:
        """Forget the acknowledgements. The next master may lack records that this one had; if the
        job then goes back, its workers make them again."""
        self._through = 0

    def session_began(self, now: float) -> None:
        """Queue all kept records again, since those sent before may not have arrived."""
        self._kept = {step: replace(self._kept[step], since=now) for step in sorted(self._kept)}
        self._waiting = deque(self._kept.values())

    def due(self, now: float, *, hold_s: float) -> tuple[list[StepRecord], Generation]:
        """Return the next records to send, which count as sent, and the generation that has
        restored all of them. `hold_s`: for how long this agent holds them back."""
        found: list[_Waiting] = []
        while len(found) < BATCH and (at := self.next_due(now, hold_s=hold_s)) is not None:
            if at > now or (found and self._waiting[0].restored_in != found[0].restored_in):
                break
            found.append(self._waiting.popleft())
        restored_in = found[0].restored_in if found else _MADE_HERE
        return [waiting.record for waiting in found], restored_in

    def next_due(self, now: float, *, hold_s: float) -> float | None:
        """Return when `due` will next have a record; None if none is waiting."""
        while self._waiting and not self._is_kept(self._waiting[0]):
            self._waiting.popleft()
        if not self._waiting:
            return None
        return max(now, self._waiting[0].since + hold_s)

    def _is_kept(self, waiting: _Waiting) -> bool:
        return self._kept.get(waiting.record.step) is waiting


logger = logging.getLogger(__name__)


class Outbox:
    """Messages that are still to be sent. Adding never blocks; the session waits for `wake`."""

    def __init__(self, incarnation: Incarnation) -> None:
        #: The agent's incarnation, which every message carries.
        self._incarnation = incarnation
        #: Newest status, and whether it is to be sent.
        self._status = NodeStatus()
        self._status_due = False
        #: Not sent yet, oldest first, and since when; at most REPORT_LIMIT.
        self._reports: deque[tuple[WorkerReport, float]] = deque()
        #: When reports and status are due; None: none are waiting.
        self._reports_due_at: float | None = None
        #: Kept until the master has acknowledged them.
        self._records = RecordBuffer()
        #: Answers to operators' questions.
        self._answers: deque[pb.AgentMessage] = deque(maxlen=ANSWER_LIMIT)
        #: Output of the workers of that job.
        self._logs = LogQueue()
        self._log_job = JobId("")
        #: When the lines are due; None: none are waiting.
        self._log_due_at: float | None = None
        #: For how long records are held back.
        self._hold_s = HOLD_S
        #: Generation from whose first step on a longer `_hold_s` applies, and that; None: it stays.
        self._hold_then: tuple[Generation, float] | None = None
        #: Set whenever something new may be due.
        self.wake = asyncio.Event()

    @property
    def current_status(self) -> NodeStatus:
        return self._status

    def take_status(self) -> NodeStatus:
        """Return the status for a registration; only later changes are sent again."""
        self._status_due = False
        return self._status

    def status(self, status: NodeStatus, now: float, *, hold_s: float) -> None:
        """Set the newest status. If only the progress has changed, it waits for the next heartbeat;
        if also the plan, it is sent soon; otherwise now."""
        before, after = _without_progress(self._status), _without_progress(status)
        if before != after:
            only_plan = _without_plan(before) == _without_plan(after)
            self._status_due = True
            self._make_due(now + GATHER_REPORTS_S if only_plan else now)
        self._status = status
        self._hold(hold_s, status.generation)

    def _hold(self, hold_s: float, generation: Generation) -> None:
        """Hold records back for `hold_s`: a shorter time at once, a longer one from the first step
        of `generation` on. The nodes that send at once in it may lack the records of the steps
        before its boundary."""
        if hold_s <= self._hold_s:
            self._hold_then = None
            if hold_s < self._hold_s:
                self._hold_s = hold_s
                self.wake.set()
        else:
            since = generation if self._hold_then is None else self._hold_then[0]
            self._hold_then = since, hold_s

    def want_status(self, now: float) -> None:
        """Send the status even if it has not changed."""
        self._status_due = True
        self._make_due(now)

    def report(self, report: WorkerReport, now: float) -> None:
        """Queue a report, to be sent once; if too many wait, drop the oldest."""
        if len(self._reports) >= REPORT_LIMIT:
            self._reports.popleft()
            logger.warning("report dropped, too many wait for the master")
        self._reports.append((report, now))
        waits = isinstance(report.what, PhaseReached)
        self._make_due(now + GATHER_REPORTS_S if waits else now)

    def _make_due(self, at: float) -> None:
        if self._reports_due_at is None or at < self._reports_due_at:
            self._reports_due_at = at
            self.wake.set()

    def record(self, job_id: JobId, record: StepRecord, now: float) -> None:
        """Keep the record for the master, and send waiting reports and status now."""
        if self._reports_due_at is not None:
            self._make_due(now)
        if self._hold_then is not None and record.generation >= self._hold_then[0]:
            self._hold_s, self._hold_then = self._hold_then[1], None
        lost = self._records.lost
        self._records.add(job_id, record, now)
        if self._records.lost != lost:
            logger.warning("step record lost", extra={"step": record.step})
        self.wake.set()

    def restored(
        self, job_id: JobId, records: Sequence[StepRecord], restored_in: Generation, now: float
    ) -> None:
        """Keep the records stored beside the checkpoint that a generation resumes from."""
        try:
            message = records_message(job_id, records, restored_in)
            check_bounds(message)
            read_records(message)
        except ValueError as error:  # the master would end every session that sends them
            logger.error("records beside a checkpoint cannot be sent", extra={"reason": error})
            return
        for record in records:
            self._records.add(job_id, record, now, restored_in)
        self.wake.set()

    def acknowledge(self, job_id: JobId, through_step: int) -> None:
        self._records.acknowledge(job_id, through_step)

    def recorded(self, job_id: JobId, slot: int, recording: Recording) -> None:
        """Queue a worker's part of a timeline, for the operator who asked."""
        text = msgspec.json.encode(recording).decode()
        starts = range(0, len(text), _PART_CHARACTERS)
        for part, start in enumerate(starts):
            recorded = pb.Recorded(
                job_id=job_id,
                slot=slot,
                recording=text[start : start + _PART_CHARACTERS],
                part=part,
                more=part + 1 < len(starts),
            )
            self._answers.append(pb.AgentMessage(recorded=recorded))
        self.wake.set()

    def clock(self, number: int) -> None:
        """Send the reading of the clock by which this node's workers record."""
        read = pb.ClockRead(number=number, monotonic_ns=time.monotonic_ns(), boot=boot_id())
        self._answers.append(pb.AgentMessage(clock=read))
        self.wake.set()

    def examined(self, number: int, answer: Answer) -> None:
        """Queue the result of an examination of this host, for the operator who asked."""
        message = examined_message(number, answer)
        try:
            read_answer(message)
        except ValueError as error:  # the master would end the session
            unable = Unable(reason=f"what it has found cannot be sent: {error}")
            message = examined_message(number, unable)
        self._answers.append(pb.AgentMessage(examined=message))
        self.wake.set()

    def send_job(self, number: int, job: str) -> None:
        """Answer a master that asks which job is trained here."""
        answer = pb.JobTold(number=number, job=job)
        self._answers.append(pb.AgentMessage(job_told=answer))
        self.wake.set()

    def log(self, job_id: JobId, slot: int, lines: list[str], now: float) -> None:
        if job_id != self._log_job:
            self._logs, self._log_job = LogQueue(), job_id
        self._logs.add(slot, lines)
        if self._log_due_at is None:
            self._log_due_at = now + GATHER_LINES_S
            self.wake.set()
        if len(self._logs) >= LINES_PER_MESSAGE:
            self.hurry(now)

    def hurry(self, now: float) -> None:
        """Send all waiting reports, status and log lines now instead of gathering more."""
        if self._log_due_at is not None:
            self._log_due_at = now
            self.wake.set()
        if self._reports_due_at is not None:
            self._make_due(now)

    def session_began(self, standing: list[WorkerReport], now: float) -> None:
        """Repeat all that an earlier session may have lost: records and `standing` reports."""
        waiting = [(report, at) for report, at in self._reports if report not in standing]
        self._reports = deque([*((report, now) for report in standing), *waiting])
        if self._reports:
            self._make_due(now)
        self._records.session_began(now)

    def session_ended(self) -> None:
        self._records.session_ended()

    def take(self, now: float) -> list[pb.AgentMessage]:
        """Take all messages that are due, in sending order: reports before the steps that follow
        them, steps before the status that a worker has finished."""
        messages: list[pb.AgentMessage] = []
        reports_due = self._reports_due_at is not None and now >= self._reports_due_at
        records, restored_in = self._records.due(now, hold_s=self._hold_s)
        if reports_due or records:
            texts = [_text_of(_aged(report, now - at)) for report, at in self._reports]
            messages += [pb.AgentMessage(report=text) for text in texts if text is not None]
            self._reports.clear()
            self._reports_due_at = None
        while records:
            assert self._records.job_id is not None
            batch = records_message(self._records.job_id, records, restored_in)
            messages.append(pb.AgentMessage(records=batch))
            records, restored_in = self._records.due(now, hold_s=self._hold_s)
        if self._status_due and self._reports_due_at is None:
            self._status_due = False
            messages.append(pb.AgentMessage(status=status_message(self._status)))
        messages += self._answers
        self._answers.clear()
        if self._log_due_at is not None and now >= self._log_due_at:
            self._log_due_at = None
            while (taken := self._logs.take(LINES_PER_MESSAGE)) is not None:
                slot, lines, dropped = taken
                log = pb.LogLines(job_id=self._log_job, slot=slot, lines=lines, dropped=dropped)
                messages.append(pb.AgentMessage(log=log))
        for message in messages:
            message.incarnation = self._incarnation
        return messages

    def next_due(self, now: float) -> float | None:
        """Return when `take` will next have a message if none is added; None: never."""
        records_due_at = self._records.next_due(now, hold_s=self._hold_s)
        due = (self._reports_due_at, records_due_at, self._log_due_at)
        return min((at for at in due if at is not None), default=None)


def _text_of(report: WorkerReport) -> bytes | None:
    """Encode a report; None if the master would refuse it, and end every session that sends it."""
    data = report_bytes(report)
    try:
        read_report(data)
    except ValueError as error:
        logger.error(
            "a worker's report cannot be sent",
            extra={"job": report.job_id, "slot": report.slot, "reason": error},
        )
        return None
    return data


def _aged(report: WorkerReport, seconds: float) -> WorkerReport:
    """Return the report with its age set to the `seconds` since it was received."""
    if not isinstance(report.what, PhaseReached):
        return report
    what = msgspec.structs.replace(report.what, seconds_ago=max(0.0, seconds))
    return msgspec.structs.replace(report, what=what)


def _without_plan(status: NodeStatus) -> NodeStatus:
    nothing = {"generation": Generation(0), "also_entered": ()}
    workers = tuple(msgspec.structs.replace(w, **nothing) for w in status.workers)
    return msgspec.structs.replace(status, generation=Generation(0), workers=workers)


def _without_progress(status: NodeStatus) -> NodeStatus:
    nothing = {
        "committed_step": -1,
        "stepped": 0,
        "compute_steps": 0,
        "compute_s": 0.0,
        "beats": 0,
        "doing": "",
        "waiting": False,
        "hindrance": "",
    }
    workers = tuple(msgspec.structs.replace(w, **nothing) for w in status.workers)
    return msgspec.structs.replace(status, workers=workers)
