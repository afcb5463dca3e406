"""`oobleck up --rolling`: a job trains on while the agents below it are restarted in turn."""

import asyncio
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.support.client import read_lines
from bench.support.daemons import descendants
from bench.support.preloaded import Preloaded
from oobleck.cli.chaos.injector import kill
from oobleck.cli.client import MasterClient
from oobleck.cli.ssh import rolling
from oobleck.cli.ssh.hosts import HostFailed
from oobleck.cli.ssh.payload import installed_wheel
from oobleck.proto import control_pb2 as pb
from support.commands import end
from support.folders import TEXT
from support.installed import install
from support.operators_master import answering
from support.secured import Secured
from support.ssh_hosts import PYTHON, SshHosts
from support.waiting import all_gone, until

NODES = ("n1", "n2", "n3")
JOB = {
    "name": "tiny",
    "model": {"kind": "gpt", "layers": 2, "hidden": 16, "heads": 2, "sequence_length": 16},
    "data": {"text": [TEXT]},
    "training": {"steps": 1_000_000, "global_batch": 6, "microbatch": 1},
    "fault_tolerance": 1,
    "profile": "estimate",
}


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    cluster = Secured(tmp_path)
    yield cluster
    end(cluster.process)


@pytest.fixture
def hosts(preloaded: Preloaded) -> Iterator[SshHosts]:
    folder = Path(tempfile.mkdtemp(prefix="oobleck-ssh-"))
    preloaded.wait()
    with SshHosts(folder, list(NODES), preloaded.python_path) as hosts:
        yield hosts
        agents = [agent_of(hosts, name) for name in NODES if place(hosts, name).exists()]
        trees = [one for agent in agents for one in descendants(agent.pid)]
        kill([process.pid for process in reversed(trees)])
        all_gone(trees)
    shutil.rmtree(folder)


def place(hosts: SshHosts, name: str) -> Path:
    return hosts.home(name) / ".oobleck" / "up" / "agent.json"


def agent_of(hosts: SshHosts, name: str) -> psutil.Process:
    return psutil.Process(json.loads(place(hosts, name).read_text())["pid"])


def in_plan(secured: Secured, job_id: str) -> set[str]:
    status = json.loads(secured.oobleck("status", job_id, "--json").stdout)
    pipelines = status["plan"]["pipelines"] if status["plan"] else []
    return {node for pipeline in pipelines for node in pipeline["nodes"]}


