"""Tables at the width of a terminal: nothing is printed, no processes."""

import time

import pytest

from oobleck.cli.cluster.pki import credentials_table
from oobleck.cli.output import text
from oobleck.cli.output.events import event_line
from oobleck.cli.output.table import folded, table
from oobleck.cli.planning.plan import report_text
from oobleck.planner.report.report import make_report
from oobleck.proto import control_pb2 as pb
from support.profiles import profile_of

LONG = "gpu-node-0123.cluster"
REASON = (
    "cannot join the job: data.text: texts/*.txt: no file matches on this node; put that right, "
    "then 'oobleck node undrain' it or start its agent anew"
)


def node(name: str = "n1", **fields: object) -> pb.NodeInfo:
    return pb.NodeInfo(
        **{
            "node": name,
            "state": "live",
            "address": "10.20.130.140",
            "pid": 1234567,
            "worker_slots": 8,
            "workers": [pb.WorkerStatus(slot=slot, card="10.0.0.1:1") for slot in range(8)],
            "device": "cuda",
            "memory_per_worker_bytes": 80 << 30,
            "last_heard_s": 0.62,
            **fields,
        }  # type: ignore[arg-type]
    )


def widest(shown: str) -> int:
    return max(map(len, shown.splitlines()))


def test_table_aligns_numbers_to_the_right_and_text_to_the_left() -> None:
    assert table(("NAME", "N"), [("a", 1), ("longer", 1000)]).split("\n") == [
        "NAME       N",
        "a          1",
        "longer  1000",
    ]
    assert table(("IP", "X"), [("127.0.0.1", "")]) == "IP         X\n127.0.0.1"


def test_a_table_that_is_too_wide_wraps_its_last_column() -> None:
    rows = [("a", "one two three four five six seven"), ("b", "")]
    assert table(("NAME", "REASON"), rows, width=32).split("\n") == [
        "NAME  REASON",
        "a     one two three four five",
        "      six seven",
        "b",
    ]
    assert table(("NAME", "REASON"), rows, width=28).split("\n") == [
        "NAME",
        "a",
        "    one two three four five",
        "    six seven",
        "b",
    ]
    assert table(("NAME", "REASON"), rows, width=39) == table(("NAME", "REASON"), rows)


def test_columns_that_say_nothing_of_any_node_are_left_out() -> None:
    assert text.nodes_table([node("n1"), node("n2")]).splitlines() == [
        "NODE  STATE  WORKERS  HEARD",
        "n1    live   8/8      0.6 s ago",
        "n2    live   8/8      0.6 s ago",
    ]
    busy = text.nodes_table([node("n1", job_id="demo-1"), node("n2", reason="fans")])
    assert busy.splitlines() == [
        "NODE  STATE  WORKERS  JOB     HEARD      REASON",
        "n1    live   8/8      demo-1  0.6 s ago",
        "n2    live   8/8      -       0.6 s ago  fans",
    ]


def test_a_wide_listing_has_every_column_whatever_the_width() -> None:
    shown = text.nodes_table([node("n1")], width=80, wide=True).splitlines()
    assert " ".join(shown[0].split()) == (
        "NODE STATE WORKERS RACK DEVICE MEMORY/WORKER ADDRESS VERSIONS PID JOB GENERATION PACE "
        "HEARD REASON"
    )
    assert len(shown) == 2
    jobs = text.jobs_table([pb.JobStatus(job_id="demo-1")], width=80, wide=True).splitlines()
    assert " ".join(jobs[0].split()) == (
        "JOB STATE STEP DONE LOSS TOKENS/S GENERATION CHECKPOINT SUBMITTED REASON"
    )


@pytest.mark.parametrize("reason", ["", REASON])
@pytest.mark.parametrize("name", ["n1", LONG, "n" * 63])
def test_nodes_fit_80_columns(name: str, reason: str) -> None:
    nodes = [
        node(name, state="disconnected", job_id="llama-3-8b-12", last_heard_s=123.4, reason=reason),
        node("n2"),
    ]
    shown = text.nodes_table(nodes, width=80)
    assert widest(shown) <= 80
    assert name in shown
    assert " ".join(reason.split()) in " ".join(shown.split())


