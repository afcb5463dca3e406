"""What an agent says of its node, as messages and back: registration and status."""

import msgspec

from oobleck.host.versions import Versions
from oobleck.planner.ids import Generation, NodeName, check_name
from oobleck.proto import control_pb2 as pb
from oobleck.proto.assignments import assignment_message, read_assignment
from oobleck.proto.bounds import MOST_SLOTS
from oobleck.proto.checks import (
    at_least,
    check_slot,
    in_field,
    one_of,
    read_address,
    read_incarnation,
    read_job_id,
    read_slot,
    shortened,
)
from oobleck.proto.plans import serialise_plan
from oobleck.proto.types import (
    PROTOCOL,
    Assignment,
    NodeFacts,
    NodeStatus,
    Registration,
    WorkerStatus,
)


def status_message(status: NodeStatus) -> pb.NodeStatus:
    return pb.NodeStatus(
        job_id=status.job_id or "",
        generation=status.generation,
        workers=[worker_status_message(worker) for worker in status.workers],
        leaving=status.leaving,
        ending=status.ending,
        trouble=shortened(status.trouble),
        failed_starts=status.failed_starts,
    )


def worker_status_message(worker: WorkerStatus) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        slot=worker.slot,
        incarnation=worker.incarnation,
        pid=worker.pid,
        store=worker.store,
        data=worker.data,
        generation=worker.generation,
        committed_step=worker.committed_step,
        stepped=worker.stepped,
        finished=worker.finished,
        peak_memory_bytes=worker.peak_memory_bytes,
        base_memory_bytes=worker.base_memory_bytes,
        beats=worker.beats,
        doing=worker.doing,
        waiting=worker.waiting,
    )


def _read_worker_status(message: pb.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        slot=read_slot(message.slot),
        incarnation=read_incarnation(message.incarnation),
        pid=message.pid,
        store=read_address(message.store, "store") if message.store else "",
        data=message.data,
        generation=Generation(message.generation),
        committed_step=at_least(message.committed_step, -1, "committed_step"),
        stepped=Generation(message.stepped),
        finished=message.finished,
        peak_memory_bytes=message.peak_memory_bytes,
        base_memory_bytes=message.base_memory_bytes,
        beats=message.beats,
        doing=message.doing,
        waiting=message.waiting,
    )


def read_status(message: pb.NodeStatus) -> NodeStatus:
    with in_field("status"):
        workers = tuple(
            sorted((_read_worker_status(w) for w in message.workers), key=lambda w: w.slot)
        )
        if len({worker.slot for worker in workers}) != len(workers):
            raise ValueError("workers: a slot stands twice")
        if message.failed_starts and not message.trouble:
            raise ValueError("trouble: is empty, though starts have failed")
        return NodeStatus(
            job_id=read_job_id(message.job_id) if message.job_id else None,
            generation=Generation(message.generation),
            workers=workers,
            leaving=message.leaving,
            ending=message.ending,
            trouble=message.trouble,
            failed_starts=message.failed_starts,
        )


def versions_message(versions: Versions) -> pb.Versions:
    return pb.Versions(**msgspec.structs.asdict(versions))


def read_versions(message: pb.Versions) -> Versions:
    return Versions(
        oobleck=message.oobleck,
        python=message.python,
        torch=message.torch,
        transformers=message.transformers,
    )


def register_message(registration: Registration) -> pb.Register:
    facts = registration.facts
    return pb.Register(
        protocol=registration.protocol,
        node=facts.node,
        hostname=facts.hostname,
        address=facts.address,
        pid=facts.pid,
        worker_slots=facts.worker_slots,
        device=facts.device,
        memory_per_worker_bytes=facts.memory_per_worker_bytes,
        device_kind=facts.device_kind,
        versions=versions_message(facts.versions),
        status=status_message(registration.status),
        running=_running_message(registration.running),
    )


def _running_message(running: Assignment | None) -> pb.Assignment | None:
    if running is None or running.plan is None:
        return None
    return assignment_message(running, serialise_plan(running.plan))


def _read_running(message: pb.Register) -> Assignment | None:
    if not message.HasField("running"):
        return None
    with in_field("running"):
        running = read_assignment(message.running)
        if running.plan is None or running.job_id is None:
            raise ValueError("plan: is missing, or the job is")
        return running


def read_register(message: pb.Register, incarnation: str) -> Registration:
    """`incarnation`: of the envelope, an AgentMessage."""
    with in_field("register"):
        if not message.address:
            raise ValueError("address: is empty; give an address that other nodes can reach")
        if not 1 <= message.worker_slots <= MOST_SLOTS:
            raise ValueError(f"worker_slots: {message.worker_slots} is not in 1..{MOST_SLOTS}")
        facts = NodeFacts(
            node=NodeName(check_name(message.node, "node")),
            incarnation=read_incarnation(incarnation),
            hostname=message.hostname,
            address=message.address,
            pid=message.pid,
            worker_slots=message.worker_slots,
            device=one_of(message.device, ("cpu", "cuda")),
            memory_per_worker_bytes=at_least(
                message.memory_per_worker_bytes, 1, "memory_per_worker_bytes"
            ),
            device_kind=message.device_kind,
            versions=read_versions(message.versions),
        )
        if message.protocol != PROTOCOL:  # it is refused, and what else it says may be unreadable
            return Registration(protocol=message.protocol, facts=facts, status=NodeStatus())
        status = read_status(message.status)
        for worker in status.workers:
            check_slot(worker.slot, facts.worker_slots)
        return Registration(
            protocol=message.protocol,
            facts=facts,
            status=status,
            running=_read_running(message),
        )
