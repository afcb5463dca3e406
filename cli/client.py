"""Calls of the master with a deadline. Its errors become one line with a documented exit code."""

import dataclasses
import re
import secrets
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import Message

from oobleck.cli import options
from oobleck.core.codec import decode
from oobleck.core.finding import Finding
from oobleck.host.address import split_address
from oobleck.host.command import CommandFailed
from oobleck.host.ipc.endpoint import Endpoint, choose_endpoint
from oobleck.planner.report.planning import Planning
from oobleck.proto import control_pb2 as pb
from oobleck.proto.control_pb2_grpc import OperatorStub, PkiStub
from oobleck.proto.examinations import read_finding
from oobleck.proto.secure import open_channel

DEADLINE_S = 5.0
#: A master restarts in less.
ASK_AGAIN_S = 10.0
#: For a timeline: its steps are waited for.
TIMELINE_S = 3600.0
#: For a wheel, which may be large and the line slow.
CODE_S = 600.0
#: For the agents of a job to say what it is, and to give its wheel back.
ADOPT_S = 300.0
_PART_BYTES = 1 << 20
_TLS_S = 1.0
#: For a host to take a connection, where there are others to ask.
CONNECT_S = 1.0

#: To connect may take as long as one call. A master that is frozen ends the streams from it.
CHANNEL_OPTIONS = (
    ("grpc.min_reconnect_backoff_ms", int(1000 * DEADLINE_S)),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", int(1000 * DEADLINE_S)),
    ("grpc.http2.ping_timeout_ms", int(1000 * DEADLINE_S)),
    ("grpc.max_receive_message_length", 64 << 20),
)

#: In what gRPC says when the other end is silent or speaks something else.
_FOREIGN = re.compile(r"HTTP/2|SETTINGS|http1")
#: ... and where there was no connection, so that no request has left.
_NOT_CONNECTED = "failed to connect"
_UNWELCOME = "it closes the connection, as where a certificate has ended or is of another cluster"
_WANTS_CREDENTIALS = (
    "denied: the master at {} wants credentials, and yours are not known. If it is another user's "
    "'oobleck local', start your own and name it with --master or OOBLECK_MASTER; else give the "
    "credentials with --credentials or OOBLECK_CREDENTIALS ('oobleck pki join' gets them by a "
    "token of an operator)"
)
_ANOTHER_CLUSTER = "it is of another cluster than the credentials: their authority does not know it"
_NO_MASTER = "what listens there does not answer like an Oobleck master"
_EARLIER = (
    "the master at {} is of an earlier release, which cannot do this: upgrade Oobleck where it runs"
)


def _new_id() -> str:
    """Return a new id for a request: repeated with the same id, it is the same request."""
    return secrets.token_hex(16)


class NothingToRenew(CommandFailed):
    """The certificate is too new for that."""


class Unreachable(CommandFailed):
    def __init__(self, address: str, reason: str, *, reached: bool = False) -> None:
        """`reached`: the request may have come to the master, and its reply was lost."""
        self.reached = reached
        super().__init__(
            f"cannot reach a master at {address} ({reason}); start one with "
            "'oobleck local --nodes 4', or name it with --master or OOBLECK_MASTER",
            options.UNREACHABLE,
        )


