"""What an operator is told who asks for a drain: whether the work can move, and if not why."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from oobleck.core.ids import JobId, NodeName
from oobleck.core.job.file import format_job
from oobleck.host.detection import Detection
from oobleck.master.api import operator_service
from oobleck.master.api.agent_service import ControlService
from oobleck.master.api.view import node_info
from oobleck.master.events.nodes import NodeCleared, NodeDrained, NodeDrainRequested, NodeHeld
from oobleck.master.planning.requests import NextPlanRequest, PlanReply, PlanRequest, StillPlanning
from oobleck.master.planning.solve import AtOnce, work_out
from oobleck.master.rules.decision import Context
from oobleck.master.rules.draining import finish
from oobleck.master.rules.questions import is_undecided
from oobleck.master.state.reducer.apply import apply
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from support import loops
from support.jobs import job_spec, record
from support.live_agent import FakeAgent, connected, started, told
from support.masters import operator, running, state_of
from support.scenario import Player

START = """
0.0 register n1 n2
0.0 submit demo f=0 min_nodes=2
0.5 ready n1 n2
0.7 enter 1 n1 n2
"""
NEEDED = "job demo-1 needs it: needs at least 2 nodes to hold the model; 1 is live"
KEPT = f"kept so far: {NEEDED}; 'oobleck node drain n2 --force' drains it all the same"


class Slow:
    """A planner whose next plans are there when that is let happen."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.done = False
        self._tell: Callable[[], None] = lambda: None

    def reply(self, request: PlanRequest) -> PlanReply:
        if isinstance(request, NextPlanRequest) and not self.done:
            raise StillPlanning(request)
        return work_out(request)

    def prepare(self) -> None:
        """Nothing to prepare."""

    def want(self, request: PlanRequest | None) -> None:
        if request is not None:
            self.asked.set()

    def foresee(self, requests: tuple[PlanRequest, ...]) -> None:
        """Nothing is made ahead."""

    def listen(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def finish(self) -> None:
        self.done = True
        self._tell()


@asynccontextmanager
async def serving(state_dir: Path, planner: Slow) -> AsyncIterator[str]:
    timing = replace(Detection(), heartbeat_s=0.2, join_settle_s=0.2)
    async with running(state_dir, timing=timing, planner=planner) as master:
        server = grpc.aio.server()
        rpc.add_ControlServicer_to_server(ControlService(master), server)
        rpc.add_OperatorServicer_to_server(operator_service.OperatorService(master), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(grace=0.1)


async def trained(agents: list[FakeAgent], control: rpc.OperatorStub) -> None:
    spec = job_spec("demo", f=0, min_nodes=2, steps=20)
    job_id = await started(agents, control, format_job(spec))
    told(agents, job_id, record(1, 1, 1.0))
    await state_of(control, job_id, "running")


def test_the_answer_waits_for_what_the_planner_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_service, "_FATE_S", 3600.0)

    async def play() -> None:
        planner = Slow()
        async with (
            serving(tmp_path, planner) as address,
            operator(address) as control,
            connected(address, 2) as agents,
        ):
            await trained(agents, control)
            asked = pb.DrainNodesRequest(request_id="d", nodes=["n2"])
            drain = asyncio.ensure_future(control.DrainNodes(asked))
            await planner.asked.wait()
            _, n2 = (await control.ListNodes(pb.ListNodesRequest())).nodes
            assert (n2.state, n2.reason) == ("draining", "an operator wants it so")
            assert not drain.done()
            planner.finish()
            (info,) = (await drain).nodes
            assert (info.state, info.reason) == ("draining", f"an operator wants it so; {KEPT}")
            asked = pb.DrainNodesRequest(request_id="e", nodes=["n2"])
            (again,) = (await control.DrainNodes(asked)).nodes
            assert again.reason == info.reason
            more = pb.DrainNodesRequest(request_id="f", nodes=["n2"], reason="a new fan")
            await control.DrainNodes(more)
            events = [json.loads(one.json) async for one in control.Events(pb.EventsRequest())]
            asked_for = [one["reason"] for one in events if one["event"] == "node_draining"]
            assert asked_for == ["", "a new fan"], "the same again is no event"

    loops.run(play(), limit_s=480)


def test_an_answer_does_not_wait_for_a_plan_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_service, "_FATE_S", 0.05)

    async def play() -> None:
        async with (
            serving(tmp_path, Slow()) as address,
            operator(address) as control,
            connected(address, 2) as agents,
        ):
            await trained(agents, control)
            asked = pb.DrainNodesRequest(request_id="d", nodes=["n2"])
            (info,) = (await control.DrainNodes(asked)).nodes
            assert (info.state, info.reason) == ("draining", "an operator wants it so")

    loops.run(play(), limit_s=480)


def info_of(player: Player, name: str) -> pb.NodeInfo:
    return node_info(player.state, player.state.nodes[NodeName(name)], player.now, 0.0)


def test_it_is_told_what_a_drain_waits_for() -> None:
    player = Player()
    player.play(START + "0.8 drain n2\n")
    wait = "new memory; job demo-1 is starting, and goes on without it after that"
    info = info_of(player, "n2")
    assert (info.reason, info.kept) == (f"{wait} if it can", "")
    player.play("1.0 steps 1 5 1\n")
    info = info_of(player, "n2")
    assert (info.reason, info.kept) == (f"new memory; {KEPT}", NEEDED)
    player.play("2.0 register n3\n2.5 ready n3\n")
    moves = "new memory; work of job demo-1 moves off it at a step boundary"
    info = info_of(player, "n2")
    assert (info.reason, info.kept) == (moves, "")
    player.play("5.0 enter 2 n1 n3\n5.1 steps 6 7 2\n")
    info = info_of(player, "n2")
    assert (info.state, info.reason, info.kept) == ("drained", "new memory", "")


@pytest.mark.parametrize("force", [False, True])
def test_what_was_known_of_a_drain_is_not_known_of_a_forced_one(force: bool) -> None:
    player = Player()
    player.play(START + "1.0 steps 1 5 1\n2.0 drain n2\n")
    node = player.state.nodes[NodeName("n2")]
    assert not is_undecided(player.state, node)
    wish = NodeDrainRequested(node=NodeName("n2"), request_id="again", reason="", force=force)
    player._journal(wish)
    assert is_undecided(player.state, node) is force


def test_a_node_that_trains_an_unknown_job_is_drained_when_that_is_over() -> None:
    player, name = Player(), NodeName("n1")
    player.play("0.0 register n1\n")
    held = NodeHeld(node=name, job_id=JobId("other-1"), queued=False)
    asked = NodeDrainRequested(node=name, request_id="d", reason="new memory", force=False)
    for event in (held, asked):
        apply(player.state, event, now=1.0, unix=1.0)
    context = Context(state=player.state, now=1.0, timing=Detection(), nonce="", planner=AtOnce())
    assert finish(context) is None
    apply(player.state, NodeCleared(node=name), now=2.0, unix=2.0)
    decided = finish(context)
    assert decided is not None
    assert decided.actions == (NodeDrained(node=name),)
