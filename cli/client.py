"""Client of the master: calls with a deadline, and errors as one line with an exit code."""

import contextlib
import dataclasses
import re
import secrets
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from oobleck.core.codec import decode
from oobleck.core.orders import Finding
from oobleck.host.address import is_loopback, split_address
from oobleck.host.command import DENIED, NO_SUCH_THING, UNREACHABLE, USAGE, CommandFailed
from oobleck.host.ipc.endpoint import DEFAULT_MASTER, Endpoint, choose_endpoint
from oobleck.planner.report.planning import Planning
from oobleck.proto import control_pb2 as pb
from oobleck.proto.bounds import MOST_RECEIVED_BYTES, PART_BYTES
from oobleck.proto.control_pb2_grpc import OperatorStub, PkiStub
from oobleck.proto.examinations import read_finding
from oobleck.proto.secure import Channels

DEADLINE_S = 5.0
#: Time for which a request without reply is repeated, longer than a master's restart.
ASK_AGAIN_S = 10.0
#: Longest time from a master's start until it listens.
START_S = 15.0
#: Deadline for a timeline, which waits for its steps.
TIMELINE_S = 3600.0
#: Deadline for a wheel, which may be large and the connection slow.
CODE_S = 600.0
#: Deadline for a job's agents to describe it and to return its wheel.
ADOPT_S = 300.0
_TLS_S = 1.0
#: Deadline for a host to accept a connection, if there are others to ask.
CONNECT_S = 1.0

#: Channel options: connecting may take as long as one call; keep-alive ends streams of a frozen
#: master.
CHANNEL_OPTIONS = (
    ("grpc.min_reconnect_backoff_ms", int(1000 * DEADLINE_S)),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", int(1000 * DEADLINE_S)),
    ("grpc.http2.ping_timeout_ms", int(1000 * DEADLINE_S)),
    ("grpc.max_receive_message_length", 64 << 20),
)

#: Words of gRPC's error when the other end is silent or speaks another protocol,
_FOREIGN = re.compile(r"HTTP/2|SETTINGS|http1")
#: and when there was no connection, so no request was sent.
_NOT_CONNECTED = "failed to connect"
_UNWELCOME = "it closes the connection; by its clock the certificate may not be valid"
_WANTS_CREDENTIALS = (
    "denied: the master at {} requires credentials, and none are known here. {}ive credentials "
    "with --credentials or OOBLECK_CREDENTIALS ('oobleck pki join' gets them with a token from an "
    "operator)"
)
#: First words of the fix if the master is on this host.
_ANOTHER_USERS = (
    "If it is another user's 'oobleck local', start your own and name it with --master or "
    "OOBLECK_MASTER; otherwise g"
)
_NO_MASTER = "the server there does not answer like an Oobleck master"
_EARLIER = (
    "the master at {} runs an earlier release, which cannot do this: upgrade Oobleck on its host"
)

_CHANNELS = Channels(CHANNEL_OPTIONS)


def _new_id() -> str:
    """Return a new request id; requests with one id are one request to the master."""
    return secrets.token_hex(16)


class NothingToRenew(CommandFailed):
    """Refusal to renew a certificate that is too new."""


class Unreachable(CommandFailed):
    """No master answers at an address; another address may have one."""

    def __init__(
        self, message: str, exit_code: int = UNREACHABLE, *, reached: bool = False
    ) -> None:
        """Build the error. `reached`: the request may have reached the master, and its reply was
        lost."""
        self.reached = reached
        super().__init__(message, exit_code)


def cannot_reach(address: str, reason: str, *, reached: bool = False) -> Unreachable:
    # `oobleck local` listens only at the default address.
    fix = (
        "start one with 'oobleck local --nodes 4' (one that runs says how to restart its master), "
        "or name it"
        if address == DEFAULT_MASTER
        else "check that oobleck-master runs there, or name another"
    )
    return Unreachable(
        f"cannot reach a master at {address} ({reason}); {fix} with --master or OOBLECK_MASTER",
        reached=reached,
    )


