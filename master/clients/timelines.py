"""Timelines: has the workers of a job record the same steps, and gathers the recordings.

A timeline is not state: it is not journaled, and a master that restarts forgets it. All times are
put on the master's clock. Round trips over an agent's stream measure the offset of its node's
clock: the true offset is within half of the fastest round trip. Nodes on the master's machine have
its clock.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from oobleck.core.codec import decode
from oobleck.core.ids import JobId, NodeName, WorkerId
from oobleck.core.messages import Recording
from oobleck.core.plan import Plan
from oobleck.host.timeline import Clock, Track, boot_id, chrome_trace
from oobleck.master.clients.outbox import AgentSession, Questions
from oobleck.master.state.job import ENDED, Job
from oobleck.proto import control_pb2 as pb

#: Round trips per node.
_ROUND_TRIPS = 8
_ROUND_TRIP_LIMIT_S = 2.0
#: Lead time from the request to the first recorded step, so that the request reaches all workers in
#: time. Each further attempt has a longer lead.
_AHEAD_S = 0.5
_ATTEMPTS = 4
#: Most characters of one recording: a hundred steps have less.
MOST_CHARACTERS = 16 << 20
#: Most messages per recording; agents cut it into parts of half a million characters.
_MOST_PARTS = 64
#: Interval at which the job's state is checked.
_LOOK_S = 1.0
#: Checks of a changing plan before giving up.
_CHANGE_LOOKS = 30


class NoTimeline(Exception):
    """Failure to record a timeline; the text says why."""


@dataclass(slots=True, eq=False)
class _Wish:
    """Request for recordings of one job's workers, and the recordings received so far."""

    job_id: JobId
    workers: frozenset[WorkerId]
    found: dict[WorkerId, Recording] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Timelines:
    """Requests under way, from any number of operators."""

    def __init__(self, sessions: Callable[[], Sequence[AgentSession]]) -> None:
        self._sessions = sessions
        self._boot = boot_id()
        self._last_number = 0
        self._wishes: dict[int, _Wish] = {}
        #: Parts received of awaited recordings.
        self._parts: dict[WorkerId, list[str]] = {}
        self._readings = Questions[pb.ClockRead]()

    # ---- messages from agents

    def take_recording(self, node: NodeName, message: pb.Recorded) -> bool:
        """Take a recording, or a part of one, that an operator waits for; return whether one does.
        Raises ValueError where the recording cannot be read."""
        worker = WorkerId(node, message.slot)
        waiting = [w for w in self._wishes.values() if w.job_id == message.job_id]
        if not any(worker in wish.workers - wish.found.keys() for wish in waiting):
            return False
        text = self._whole(worker, message)
        if text is None:
            return True
        try:
            recording = decode(Recording, text)
        except ValueError as error:
            raise ValueError(f"recording: {error}") from error
        wish = self._wishes.get(recording.number)
        if wish is not None and wish.job_id == message.job_id:
            wish.found[worker] = recording
            wish.news.set()
        return True

    def _whole(self, worker: WorkerId, message: pb.Recorded) -> str | None:
        """Join the parts of a recording; None: some are missing, or were lost with a connection.
        Raises ValueError."""
        parts = self._parts.pop(worker, [])
        if message.part == 0:
            parts = []
        if message.part != len(parts):
            return None
        parts.append(message.recording)
        if len(parts) > _MOST_PARTS or sum(map(len, parts)) > MOST_CHARACTERS:
            raise ValueError(
                f"recording: has more than {MOST_CHARACTERS} characters or {_MOST_PARTS} parts"
            )
        if not message.more:
            return "".join(parts)
        self._parts[worker] = parts
        return None

    def clock_read(self, node: NodeName, message: pb.ClockRead) -> None:
        self._readings.answered(node, message.number, message)

    # ---- requests of operators

    async def trace(self, job: Job, steps: int) -> bytes:
        """Return the Chrome trace of the next `steps` steps. Raises NoTimeline."""
        for attempt in range(_ATTEMPTS):
            plan = await self._next_plan(job)
            clocks = await self._clocks(plan)
            recordings = await self._recordings(job, plan, steps, _AHEAD_S * 4**attempt)
            if recordings is not None:
                return msgspec.json.encode(chrome_trace(_tracks(plan, recordings, clocks)))
        raise NoTimeline(f"job {job.id}: its steps are too short, or its plan changes too often")

    async def _next_plan(self, job: Job) -> Plan:
        """Return the plan that the job trains by, after any change that is under way."""
        for _ in range(_CHANGE_LOOKS):
            if job.state != "reconfiguring":
                break
            await asyncio.sleep(_LOOK_S)
        return _training(job)

    async def _recordings(
        self, job: Job, plan: Plan, steps: int, ahead_s: float
    ) -> Mapping[WorkerId, Recording] | None:
        """Collect recordings of all workers of `plan`; None: not all of them recorded every step in
        that generation. Raises NoTimeline."""
        first = _step_in(job, ahead_s)
        last = min(first + steps - 1, job.spec.training.steps)
        if first > last:
            raise NoTimeline(f"job {job.id} is about to end: no step is left to record")
        self._last_number += 1
        number = self._last_number
        wish = self._wishes[number] = _Wish(job.id, frozenset(plan.workers))
        order = pb.Record(job_id=job.id, number=number, first_step=first, last_step=last)
        try:
            for session in self._of(plan):
                session.ask(pb.MasterMessage(record=order))
            while not set(plan.workers) <= set(wish.found):
                wish.news.clear()
                try:
                    async with asyncio.timeout(_LOOK_S):
                        await wish.news.wait()
                except TimeoutError:
                    if job.state == "reconfiguring":
                        return None
                    if _training(job).generation != plan.generation:
                        return None
        finally:
            del self._wishes[number]
            if not self._wishes:
                self._parts.clear()
        recordings = {worker: wish.found[worker] for worker in plan.workers}
        wanted = set(range(first, last + 1))
        whole = all(
            wanted <= set(r.steps) and r.generation == plan.generation for r in recordings.values()
        )
        return recordings if whole else None

    def _of(self, plan: Plan) -> list[AgentSession]:
        """Return the sessions of all nodes of `plan`. Raises NoTimeline."""
        nodes = {worker.node for worker in plan.workers}
        by_node = {session.node: session for session in self._sessions() if session.node in nodes}
        if missing := sorted(nodes - set(by_node)):
            raise NoTimeline(f"node {missing[0]} is not connected; try again when it is")
        return list(by_node.values())

    async def _clocks(self, plan: Plan) -> Mapping[NodeName, Clock]:
        sessions = self._of(plan)
        clocks = await asyncio.gather(*(self._clock(session) for session in sessions))
        return {session.node: clock for session, clock in zip(sessions, clocks, strict=True)}

    async def _clock(self, session: AgentSession) -> Clock:
        readings: list[Clock] = []
        for _ in range(_ROUND_TRIPS):
            asked_ns = time.monotonic_ns()
            reading = self._readings.ask(session, _clock_message)
            try:
                async with asyncio.timeout(_ROUND_TRIP_LIMIT_S):
                    read = await reading
            except TimeoutError:
                raise NoTimeline(f"node {session.node} does not answer; try again") from None
            if self._boot and read.boot == self._boot:
                return Clock()
            readings.append(round_trip(asked_ns, read.monotonic_ns, time.monotonic_ns()))
        return min(readings, key=lambda clock: clock.error_ns)


