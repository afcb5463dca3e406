"""How long a worker must stand by that is slow in training and well alone; `stand_by_again` among
the scenarios tells it once."""

from dataclasses import replace

from oobleck.core.ids import NodeName
from oobleck.master.api.view import node_info
from oobleck.master.events.jobs import PlanMade
from support.scenario import TIMING, Player

#: Nobody waits for steps: the job trains on for hours in few words.
HOURS_S = 80_000.0
PATIENT = replace(
    TIMING, stall_s=HOURS_S, meeting_s=HOURS_S, first_step_s=HOURS_S, stand_by_s=700.0
)
NAMES = "n1 n2 n3 n4 n5"


class Story:
    """A job with a worker that comes and goes."""

    def __init__(self) -> None:
        self.player = Player(PATIENT)
        self.now, self.step = 1.0, 0
        self.player.play(
            f"0.0 register {NAMES}\n0.0 submit demo hidden=1024 steps=1000\n0.5 ready {NAMES}"
        )
        self.enter()

    def play(self, command: str) -> None:
        self.player.play(f"{self.now} {command}")
        self.now += 1.0

    def enter(self) -> None:
        job = self.player.job
        self.step += 1
        self.play(f"enter {job.current.generation} {NAMES}")
        self.play(f"steps {self.step} {self.step} {job.current.generation}")

    def train(self, pace: str = "") -> None:
        self.play(f"compute 5 2 {pace}")
        self.now += 5.0

    def relapse(self) -> float:
        """It is slow in training. How long must it stand by?"""
        self.train("n2/0=20")
        self.enter()
        self.train()
        made = self.player.journal[-2][1]
        assert isinstance(made, PlanMade)
        ((worker, seconds),) = [(each.worker, each.seconds) for each in made.stand_by_for]
        assert (str(worker), made.rule) == ("n2/0", "stand by")
        return seconds

    def recover(self, must_s: float) -> None:
        """It is well alone, and joins once it has stood by for so long."""
        self.play(f"alone {self.step} n2/0=1.4")
        if must_s:
            self.now += must_s - 50.0
            self.play("look")
            assert self.rates == {"n2/0": 0.05}
            self.now += 50.0
            self.play("look")
        assert self.rates == {}
        self.enter()

    @property
    def rates(self) -> dict[str, float]:
        assert self.player.state.job is not None
        return {str(worker): rate for worker, rate in self.player.state.job.rates.items()}

    def stands_by(self) -> str:
        node = self.player.state.nodes[NodeName("n2")]
        return node_info(self.player.state, node, self.player.now, 0.0).reason


def test_each_time_for_twice_as_long_up_to_an_hour() -> None:
    story, waits = Story(), []
    for _ in range(5):
        waits.append(story.relapse())
        story.recover(waits[-1])
    assert waits == [0.0, 1400.0, 2800.0, 3600.0, 3600.0]


def test_after_an_hour_at_work_it_is_the_first_time_again() -> None:
    story = Story()
    assert story.relapse() == 0.0
    story.recover(0.0)
    assert story.relapse() == 1400.0
    story.recover(1400.0)
    story.now += 3700.0
    assert story.relapse() == 0.0


def test_operators_are_told_for_how_long() -> None:
    story, slow = Story(), "n2/0 computes at 0.05 of the others' pace"
    story.relapse()
    assert story.stands_by() == f"stands by: {slow}"
    story.recover(0.0)
    story.relapse()
    assert story.stands_by().startswith("stands by, for 13")
    assert story.stands_by().endswith(f" s at least: {slow}")
    story.now += 1400.0
    story.play("look")
    assert story.stands_by() == f"stands by: {slow}", "it has measured nothing meanwhile"
