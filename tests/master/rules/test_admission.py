"""What a head makes of agents that know more than its journal."""

import msgspec
import pytest

from oobleck.core.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.core.messages import Assign, Rendezvous
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.routes import Hold
from oobleck.host.detection import Detection
from oobleck.master.api.view import held_note
from oobleck.master.config import Retention
from oobleck.master.events.jobs import JobPutBack, JobStarted, JobSubmitted
from oobleck.master.events.nodes import NodeHeld, NodeLost, NodeRegistered
from oobleck.master.events.unions import MasterStarted, StreamOpened, TermBegan
from oobleck.master.planning.solve import AtOnce
from oobleck.master.rules import adoption
from oobleck.master.rules.admission import Refusal, admit, next_term
from oobleck.master.rules.adoption import NotAdopted, check_adoptable, take_up
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.reducer.apply import apply
from oobleck.proto.assignments import MOST_TERM
from oobleck.proto.protocol import NEWEST
from oobleck.proto.types import (
    Assignment,
    Head,
    NodeFacts,
    NodeStatus,
    Registration,
    WorkerStatus,
)
from support.jobs import job_spec
from support.scenario import Player

FIRST, AGAIN, ELSEWHERE = "00000001", "00000002", "0000000c"
HISTORY, OWN, OTHER, SECOND = "11" * 8, "aaaaaaaa", "bbbbbbbb", "dddddddd"
FACTS = NodeFacts(
    node=NodeName("n1"),
    incarnation=Incarnation("0001"),
    hostname="host1",
    address="10.0.0.1",
    pid=1,
    worker_slots=1,
    device="cpu",
    memory_per_worker_bytes=1 << 30,
    newest_protocol=NEWEST,
)


def began(number: int, begun_by: str = OWN) -> TermBegan:
    return TermBegan(
        cluster=OWN, history=HISTORY, number=number, begun_by=begun_by, place="here", reason="test"
    )


def state(*events: object, restarted: bool = True) -> ClusterState:
    """A head whose journal has one job and those events, as it is after a restart."""
    found = ClusterState()
    job = JobSubmitted(job_id=JobId("demo-1"), request_id="one", spec=job_spec("demo"))
    last = [MasterStarted(start=AGAIN)] * restarted
    for event in (MasterStarted(start=FIRST), began(1), job, *events, *last):
        apply(found, event, now=0.0, unix=1.0)  # type: ignore[arg-type]
    return found


def registration(
    job_id: str = "", acted_on: Head | None = None, incarnation: str = "0001"
) -> Registration:
    workers = (WorkerStatus(slot=0, incarnation=Incarnation("00ff"), pid=2, committed_step=7),)
    status = NodeStatus(job_id=JobId(job_id), workers=workers) if job_id else NodeStatus()
    facts = msgspec.structs.replace(FACTS, incarnation=Incarnation(incarnation))
    return Registration(protocol=NEWEST, facts=facts, status=status, acted_on=acted_on)


def told(
    term: int = 1,
    begun_by: str = OWN,
    sequence: int = 3,
    history: str = HISTORY,
    start: str = "",
) -> Head:
    """By default that start told it of that journal which wrote its first events."""
    return Head(
        cluster=OWN,
        history=history,
        term=term,
        begun_by=begun_by,
        start=start or (FIRST if begun_by == OWN else ELSEWHERE),
        sequence=sequence,
    )


def admitted(state: ClusterState, asked: Registration) -> tuple[object, ...]:
    found = admit(state, asked, 0.0, Detection())
    assert not isinstance(found, Refusal), found
    return found


@pytest.mark.parametrize(
    ("job_id", "acted_on", "held"),
    [
        ("other-1", told(history="22" * 8), True),
        ("demo-1", told(history="22" * 8), True),  # another one, of that name
        ("other-1", told(sequence=9), True),  # submitted after what this journal has
        ("other-1", told(sequence=2), False),  # it ended, and was forgotten
        ("other-1", None, False),  # it was told of by nobody
        ("demo-1", told(sequence=9), False),
    ],
)
def test_workers_of_a_job_that_the_head_need_not_know_are_held(
    job_id: str, acted_on: Head | None, held: bool
) -> None:
    registered, *others = admitted(state(), registration(job_id, acted_on))
    assert isinstance(registered, NodeRegistered)
    unknown = NodeHeld(node=NodeName("n1"), job_id=JobId(job_id), queued=False)
    assert others == ([unknown] if held else [])
    assert registered.stale_workers != held


def test_a_node_that_is_free_is_not_held() -> None:
    assert len(admitted(state(), registration("", told(history="22" * 8)))) == 1


