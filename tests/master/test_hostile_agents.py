"""An agent that lies, in a job that others train: nothing comes of it but for its own node."""

import json
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oobleck.core.ids import Generation, Incarnation, JobId, NodeName
from oobleck.core.messages import Evaluated
from oobleck.master.clients import outbox
from oobleck.master.events.nodes import NodeLost
from oobleck.master.inbox import Incoming, Records
from oobleck.master.loop import Master
from oobleck.proto.assignments import MOST_TERM
from oobleck.proto.types import (
    Assignment,
    NodeStatus,
    Registration,
    WorkerExited,
    WorkerReport,
    WorkerStatus,
)
from support import hostile_agent, loops
from support.agent import facts
from support.jobs import evaluation, job_spec, record
from support.live_agent import LocalAgent
from support.masters import running

STEPS = 6
JOB = JobId("demo-1")
MEMBERS = tuple(NodeName(f"n{number}") for number in range(1, 5))
#: Its slots are not those of the others: it is in no plan.
OUTSIDER = NodeName("n9")
PROCESSES = {name: Incarnation(f"{name}-process") for name in (*MEMBERS, OUTSIDER)}
FRESH = Incarnation("n1-process-of-later")
T = TypeVar("T")


@dataclass
class Cluster:
    """Four nodes whose agents tell what is true, as fast as the master takes it."""

    master: Master
    agents: dict[NodeName, LocalAgent] = field(default_factory=dict)

    async def begin(self) -> None:
        for name in (*MEMBERS, OUTSIDER):
            there = facts(name, worker_slots=2 if name == OUTSIDER else 1)
            self.agents[name] = await LocalAgent.admitted(self.master, there)
        spec = job_spec("demo", steps=STEPS, evaluate=2, min_nodes=2, f=1, shadows=0)
        assert await self.master.requests.submit("r", spec) == JOB
        for name in MEMBERS:
            await self.is_at(name, 0, 0)
        while self.job.current.made is None:
            await self.turned()

    @property
    def job(self) -> Any:
        return self.master.state.jobs[JOB]

    async def turned(self) -> None:
        for _ in range(2):
            await self.master.requests.undrain("r", NodeName("nobody"))

    async def is_at(
        self, name: NodeName, generation: int, step: int, finished: bool = False
    ) -> None:
        agent = self.agents[name]
        agent.change(job_id=JOB, generation=Generation(generation))
        agent.worker(
            0,
            incarnation=PROCESSES[name],
            pid=2,
            card=f"{name}:4000",
            generation=Generation(generation),
            committed_step=step,
            stepped=Generation(generation if step else 0),
            finished=finished,
        )
        await agent.tell()

    async def step(self, number: int, truthful: Sequence[NodeName]) -> None:
        """All commit it, in whatever plan there is; until the master has its record."""
        while self.master.archive.metrics(JOB).through_step < number:
            generation = self.job.current.generation
            for name in self.job.current.members:
                await self.is_at(name, generation, number)
                if name in truthful:
                    told = record(number, generation, float(number))
                    await self.agents[name].say(Records(job_id=JOB, records=(told,)))
            await self.turned()
        assert self.job.seen.steps.furthest_step <= number
        if number % 2:
            return
        while self.master.archive.evaluations(JOB).stored_step < number:
            generation = self.job.current.generation
            told_of = Evaluated(record=evaluation(number, generation, float(number)))
            for name in set(self.job.current.members) & set(truthful):
                await self.agents[name].say(self.agents[name].report(told_of))
            await self.turned()
            if generation != self.job.current.generation:
                for name in self.job.current.members:
                    await self.is_at(name, self.job.current.generation, number)

    async def end(self) -> None:
        while self.job.finished_at == 0.0:
            for name in self.job.current.members:
                await self.is_at(name, self.job.current.generation, STEPS, finished=True)
            await self.turned()


def play(state_dir: Path, what: Callable[[Cluster], Coroutine[Any, Any, T]]) -> T:
    """Run `what` once the job has its first plan."""

    async def all_of_it() -> T:
        async with running(state_dir, validate=True) as master:
            cluster = Cluster(master)
            await cluster.begin()
            return await what(cluster)

    return loops.run(all_of_it())


@dataclass(frozen=True)
class Outcome:
    state: str
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    events: list[tuple[Any, ...]]
    convicted: set[str]


