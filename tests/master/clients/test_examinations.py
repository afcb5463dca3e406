"""How a master has its nodes looked at: who does not answer, and what is left behind by nobody."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from oobleck.core.ids import Incarnation, JobId, NodeName
from oobleck.core.orders import (
    Answer,
    Call,
    Clock,
    Done,
    Finding,
    FindMarks,
    Hush,
    Listen,
    Listening,
    Look,
    Looked,
    Marks,
    Order,
    ReadClock,
    RemoveMarks,
    Seen,
    Unable,
    Way,
)
from oobleck.host.detection import Detection
from oobleck.host.system.environment import Environment
from oobleck.master.clients import examinations
from oobleck.master.clients.examinations import Busy, Examinations, Wish
from oobleck.master.clients.outbox import AgentSession, Budget
from oobleck.master.config import MasterConfig
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node, NodeSeen
from oobleck.proto.examinations import read_order
from oobleck.proto.protocol import NEWEST
from support import loops
from support.agent import facts
from support.jobs import job_spec

SAVED = "/shared/saved"
WELL = Way(
    least_s=1e-4,
    median_s=1e-4,
    there_bytes_per_s=1e9,
    back_bytes_per_s=1e9,
    sent_bytes=1 << 20,
    mtu=1500,
    arrived=1500,
)


class Nodes:
    """Nodes that answer by a table; None: not at all."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.state = ClusterState()
        self.sessions: dict[NodeName, AgentSession] = {}
        self.orders: list[tuple[str, Order]] = []
        #: By node: of the last order.
        self.numbers: dict[str, int] = {}
        for number, name in enumerate(map(NodeName, names), start=1):
            seen = NodeSeen(last_heard=0.0, session=number)
            there = facts(name, address=f"10.0.0.{number}", newest_protocol=NEWEST)
            self.state.nodes[name] = Node(facts=there, seen=seen)
            session = AgentSession(
                number=number, node=name, incarnation=Incarnation("aaaa"), pace=Budget(1.0, 1.0)
            )
            self.sessions[name] = session
        config = MasterConfig(listen="127.0.0.1:0", state_dir=folder, timing=Detection())
        self.examinations = Examinations(
            config, self.state, Environment(), lambda name: self.sessions.get(name)
        )

    @contextlib.asynccontextmanager
    async def answering(self, answer: Callable[[str, Order], Answer | None]) -> AsyncIterator[None]:
        async def of(session: AgentSession) -> None:
            while True:
                for message in await session.outgoing():
                    order = read_order(message.examine)
                    self.orders.append((session.node, order))
                    self.numbers[session.node] = message.examine.number
                    if (told := answer(session.node, order)) is not None:
                        self.examinations.take(session.node, message.examine.number, told)

        tasks = [asyncio.create_task(of(session)) for session in self.sessions.values()]
        try:
            yield
        finally:
            for _ in range(3):  # the last orders are told too
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()

    async def examine(self, wish: Wish) -> list[Finding]:
        return [finding async for finding in self.examinations.examine(wish)]

    def told(self, kind: type[Order]) -> list[str]:  # type: ignore[valid-type]
        return sorted(node for node, order in self.orders if isinstance(order, kind))


def well(node: str, order: Order) -> Answer | None:
    match order:
        case ReadClock():
            return Clock(unix=Environment().unix())
        case Look():
            seen = Seen(path=SAVED, use="checkpoints", at="/shared")
            return Looked(seen=(seen,), interface="eth0", mtu=1500)
        case FindMarks():
            return Marks(found={"/shared": ("n1", "n2", "n3")})
        case Listen():
            return Listening(port=int(node[1:]))
        case Call():
            return WELL
        case _:
            return Done()


def bad(found: Sequence[Finding]) -> list[tuple[str, str, str]]:
    """Of nodes: what the head of this machine is like is another matter."""
    return [
        (finding.check, finding.level, finding.node)
        for finding in found
        if finding.level != "pass" and finding.node != "(head)"
    ]


def run(test: Callable[[], object]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(240):
            await test()  # type: ignore[misc]

    loops.run(bounded())


def test_all_is_well_and_nothing_is_left(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "n1", "n2", "n3")

    async def test() -> None:
        async with nodes.answering(well):
            found = await nodes.examine(Wish(checkpoints=(SAVED,)))
        assert bad(found) == []
        assert {"clock", "versions", "shared", "ports", "mtu", "bandwidth"} <= {
            finding.check for finding in found
        }

    run(test)
    assert nodes.told(Hush) == ["n1", "n2", "n3"]
    assert nodes.told(RemoveMarks) == ["n1", "n2", "n3"]
    secrets = {order.secret for _, order in nodes.orders if isinstance(order, Listen)}
    assert [len(secret) for secret in secrets] == [64]
    calls = [(node, order) for node, order in nodes.orders if isinstance(order, Call)]
    assert {(node, order.address, order.port) for node, order in calls} == {
        (f"n{here}", f"10.0.0.{there}", there)
        for here in (1, 2, 3)
        for there in (1, 2, 3)
        if here != there
    }


def test_who_does_not_answer_is_told_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examinations, "_CLOCK_S", 0.2)
    monkeypatch.setattr(examinations, "_LOOK_S", 0.05)
    nodes = Nodes(tmp_path, "n1", "n2", "n3", "n4", "n5")

    def answer(node: str, order: Order) -> Answer | None:
        if node == "n3":  # its agent hangs
            return None
        if node == "n4" and isinstance(order, Look):
            return Unable(reason="the process that looks has not answered for 50 s")
        if node == "n5" and isinstance(order, Look):
            del nodes.sessions[NodeName("n5")]
            return None
        if isinstance(order, FindMarks):
            return Marks(found={"/shared": ("n1", "n2")})
        return well(node, order)

    async def test() -> None:
        async with nodes.answering(answer):
            found = await nodes.examine(Wish(checkpoints=(SAVED,)))
        assert sorted(bad(found)) == [("agent", "fail", f"n{number}") for number in (3, 4, 5)]
        assert {type(order) for node, order in nodes.orders if node == "n3"} == {ReadClock}

    run(test)


