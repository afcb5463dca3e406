"""What all workers tell alike counts when a second node says it too, or nobody else can."""

from typing import get_args

import msgspec
import pytest

from oobleck.core.ids import Generation, Incarnation, JobId, NodeName
from oobleck.core.messages import (
    CheckpointSaved,
    Evaluated,
    Failed,
    LinkMeasured,
    Measured,
    PeerLost,
    PhaseReached,
    Restored,
    SaveFailed,
    StepRecord,
)
from oobleck.master.clients import witnesses
from oobleck.master.clients.outbox import Budget
from oobleck.master.clients.witnesses import LOST_S, MOST_WAITING, SILENT, Witnesses
from oobleck.master.state import senders
from oobleck.proto.types import Happening, Hung, WorkerExited, WorkerReport
from support.jobs import evaluation, record
from support.scenario import Player

#: A generation and a step that there will not be.
FAR = Generation(2**60)
N1, N2, N3, N9 = (NodeName(name) for name in ("n1", "n2", "n3", "n9"))


class Telling:
    """A job on three nodes, in generation 1 if nothing more happens."""

    def __init__(self, more: str = "") -> None:
        self.player = player = Player()
        player.play(
            "0.0 register n1 n2 n3\n0.1 submit demo f=0 min_nodes=1\n0.5 ready n1 n2 n3\n"
            f"0.6 register n9\n{more}"
        )
        self.state = player.state
        assert self.state.job is not None
        self.job = self.state.job
        assert self.job.current.generation == 1 + bool(more)
        self.told = Witnesses[StepRecord](lambda one: one.step, 1.0)
        self.now = 10.0

    def tell(self, node: NodeName, *steps: int, **other: object) -> str:
        for step in steps:
            word = msgspec.structs.replace(record(step, 1, float(step)), **other)
            if reason := self.told.take(self.job, node, word, self.now):
                return reason
        return ""

    def wait(self, seconds: float) -> None:
        """All nodes are heard of meanwhile."""
        self.now += seconds
        for node in self.state.nodes.values():
            node.seen.last_heard = self.now

    def judged(self) -> list[tuple[int, str]]:
        """Which steps count now, and who alone told of them."""
        words = self.told.judge(self.state, self.job, self.now).settled
        return [(word.step, by) for word, by in words]


@pytest.fixture
def telling() -> Telling:
    return Telling()


def test_a_second_node_has_to_say_the_same(telling: Telling) -> None:
    telling.tell(N1, 1, 2)
    assert telling.judged() == []
    telling.tell(N1, 1, 2)
    assert telling.judged() == [], "it is the same node again"
    telling.tell(N2, 1, step_seconds=9.0, time=9.0)
    assert telling.judged() == [(1, "")], "what each measures for itself may differ"


def test_two_that_differ_are_told_of_and_a_third_decides(telling: Telling) -> None:
    telling.tell(N1, 1, 2, loss=7.0)
    telling.tell(N2, 1, 2)
    (differs,) = telling.told.judge(telling.state, telling.job, telling.now).differ
    assert (differs.step, differs.nodes, differs.fields) == (1, (N1, N2), ("loss",))
    telling.tell(N3, 1)
    verdict = telling.told.judge(telling.state, telling.job, telling.now)
    assert [(word.loss, by) for word, by in verdict.settled] == [(1.0, "")]
    assert [differs.nodes for differs in verdict.differ] == [(N1, N3)], "so n1 is the odd one"


def test_alone_it_counts_where_the_others_are_lost_or_have_told_of_later_steps(
    telling: Telling,
) -> None:
    telling.tell(N1, 1)
    telling.tell(N2, 2)
    assert telling.judged() == [], "n3 may have it"
    telling.state.nodes[N3].registered = False
    assert telling.judged() == [(1, N1)]
    telling.told.begin_again(N1)
    assert telling.judged() == [], "in a new session n1 tells all that it has"
    telling.tell(N1, 3)
    assert telling.judged() == [(2, N2)]


def test_what_others_have_passed_and_do_not_tell_of_counts_after_a_while(telling: Telling) -> None:
    telling.tell(N1, 1, 2)
    telling.job.seen.steps.furthest_step = 1
    telling.wait(LOST_S)
    assert telling.judged() == [(1, N1)], "step 2 may be made up"


def test_who_has_fallen_silent_is_not_waited_for(telling: Telling) -> None:
    telling.tell(N1, 1)
    telling.wait(SILENT)
    assert telling.judged() == [], "they are there, and may tell"
    for node in (N2, N3):
        telling.state.nodes[node].seen.last_heard = 9.0
    assert telling.judged() == [(1, N1)]


