"""The simulator answers a loss and its follow-ups as the master does."""

import dataclasses

import pytest

from oobleck.core.job.spec import RecoveryPolicy
from oobleck.master.events.jobs import PlanMade
from oobleck.master.planning import client
from oobleck.planner.recovery.outlook import Outlook
from oobleck.planner.recovery.terms import Terms
from oobleck.planner.report.account import Result
from oobleck.planner.simulate.compare import set_up
from oobleck.planner.simulate.costs import Costs
from oobleck.planner.simulate.replay import replay
from oobleck.planner.simulate.shapes import Shapes
from oobleck.planner.simulate.trace import Row, trace_of
from support.scenario import Player

NAMES = [f"n{number}" for number in range(1, 7)]
#: n2 is lost, and what is due at step boundaries follows.
LOSS = """\
0.0 register n1 n2 n3 n4 n5 n6
0.0 submit demo f=2 steps=10000 {options}
0.5 ready n1 n2 n3 n4 n5 n6
0.7 enter 1 n1 n2 n3 n4 n5 n6
1.0 steps 1 5 1
2.0 close n2
2.01 peer_lost n1/0 1
2.2 enter 2 n1 n3 n4 n5 n6
2.4 steps 6 6 2
"""


#: A second follow-up.
FURTHER = "2.5 enter 3 n1 n3 n4 n5 n6\n2.6 steps 7 7 3\n"


@pytest.mark.parametrize(
    ("policy", "options", "further"),
    [
        ("auto", "shadows=1", FURTHER),
        ("templates", "templates=1 shadows=0", ""),
        ("templates", "templates=1 shadows=1", ""),
        ("reroute", "reroute=1 shadows=0", ""),
        ("reroute", "reroute=1 shadows=1", FURTHER),
        ("uneven", "uneven=1 shadows=0", ""),
    ],
)
def test_a_loss_is_answered_as_by_the_master(
    policy: RecoveryPolicy, options: str, further: str
) -> None:
    player = Player()
    player.play(LOSS.format(options=options) + further)
    _, *made = [event for _, event in player.journal if isinstance(event, PlanMade)]
    job = player.state.job
    assert job is not None
    members = [player.state.nodes[name] for name in job.current.members]
    planning = client.planning(job, members, Outlook())
    shapes = Shapes(
        Terms(
            profile=planning.profile,
            sizes=range(planning.least_nodes, planning.most_nodes + 1),
            fault_tolerance=planning.fault_tolerance,
            tied=planning.tied,
            schedule=None,
            shadows=planning.shadows,
        ),
        microbatches=job.spec.training.microbatches,
    )
    step_s = shapes.first(len(NAMES)).step_s
    rows = [*(Row(0.0, "add", name) for name in NAMES), Row(5.5 * step_s, "remove", "n2")]

    def found(until_s: float) -> Result:
        trace, count = trace_of(rows), len(NAMES)
        costs = Costs(checkpoint_every_s=0)
        setting = set_up(trace, shapes, nodes=count, costs=costs, until_s=until_s)
        return replay(dataclasses.replace(setting, steps=job.spec.training.steps), policy)

    early, late = found(100), found(200)
    assert [early.account.counts[event.policy, event.rule] for event in made] == [1] * len(made)
    assert early.account.counts.total() == 1 + len(made), "beside the first plan"
    expected = made[-1].expected
    assert expected is not None
    assert 100 * late.account.batch / (late.samples - early.samples) == pytest.approx(
        expected.step_s, rel=1e-3
    )
    forced = [event.expected for event in made if event.expected and not event.boundary]
    waited = sum(each.transfer_s or 0.0 for each in forced)
    assert early.data()["badput"].get("transfer", 0) == pytest.approx(waited, abs=1e-6)
