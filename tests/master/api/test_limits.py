"""What one caller can take of a real master: bytes, streams, connections, pings."""

import asyncio
import json
import resource
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from oobleck.host.detection import DETECTIONS
from oobleck.master.api import access
from oobleck.master.api.access import ALLOWED
from oobleck.master.api.operator_service import MOST_JOB_BYTES
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from oobleck.proto.bounds import MOST_RECEIVED_BYTES
from support import loops
from support.masters import MasterProcess, master

DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterProcess]:
    with master(tmp_path_factory.mktemp("limited") / "state") as process:
        yield process


def code_of(
    running: MasterProcess,
    path: str,
    request: bytes,
    compression: grpc.Compression | None = None,
    **call: object,
) -> grpc.StatusCode:
    async def ask() -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(running.address, compression=compression) as channel:
            try:
                await channel.unary_unary(path)(request, timeout=DEADLINE_S, **call)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

    return loops.run(ask())


def test_messages_that_are_too_large_are_refused(running: MasterProcess) -> None:
    path = "/oobleck.Operator/Submit"
    request = pb.SubmitRequest(request_id="1", job="x" * MOST_RECEIVED_BYTES)
    found = code_of(running, path, request.SerializeToString())
    assert found is grpc.StatusCode.RESOURCE_EXHAUSTED
    smaller = pb.SubmitRequest(request_id="1", job="x" * (MOST_JOB_BYTES + 1))
    found = code_of(running, path, smaller.SerializeToString())
    assert found is grpc.StatusCode.INVALID_ARGUMENT
    named = pb.CancelRequest(request_id="1", job_id="x" * access.MOST_REQUEST_BYTES)
    found = code_of(running, "/oobleck.Operator/CancelJob", named.SerializeToString())
    assert found is grpc.StatusCode.INVALID_ARGUMENT


def test_compressed_requests_are_refused(running: MasterProcess) -> None:
    path = "/oobleck.Operator/GetJob"
    request = pb.JobRequest(job_id="n" * 4096).SerializeToString()
    found = [code_of(running, path, request, way) for way in (None, grpc.Compression.Gzip)]
    assert found == [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT]


@pytest.mark.parametrize(
    "job",
    [
        {"model": {"python": "mine:model"}, "data": {"python": "mine:data"}},
        {
            "model": {"layers": 1, "hidden": 8, "heads": 1, "sequence_length": 8},
            "data": {"text": ["/texts"]},
            "training": {"optimizer": {"python": "torch.optim:NAdam"}},
        },
    ],
)
def test_what_is_the_users_must_come_with_its_description(
    running: MasterProcess, job: dict[str, dict[str, object]]
) -> None:
    training = {"steps": 1, "global_batch": 2, **job.get("training", {})}
    text = json.dumps({"name": "own", **job, "training": training})
    request = pb.SubmitRequest(request_id="own", job=text)
    found = code_of(running, "/oobleck.Operator/Submit", request.SerializeToString())
    assert found is grpc.StatusCode.INVALID_ARGUMENT


def test_a_long_name_of_nobody_is_told_of_in_a_line(running: MasterProcess) -> None:
    request = pb.DrainNodesRequest(request_id="1", nodes=["n" * 60_000])
    found = code_of(running, "/oobleck.Operator/DrainNodes", request.SerializeToString())
    assert found is grpc.StatusCode.NOT_FOUND


def test_a_registration_that_is_late_may_be_tried_again(tmp_path: Path) -> None:
    """Agents end for good where a registration is refused as malformed."""

    async def wait(address: str) -> tuple[grpc.StatusCode, str]:
        async with grpc.aio.insecure_channel(address) as channel:
            call = rpc.ControlStub(channel).Session(timeout=DEADLINE_S)
            return await call.code(), await call.details()

    with master(tmp_path / "state", "--answer-s", "0.2") as impatient:
        code, details = loops.run(wait(impatient.address))
    assert (code, details) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "register: did not come within 0.2 s",
    )