def test_who_has_no_part_has_no_word(telling: Telling) -> None:
    assert telling.tell(N9, 1) == "of a node that had no part in it"
    assert telling.tell(N1, 1, generation=2) == "of a generation that there is not"
    telling.tell(N2, 1)
    assert telling.judged() == []


def test_the_nodes_of_a_failed_jobs_earlier_plans_may_still_tell() -> None:
    """The head had no step of them yet, and the job has ended without n3."""
    telling = Telling("0.7 enter 1 n1 n2 n3\n2.0 fail n3/0 node torn\n4.0 enter 2 n1 n2\n")
    telling.player.play("4.5 fail n1/0 user bad\n4.5 fail n2/0 user bad\n")
    assert (telling.job.state, telling.job.lineage.plans) == ("failed", {})
    assert telling.tell(N3, 1) == ""
    assert telling.tell(N9, 1) == "of a node that had no part in it"


def test_what_was_beside_a_checkpoint_is_told_by_those_who_went_back_to_it() -> None:
    """Whoever trained in the generation of before: they may all be gone."""
    telling = Telling(
        "0.7 enter 1 n1 n2 n3\n1.0 steps 1 5 1\n2.0 fail n3/0 node torn\n4.0 enter 2 n1 n2\n"
        "4.1 steps 6 6 2\n"
    )
    told, job = telling.told, telling.job
    assert N3 not in job.current.members
    beside = [record(step, 1, float(step)) for step in (1, 2)]
    second, first = Generation(2), Generation(1)
    for word in beside:
        assert told.take(job, N3, word, telling.now, second) == "of a node that had no part in it"
        assert told.take(job, N1, word, telling.now, second) == ""
    cannot = "of a generation that it cannot be of"
    assert told.take(job, N1, record(3, 2, 3.0), telling.now, second) == cannot
    assert told.take(job, N1, beside[0], telling.now, first) == cannot
    assert told.take(job, N1, beside[0], telling.now, Generation(3)) == (
        "of a generation that there is not"
    )
    assert telling.judged() == []
    telling.tell(N2, 1)
    assert telling.judged() == [(1, "")], "whoever kept it may say so too"
    told.take(job, N2, beside[1], telling.now, second)
    assert telling.judged() == [(2, "")]
    assert telling.tell(N3, 3) == "", "what follows may be of the generation of before"


def test_who_has_left_a_plan_tells_of_nothing_after_it() -> None:
    telling = Telling(
        "0.7 enter 1 n1 n2 n3\n1.0 steps 1 5 1\n2.0 fail n3/0 node torn\n4.0 enter 2 n1 n2\n"
        "4.1 steps 6 6 2\n"
    )
    assert telling.job.current.trained is not None
    assert telling.job.current.trained.plan.nodes == (N1, N2)
    assert telling.tell(N3, 9, loss=666.0) == "", "it may be of a step that was told of late"
    for node in (N1, N2):
        telling.tell(node, 7, generation=2)
    assert telling.judged() == [(7, "")]
    assert telling.tell(N3, 8, loss=666.0) == "of a generation that it cannot be of"
    telling.tell(N1, 9, generation=2)
    assert telling.judged() == [], "n2 may yet tell, and n3 does not count"
    telling.tell(N2, 9, generation=2)
    (settled,) = telling.told.judge(telling.state, telling.job, telling.now).settled
    assert (settled[0].loss, settled[1]) == (1 / 9, "")


def test_more_than_can_wait_is_asked_for_again_when_nothing_waits(
    telling: Telling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witnesses, "_LOOKED_AT", 2 * MOST_WAITING)
    telling.tell(N1, *range(1, MOST_WAITING + 2))
    assert telling.told.ask_again() == []
    telling.tell(N2, *range(1, MOST_WAITING + 1))
    assert len(telling.judged()) == MOST_WAITING
    assert telling.told.ask_again() == [N1]
    assert telling.told.ask_again() == []


def test_what_is_settled_waits_no_more(telling: Telling) -> None:
    telling.tell(N1, 1, 2)
    telling.told.settle_through(1)
    telling.tell(N2, 1, 2)
    assert telling.judged() == [(2, "")]
    telling.now += 2.0
    assert not telling.told.wait_long(telling.job, telling.now)
    telling.tell(N1, 3)
    telling.now += 2.0
    assert telling.told.wait_long(telling.job, telling.now)


