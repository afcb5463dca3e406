"""What always holds of the master's state: no history breaks it (`support.scenario` and the
simulation look after every event), and whatever breaks it is found and named."""

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from oobleck.core.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.master.events.jobs import JobCancelled, JobSubmitted, PlanMade, RateChanged
from oobleck.master.events.unions import Journaled, MasterStarted, TermBegan
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.incident import Incident, LastIncident, Slowdown
from oobleck.master.state.job import Job
from oobleck.master.state.job_observed import LossSeen
from oobleck.master.state.node import Desired, Drain
from oobleck.master.state.pace import StandBy
from oobleck.master.state.validate import InvariantViolation, validate
from oobleck.master.storage.journal import Journal
from support.jobs import job_spec
from support.masters import master
from support.scenario import Player, copied
from support.waiting import PATIENCE_S

TRAINS = (
    "0.0 register n1 n2 n3 n4 n5:2\n0.0 submit demo\n0.5 ready n1 n2 n3 n4\n"
    "0.7 enter 1 n1 n2 n3 n4\n1.0 steps 1 5 1\n"
)
DEMO, N1 = JobId("demo-1"), NodeName("n1")
N1_0 = WorkerId(N1, 0)
LATER = LastIncident(number=1, at=1.0, summary="")
EMPTY = Incident(number=1, from_generation=Generation(1))
NOBODY = Slowdown(number=1, from_generation=Generation(1))
WRONG = Incarnation("wrong")

replace = msgspec.structs.replace


def _job(state: ClusterState) -> Job:
    return state.jobs[DEMO]


def _made(state: ClusterState, **changes: object) -> None:
    job = _job(state)
    assert job.current.made is not None
    job.current.made = replace(job.current.made, **changes)


def _set(of: Callable[[ClusterState], object], **values: object) -> Callable[[ClusterState], None]:
    def corrupt(state: ClusterState) -> None:
        for name, value in values.items():
            setattr(of(state), name, value)

    return corrupt


def _current(state: ClusterState) -> object:
    return _job(state).current


def _untrained(state: ClusterState) -> None:
    job = _job(state)
    job.current.trained, job.started_at = None, 0.0


def _told(state: ClusterState) -> RateChanged:
    return RateChanged(job_id=DEMO, worker=N1_0, incarnation=_held(state)[0], rate=0.5)


def _node(state: ClusterState) -> object:
    return state.nodes[N1]


def _node_seen(state: ClusterState) -> object:
    return state.nodes[N1].seen


def _job_seen(state: ClusterState) -> object:
    return _job(state).seen


def _cluster(state: ClusterState) -> object:
    return state


CORRUPTIONS: tuple[tuple[str, str, Callable[[ClusterState], None]], ...] = (
    ("the cluster", "have the turn", _set(_cluster, active=None)),
    ("the cluster", "by their own names", lambda s: s.nodes.update(n9=s.nodes[N1])),
    ("the cluster", "by their requests", lambda s: s.requests.clear()),
    ("the cluster", "were submitted", _set(_cluster, submissions=0)),
    (
        "the cluster",
        "one node",
        lambda s: setattr(s.nodes[N1].seen, "session", s.nodes[NodeName("n2")].seen.session),
    ),
    ("demo-1", "time of their end", _set(_job, finished_at=1.0)),
    ("demo-1", "profiling", _set(_job, state="profiling")),
    ("demo-1", "knows since when", _set(_job, state="waiting for nodes")),
    ("demo-1", "running job", _untrained),
    ("demo-1", "started as soon", _set(_job, started_at=0.0)),
    ("demo-1", "generations only grow", _set(_current, abrupt=Generation(7))),
    ("demo-1", "plans are kept", lambda s: _job(s).lineage.plans.clear()),
    ("demo-1", "that they come from", lambda s: _made(s, policy="reroute")),
    ("demo-1", "process of its own", lambda s: _made(s, incarnations=(WRONG,) * 4)),
    (
        "demo-1",
        "process of its own",
        lambda s: _made(s, starting=(WorkerId(NodeName("n9"), 0),)),
    ),
    (
        "demo-1",
        "that was replaced",
        lambda s: _job(s).lineage.replaced.update(dict.fromkeys(_held(s))),
    ),
    ("demo-1", "left out", lambda s: _job(s).left_out.update(n1="odd")),
    ("demo-1", "known and registered", lambda s: s.nodes.pop(N1)),
    ("demo-1", "templates cover", lambda s: setattr(_job(s).lineage, "most_nodes", 3)),
    ("demo-1", "has a setback", _set(_job, incident=EMPTY, incidents=1)),
    ("demo-1", "numbers of their own", _set(_job, last_incident=LATER)),
    ("demo-1", "tells of all", lambda s: _job(s).slow.update({N1_0: _told(s)})),
    ("demo-1", "a slowdown is open", _set(_job, slowdown=NOBODY, incidents=1)),
    ("demo-1", "their times", lambda s: _stood_by(s, _held(s)[0])),
    ("demo-1", "have stood by", lambda s: _stood_by(s, WRONG)),
    ("demo-1", "done again", lambda s: setattr(_job(s).rollback, "redo_until", 9)),
    ("demo-1", "up to the newest", lambda s: _job(s).saves.numbers.update(r=1)),
    ("demo-1", "first evidence", _set(_job_seen, loss=LossSeen(2.0, 1.0))),
    ("demo-1", "newest committed step", lambda s: setattr(_job(s).seen.steps, "committed_step", 2)),
    (
        "demo-1",
        "entered generations",
        lambda s: _job(s).seen.processes.entered.update(x=frozenset({9})),
    ),
    ("n5", "lost node", lambda s: setattr(s.nodes[NodeName("n5")], "registered", False)),
    ("n1", "stale workers", _set(_node, stale_workers=True)),
    (
        "n1",
        "what the active job wants",
        _set(_node, desired=Desired(job_id=DEMO, generation=Generation(7))),
    ),
    ("n1", "may end", _set(_node, drain=Drain(by="operator", reason="", force=False, done=True))),
    (
        "n1",
        "quarantines end",
        _set(_node, drain=Drain(by="operator", reason="", force=False, until=1.0)),
    ),
    ("n1", "time since to prepare", _set(_node_seen, assigned_at=None)),
    ("n1", "a beginning and no end", _set(_node_seen, closed_at=1.0)),
)


