"""The calls of one holder of a certificate, over all its connections."""

import asyncio
import contextlib
import json
import queue
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from bench.support.ports import choose_address
from oobleck.cli.client import MasterClient
from oobleck.cli.dashboard.hub import MOST_FEEDS, Hub
from oobleck.cli.view.feeds import Following
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.security.credentials import Credentials, read_credentials
from oobleck.host.security.pki import Identity
from oobleck.master.api import access
from oobleck.master.inbox import Changes, Turns
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from oobleck.proto.secure import open_aio_channel
from support import loops
from support.holders import signed
from support.jobs import job_text
from support.secured import Secured

DEADLINE_S = 240.0
#: Of one connection at a time.
CALLS = 5
_ALONE = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1),
    # A call outlasts handshakes that the master ends because the machine stood still meanwhile.
    ("grpc.service_config", json.dumps({"methodConfig": [{"name": [{}], "waitForReady": True}]})),
)
#: Its pings outlast any pause of a busy machine.
PATIENT = ("--detection", "wan")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    master = Secured(tmp_path_factory.mktemp("shares"), *PATIENT)
    yield master
    master.process.send_signal(signal.SIGTERM)
    assert master.process.stdout is not None
    master.process.stdout.close()
    master.process.wait(timeout=DEADLINE_S)


def holder(secured: Secured, role: str, name: str) -> Credentials:
    return signed(secured.pki, Identity(role=role, name=name))  # type: ignore[arg-type]


def channel(secured: Secured, shown: Credentials) -> grpc.aio.Channel:
    return open_aio_channel(Endpoint(address=secured.address, credentials=shown), _ALONE)


async def nothing() -> AsyncIterator[bytes]:
    """A message that never comes."""
    await asyncio.get_running_loop().create_future()
    yield b""


async def until(condition: "asyncio.Event") -> None:
    async with asyncio.timeout(DEADLINE_S):
        await condition.wait()


def test_a_holder_has_so_many_calls_at_a_time_over_all_connections_and_others_have_theirs(
    secured: Secured,
) -> None:
    async def run() -> None:
        eve, ann = (holder(secured, "viewer", name) for name in ("eve", "ann"))
        refused = asyncio.Event()
        async with AsyncExitStack() as stack:
            connections = -(-access.MOST_OF_HOLDER // access.MOST_STREAMS) + 1
            channels = [
                await stack.enter_async_context(channel(secured, eve)) for _ in range(connections)
            ]

            async def hold(one: grpc.aio.Channel) -> None:
                # Without a request the call is one that the master waits for.
                call = one.stream_stream("/oobleck.Operator/GetJob")(nothing())
                if await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    refused.set()

            calls = [
                asyncio.create_task(hold(one))
                for one in channels
                for _ in range(access.MOST_STREAMS)
            ]
            await until(refused)
            async with channel(secured, ann) as hers:
                await rpc.OperatorStub(hers).ListNodes(  # type: ignore[no-untyped-call]
                    pb.ListNodesRequest(), timeout=DEADLINE_S
                )
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        # All are over: there is room again.
        async with channel(secured, eve) as again:
            stub = rpc.OperatorStub(again)  # type: ignore[no-untyped-call]
            async with asyncio.timeout(DEADLINE_S):
                code = None
                while code is not grpc.StatusCode.OK:
                    code = await stub.ListNodes(pb.ListNodesRequest()).code()
                    assert code in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)

    loops.run(run())


