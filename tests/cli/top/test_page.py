"""What stands on the page of `oobleck top`, and what its keys do."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oobleck.cli.top.feed import Feed, View
from oobleck.cli.view.feeds import MOST_CHARACTERS, MOST_EVENTS, MOST_INCIDENTS, MOST_LINES
from oobleck.cli.view.series import MOST_BUCKETS
from oobleck.host.ipc.endpoint import choose_endpoint
from oobleck.proto import control_pb2 as pb
from support import loops
from support.commands import end
from support.commands import run as run_command
from support.operators_master import answering
from support.page import Shown, shown
from support.secured import Secured
from support.waiting import until

#: When the incident began.
AT = time.time() - 100
HOSTILE = "\x1b]0;owned\x07\x9b31m[bold]red[/bold]\r\u202e\nforged"


def stage(node: str, first: int, last: int) -> pb.Stage:
    worker = pb.WorkerId(node=node, slot=0)
    return pb.Stage(workers=[worker], first_layer=first, last_layer=last)


PLAN = pb.Plan(
    schedule="1f1b",
    pipelines=[
        pb.Pipeline(
            nodes=["n1", "n2"], microbatches=8, stages=[stage("n1", 0, 4), stage("n2", 5, 9)]
        ),
        pb.Pipeline(
            nodes=["n3", "n4"], microbatches=8, stages=[stage("n3", 0, 4), stage("n4", 5, 9)]
        ),
    ],
)
JOB = pb.JobStatus(
    job_id="demo-1",
    state="running",
    committed_step=60,
    steps=200,
    loss=2.5,
    tokens_per_s=1234,
    eta_s=70,
    plan=PLAN,
    generation=2,
    can_lose=1,
    plan_policy="templates",
    checkpoint="/saved/50",
    checkpoint_step=50,
)
NODES = [
    pb.NodeInfo(
        node=f"n{number}", state="live", worker_slots=1, workers=[pb.WorkerStatus(card="x")]
    )
    for number in range(1, 5)
]
NODES[3].state, NODES[3].reason = "lost", "its stream closed"
INCIDENT = {
    "id": 2,
    "event": "incident",
    "time": AT,
    "incident": 1,
    "opened_at": AT,
    "closed_at": AT + 0.41,
    "total_s": 0.412,
    "outcome": "recovered",
    "summary": "node n4 lost; recovered",
    "root_cause": {"summary": "node n4 lost: its stream closed", "log_tail": ["last words of n4"]},
    "also_lost": [],
    "first_seen": None,
    "witnesses": [],
    "phases": {"detect": 0.3, "transfer": 0.112},
    "attempts": [
        {
            "generation": 2,
            "rule": "merge",
            "phases": {"detect": 0.3, "transfer": 0.112},
            "total_s": 0.412,
        }
    ],
    "redo_steps": [57],
    "steps_redone": 1,
    "salvaged_samples": 0,
    "rolled_forward": False,
    "received_bytes": 1 << 20,
    "from_generation": 1,
    "to_generation": 2,
    "can_lose": 1,
}
EVENTS = [{"id": 1, "event": "submitted", "time": AT - 60}, INCIDENT]
STEPS = [
    {"step": step, "loss": 4 - step / 40, "tokens": 64, "step_seconds": 0.1, "time": AT + step}
    for step in range(1, 61)
]


def answers(jobs: list[pb.JobStatus], nodes: list[pb.NodeInfo] = NODES) -> dict[str, object]:
    """Of a master whose streams have all been told."""
    found = {job.job_id: job for job in jobs}
    return {
        "ListNodes": lambda request: pb.ListNodesReply(nodes=nodes),
        "ListJobs": lambda request: pb.ListJobsReply(jobs=jobs),
        "GetJob": lambda request: found[request.job_id],
        "Events": lambda request: iter([pb.EventRecord(json=json.dumps(e)) for e in EVENTS]),
        "Metrics": lambda request: iter([pb.MetricsLines(json=[json.dumps(s) for s in STEPS])]),
        "Logs": lambda request: iter(
            [pb.LogLine(node="n1", slot=0, line=line, time="t") for line in ("first", HOSTILE)]
        ),
    }


def on_a_page(
    test: Callable[[Shown], object], size: tuple[int, int] = (80, 24), **changed: object
) -> None:
    async def run() -> None:
        with answering(**{**answers([JOB]), **changed}) as address:  # type: ignore[arg-type]
            async with shown(address, size=size) as page:
                await test(page)  # type: ignore[misc]

    loops.run(run())


def test_all_that_matters_fits_80_columns_and_24_lines() -> None:
    async def look(page: Shown) -> None:
        await page.see("node n4 lost: its stream closed", "loss of all steps", "d drain", "q quit")
        lines = page.lines
        assert len(lines) == 24
        assert lines[0].startswith("oobleck  127.0.0.1:")
        assert "3 live, 1 lost" in lines[0]
        assert lines[1].startswith("demo-1  running  step 60/200  loss 2.5000  1,234 tokens/s")
        assert lines[2].startswith("30% done  can lose 1 more node  checkpoint step 50  goodput ")
        nodes = [line[:33].rstrip() for line in lines[4:8]]
        assert nodes[0].startswith("n4  lost  1/1  its stream"), "first what needs a look"
        assert nodes[1:] == [f"n{number}  live  1/1" for number in (1, 2, 3)]
        plan = [line[35:].split() for line in lines[4:6]]
        assert plan == [
            ["0", "8", "mb", "n1[0..4]", "n2[5..9]"],
            ["1", "8", "mb", "n3[0..4]", "n4[5..9]"],
        ]
        assert any("┤" in line and max(line) >= "⠤" for line in lines)
        assert any(line.endswith("60") and line.split()[0] == "1" for line in lines), "its steps"
        assert lines[-1].startswith("d drain ")
        assert lines[-1].endswith(" q quit"), "all keys have room"
        assert not page.page.query_one("#logs").display
        await page.press("l")
        await page.see("n1/0  first", "[bold]red[/bold]")
        assert "\x1b" not in page.text
        assert "forged" in page.text, "shown as a part of its line"
        assert not any(line.startswith("forged") for line in page.lines)
        await page.press("e")
        await page.see("submitted")

    on_a_page(look)


@pytest.mark.parametrize("size", [(200, 60), (40, 12), (3, 2)])
def test_every_size_is_drawn(size: tuple[int, int]) -> None:
    async def look(page: Shown) -> None:
        if size[0] >= 40:
            await page.see("demo-1", "n4")
        if size[0] >= 200:
            await page.see("n1/0  first", "node n4 lost: its stream")
        for width, height in ((size[1], size[0]), size):
            await page.resize(width, height)
        await page.press("l", "i", "z", "tab", "down")
        assert len(page.lines) == size[1]

    on_a_page(look, size=size)


def test_what_is_chosen_is_told_in_full() -> None:
    async def look(page: Shown) -> None:
        await page.see("node n4 lost: its stream closed", "n2  live")
        await page.press("down", "down", "enter")
        await page.see("node n2", "heard", "q back")
        await page.press("q", "i", "enter")
        await page.see("incident 1", "last words of n4", "step 57 done again", "0.300")
        await page.press("q")
        assert page.page.is_running
        await page.press("q")
        assert (page.page.is_running, page.page.return_value) == (False, 0)

    on_a_page(look)


def test_a_thousand_nodes_and_no_job() -> None:
    many = [pb.NodeInfo(node=f"n{number}", state="live") for number in range(1000)]
    many[777].state = "disconnected"

    async def look(page: Shown) -> None:
        await page.see("999 live, 1 disconnected", "n777  disconnected", "no jobs; queue one")
        await page.press("end")
        await page.see("n999")
        await page.press("c")
        await page.see("no job to cancel")

    on_a_page(look, **answers([], many))


def test_the_job_that_trains_is_shown_until_another_one_is_chosen() -> None:
    ended = pb.JobStatus(job_id="old-1", state="succeeded", steps=5, committed_step=5)
    waits = pb.JobStatus(job_id="next-3", state="queued", steps=5)

    async def look(page: Shown) -> None:
        await page.see("demo-1  running")
        await page.press("[")
        await page.see("old-1  succeeded")
        await page.press("[", "c")
        await page.see("it has succeeded")
        await page.press("]", "]", "]")
        await page.see("next-3  queued")

    on_a_page(look, **answers([ended, JOB, waits]))


def test_the_page_outlives_the_master() -> None:
    async def run() -> None:
        with answering(**answers([JOB])) as address:  # type: ignore[arg-type]
            context = shown(address)
            page = await context.__aenter__()
            await page.see("3 live, 1 lost", "node n4 lost")
        try:
            await page.see("the master is away for ", "jobs continue")
            assert "n4  lost" in page.text, "the last answer is kept"
            await page.press("d", "y")
            await page.see("cannot reach a master at ")
            more = [*EVENTS, {"id": 3, "event": "cancelled", "time": AT}]
            told = {
                "Events": lambda request: iter([pb.EventRecord(json=json.dumps(e)) for e in more])
            }
            with answering(listen=address, **{**answers([JOB]), **told}):  # type: ignore[arg-type]
                await page.see("3 live, 1 lost")
                assert page.text.count("node n4 lost: its stream closed") == 1, "told once"
        finally:
            await context.__aexit__(None, None, None)

    loops.run(run())


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    cluster = Secured(tmp_path_factory.mktemp("secured"))
    yield cluster
    end(cluster.process)


def test_what_a_viewer_may_not_do_is_said_in_one_line(
    secured: Secured, tmp_path: Path, job_file: Callable[..., Path]
) -> None:
    viewer, token = tmp_path / "viewer", secured.token("--role", "viewer")
    join = ("pki", "join", "eve", "--token-file", str(token), "--credentials", str(viewer))
    assert run_command(*join, "--master", secured.address).returncode == 0
    assert secured.oobleck("submit", str(job_file())).returncode == 0

    async def run() -> None:
        endpoint = choose_endpoint(secured.address, viewer, insecure=False)
        async with shown(endpoint) as page:
            await page.see("demo-1  waiting for nodes")
            await page.press("c")
            await page.see("Cancel job demo-1?", "y yes   n no")
            await page.press("enter")
            await page.see("nothing was changed")
            await page.press("c", "y")
            await page.see("denied: ")
            (line,) = [line for line in page.lines if "denied: " in line]
            assert "operator" in line
            assert "demo-1  waiting for nodes" in page.text

    loops.run(run())


def test_the_story_of_a_job_stays_within_bounds() -> None:
    steps = [{"step": number + 1, "loss": 1.0} for number in range(20_000)]
    events = [{**INCIDENT, "id": number, "incident": number} for number in range(1, 2000)]
    lines = [pb.LogLine(node="n1", line="x" * 5000, time=str(number)) for number in range(3000)]
    told = {
        "Events": lambda request: iter([pb.EventRecord(json=json.dumps(e)) for e in events]),
        "Metrics": lambda request: iter([pb.MetricsLines(json=[json.dumps(s) for s in steps])]),
        "Logs": lambda request: iter(lines),
    }
    with (
        answering(**{**answers([JOB]), **told}) as address,  # type: ignore[arg-type]
        Feed(choose_endpoint(address, None, insecure=True)) as feed,
    ):
        until(lambda: is_whole(feed.look()), "all that the master tells")
        view = feed.look()
    points = view.history.points
    assert len(points) <= MOST_BUCKETS
    assert (points[0].first, points[-1].last) == (1, 20_000)
    assert (len(view.events), len(view.history.incidents)) == (MOST_EVENTS, MOST_INCIDENTS)
    assert {len(line.text) for line in view.lines} == {MOST_CHARACTERS}
    assert len(view.lines) == MOST_LINES


def is_whole(view: View) -> bool:
    points, events, lines = view.history.points, view.history.events, view.lines
    if not (points and events and lines):
        return False
    return (points[-1].last, events[-1]["id"], lines[-1].time) == (20_000, 1999, "2999")
