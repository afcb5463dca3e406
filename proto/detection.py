"""The cluster's time-outs on the wire, and those that gRPC itself is to keep."""

from dataclasses import fields

from oobleck.host.detection import Detection
from oobleck.proto import control_pb2 as pb


def welcome_message(detection: Detection) -> pb.Welcome:
    spans = {field.name: getattr(detection, field.name) for field in fields(Detection)}
    return pb.Welcome(detection=pb.Detection(**spans))


def read_welcome(message: pb.Welcome) -> Detection:
    """Raises ValueError where the time-outs make no sense."""
    told = message.detection
    return Detection(**{field.name: getattr(told, field.name) for field in fields(Detection)})


def keepalive_options(detection: Detection) -> tuple[tuple[str, int], ...]:
    """For either end of a channel."""
    return (
        ("grpc.keepalive_time_ms", int(1000 * detection.ping_every_s)),
        ("grpc.keepalive_timeout_ms", int(1000 * detection.ping_timeout_s)),
        # The one that is honoured (keepalive_timeout_ms alone is not).
        ("grpc.http2.ping_timeout_ms", int(1000 * detection.ping_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
