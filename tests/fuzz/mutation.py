"""Wrong messages from right ones, each from a seed of its own, so that any of them can be made
again without those before it."""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from oobleck.core.ids import Generation, Incarnation, JobId
from oobleck.core.messages import (
    LinkMeasured,
    Measured,
    PhaseReached,
    Restored,
)
from oobleck.core.profile import LinkMeasurement
from oobleck.proto import control_pb2 as pb
from oobleck.proto.protocol import OLDEST
from oobleck.proto.types import Happening, WorkerExited, WorkerReport
from support.reports import REPORTS
from support.scenario import measurement

#: Numbers at which code breaks.
WHOLE = (0, 1, 2, 3, 7, 255, 1023, 1024, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1)
REAL = (0.0, 1.0, -1.0, 1e-300, 1e300, -0.0, math.nan, math.inf, -math.inf, 1e18)
TEXTS = (
    "",
    "a",
    "target-1",
    "nobody-9",
    "..",
    "/etc/passwd",
    "a" * 64,
    "x" * 70_000,
    "\0",
    "\n\x1b[2J",
    "ä\u202e\U0001f600",
    "0" * 400,
    "-1",
    "NaN",
    "1e999",
    "{}",
    "[",
    "null",
    "127.0.0.1:99999",
    "user",
    "joined",
    "intra_node",
    '{"a":1}',
    "[" * 2000,
    '{"zzz":' + "[" * 20_000,
)
_SIGNED = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_INT64)
_BITS = {
    FieldDescriptor.TYPE_UINT32: 32,
    FieldDescriptor.TYPE_INT32: 31,
    FieldDescriptor.TYPE_SINT32: 31,
    FieldDescriptor.TYPE_INT64: 63,
    FieldDescriptor.TYPE_UINT64: 64,
}


def mutated(random: Random, message: Message) -> bytes:
    """Some bytes that began as `message`."""
    for _ in range(random.choice((0, 0, 0, 1, 1, 1, 2, 4))):
        change_structure(random, message)
    data = message.SerializeToString()
    if random.random() < 0.1:
        for _ in range(random.randint(1, 4)):
            data = change_bytes(random, data)
    return data


def change_structure(random: Random, message: Message) -> None:
    """Put something else into one field, anywhere below."""
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    below = [value for field, value in message.ListFields() if isinstance(value, Message)]
    if below and random.random() < 0.6:
        change_structure(random, random.choice(below))
        return
    field = random.choice(fields)
    if field.is_repeated:
        _change_list(random, message, field)
    elif field.message_type is not None:
        if random.random() < 0.3:
            message.ClearField(field.name)
        else:
            below_it = getattr(message, field.name)
            below_it.SetInParent()
            change_structure(random, below_it)
    elif random.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, value_of(random, field))


def _change_list(random: Random, message: Message, field: FieldDescriptor) -> None:
    found = getattr(message, field.name)
    match random.randint(0, 3):
        case 0:
            message.ClearField(field.name)
        case 1 if found:
            found.extend([random.choice(found)] * random.choice((1, 2, 50, 5000)))
        case _ if field.message_type is not None:
            change_structure(random, found.add())
        case _:
            found.append(value_of(random, field))