def _clock_message(number: int) -> pb.MasterMessage:
    return pb.MasterMessage(clock=pb.ReadClock(number=number))


def round_trip(asked_ns: int, read_ns: int, heard_ns: int) -> Clock:
    """Return a clock's offset from a reading between two times of this host (Cristian 1989)."""
    middle, half = (asked_ns + heard_ns) // 2, (heard_ns - asked_ns + 1) // 2
    return Clock(offset_ns=middle - read_ns, error_ns=half)


def _training(job: Job) -> Plan:
    """Return the plan that the job trains by. Raises NoTimeline."""
    if job.current.made is None or job.state != "running":
        now = f"has ended ({job.state})" if job.state in ENDED else f"is {job.state}"
        raise NoTimeline(f"job {job.id} {now}; a timeline is of one that is running")
    return job.current.made.plan


def _step_in(job: Job, ahead_s: float) -> int:
    """Return a step that begins no sooner than in `ahead_s`."""
    recent = job.seen.steps.recent
    shortest_s = min((record.step_seconds for record in recent), default=ahead_s)
    committed = recent[-1].step if recent else 0
    return committed + 2 + math.ceil(ahead_s / max(shortest_s, 1e-6))


def _tracks(
    plan: Plan, recordings: Mapping[WorkerId, Recording], clocks: Mapping[NodeName, Clock]
) -> list[Track]:
    titles = {
        worker: f"pipeline {number}, stage {position}, "
        f"layers {stage.first_layer}-{stage.last_layer}"
        for number, pipeline in enumerate(plan.pipelines)
        for position, stage in enumerate(pipeline.stages)
        for worker in stage.workers
    }
    return [
        Track(
            worker=worker,
            title=titles[worker],
            recording=recordings[worker],
            clock=clocks[worker.node],
        )
        for worker in plan.workers
    ]
