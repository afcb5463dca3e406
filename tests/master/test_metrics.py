"""What the master counts and reads for its metrics, without a cluster."""

import pytest

from oobleck.core.ids import Incarnation, JobId, NodeName
from oobleck.host.metrics import Family
from oobleck.master.api.interceptor import Calls
from oobleck.master.events.jobs import JobCancelled, PlanMade
from oobleck.master.events.nodes import NodeLost
from oobleck.master.metrics import jobs, nodes
from oobleck.master.metrics.tally import Tally
from oobleck.master.state.cluster import ClusterState
from support.scenario import UNIX, Player

LOST = NodeLost(
    node=NodeName("n1"), incarnation=Incarnation("a"), cause="lease", reason="silent", detect_s=1.0
)

START = (
    "0.0 register n1 n2 n3 n4\n0.0 submit demo\n0.5 ready n1 n2 n3 n4\n0.7 enter 1 n1 n2 n3 n4\n"
)


def values(player: Player, family: Family) -> dict[tuple[str, ...], object]:
    now, tally = player.now, Tally()
    readings = [
        *nodes.read(player.state, tally, now, UNIX + now),
        *jobs.read(player.state, tally, now, UNIX + now),
    ]
    (found,) = (dict(one.values) for one in readings if one.family is family)
    return found


def test_an_event_that_cannot_be_counted_ends_no_master(caplog: pytest.LogCaptureFixture) -> None:
    tally, state = Tally(), ClusterState()
    unknown = JobCancelled(job_id=JobId("gone-1"))
    for event in (unknown, LOST, unknown):
        tally.note(state, event)
    assert tally.nodes_lost["lease"] == 1
    (told,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert told.exc_info is not None


def test_a_node_that_somebody_wanted_away_is_not_lost() -> None:
    player = Player()
    drained = "1.0 steps 1 5 1\n1.5 drain n4\n1.6 enter 2 n1 n2 n3\n1.7 steps 6 6 2\n"
    player.play(START + drained + "2.0 close n4\n9.0 look\n")
    assert values(player, nodes.NODES)["left",] == 1
    assert values(player, nodes.NODES)["lost",] == 0
    player.play("10.0 close n3\n20.0 look\n")
    assert values(player, nodes.STATE).keys() >= {("n4", "left"), ("n3", "lost")}


def test_a_node_that_dies_before_it_is_drained_is_lost() -> None:
    """Nobody wanted that: the job needed it, so it was kept."""
    player = Player()
    start = START.replace("n1 n2 n3 n4", "n1 n2").replace("submit demo", "submit demo f=0")
    player.play(start + "1.0 steps 1 5 1\n2.0 drain n2\n")
    drain = player.state.nodes[NodeName("n2")].drain
    assert drain is not None
    assert drain.kept.startswith("job demo-1 needs it")
    player.play("3.0 close n2\n20.0 look\n")
    assert values(player, nodes.NODES)["lost",] == 1
    assert values(player, nodes.NODES)["left",] == 0


def test_failures_of_a_node_count_for_ten_minutes() -> None:
    player = Player()
    player.play(START + "1.0 close n4\n9.0 look\n")
    assert values(player, nodes.FAILURES)["n4",] == 1
    player.play("590.0 look\n")
    assert values(player, nodes.FAILURES)["n4",] == 1
    player.play("640.0 look\n")
    assert values(player, nodes.FAILURES)["n4",] == 0


def test_a_job_that_has_ended_writes_no_checkpoint_any_more() -> None:
    player = Player()
    player.play(START + "1.0 steps 1 2 1\n1.5 save_failed checkpoint 2 no_space\n")
    assert values(player, jobs.SAVES_FAIL)["demo-1",] == 1
    player.play("2.0 cancel demo-1\n")
    assert values(player, jobs.SAVES_FAIL)["demo-1",] == 0


def test_every_method_may_fail_for_the_first_time() -> None:
    """An alert sees no increase in a series that begins at 1."""
    calls = Calls(lambda: 0.0)
    assert calls.ended["Submit", "INTERNAL"] == 0
    assert ("Session", "INTERNAL") in calls.ended


def test_all_that_can_be_counted_by_cause_is_there_from_the_start() -> None:
    player = Player()
    player.play(START)
    (plan,) = (event for _, event in player.journal if isinstance(event, PlanMade))
    assert values(player, jobs.PLANS)[plan.cause, plan.policy] == 0
    assert values(player, jobs.RECONFIGURATION).keys() >= {("node lost",), ("worker lost",)}
    assert PlanMade.__name__ in Tally().events