def test_a_connection_has_few_calls_at_a_time_and_each_follower_one_of_its_own(
    secured: Secured,
) -> None:
    """So a dashboard of many browsers hears of all jobs at once."""
    operator = Endpoint(address=secured.address, credentials=read_credentials(secured.operator))
    with MasterClient(operator) as client:
        job = client.submit(job_text(), "followed").job_id
    heard: queue.Queue[int] = queue.Queue()

    def follower(number: int) -> Following:
        def read(client: MasterClient) -> None:
            for _ in client.events(job, follow=True):
                heard.put(number)

        return Following(lambda: MasterClient(operator), read, f"follower {number}")

    followers = [follower(number) for number in range(3 * CALLS)]
    for one in followers:
        one.start()
    told = set[int]()
    while len(told) < len(followers):
        told.add(heard.get(timeout=DEADLINE_S))

    async def run() -> None:
        path, request = "/oobleck.Operator/Events", pb.EventsRequest(job_id=job, follow=True)
        said = request.SerializeToString()
        async with channel(secured, holder(secured, "viewer", "eve")) as eves:
            calls = [eves.unary_stream(path)(said) for _ in range(CALLS)]
            async with asyncio.timeout(DEADLINE_S):
                for call in calls:
                    await call.read()
                further = eves.unary_stream(path)(said)
                first = asyncio.ensure_future(further.read())
                for _ in range(20):
                    async with channel(secured, holder(secured, "viewer", "ann")) as hers:
                        await rpc.OperatorStub(hers).ListNodes(  # type: ignore[no-untyped-call]
                            pb.ListNodesRequest(), timeout=DEADLINE_S
                        )
                assert not first.done()
                for call in calls:
                    call.cancel()
                await first
                further.cancel()

    loops.run(run())
    for one in followers:
        one.close()


