"""What is printed, from given messages: no master, no processes."""

import io
import time

import pytest

from oobleck.cli.jobs.submit import LiveLine
from oobleck.cli.output import text
from oobleck.cli.output.events import event_line
from oobleck.cli.output.text import progress_line
from oobleck.proto import control_pb2 as pb


def job(**changes: object) -> pb.JobStatus:
    fields: dict[str, object] = {
        "job_id": "demo-1",
        "state": "running",
        "committed_step": 57,
        "steps": 200,
        "loss": 2.34567,
        "tokens_per_s": 12345.6,
        "generation": 3,
        "eta_s": 75.2,
        "plan": pb.Plan(
            generation=3,
            pipelines=[
                pb.Pipeline(
                    nodes=["n1", "n2"],
                    microbatches=9,
                    stages=[
                        pb.Stage(last_layer=4, workers=[pb.WorkerId(node="n1", slot=0)]),
                        pb.Stage(
                            first_layer=5, last_layer=9, workers=[pb.WorkerId(node="n2", slot=1)]
                        ),
                    ],
                )
            ],
        ),
    }
    return pb.JobStatus(**{**fields, **changes})  # type: ignore[arg-type]


def test_plain_keeps_defaults_and_numbers() -> None:
    value = text.plain(pb.JobStatus(job_id="demo-1", steps=5))
    assert value["steps"] == 5
    assert value["loss"] is None
    assert value["plan"] is None
    assert value["reason"] == ""
    assert text.plain(job())["plan"]["pipelines"][0]["stages"][1]["workers"] == [
        {"node": "n2", "slot": 1}
    ]


