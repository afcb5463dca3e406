"""What is told late says when it was, and takes nothing back."""

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.messages import PhaseReached
from support.scenario import Player

START = """
0.0 register n1 n2 n3 n4
0.0 submit demo f=1 min_nodes=2
0.5 ready n1 n2 n3 n4
0.7 enter 1 n1 n2 n3
"""


def test_a_report_that_waited_for_a_session_sets_progress_not_back() -> None:
    player = Player()
    player.play(START + "20.0 steps 1 900 1\n")
    told = PhaseReached(generation=Generation(1), phase="transferred", seconds_ago=299.0)
    player.now = 20.5
    player.report(WorkerId(NodeName("n4"), 0), told)
    job = player.job
    assert job.seen.progressed_at == 20.0
    player.play("21.0 look\n")
    assert job.current.generation == 1, "nobody is made to meet again"


def test_a_phase_was_when_its_worker_told_of_it() -> None:
    player = Player()
    player.play(START)
    player.now = 2.0
    told = PhaseReached(generation=Generation(1), phase="transferred", seconds_ago=0.5)
    player.report(WorkerId(NodeName("n4"), 0), told)
    job = player.job
    assert job.seen.timeline is not None
    assert job.seen.timeline.transferred_at == 1.5
