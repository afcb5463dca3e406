"""The real agent's decisions without a process or a clock: a test gives events and times."""

from msgspec.structs import replace

from oobleck.agent.events import (
    Action,
    Assigned,
    Event,
    ForkRequested,
    HeartbeatRequested,
    RequestHeartbeat,
    Send,
    SessionBegan,
    StartWarm,
    WarmReady,
    WorkerForked,
    WorkerMessage,
    WriteStacks,
)
from oobleck.agent.reconcile import decide
from oobleck.agent.state import NodeState
from oobleck.core.ids import Incarnation, JobId, NodeName
from oobleck.core.messages import Alive, Assign, FaultRule, Ready, Rendezvous
from oobleck.proto.types import Assignment
from support.scripted_master import job, plan

A, B = Incarnation("aaaa"), Incarnation("bbbb")
#: What a worker without work says when it is asked whether it is alive.
IDLE = Alive(beats=1, doing="wait for the plan", waiting=True)


def desired(
    job_id: str = "demo-1",
    *,
    generation: int = 0,
    slots: int = 1,
    incarnations: str = "aaaa",
    others: int = 0,
) -> Assignment:
    """`others`: nodes beside n1 with the same layers."""
    assign = None
    nodes = [f"n{number}" for number in range(1, others + 2)]
    if generation:
        assign = Assign(
            plan=plan(generation, *nodes, slots=slots),
            rendezvous=Rendezvous(host="127.0.0.1:1", prefix="p"),
            boundary=False,
        )
    return Assignment(
        version=1,
        job_id=JobId(job_id),
        job=job("demo"),
        assign=assign,
        worker_incarnations=tuple(Incarnation(i) for i in incarnations.split()),
    )


def sent(generation: int, *, boundary: bool = False) -> Send:
    """Return the action that hands worker A a plan of that generation."""
    assign = desired(generation=generation).assign
    assert assign is not None
    return Send(incarnation=A, message=replace(assign, boundary=boundary))


class Node:
    """Node of a real agent's state, which applies events and returns the decisions."""

    def __init__(self, slots: int = 1, faults: tuple[FaultRule, ...] = ()) -> None:
        self.state = NodeState(node=NodeName("n1"), slot_count=slots, faults=faults)
        self.state.apply(SessionBegan(), 0.0)
        self.now = 0.0
        #: Since when what was at a standstill each time that stacks were asked for.
        self.stacks: list[float] = []

    def decide(self) -> tuple[Action, ...]:
        return tuple(decide(self.state, self.now).actions)

    def asked_stacks(self, since: float) -> None:
        self.state.apply(WriteStacks(incarnation=A, since=since), self.now)
        self.stacks.append(since)

    def after(self, *events: Event, at: float | None = None) -> tuple[Action, ...]:
        if at is not None:
            self._live_until(at)
        for event in events:
            self.state.apply(event, self.now)
        self._answer()
        return self.decide()

    def _answer(self) -> None:
        """Answer for the workers that they are alive."""
        for action in self.decide():
            if isinstance(action, RequestHeartbeat):
                self.state.apply(
                    HeartbeatRequested(incarnation=action.incarnation, kernel=""), self.now
                )
                said = WorkerMessage(incarnation=action.incarnation, message=IDLE)
                self.state.apply(said, self.now)

    def _live_until(self, at: float) -> None:
        """Move the clock to `at`, with the workers' answers, while nothing else is to be done."""
        while self.now < at:
            self._answer()
            wake_at = self.wake_at()
            self.now = at if self.decide() or wake_at is None else min(wake_at, at)

    def wake_at(self) -> float | None:
        return decide(self.state, self.now).wake_at

    def with_worker(self, job_id: str = "demo-1") -> "Node":
        """Put a ready worker of incarnation A into slot 0."""
        self.after(StartWarm(), WarmReady(), Assigned(desired=desired(job_id)))
        self.after(ForkRequested(slot=0, incarnation=A), WorkerForked(incarnation=A, pid=100))
        self.after(WorkerMessage(incarnation=A, message=Ready(pid=100, card="127.0.0.1:1")))
        return self