class MasterClient:
    """Connection to the master; a context manager."""

    def __init__(self, endpoint: Endpoint | str, *, ask_again_s: float = ASK_AGAIN_S) -> None:
        """Connect to `endpoint`; a bare address is on this host, or called in the clear.
        `ask_again_s`: time for which a request is repeated if its reply is lost."""
        if isinstance(endpoint, str):
            endpoint = choose_endpoint(endpoint, None, insecure=False)
        self._endpoint = endpoint
        #: Address that is called now.
        self.address = endpoint.address
        self._ask_again_s = ask_again_s
        self._secured = endpoint.credentials is not None
        #: Name of the channels that it shares; empty: it has its own.
        self._name = ""
        self._lock = threading.Lock()
        #: Channels, one for each address that was called.
        self._channels: list[tuple[grpc.Channel, Endpoint]] = []
        #: Streams that are read; `close` cancels them.
        self._streams = set[Any]()
        self._closed = False
        #: Calls by name, for each address that was called.
        self._stubs: dict[str, dict[str, Any]] = {}
        #: True if the last call got no answer from `address`, so that the next one begins after it.
        self._in_vain = False
        #: Whether the last call got an answer from `address`.
        self._answers = False
        #: Problem of the master itself, from its last answer; empty: none.
        self.problem = ""
        #: Role of that master among several; None: unknown.
        self.head: pb.HeadStatus | None = None

    def __enter__(self) -> "MasterClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def share(self, name: str) -> "MasterClient":
        """Share one connection with other clients of that name and these credentials; return self.
        Call it before any other method. At most three of them may read streams."""
        self._name = name
        return self

    def close(self) -> None:
        """End all streams of this client, in any thread. May be repeated."""
        with self._lock:
            self._closed = True
            channels, self._channels = self._channels, []
        for stream in list(self._streams):
            stream.cancel()
        for channel, endpoint in channels:
            _CHANNELS.leave(channel, endpoint, self._name)

    def submit(
        self, job: str, request_id: str, *, profile: str = "", profile_only: bool = False
    ) -> pb.SubmitReply:
        """Submit a job. `profile`: text of the profile file that the job names. Raises
        CommandFailed."""
        request = pb.SubmitRequest(
            request_id=request_id, job=job, profile=profile, profile_only=profile_only
        )
        if (size := request.ByteSize()) > MOST_RECEIVED_BYTES:
            raise CommandFailed(
                f"the job and its profile have {size} bytes, and at most {MOST_RECEIVED_BYTES} can "
                "be sent; give a model of fewer unlike layers",
                USAGE,
            )
        reply: pb.SubmitReply = self._change("Submit", request)
        return reply

    def put_code(self, wheel: bytes) -> None:
        """Upload a wheel for a job that is submitted next."""
        parts = [wheel[at : at + PART_BYTES] for at in range(0, len(wheel), PART_BYTES)]
        with self._errors_as_lines():
            self._method("PutCode")((pb.CodeChunk(data=part) for part in parts), timeout=CODE_S)

    def jobs(self, timeout_s: float = DEADLINE_S) -> list[pb.JobStatus]:
        reply: pb.ListJobsReply = self._ask("ListJobs", pb.ListJobsRequest(), timeout_s)
        return list(reply.jobs)

    def job(self, job_id: str) -> pb.JobStatus:
        reply: pb.JobStatus = self._ask("GetJob", pb.JobRequest(job_id=job_id))
        return reply

    def profile(self, job_id: str) -> pb.ProfileReply:
        reply: pb.ProfileReply = self._ask("GetProfile", pb.JobRequest(job_id=job_id))
        return reply

    def planning(self, job_id: str) -> Planning:
        reply: pb.PlanningReply = self._ask("GetPlanning", pb.JobRequest(job_id=job_id))
        try:
            return decode(Planning, reply.planning)
        except ValueError as error:
            raise CommandFailed(f"the master is of another release: {error}") from error

    def timeline(self, job_id: str, steps: int) -> str:
        """Return a Chrome trace of the next `steps` steps as text; waits for these steps."""
        request = pb.TimelineRequest(job_id=job_id, steps=steps)
        reply: pb.TimelineReply = self._ask("GetTimeline", request, TIMELINE_S)
        return reply.trace

    def save_checkpoint(self, job_id: str) -> int:
        """Request a checkpoint; return the number of the request."""
        request = pb.SaveCheckpointRequest(request_id=_new_id(), job_id=job_id)
        reply: pb.SaveCheckpointReply = self._change("SaveCheckpoint", request)
        return reply.number

    def cancel(self, job_id: str) -> pb.JobStatus:
        request = pb.CancelRequest(request_id=_new_id(), job_id=job_id)
        reply: pb.JobStatus = self._change("CancelJob", request)
        return reply

    def adopt(self, job_id: str) -> Sequence[str]:
        """Adopt a job that nodes train and the master does not know; return its losses as lines."""
        request = pb.AdoptRequest(request_id=_new_id(), job_id=job_id)
        reply: pb.AdoptReply = self._change("AdoptJob", request, ADOPT_S)
        return reply.lost

    def cancel_unknown(self, job_id: str) -> Sequence[str]:
        """End the workers of a job that the master does not know; return their nodes."""
        request = pb.CancelRequest(request_id=_new_id(), job_id=job_id)
        reply: pb.CancelUnknownReply = self._change("CancelUnknownJob", request)
        return reply.nodes

    def nodes(self, timeout_s: float = DEADLINE_S) -> list[pb.NodeInfo]:
        reply: pb.ListNodesReply = self._ask("ListNodes", pb.ListNodesRequest(), timeout_s)
        return list(reply.nodes)

    def drain(self, *nodes: str, reason: str, force: bool) -> list[pb.NodeInfo]:
        """Drain nodes; return their states afterwards."""
        request = pb.DrainNodesRequest(
            request_id=_new_id(), nodes=nodes, reason=reason, force=force
        )
        reply: pb.DrainNodesReply = self._change("DrainNodes", request)
        return list(reply.nodes)

    def undrain(self, node: str) -> pb.NodeInfo:
        request = pb.UndrainNodeRequest(request_id=_new_id(), node=node)
        reply: pb.NodeInfo = self._change("UndrainNode", request)
        return reply

    def forget(self, node: str) -> None:
        """Have the master forget a node that is gone for good."""
        request = pb.ForgetNodeRequest(request_id=_new_id(), node=node)
        self._change("ForgetNode", request)

    def watch(self, job_id: str) -> Iterator[pb.JobStatus]:
        return self._stream("WatchJob", pb.JobRequest(job_id=job_id))

    def events(self, job_id: str, *, follow: bool) -> Iterator[pb.EventRecord]:
        return self._stream("Events", pb.EventsRequest(job_id=job_id, follow=follow))

    def metrics(
        self, job_id: str, *, follow: bool, from_step: int = 1, evaluations: bool = False
    ) -> Iterator[str]:
        """Yield lines of metrics.jsonl, or of evaluations.jsonl, from that step on."""
        request = pb.MetricsRequest(
            job_id=job_id, follow=follow, from_step=from_step, evaluations=evaluations
        )
        for some in self._stream("Metrics", request):
            yield from some.json

    def logs(
        self, job_id: str, *, follow: bool, node: str | None, rank: int | None, since: str = ""
    ) -> Iterator[pb.LogLine]:
        """Yield log lines. `since`: time of the first one."""
        request = pb.LogsRequest(
            job_id=job_id, follow=follow, node=node or "", rank=rank, since=since
        )
        return self._stream("Logs", request)

    def examine(self, request: pb.ExamineRequest) -> Iterator[Finding]:
        """Yield the findings on the hosts and between them, as they are found."""
        for message in self._stream("Examine", request):
            yield read_finding(message)

    def backup(self, *, output: bool) -> Iterator[pb.BackupPart]:
        """Yield the parts of a backup. `output`: include the workers' output."""
        return self._stream("Backup", pb.BackupRequest(no_output=not output))

    # ---- certificates

    def join(self, request: str, name: str) -> pb.CertificateReply:
        asked = pb.JoinRequest(request=request, name=name)
        reply: pb.CertificateReply = self._ask("Join", asked)
        return reply

    def renew(self, request: str) -> pb.CertificateReply:
        reply: pb.CertificateReply = self._ask("Renew", pb.RenewRequest(request=request))
        return reply

    def create_token(
        self, request: str, *, role: str, name: str, ttl_s: float
    ) -> pb.CertificateReply:
        asked = pb.TokenRequest(request=request, role=role, name=name, ttl_s=ttl_s)
        reply: pb.CertificateReply = self._ask("CreateToken", asked)
        return reply

    def credentials(self) -> pb.ListCredentialsReply:
        reply: pb.ListCredentialsReply = self._ask("ListCredentials", pb.ListCredentialsRequest())
        return reply

    def revoke(self, request: pb.RevokeRequest) -> None:
        self._ask("Revoke", request)

    def _change(self, method: str, request: Message, timeout_s: float = DEADLINE_S) -> Any:
        """Return the reply to a request that changes something.

        If the reply is lost, as when the master restarts, the same request is sent again; the
        master recognises its id and acts once.
        """
        until = 0.0
        while True:
            try:
                return self._ask(method, request, timeout_s)
            except Unreachable as unreachable:
                if unreachable.reached and not until:
                    until = time.monotonic() + self._ask_again_s
                if time.monotonic() >= until:
                    raise
            time.sleep(0.2)

    def _ask(self, method: str, request: Message, timeout_s: float = DEADLINE_S) -> Any:
        """Return the reply of the first address that answers."""
        reached, left = False, len(self._endpoint.addresses)
        while True:
            try:
                with self._errors_as_lines():
                    reply = self._method(method)(request, timeout=timeout_s)
            except Unreachable as unreachable:
                reached, left = reached or unreachable.reached, left - 1
                unreachable.reached = reached
                if not left:
                    raise
            else:
                self._note(reply)
                return reply

    def _note(self, reply: Any) -> None:
        """Keep what a reply says about the master itself."""
        self.problem = str(getattr(reply, "problem", self.problem))
        if isinstance(reply, pb.ListJobsReply | pb.ListNodesReply) and reply.HasField("head"):
            self.head = reply.head

    def _stream(self, method: str, request: Message) -> Iterator[Any]:
        with self._errors_as_lines():
            with _interrupt_deferred():
                call = self._method(method)(request)
            self._streams.add(call)
            if self._closed:
                call.cancel()
            try:
                yield from call
            finally:  # close the stream if its reader stops early
                call.cancel()
                self._streams.discard(call)

    def _method(self, name: str) -> Any:
        """Return the call of that name, at the address that accepts a connection."""
        if len(self._endpoint.addresses) > 1 and not self._answers:
            self._seek()
        with self._lock:
            if self._closed:
                raise ValueError("the client is closed")
            if self.address not in self._stubs:
                endpoint = dataclasses.replace(self._endpoint, address=self.address)
                channel = _CHANNELS.take(endpoint, self._name)
                self._channels.append((channel, endpoint))
                self._stubs[self.address] = {
                    **vars(OperatorStub(channel)),  # type: ignore[no-untyped-call]  # generated
                    **vars(PkiStub(channel)),  # type: ignore[no-untyped-call]  # generated
                }
            return self._stubs[self.address][name]

    def _seek(self) -> None:
        """Choose the first address that accepts a connection, beginning with the present one.

        If that gave no answer, begin after it. If none accepts, the call itself reports why.
        """
        known = self._endpoint.addresses
        first = known.index(self.address) + self._in_vain
        order = (*known[first:], *known[:first])
        self.address = next(filter(takes_connection, order), order[0])

    @contextmanager
    def _errors_as_lines(self) -> Iterator[None]:
        """Convert gRPC errors in the block to CommandFailed."""
        try:
            yield
        except grpc.RpcError as error:
            line = self._line(error)
            self._in_vain = isinstance(line, Unreachable)
            self._answers = not self._in_vain
            raise line from error
        self._answers, self._in_vain = True, False

    @property
    def _at(self) -> str:
        """Addresses of the endpoint, for an error message."""
        return ", ".join(self._endpoint.addresses)

    def _is_master(self) -> bool:
        """Return whether the server knows a method that masters of all releases have."""
        try:
            self._method("ListJobs")(pb.ListJobsRequest(), timeout=DEADLINE_S)
        except grpc.RpcError as error:
            return bool(error.code() is not grpc.StatusCode.UNIMPLEMENTED)
        return True

    def _refusal(self, details: str) -> str:
        """Return why caller and master do not accept each other's certificates; empty: unknown."""
        if self._endpoint.credentials is None:
            return ""
        from oobleck.host.security.validity import refusal

        return refusal(self._endpoint.credentials, details, time.time())

    def _line(self, error: Any) -> CommandFailed:
        whole = error.details() or ""
        details = whole.rpartition("last error: ")[2]
        match error.code():
            case grpc.StatusCode.UNAVAILABLE:
                cause = details.rpartition(": ")[2].rstrip("]") or "unavailable"
                foreign = _FOREIGN.search(details)
                if not self._secured and _speaks_tls(self.address):
                    here = is_loopback(split_address(self.address)[0])
                    text = _WANTS_CREDENTIALS.format(self.address, _ANOTHER_USERS if here else "G")
                    return CommandFailed(text, DENIED)
                if told := self._refusal(details):
                    return Unreachable(f"denied: {told}", DENIED)
                if self._secured and _NOT_CONNECTED in whole and "Socket closed" in details:
                    cause = _UNWELCOME
                reached = not foreign and _NOT_CONNECTED not in whole
                return cannot_reach(self._at, _NO_MASTER if foreign else cause, reached=reached)
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return cannot_reach(self._at, f"{_NO_MASTER} within {DEADLINE_S:.0f} s")
            case grpc.StatusCode.UNIMPLEMENTED if self._is_master():
                return CommandFailed(_EARLIER.format(self.address), USAGE)
            case grpc.StatusCode.UNIMPLEMENTED:
                return cannot_reach(self._at, _NO_MASTER)
            case grpc.StatusCode.NOT_FOUND:
                return CommandFailed(details, NO_SUCH_THING)
            case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNAUTHENTICATED:
                return CommandFailed(f"denied: {details}", DENIED)
            case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.FAILED_PRECONDITION:
                return CommandFailed(details, USAGE)
            case grpc.StatusCode.ALREADY_EXISTS:
                return NothingToRenew(details)
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return CommandFailed(details)
            case code:
                return CommandFailed(f"the master failed with {code.name}: {details}")


