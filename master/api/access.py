"""Access control: a table of who may call which RPC, and the check before each call.

The certificate of the connection identifies the caller. A method that is not in the table is denied
to all. A service without certificates listens on this host alone, and there everybody may call
everything in the table. Must not know what the calls do.

Owns also the limits on what one caller may use of the master: bytes, streams, connections, pings,
time. They are far above the needs of a cluster of some thousand nodes. Only a broken or hostile
caller ever meets them.
"""

import functools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import grpc

from oobleck.host.detection import MODES, Detection, choose
from oobleck.host.security.credentials import Role
from oobleck.master.state.trust import Denied, Trust, check_caller
from oobleck.proto.bounds import MOST_RECEIVED_BYTES
from oobleck.proto.detection import keepalive_options
from oobleck.proto.health import CHECK

if TYPE_CHECKING:
    from oobleck.host.security.pki import Identity

log = logging.getLogger(__name__)


#: Bytes of a call that are received before a task reads it; after that, its whole message.
MOST_AHEAD_BYTES = 16 << 10
#: Content of a TLS record to a client: each connection has a buffer for one, of 16 KiB by default.
MOST_RECORD_BYTES = 4 << 10
#: Largest request, where `_LARGER` has no other limit.
MOST_REQUEST_BYTES = 64 << 10
#: Calls of one holder of certificates at a time: a dashboard has at most 64, for 16 jobs.
MOST_OF_HOLDER = 96
#: Of these, calls that send more than one message.
MOST_SENDING = 4
#: Of these, calls whose first message is received at one moment; others wait.
MOST_RECEIVING = 2
#: Largest message of the master; the largest are timelines and plans for all nodes.
MOST_SENT_BYTES = 64 << 20
MOST_METADATA_BYTES = 16 << 10
#: Characters of a refusal's text. It may quote the caller, and a longer text does not get through.
MOST_DETAILS = 1000
#: Calls of one connection at a time: gRPC spends 20 KiB on each before the caller is checked. An
#: agent has one, `oobleck` at most four, and one that has ended counts for a moment.
MOST_STREAMS = 5
#: The same in the clear, where all clients of one process share a connection.
MOST_FREE_STREAMS = 64
MOST_CONNECTIONS = 10_000
#: Calls of all connections at a time; further ones get RESOURCE_EXHAUSTED.
MOST_CALLS = 20_000
HANDSHAKE_S = 5.0
#: Pings that come too early; with the next one the connection is closed.
MOST_PING_STRIKES = 10
#: Time after which a call with a single answer is cancelled, whatever deadline its caller set.
UNARY_S = 60.0
_LONGER_S = {
    # It takes a wheel, over a slow line too.
    "/oobleck.Operator/PutCode": 600.0,
    "/oobleck.Control/GiveCode": 600.0,
    # It waits for agents, and for a wheel from one of them.
    "/oobleck.Operator/AdoptJob": 300.0,
    # It waits for steps of a training job.
    "/oobleck.Operator/GetTimeline": 3700.0,
}
_LARGER = {
    "/oobleck.Control/Session": MOST_RECEIVED_BYTES,
    "/oobleck.Operator/Submit": MOST_RECEIVED_BYTES,
    "/oobleck.Operator/PutCode": MOST_RECEIVED_BYTES,
    "/oobleck.Control/GiveCode": MOST_RECEIVED_BYTES,
}
_AGENT: frozenset[Role] = frozenset({"agent"})
_READING: frozenset[Role] = frozenset({"operator", "viewer"})
_OPERATOR: frozenset[Role] = frozenset({"operator"})
_TOKEN: frozenset[Role] = frozenset()  # holders of join tokens, which have no role yet
#: Workers talk to their agent alone, so they have nothing here.
ALLOWED: Mapping[str, frozenset[Role]] = {
    "/oobleck.Control/Session": _AGENT,
    "/oobleck.Control/GetCode": _AGENT,
    "/oobleck.Control/GiveCode": _AGENT,
    "/oobleck.Operator/Submit": _OPERATOR,
    "/oobleck.Operator/PutCode": _OPERATOR,
    "/oobleck.Operator/ListJobs": _READING,
    "/oobleck.Operator/GetJob": _READING,
    "/oobleck.Operator/WatchJob": _READING,
    "/oobleck.Operator/CancelJob": _OPERATOR,
    "/oobleck.Operator/CancelUnknownJob": _OPERATOR,
    "/oobleck.Operator/AdoptJob": _OPERATOR,
    "/oobleck.Operator/SaveCheckpoint": _OPERATOR,
    "/oobleck.Operator/GetProfile": _READING,
    "/oobleck.Operator/GetPlanning": _READING,
    "/oobleck.Operator/ListNodes": _READING,
    "/oobleck.Operator/DrainNodes": _OPERATOR,
    "/oobleck.Operator/UndrainNode": _OPERATOR,
    "/oobleck.Operator/ForgetNode": _OPERATOR,
    "/oobleck.Operator/Events": _READING,
    "/oobleck.Operator/Metrics": _READING,
    "/oobleck.Operator/GetTimeline": _OPERATOR,  # it makes the workers record
    "/oobleck.Operator/Logs": _READING,
    "/oobleck.Operator/Examine": _OPERATOR,  # it uses every node's disks and links
    "/oobleck.Operator/Backup": _OPERATOR,
    "/oobleck.Pki/Join": _TOKEN,
    "/oobleck.Pki/Renew": frozenset({"agent", "worker", "operator", "viewer"}),
    "/oobleck.Pki/CreateToken": _OPERATOR,
    "/oobleck.Pki/ListCredentials": _OPERATOR,
    "/oobleck.Pki/Revoke": _OPERATOR,
    CHECK: _READING,
}
JOIN = "/oobleck.Pki/Join"
#: Most distinct refusals that are logged; further ones are only counted.
_MOST_LOGGED = 1000