def test_one_examination_at_a_time_and_an_operator_who_leaves_leaves_nothing(
    tmp_path: Path,
) -> None:
    nodes = Nodes(tmp_path, "n1", "n2")
    listening = asyncio.Event()

    def answer(node: str, order: Order) -> Answer | None:
        if isinstance(order, Call):
            listening.set()
            return None
        return well(node, order)

    async def test() -> None:
        async with nodes.answering(answer):
            first = asyncio.create_task(nodes.examine(Wish(checkpoints=(SAVED,))))
            await listening.wait()
            with pytest.raises(Busy, match="another examination is under way"):
                await nodes.examine(Wish())
            first.cancel()
            await asyncio.wait({first})
            async for _ in nodes.examinations.examine(Wish(nodes=(NodeName("n1"),))):
                pass  # there is room for another one

    run(test)
    assert {*nodes.told(Hush)} == {"n1", "n2"}


def test_a_job_that_trains_is_asked_for_little(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "n1", "n2")
    spec = job_spec("demo", steps=10, checkpoint=5)
    job = Job(id=JobId("demo-1"), request_id="r", spec=spec, state="running", submitted_at=0.0)
    nodes.state.jobs[job.id] = job
    nodes.state.active = job.id

    async def ask(*, pairs: bool, most: int) -> None:
        nodes.orders.clear()
        async with nodes.answering(well):
            found = await nodes.examine(Wish(pairs=pairs))
        looks = [order for _, order in nodes.orders if isinstance(order, Look)]
        assert all(look.gently for look in looks)
        assert spec.checkpoint is not None
        paths = {place.path for place in looks[0].places}
        assert {spec.checkpoint.path, *spec.data.text} <= paths
        calls = [order for _, order in nodes.orders if isinstance(order, Call)]
        assert max(call.most_bytes for call in calls) == most
        told = [finding.what for finding in found if finding.check == "pairs"]
        assert [what.startswith("a job uses the nodes") for what in told] == [True]

    async def test() -> None:
        await ask(pairs=False, most=0)
        await ask(pairs=True, most=16 << 20)

    run(test)


def test_nodes_of_one_host_look_one_after_the_other(tmp_path: Path) -> None:
    """They have the same disks, each of which would seem slow."""
    nodes = Nodes(tmp_path, "n1", "n2", "n3")
    for name, boot in (("n1", "b1"), ("n2", "b1"), ("n3", "b3")):
        node = nodes.state.nodes[NodeName(name)]
        node.facts = msgspec.structs.replace(node.facts, boot=boot)

    async def test() -> None:
        asked = asyncio.Event()

        def answer(node: str, order: Order) -> Answer | None:
            if isinstance(order, Look) and node == "n3":
                asked.set()
            return None if isinstance(order, Look) and node == "n1" else well(node, order)

        async with nodes.answering(answer):
            examining = asyncio.ensure_future(nodes.examine(Wish()))
            await asked.wait()
            for _ in range(20):
                await asyncio.sleep(0)
            assert nodes.told(Look) == ["n1", "n3"]
            looked = well("n1", nodes.orders[-1][1])
            assert looked is not None
            nodes.examinations.take(NodeName("n1"), nodes.numbers["n1"], looked)
            assert bad(await examining) == []
        assert nodes.told(Look) == ["n1", "n2", "n3"]

    run(test)


def test_what_the_master_knows_of_a_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "n1", "n2", "n3")
    one, two, three = (nodes.state.nodes[NodeName(name)] for name in ("n1", "n2", "n3"))
    one.seen.status = msgspec.structs.replace(one.seen.status, trouble="ImportError: torch")
    two.seen.session = None
    three.registered, three.reason = False, "silent for 4 s"

    async def test() -> None:
        async with nodes.answering(well):
            found = await nodes.examine(Wish(problem="disk full"))
        assert [one for one in bad(found) if one[0] == "agent"] == [
            ("agent", "fail", name) for name in ("n1", "n2", "n3")
        ]
        assert ("journal", "disk full") in [(f.check, f.what) for f in found]

    run(test)