def test_a_known_agent_that_trains_another_job_is_lost_to_its_own() -> None:
    known = state(NodeRegistered(facts=FACTS))
    lost, registered, held = admitted(known, registration("other-1", told(sequence=99)))
    assert isinstance(lost, NodeLost)
    assert isinstance(registered, NodeRegistered)
    assert isinstance(held, NodeHeld)
    for event in (lost, registered, held):
        apply(known, event, now=0.0, unix=2.0)
    assert admitted(known, registration("other-1", told(sequence=99))) == (), "once"
    assert known.nodes[NodeName("n1")].desired.job_id is None
    assert list(known.held) == ["other-1"]


def test_a_node_whose_agent_has_ended_is_held_no_longer() -> None:
    known = state()
    for event in admitted(known, registration("other-1", told(sequence=99))):
        apply(known, event, now=0.0, unix=2.0)  # type: ignore[arg-type]
    left = NodeLost(
        node=NodeName("n1"),
        incarnation=FACTS.incarnation,
        cause="left",
        reason="its agent ends",
        detect_s=0.0,
    )
    apply(known, left, now=0.0, unix=3.0)
    assert not known.held


@pytest.mark.parametrize(
    ("known", "newer", "is_taken"),
    [
        ({"boot": "a"}, {"boot": "b"}, False),
        ({"boot": "a"}, {"boot": "a"}, True),
        ({"boot": ""}, {"boot": "b"}, True),
        ({"boot": "a"}, {"boot": ""}, True),
        ({"boot": "a"}, {"boot": "b", "hostname": "host2"}, True),
        ({"boot": "a"}, {"boot": "b", "address": "10.0.0.2"}, True),
    ],
)
def test_a_name_in_use_is_free_only_where_its_host_was_booted_again(
    known: dict[str, str], newer: dict[str, str], is_taken: bool
) -> None:
    there = state(NodeRegistered(facts=msgspec.structs.replace(FACTS, **known)), restarted=False)
    there.nodes[NodeName("n1")].seen.session = 1
    there.nodes[NodeName("n1")].seen.awaited = True
    asked = registration(incarnation="0002")
    facts = msgspec.structs.replace(asked.facts, **newer)
    found = admit(there, msgspec.structs.replace(asked, facts=facts), 0.0, Detection())
    assert isinstance(found, Refusal) == is_taken
    if not isinstance(found, Refusal):
        lost, registered = found
        assert isinstance(lost, NodeLost)
        assert lost.reason == "its host was booted again"
        assert lost.with_master
        assert isinstance(registered, NodeRegistered)


def test_a_job_of_an_earlier_term_that_a_copy_lacks_is_held() -> None:
    """The copy has its own job of that id, which it was given after the copy was made."""
    submitted = JobSubmitted(job_id=JobId("late-2"), request_id="two", spec=job_spec("late"))
    copy = state(MasterStarted(start="00000003"), began(2, OTHER), submitted)
    assert len(admitted(copy, registration("late-2", told(sequence=20)))) == 2
    own = told(2, OTHER, sequence=copy.sequence, start="00000003")
    assert len(admitted(copy, registration("late-2", own))) == 1


@pytest.mark.parametrize(("job_id", "adoptable"), [("other-1", True), ("demo-1", False)])
def test_adoption_is_named_where_it_would_not_be_refused_for_the_name(
    job_id: str, adoptable: bool
) -> None:
    held = NodeHeld(node=NodeName("n1"), job_id=JobId(job_id), queued=False)
    told = held_note(state(NodeRegistered(facts=FACTS), held), JobId(job_id))
    assert told.startswith(f"n1 trains job {job_id}")
    assert (f"oobleck adopt {job_id}" in told) == adoptable
    assert f"oobleck cancel {job_id} --unknown" in told


def test_a_held_node_that_is_lost_is_told_of() -> None:
    held = NodeHeld(node=NodeName("n1"), job_id=JobId("other-1"), queued=False)
    lost = NodeLost(
        node=NodeName("n1"), incarnation=FACTS.incarnation, cause="lease", reason="", detect_s=1.0
    )
    known = state(NodeRegistered(facts=FACTS), held, lost)
    assert "UTC, n1 lost meanwhile): start" in held_note(known, JobId("other-1"))


def test_a_job_cannot_be_adopted_before_its_nodes_are_back() -> None:
    """A master that starts again knows held nodes from its journal."""
    held = NodeHeld(node=NodeName("n1"), job_id=JobId("other-1"), queued=False)
    waiting = state(NodeRegistered(facts=FACTS), held)
    with pytest.raises(NotAdopted, match="n1 is not connected; ask again"):
        check_adoptable(waiting, JobId("other-1"))
    with pytest.raises(NotAdopted, match="this master has it already"):
        check_adoptable(waiting, JobId("demo-1"))
    with pytest.raises(NotAdopted, match="no node trains an unknown job"):
        check_adoptable(waiting, JobId("none-1"))


