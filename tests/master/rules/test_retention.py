"""Nodes that are long gone and jobs that ended long ago are forgotten; what is on disk is not."""

import re
from pathlib import Path

import pytest

from oobleck.core.ids import NodeName
from oobleck.host.detection import Detection
from oobleck.master.__main__ import choose_retention
from oobleck.master.config import Retention
from oobleck.master.events.nodes import NodeForgotten, NodeLost, NodeRegistered
from oobleck.master.loop import Master
from oobleck.master.planning.requests import PlanReply, PlanRequest, StillPlanning
from oobleck.master.planning.solve import AtOnce
from oobleck.master.rules.decision import Decision
from oobleck.master.rules.reconcile import reconcile
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.reducer.apply import apply
from support import loops
from support.agent import facts
from support.jobs import job_spec
from support.masters import running
from support.scenario import Player


async def run(state_dir: Path, jobs: range, keep: int) -> Master:
    """A master on that directory, which these jobs were submitted to and cancelled."""
    async with running(state_dir, retention=Retention(ended_jobs=keep)) as master:
        for number in jobs:
            job_id = await master.requests.submit(f"request {number}", job_spec("demo"))
            assert job_id == f"demo-{number}"
            await master.requests.cancel(f"cancel {number}", job_id)
    return master


def test_the_last_jobs_that_ended_are_known_and_all_files_stay(tmp_path: Path) -> None:
    first = loops.run(run(tmp_path, range(1, 5), keep=2))
    assert list(first.state.jobs) == ["demo-3", "demo-4"]
    assert set(first.state.requests) == {"request 3", "request 4"}
    again = loops.run(run(tmp_path, range(5, 6), keep=2))
    assert list(again.state.jobs) == ["demo-4", "demo-5"]
    for number in range(1, 6):
        events = (tmp_path / "jobs" / f"demo-{number}" / "events.jsonl").read_text()
        assert [line.count('"event":') for line in events.splitlines()] == [1, 1, 1]
    fewer = loops.run(run(tmp_path, range(6, 7), keep=1))
    assert list(fewer.state.jobs) == ["demo-6"]


def test_a_lost_node_is_known_for_as_long_as_was_asked_for() -> None:
    state = ClusterState()
    apply(state, NodeRegistered(facts=facts("n1")), now=0.0, unix=0.0)
    lost = NodeLost(
        node=NodeName("n1"),
        incarnation=state.nodes[NodeName("n1")].facts.incarnation,
        cause="lease",
        reason="",
        detect_s=0.0,
    )
    apply(state, lost, now=10.0, unix=10.0)
    retain = choose_retention("1.5h", 200)

    decided = reconcile(state, 5_400.0, Detection(), nonce="", retain=retain)
    assert (decided.actions, decided.wake_at) == ((), 5_410.0)
    decided = reconcile(state, 5_410.0, Detection(), nonce="", retain=retain)
    assert decided.actions == (NodeForgotten(node=NodeName("n1")),)


class Thinking(AtOnce):
    """A planner that no plan comes of."""

    def reply(self, request: PlanRequest) -> PlanReply:
        raise StillPlanning(request)


def test_old_nodes_are_forgotten_while_a_plan_is_made() -> None:
    player = Player()
    player.play(
        "0.0 register n9\n1.0 close n9\n80.0 register n1 n2 n3 n4\n80.0 submit demo\n"
        "80.5 ready n1 n2 n3 n4\n80.7 enter 1 n1 n2 n3 n4\n81.0 steps 1 5 1\n"
        "82.0 register n5\n82.0 ready n5\n"
    )
    retain = Retention(node_s=60.0)

    def decide() -> Decision:
        return reconcile(
            player.state, 83.0, player.timing, nonce="", planner=Thinking(), retain=retain
        )

    assert decide().actions == (NodeForgotten(node=NodeName("n9")),)
    apply(player.state, NodeForgotten(node=NodeName("n9")), now=83.0, unix=83.0)
    decided = decide()
    assert not decided.actions
    assert decided.awaits is not None
    assert len(decided.awaits.nodes) == 5


@pytest.mark.parametrize(
    ("forget_nodes_after", "keep_jobs", "text"),
    [
        ("soon", 1, "--forget-nodes-after: 'soon' is not a time; write it like 30s, 10m or 1.5h"),
        ("59s", 1, "--forget-nodes-after: 59 s is too short"),
        ("24h", 0, "--keep-jobs 0: is too few"),
    ],
)
def test_what_cannot_be_kept_to_is_refused(
    forget_nodes_after: str, keep_jobs: int, text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        choose_retention(forget_nodes_after, keep_jobs)
