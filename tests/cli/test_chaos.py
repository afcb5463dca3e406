"""What a drill would do, what it refuses, and what it makes of what it saw."""

import os
import socket

import pytest

from oobleck.cli.strikes import KINDS, Tally, schedule
from oobleck.cli.victims import is_here, victim
from oobleck.proto import control_pb2 as pb
from support.commands import refused, run


def drill(seed: int, for_s: float = 100_000) -> list[tuple[float, str, str]]:
    strikes = schedule(
        seed=seed, mtbf_s=30, for_s=for_s, kinds=tuple(KINDS), nodes=("n1", "n2", "n3")
    )
    return [(strike.at_s, strike.kind, strike.node) for strike in strikes]


def test_faults_come_as_often_as_wanted_everywhere_and_the_same_for_a_seed() -> None:
    strikes = drill(1)
    assert strikes == drill(1)
    assert strikes != drill(2)
    assert strikes[:3] == drill(1, for_s=strikes[2][0] + 1e-9)
    assert len(strikes) == pytest.approx(100_000 / 30, rel=0.1)
    assert {kind for _, kind, _ in strikes} == set(KINDS)
    assert {node for _, _, node in strikes} == {"n1", "n2", "n3"}


def test_time_that_stood_still_or_was_lost_is_not_useful() -> None:
    tally = Tally(began_at=0.0)
    for step in range(1, 51):
        tally.committed(step, float(step))  # a second each
    tally.committed(51, 55.0)  # instead of 51
    for step in range(52, 97):
        tally.committed(step, step + 4.0)
    assert tally.recovered(struck_at=50.5) == pytest.approx(5.0)
    assert tally.useful(now=100.0) == pytest.approx(0.96)
    tally.event({"event": "restored", "lost_steps": 6})
    assert tally.useful(now=100.0) == pytest.approx(0.90)
    tally.event({"event": "reconfigured", "redo_step": 51})
    tally.event({"event": "reconfigured", "redo_step": None})
    first, second, third = tally.summary(100.0)
    assert first.startswith(
        "1 fault in 1 min 40 s, 2 reconfigurations, 1 step in flight done again"
    )
    assert "6 committed steps lost" in first
    assert "longest 5.000 s" in second
    assert third == "90.0 % of the time in useful steps"


def test_only_processes_of_this_machine_and_of_that_agent_are_struck() -> None:
    me = pb.NodeInfo(node="n1", hostname=socket.gethostname(), pid=os.getpid())
    assert not is_here(pb.NodeInfo(node="n1", hostname="elsewhere", pid=os.getpid()))
    assert not is_here(me), "a process that is no agent"
    me.workers.add(slot=0, pid=os.getppid())
    assert victim("kill-worker", me) is None, "a worker that is not the agent's child"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--kinds", "kill-worker,kill-master"), "no kind 'kill-master'; there are kill-worker"),
        (("--kinds", "kill-agent"), "--restart-command"),
        (("--mtbf", "often"), "'often' is not a time; write it like 30s"),
        (("--for", "0s"), "'0s' is not a time"),
    ],
)
def test_mistakes(master: str, arguments: tuple[str, ...], part: str) -> None:
    assert part in refused(run("chaos", "x-1", "--master", master, *arguments), 2)


def test_no_such_job(master: str) -> None:
    assert "no job 'x-1'" in refused(run("chaos", "x-1", "--master", master), 3)