# ---- terms


def test_an_agent_of_a_higher_term_is_refused_for_now() -> None:
    refused = admit(state(), registration("", told(2, OTHER)), 0.0, Detection())
    assert isinstance(refused, Refusal)
    assert refused.temporary
    assert refused.follows == told(2, OTHER)


def test_two_heads_of_one_term_have_different_names() -> None:
    refused = admit(state(), registration("", told(1, OTHER)), 0.0, Detection())
    assert isinstance(refused, Refusal)
    assert f"in {told(1, OTHER)}; this one is in {told(1, OWN)}" in refused.reason
    assert str(told(1, OTHER)) != str(told(1, OWN))


@pytest.mark.parametrize(
    ("acted_on", "restarted", "term"),
    [
        (told(sequence=99), True, 2),  # its disk has lost what it had taken
        (told(sequence=3), True, None),
        (told(sequence=99), False, None),  # a lie: the journal is new
        (told(5, OTHER), True, None),  # another head went on in its place
        (told(5, OTHER, history="22" * 8), True, None),
        (None, True, None),
    ],
)
def test_a_head_goes_on_in_a_higher_term_where_its_journal_is_behind(
    acted_on: Head | None, restarted: bool, term: int | None
) -> None:
    found = next_term(state(restarted=restarted), acted_on, lambda: "cccccccc")
    assert (found.number if found is not None else None) == term


@pytest.mark.parametrize(
    ("acted_on", "term"),
    [
        (told(2, SECOND, sequence=99), None),  # a lie: the term began in this process
        (told(5, OTHER), 6),
        (told(2, OTHER), 3),  # another one was started from the same backup
        (told(1), None),
        (told(MOST_TERM, OTHER), None),
        (told(MOST_TERM - 1, OTHER), None),  # a lie
    ],
)
def test_a_head_that_an_operator_started_in_a_term_of_its_own_goes_above_all(
    acted_on: Head, term: int | None
) -> None:
    found = next_term(state(began(2, SECOND), restarted=False), acted_on, lambda: "cccccccc")
    assert (found.number if found is not None else None) == term


def test_the_first_head_of_a_history_does_not_go_above_a_copys() -> None:
    assert next_term(state(restarted=False), told(2, OTHER), lambda: "cccccccc") is None


@pytest.mark.parametrize(
    ("start", "sequence", "lacking"),
    [(FIRST, 9, 6), (ELSEWHERE, 9, 6), (AGAIN, 9, 0), (AGAIN, 99, 0)],
)
def test_what_a_head_has_journaled_since_its_start_hides_nothing_that_it_lacks(
    start: str, sequence: int, lacking: int
) -> None:
    """It found three events on disk, and has ten by now. Its own start tells of no others."""
    late = state()
    for number in range(6):
        facts = msgspec.structs.replace(FACTS, node=NodeName(f"n{number + 2}"))
        apply(late, NodeRegistered(facts=facts), now=0.0, unix=1.0)
    assert late.sequence == 10
    acted_on = told(sequence=sequence, start=start)
    found = next_term(late, acted_on, lambda: "cccccccc")
    assert (found is not None) == bool(lacking)
    if found is not None:
        apply(late, found, now=0.0, unix=1.0)
        assert late.history.lacks(acted_on, late.sequence) == lacking
        assert late.nodes[NodeName("n2")].registered
        held = admitted(late, registration("other-1", acted_on))
        assert NodeHeld(node=NodeName("n1"), job_id=JobId("other-1"), queued=False) in held


def test_starts_since_a_directory_was_put_back_hide_nothing_that_it_lacks() -> None:
    """No agent has come to the starts before this one."""
    copy = state(*(MasterStarted(start=f"000000{number}") for number in range(10, 30)))
    acted_on = told(sequence=9)
    assert copy.sequence > acted_on.sequence
    assert next_term(copy, acted_on, lambda: "cccccccc") is not None
    held = admitted(copy, registration("other-1", acted_on))
    assert NodeHeld(node=NodeName("n1"), job_id=JobId("other-1"), queued=False) in held


def running(*nodes: str) -> Assignment:
    """A plan of the job second-2, in which each node has all layers."""
    pipelines = [
        Pipeline(
            nodes=(NodeName(name),),
            stages=(Hold(first_layer=0, last_layer=7, workers=(WorkerId(NodeName(name), 0),)),),
            microbatches=len(range(number, 8, len(nodes))),
        )
        for number, name in enumerate(nodes)
    ]
    plan = Plan.of_pipelines(pipelines, generation=Generation(1), schedule="1f1b")
    meeting = Rendezvous(host="127.0.0.1:4001", prefix="p")
    return Assignment(
        version=1,
        job_id=JobId("second-2"),
        job=None,
        assign=Assign(plan=plan, rendezvous=meeting, boundary=False),
    )