def takes_connection(address: str) -> bool:
    """Return whether `address` accepts a connection within a second."""
    try:
        with socket.create_connection(split_address(address), CONNECT_S):
            return True
    except (OSError, UnicodeError):
        return False


@contextlib.contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block. Where a KeyboardInterrupt is raised while gRPC
    begins a call, the channel waits for this call when it is closed, for ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = list[int]()
    before = signal.signal(signal.SIGINT, lambda signum, frame: came.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(came[0], None)


def await_start(endpoint: Endpoint, tell: Callable[[str], None]) -> None:
    """Wait while hosts of masters refuse connections, for START_S at most: one was just started and
    does not listen yet. What else is wrong is reported by the first call."""
    until, told = time.monotonic() + START_S, False
    while _is_refused(endpoint.addresses) and time.monotonic() < until:
        if not told:
            where = " or ".join(endpoint.addresses)
            tell(f"no master listens at {where} yet; waiting {START_S:.0f} s for it")
            told = True
        time.sleep(0.2)


def _is_refused(addresses: Sequence[str]) -> bool:
    """Return whether no address accepts a connection, and a host that answers refuses one."""
    refused = False
    for address in addresses:
        try:
            with socket.create_connection(split_address(address), CONNECT_S):
                return False
        except ConnectionRefusedError:
            refused = True
        except (OSError, UnicodeError):
            continue
    return refused


def _speaks_tls(address: str) -> bool:
    """Return whether the server at `address` has a certificate, as masters with an authority do."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection(split_address(address), _TLS_S) as connection,
            context.wrap_socket(connection),
        ):
            return True
    except OSError:
        return False
