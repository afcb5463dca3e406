"""A double of an agent without workers: what it says of them is what the test says.

`Agent` builds the messages. `support.live_agent` brings them to a real master, and
`support.scenario.Player` to the master's decisions alone.
"""

import os

from msgspec.structs import replace

from oobleck.core.ids import Incarnation, NodeName
from oobleck.proto.protocol import OLDEST
from oobleck.proto.types import (
    Assignment,
    Happening,
    Head,
    NodeFacts,
    NodeStatus,
    Registration,
    WorkerReport,
    WorkerStatus,
)


def facts(name: str, **changes: object) -> NodeFacts:
    values: dict[str, object] = {
        "node": NodeName(name),
        "incarnation": Incarnation(os.urandom(8).hex()),
        "hostname": "testhost",
        "address": "127.0.0.1",
        "pid": 4242,
        "worker_slots": 1,
        "device": "cpu",
        "memory_per_worker_bytes": 1 << 30,
        **changes,
    }
    return NodeFacts(**values)  # type: ignore[arg-type]


class Agent:
    """Agent since its start: its facts, its status, and the plan that it was told of."""

    def __init__(self, facts: NodeFacts) -> None:
        self.facts = facts
        self.status = NodeStatus()
        self.running: Assignment | None = None
        self.acted_on: Head | None = None
        self.protocol = OLDEST

    def registration(self) -> Registration:
        return Registration(
            protocol=self.protocol,
            facts=self.facts,
            status=self.status,
            running=self.running,
            acted_on=self.acted_on,
        )

    def change(self, **fields: object) -> None:
        """Replace fields of the status."""
        self.status = replace(self.status, **fields)

    def worker(self, slot: int, **fields: object) -> None:
        """Replace fields of the slot's worker, or add one."""
        old = self.status.worker(slot) or WorkerStatus(
            slot=slot, incarnation=Incarnation("none"), pid=0
        )
        others = (worker for worker in self.status.workers if worker.slot != slot)
        workers = sorted((*others, replace(old, **fields)), key=lambda worker: worker.slot)
        self.change(workers=tuple(workers))

    def report(self, what: Happening, slot: int = 0) -> WorkerReport:
        """Return a report about the process that is in the slot."""
        worker, job_id = self.status.worker(slot), self.status.job_id
        assert worker is not None
        assert job_id is not None
        return WorkerReport(job_id=job_id, slot=slot, incarnation=worker.incarnation, what=what)
