"""What a release has written and said, kept as files for the releases after it.

`python -m support.release 0.1.0` writes them by this release's code; `test_releases.py` has every
later release read them. They are written once for each release, and not changed after it.
"""

import contextlib
import json
import shutil
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from oobleck.core.codec import decode, encode
from oobleck.core.ids import Generation, Incarnation, JobId, NodeName
from oobleck.core.messages import Assign, Rendezvous
from oobleck.host.detection import DETECTIONS
from oobleck.host.versions import Versions
from oobleck.master.events.jobs import JobAdopted, JobForgotten, RecordsDiffer
from oobleck.master.events.nodes import NodeHeld, UnknownJobEnded
from oobleck.master.events.trust import (
    CredentialIssued,
    CredentialsRevoked,
    TokenCreated,
    TokenRevoked,
)
from oobleck.master.events.unions import Journaled, TermBegan
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.reducer.apply import apply
from oobleck.master.storage import snapshot as snapshots
from oobleck.master.storage.journal import Journal, Snapshot
from oobleck.proto import control_pb2 as pb
from oobleck.proto.assignments import assignment_message, read_assignment
from oobleck.proto.detection import read_welcome, welcome_message
from oobleck.proto.protocol import NEWEST, OLDEST
from oobleck.proto.reports import read_output, read_records, read_report, report_bytes
from oobleck.proto.status import read_register, read_status, register_message, status_message
from oobleck.proto.types import (
    Assignment,
    Head,
    NodeFacts,
    NodeStatus,
    Registration,
    WorkerReport,
    WorkerStatus,
)
from support.folders import ROOT
from support.jobs import job_spec
from support.plans import plan_of_cuts
from support.reports import REPORTS
from support.scenario import Player

RELEASES = ROOT / "tests/releases"
SCENARIOS = ROOT / "tests/master/scenarios"
#: The scenario whose state directory is kept: it has jobs, plans, losses and checkpoints.
KEPT = SCENARIOS / "leave.txt"
JOB, NODE = JobId("demo-1"), NodeName("n1")
HEAD = Head(
    cluster="aa" * 16, history="bb" * 16, term=2, begun_by="cc" * 8, sequence=9, start="dd" * 8
)
#: Events that no scenario has.
RARE: tuple[Journaled, ...] = (
    TermBegan(
        cluster="aa" * 16,
        history="bb" * 16,
        number=2,
        begun_by="cc" * 8,
        place="ee",
        reason="moved",
    ),
    JobAdopted(
        job_id=JOB, request_id="r1", spec=job_spec("demo"), nodes=(NODE,), generation=Generation(3)
    ),
    JobForgotten(job_id=JOB),
    RecordsDiffer(
        job_id=JOB, record="step", step=4, nodes=(NODE, NodeName("n2")), fields=("loss",)
    ),
    NodeHeld(node=NODE, job_id=JOB, queued=True),
    UnknownJobEnded(job_id=JOB, nodes=(NODE,)),
    TokenCreated(
        fingerprint="ab" * 32, role="agent", name="n1", expires_at=9.0, maker=("operator", "ann")
    ),
    TokenRevoked(fingerprint="ab" * 32),
    CredentialIssued(role="agent", name="n1", expires_at=9.0, token="ab" * 32, key="cd" * 32),
    CredentialsRevoked(role="agent", name="n1"),
)


def readers() -> Mapping[str, Callable[[bytes], Any]]:
    """How an end reads each kind of message."""

    def registered(data: bytes) -> Registration:
        message = pb.AgentMessage.FromString(data)
        return read_register(message.register, message.incarnation)

    return {
        "register": registered,
        "status": lambda data: read_status(pb.NodeStatus.FromString(data)),
        "report": read_report,
        "records": lambda data: read_records(pb.StepRecords.FromString(data)),
        "log": lambda data: read_output(pb.LogLines.FromString(data)),
        "welcome": lambda data: read_welcome(pb.Welcome.FromString(data)),
        "assignment": lambda data: read_assignment(pb.Assignment.FromString(data)),
    }