def value_of(random: Random, field: FieldDescriptor) -> object:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = random.choice(TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return random.random() < 0.5
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return random.choice(REAL)
        case _:
            number = min(random.choice(WHOLE), 2 ** _BITS[field.type] - 1)
            return -number if field.type in _SIGNED and random.random() < 0.4 else number


def change_bytes(random: Random, data: bytes) -> bytes:
    at = random.randint(0, len(data))
    until = min(len(data), at + random.choice((1, 1, 2, 8, 64)))
    some = random.randbytes(random.choice((1, 1, 2, 8, 64)))
    changes: Sequence[Callable[[], bytes]] = (
        lambda: data[:at] + data[until:],
        lambda: data[:at] + some + data[at:],
        lambda: data[:at] + some + data[until:],
        lambda: data[:at] + data[at:until] * random.choice((2, 3, 100)) + data[until:],
        lambda: data[:at],
        lambda: (
            data[:at]
            + bytes(byte ^ 1 << random.randint(0, 7) for byte in data[at:until])
            + data[until:]
        ),
    )
    return random.choice(changes)()


# ---- right messages

JOBS = ("target-1", "target-1", "target-1", "nobody-9")


def agent_message(random: Random, incarnation: str) -> pb.AgentMessage:
    """What an agent may say in a session, with numbers that fit now and then."""
    job, slot = random.choice(JOBS), random.choice((0, 0, 0, 1))
    generation = random.choice((0, 1, 1, 1, 2, 3, 1 << 40))
    step = random.choice((0, 1, 2, 3, 100, 1 << 40))
    worker = f"{random.randint(0, 3):016x}"
    message = pb.AgentMessage(incarnation=incarnation)
    match random.choice(("status", "report", "report", "report", "records", "log", "other")):
        case "status":
            message.status.job_id, message.status.generation = job, generation
            message.status.workers.add(
                slot=slot,
                incarnation=worker,
                pid=77,
                card="127.0.0.1:4001",
                generation=generation,
                committed_step=step,
                beats=step,
            )
        case "report":
            message.report = report_bytes(random, job, slot, generation, worker)
        case "records":
            message.records.job_id = job
            for number in range(random.choice((1, 1, 3))):
                record = message.records.records.add(step=step + number, tokens=8)
                record.loss, record.generation, record.time = 2.5, generation, 1.7e9
                record.samples_digest = "ab" * 32
        case "log":
            message.log.job_id, message.log.slot = job, slot
            message.log.lines.extend(["a line", "another"])
        case _:
            random.choice((_recorded, _clock, _examined, _job_told))(message, job, slot)
    return message


def _recorded(message: pb.AgentMessage, job: str, slot: int) -> None:
    message.recorded.job_id, message.recorded.slot = job, slot
    message.recorded.recording = '{"number":1,"spans":[]}'


def _job_told(message: pb.AgentMessage, job: str, slot: int) -> None:
    message.job_told.number = 1
    message.job_told.job = "{}"


def _examined(message: pb.AgentMessage, job: str, slot: int) -> None:
    message.examined.number = 1
    message.examined.answer = b'{"type":"looked","findings":[],"seen":[],"mtu":1500}'


def _clock(message: pb.AgentMessage, job: str, slot: int) -> None:
    message.clock.number, message.clock.monotonic_ns = 1, 10**9
    message.clock.boot = "boot"


_ONE = Generation(1)
_LINK = LinkMeasurement(scope="inter_node", latency_s=1e-4, bytes_per_s=1e9)
HAPPENINGS: tuple[Happening, ...] = (
    *REPORTS,
    WorkerExited(pid=77, exit_code=1, signal=None),
    PhaseReached(generation=_ONE, phase="aborted", committed_step=1),
    PhaseReached(generation=_ONE, phase="received", layers=(0, 1)),
    PhaseReached(generation=_ONE, phase="joined", committed_step=1),
    Measured(attempt=1, measurement=measurement(0.1)),
    LinkMeasured(attempt=1, scope="inter_node", link=_LINK),
    Restored(generation=_ONE, step=1, path="/tmp/c", passed_over=("/tmp/d",)),
)


def report_bytes(random: Random, job: str, slot: int, generation: int, worker: str) -> bytes:
    """A report, of which one value may be something else."""
    values = msgspec.to_builtins(
        WorkerReport(
            job_id=JobId(job),
            slot=slot,
            incarnation=Incarnation(worker),
            what=random.choice(HAPPENINGS),
        )
    )
    if "generation" in values["what"]:
        values["what"]["generation"] = generation
    if random.random() < 0.5:
        change_value(random, values)
    return msgspec.json.encode(values)


def change_value(random: Random, values: dict[str, Any]) -> None:
    """Put something else into one place, anywhere below."""
    name = random.choice(sorted(values))
    below = values[name]
    if isinstance(below, dict) and below and random.random() < 0.8:
        change_value(random, below)
    elif random.random() < 0.1:
        del values[name]
    else:
        wrong = (*TEXTS, *WHOLE, *(-number for number in WHOLE), *REAL, None, True, [], [below], {})
        values[name] = random.choice(wrong)


def register(random: Random, name: str, incarnation: str) -> pb.AgentMessage:
    return pb.AgentMessage(
        incarnation=incarnation,
        register=pb.Register(
            protocol=OLDEST,
            newest_protocol=OLDEST,
            node=name,
            hostname="fuzz",
            address="127.0.0.1",
            pid=random.randint(2, 9999),
            worker_slots=1,
            device="cpu",
            memory_per_worker_bytes=1 << 30,
            acted_on=pb.Head(
                cluster="c" * 32,
                history="d" * 32,
                term=1,
                begun_by="e" * 32,
                start="f" * 32,
                sequence=9,
            ),
        ),
    )


#: Of each call that is answered once or by a stream; ids that nobody has.
REQUESTS: dict[str, Message] = {
    "/oobleck.Operator/Submit": pb.SubmitRequest(
        request_id="fuzz", job='{"name": "x", "model": {"kind": "gpt"}}', profile="{}"
    ),
    "/oobleck.Control/GetCode": pb.CodeRequest(sha256="ab" * 32),
    "/oobleck.Operator/ListJobs": pb.ListJobsRequest(),
    "/oobleck.Operator/GetJob": pb.JobRequest(job_id="nobody-9"),
    "/oobleck.Operator/WatchJob": pb.JobRequest(job_id="nobody-9"),
    "/oobleck.Operator/AdoptJob": pb.AdoptRequest(request_id="a", job_id="nobody-9"),
    "/oobleck.Operator/CancelUnknownJob": pb.CancelRequest(request_id="u", job_id="nobody-9"),
    "/oobleck.Operator/CancelJob": pb.CancelRequest(request_id="c", job_id="nobody-9"),
    "/oobleck.Operator/SaveCheckpoint": pb.SaveCheckpointRequest(request_id="s", job_id="nobody-9"),
    "/oobleck.Operator/GetProfile": pb.JobRequest(job_id="nobody-9"),
    "/oobleck.Operator/GetPlanning": pb.JobRequest(job_id="nobody-9"),
    "/oobleck.Operator/ListNodes": pb.ListNodesRequest(),
    "/oobleck.Operator/DrainNodes": pb.DrainNodesRequest(request_id="d", nodes=["nobody"]),
    "/oobleck.Operator/UndrainNode": pb.UndrainNodeRequest(request_id="u", node="nobody"),
    "/oobleck.Operator/ForgetNode": pb.ForgetNodeRequest(request_id="f", node="nobody"),
    "/oobleck.Operator/Events": pb.EventsRequest(job_id="target-1"),
    "/oobleck.Operator/Metrics": pb.MetricsRequest(job_id="target-1", from_step=2),
    "/oobleck.Operator/GetTimeline": pb.TimelineRequest(job_id="nobody-9", steps=1),
    "/oobleck.Operator/Backup": pb.BackupRequest(no_output=True),
    "/oobleck.Operator/Examine": pb.ExamineRequest(nodes=["nobody"], data=["/nowhere"]),
    "/oobleck.Operator/Logs": pb.LogsRequest(job_id="target-1", node="f1", rank=0),
    "/oobleck.Pki/Join": pb.JoinRequest(request="-----BEGIN", name="x"),
    "/oobleck.Pki/Renew": pb.RenewRequest(request="-----BEGIN"),
    "/oobleck.Pki/CreateToken": pb.TokenRequest(request="-----BEGIN", role="agent", ttl_s=60),
    "/oobleck.Pki/ListCredentials": pb.ListCredentialsRequest(),
    "/oobleck.Pki/Revoke": pb.RevokeRequest(token_id="abcdef"),
}
