"""What is asked for before a loss is what the loss asks for."""

import pytest

from oobleck.core.ids import NodeName
from oobleck.master.planning.requests import PlanReply, PlanRequest
from oobleck.master.planning.solve import AtOnce
from oobleck.master.rules import reconcile as rules
from oobleck.master.rules.decision import Context
from oobleck.master.rules.next_plan import Foresight
from support.scenario import TIMING, Player

START = """
0.0 register n1 n2 n3 n4 n5
0.0 submit demo f=1 min_nodes=2
0.5 ready n1 n2 n3 n4 n5
0.7 enter 1 n1 n2 n3 n4 n5
1.0 steps 1 5 1
"""


def look(foresight: Foresight, player: Player, now: float) -> tuple[PlanRequest, ...]:
    context = Context(state=player.state, now=now, timing=TIMING, nonce="", planner=AtOnce())
    return foresight.look(context)


@pytest.mark.parametrize("lost", ["n1", "n4"])
def test_a_loss_asks_for_what_was_foreseen(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    player, foresight = Player(), Foresight()
    player.play(START)
    foreseen = look(foresight, player, 1.0)
    assert [set(request.nodes) for request in foreseen] == [
        {NodeName(f"n{number}") for number in range(1, 6) if number != gone} for gone in range(1, 6)
    ]
    asked: list[PlanRequest] = []

    class Recording(AtOnce):
        def reply(self, request: PlanRequest) -> PlanReply:
            asked.append(request)
            return super().reply(request)

    monkeypatch.setattr(rules, "AtOnce", Recording)
    player.play(f"2.0 peer_lost {'n2' if lost == 'n1' else 'n1'}/0 1\n")
    assert look(foresight, player, 2.0) is foreseen, "the first signs of a loss change nothing"
    player.play(f"2.0 close {lost}\n20.0 look\n")
    assert look(foresight, player, 20.0) == (), "they are of a plan that is left"
    job = player.job
    assert lost not in job.current.members
    assert asked[0] == foreseen[int(lost[1:]) - 1]


def test_nothing_is_foreseen_of_a_plan_without_a_step() -> None:
    player, foresight = Player(), Foresight()
    player.play(START.rpartition("1.0")[0])
    assert look(foresight, player, 1.0) == ()