def train(
    said: Sequence[Sequence[Incoming]],
    liar: NodeName,
    registers: Callable[[Cluster], Iterator[Registration]] = lambda cluster: iter(()),
) -> Outcome:
    """What is left of a job in which the liar says so, and registers so, before each step."""
    truthful = [name for name in MEMBERS if name != liar]

    async def all_steps(cluster: Cluster) -> str:
        for step in range(1, STEPS + 1):
            for message in said[step - 1]:
                await cluster.agents[liar].say(message)
            for registration in registers(cluster):
                await cluster.master.sessions.open(registration)
            await cluster.step(step, truthful)
        await cluster.end()
        return str(cluster.job.state)

    with TemporaryDirectory() as folder:
        state = play(Path(folder), all_steps)
        files = Path(folder) / "jobs" / JOB

        def lines(name: str) -> list[dict[str, Any]]:
            return [json.loads(line) for line in (files / name).read_text().splitlines()]

        events = lines("events.jsonl")
        bad = ("node_lost", "worker_lost", "node_left_out", "node_quarantined", "node_reset")
        return Outcome(
            state=state,
            metrics=lines("metrics.jsonl"),
            evaluations=lines("evaluations.jsonl"),
            events=[(e["event"], e.get("node"), e.get("generation")) for e in events],
            convicted={e["node"] for e in events if e["event"] in bad},
        )


@pytest.fixture(scope="module")
def calm() -> Outcome:
    return train([()] * STEPS, OUTSIDER)


def has_fresh() -> NodeStatus:
    """A worker that no plan counts on yet stands in the first slot."""
    fresh = WorkerStatus(slot=0, incarnation=FRESH, pid=2, card="n1:4001")
    return NodeStatus(job_id=JOB, workers=(fresh,))


def test_nobody_else_ends_a_process_that_no_plan_counts_on_yet(tmp_path: Path) -> None:
    """What stands in a slot while the job waits for nodes is in its own node's status alone."""

    async def lie(cluster: Cluster) -> None:
        await cluster.agents[MEMBERS[0]].say(has_fresh())
        ended = WorkerExited(pid=2, exit_code=None, signal=9)
        for name, counts in ((MEMBERS[1], False), (MEMBERS[0], True)):
            report = WorkerReport(job_id=JOB, slot=0, incarnation=FRESH, what=ended)
            await cluster.agents[name].say(report)
            await cluster.turned()
            assert cluster.job.seen.is_gone(FRESH) is counts
        assert cluster.master.sessions.refused["a report of another one's process"] == 1

    play(tmp_path, lie)


def test_a_lost_node_keeps_no_process_from_its_own_node(tmp_path: Path) -> None:
    async def lie(cluster: Cluster) -> None:
        state = cluster.master.state
        for name in (OUTSIDER, MEMBERS[0]):
            await cluster.agents[name].say(has_fresh())
        await cluster.turned()
        assert state.nodes[MEMBERS[0]].seen.status.workers == (), "the first one has it"
        facts = state.nodes[OUTSIDER].facts
        lost = NodeLost(
            node=OUTSIDER,
            incarnation=facts.incarnation,
            cause="lease",
            reason="silent",
            detect_s=0.0,
        )
        cluster.master._ledger.journal(lost)
        await cluster.agents[MEMBERS[0]].say(has_fresh())
        await cluster.turned()
        (worker,) = state.nodes[MEMBERS[0]].seen.status.workers
        assert worker.incarnation == FRESH

    play(tmp_path, lie)


def test_a_new_session_reads_no_faster_than_the_one_before(tmp_path: Path) -> None:
    async def register_again(cluster: Cluster) -> None:
        before = await LocalAgent.admitted(cluster.master, cluster.agents[OUTSIDER].facts)
        now, burst = 0.0, outbox.MESSAGES_AT_ONCE
        assert before.session.pace.owe(2 * burst, now) > 0
        again = await LocalAgent.admitted(cluster.master, cluster.agents[OUTSIDER].facts)
        assert again.session.pace.owe(1, now) > 0

    play(tmp_path, register_again)


def _said(*processes: Incarnation, ends: bool = True) -> st.SearchStrategy[list[list[Incoming]]]:
    one = st.lists(hostile_agent.words(JOB, processes, ends), max_size=6)
    return st.lists(one, min_size=STEPS, max_size=STEPS)


OFTEN = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def _edges(process: Incarnation) -> list[list[Incoming]]:
    steps = range(1, STEPS + 1)
    return [list(hostile_agent.at_edges(JOB, process, Generation(1), step)) for step in steps]