def test_words_of_a_generation_that_there_is_not_hold_up_nothing(telling: Telling) -> None:
    """A head that has just started may learn of plans that another head made, so it keeps them."""
    telling.job.seen.inherited = True
    assert telling.tell(N3, 2, generation=2**62) == ""
    telling.tell(N1, 1)
    telling.tell(N2, 1)
    assert telling.judged() == [(1, "")]
    telling.now += 2.0
    assert not telling.told.wait_long(telling.job, telling.now), "a job can end"
    telling.tell(N1, 2, 3)
    telling.tell(N2, 2, 3)
    assert telling.judged() == [(2, ""), (3, "")]
    telling.told.settle_through(3)
    assert telling.tell(N9, 4, generation=1) == "of a node that had no part in it"
    telling.tell(N3, 4, generation=2**62)
    telling.job.seen.inherited = False
    assert telling.judged() == []
    assert telling.tell(N3, 4) == "", "its own word is in nobody's place"
    telling.tell(N1, 4)
    assert telling.judged() == [(4, "")]


def test_words_that_a_newer_generation_has_overtaken_are_replaced() -> None:
    """Agents keep the last steps of a job that another head saw the end of; this head has its
    workers begin anew."""
    telling = Telling(
        "0.7 enter 1 n1 n2 n3\n1.0 steps 1 5 1\n2.0 fail n3/0 node torn\n4.0 enter 2 n1 n2\n"
        "4.1 steps 6 6 2\n"
    )
    telling.tell(N1, 8)
    telling.tell(N2, 8)
    telling.tell(N3, 9)
    for step in (7, 8):
        for node in (N1, N2):
            assert telling.tell(node, step, generation=2) == ""
    words = telling.told.judge(telling.state, telling.job, telling.now).settled
    assert [(word.step, word.generation) for word, _ in words] == [(7, 2), (8, 2)]
    assert telling.judged() == []
    telling.now += 2.0
    assert not telling.told.wait_long(telling.job, telling.now), "nothing comes of n3's word"


def of_its_end(process: str, what: Happening) -> WorkerReport:
    return WorkerReport(job_id=JobId("demo-1"), slot=0, incarnation=Incarnation(process), what=what)


def test_nobody_else_ends_a_process_that_is_about_to_leave() -> None:
    player = Player()
    player.play(
        "0.0 register n1 n2 n3 n9:2\n0.1 submit demo f=0 min_nodes=1\n0.5 ready n1 n2 n3\n"
        "0.7 enter 1 n1 n2 n3\n1.0 steps 1 5 1\n2.0 drain n3\n"
    )
    job = player.job
    ((worker, process),) = job.current.leaving_processes().items()
    assert worker.node == N3
    exited = WorkerExited(pid=2, exit_code=None, signal=9)
    assert senders.why_refused(player.state, N3, of_its_end(process, exited)) == ""
    for node in (N1, N9):
        why = senders.why_refused(player.state, node, of_its_end(process, exited))
        assert why == "an exit of a process that is another node's"


def test_a_node_without_a_part_in_the_job_tells_of_no_failure() -> None:
    player = Player()
    player.play("0.0 register n1 n2 n9:2\n0.1 submit demo f=0 min_nodes=1\n0.5 ready n1 n2\n")
    for kind in ("user", "node", "internal"):
        failed = of_its_end("nobody", Failed(kind=kind, message="no"))
        why = senders.why_refused(player.state, N9, failed)
        assert why == "a failure of a node that has no part in the job"


def test_a_budget_gives_a_burst_and_then_so_much_a_second() -> None:
    budget = Budget(per_s=2.0, burst=3.0)
    assert [budget.take(1, 0.0) for _ in range(4)] == [True, True, True, False]
    assert budget.take(1, 0.5)
    assert not budget.take(1, 0.5)
    assert budget.owe(1, 0.5) == 0.5
    assert budget.owe(1, 0.5) == 1.0
    assert budget.owe(1, 60.0) == 0.0


