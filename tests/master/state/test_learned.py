"""What the master learns from losses and transfers, for the next choice."""

import math
from pathlib import Path

import pytest

from oobleck.core.ids import NodeName
from oobleck.host.detection import Detection
from oobleck.master.api.view import job_status, node_info
from oobleck.master.config import MasterConfig
from oobleck.master.events.jobs import PlanMade
from oobleck.master.rules.questions import outlook
from oobleck.planner.recovery.outlook import BACK_S, REJOIN_S, SALVAGE, SWITCH_S
from support.scenario import Player

#: State takes seconds to move, until {end}.
LOSS = """
0.0 submit demo hidden=5120 sequence=1 memory=68719476736 f=1 shadows=0 templates=1 steps=100000
0.1 register n1 n2 n3 n4 n5
0.5 ready n1 n2 n3 n4 n5
0.7 enter 1 n1 n2 n3 n4 n5
1.0 steps 1 5 1
2.0 close n3
2.01 peer_lost n4/0 1
2.5 phase aborted 2 n1 n2 n4 n5
3.0 phase joined 2 n1 n2 n4 n5
"""
ENTERED = """
{end} phase transferred 2 n1 n2 n4 n5 bytes={each}
{after} steps 6 6 2
"""
LABELLED = "register n1 n2 n3%r1 n4%r1 n5%r2"


def play_loss(player: Player) -> tuple[float, int]:
    """Return the expected seconds and bytes of the transfer."""
    player.play(LOSS)
    made = [event for _, event in player.journal if isinstance(event, PlanMade)][-1]
    assert made.expected is not None
    moved_s = made.expected.transfer_s
    assert moved_s is not None
    # The whole step is over by the clock, and some of it is kept.
    step_s = player.job.seen.steps.recent[-1].step_seconds
    assert made.expected.redone_s == pytest.approx((1 - SALVAGE) * step_s)
    assert made.expected.stall_s == moved_s + REJOIN_S > 1
    return moved_s, made.expected.moved_bytes