def _ends(process: Incarnation) -> list[list[Incoming]]:
    """One in each step."""
    found = hostile_agent.ends(Generation(1))
    assert len(found) == STEPS
    return [[WorkerReport(job_id=JOB, slot=0, incarnation=process, what=what)] for what in found]


@pytest.mark.parametrize("whose", [OUTSIDER, MEMBERS[0]])
def test_a_node_in_no_plan_changes_nothing(calm: Outcome, whose: NodeName) -> None:
    assert calm.state == "succeeded"
    assert train(_edges(PROCESSES[whose]), OUTSIDER) == calm
    assert train(_ends(PROCESSES[whose]), OUTSIDER) == calm


@OFTEN
@given(said=_said(*PROCESSES.values()))
def test_whatever_a_node_in_no_plan_says_changes_nothing(
    calm: Outcome, said: list[list[Incoming]]
) -> None:
    assert train(said, OUTSIDER) == calm


def _registrations(cluster: Cluster) -> Iterator[Registration]:
    """As of a process that follows another head, or trains by a plan that the journal lacks."""
    state, made = cluster.master.state, cluster.job.current.made
    own, mine = state.head, cluster.agents[OUTSIDER].registration()
    change = msgspec.structs.replace
    assert own is not None
    yield change(mine, status=NodeStatus(job_id=JOB, workers=(_worker_of(MEMBERS[0]),)))
    for head in (
        change(own, start="0" * 16, sequence=2**62),
        change(own, term=own.term + 1, begun_by="0" * 16, start="0" * 16),
        change(own, term=MOST_TERM, begun_by="0" * 16, start="0" * 16, sequence=2**62),
    ):
        later = with_fields(made.assign.plan, generation=made.plan.generation + 1)
        running = Assignment(
            version=2**62, job_id=JOB, assign=msgspec.structs.replace(made.assign, plan=later)
        )
        yield change(mine, acted_on=head, running=running)
    yield change(mine, facts=change(mine.facts, incarnation=PROCESSES[MEMBERS[0]]))


def _worker_of(name: NodeName) -> WorkerStatus:
    return WorkerStatus(slot=0, incarnation=PROCESSES[name], pid=2, committed_step=STEPS)


def test_however_a_node_in_no_plan_registers_nothing_of_the_job_changes(calm: Outcome) -> None:
    terms = 0

    def registers(cluster: Cluster) -> Iterator[Registration]:
        nonlocal terms
        yield from _registrations(cluster)
        terms = len(cluster.master.state.history.terms)

    found = train([()] * STEPS, OUTSIDER, registers)
    assert terms == 4, "its own, and three"
    assert with_fields(found, events=[]) == with_fields(calm, events=[])
    of_others = [one for one in found.events if one[1] != OUTSIDER]
    assert of_others == calm.events


def _is_as_calm(found: Outcome, calm: Outcome) -> None:
    def trained(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**line, "generation": 0, "time": 0.0} for line in lines]

    assert found.state == "succeeded"
    assert trained(found.metrics) == trained(calm.metrics)
    assert trained(found.evaluations) == trained(calm.evaluations)
    assert found.convicted <= {MEMBERS[-1]}


def test_a_member_that_says_what_is_not_so_changes_nothing(calm: Outcome) -> None:
    found = train(_edges(PROCESSES[MEMBERS[-1]]), MEMBERS[-1])
    _is_as_calm(found, calm)
    differ = [event for event in found.events if event[0] == "records_differ"]
    assert [event for event in found.events if event not in differ] == calm.events
    assert differ


def test_who_speaks_for_another_ones_process_loses_its_own(calm: Outcome) -> None:
    _is_as_calm(train(_edges(PROCESSES[MEMBERS[0]]), MEMBERS[-1]), calm)


@pytest.mark.parametrize("end", range(STEPS))
def test_a_member_that_ends_takes_nobody_along(calm: Outcome, end: int) -> None:
    said = _ends(PROCESSES[MEMBERS[-1]])[end]
    _is_as_calm(train([(), (), said, (), (), ()], MEMBERS[-1]), calm)


@OFTEN
@given(said=_said(*PROCESSES.values()))
def test_whatever_a_member_says_changes_nothing_but_its_own_part(
    calm: Outcome, said: list[list[Incoming]]
) -> None:
    _is_as_calm(train(said, MEMBERS[-1]), calm)
