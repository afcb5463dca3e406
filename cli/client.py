"""Calls of the master with a deadline. Its errors become one line with a documented exit code."""

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
from oobleck.host.address import split_address
from oobleck.host.command import CommandFailed
from oobleck.host.finding import Finding
from oobleck.host.ipc.endpoint import Endpoint, choose_endpoint
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
    """Of a request, so that repeating it is the same request."""
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
        self.address = endpoint.address
        self._ask_again_s = ask_again_s
        self._secured = endpoint.credentials is not None
        self._channel = open_channel(endpoint, CHANNEL_OPTIONS)
        #: What the last answer said of the master itself; empty: all is well.
        self.problem = ""
        #: And how that master stands to others; None: it does not say.
        self.head: pb.HeadStatus | None = None
        self._stub: Any = OperatorStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._pki: Any = PkiStub(self._channel)  # type: ignore[no-untyped-call]  # generated

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
        self._channel.close()

    def submit(
        self, job: str, request_id: str, *, profile: str = "", profile_only: bool = False
    ) -> pb.SubmitReply:
        """`profile`: text of the profile file that the job names."""
        request = pb.SubmitRequest(
            request_id=request_id, job=job, profile=profile, profile_only=profile_only
        )
        reply: pb.SubmitReply = self._change(self._stub.Submit, request)
        return reply

    def put_code(self, wheel: bytes) -> None:
        """Have the master keep it for a job that is submitted next."""
        parts = [wheel[at : at + _PART_BYTES] for at in range(0, len(wheel), _PART_BYTES)]
        with self._errors_as_lines():
            self._stub.PutCode((pb.CodeChunk(data=part) for part in parts), timeout=CODE_S)

    def jobs(self, timeout_s: float = DEADLINE_S) -> list[pb.JobStatus]:
        reply: pb.ListJobsReply = self._ask(self._stub.ListJobs, pb.ListJobsRequest(), timeout_s)
        return list(reply.jobs)

    def job(self, job_id: str) -> pb.JobStatus:
        reply: pb.JobStatus = self._ask(self._stub.GetJob, pb.JobRequest(job_id=job_id))
        return reply

    def profile(self, job_id: str) -> pb.ProfileReply:
        reply: pb.ProfileReply = self._ask(self._stub.GetProfile, pb.JobRequest(job_id=job_id))
        return reply

    def planning(self, job_id: str) -> pb.PlanningReply:
        reply: pb.PlanningReply = self._ask(self._stub.GetPlanning, pb.JobRequest(job_id=job_id))
        return reply

    def timeline(self, job_id: str, steps: int) -> str:
        """Text of a Chrome trace of `steps` steps to come; takes as long as they do."""
        request = pb.TimelineRequest(job_id=job_id, steps=steps)
        reply: pb.TimelineReply = self._ask(self._stub.GetTimeline, request, TIMELINE_S)
        return reply.trace

    def save_checkpoint(self, job_id: str) -> int:
        """The number of the request."""
        request = pb.SaveCheckpointRequest(request_id=_new_id(), job_id=job_id)
        reply: pb.SaveCheckpointReply = self._change(self._stub.SaveCheckpoint, request)
        return reply.number

    def cancel(self, job_id: str) -> pb.JobStatus:
        request = pb.CancelRequest(request_id=_new_id(), job_id=job_id)
        reply: pb.JobStatus = self._change(self._stub.CancelJob, request)
        return reply

    def adopt(self, job_id: str) -> Sequence[str]:
        """Have the master take over a job that nodes train and it does not know; return what is
        lost of it, a line each."""
        request = pb.AdoptRequest(request_id=_new_id(), job_id=job_id)
        reply: pb.AdoptReply = self._change(self._stub.AdoptJob, request, ADOPT_S)
        return reply.lost

    def cancel_unknown(self, job_id: str) -> Sequence[str]:
        """Have the workers end of a job that the master does not know; return their nodes."""
        request = pb.CancelRequest(request_id=_new_id(), job_id=job_id)
        reply: pb.CancelUnknownReply = self._change(self._stub.CancelUnknownJob, request)
        return reply.nodes

    def nodes(self, timeout_s: float = DEADLINE_S) -> list[pb.NodeInfo]:
        reply: pb.ListNodesReply = self._ask(self._stub.ListNodes, pb.ListNodesRequest(), timeout_s)
        return list(reply.nodes)

    def drain(self, node: str, reason: str, *, force: bool) -> pb.NodeInfo:
        """The node as it is then."""
        request = pb.DrainNodeRequest(request_id=_new_id(), node=node, reason=reason, force=force)
        reply: pb.NodeInfo = self._change(self._stub.DrainNode, request)
        return reply

    def undrain(self, node: str) -> pb.NodeInfo:
        request = pb.UndrainNodeRequest(request_id=_new_id(), node=node)
        reply: pb.NodeInfo = self._change(self._stub.UndrainNode, request)
        return reply

    def watch(self, job_id: str) -> Iterator[pb.JobStatus]:
        return self._stream(self._stub.WatchJob, pb.JobRequest(job_id=job_id))

    def events(self, job_id: str, *, follow: bool) -> Iterator[pb.EventRecord]:
        return self._stream(self._stub.Events, pb.EventsRequest(job_id=job_id, follow=follow))

    def metrics(
        self, job_id: str, *, follow: bool, from_step: int = 1, evaluations: bool = False
    ) -> Iterator[str]:
        """Lines of metrics.jsonl, or of evaluations.jsonl, from that step on."""
        request = pb.MetricsRequest(
            job_id=job_id, follow=follow, from_step=from_step, evaluations=evaluations
        )
        for some in self._stream(self._stub.Metrics, request):
            yield from some.json

    def logs(
        self, job_id: str, *, follow: bool, node: str | None, rank: int | None, since: str = ""
    ) -> Iterator[pb.LogLine]:
        """`since`: the time of a line, from which on they are told."""
        request = pb.LogsRequest(
            job_id=job_id, follow=follow, node=node or "", rank=rank, since=since
        )
        return self._stream(self._stub.Logs, request)

    def examine(self, request: pb.ExamineRequest) -> Iterator[Finding]:
        """What is wrong with the hosts and between them, each as it is found."""
        for message in self._stream(self._stub.Examine, request):
            yield read_finding(message)

    def backup(self, *, output: bool) -> Iterator[pb.BackupPart]:
        """Return the parts of a backup; `output`: with what workers printed."""
        return self._stream(self._stub.Backup, pb.BackupRequest(no_output=not output))

    # ---- certificates

    def join(self, request: str, name: str) -> pb.CertificateReply:
        asked = pb.JoinRequest(request=request, name=name)
        reply: pb.CertificateReply = self._ask(self._pki.Join, asked)
        return reply

    def renew(self, request: str) -> pb.CertificateReply:
        reply: pb.CertificateReply = self._ask(self._pki.Renew, pb.RenewRequest(request=request))
        return reply

    def create_token(
        self, request: str, *, role: str, name: str, ttl_s: float
    ) -> pb.CertificateReply:
        asked = pb.TokenRequest(request=request, role=role, name=name, ttl_s=ttl_s)
        reply: pb.CertificateReply = self._ask(self._pki.CreateToken, asked)
        return reply

    def credentials(self) -> pb.ListCredentialsReply:
        reply: pb.ListCredentialsReply = self._ask(
            self._pki.ListCredentials, pb.ListCredentialsRequest()
        )
        return reply

    def revoke(self, request: pb.RevokeRequest) -> None:
        self._ask(self._pki.Revoke, request)

    def _change(self, method: Any, request: Message, timeout_s: float = DEADLINE_S) -> Any:
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

    def _ask(self, method: Any, request: Message, timeout_s: float = DEADLINE_S) -> Any:
        with self._errors_as_lines():
            reply = method(request, timeout=timeout_s)
        self.problem = str(getattr(reply, "problem", self.problem))
        if isinstance(reply, pb.ListJobsReply | pb.ListNodesReply) and reply.HasField("head"):
            self.head = reply.head
        return reply

    def _stream(self, method: Any, request: Message) -> Iterator[Any]:
        with self._errors_as_lines():
            call = method(request)
            try:
                yield from call
            finally:  # who reads no further leaves nothing open
                call.cancel()

    @contextmanager
    def _errors_as_lines(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._line(error) from error

    def _is_master(self) -> bool:
        """Whether what listens there knows what masters of all releases do."""
        try:
            self._stub.ListJobs(pb.ListJobsRequest(), timeout=DEADLINE_S)
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
                return Unreachable(self.address, _NO_MASTER if foreign else cause, reached=reached)
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return Unreachable(self.address, f"{_NO_MASTER} within {DEADLINE_S:.0f} s")
            case grpc.StatusCode.UNIMPLEMENTED if self._is_master():
                return CommandFailed(_EARLIER.format(self.address), options.USAGE)
            case grpc.StatusCode.UNIMPLEMENTED:
                return Unreachable(self.address, _NO_MASTER)
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
