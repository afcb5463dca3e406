"""What a drill would do, what it refuses, and what it makes of what it saw."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import psutil
import pytest

from oobleck.cli.chaos.drill import KINDS, TO_THE_MASTER, Tally, schedule
from oobleck.cli.chaos.injector import victims
from oobleck.cli.chaos.striker import Striker, check_master_here, master_pid
from oobleck.cli.jobs.checks import all_here, is_here
from oobleck.host.command import CommandFailed
from oobleck.proto import control_pb2 as pb
from support.commands import refused, run
from support.waiting import all_gone, until


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
    assert {node for _, kind, node in strikes if kind not in TO_THE_MASTER} == {"n1", "n2", "n3"}
    assert {node for _, kind, node in strikes if kind in TO_THE_MASTER} == {""}


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


def test_steps_that_were_committed_unseen_are_no_standstill() -> None:
    tally = Tally(began_at=0.0)
    for step in range(1, 11):
        tally.committed(step, float(step))
    tally.committed(18, 18.5)  # the master was away, and training went on
    for step in range(19, 30):
        tally.committed(step, step + 0.5)
    assert tally.recovered(struck_at=10.2) == pytest.approx(1.5)
    assert tally.useful(now=30.0) == pytest.approx(1 - 0.5 / 30)


def test_only_processes_of_this_machine_and_of_that_agent_are_struck() -> None:
    me = pb.NodeInfo(node="n1", hostname=socket.gethostname(), pid=os.getpid())
    assert not is_here(pb.NodeInfo(node="n1", hostname="elsewhere", pid=os.getpid()))
    assert not is_here(me), "a process that is no agent"
    assert not all_here([]), "whose files the nodes will have is not known"
    waits = [sys.executable, "-c", "input('up')", "oobleck-agent"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stdout.read(1), "it has begun"
        mine = pb.NodeInfo(node="n1", state="live", hostname=socket.gethostname(), pid=agent.pid)
        gone = pb.NodeInfo(node="n2", state="lost", hostname="elsewhere", pid=1)
        far = pb.NodeInfo(node="n2", state="live", hostname="elsewhere", pid=agent.pid)
        assert all_here([mine, gone])
        assert not all_here([mine, far])
        assert not all_here([gone])
        agent.communicate(b"\n")
    assert victims("kill-worker", os.getpid(), [os.getppid()]) == [], "no child of the agent's"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--kinds", "kill-worker,kill-all"), "no kind 'kill-all'; there are kill-worker"),
        (("--kinds", "kill-agent"), "--restart-command"),
        (("--kinds", "kill-node"), "--restart-command"),
        (("--kinds", "kill-master"), "--restart-master"),
        (("--kinds", "deaf"), "links are cut and slowed down by who owns the network; there are"),
        (
            ("--kinds", "unplug"),
            "a network is cut by root; name hosts by --ssh HOSTS.txt, as root@",
        ),
        (("--kinds", "clock-back"), "clocks are set by root"),
        (("--mtbf", "often"), "'often' is not a time; write it like 30s"),
        (("--for", "0s"), "'0s' is not a time"),
    ],
)
def test_mistakes(master: str, arguments: tuple[str, ...], part: str) -> None:
    assert part in refused(run("chaos", "x-1", "--master", master, *arguments), 2)


def test_no_such_job(master: str) -> None:
    assert "no job 'x-1'" in refused(run("chaos", "x-1", "--master", master), 3)


def striker(address: str = "127.0.0.1:1", stop_for_s: float = 0.2) -> Striker:
    return Striker(address, stop_for_s=stop_for_s, restart_agent="true {node}", restart_master=None)


def states(pids: Sequence[int]) -> set[str]:
    return {psutil.Process(pid).status() for pid in pids}


def test_a_node_that_is_stopped_goes_on_by_itself(node: pb.NodeInfo) -> None:
    pids, drill = victims("stop-node", node.pid), striker()
    assert len(pids) == 2
    assert pids[-1] == node.pid, "the agent last, who would tell"
    assert drill.strike("stop-node", node) == f"n1 (pid {pids[0]}, {pids[1]})"
    until(lambda: not drill.has_stopped, "the end of the stop")
    until(lambda: psutil.STATUS_STOPPED not in states(pids), "both to go on")


def test_whatever_is_stopped_goes_on_at_the_end(node: pb.NodeInfo) -> None:
    pids, drill = victims("stop-node", node.pid), striker(stop_for_s=600)
    drill.strike("stop-node", node)
    until(lambda: states(pids) == {psutil.STATUS_STOPPED}, "both to stop")
    assert drill.has_stopped
    drill.undo()
    assert not drill.has_stopped
    until(lambda: psutil.STATUS_STOPPED not in states(pids), "both to go on")


def test_a_node_dies_as_a_whole(node: pb.NodeInfo) -> None:
    pids, drill = victims("kill-node", node.pid), striker()
    processes = [psutil.Process(pid) for pid in pids]
    drill.strike("kill-node", node)
    all_gone(processes)
    assert drill.strike("kill-node", node) is None, "the master may take it for live still"
    assert drill.restart("kill-node", "n1") == "true n1"
    assert drill.restart("kill-worker", "n1") is None


def test_strangers_come_to_the_masters_port(master: str) -> None:
    assert striker(master).strike("garbage", None) == f"at {master}"
    assert run("jobs", "--master", master).returncode == 0, "it serves on"
    assert striker().strike("garbage", None) is None, "nobody is there"


def test_a_master_that_is_stopped_goes_on_by_itself(master: str) -> None:
    pid = master_pid(master)
    assert pid is not None
    drill = striker(master, stop_for_s=600)
    assert drill.strike("stop-master", None) == f"(pid {pid})"
    until(lambda: states([pid]) == {psutil.STATUS_STOPPED}, "the master to stop")
    drill.undo()
    assert run("jobs", "--master", master).returncode == 0, "it serves on"


def test_a_master_of_another_machine_is_not_struck() -> None:
    assert master_pid("127.0.0.1:1") is None
    with pytest.raises(CommandFailed, match="--kinds stop-master: the master at 127"):
        check_master_here("stop-master", "127.0.0.1:1")