class Copy:
    """A head on a copy of when demo-1 had its turn and second-2 was queued, which trains now."""

    def __init__(self, *members: str) -> None:
        second = JobSubmitted(job_id=JobId("second-2"), request_id="two", spec=job_spec("second"))
        facts = (msgspec.structs.replace(FACTS, node=NodeName(name)) for name in members)
        registered = (NodeRegistered(facts=one) for one in facts)
        self.state = state(JobStarted(job_id=JobId("demo-1")), second, *registered)
        self.state.jobs[JobId("second-2")].submitted_in = 0

    def hear(self, name: str, trains: Assignment) -> None:
        """An agent comes that trains by this plan."""
        facts = msgspec.structs.replace(FACTS, node=NodeName(name))
        asked = msgspec.structs.replace(
            registration("second-2", told(sequence=9)), facts=facts, running=trains
        )
        for event in admitted(self.state, asked):
            apply(self.state, event, now=0.0, unix=1.0)  # type: ignore[arg-type]
        held = self.state.nodes[NodeName(name)].held
        assert held is not None
        assert held.queued
        opened = StreamOpened(
            node=NodeName(name),
            session=1,
            status=asked.status,
            running=trains,
            acted_on=asked.acted_on,
        )
        apply(self.state, opened, now=0.0, unix=1.0)

    def decides(self, now: float) -> Decision | None:
        context = Context(
            state=self.state,
            now=now,
            timing=Detection(),
            nonce="n",
            planner=AtOnce(),
            retention=Retention(),
            gives_way_s=1.0,
        )
        return take_up(context)


def test_a_queued_job_that_nodes_train_has_its_turn_and_the_other_goes_back() -> None:
    head = Copy()
    head.hear("n1", running("n1", "n2"))
    assert "which waits in this master's queue" in held_note(head.state, JobId("second-2"))
    waits = head.decides(1.0)
    assert waits is not None
    assert (waits.holds_plans, waits.actions) == (True, ()), "n2 may still come"
    head.hear("n2", running("n1", "n2"))
    found = head.decides(1.0)
    assert found is not None
    assert found.actions == (
        JobPutBack(job_id=JobId("demo-1"), instead=JobId("second-2")),
        JobStarted(job_id=JobId("second-2")),
    )
    for event in found.actions:
        apply(head.state, event, now=1.0, unix=2.0)
    assert not head.state.held
    assert head.state.active == "second-2"
    assert head.decides(1.0) is None


def test_an_idle_node_and_one_with_an_older_plan_keep_it_from_nothing() -> None:
    """A node without work starts a worker of the job that has the turn by the journal."""
    head = Copy("n4")
    workers = (WorkerStatus(slot=0, incarnation=Incarnation("0f"), pid=2),)
    status = NodeStatus(job_id=JobId("demo-1"), workers=workers)
    opened = StreamOpened(node=NodeName("n4"), session=1, status=status, running=None)
    apply(head.state, opened, now=0.0, unix=1.0)
    for name in ("n1", "n2", "n3"):
        head.hear(name, running("n1", "n2", "n3"))
    head.hear("n5", running("n5"))
    found = head.decides(Detection().return_s + 1.0)
    assert found is not None
    assert found.actions[1:] == (JobStarted(job_id=JobId("second-2")),)


def test_it_has_no_turn_where_its_nodes_are_few() -> None:
    after = Detection().return_s + 1.0
    head = Copy()
    head.hear("n1", running("n1", "n2"))
    assert head.decides(after) is None, "half of its plan"
    alone = Copy("n3")
    alone.hear("n1", running("n1"))
    waits = alone.decides(1.0)
    assert waits is not None
    assert waits.holds_plans, "n3 may come back"
    assert alone.decides(after) is None, "half of the cluster"
    assert alone.state.held, "and its workers are not ended"


def test_a_node_that_is_away_counts_once_however_many_workers_it_has() -> None:
    player = Player()
    player.play(
        "0.0 register n1:4 n2:4\n0.1 submit demo f=0 min_nodes=1\n0.5 ready n1 n2\n"
        "1.0 silent n1 n2\n1.0 close n1 n2\n"
    )
    job = player.job
    assert len(job.current.processes()) == 8
    assert not adoption._may_go_on(player.state, job, [NodeName(f"n{n}") for n in (3, 4, 5)])
    assert adoption._may_go_on(player.state, job, [NodeName(f"n{n}") for n in (3, 4)])
