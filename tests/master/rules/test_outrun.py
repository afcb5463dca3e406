"""What a plan for a step boundary says of links that gradients outrun."""

from dataclasses import replace

import pytest

from oobleck.master.events.jobs import PlanMade
from oobleck.master.planning.requests import NextPlanReply, PlanReply, PlanRequest
from oobleck.master.planning.solve import AtOnce
from support.scenario import Player

JOINED_AND_DRAINED = """
0.0 register n1 n2
0.0 submit demo f=0 min_nodes=2
0.5 ready n1 n2
0.7 enter 1 n1 n2
1.0 steps 1 5 1
1.5 register n3
2.0 ready n3
3.0 enter 2 n1 n2 n3
3.1 steps 6 7 2
4.0 drain n2
5.0 enter 3 n1 n3
5.1 steps 8 9 3
"""


class SlowLinks(AtOnce):
    outrun_bytes = 40_000_000

    def reply(self, request: PlanRequest) -> PlanReply:
        reply = super().reply(request)
        if isinstance(reply, NextPlanReply):
            found = reply.candidates
            courses = [
                replace(course, first=replace(course.first, outrun_bytes=self.outrun_bytes))
                for course in found.courses
            ]
            return NextPlanReply.of(replace(found, courses=tuple(courses)))
        return reply


@pytest.mark.parametrize("count", [40_000_000, 0])
def test_the_plan_says_what_is_left_to_the_switch(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(SlowLinks, "outrun_bytes", count)
    monkeypatch.setattr("oobleck.master.rules.reconcile.AtOnce", SlowLinks)
    player = Player()
    player.play(JOINED_AND_DRAINED)
    made = [event for _, event in player.journal if isinstance(event, PlanMade)]
    said = ["about 40 MB are copied at the switch" in event.reason for event in made]
    assert [event.cause for event in made] == ["start", "node joined", "node drained"]
    assert said == [False, count > 0, count > 0]