@pytest.mark.parametrize("reason", ["", REASON])
@pytest.mark.parametrize("name", ["demo-1", "llama-3-8b-pretrain-12", "n" * 63])
def test_jobs_fit_80_columns(name: str, reason: str) -> None:
    job = pb.JobStatus(
        job_id=name,
        state="running",
        committed_step=41200,
        steps=100000,
        loss=2.34567,
        tokens_per_s=1234567.8,
        generation=117,
        submitted_at=time.time(),
        reason=reason,
    )
    shown = text.jobs_table([job, job], width=80)
    assert widest(shown) <= 80
    done = "   41%" if name == "demo-1" and not reason else ""  # the rest says more
    assert f"  41200/100000{done}  2.3457  1,234,568  " in shown
    if name != "n" * 63:
        assert name in shown


def test_a_row_that_is_too_wide_goes_on_below_and_no_name_is_cut() -> None:
    rows = [("a" * 30, 123456789, "b" * 12), ("c", 1, "d")]
    assert table(("NAME", "N", "KIND"), rows, width=32).splitlines() == [
        "NAME",
        "            N  KIND",
        "a" * 30,
        "    123456789  bbbbbbbbbbbb",
        "c",
        "            1  d",
    ]


def test_a_long_name_in_a_last_column_stands_whole_below_its_row() -> None:
    name = "gpu-node-0123.rack-7.cluster.example.org"
    assert table(("KIND", "BY"), [("token 0123456789ab", name)], width=50).splitlines() == [
        "KIND",
        "token 0123456789ab",
        f"    {name}",
    ]


def test_an_event_that_is_too_long_goes_on_below_its_text() -> None:
    event = {"event": "waiting", "time": 1.25, "reason": REASON}
    lines = event_line(event, 80).splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80
    assert [line[:14].strip() for line in lines[1:]] == ["", ""]
    assert " ".join(" ".join(lines).split()) == " ".join(event_line(event).split())


def test_a_plan_fits_80_columns() -> None:
    report = make_report(
        profile_of([0.1] * 3), nodes=9, fault_tolerance=0, global_batch=1, min_nodes=3, lost=8
    )
    data = {**report.data(), "notes": [f"memory: {REASON}"]}
    shown = report_text(data, report.drawing(80), 80)
    assert widest(shown) <= 80
    whole = report_text(data, report.drawing(80))
    assert " ".join(shown.split()) == " ".join(whole.split())
    assert "job waits for nodes: needs at least 3 nodes" in " ".join(shown.split())


@pytest.mark.parametrize("name", ["gpu-node-0123", LONG, "n" * 63])
def test_tokens_and_certificates_fit_80_columns(name: str) -> None:
    by = pb.Holder(role="operator", name=name)
    end = time.time()
    found = pb.ListCredentialsReply(
        tokens=[pb.TokenInfo(id="0123456789ab", role="agent", name=name, expires_at=end, by=by)],
        credentials=[pb.CredentialInfo(role="viewer", name="ann", expires_at=end, by=by)],
    )
    shown = credentials_table(found, 80)
    assert widest(shown) <= 80
    assert shown.count(name) == 3
    assert "token 0123456789ab" in shown


def test_a_word_that_is_too_long_is_folded_too() -> None:
    assert folded("a " + "b" * 50, 30, indent=4).splitlines() == [
        "a " + "b" * 28,
        "    " + "b" * 22,
    ]


def test_a_job_in_full_fits_80_columns() -> None:
    stages = [
        pb.Stage(
            first_layer=4 * number,
            last_layer=4 * number + 3,
            workers=[pb.WorkerId(node=f"gpu-node-{number:04d}.cluster", slot=0)],
        )
        for number in range(4)
    ]
    job = pb.JobStatus(
        job_id="llama-3-8b-pretrain-12",
        state="waiting",
        reason=REASON,
        checkpoint_path="/shared",
        checkpoint="/shared/checkpoints/llama-3-8b-pretrain/step-000041200-cda2d4d7",
        checkpoint_step=41200,
        last_incident=f"node {LONG} was lost: {REASON}; recovered in 0.412 s",
        plan=pb.Plan(pipelines=[pb.Pipeline(microbatches=8, stages=stages)]),
        memory=[pb.WorkerMemory(worker=stages[0].workers[0], predicted_bytes=79 << 30)],
    )
    shown = text.job_text(job, 80)
    assert widest(shown) <= 80
    assert sorted(shown.split()) == sorted(text.job_text(job).split())
