"""Conversion of the cluster's time-outs to messages and back, and gRPC's own time-outs."""

from collections.abc import Sequence
from dataclasses import fields

from oobleck.host.address import split_addresses
from oobleck.host.detection import Detection
from oobleck.proto import control_pb2 as pb
from oobleck.proto.assignments import head_message, head_of
from oobleck.proto.checks import in_field
from oobleck.proto.protocol import NEWEST, OLDEST, span
from oobleck.proto.types import Head


def welcome_message(
    detection: Detection,
    protocol: int,
    head: Head | None = None,
    addresses: Sequence[str] = (),
) -> pb.Welcome:
    """Return the welcome for an agent that speaks `protocol`; `addresses`: of the cluster's
    heads."""
    spans = {field.name: getattr(detection, field.name) for field in fields(Detection)}
    who = head_message(head) if head is not None else None
    return pb.Welcome(
        detection=pb.Detection(**spans), protocol=protocol, head=who, addresses=addresses
    )


def read_welcome(message: pb.Welcome) -> tuple[Detection, int, Head | None]:
    """Return the time-outs, the protocol, and the master's head. Raises ValueError."""
    timeouts, protocol = message.detection, message.protocol
    if not OLDEST <= protocol <= NEWEST:
        ours = span(OLDEST, NEWEST)
        raise ValueError(f"protocol: {protocol} was chosen, where this agent speaks {ours}")
    detection = Detection(
        **{field.name: getattr(timeouts, field.name) for field in fields(Detection)}
    )
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
        # The option that gRPC honours (keepalive_timeout_ms alone is not enough).
        ("grpc.http2.ping_timeout_ms", int(1000 * detection.ping_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
