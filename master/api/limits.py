"""Limits on what one caller may use of the master: bytes, streams, connections, pings, time.

Numbers far above what a cluster of some thousand nodes does, so that only a caller that is broken
or means harm ever meets them. Must not know the calls' contents.
"""

from oobleck.host.detection import MODES, Detection, choose
from oobleck.proto.detection import keepalive_options

#: Of a message to the master. Longer ones, as recordings and wheels, come in parts: gRPC has one
#: limit for all methods, so whoever may call anything can have as much received at each call.
MOST_RECEIVED_BYTES = (2 << 20) + (64 << 10)
#: Of a request, where `_LARGER` has no more.
MOST_REQUEST_BYTES = 64 << 10
#: Calls of one holder of certificates at a time: a dashboard of many browsers has some two hundred.
MOST_OF_HOLDER = 256
#: Of those, such that send more than one message.
MOST_SENDING = 4
#: Of those, such whose first message is received at one moment; others wait.
MOST_RECEIVING = 2
#: Of a message of the master; the largest are timelines and plans for all nodes.
MOST_SENT_BYTES = 64 << 20
MOST_METADATA_BYTES = 16 << 10
#: Characters of a refusal's text: with more, which a caller may have said, it does not get through.
MOST_DETAILS = 1000
#: Calls of one connection at a time. An agent has one; `oobleck` some.
MOST_STREAMS = 64
MOST_CONNECTIONS = 10_000
#: Calls of all connections at a time; more are told RESOURCE_EXHAUSTED.
MOST_CALLS = 20_000
HANDSHAKE_S = 5.0
#: Pings that come too early; with the next one the connection is closed.
MOST_PING_STRIKES = 10

#: A call that is answered once is cancelled after this time, whatever deadline its caller set.
UNARY_S = 60.0
_LONGER_S = {
    # Takes a wheel, over a slow line too.
    "/oobleck.Operator/PutCode": 600.0,
    "/oobleck.Control/GiveCode": 600.0,
    # Waits for agents, and for a wheel from one of them.
    "/oobleck.Operator/AdoptJob": 300.0,
    # Waits for steps of a training job.
    "/oobleck.Operator/GetTimeline": 3700.0,
}


_LARGER = {
    "/oobleck.Control/Session": MOST_RECEIVED_BYTES,
    "/oobleck.Operator/Submit": MOST_RECEIVED_BYTES,
    # Parts of a wheel, of 1 MiB.
    "/oobleck.Operator/PutCode": MOST_RECEIVED_BYTES,
    "/oobleck.Control/GiveCode": MOST_RECEIVED_BYTES,
}


def most_bytes(method: str) -> int:
    """Return the most bytes that one request may have."""
    return _LARGER.get(method, MOST_REQUEST_BYTES)


def deadline_s(method: str) -> float:
    return _LONGER_S.get(method, UNARY_S)


def server_options(detection: Detection) -> tuple[tuple[str, int], ...]:
    # Before it is told the cluster's, an agent pings by its own time-outs.
    fastest_s = min(choose(mode, {}).ping_every_s for mode in MODES)
    ping_every_s = min(detection.ping_every_s, fastest_s)
    return (
        # A port in use is an error, not something to share.
        ("grpc.so_reuseport", 0),
        *keepalive_options(detection),
        # The agents' own questions are no abuse.
        ("grpc.http2.min_ping_interval_without_data_ms", int(500 * ping_every_s)),
        ("grpc.http2.max_ping_strikes", MOST_PING_STRIKES),
        ("grpc.max_receive_message_length", MOST_RECEIVED_BYTES),
        ("grpc.max_send_message_length", MOST_SENT_BYTES),
        # The window that a sender has before anything of it is read stays at 64 KiB. Else gRPC lets
        # it grow with the speed of the line, to many MiB for each call, also of who is denied.
        ("grpc.http2.bdp_probe", 0),
        # A few bytes may be megabytes when they are decompressed, which would be done before the
        # caller is known. No client of ours compresses, and what others do is no message.
        ("grpc.per_message_decompression", 0),
        ("grpc.max_concurrent_streams", MOST_STREAMS),
        ("grpc.max_metadata_size", MOST_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MOST_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
    )