def messages() -> list[tuple[str, bytes]]:
    """Messages between agent and master with all their fields, by kind."""
    incarnation = Incarnation("ab" * 8)
    plan = plan_of_cuts(([(1, 2), 1], 2), ([2], 1), schedule="zb-h1")
    assign = Assign(
        plan=plan, rendezvous=Rendezvous(host="10.0.0.1:4000", prefix="p"), boundary=True
    )
    assignment = Assignment(
        version=7,
        job_id=JOB,
        job=job_spec("demo", steps=40, checkpoint=1, evaluate=7),
        assign=assign,
        worker_incarnations=(incarnation,),
        save=3,
        drained=True,
        head=HEAD,
    )
    worker = WorkerStatus(
        slot=0,
        incarnation=incarnation,
        pid=4,
        generation=Generation(2),
        committed_step=7,
        also_entered=(Generation(1),),
    )
    status = NodeStatus(job_id=JOB, generation=Generation(2), workers=(worker,), leaving=True)
    facts = NodeFacts(
        node=NODE,
        incarnation=incarnation,
        hostname="host",
        address="10.0.0.1",
        pid=3,
        worker_slots=1,
        device="cuda",
        memory_per_worker_bytes=1 << 30,
        device_kind="H100",
        rack="r1",
        versions=Versions(oobleck="0.1.0", python="3.11.2", torch="2.9.0", engine="1"),
        newest_protocol=NEWEST,
    )
    registration = Registration(
        protocol=OLDEST,
        facts=facts,
        status=status,
        running=msgspec.structs.replace(assignment, job=None),
        acted_on=HEAD,
    )
    envelope = pb.AgentMessage(incarnation=incarnation, register=register_message(registration))
    record = pb.StepRecord(
        step=1, loss=1.0, grad_norm=1.0, tokens=1, samples_digest="0" * 64, generation=1,
        step_seconds=0.1, time=1.0,
    )  # fmt: skip
    found = [
        ("register", envelope.SerializeToString()),
        ("status", status_message(status).SerializeToString()),
        ("records", pb.StepRecords(job_id=JOB, records=[record]).SerializeToString()),
        ("log", pb.LogLines(job_id=JOB, slot=0, lines=["a", "b"]).SerializeToString()),
        ("assignment", assignment_message(assignment).SerializeToString()),
    ]
    for what in REPORTS:
        report = WorkerReport(job_id=JOB, slot=0, incarnation=incarnation, what=what)
        found.append(("report", report_bytes(report)))
    for detection in DETECTIONS.values():
        welcome = welcome_message(detection, NEWEST, HEAD, ["10.0.0.9:4600"])
        found.append(("welcome", welcome.SerializeToString()))
    return found


def state_of(path: Path) -> ClusterState:
    """The state that a journal leads to."""
    state = ClusterState()
    with contextlib.closing(Journal(path)) as journal:
        for unix, entry in journal.replay():
            if isinstance(entry, Snapshot):
                state, *_ = snapshots.restore(entry.content, 0.0)
            else:
                apply(state, entry, now=0.0, unix=unix)
    return state


def _write_journal(path: Path, entries: list[tuple[float, Journaled]], *, compact_at: int) -> None:
    """Write a journal that has a snapshot in the place of its first events."""
    path.parent.mkdir(parents=True)
    state = ClusterState()
    with contextlib.closing(Journal(path)) as journal:
        for number, (unix, event) in enumerate(entries):
            if number and number == compact_at:
                journal.compact(snapshots.take(state, {}, ()), unix)
            journal.append(event, unix)
            journal.commit()
            apply(state, event, now=0.0, unix=unix)
    path.with_name("journal.old").unlink(missing_ok=True)


def main(release: str) -> None:
    folder = RELEASES / release
    shutil.rmtree(folder, ignore_errors=True)
    told = [
        json.dumps(
            {
                "kind": kind,
                "message": b64encode(data).decode(),
                "means": decode(object, encode(readers()[kind](data))),
            }
        )
        for kind, data in messages()
    ]
    folder.mkdir(parents=True)
    (folder / "messages.jsonl").write_text("\n".join(told) + "\n")
    kinds: dict[str, Journaled] = {type(event).__name__: event for event in RARE}
    for scenario in sorted(SCENARIOS.glob("*.txt")):
        player = Player()
        player.play(scenario.read_text())
        for _, event in player.journal:
            kinds.setdefault(type(event).__name__, event)
        if scenario == KEPT:
            entries = list(player.journal)
            _write_journal(folder / "state/journal.log", entries, compact_at=len(entries) // 2)
            _write_journal(folder / "events/journal.log", entries, compact_at=0)
    lines = [encode(kinds[name]) for name in sorted(kinds)]
    (folder / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def kept_messages(folder: Path) -> list[tuple[str, bytes, Any]]:
    """The messages of a release: their kinds, their bytes, and what that release read in them."""
    lines = map(json.loads, (folder / "messages.jsonl").read_text().splitlines())
    return [(line["kind"], b64decode(line["message"]), line["means"]) for line in lines]


if __name__ == "__main__":
    main(sys.argv[1])
