"""Conversion of the cluster's time-outs to messages and back, and those that gRPC itself keeps."""

from collections.abc import Sequence
from dataclasses import fields

from oobleck.host.address import split_addresses
from oobleck.host.detection import Detection
from oobleck.proto import control_pb2 as pb
from oobleck.proto.checks import in_field
from oobleck.proto.heads import head_message, head_of
from oobleck.proto.protocol import NEWEST, OLDEST_MASTER, span
from oobleck.proto.types import Head


def welcome_message(
    detection: Detection,
    protocol: int,
    head: Head | None = None,
    addresses: Sequence[str] = (),
) -> pb.Welcome:
    """Return the welcome for an agent. `protocol`: the one that agent and master speak;
    `addresses`: of the cluster's heads."""
    spans = {field.name: getattr(detection, field.name) for field in fields(Detection)}
    who = head_message(head) if head is not None else None
    return pb.Welcome(
        detection=pb.Detection(**spans), protocol=protocol, head=who, addresses=addresses
    )


def read_welcome(message: pb.Welcome) -> tuple[Detection, int, Head | None]:
    """Return the time-outs, the protocol that master and agent speak, and the master's head.

    A time-out that a master of before does not know is as it is by default, and the head is None.
    Raises ValueError where it makes no sense."""
    told, protocol = message.detection, message.protocol
    if not OLDEST_MASTER <= protocol <= NEWEST:
        ours = span(OLDEST_MASTER, NEWEST)
        raise ValueError(f"protocol: {protocol} was chosen, where this agent speaks {ours}")
    lacking = {
        field.name
        for field in told.DESCRIPTOR.fields
        if field.has_presence and not told.HasField(field.name)
    }
    names = {field.name for field in fields(Detection)} - lacking
    detection = Detection(**{name: getattr(told, name) for name in names})
    return detection, protocol, head_of(message)


def read_addresses(message: pb.Welcome) -> list[str]:
    """Return the addresses of the cluster's heads. Raises ValueError."""
    with in_field("addresses"):
        return split_addresses(",".join(message.addresses)) if message.addresses else []


def keepalive_options(detection: Detection) -> tuple[tuple[str, int], ...]:
    """Return the keepalive options for either end of a channel."""
    return (
        ("grpc.keepalive_time_ms", int(1000 * detection.ping_every_s)),
        ("grpc.keepalive_timeout_ms", int(1000 * detection.ping_timeout_s)),
        # The one that is honoured (keepalive_timeout_ms alone is not).
        ("grpc.http2.ping_timeout_ms", int(1000 * detection.ping_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