@pytest.mark.parametrize("transfer", [5.0, 20.0])
def test_the_next_transfer_is_expected_to_take_as_long_as_the_last_did(transfer: float) -> None:
    player = Player()
    expected_s, moved_bytes = play_loss(player)
    end = 3.0 + transfer
    player.play(ENTERED.format(end=end, after=end + 0.1, each=moved_bytes // 4))
    learned = player.job.lineage.transfers
    assert learned == pytest.approx((transfer / expected_s) ** 0.5, rel=0.02)
    assert (learned > 1) == (transfer > expected_s)
    player.play(f"{end + 1} restart\n")
    assert player.job.lineage.transfers == learned


def test_a_transfer_tells_only_of_the_bytes_that_it_moved() -> None:
    """A loss within another change may find all of the state in place, or a part."""
    player = Player()
    play_loss(player)
    player.play(ENTERED.format(end=3.001, after=3.1, each=0))
    assert player.job.lineage.transfers == 1.0
    player = Player()
    expected_s, moved_bytes = play_loss(player)
    player.play(
        ENTERED.format(end=3.0 + expected_s / 4, after=9.0 + expected_s, each=moved_bytes // 16)
    )
    assert player.job.lineage.transfers == pytest.approx(1.0, rel=0.02)


def test_changes_are_expected_to_take_what_the_last_ones_took() -> None:
    player = Player()
    _, moved_bytes = play_loss(player)
    player.play(ENTERED.format(end=5.0, after=5.1, each=moved_bytes // 4))
    seen_s = 1.0  # it took half a second to leave the step, and half to meet
    rejoin_s = math.sqrt(REJOIN_S * seen_s)
    assert player.job.lineage.rejoin_s == pytest.approx(rejoin_s, rel=0.02)
    assert player.job.lineage.salvage == pytest.approx(SALVAGE * 7 / 8), "nothing was kept"
    # Nobody waits at the boundary at which a node joins.
    player.play("6.0 register n3\n6.5 ready n3\n20.0 enter 3 n1 n2 n3 n4 n5\n")
    assert outlook(player.state, player.job, player.now).step_s is None, "of the plan before"
    player.play("20.2 steps 7 8 3\n21.0 restart\n22.0 reconnect n1 n2 n3 n4 n5\n")
    learned = outlook(player.state, player.job, player.now)
    assert learned.rejoin_s == pytest.approx(rejoin_s, rel=0.02)
    assert learned.switch_s == pytest.approx(SWITCH_S * 7 / 8)
    assert learned.step_s == 0.1


def test_losses_are_counted_and_known_after_a_restart() -> None:
    player = Player()
    player.play(LOSS + ENTERED.format(end=4.0, after=4.1, each=100))
    losses = player.state.losses
    assert sum(losses.events.values()) == pytest.approx(1.0, rel=1e-3)
    assert set(losses.away) == {"n3"}
    player.play("10.0 restart\n11.0 reconnect n1 n2 n4 n5\n")
    assert player.state.losses.vacant == 1, "a node whose session begins anew replaces none"
    player.play("12.0 register n3\n")
    assert (player.state.losses.vacant, round(player.state.losses.joins)) == (0, 1)
    assert player.state.losses.events == pytest.approx(losses.events, rel=1e-3)
    assert player.state.losses.back_s == [pytest.approx(10.0, abs=0.1)]
    # Whoever leaves in order does not fail.
    player.play("20.0 leave n5\n")
    assert sum(player.state.losses.events.values()) == pytest.approx(1.0, rel=1e-3)


def test_racks_are_journaled_and_their_losses_are_one_event() -> None:
    """Two of five nodes are a rack; both are lost, and the master starts anew."""
    player = Player()
    player.play(LOSS.replace("register n1 n2 n3 n4 n5", LABELLED))
    player.play(ENTERED.format(end=4.0, after=4.1, each=100))
    state = player.state
    node = state.nodes[NodeName("n4")]
    assert node_info(state, node, 5.0, 5.0).rack == "r1"
    assert state.losses.whole_racks == 0
    player.play("20.0 close n4\n20.01 peer_lost n5/0 2\n20.1 restart\n")
    losses = player.state.losses
    assert losses.whole_racks == pytest.approx(1.0, rel=1e-3)
    assert losses.seen == pytest.approx(1.0, rel=1e-3)


def test_one_odd_step_changes_no_expectation() -> None:
    player = Player()
    player.play(
        "0.1 submit demo checkpoint=2 steps=1000\n0.2 register n1 n2\n0.5 ready n1 n2\n"
        "0.7 enter 1 n1 n2\n2.0 steps 1 9 1\n"
    )
    usual = outlook(player.state, player.job, 2.05)
    player.play("30.0 steps 10 10 1 28.0\n")
    odd = outlook(player.state, player.job, 30.05)
    assert odd.kept == pytest.approx(usual.kept)
    assert odd.every_steps == pytest.approx(usual.every_steps, rel=0.01)


def test_a_return_is_expected_to_take_what_the_last_ones_took() -> None:
    player = Player()
    player.play(
        "0.1 submit demo checkpoint=1 morph=1 shadows=0\n0.2 register n1 n2 n3 n4\n"
        "0.5 ready n1 n2 n3 n4\n0.7 enter 1 n1 n2 n3 n4\n1.0 steps 1 40 1\n2.0 saved 40\n"
        "3.0 close n4\n3.01 peer_lost n3/0 1\n"
        "4.0 restored 40 2 n1 n2 n3\n"  # with their word that they have left the step
        "8.0 phase joined 2 n1 n2 n3\n8.0 phase transferred 2 n1 n2 n3\n8.5 steps 41 41 2\n"
    )
    expected = math.sqrt(BACK_S * (8.0 - 3.01 - REJOIN_S))
    assert player.job.lineage.rejoin_s == REJOIN_S, "loading is no meeting"
    assert player.job.lineage.back_s == pytest.approx(expected)
    player.play("9.0 restart\n10.0 reconnect n1 n2 n3\n")
    assert outlook(player.state, player.job, 11.0).back_s == pytest.approx(expected)
    player.play("12.0 close n3\n12.01 peer_lost n2/0 2\n")
    made = [event for _, event in player.journal if isinstance(event, PlanMade)][-1]
    assert made.restore
    assert made.expected is not None
    assert made.expected.redone_s is not None
    assert made.expected.redone_s >= 0.1, "the step behind the checkpoint"
    assert made.expected.stall_s == pytest.approx(player.job.lineage.rejoin_s + expected)


def test_what_was_learned_decides_the_next_answer() -> None:
    player = Player()
    expected_s, moved_bytes = play_loss(player)
    fresh = outlook(player.state, player.job, player.now)
    player.play(ENTERED.format(end=43.0, after=43.1, each=moved_bytes // 4))
    player.play("50.0 register n3\n60.0 close n4\n60.01 peer_lost n5/0 2\n")
    made = [event for _, event in player.journal if isinstance(event, PlanMade)][-1]
    learned, losses = outlook(player.state, player.job, player.now), player.state.losses
    assert learned.transfers == player.job.lineage.transfers > 2
    assert made.expected is not None
    assert made.expected.transfer_s is not None
    assert made.expected.transfer_s > 2 * expected_s * made.expected.moved_bytes / moved_bytes
    assert learned.per_node_s == pytest.approx(losses.per_node_s(player.job.spec.recovery.mtbf_s))
    assert learned.per_node_s > 1.5 * fresh.per_node_s
    assert learned.seen_per_node_s == losses.seen_per_node_s > fresh.seen_per_node_s
    config = MasterConfig(listen="127.0.0.1:0", state_dir=Path("/nowhere"), timing=Detection())
    told = job_status(player.state, player.job, config, player.now).outlook
    assert told.losses_per_node_day == pytest.approx(86_400 * learned.per_node_s)
    members = len(player.job.current.members)
    assert told.next_loss_s == pytest.approx(1 / learned.per_node_s / members)
    assert (told.prior_mtbf_s, round(told.seen)) == (player.job.spec.recovery.mtbf_s, 2)
    assert told.back_s == pytest.approx(48.0, abs=0.1)
    player.state.losses.events = {1: 1.0, 3: 2.0}
    assert outlook(player.state, player.job, player.now).sizes == ((1, 0.5), (3, 0.5))
    assert learned.joins_per_s == pytest.approx(losses.joins_per_s(0.1), rel=0.01)
    assert learned.joins_per_s > 0