def test_headers_that_are_too_large_are_refused(running: MasterProcess) -> None:
    path, large = "/oobleck.Operator/ListJobs", "x" * (2 * access.MOST_METADATA_BYTES)
    found = code_of(running, path, b"", metadata=(("note", large),))
    assert found is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert code_of(running, path, b"", metadata=(("note", "x" * 100),)) is grpc.StatusCode.OK


def test_streams_of_one_connection_are_bounded(running: MasterProcess) -> None:
    """More wait at the caller; others are served."""

    own_connection = (("grpc.use_local_subchannel_pool", 1),)

    async def as_many_as_may() -> int:
        async with grpc.aio.insecure_channel(running.address, options=own_connection) as channel:
            stub = rpc.ControlStub(channel)  # type: ignore[no-untyped-call]
            calls = [stub.Session() for _ in range(access.MOST_FREE_STREAMS)]
            for call in calls:
                await call.write(pb.AgentMessage())  # is answered, so it is open there
            answered = await asyncio.gather(*(call.code() for call in calls))
        return sum(code is grpc.StatusCode.INVALID_ARGUMENT for code in answered)

    async def one_more() -> None:
        # Its own connection: on one that had calls, the server may still count an ended one,
        # and then it refuses what the caller takes for allowed.
        async with grpc.aio.insecure_channel(running.address, options=own_connection) as channel:
            stub = rpc.ControlStub(channel)  # type: ignore[no-untyped-call]
            held = [stub.Session() for _ in range(access.MOST_FREE_STREAMS)]
            await asyncio.gather(*(call.wait_for_connection() for call in held))
            operator = rpc.OperatorStub(channel)  # type: ignore[no-untyped-call]
            asking = operator.ListJobs(pb.ListJobsRequest())
            assert await code_of_list(running) is grpc.StatusCode.OK
            assert not asking.done()
            for call in held:
                call.cancel()
            async with asyncio.timeout(DEADLINE_S):
                # The server refuses it if it has not ended the cancelled ones yet.
                while await asking.code() is grpc.StatusCode.UNAVAILABLE:
                    asking = operator.ListJobs(pb.ListJobsRequest())
            assert await asking.code() is grpc.StatusCode.OK

    assert loops.run(as_many_as_may()) == access.MOST_FREE_STREAMS
    loops.run(one_more())


async def code_of_list(running: MasterProcess) -> grpc.StatusCode:
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(running.address, options=options) as channel:
        stub = rpc.OperatorStub(channel)  # type: ignore[no-untyped-call]
        call = stub.ListJobs(pb.ListJobsRequest(), timeout=DEADLINE_S)
        await call
        return await call.code()


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def test_a_flood_of_pings_ends_the_connection(running: MasterProcess) -> None:
    """HTTP/2 spoken by hand: preface, settings, then pings without a pause."""
    host, _, port = running.address.rpartition(":")
    with socket.create_connection((host, int(port)), DEADLINE_S) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
        with pytest.raises(OSError, match=r"reset|[Bb]roken|closed"):  # noqa: PT012
            for number in range(100_000):
                connection.sendall(frame(6, 0, 0, struct.pack("!Q", number)))
                if number % 100 == 0 and not connection.recv(65536):
                    raise OSError("closed")
    assert code_of(running, "/oobleck.Operator/ListJobs", b"") is grpc.StatusCode.OK


def test_pings_of_agents_are_no_flood() -> None:
    for detection in DETECTIONS.values():
        least_ms = dict(access.server_options(detection, secured=True))[
            "grpc.http2.min_ping_interval_without_data_ms"
        ]
        assert all(least_ms <= 1000 * other.ping_every_s / 2 for other in DETECTIONS.values())


def test_more_files_may_be_open_than_a_shell_allows(tmp_path: Path) -> None:
    """One of each agent, and the shell's limit is for a thousand."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[1]), limits[1]))
    try:
        with master(tmp_path / "state") as process:
            found = resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == (limits[1], limits[1])


def test_every_unary_call_has_a_deadline() -> None:
    for path in ALLOWED:
        assert 0 < access.deadline_s(path) <= 3700
    assert access.deadline_s("/oobleck.Operator/Whatever") == access.UNARY_S
