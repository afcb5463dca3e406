"""Agents that say what is not so, beside what is: a stranger in no plan, and a member.

The rules for each method are those of `faults`. Lies go the way of all words, over the wire. Only
one node that trains lies in a run: what two nodes say alike counts.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from oobleck.core.ids import NodeName
from oobleck.core.messages import CheckpointSaved
from oobleck.master.inbox import Incoming, Output, Records
from oobleck.proto import control_pb2 as pb
from oobleck.proto.reports import read_report, records_message, report_bytes
from oobleck.proto.status import read_status, status_message
from oobleck.proto.types import NodeStatus, WorkerReport
from support import hostile_agent

if TYPE_CHECKING:
    from simulation.machines import Agent
    from simulation.world import World

#: A node with other slots than all the rest, so that no plan has it.
STRANGER = NodeName("n9")
#: Lies at a time, and the time from one lot to the next, in seconds.
_AT_ONCE, _BETWEEN_S = 30, 0.7


class Lies:
    def __init__(
        self,
        world: "World",
        draw: random.Random,
        slots: int,
        for_a_while: Callable[..., float],
    ) -> None:
        self._world = world
        self._draw = draw
        self._slots = slots
        self._for_a_while = for_a_while

    def lie_outside(self) -> str:
        """About a job of others, which must not notice."""
        if not self._world.watch.plans or STRANGER in self._world.twins:
            return ""
        self._world.start_twin(STRANGER, self._slots + 1)
        span_s = self._for_a_while(lambda: self._world.end_twin(STRANGER), 20.0)
        self._tell_lies(self._world.twins[STRANGER], span_s)
        return f"a stranger lies for {span_s:.1f} s"

    def lie_inside(self) -> str:
        """About its own part, and about others'."""
        names = sorted(trainer.node for trainer in self._world.trainers())
        if self._world.liar is None and names:
            self._world.liar = self._draw.choice(names)
        agent = self._world.agents.get(self._world.liar) if self._world.liar else None
        if agent is None or not agent.process.alive:
            return ""
        span_s = self._for_a_while(lambda: None, 8.0)
        self._tell_lies(agent, span_s)
        return f"{agent.name} lies for {span_s:.1f} s"

    def _tell_lies(self, agent: "Agent", span_s: float) -> None:
        until = self._world.loop.clock + span_s

        def some() -> None:
            if self._world.in_trouble and agent.process.alive and self._world.loop.clock < until:
                agent.outbox.lie(list(self._messages(agent)))
                self._world.loop.call_later(_BETWEEN_S, some)

        some()

    def _messages(self, agent: "Agent") -> Iterator[pb.AgentMessage]:
        """Some of what could be said now of a process here, or of one elsewhere."""
        state, trainers = self._world.state, sorted(self._world.trainers(), key=lambda t: t.worker)
        job = state.job if state is not None else None
        if job is None or not trainers:
            return
        if agent.name == STRANGER and (not job.current.made or job.current.has_member(STRANGER)):
            return
        own = [t for t in trainers if t.incarnation in agent.trainers]
        about = self._draw.choice(self._draw.choice((own or trainers, trainers)))
        step = max(self._world.ledger(job.id).steps, default=0) + self._draw.randint(0, 2)
        generation, process = job.newest_known, about.incarnation
        words = [
            *hostile_agent.at_edges(job.id, process, generation, max(1, step)),
            *(
                WorkerReport(job_id=job.id, slot=0, incarnation=process, what=what)
                for what in hostile_agent.ends(generation)
            ),
        ]
        for word in self._draw.sample(words, _AT_ONCE):
            if isinstance(word, WorkerReport) and isinstance(word.what, CheckpointSaved):
                continue  # the first worker of a plan is believed: it writes the checkpoint
            with suppress(ValueError):  # it cannot be said
                yield _message(word)


def _message(word: Incoming) -> pb.AgentMessage:
    """Raises ValueError where the master would not read it."""
    match word:
        case Records(job_id=job_id, records=records):
            return pb.AgentMessage(records=records_message(job_id, records))
        case WorkerReport():
            data = report_bytes(word)
            read_report(data)
            return pb.AgentMessage(report=data)
        case NodeStatus():
            status = status_message(word)
            read_status(status)
            return pb.AgentMessage(status=status)
        case Output(job_id=job_id, slot=slot, lines=lines):
            return pb.AgentMessage(log=pb.LogLines(job_id=job_id, slot=slot, lines=lines))
