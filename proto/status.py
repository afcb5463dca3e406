"""Conversion of an agent's registration and status to messages and back."""

from oobleck.core.ids import Generation, check_name, check_rack
from oobleck.core.job.code import CodePolicy
from oobleck.core.units import head
from oobleck.host.versions import Versions
from oobleck.proto import control_pb2 as pb
from oobleck.proto.assignments import assignment_message, head_message, read_assignment, read_head
from oobleck.proto.bounds import MOST_SLOTS
from oobleck.proto.checks import (
    at_least,
    check_slot,
    in_field,
    message_of,
    one_of,
    read_card,
    read_incarnation,
    read_job_id,
    read_slot,
    struct_of,
)
from oobleck.proto.protocol import common, refusal
from oobleck.proto.types import Assignment, Head, NodeFacts, NodeStatus, Registration, WorkerStatus


def status_message(status: NodeStatus) -> pb.NodeStatus:
    workers = [message_of(pb.WorkerStatus, worker) for worker in status.workers]
    return message_of(pb.NodeStatus, status, workers=workers, trouble=head(status.trouble))


def _read_worker_status(message: pb.WorkerStatus) -> WorkerStatus:
    read_slot(message.slot)
    read_incarnation(message.incarnation)
    if message.card:
        read_card(message.card, "card")
    at_least(message.committed_step, -1, "committed_step")
    entered = tuple(map(Generation, message.also_entered))
    return struct_of(WorkerStatus, message, also_entered=entered)


def read_status(message: pb.NodeStatus) -> NodeStatus:
    """Convert a node's status from its message. Raises ValueError that names the field."""
    with in_field("status"):
        workers = tuple(
            sorted((_read_worker_status(w) for w in message.workers), key=lambda w: w.slot)
        )
        if len({worker.slot for worker in workers}) != len(workers):
            raise ValueError("workers: a slot is given twice")
        if message.failed_starts and not message.trouble:
            raise ValueError("trouble: is empty, though starts have failed")
        job_id = read_job_id(message.job_id) if message.job_id else None
        return struct_of(NodeStatus, message, job_id=job_id, workers=workers)


def register_message(registration: Registration) -> pb.Register:
    facts, running = registration.facts, registration.running
    return message_of(
        pb.Register,
        facts,
        protocol=registration.protocol,
        versions=message_of(pb.Versions, facts.versions),
        code=code_message(facts.code),
        status=status_message(registration.status),
        running=assignment_message(running) if running is not None else None,
        acted_on=(
            head_message(registration.acted_on) if registration.acted_on is not None else None
        ),
    )


def code_message(code: CodePolicy | None) -> pb.CodePolicy | None:
    return None if code is None else message_of(pb.CodePolicy, code)


def read_code(message: pb.Register | pb.NodeInfo) -> CodePolicy | None:
    """Read which code of jobs a node runs; None: its agent did not tell."""
    if not message.HasField("code"):
        return None
    return struct_of(CodePolicy, message.code, allows=tuple(message.code.allows))


def _read_running(message: pb.Register) -> Assignment | None:
    if not message.HasField("running"):
        return None
    with in_field("running"):
        if message.running.job:
            raise ValueError("job: only a master tells of it")
        running = read_assignment(message.running)
        if running.assign is None or running.job_id is None:
            raise ValueError("assign: is missing, or the job is")
        return running


def _read_acted_on(message: pb.Register) -> Head | None:
    if not message.HasField("acted_on"):
        return None
    with in_field("acted_on"):
        return read_head(message.acted_on)


def _read_facts(message: pb.Register, incarnation: str) -> NodeFacts:
    check_name(message.node, "node")
    if not message.address:
        raise ValueError("address: is empty; give an address that other nodes can reach")
    if not 1 <= message.worker_slots <= MOST_SLOTS:
        raise ValueError(f"worker_slots: {message.worker_slots} is not in 1..{MOST_SLOTS}")
    one_of(message.device, ("cpu", "cuda"))
    check_rack(message.rack)
    at_least(message.memory_per_worker_bytes, 1, "memory_per_worker_bytes")
    return struct_of(
        NodeFacts,
        message,
        incarnation=read_incarnation(incarnation),
        versions=struct_of(Versions, message.versions),
        code=read_code(message),
    )


def read_register(message: pb.Register, incarnation: str) -> Registration:
    """Convert a registration from its message. `incarnation`: that of the enclosing
    AgentMessage."""
    oldest, newest = message.protocol, message.newest_protocol
    spoken = common(oldest, newest)
    with in_field("register"):
        try:
            facts = _read_facts(message, incarnation)
        except ValueError as error:
            if spoken is None and message.node:
                # An older or newer release, which this one need not understand.
                reason = refusal(check_name(message.node, "node"), oldest, newest)
                raise ValueError(reason) from error
            raise
        if spoken is None:
            # It is refused, and the rest of the message may be unreadable.
            return Registration(protocol=oldest, facts=facts, status=NodeStatus())
        status = read_status(message.status)
        for worker in status.workers:
            check_slot(worker.slot, facts.worker_slots)
        return Registration(
            protocol=oldest,
            facts=facts,
            status=status,
            running=_read_running(message),
            acted_on=_read_acted_on(message),
        )