def _stood_by(state: ClusterState, process: Incarnation) -> None:
    """Of the one that is not wrong the times are missing."""
    one = StandBy(process=process, seconds=0.0, until=9.0)
    if process == WRONG:
        _job(state).set_stand_bys({N1_0: one}, 1.0, 1.0)
    else:
        _job(state).stand_bys[N1_0] = one


def _held(state: ClusterState) -> tuple[Incarnation, ...]:
    made = _job(state).current.made
    assert made is not None
    return made.incarnations


@pytest.fixture(scope="module")
def trained() -> ClusterState:
    player = Player()
    player.play(TRAINS)
    return player.state


@pytest.mark.parametrize(
    ("subject", "words", "corrupt"), CORRUPTIONS, ids=[words for _, words, _ in CORRUPTIONS]
)
def test_a_state_that_no_history_leads_to_is_found_and_named(
    trained: ClusterState, subject: str, words: str, corrupt: Callable[[ClusterState], None]
) -> None:
    state = copied(trained)
    validate(state)
    corrupt(state)
    with pytest.raises(InvariantViolation, match=words) as found:
        validate(state)
    assert subject in found.value.subject
    assert found.value.sentence in str(found.value)


def _journal(path: Path, events: list[Journaled]) -> None:
    with contextlib.closing(Journal(path)) as journal:
        for event in events:
            journal.append(event, 1_700_000_000.0)
        journal.commit()


def test_a_master_that_validates_ends_with_the_sentence_and_the_last_events(tmp_path: Path) -> None:
    """Its journal has two ended jobs of one request, of which it forgets the first."""
    ended: list[Journaled] = [
        event
        for job_id in (JobId("demo-1"), JobId("demo-2"))
        for event in (
            JobSubmitted(job_id=job_id, request_id="same", spec=job_spec("demo")),
            JobCancelled(job_id=job_id),
        )
    ]
    path = tmp_path / "journal.log"
    _journal(path, ended)
    command = [sys.executable, "-m", "oobleck.master", "--listen", "127.0.0.1:0", "--validate"]
    run = subprocess.run(
        [*command, "--state-dir", str(tmp_path), "--keep-jobs", "1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.returncode == 3, run.stderr
    lines = run.stderr.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("oobleck-master: "))
    sentence = "jobs and nodes are known by their own names, and jobs by their requests"
    assert lines[first] == (
        f"oobleck-master: the cluster breaks an invariant: {sentence}; the last events:"
    )
    assert "JobSubmitted(" in lines[first + 1]
    assert " JobForgotten(" in lines[-1]
    with contextlib.closing(Journal(path)) as journal:
        replayed = [event for _, event in journal.replay()]
    assert replayed[:-2] == ended
    assert [type(event) for event in replayed[-2:]] == [MasterStarted, TermBegan]


def test_what_an_earlier_master_broke_is_a_warning(tmp_path: Path) -> None:
    """The journal has a plan that waits for a worker that is not in it."""
    player = Player()
    player.play(TRAINS)
    nobody = (WorkerId(NodeName("n9"), 0),)
    events = [
        replace(event, starting=nobody) if isinstance(event, PlanMade) else event
        for _, event in player.journal
    ]
    _journal(tmp_path / "journal.log", events)
    with master(tmp_path, "--validate") as running:
        warned = running.errors.read_text()
    assert "job demo-1 breaks an invariant: every worker of a plan has a process" in warned
