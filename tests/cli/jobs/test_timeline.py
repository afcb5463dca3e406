"""How timelines are asked for, and what is said of them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec import structs

from oobleck.cli.dashboard.gantt import LEFT, MOST_LANES, RIGHT, WIDTH, gantt
from oobleck.cli.planning.profile import profile
from oobleck.cli.reading.timeline import steps_table, summary, timeline
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.messages import Recording, Span
from oobleck.host.timeline import Track, chrome_trace
from oobleck.proto import control_pb2 as pb
from support.operators_master import answering


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing argument 'JOB.yaml'"),
        (("--timeline", "out.json"), "oobleck profile --timeline OUT.json --job ID"),
        (("job.yaml", "--timeline", "out.json", "--job", "demo-1"), "a timeline needs a running"),
        (("job.yaml", "--job", "demo-1"), "--job and --steps require --timeline"),
        (("--timeline", "out.json", "--job", "demo-1", "--steps", "0"), "1<=x<=100"),
    ],
)
def test_wrong_usage_says_what_is_right(arguments: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(profile, arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_summary_has_steps_workers_clocks_and_the_longest_time_of_each_phase() -> None:
    phases = [("transfer", 3, 12.5), ("leave", 1, 1.0), ("transfer", 2, 20.0), ("transfer", 3, 0.5)]
    trace = {
        "traceEvents": [
            {"name": "thread_name", "ph": "M"},
            {"name": "step 7", "cat": "step"},
            *(
                {"name": name, "cat": "recovery", "pid": pid, "tid": 0, "ts": pid, "dur": ms * 1e3}
                for name, pid, ms in phases
            ),
        ],
        "otherData": {"clocks": {"n1": {"within_us": 0.0}, "n2": {"within_us": 250.0}}},
    }
    assert summary(trace) == (
        "step 7 of 1 worker, clocks within 250 us; its plan took effect in: leave 1.0 ms, "
        "transfer 20.0 ms"
    )


def track(node: str, waits_ms: int) -> Track:
    """Two steps of 10 ms; in each a forward pass of layers 0 and 1, then a wait, then a vote."""
    spans = [Span("transfer", "recovery", 0, 5_000_000)]
    for step in (7, 8):
        at = step * 10_000_000
        spans += [
            Span("layer 0", "step", at + 1_000_000, 1_000_000),
            Span("layer 1", "step", at + 2_000_000, 1_000_000),
            Span("forward 3", "step", at + 1_000_000, 2_000_000),
            Span("receive activation 0", "step", at + 3_000_000, waits_ms * 1_000_000),
            Span("vote", "step", at + 8_000_000, 1_500_000),
            Span(f"step {step}", "step", at, 10_000_000),
            Span("sum 0", "sum", at + 1_000_000, 9_000_000),
        ]
    recording = Recording(number=1, generation=Generation(1), steps=(7, 8), spans=tuple(spans))
    return Track(
        worker=WorkerId(NodeName(node), 0), title="pipeline 0, stage 0", recording=recording
    )


def test_a_timeline_is_shown_as_a_table_and_written(tmp_path: Path) -> None:
    trace = chrome_trace([track("n1", 1), track("n2", 4)])
    reply = pb.TimelineReply(trace=json.dumps(trace))
    asked: list[int] = []

    def answer(request: pb.TimelineRequest) -> pb.TimelineReply:
        asked.append(request.steps)
        return reply

    with answering(GetTimeline=answer) as address:

        def told(*arguments: str) -> Result:
            return CliRunner().invoke(timeline, ["demo-1", *arguments, "--master", address])

        path = tmp_path / "out.json"
        done = told(str(path), "--steps", "2")
        assert json.loads(path.read_text()) == trace
        assert json.loads(told("--json").stdout) == trace
        nowhere = told(str(tmp_path / "no" / "out.json"))
    assert asked == [2, 1], "a folder that is not there is told of first"
    assert (nowhere.exit_code, "its folder does not exist" in nowhere.stderr) == (2, True)
    assert [" ".join(line.split()) for line in done.stdout.splitlines()[2:5]] == [
        "WORKER LOAD COMPUTE RECEIVE SEND SUM VOTE OTHER STEP STAGE",
        "n1/0 0.0 2.0 1.0 0.0 0.0 1.5 5.5 10.0 pipeline 0, stage 0",
        "n2/0 0.0 2.0 4.0 0.0 0.0 1.5 2.5 10.0 pipeline 0, stage 0",
    ]


def test_a_drawing_has_a_lane_for_each_worker() -> None:
    drawn = gantt(chrome_trace([track("n1", 1), track("n2", 4)]))
    assert [(lane.name, lane.title) for lane in drawn.lanes] == [
        ("n1/0", "n1/0 (rank 0): pipeline 0, stage 0"),
        ("n2/0", "n2/0 (rank 1): pipeline 0, stage 0"),
    ]
    bars = drawn.lanes[1].bars
    assert [bar.kind for bar in bars] == ["forward", "receive", "vote"] * 2
    assert [bar.title for bar in bars[:2]] == [
        "forward 3: 2.000 ms",
        "receive activation 0: 4.000 ms",
    ]
    # Two steps of 10 ms fill the width; what led to the plan is not drawn.
    scale = (WIDTH - LEFT - RIGHT) / 20
    assert [round((bar.x - LEFT) / scale, 6) for bar in bars] == [1, 3, 8, 11, 13, 18]
    assert (drawn.steps, drawn.left_out) == ("step 7, step 8", 0)
    assert drawn.kinds == ("forward", "receive", "vote")


def test_a_drawing_is_bounded() -> None:
    many = [Span("step 7", "step", 0, 10**9)]
    many += [Span(f"forward {n}", "step", 10_000 * n, 9_000) for n in range(100_000)]
    recording = structs.replace(track("n1", 1).recording, spans=tuple(many))
    lanes = [structs.replace(track(f"n{n}", 1), recording=recording) for n in range(2)]
    drawn = gantt(chrome_trace([*lanes, *(track(f"m{n}", 1) for n in range(MOST_LANES))]))
    assert (len(drawn.lanes), drawn.left_out) == (MOST_LANES, 2)
    bars = next(lane for lane in drawn.lanes if lane.name == "n0/0").bars
    assert len(bars) < 3000
    assert sum(bar.width for bar in bars) == pytest.approx(WIDTH - LEFT - RIGHT, rel=0.01)


def test_what_a_gpu_computes_has_a_column_and_a_thread() -> None:
    """The host is done with a forward when the GPU has hardly begun."""
    host = track("n1", 1)
    device = [Span("layer 0", "step", 74_000_000, 3_000_000)]
    device += [Span("forward 3", "step", at, 7_000_000) for at in (74_000_000, 84_000_000)]
    recording = structs.replace(host.recording, device=tuple(device))
    trace = json.loads(
        json.dumps(chrome_trace([structs.replace(host, recording=recording), track("n2", 4)]))
    )
    assert [" ".join(line.split()) for line in steps_table(trace).splitlines()] == [
        "WORKER LOAD COMPUTE RECEIVE SEND SUM VOTE GPU OTHER STEP STAGE",
        "n1/0 0.0 2.0 1.0 0.0 0.0 1.5 7.0 5.5 10.0 pipeline 0, stage 0",
        "n2/0 0.0 2.0 4.0 0.0 0.0 1.5 0.0 2.5 10.0 pipeline 0, stage 0",
    ]
    assert summary(trace).startswith("step 7, step 8 of 2 workers, ")
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names[1] == "n1/0 (rank 0), device: pipeline 0, stage 0"
    forwards = [e for e in trace["traceEvents"] if e["name"] == "forward 3"]
    assert [(e["ts"], e["dur"]) for e in forwards if e["cat"] == "device"] == [
        (74_000.0, 7_000.0),
        (84_000.0, 7_000.0),
    ]