class MasterClient:
    """A connection to the master; use it as a context."""

    def __init__(self, endpoint: Endpoint | str, *, ask_again_s: float = ASK_AGAIN_S) -> None:
        """`endpoint`: an address alone is one on this host, of this user or called in the clear.
        `ask_again_s`: for how long a request whose reply was lost is repeated."""
        if isinstance(endpoint, str):
            endpoint = choose_endpoint(endpoint, None, insecure=False)
        self._endpoint = endpoint
        #: The one of the master's addresses that is called.
        self.address = endpoint.address
        self._ask_again_s = ask_again_s
        self._secured = endpoint.credentials is not None
        self._channels: list[grpc.Channel] = []
        #: The calls by their names, of each address that was called.
        self._stubs: dict[str, dict[str, Any]] = {}
        #: Whether the last call got no answer there.
        self._in_vain = False
        #: Whether a call got an answer there, and none was without one since.
        self._answers = False
        #: What the last answer said of the master itself; empty: all is well.
        self.problem = ""
        #: And how that master stands to others; None: it does not say.
        self.head: pb.HeadStatus | None = None

    def __enter__(self) -> "MasterClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def submit(
        self, job: str, request_id: str, *, profile: str = "", profile_only: bool = False
    ) -> pb.SubmitReply:
        """`profile`: text of the profile file that the job names."""
        request = pb.SubmitRequest(
            request_id=request_id, job=job, profile=profile, profile_only=profile_only
        )
        reply: pb.SubmitReply = self._change("Submit", request)
        return reply

    def put_code(self, wheel: bytes) -> None:
        """Have the master keep it for a job that is submitted next."""
        parts = [wheel[at : at + _PART_BYTES] for at in range(0, len(wheel), _PART_BYTES)]
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
        """Text of a Chrome trace of `steps` steps to come; takes as long as they do."""
        request = pb.TimelineRequest(job_id=job_id, steps=steps)
        reply: pb.TimelineReply = self._ask("GetTimeline", request, TIMELINE_S)
        return reply.trace

    def save_checkpoint(self, job_id: str) -> int:
        """The number of the request."""
        request = pb.SaveCheckpointRequest(request_id=_new_id(), job_id=job_id)
        reply: pb.SaveCheckpointReply = self._change("SaveCheckpoint", request)
        return reply.number

    def cancel(self, job_id: str) -> pb.JobStatus:
        request = pb.CancelRequest(request_id=_new_id(), job_id=job_id)
        reply: pb.JobStatus = self._change("CancelJob", request)
        return reply

    def adopt(self, job_id: str) -> Sequence[str]:
        """Have the master take over a job that nodes train and it does not know; return what is
        lost of it, a line each."""
        request = pb.AdoptRequest(request_id=_new_id(), job_id=job_id)
        reply: pb.AdoptReply = self._change("AdoptJob", request, ADOPT_S)
        return reply.lost

    def cancel_unknown(self, job_id: str) -> Sequence[str]:
        """Have the workers end of a job that the master does not know; return their nodes."""
        request = pb.CancelRequest(request_id=_new_id(), job_id=job_id)
        reply: pb.CancelUnknownReply = self._change("CancelUnknownJob", request)
        return reply.nodes

    def nodes(self, timeout_s: float = DEADLINE_S) -> list[pb.NodeInfo]:
        reply: pb.ListNodesReply = self._ask("ListNodes", pb.ListNodesRequest(), timeout_s)
        return list(reply.nodes)

    def drain(self, node: str, reason: str, *, force: bool) -> pb.NodeInfo:
        """The node as it is then."""
        request = pb.DrainNodeRequest(request_id=_new_id(), node=node, reason=reason, force=force)
        reply: pb.NodeInfo = self._change("DrainNode", request)
        return reply

    def undrain(self, node: str) -> pb.NodeInfo:
        request = pb.UndrainNodeRequest(request_id=_new_id(), node=node)
        reply: pb.NodeInfo = self._change("UndrainNode", request)
        return reply

    def watch(self, job_id: str) -> Iterator[pb.JobStatus]:
        return self._stream("WatchJob", pb.JobRequest(job_id=job_id))

    def events(self, job_id: str, *, follow: bool) -> Iterator[pb.EventRecord]:
        return self._stream("Events", pb.EventsRequest(job_id=job_id, follow=follow))

    def metrics(
        self, job_id: str, *, follow: bool, from_step: int = 1, evaluations: bool = False
    ) -> Iterator[str]:
        """Lines of metrics.jsonl, or of evaluations.jsonl, from that step on."""
        request = pb.MetricsRequest(
            job_id=job_id, follow=follow, from_step=from_step, evaluations=evaluations
        )
        for some in self._stream("Metrics", request):
            yield from some.json

    def logs(
        self, job_id: str, *, follow: bool, node: str | None, rank: int | None, since: str = ""
    ) -> Iterator[pb.LogLine]:
        """`since`: the time of a line, from which on they are told."""
        request = pb.LogsRequest(
            job_id=job_id, follow=follow, node=node or "", rank=rank, since=since
        )
        return self._stream("Logs", request)

    def examine(self, request: pb.ExamineRequest) -> Iterator[Finding]:
        """Yield the findings on the hosts and between them, each as it is found."""
        for message in self._stream("Examine", request):
            yield read_finding(message)

    def backup(self, *, output: bool) -> Iterator[pb.BackupPart]:
        """Return the parts of a backup; `output`: with what workers printed."""
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
        """The reply to a request that changes something. If the reply is lost, as when the
        master restarts, the same request is sent again; by its id the master does it once."""
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
        """Keep what a reply says of the master itself."""
        self.problem = str(getattr(reply, "problem", self.problem))
        if isinstance(reply, pb.ListJobsReply | pb.ListNodesReply) and reply.HasField("head"):
            self.head = reply.head

    def _stream(self, method: str, request: Message) -> Iterator[Any]:
        with self._errors_as_lines():
            call = self._method(method)(request)
            try:
                yield from call
            finally:  # who reads no further leaves nothing open
                call.cancel()

    def _method(self, name: str) -> Any:
        """Return the call of that name, at the address that takes a connection."""
        if len(self._endpoint.addresses) > 1 and not self._answers:
            self._seek()
        if self.address not in self._stubs:
            endpoint = dataclasses.replace(self._endpoint, address=self.address)
            channel = open_channel(endpoint, CHANNEL_OPTIONS)
            self._channels.append(channel)
            self._stubs[self.address] = {
                **vars(OperatorStub(channel)),  # type: ignore[no-untyped-call]  # generated
                **vars(PkiStub(channel)),  # type: ignore[no-untyped-call]  # generated
            }
        return self._stubs[self.address][name]

    def _seek(self) -> None:
        """Go to the first address that takes a connection, from the present one on; behind it,
        where that had no answer. Where none does, the call itself tells why."""
        known = self._endpoint.addresses
        first = known.index(self.address) + self._in_vain
        order = (*known[first:], *known[:first])
        self.address = next(filter(takes_connection, order), order[0])

    @contextmanager
    def _errors_as_lines(self) -> Iterator[None]:
        """Around a call."""
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
        """Addresses of the endpoint, for a line that says where no master is."""
        return ", ".join(self._endpoint.addresses)

    def _is_master(self) -> bool:
        """Return whether the server there knows a method that masters of all releases have."""
        try:
            self._method("ListJobs")(pb.ListJobsRequest(), timeout=DEADLINE_S)
        except grpc.RpcError as error:
            return bool(error.code() is not grpc.StatusCode.UNIMPLEMENTED)
        return True

    def _line(self, error: Any) -> CommandFailed:
        whole = error.details() or ""
        details = whole.rpartition("last error: ")[2]
        match error.code():
            case grpc.StatusCode.UNAVAILABLE:
                cause = details.rpartition(": ")[2].rstrip("]") or "unavailable"
                foreign = _FOREIGN.search(details)
                if not self._secured and _speaks_tls(self.address):
                    return CommandFailed(_WANTS_CREDENTIALS.format(self.address), options.DENIED)
                if self._secured and _NOT_CONNECTED in whole and "Socket closed" in details:
                    cause = _UNWELCOME
                elif "CERTIFICATE_VERIFY_FAILED" in details:
                    cause = _ANOTHER_CLUSTER
                reached = not foreign and _NOT_CONNECTED not in whole
                return Unreachable(self._at, _NO_MASTER if foreign else cause, reached=reached)
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return Unreachable(self._at, f"{_NO_MASTER} within {DEADLINE_S:.0f} s")
            case grpc.StatusCode.UNIMPLEMENTED if self._is_master():
                return CommandFailed(_EARLIER.format(self.address), options.USAGE)
            case grpc.StatusCode.UNIMPLEMENTED:
                return Unreachable(self._at, _NO_MASTER)
            case grpc.StatusCode.NOT_FOUND:
                return CommandFailed(details, options.NO_SUCH_THING)
            case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNAUTHENTICATED:
                return CommandFailed(f"denied: {details}", options.DENIED)
            case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.FAILED_PRECONDITION:
                return CommandFailed(details, options.USAGE)
            case grpc.StatusCode.ALREADY_EXISTS:
                return NothingToRenew(details)
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return CommandFailed(details)
            case code:
                return CommandFailed(f"the master failed with {code.name}: {details}")


def takes_connection(address: str) -> bool:
    """Return whether something takes a connection there within a second."""
    try:
        with socket.create_connection(split_address(address), CONNECT_S):
            return True
    except (OSError, UnicodeError):
        return False


def _speaks_tls(address: str) -> bool:
    """Return whether what listens there shows a certificate, as masters with an authority do."""
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