@pytest.mark.parametrize(
    ("span_s", "shown"),
    [
        (0.4124, "0.412 s"),
        (9.9994, "9.999 s"),
        (9.9996, "10.0 s"),
        (12.34, "12.3 s"),
        (59.96, "1 min 00 s"),
        (179.4, "2 min 59 s"),
        (179.7, "3 min 00 s"),
        (250, "4 min 10 s"),
        (3599.4, "59 min 59 s"),
        (3599.7, "1 h 00 min"),
        (7199.0, "2 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_seconds(span_s: float, shown: str) -> None:
    assert text.seconds(span_s) == shown


def test_a_forecast_is_in_whole_seconds() -> None:
    assert [text.about(span_s) for span_s in (0.4, 59.4, 59.6, 179.7)] == [
        *("0 s", "59 s", "1 min 00 s", "3 min 00 s")
    ]


def test_a_span_of_any_length_is_told_to_its_last_part() -> None:
    """No part is 60 or more, and what is told is the span, rounded to its last part."""
    factors = {"h": 3600.0, "min": 60.0, "s": 1.0}
    for tenths in range(0, 3 * 36000, 3):
        span_s = tenths / 10 + 0.0499
        for told in (text.seconds(span_s), text.about(span_s)):
            words = told.split()
            parts = {unit: float(n) for n, unit in zip(words[::2], words[1::2], strict=True)}
            assert parts.get("s", 0.0) < 60, (span_s, told)
            assert parts.get("min", 0.0) < 60, (span_s, told)
            value_s = sum(factors[unit] * number for unit, number in parts.items())
            within_s = 30.0 if "h" in parts else 0.5
            assert abs(value_s - span_s) <= within_s, (span_s, told)


def test_status_of_a_job_draws_its_pipelines() -> None:
    shown = text.job_text(job(can_lose=1, reconfigurations=2))
    assert "can lose    1 more node, whichever, without losing a layer" in shown
    assert "pipeline 0              9  n1 [0..4] -> n2/1 [5..9]" in shown
    assert "can lose" not in text.job_text(job(state="succeeded"))
    assert "skipped" not in shown
    assert "skipped     1 step with" in text.job_text(job(skipped_steps=1))


def test_status_of_a_job_draws_the_routes_of_a_plan_without_whole_pipelines() -> None:
    first = [
        pb.Stage(last_layer=4, workers=[pb.WorkerId(node="n1", slot=0)]),
        pb.Stage(first_layer=5, last_layer=9, workers=[pb.WorkerId(node="n2", slot=1)]),
    ]
    other = pb.Stage(first_layer=5, last_layer=9, workers=[pb.WorkerId(node="n4", slot=0)])
    plan = pb.Plan(
        generation=3,
        routes=[
            pb.Route(hops=first, microbatches=5),
            pb.Route(hops=[first[0], other], first_microbatch=5, microbatches=1),
        ],
    )
    asked = job(plan=plan, policy="auto", plan_policy="reroute", then="templates", generation=3)
    shown = text.job_text(asked)
    assert "\npolicy      auto\n" in shown
    assert "\ngeneration  3 by policy reroute, then templates at a step boundary; 0 reconf" in shown
    assert "route 0  0-4            n1 [0..4] -> n2/1 [5..9]" in shown
    assert "route 1  5              n1 [0..4] -> n4 [5..9]" in shown
    assert "pipeline" not in shown


def test_status_of_a_job_draws_what_is_held_and_not_run() -> None:
    n1, n2 = (pb.WorkerId(node=node, slot=0) for node in ("n1", "n2"))
    hops = [
        pb.Stage(last_layer=4, workers=[n1]),
        pb.Stage(first_layer=5, last_layer=9, workers=[n2]),
    ]
    shadows = [
        pb.Stage(first_layer=5, last_layer=9, workers=[n1]),
        pb.Stage(last_layer=1, workers=[n2]),
        pb.Stage(first_layer=3, last_layer=4, workers=[n2]),
    ]
    plan = pb.Plan(generation=3, routes=[pb.Route(hops=hops, microbatches=8)], shadows=shadows)
    _, drawn = text.job_text(job(plan=plan, can_lose=1)).split("\n\n")
    assert drawn == (
        "ROUTE     MICRO-BATCHES  NODES [LAYERS]\n"
        "route 0   0-7            n1 [0..4] -> n2 [5..9]\n"
        "shadow 0  -              n1 [5..9]\n"
        "shadow 1  -              n2 [0..1]\n"
        "shadow 2  -              n2 [3..4]"
    )


def test_status_of_a_job_shows_the_memory_of_its_workers() -> None:
    memory = [
        pb.WorkerMemory(
            worker=pb.WorkerId(node="n1", slot=0), peak_bytes=3 << 30, predicted_bytes=7 << 29
        ),
        pb.WorkerMemory(worker=pb.WorkerId(node="n2", slot=1), predicted_bytes=1 << 30),
    ]
    assert text.job_text(job(memory=memory)).endswith(
        "\n\nWORKER  PEAK MEMORY  PREDICTED\n"
        "n1/0    3.0 GiB      3.5 GiB\n"
        "n2/1    -            1.0 GiB"
    )


def test_the_newest_evaluation_is_shown() -> None:
    evaluation = pb.Evaluation(step=50, loss=2.5, samples=8)
    assert "held out    2.5000 (step 50)" in text.job_text(job(evaluation=evaluation))
    assert "  held out 2.5000 (step 50)  " in progress_line(job(evaluation=evaluation))
    evaluation.ClearField("loss")
    assert "held out    not finite (step 50)" in text.job_text(job(evaluation=evaluation))


def test_a_job_that_stands_still_tells_since_when() -> None:
    still = job(tokens_per_s=0.0, eta_s=0.0, last_step_age_s=3.1)
    assert "step        57 of 200 (28%), the last 3.1 s ago" in text.job_text(still)
    assert "  last step 3.1 s ago  " in progress_line(still)
    moving = job(last_step_age_s=0.4)
    assert " ago" not in text.job_text(moving) + progress_line(moving)


def test_what_part_of_its_gpus_a_job_reaches_is_told_where_it_is_known() -> None:
    assert "12,346 tokens/s, about" in text.job_text(job())
    assert "12,346 tokens/s (42% of the GPUs' peak), about" in text.job_text(job(mfu=0.417))


def test_status_of_a_job_tells_when_the_next_loss_is_expected() -> None:
    outlook = pb.Outlook(losses_per_node_day=0.5, next_loss_s=43_200, prior_mtbf_s=30 * 86_400)
    job = pb.JobStatus(outlook=outlook)
    assert text.outlook(job) == (
        "in about 12 h 00 min; one node: about every 2 days (none seen lately; recovery.mtbf is 30 "
        "days)"
    )
    job.outlook.seen, job.outlook.back_s = 3.04, 600
    assert text.outlook(job).endswith(
        "(3 seen lately; recovery.mtbf is 30 days); back after 10 min 00 s"
    )


def test_status_of_a_job_says_how_old_its_checkpoint_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    saved = job(
        checkpoint_path="/saved", checkpoint="/saved/50", checkpoint_step=50, checkpoint_at=999_750
    )
    assert "checkpoint  step 50, 4 min 10 s ago, /saved/50\n" in text.job_text(saved)
    assert "  4 min 10 s ago  " in text.jobs_table([saved], wide=True)
    ahead = job(checkpoint_path="/saved", checkpoint="/saved/50", checkpoint_at=1_000_009.0)
    assert "checkpoint  step 0, 0 s ago, " in text.job_text(ahead)
    assert "checkpoint  none yet\n" in text.job_text(job(checkpoint_path="/saved"))
    ended = job(checkpoint_path="/saved", state="succeeded")
    assert "checkpoint  none\n" in text.job_text(ended)


def test_all_of_a_job_is_done_when_its_last_step_is() -> None:
    shares = [(0, 0), (0, 200), (199, 200), (200, 200), (999_999, 1_000_000)]
    told = [text.done(pb.JobStatus(committed_step=step, steps=steps)) for step, steps in shares]
    assert told == ["0%", "0%", "99%", "100%", "99%"]


def test_progress_line() -> None:
    assert progress_line(job()) == (
        "running  step 57/200  loss 2.3457  12,346 tokens/s  2 nodes (2)  generation 3  "
        "~1 min 15 s to go"
    )
    assert "  loss 2.3457  9 skipped  12,346 tokens/s" in progress_line(job(skipped_steps=9))


def test_the_progress_line_leaves_out_what_matters_least_and_keeps_how_long_it_will_take() -> None:
    full = job(
        generation=117,
        skipped_steps=9,
        evaluation=pb.Evaluation(step=50, loss=2.5),
        tokens_per_s=1234567.8,
        committed_step=41200,
        steps=100000,
        eta_s=12345.6,
    )
    assert progress_line(full, 79) == (
        "running  step 41200/100000  loss 2.3457  1,234,568 tokens/s  ~3 h 26 min to go"
    )
    assert progress_line(full, 160) == progress_line(full)
    assert progress_line(full, 50) == "running  step 41200/100000  ~3 h 26 min to go"
    for width in range(16, 160):
        line = progress_line(full, width)
        assert len(line) <= width
        assert line.startswith("running  step")
        assert ("to go" in line) == (width >= 45)


def test_the_progress_line_says_why_before_all_but_the_step() -> None:
    waits = job(state="waiting", reason="needs 2 nodes that hold layers 0-4, and n1 is lost")
    assert progress_line(waits, 79) == (
        "waiting  step 57/200  (needs 2 nodes that hold layers 0-4, and n1 is lost)"
    )
    assert progress_line(waits, 40) == "waiting  step 57/200  (needs 2 nodes th…"


def test_steps_that_are_done_again_are_shown_wherever_the_job_is() -> None:
    redo = pb.Redo(first_step=2601, last_step=2660, committed_step=2633)
    again = job(redo=redo)
    shown = "redoing 2601-2660, at 2634"
    assert f"  {shown}  " in progress_line(again)
    assert f"state       running: {shown}\n" in text.job_text(again)
    assert text.jobs_table([again]).endswith(f"  {shown}")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_is_rewritten_below_the_events() -> None:
    out = Terminal()
    progress = LiveLine(out)
    progress.status(job(state="one"), 0.0)
    progress.above("an event")
    progress.status(job(state="two"), 0.1)
    progress.finish()
    pieces = out.getvalue().split("\r\x1b[K")
    assert [piece.split("  ")[0] for piece in pieces] == ["", "one", "an event\n", "one", "two"]
    assert out.getvalue().endswith("\n")


def test_elsewhere_a_line_comes_each_second_or_with_a_change_of_state() -> None:
    out = io.StringIO()
    progress = LiveLine(out)
    for now, step in ((0.0, 1), (0.5, 2), (1.0, 3), (1.1, 4)):
        progress.status(job(committed_step=step), now)
    progress.status(job(committed_step=5, generation=4), 1.2)
    steps = [line.split("step ")[1].split("/")[0] for line in out.getvalue().splitlines()]
    assert steps == ["1", "3", "5"]


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (
            {
                "event": "node_lost",
                "node": "n3",
                "reason": "lease",
                "detect_s": 5.2,
                "cause": "lease",
            },
            "node n3 lost: lease (known after 5.200 s)",
        ),
        (
            {"event": "node_draining", "node": "n4", "reason": "fans"},
            "node n4 is to be drained: fans",
        ),
        (
            {"event": "node_kept", "node": "n4", "reason": "job a-1 needs it"},
            "node n4 is kept for now: job a-1 needs it",
        ),
        ({"event": "node_drained", "node": "n4", "abrupt": False}, "node n4 is drained"),
        (
            {"event": "node_drained", "node": "n4", "abrupt": True},
            "node n4 is drained; the job must go on without it",
        ),
        ({"event": "node_undrained", "node": "n4"}, "node n4 may take part again"),
        (
            {"event": "node_quarantined", "node": "n4", "reason": "failed", "seconds": 120.0},
            "node n4 is quarantined for 2 min 00 s: failed",
        ),
        (
            {"event": "node_released", "node": "n4", "reason": "its time is over"},
            "node n4 may take part again: its time is over",
        ),
        (
            {
                "event": "node_lost",
                "node": "n4",
                "cause": "left",
                "reason": "its agent has ended",
                "detect_s": 0.0,
            },
            "node n4 left: its agent has ended",
        ),
        ({"event": "put_back", "instead": "b-2"}, "b-2 runs meanwhile"),
        (
            {"event": "versions_differ", "versions": {"torch": {"2.12": ["n4"], "2.13": ["n1"]}}},
            "versions differ among the job's nodes: torch 2.12 on n4, 2.13 on n1",
        ),
        (
            {"event": "node_left_out", "node": "n4", "reason": "its data differ"},
            "node n4 is left out: its data differ",
        ),
        ({"event": "waiting", "reason": "needs 2 nodes"}, "waiting for nodes: needs 2 nodes"),
        ({"event": "unheard_of", "id": 4, "x": 1}, "unheard_of x=1"),
        (
            {
                "event": "reconfigured",
                "from_generation": 1,
                "to_generation": 2,
                "rule": "borrow",
                "cause": "node lost",
                "nodes_lost": ["n3"],
                "total_s": 0.25,
                "phases": {"detect": 0.05, "plan": 0.2},
                "redo_step": 9,
                "salvaged_microbatches": 6,
                "received_bytes": 2048,
            },
            "generation 2 by borrow: goes on without n3, in 0.250 s "
            "(detect 0.050, plan 0.200), step 9 done again but for 6 of its micro-batches, "
            "2.0 KiB of state moved",
        ),
        (
            {
                "event": "reconfigured",
                "to_generation": 3,
                "rule": "join",
                "cause": "node lost",
                "nodes_lost": ["n2"],
                "nodes_joined": ["n1"],
                "total_s": 0.25,
                "phases": {"detect": 0.25},
            },
            "generation 3 by join: goes on without n2, with n1, in 0.250 s (detect 0.250)",
        ),
        (
            {
                "event": "reconfigured",
                "to_generation": 4,
                "rule": "join",
                "cause": "node joined",
                "nodes_joined": ["n2", "n3"],
                "nodes_again": ["n2"],
                "pipelines_before": [[{"node": "n1"}]],
                "pipelines_after": [[{"node": "n1"}], [{"node": "n2"}], [{"node": "n3"}]],
                "boundary": True,
                "total_s": 1.5,
                "phases": {"detect": 0.0, "abort": 1.221, "first_step": 0.279},
                "stall_s": 0.02,
            },
            "generation 4 by join: n3 takes part; n2 takes part again; no pause",
        ),
        (
            {
                "event": "reconfigured",
                "to_generation": 5,
                "rule": "replace",
                "cause": "worker lost",
                "workers_lost": ["n2/0"],
                "pipelines_before": [[{"node": "n1"}, {"node": "n2"}]],
                "pipelines_after": [[{"node": "n1"}, {"node": "n2"}]],
                "total_s": 0.5,
                "phases": {"detect": 0.1, "abort": 0.4},
                "stall_s": 0.4,
            },
            "generation 5 by replace: goes on after n2/0 ended, in 0.500 s "
            "(detect 0.100, abort 0.400), training stood still for 0.400 s",
        ),
        (
            {
                "event": "reconfigured",
                "to_generation": 6,
                "rule": "shadow",
                "cause": "few holders",
                "reason": "n1, n2 hold layers of others too, so that 1 node can be lost",
                "pipelines_before": [[{"node": "n1"}, {"node": "n2"}]],
                "pipelines_after": [[{"node": "n1"}, {"node": "n2"}]],
                "boundary": True,
                "total_s": 0.5,
                "phases": {"abort": 0.4},
                "stall_s": 0.0,
            },
            "generation 6 by shadow: few holders; n1, n2 hold layers of others too, so that 1 node "
            "can be lost; no pause",
        ),
        (
            {
                "event": "checkpoint_saved",
                "step": 100,
                "path": "/saved/step-100",
                "bytes": 3 << 20,
                "seconds": 0.5,
            },
            "checkpoint of step 100: /saved/step-100 (3.0 MiB in 0.500 s)",
        ),
        (
            {"event": "checkpoint_failed", "step": 100, "reason": "No space left on device"},
            "no checkpoint of step 100: No space left on device; the job goes on",
        ),
        (
            {"event": "output_failed", "step": 100, "reason": "it is full"},
            "the result is kept, and writing it is retried: it is full",
        ),
        (
            {"event": "resumed", "step": 100, "path": "/saved/a", "passed_over": ["b is cut"]},
            "resumed after step 100 from /saved/a; passed over: b is cut",
        ),
        (
            {"event": "restored", "step": 100, "path": "/saved/a", "lost_steps": 1},
            "all went back to step 100 (1 step again): /saved/a",
        ),
        (
            {"event": "restored", "step": 0, "path": "", "lost_steps": 5},
            "all restart at step 1 (5 steps again): the state was lost",
        ),
    ],
    ids=lambda value: value["event"] if isinstance(value, dict) else "",
)
def test_event_lines(record: dict[str, object], sentence: str) -> None:
    line = event_line({"time": 1.25, **record})
    assert line.split("  ", 1)[1] == sentence
    assert line.split("  ", 1)[0].endswith(".250")


#: What an exception or a worker's output may hold: a second line, and words to the terminal.
WILD = "boom\nat line 2\x1b[2J\u202e"
TAME = r"boom at line 2\x1b[2J\u202e"


def test_what_workers_say_stays_in_its_line_and_moves_no_cursor() -> None:
    job = pb.JobStatus(
        job_id="demo-1", state="failed", reason=WILD, save_failure=WILD, last_incident=f"x{WILD}"
    )
    node = pb.NodeInfo(node="n1", state="live", reason=WILD)
    event = {"event": "failed", "time": 1.0, "id": 1, "reason": WILD}
    shown = [
        text.jobs_table([job]),
        text.nodes_table([node]),
        text.job_text(job),
        event_line(event),
        progress_line(job),
    ]
    for one in shown:
        assert TAME in one
        assert "\x1b" not in one
    assert len(shown[0].splitlines()) == 2
    assert len(shown[3].splitlines()) == 1


def test_a_wide_table_of_nodes_has_the_versions_of_what_computes() -> None:
    versions = pb.Versions(torch="2.13.0", cuda="12.8", nccl="2.27.5", driver="570.86.15")
    nodes = [
        pb.NodeInfo(node="n1", state="live", versions=versions),
        pb.NodeInfo(node="n2", state="live", versions=pb.Versions(torch="2.13.0")),
        pb.NodeInfo(
            node="n3",
            state="live",
            versions=pb.Versions(oobleck="0.2.0", torch="2.13.0", engine="2"),
            protocol=4,
        ),
    ]
    assert "--token-file FILE' ('oobleck pki token --out FILE'" in text.nodes_table([])
    head, first, second, third = text.nodes_table(nodes, wide=True).splitlines()
    at = head.index("VERSIONS")
    assert first[at:].startswith("torch 2.13.0, CUDA 12.8, NCCL 2.27.5, driver 570.86.15  ")
    assert second[at:].startswith("torch 2.13.0  ")
    assert third[at:].startswith("oobleck 0.2.0 (protocol 4, engine 2), torch 2.13.0  ")


def test_a_slow_workers_cause_stands_beside_its_pace() -> None:
    workers = [
        pb.WorkerStatus(slot=0, rate=1.0, hindrance="at its power limit"),
        pb.WorkerStatus(slot=1, rate=0.61, hindrance="too hot, 1200 of 1980 MHz"),
        pb.WorkerStatus(slot=2, rate=0.5),
    ]
    shown = text.nodes_table([pb.NodeInfo(node="n1", state="live", workers=workers)])
    assert "  n1/1: 0.61 (too hot, 1200 of 1980 MHz), n1/2: 0.50  " in shown
    assert "power limit" not in shown


def test_a_data_plane_in_the_clear_is_shown_wherever_the_job_is() -> None:
    clear = job(data_plane="clear")
    assert "data plane  IN THE CLEAR" in text.job_text(clear)
    assert "DATA PLANE IN THE CLEAR" in text.jobs_table([clear])
    assert "state       running: DATA PLANE IN THE CLEAR" in text.job_text(clear)
    assert "CLEAR" not in text.jobs_table([job(data_plane="clear", state="succeeded")])
    for plane in ("sealed", "loopback"):
        shown = text.job_text(job(data_plane=plane))
        assert f"data plane  {plane}\n" in shown
        assert "CLEAR" not in shown + text.jobs_table([job(data_plane=plane)])
    assert "data plane  encrypted, except for NCCL messages of GPUs" in text.job_text(
        job(data_plane="nccl")
    )