def test_an_agent_has_few_calls_that_send_more_than_one_message(secured: Secured) -> None:
    async def run() -> None:
        async with channel(secured, holder(secured, "agent", "n7")) as agents:
            stub = rpc.ControlStub(agents)  # type: ignore[no-untyped-call]
            calls = [stub.Session() for _ in range(access.MOST_SENDING + 1)]
            ended = [asyncio.ensure_future(call.code()) for call in calls]
            async with asyncio.timeout(DEADLINE_S):
                done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            assert [one.result() for one in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
            for call in calls:
                call.cancel()

    loops.run(run())


def test_few_requests_of_one_holder_are_received_at_one_moment(secured: Secured) -> None:
    """Requests that are on their way keep the later ones of their holder waiting, not of others."""

    async def run() -> None:
        eve, ann = (holder(secured, "viewer", name) for name in ("eve2", "ann2"))
        path, request = "/oobleck.Operator/ListNodes", pb.ListNodesRequest().SerializeToString()
        async with channel(secured, eve) as one, channel(secured, eve) as two:
            slow = [one.stream_stream(path)(nothing()) for _ in range(access.MOST_RECEIVING)]
            waiting: grpc.aio.UnaryUnaryCall[bytes, bytes] | None = None
            async with asyncio.timeout(DEADLINE_S):
                while waiting is None:  # until the slow ones have come to it
                    call = two.unary_unary(path)(request, timeout=1.0)
                    if await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                        waiting = call
            async with channel(secured, ann) as hers:
                await hers.unary_unary(path)(request, timeout=DEADLINE_S)
            for call in slow:
                call.cancel()
            await two.unary_unary(path)(request, timeout=DEADLINE_S)

    loops.run(run())


def test_few_of_those_who_wait_for_a_change_look_at_it_in_one_turn_of_the_loop() -> None:
    async def run() -> int:
        changes, looks, most = Changes(), 0, 0

        async def look() -> None:
            nonlocal looks
            await changes.after(changes.next)
            looks += 1

        watchers = [asyncio.create_task(look()) for _ in range(100)]
        await asyncio.sleep(0)
        changes.happened()
        while looks < len(watchers):
            before = looks
            await asyncio.sleep(0)
            most = max(most, looks - before)
        await asyncio.gather(*watchers)
        return most

    assert 0 < loops.run(run()) <= 8


def test_turns_come_in_the_order_of_who_asks() -> None:
    async def run() -> list[int]:
        turns, order = Turns(1), list[int]()

        async def take(number: int) -> None:
            await turns.take()
            order.append(number)

        await asyncio.gather(*map(take, range(20)))
        return order

    assert loops.run(run()) == list(range(20))


def anonymous_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/status").read_text().partition("RssAnon:")[2].split()
    return int(fields[0]) << 10


def test_followers_of_a_long_job_who_read_nothing_take_little_of_the_masters_memory(
    secured: Secured,
) -> None:
    operator = Endpoint(address=secured.address, credentials=read_credentials(secured.operator))
    with MasterClient(operator) as client:
        job = client.submit(job_text(), "long").job_id
    folder = secured.pki.parent / "jobs" / job
    with open(folder / "events.jsonl", "a") as file:
        for number in range(2, 20_002):
            file.write(json.dumps({"id": number, "pad": "x" * 400}) + "\n")
    (folder / "logs").mkdir(exist_ok=True)
    output = "".join(f"2026-01-01T00:00:00.000000+00:00 {'y' * 400}\n" for _ in range(20_000))
    (folder / "logs" / "n1-0.log").write_text(output)
    asked = {
        "Events": pb.EventsRequest(job_id=job, follow=True),
        "Logs": pb.LogsRequest(job_id=job, follow=True),
    }

    async def run() -> int:
        eve = holder(secured, "viewer", "eve3")
        async with AsyncExitStack() as stack:

            async def follow(connections: int) -> None:
                calls = []
                for _ in range(connections):
                    one = await stack.enter_async_context(channel(secured, eve))
                    for method, request in [*asked.items()] * (access.MOST_STREAMS // len(asked)):
                        call = one.unary_stream(f"/oobleck.Operator/{method}")
                        calls.append(call(request.SerializeToString()))
                for call in calls:
                    await call.read()

            async with asyncio.timeout(DEADLINE_S):
                await follow(1)
                before = anonymous_bytes(secured.process.pid)
                await follow(access.MOST_OF_HOLDER // access.MOST_STREAMS - 1)
                looks = []
                for _ in range(50):  # it sends until it may send no more
                    looks.append(anonymous_bytes(secured.process.pid) - before)
                    await asyncio.sleep(0.1)
            return max(looks)

    assert loops.run(run()) < 10 << 20


def test_a_dashboard_of_as_many_jobs_as_it_shows_has_all_its_calls(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        page = choose_address()
        secured = Secured(tmp_path, f"--metrics-listen={page}", *PATIENT)
        stack.callback(secured.close)

        def figure(name: str) -> int:
            with urllib.request.urlopen(f"http://{page}/metrics") as told:
                text = told.read().decode()
            found = text.partition(f"\n{name} ")[2].split()  # nothing before the first such call
            return round(float(found[0])) if found else 0

        def open_calls(method: str) -> int:
            return figure(f'oobleck_grpc_open_calls{{method="{method}"}}')

        viewer = Endpoint(address=secured.address, credentials=holder(secured, "viewer", "dash"))
        operator = Endpoint(address=secured.address, credentials=read_credentials(secured.operator))
        with MasterClient(operator) as client:
            for number in range(MOST_FEEDS):
                client.submit(job_text(), f"shown-{number}")
            jobs = client.jobs()
        hub = stack.enter_context(contextlib.closing(Hub(lambda: MasterClient(viewer))))
        feeds = [(hub.job(job), hub.logs(job)) for job in jobs]
        deadline = time.monotonic() + DEADLINE_S
        for method in ("Events", "Metrics", "Logs"):
            while open_calls(method) < MOST_FEEDS:
                assert time.monotonic() < deadline, method
                time.sleep(0.1)
        hub.cluster.touch()
        while hub.cluster.snapshot is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for shown, output in feeds:
            for one in (shown.steps, shown.happenings, output.following):
                assert one.trouble is None
        # A connection for each job; the cluster and the operator have one.
        assert 0 < figure("oobleck_grpc_connections") <= MOST_FEEDS + 2