def most_bytes(method: str) -> int:
    """Return the most bytes that one request may have."""
    return _LARGER.get(method, MOST_REQUEST_BYTES)


def deadline_s(method: str) -> float:
    return _LONGER_S.get(method, UNARY_S)


def server_options(detection: Detection, *, secured: bool) -> tuple[tuple[str, int], ...]:
    """Return the options of gRPC. `secured`: callers have to show certificates."""
    # An agent pings by its own time-outs until it has received the cluster's.
    fastest_s = min(choose(mode, {}).ping_every_s for mode in MODES)
    ping_every_s = min(detection.ping_every_s, fastest_s)
    return (
        # A port in use is an error, not something to share.
        ("grpc.so_reuseport", 0),
        *keepalive_options(detection),
        # Agents ping this often, so it is no abuse.
        ("grpc.http2.min_ping_interval_without_data_ms", int(500 * ping_every_s)),
        ("grpc.http2.max_ping_strikes", MOST_PING_STRIKES),
        ("grpc.max_receive_message_length", MOST_RECEIVED_BYTES),
        ("grpc.max_send_message_length", MOST_SENT_BYTES),
        # The window that a sender has before any of its data is read stays as it is. Otherwise gRPC
        # lets it grow with the speed of the line, to many MiB for each call. Denied callers would
        # have it too.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", MOST_AHEAD_BYTES),
        ("grpc.tsi.max_frame_size", MOST_RECORD_BYTES),
        # A few bytes may decompress to megabytes, and gRPC decompresses before the caller is known.
        # No client of ours compresses, so a compressed request is malformed.
        ("grpc.per_message_decompression", 0),
        ("grpc.max_concurrent_streams", MOST_STREAMS if secured else MOST_FREE_STREAMS),
        ("grpc.max_metadata_size", MOST_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MOST_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
    )


Context = grpc.aio.ServicerContext[Any, Any]


@functools.lru_cache(maxsize=4096)
def _identity_of(pem: bytes) -> "Identity":
    from oobleck.host.security.pki import identity_of

    return identity_of(pem)


def caller(context: Context) -> "Identity | None":
    """Return the caller's identity; None: a caller on this host, without TLS. Raises Denied."""
    certificate = next(iter(context.auth_context().get("x509_pem_cert", ())), None)
    if certificate is None:
        return None
    try:
        return _identity_of(certificate)
    except ValueError as error:
        raise Denied(str(error)) from error


async def _at_once(peer: str) -> None:
    pass


class Access:
    def __init__(
        self,
        trust: Trust,
        refused: Counter[str],
        *,
        secured: bool,
        allowed: Callable[[str, "Identity | None"], None] = lambda peer, identity: None,
        denied: Callable[[str], Awaitable[None]] = _at_once,
    ) -> None:
        """Take the rules, and the counter `refused` of denials.

        `secured`: callers have to show certificates. `allowed` gets the peer's name in gRPC and the
        caller's identity at every allowed call. `denied` gets the peer's name at the others, and
        returns when the call may be answered.
        """
        self._trust = trust
        self._refused = refused
        self._secured = secured
        self._allowed = allowed
        self._denied = denied
        self._logged: set[tuple[str, str]] = set()

    async def check(self, method: str, context: Context) -> None:
        """End the call where the caller may not make it."""
        code = grpc.StatusCode.UNAUTHENTICATED
        name = "nobody"
        try:
            identity = caller(context)
            if identity is None and self._secured:
                raise Denied("show a certificate of this cluster ('oobleck pki join' gets one)")
            if identity is not None:
                name = identity.uri
                check_caller(self._trust, identity, time.time())
            code = grpc.StatusCode.PERMISSION_DENIED
            _check_table(method, identity)
            self._allowed(context.peer(), identity)
            return
        except Denied as denied:
            reason = str(denied)
        self._refused["denied call"] += 1
        if (name, method) not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add((name, method))
            log.warning("call denied", extra={"who": name, "method": method, "reason": reason})
        await self._denied(context.peer())
        await context.abort(code, reason)


def _check_table(method: str, identity: "Identity | None") -> None:
    roles = ALLOWED.get(method)
    name = method.rpartition("/")[2]
    if roles is None:
        raise Denied(f"nobody may call {name}")
    if identity is None:
        return
    if identity.token:
        if method != JOIN:
            raise Denied(f"a join token is good for joining alone, not for {name}")
    elif identity.role not in roles:
        allowed = " or ".join(sorted(roles)) or "the holder of a join token"
        raise Denied(f"{identity.role} {identity.name} may not call {name}; {allowed} may")