def test_an_older_generation_shuts_nobody_out(
    telling: Telling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who claims that a step is of a plan without the others makes them wait, and no line."""
    nodes = {1: frozenset((N1, N2)), 2: frozenset((N1, N2, N3))}
    monkeypatch.setattr(witnesses, "committing_nodes", lambda _, generation: nodes.get(generation))
    telling.tell(N1, 1, loss=7.0)
    telling.tell(N2, 1, generation=2)
    assert telling.judged() == [], "n3 may say the same as n2"
    telling.tell(N3, 1, generation=2)
    verdict = telling.told.judge(telling.state, telling.job, telling.now)
    assert [(word.loss, by) for word, by in verdict.settled] == [(1.0, "")]
    assert verdict.differ == [], "a step that is done again may have been told of before"


def test_of_a_job_that_has_ended_only_known_steps_count_alone(telling: Telling) -> None:
    telling.job.state = "failed"
    telling.tell(N1, 1, 2)
    assert telling.judged() == []
    telling.wait(LOST_S)
    telling.job.seen.steps.furthest_step = 1
    assert telling.judged() == [(1, N1)], "nobody knows of step 2"


MEMBER, OTHERS = "of a process that no plan counts on", "of a process that is another node's"
WAS_MEMBER, FIRST = "of a process that no plan has counted on", "of a process that was the first"
ASKED, CANNOT, NO_PART = "of a process that was not asked", "with what cannot be", "has no part"
SAVED = CheckpointSaved(step=1, path="/nowhere", bytes=1, seconds=1.0)
LOST = PeerLost(generation=Generation(1), step=1, detail="closed")


@pytest.mark.parametrize(
    ("what", "first", "second", "spare", "others"),
    [
        (WorkerExited(pid=2, exit_code=None, signal=9), "", "", NO_PART, OTHERS),
        (Hung(reason="nothing", seconds=9.0), "", "", NO_PART, OTHERS),
        (Failed(kind="user", message="no"), "", "", NO_PART, OTHERS),
        (Measured(attempt=1, measurement=None), ASKED, ASKED, ASKED, ASKED),
        (LinkMeasured(attempt=1, scope="inter_node", link=None), ASKED, ASKED, ASKED, ASKED),
        (PhaseReached(generation=Generation(1), phase="joined"), "", "", MEMBER, MEMBER),
        (PhaseReached(generation=FAR, phase="joined"), CANNOT, CANNOT, MEMBER, MEMBER),
        (LOST, "", "", MEMBER, MEMBER),
        (msgspec.structs.replace(LOST, generation=FAR), CANNOT, CANNOT, MEMBER, MEMBER),
        (msgspec.structs.replace(LOST, step=FAR), CANNOT, CANNOT, MEMBER, MEMBER),
        (Restored(generation=Generation(1), step=0, path=""), "", "", MEMBER, MEMBER),
        (Restored(generation=FAR, step=0, path=""), CANNOT, CANNOT, MEMBER, MEMBER),
        (Restored(generation=Generation(1), step=FAR, path=""), CANNOT, CANNOT, MEMBER, MEMBER),
        (Evaluated(record=evaluation(2, 1, 1.0)), "", "", WAS_MEMBER, WAS_MEMBER),
        (Evaluated(record=evaluation(3, 1, 1.0)), CANNOT, CANNOT, WAS_MEMBER, WAS_MEMBER),
        (SAVED, "", FIRST, FIRST, FIRST),
        (msgspec.structs.replace(SAVED, step=FAR), CANNOT, FIRST, FIRST, FIRST),
        (msgspec.structs.replace(SAVED, request=9), CANNOT, FIRST, FIRST, FIRST),
        (SaveFailed(what="checkpoint", step=1, reason="no"), "", "", WAS_MEMBER, WAS_MEMBER),
        (SaveFailed(what="output", step=1, reason="no"), CANNOT, CANNOT, WAS_MEMBER, WAS_MEMBER),
    ],
)
def test_who_may_report_what(
    what: Happening, first: str, second: str, spare: str, others: str
) -> None:
    """Of their own processes the first worker of the plan, another one, and a node in no plan; and
    that node of another one's process."""
    player = Player()
    player.play(
        "0.0 register n1 n2 n9:2\n0.1 submit demo f=0 min_nodes=1 checkpoint=1 evaluate=2\n"
        "0.5 ready n1 n2\n0.7 enter 1 n1 n2\n1.0 steps 1 5 1\n"
    )
    own = {worker.node: process for worker, process in player.job.current.processes().items()}
    told = [(N1, own[N1]), (N2, own[N2]), (N9, "its own"), (N9, own[N2])]
    for (node, process), expected in zip(told, (first, second, spare, others), strict=True):
        why = senders.why_refused(player.state, node, of_its_end(process, what))
        assert expected in why, (node, process)
        assert bool(why) is bool(expected)


def test_a_node_that_told_of_losses_that_were_none_is_not_believed_until_it_is_undrained() -> None:
    player = Player()
    player.play(
        "0.0 register n1 n2\n0.1 submit demo f=0 min_nodes=1\n0.5 ready n1 n2\n"
        "0.7 enter 1 n1 n2\n1.0 steps 1 1 1\n1.1 peer_lost n2/0 1\n1.2 steps 2 2 1\n"
    )
    job = player.job
    assert dict(job.seen.untrue) == {N2: 1}
    (worker, process) = next((w, p) for w, p in job.current.processes().items() if w.node == N2)
    for count in range(1, senders.MOST_UNTRUE + 1):
        job.seen.untrue[N2] = count
        why = senders.why_refused(player.state, worker.node, of_its_end(process, LOST))
        assert bool(why) is (count == senders.MOST_UNTRUE)
    player.play("2.0 drain n2\n3.0 undrain n2\n")
    assert not job.seen.untrue


def test_the_table_of_senders_has_every_kind_of_report() -> None:
    assert set(senders._KINDS) == set(get_args(Happening))
    assert {kind.sender for kind in senders._KINDS.values()} == set(senders._WANTED)
