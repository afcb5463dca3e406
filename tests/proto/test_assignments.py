"""A field of `Assign` reaches whoever is to know of it: from the master's event by the journal, the
wire and the agent to the worker, and back from an agent to a master whose journal lost its end."""

import json
import secrets
import zlib
from dataclasses import replace

import msgspec
import pytest

from oobleck.agent.connection.reports import newest_plan
from oobleck.agent.events import Assigned, ForkRequested, Send, StartWarm, WarmReady, WorkerForked
from oobleck.agent.events import WorkerMessage as Said
from oobleck.core.codec import encode
from oobleck.core.ids import Generation, Incarnation, NodeName, WorkerId
from oobleck.core.messages import Assign, Ready, Rendezvous, ToWorker
from oobleck.core.routes import HopTicks, Listing
from oobleck.host.ipc.channel import frame
from oobleck.host.versions import ENGINE
from oobleck.master.events.jobs import PlanMade
from oobleck.master.events.unions import Journaled
from oobleck.master.rules.adoption import adopt
from oobleck.proto import control_pb2 as pb
from oobleck.proto.assignments import assignment_message, fitted, pack, read_assignment
from oobleck.proto.bounds import MOST_RECEIVED_BYTES
from oobleck.proto.protocol import OLDEST
from oobleck.proto.status import read_register, register_message
from oobleck.proto.types import Assignment, NodeStatus, Registration
from support.agent import facts
from support.agent_core import A, B, Node
from support.plans import plan_of_cuts
from support.trained import JOB, context, node, trained_job

#: Every field is unlike its default.
ASSIGN = Assign(
    plan=replace(plan_of_cuts(([8], 4), ([8], 4)), generation=Generation(7)),
    rendezvous=Rendezvous(host="10.0.0.1:4000", prefix="job/7/abc"),
    boundary=True,
    restore=True,
    anew=True,
    leaving=(WorkerId(NodeName("n2"), 0),),
    handover=True,
    data="ab" * 16,
)
MANY = 5000
#: Of n0, n1 and n2.
PROCESSES = (A, B, Incarnation("cccc"))


def made(assign: Assign) -> PlanMade:
    return PlanMade(
        **msgspec.structs.asdict(assign),
        job_id=JOB,
        incarnations=PROCESSES[:2],
        leaving_incarnations=PROCESSES[2:],
        cause="node lost",
        rule="reinstantiate",
        reason="a node is lost",
        nodes_lost=(),
        workers_lost=(),
        nodes_joined=(),
        can_lose=0,
        worker_slots=1,
        detect_s=0.0,
        engine=ENGINE,
    )


def told(assign: Assign, name: str) -> Assignment:
    """What the agent of a node reads, from an event that was in the journal."""
    event = msgspec.json.decode(encode(made(assign)), type=Journaled)  # type: ignore[arg-type]
    state, job = trained_job([node(0), node(1), node(2)], 32, min_nodes=1)
    job.current.made = event
    one = state.nodes[NodeName(name)]
    one.desired = msgspec.structs.replace(
        one.desired, version=3, job_id=JOB, generation=assign.plan.generation
    )
    message = assignment_message(state.assignment(one)).SerializeToString()
    return read_assignment(pb.Assignment.FromString(message))


def test_a_plan_of_thousands_of_workers_reaches_them() -> None:
    """Each of them a pipeline of its own, slow and list-scheduled."""
    plan = plan_of_cuts(*[([2], 1)] * MANY)
    ticks = HopTicks(
        forward=1, backward_input=1, backward_weight=1, message=0, kept_bytes=1, deferred_bytes=0
    )
    plan = replace(
        plan.with_rates(dict.fromkeys(plan.workers, 0.5)),
        listing=Listing(hops=((ticks,),) * MANY, room=(1,) * MANY, split=False),
    )
    cards = tuple(f"{number:032x}@10.0.0.1:4000" for number in range(MANY))
    rendezvous = Rendezvous(host=cards[0], prefix="job/7/abc", cards=cards)
    assign = Assign(plan=plan, rendezvous=rendezvous, boundary=False)
    message = assignment_message(Assignment(version=1, job_id=JOB, assign=assign))
    assert read_assignment(message).assign == assign


def test_a_large_plan_that_an_agent_registers_with_has_no_cards() -> None:
    """They cannot be compressed, and the whole registration has to fit into one message."""
    small = assignment_message(told(ASSIGN, "n1"))
    assert fitted(small) == small
    many = 16_000
    cards = tuple(f"{secrets.token_hex(16)}@10.0.{n >> 8}.{n & 255}:4000" for n in range(many))
    assign = Assign(
        plan=plan_of_cuts(*[([2], 1)] * many),
        rendezvous=Rendezvous(host=cards[0], prefix="job/7/abc", cards=cards),
        boundary=False,
    )
    tree = {**json.loads(encode(assign)), "of_a_later_release": 1}
    message = fitted(pb.Assignment(version=1, job_id=JOB, assign=pack(tree)))
    assert len(message.SerializeToString()) < MOST_RECEIVED_BYTES // 2
    found = read_assignment(message).assign
    assert found is not None
    assert found.plan == assign.plan
    assert (found.rendezvous.host, found.rendezvous.cards) == (cards[0], ())
    assert b'"of_a_later_release":1' in zlib.decompress(message.assign)


