"""An incident of slow workers: what ends it, and that it stays small however long it lasts."""

import dataclasses

import msgspec
import pytest

from oobleck.core.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.master.events.jobs import JobCancelled, JobPutBack, JobWaiting, PlanMade, RateChanged
from oobleck.master.events.nodes import (
    NodeDrained,
    NodeLeftOut,
    NodeLost,
    NodeRegistered,
    NodeReset,
    WorkerLost,
)
from oobleck.master.events.unions import Journaled, MasterStarted
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.incident import MOST_KEPT
from oobleck.master.state.job import Job
from oobleck.master.state.reducer.apply import apply
from oobleck.master.storage.event_lines import lines_of
from support.agent import facts
from support.scenario import Player, copied

DEMO, N1, N2 = JobId("demo-1"), NodeName("n1"), NodeName("n2")
N1_0, N2_0 = WorkerId(N1, 0), WorkerId(N2, 0)
NOW = 10.0

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def trained() -> ClusterState:
    player = Player()
    player.play(
        "0.0 register n1 n2 n3 n4\n0.0 submit demo\n0.5 ready n1 n2 n3 n4\n"
        "0.7 enter 1 n1 n2 n3 n4\n1.0 steps 1 5 1\n"
    )
    return player.state


@pytest.fixture
def state(trained: ClusterState) -> ClusterState:
    """With one slow worker."""
    state = copied(trained)
    happen(state, rate(state, N1_0, 0.5))
    return state


def job_of(state: ClusterState) -> Job:
    return state.jobs[DEMO]


def process_of(state: ClusterState, worker: WorkerId) -> Incarnation:
    return job_of(state).current.processes().get(worker, Incarnation("other"))


def rate(state: ClusterState, worker: WorkerId, value: float) -> RateChanged:
    return RateChanged(
        job_id=DEMO,
        worker=worker,
        incarnation=process_of(state, worker),
        rate=value,
        step_s=1 / value,
        usual_s=1.0,
        steps=5,
        seconds=5.0,
    )


def happen(state: ClusterState, event: Journaled, unix: float = NOW) -> list[dict]:
    """The incidents that are over with it."""
    lines = [dict(line) for _, line in lines_of(state, event, unix)]
    apply(state, event, now=unix, unix=unix)
    return [line for line in lines if line["event"] == "incident"]


def plan_after(state: ClusterState, **changes: object) -> PlanMade:
    made = job_of(state).current.made
    assert made is not None
    plan = dataclasses.replace(made.plan, generation=Generation(made.plan.generation + 1))
    return replace(made, **{"plan": plan, "boundary": True, "cause": "worker slow", **changes})


def node_lost(state: ClusterState, worker: WorkerId) -> NodeLost:
    agent = state.nodes[worker.node].facts.incarnation
    return NodeLost(
        node=worker.node, incarnation=agent, cause="lease", reason="silent", detect_s=1.0
    )


def another_agent(state: ClusterState, worker: WorkerId) -> NodeRegistered:
    return NodeRegistered(facts=facts(worker.node))


def worker_lost(state: ClusterState, worker: WorkerId) -> WorkerLost:
    process = process_of(state, worker)
    return WorkerLost(job_id=DEMO, worker=worker, incarnation=process, reason="gone", detect_s=0.0)


def replacing(state: ClusterState, worker: WorkerId) -> PlanMade:
    made = job_of(state).current.made
    assert made is not None
    others = (
        Incarnation("new") if each == worker else process
        for each, process in job_of(state).current.processes().items()
    )
    return plan_after(state, incarnations=tuple(others), cause="worker lost", boundary=False)


def another_process(state: ClusterState, worker: WorkerId) -> RateChanged:
    return RateChanged(job_id=DEMO, worker=worker, incarnation=Incarnation("new"), rate=1)


ENDS = {
    "lost node": (node_lost, "gone"),
    "another agent": (another_agent, "gone"),
    "lost worker": (worker_lost, "gone"),
    "drained node": (lambda s, w: NodeDrained(node=w.node), "gone"),
    "node left out": (lambda s, w: NodeLeftOut(job_id=DEMO, node=w.node, reason="odd"), "gone"),
    "node reset": (lambda s, w: NodeReset(job_id=DEMO, node=w.node, reason="odd"), "gone"),
    "replaced process": (replacing, "gone"),
    "another process": (another_process, "gone"),
    "well": (lambda s, w: rate(s, w, 1.0), "recovered"),
}