def await_plan(secured: Secured, job_id: str, nodes: set[str]) -> None:
    """To ask takes a command, and so a third of a second of a core."""
    until(lambda: in_plan(secured, job_id) == nodes, f"a plan of {nodes}", poll_s=0.5)


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_agents_are_restarted_in_turn_and_no_step_is_lost(
    hosts: SshHosts, secured: Secured, tmp_path: Path
) -> None:
    wheel = installed_wheel(install(tmp_path / "site-packages"), tmp_path)
    listed = tmp_path / "hosts.txt"

    def up(*options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        ssh = ("--identity", str(hosts.identity), "--known-hosts", str(hosts.known_hosts))
        there = ("--python", PYTHON, "--directory", ".oobleck/up", "--run-as", "root")
        with_wheel = ("up", str(listed), "--wheel", str(wheel), *ssh, *there)
        done = secured.oobleck(*with_wheel, *options)
        assert done.returncode == code, done
        return done

    # How Oobleck is installed is proven elsewhere: the others have what the first one got.
    listed.write_text(hosts.line(NODES[0]))
    assert "these agents run no code that comes with jobs" in up().stderr
    for name in NODES[1:]:
        place(hosts, name).parent.mkdir(parents=True)
        (place(hosts, name).parent / "venvs").symlink_to(place(hosts, NODES[0]).parent / "venvs")
    listed.write_text("".join(map(hosts.line, NODES)))
    up()
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    job_id = secured.oobleck("submit", str(tmp_path / "job.yaml")).stdout.strip()
    await_plan(secured, job_id, set(NODES))
    before = {name: agent_of(hosts, name) for name in NODES}
    listed.write_text("".join(f"{hosts.line(name).strip()} workers=1\n" for name in NODES))
    done = up("--rolling", "1")
    assert [line.split()[0] for line in done.stdout.splitlines()[:-1]] == [
        line.split()[0] for line in turns(done.stderr)
    ]
    assert all("started anew" in line for line in done.stdout.splitlines()[:-1])
    assert in_plan(secured, job_id) == set(NODES)
    assert not {agent.pid for agent in before.values() if agent.is_running()}
    assert set(secured.states().values()) == {"live"}

    folder = tmp_path / "state" / "jobs" / job_id
    events = folder / "events.jsonl"
    # A change is recorded once its first step is done.
    until(lambda: not one_at_a_time(read_lines(events))[1], "the record of the last return")
    assert one_at_a_time(read_lines(events)) == (3, set())
    # More at a time than the job can spare: the others wait until one is back.
    listed.write_text("".join(f"{hosts.line(name).strip()} workers=1 rack=r1\n" for name in NODES))
    done = up("--rolling", "3")
    assert all("started anew" in line for line in done.stdout.splitlines()[:-1])
    assert in_plan(secured, job_id) == set(NODES)
    until(lambda: not one_at_a_time(read_lines(events))[1], "the record of the last return")
    assert one_at_a_time(read_lines(events)) == (6, set())

    # A node that an operator has drained stays so; one that a job cannot spare ends the roll.
    assert secured.oobleck("node", "drain", "n3", "--reason", "bad DIMM", "--wait").returncode == 0
    await_plan(secured, job_id, {"n1", "n2"})
    there = {name: f"{hosts.line(name).strip()} workers=1 rack=r1" for name in NODES}
    listed.write_text(f"{there['n1']}\n{there['n2']}\n{there['n3']} device=cpu\n")
    (told,) = (line for line in up("--rolling", "1").stdout.splitlines() if "anew" in line)
    assert told.split()[0] == "n3"
    listed.write_text("".join(f"{line} device=cpu\n" for line in there.values()))
    told = up("--rolling", "1", code=1).stdout
    assert f"it cannot be drained: {rolling.REASON}; kept so far: job {job_id} needs it" in told
    assert secured.states() == {"n1": "live", "n2": "live", "n3": "drained"}
    up("--rolling", "1", "--force")
    assert in_plan(secured, job_id) == {"n1", "n2"}
    nodes = json.loads(secured.oobleck("nodes", "--json").stdout)
    assert {node["node"]: node["reason"] for node in nodes}["n3"] == "bad DIMM"
    secured.oobleck("cancel", job_id)
    steps = [line["step"] for line in read_lines(folder / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))


def turns(told: str) -> list[str]:
    """The lines of progress about the ends of turns."""
    return [line for line in told.splitlines() if line.endswith("waiting until it takes part")]


def one_at_a_time(events: list[dict[str, Any]]) -> tuple[int, set[str]]:
    """How many nodes have left the plan, and who is not back; at most one was out at a time."""
    members, out, number = set(NODES), set[str](), 0
    for event in events:
        if event["event"] == "reconfigured":
            after = event["pipelines_after"]
            now = {stage["node"] for pipeline in after for stage in pipeline}
            out = (out | members) - now
            number += len(members - now)
            members = now
            assert len(out) <= 1
    return number, out


class Drains:
    """A master's double, which drains a node as a test wants it."""

    def __init__(self, state: str, becomes: str, reason: str = "", kept: str = "") -> None:
        self.info = pb.NodeInfo(node="n1", state=state, reason=reason, kept=kept)
        self._drained = pb.NodeInfo(node="n1", state=becomes, reason=reason, kept=kept)
        #: Calls that change the node: True, a forced drain; False, another; None, its end.
        self.calls = list[bool | None]()

    def drain(self, request: pb.DrainNodesRequest) -> pb.DrainNodesReply:
        self.calls.append(request.force)
        self.info = self._drained
        return pb.DrainNodesReply(nodes=[self.info])

    def undrain(self, request: pb.UndrainNodeRequest) -> pb.NodeInfo:
        self.calls.append(None)
        self.info = pb.NodeInfo(node="n1", state="live")
        return self.info

    def turns(self, *names: str, force: bool = False) -> list[str]:
        """The outcomes of the nodes' turns; empty: restarted."""
        with answering(
            ListNodes=lambda request: pb.ListNodesReply(nodes=[self.info]),
            DrainNodes=self.drain,
            UndrainNode=self.undrain,
        ) as address:
            return asyncio.run(self._turns(address, names, force))

    async def _turns(self, address: str, names: tuple[str, ...], force: bool) -> list[str]:
        with MasterClient(address) as master:
            roll = rolling.Rolling(master, 1, force=force)
            return [await self._outcome(roll, name) for name in names]

    async def _outcome(self, roll: rolling.Rolling, name: str) -> str:
        try:
            async with roll.turn(name, lambda _: None):
                return ""
        except HostFailed as failed:
            return str(failed)


KEPT = "it has the only copy"


@pytest.mark.parametrize("before", ["live", "draining"])
def test_a_node_that_is_kept_goes_on_and_ends_the_roll(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rolling, "KEPT_S", 0.0)
    master = Drains(before, "draining", f"maintenance; kept so far: {KEPT}", KEPT)
    first, second = master.turns("n1", "n2")
    assert first == f"it cannot be drained: maintenance; kept so far: {KEPT}"
    assert second.startswith("not restarted, because the roll ended at n1;")
    assert master.calls == ([False, None] if before == "live" else [])


def test_a_node_that_is_not_drained_in_time_ends_the_roll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling, "DRAINED_S", 0.0)
    assert Drains("live", "draining").turns("n1") == ["it is not drained after 0 s: "]


@pytest.mark.parametrize("state", ["drained", "quarantined", "lost", "left"])
def test_a_node_that_is_out_stays_as_it_is(state: str) -> None:
    master = Drains(state, "drained", "bad DIMM")
    assert master.turns("n1") == [""]
    assert master.calls == []
    assert master.info.reason == "bad DIMM"


@pytest.mark.parametrize("state", ["drained", "lost", "left"])
def test_a_node_without_work_is_restarted(state: str) -> None:
    master = Drains("live", state)
    assert master.turns("n1") == [""]
    assert master.calls == [False, None]


def test_a_roll_by_force_forces_its_drains() -> None:
    master = Drains("live", "drained")
    assert master.turns("n1", force=True) == [""]
    assert master.calls == [True, None]