def test_the_example_has_every_field() -> None:
    """So that the tests below fail where one is forgotten on the way."""
    for field in msgspec.structs.fields(Assign):
        assert getattr(ASSIGN, field.name) != field.default, field.name


def test_a_worker_gets_what_the_master_decided() -> None:
    agent = Node()
    agent.state.node = NodeName("n1")
    agent.after(StartWarm(), WarmReady(), Assigned(desired=told(ASSIGN, "n1")))
    agent.after(ForkRequested(slot=0, incarnation=B), WorkerForked(incarnation=B, pid=100))
    ready = Ready(pid=100, card="127.0.0.1:1", data=ASSIGN.data)
    (send,) = agent.after(Said(incarnation=B, message=ready))
    assert isinstance(send, Send)
    read = msgspec.json.decode(frame(send.message)[4:], type=ToWorker)  # type: ignore[arg-type]
    assert read == ASSIGN


def test_a_master_without_the_journal_s_end_learns_it_from_the_agents() -> None:
    state, job = trained_job([node(0), node(1), node(2)], 32, min_nodes=1)
    job.seen.inherited = True
    for name in ("n0", "n1", "n2"):
        running = newest_plan(None, told(ASSIGN, name))
        registration = Registration(
            protocol=OLDEST, facts=facts(name), status=NodeStatus(), running=running
        )
        message = register_message(registration).SerializeToString()
        again = read_register(pb.Register.FromString(message), facts(name).incarnation)
        state.nodes[NodeName(name)].seen.running = again.running
    state.active = job.id
    decision = adopt(context(state), job)
    assert decision is not None
    (event,) = decision.actions
    assert isinstance(event, PlanMade)
    assert event.assign == ASSIGN
    assert (*event.incarnations, *event.leaving_incarnations) == PROCESSES


def test_a_journal_has_the_fields_side_by_side() -> None:
    """Those of the assignment lie beside those of the plan, and may lack what has a default."""
    written = json.loads(encode(made(ASSIGN)))
    assert set(Assign.__struct_fields__) < set(written)
    for field in msgspec.structs.fields(Assign):
        if not field.required:
            del written[field.name]
    read = msgspec.json.decode(json.dumps(written), type=Journaled)  # type: ignore[arg-type]
    assert isinstance(read, PlanMade)
    assert read.assign == Assign(
        plan=ASSIGN.plan, rendezvous=ASSIGN.rendezvous, boundary=ASSIGN.boundary
    )


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"plan": {**json.loads(encode(ASSIGN.plan)), "generation": 0}}, "generation: 0 is below"),
        ({"plan": {**json.loads(encode(ASSIGN.plan)), "routes": []}}, "at least one route"),
        ({"rendezvous": {"host": "10.0.0.1:4000", "prefix": ""}}, "prefix: is empty"),
        ({"rendezvous": {"host": "nowhere", "prefix": "p"}}, "host: 'nowhere' is not HOST:PORT"),
        ({"leaving": [{"node": "../n", "slot": 0}]}, "node name '../n' is not allowed"),
        ({"leaving": [{"node": "n1", "slot": 1024}]}, "slot: 1024 is not below 1024"),
        ({"data": "x" * 70_000}, "data: 70000 characters are more than"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object], reason: str) -> None:
    values = {**json.loads(encode(ASSIGN)), **wrong}
    packed = zlib.compress(json.dumps(values).encode())
    with pytest.raises(ValueError, match=rf"^assignment: assign: .*{reason}"):
        read_assignment(pb.Assignment(version=1, assign=packed))


def test_a_job_that_has_no_hash_is_told_too() -> None:
    _, job = trained_job([node(0), node(1), node(2)], 32, min_nodes=1)
    data = replace(job.spec.data, text=["a.txt"])  # type: ignore[arg-type]
    for spec in (replace(job.spec, data=data), job.spec):
        told_of = read_assignment(assignment_message(Assignment(version=1, job=spec)))
        assert told_of.job is not None
        assert list(told_of.job.data.text) == list(spec.data.text)


def test_only_a_master_tells_of_a_job() -> None:
    registration = Registration(
        protocol=OLDEST, facts=facts("n1"), status=NodeStatus(), running=told(ASSIGN, "n1")
    )
    with pytest.raises(ValueError, match=r"^register: running: job: only a master"):
        read_register(register_message(registration), facts("n1").incarnation)
