"""Step records on their way to the master's disk. Pure: the time is an argument.

Every worker of a job makes the same record at each commit, so every agent has all of them and
keeps each until the master acknowledges it. Two agents send at once, since the master takes what
two nodes say alike. The others send only what stays unacknowledged, one of them after `HOLD_S` and
each next one `NEXT_S` later, so that a record gets through whoever dies, and not from all at once.

The bound: while the master is away for more than `LIMIT` steps, the *oldest* records are kept,
since the master writes them in step order; later ones are lost and counted.
"""

from collections import deque
from dataclasses import dataclass, replace

from oobleck.core.ids import Generation, JobId
from oobleck.core.messages import StepRecord

LIMIT = 65_536
#: Records per message.
BATCH = 256
#: How long the third one holds back, and how much longer each one after it: by then it knows what
#: the one before it has sent.
HOLD_S = 4.0
NEXT_S = 3.0
#: Nobody holds back for longer.
MOST_HOLD_S = 60.0
_MADE_HERE = Generation(0)


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
        #: Not sent in this session, oldest first; what is kept no more is skipped when taken.
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
        """Keep `record` unless it is acknowledged already; another job's are dropped. Of two of a
        step the one of the newer generation stays: a head that lost the steps before has them of
        that generation, and takes none of an older one after them."""
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
        """Keep all records from now on. The next master may be another one, and lack those that
        this one acknowledged: a job that goes back makes them again."""
        self._through = 0

    def session_began(self, now: float) -> None:
        """Queue all kept records again, since an earlier session's may not have arrived."""
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
        return [one.record for one in found], restored_in

    def next_due(self, now: float, *, hold_s: float) -> float | None:
        """Return when `due` will next have a record; None if none is waiting."""
        while self._waiting and not self._is_kept(self._waiting[0]):
            self._waiting.popleft()
        if not self._waiting:
            return None
        return max(now, self._waiting[0].since + hold_s)

    def _is_kept(self, one: _Waiting) -> bool:
        return self._kept.get(one.record.step) is one