@pytest.mark.parametrize(("make", "outcome"), ENDS.values(), ids=ENDS)
def test_it_is_over_when_no_slow_process_is_left(state: ClusterState, make, outcome: str) -> None:
    assert job_of(state).slowdown is not None
    assert happen(state, make(state, N2_0), NOW + 1) == [], "that was of another worker"
    (told,) = happen(state, make(state, N1_0), NOW + 2)
    assert (told["incident"], told["outcome"]) == (1, outcome)
    assert told["root_cause"]["kind"] == "slow worker"
    assert (told["opened_at"], told["closed_at"]) == (NOW - 5, NOW + 2)
    (slow,) = told["slow"]
    assert (slow["worker"], slow["rate"], slow["until"]) == ("n1/0", 0.5, NOW + 2)
    assert slow["well"] == (outcome == "recovered")
    assert job_of(state).slowdown is None


def test_it_ends_with_the_job_whose_end_stays_the_last_line(state: ClusterState) -> None:
    lines = [line for _, line in lines_of(state, JobCancelled(job_id=DEMO), NOW + 1)]
    assert [line["event"] for line in lines] == ["incident", "cancelled"]
    assert str(lines[0]["summary"]).endswith(
        "no plan answered it, the job was cancelled after 6.0 s"
    )
    apply(state, JobCancelled(job_id=DEMO), now=NOW + 1, unix=NOW + 1)
    assert job_of(state).slowdown is None


def test_it_ends_where_another_job_has_its_turn(state: ClusterState) -> None:
    happen(state, JobWaiting(job_id=DEMO, causes=("too few nodes",)))
    (told,) = happen(state, JobPutBack(job_id=DEMO, instead=JobId("next-2")), NOW + 1)
    assert told["outcome"] == "gone"
    assert job_of(state).slowdown is None


def test_it_goes_on_with_another_master_and_until_the_last_worker_is_well(
    state: ClusterState,
) -> None:
    assert happen(state, MasterStarted(start="00000001")) == []
    assert happen(state, rate(state, N2_0, 0.8)) == []
    assert happen(state, rate(state, N1_0, 0.25)) == []
    assert happen(state, rate(state, N1_0, 1.0), NOW + 1) == []
    assert happen(state, rate(state, N1_0, 0.75), NOW + 2) == [], "it is slow once more"
    assert happen(state, rate(state, N2_0, 1.0), NOW + 3) == []
    (told,) = happen(state, rate(state, N1_0, 1.0), NOW + 4)
    assert [(s["worker"], s["rate"], s["until"]) for s in told["slow"]] == [
        ("n1/0", 0.25, NOW + 4),
        ("n2/0", 0.8, NOW + 3),
    ]
    assert told["summary"] == (
        "slow worker n1/0 (rank 0): 0.25 of the others' pace; also slow: n2/0; no plan answered "
        "it, well again after 9.0 s"
    )
    assert (job_of(state).incidents, job_of(state).slowdown) == (1, None)


def test_it_tells_the_plans_that_answer_it_and_no_others(state: ClusterState) -> None:
    happen(state, plan_after(state, rule="reshare", policy="uneven", reason="less to do"))
    happen(state, plan_after(state, rule="join", cause="node joined"))
    happen(state, plan_after(state, rule="recut", policy="uneven", cause="worker well"))
    (told,) = happen(state, rate(state, N1_0, 1.0))
    assert [(a["generation"], a["rule"], a["policy"]) for a in told["attempts"]] == [
        (2, "reshare", "uneven"),
        (4, "recut", "uneven"),
    ]
    assert told["attempts"][0]["reason"] == "less to do"
    assert (told["from_generation"], told["to_generation"]) == (1, 4)
    assert told["summary"].endswith("answered by reshare, recut, well again after 5.0 s")


def test_one_that_lasts_for_weeks_stays_small(state: ClusterState) -> None:
    for number in range(MOST_KEPT + 10):
        other = WorkerId(NodeName(f"spot-{number}"), 0)
        assert happen(state, rate(state, other, 0.5)) == []
        assert happen(state, rate(state, other, 1.0)) == []
        assert happen(state, plan_after(state)) == []
    slowdown = job_of(state).slowdown
    assert slowdown is not None
    assert [str(one.worker) for one in slowdown.workers[:2]] == ["n1/0", "spot-10/0"]
    assert len(slowdown.workers) == 1 + MOST_KEPT
    assert len(slowdown.answers) == MOST_KEPT
    assert slowdown.answers[-1].generation == job_of(state).current.generation


def test_a_failure_in_it_is_newer_and_stays_the_last_incident(state: ClusterState) -> None:
    happen(state, worker_lost(state, N2_0))
    job = job_of(state)
    assert job.incident is not None
    assert (job.incident.number, job.incidents) == (2, 2)
    (failure,) = happen(state, JobCancelled(job_id=DEMO), NOW + 1)[:1]
    assert (failure["incident"], failure["outcome"]) == (2, "cancelled")
    assert "slow" not in failure
    assert job.last_incident is not None
    assert job.last_incident.number == 2
