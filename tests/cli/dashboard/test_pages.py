"""`oobleck dashboard` beside a real master whose workers only pretend to train, by a visitor
without scripts. test_browser.py looks at the same in a browser."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from html import unescape
from itertools import chain
from pathlib import Path

import pytest

from oobleck.core.units import count
from oobleck.proto import control_pb2 as pb
from support.commands import end, refused, run, start_master
from support.operators_master import answering
from support.secured import Secured
from support.visitor import NODES, Dashboard, Stand, Visitor
from support.waiting import PATIENCE_S, until


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    made = Stand(tmp_path_factory.mktemp("stand"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def viewer(stand: Stand) -> Visitor:
    return stand.dashboard.visitor()


@pytest.fixture(scope="module")
def operator(stand: Stand) -> Visitor:
    return stand.dashboard.visitor("operator")


def plain(html: str) -> str:
    return " ".join(unescape(re.sub("<[^>]+>", " ", html)).split())


def seen(
    visitor: Visitor, path: str, id: str, wanted: Callable[[str], object], do: Callable[[], object]
) -> str:
    """What the element becomes on the open page once that is as wanted after `do`."""
    with visitor.watching(path) as changes:
        next(changes)
        do()
        deadline = time.monotonic() + PATIENCE_S
        for changed, html in changes:
            if changed == id and wanted(plain(html)):
                return plain(html)
            assert time.monotonic() < deadline, f"{id}: {plain(html)}"
    raise AssertionError(f"the page at {path} is no longer live")


# ---- what is shown


def test_the_cluster_and_its_jobs(stand: Stand, viewer: Visitor) -> None:
    page = viewer.get("/")
    shown = plain(page.text)
    assert page.status == 200
    assert f"{stand.job} can lose" in shown
    for name in NODES:
        assert re.search(rf"{name} live 1/1 cpu 1\.0 GiB 127\.0\.0\.1 {stand.job}", shown), shown
    assert "/drain" not in page.text  # of a viewer


def test_a_job_with_its_lines_its_map_and_its_facts(stand: Stand, viewer: Visitor) -> None:
    def has_all() -> bool:
        text = viewer.get(f"/jobs/{stand.job}").text
        return "started generation 1" in plain(text) and '<polyline class="line"' in text

    # The dashboard shows at once what the master has told it, and the rest when that comes.
    until(has_all, "the job's events and steps")
    page = viewer.get(f"/jobs/{stand.job}")
    assert page.status == 200
    assert page.text.count('<svg class="chart"') == 2
    assert page.text.count('<polyline class="line"') == 2
    assert re.search(r'colspan="4" class="place good" title="n1, layers 0 to 3, live"', page.text)
    shown = plain(page.text)
    assert re.search(r"step [\d,]+ of 1,000,000 \(0%\), about \d", shown)
    assert re.search(r"goodput \d+\.\d% of the time since step 1", shown)
    recent = viewer.get(f"/jobs/{stand.job}?span=recent")
    assert recent.text.count('<polyline class="line"') == 2


def test_the_loss_of_an_open_page_is_that_of_now(stand: Stand, viewer: Visitor) -> None:
    """Of a step that was committed when the page was open already."""
    step = stand.client.job(stand.job).committed_step

    def is_newer(shown: str) -> bool:
        found = re.search(r"step ([\d,]+) of", shown)
        return found is not None and int(found[1].replace(",", "")) > step + 20

    assert seen(viewer, f"/jobs/{stand.job}", "state", is_newer, lambda: None)
    told = seen(viewer, f"/jobs/{stand.job}", "charts", lambda _: True, lambda: None)
    assert re.match(r"Loss up to step [\d,]+ 0\.\d{4}", told)


@pytest.mark.parametrize("span", ["whole", "recent"])
def test_a_page_has_one_step_and_one_loss(stand: Stand, viewer: Visitor, span: str) -> None:
    page = viewer.get(f"/jobs/{stand.job}?span={span}")
    shown = plain(page.text)
    card = re.search(r"step ([\d,]+) of .* loss (0\.\d+) speed ([\d,]+) tokens/s", shown)
    assert card is not None, shown
    step, loss, speed = card.groups()
    assert f"Loss up to step {step} {loss} " in shown
    assert f"Tokens/s up to step {step} {speed} " in shown
    drawn = re.findall(r'aria-label="\S+ by step, from step \d+ to (\d+);', page.text)
    assert drawn == [step.replace(",", "")] * 2


def test_steps_without_a_record_are_told(tmp_path: Path) -> None:
    """As where the disk of the master is full: the workers commit on."""
    lines = [
        json.dumps({"step": step, "loss": 0.5, "tokens": 8, "step_seconds": 1, "time": 1e9 + step})
        for step in range(1, 6)
    ]
    job = pb.JobStatus(
        job_id="demo-1", state="running", steps=20, committed_step=10, recorded_step=5
    )
    answers = {
        "ListNodes": lambda _: pb.ListNodesReply(),
        "ListJobs": lambda _: pb.ListJobsReply(jobs=[job]),
        "Metrics": lambda _: iter([pb.MetricsLines(json=lines)]),
        "Events": lambda _: iter(()),
    }
    with (
        answering(at_once=4, **answers) as address,
        Dashboard(tmp_path, "--master", address) as dashboard,
    ):
        page = dashboard.visitor().get("/jobs/demo-1")
    assert "step 10 of 20" in plain(page.text)
    assert "Loss by step, from step 1 to 10;" in page.text
    assert "The records of steps 6 to 10 have not arrived yet." in plain(page.text)


def test_running_jobs_and_open_incidents_come_first_and_the_rest_is_folded(tmp_path: Path) -> None:
    trouble = "worker n2/0 (rank 1) hangs"
    jobs = [pb.JobStatus(job_id=f"old-{n}", state="failed", steps=5) for n in range(1, 61)]
    jobs.append(
        pb.JobStatus(job_id="demo-7", state="running", steps=5, incidents=3, last_incident=trouble)
    )
    joined = {"event": "node_joined", "id": 7, "time": 1e9, "node": "n2"}
    answers = {
        "ListNodes": lambda _: pb.ListNodesReply(nodes=[pb.NodeInfo(node="n2", state="live")]),
        "ListJobs": lambda _: pb.ListJobsReply(jobs=jobs),
        "Metrics": lambda _: iter(()),
        "Events": lambda asked: iter(
            [] if asked.job_id else [pb.EventRecord(json=json.dumps(joined))]
        ),
    }
    with (
        answering(at_once=4, **answers) as address,
        Dashboard(tmp_path, "--master", address) as dashboard,
    ):
        visitor = dashboard.visitor()
        page = visitor.get("/").text
        of_job = plain(re.sub("<title>.*?</title>", "", visitor.get("/jobs/demo-7").text))
    shown = plain(page)
    order = ("incident 3 of demo-7", "demo-7 running", "n2 live", "60 finished jobs", "n2 joined")
    places = [shown.index(part) for part in order]
    assert places == sorted(places)
    folded = re.search(r"<details>(.*?)</details>", page, re.DOTALL)
    assert folded is not None
    assert folded[1].count("jobs/old-") == page.count("jobs/old-") == 50
    assert "and 10 jobs before these" in plain(folded[1])
    assert [text.count(trouble) for text in (shown, of_job)] == [1, 1], "an incident is told once"


def test_a_slow_worker_is_told_once_on_its_jobs_page(tmp_path: Path) -> None:
    told = "slow worker n2/0 (rank 1): 0.50 of the others' pace; also slow: n3/1"
    job = pb.JobStatus(job_id="demo-1", state="running", steps=5, incidents=2, last_incident=told)
    paces = (f"{worker} computes at 0.50 of the others' pace" for worker in ("n2/0", "n3/1"))
    job.reason = "; ".join(paces)
    job.slow_workers.extend([pb.WorkerId(node="n2", slot=0), pb.WorkerId(node="n3", slot=1)])
    slow = [
        {"event": "rate_changed", "time": at, "node": node, "slot": slot, "rate": 0.5, "steps": 9}
        | {"step_s": 0.2, "usual_s": 0.1}
        for at, node, slot in ((5, "n1", 0), (50, "n2", 0), (51, "n3", 1), (52, "n3", 0))
    ]
    over = {"event": "incident", "incident": 1, "opened_at": 4, "closed_at": 6, "time": 6}
    over |= {"summary": "worker n1/0 (rank 0) was slow", "outcome": "recovered"}
    answers = {
        "ListNodes": lambda _: pb.ListNodesReply(),
        "ListJobs": lambda _: pb.ListJobsReply(jobs=[job]),
        "Metrics": lambda _: iter(()),
        "Events": lambda asked: iter(
            [
                pb.EventRecord(json=json.dumps({"id": n, **one}))
                for n, one in enumerate([*slow, over] if asked.job_id else [], 1)
            ]
        ),
    }
    with (
        answering(at_once=4, **answers) as address,
        Dashboard(tmp_path, "--master", address) as dashboard,
    ):
        visitor = dashboard.visitor()

        def shown() -> str:
            page = visitor.get("/jobs/demo-1").text
            return plain(re.sub("<title>.*?</title>", "", page))

        until(lambda: "n3/0" in shown(), "the events")
        told_of = [shown().count(worker) for worker in ("n1/0", "n2/0", "n3/1", "n3/0")]
    assert told_of == [1, 1, 1, 1]


def test_a_page_that_opens_its_stream_gets_what_has_changed_since(
    stand: Stand, viewer: Visitor
) -> None:
    digest = re.search(r'data-digest="(\w+)"', viewer.get("/").text)
    assert digest is not None
    with viewer.watching(f"/?seen={digest[1]}") as changes:
        known = {next(changes)[0] for _ in range(2)}
    assert "nodes" not in known
    with viewer.watching("/?seen=unknown") as changes:
        parts = [next(changes)[0] for _ in range(7)]
    assert parts == ["master", "summary", "open", "jobs", "ended", "events", "nodes"]


def test_an_incident_appears_on_the_open_page_and_has_one_of_its_own(
    stand: Stand, viewer: Visitor
) -> None:
    before = stand.client.job(stand.job).incidents
    (worker,) = next(n for n in stand.client.nodes() if n.node == "n3").workers

    def kill() -> None:
        os.kill(worker.pid, signal.SIGKILL)

    number = before + 1
    told = seen(
        viewer,
        f"/jobs/{stand.job}",
        "incidents",
        lambda shown: re.search(rf"incident {number} \d", shown),  # it has a time: it is over
        kill,
    )
    assert f"(rank 2, pid {worker.pid}) was killed by SIGKILL; recovered in" in told
    once = re.sub("<title>.*?</title>", "", viewer.get(f"/jobs/{stand.job}").text)
    assert once.count("was killed by SIGKILL") == 1, plain(once)
    measured = re.compile(r"generation \d: a step \d\.\d{3} s \d\.\d{3} s")

    def has_steps() -> bool:
        """Whether the plan's steps have come by now."""
        return bool(measured.search(plain(viewer.get(of_incident).text)))

    of_incident = f"/jobs/{stand.job}/incidents/{number}"
    until(has_steps, "a measured step of the new plan")
    page = viewer.get(of_incident)
    shown = plain(page.text)
    assert 'class="phase-detect"' in page.text
    assert f"agent of n3: pid {worker.pid} was killed by SIGKILL" in shown
    # Stand-ins do not train in step, so it may not be known when the last step was.
    assert re.search(r"generation \d: standstill 0\.\d{3} s (\d\.\d{3} s|unknown)", shown), shown
    assert "worker n3/0 faults" in shown  # its last words
    chart = viewer.get(f"/jobs/{stand.job}").text
    assert f'<a href="jobs/{stand.job}/incidents/{number}">' in chart
    assert viewer.get(f"/jobs/{stand.job}/incidents/{'0' * 5000}1").status == 404
    missing = viewer.get(f"/jobs/{stand.job}/incidents/99")
    assert (missing.status, missing.told) == (
        404,
        f"{stand.job} has had {count(number, 'incident')}; 99 is not one of them",
    )


def test_logs_by_node_and_by_what_is_in_them(stand: Stand, viewer: Visitor) -> None:
    def told() -> set[str]:
        page = viewer.get(f"/jobs/{stand.job}/logs")
        return set(re.findall(r"worker (n\d)/0 faults=2", page.text))

    # The first look shows what has come by then; a browser is told the rest.
    until(lambda: told() >= set(NODES), "a line of each worker")
    one = viewer.get(f"/jobs/{stand.job}/logs?node=n3&having=FAULTS")
    assert set(re.findall(r"worker n\d/0", one.text)) == {"worker n3/0"}
    none = viewer.get(f"/jobs/{stand.job}/logs?having=nothing-like-it")
    assert "No line yet." in none.text


def test_what_if_nodes_were_lost(stand: Stand, viewer: Visitor) -> None:
    path = f"/jobs/{stand.job}/plan"
    asked = viewer.get(path)
    assert asked.text.count('name="lose"') == len(NODES)
    found = viewer.get(f"{path}?lose=n1&lose=n3")
    assert (found.status, found.told) == (
        200,
        "Training would continue, but the next loss may take a layer.",
    )
    shown = plain(found.text)
    assert re.search(r"now 3 pipelines of 1 node \S+ s \S \S 2 nodes", shown)
    assert re.search(r"then, by templates 1 pipeline of 1 node \S+ s 0 B 0\.000 s 0 nodes", shown)
    assert found.text.count('<table class="map"') == 2
    for lost, told in (
        ("n9", "no such node in the job's plan: n9"),
        ("n1&lose=n2&lose=n3", "all nodes would be lost; leave one"),
    ):
        answer = viewer.get(f"{path}?lose={lost}")
        assert (answer.status, answer.told) == (409, told)
    unknown = viewer.get("/jobs/nope-1/plan")
    assert (unknown.status, unknown.told.partition(";")[0]) == (404, "no job 'nope-1'")


def test_the_master_is_away_and_comes_back(tmp_path: Path) -> None:
    process, address = start_master(tmp_path / "state")
    end(process)
    with Dashboard(tmp_path, "--master", address) as dashboard:
        visitor = Visitor(dashboard.address)
        page = visitor.log_in(dashboard.token())
        assert (page.status, page.headers["refresh"]) == (503, "5")
        assert f"cannot reach a master at {address}" in page.told
        process, _ = start_master(tmp_path / "state", address)
        until(lambda: visitor.get("/").status == 200, "the first answer of the master")
        told = seen(
            visitor, "/", "master", lambda shown: "unreachable" in shown, lambda: end(process)
        )
        away = r"state of \S+ : master unreachable since 20\d\d-\S+ \S+: cannot reach a master"
        assert re.match(away, told)
        page = visitor.get("/")
        assert page.status == 503
        assert "Nodes" in plain(page.text)  # the state of then

        def again() -> None:
            nonlocal process
            process, _ = start_master(tmp_path / "state", address)

        assert seen(visitor, "/", "master", lambda shown: shown == "", again) == ""
        end(process)


def test_a_job_that_exists_is_not_denied_while_the_master_is_away(
    stand: Stand, viewer: Visitor
) -> None:
    """One that the dashboard has seen, and one that came after its last look."""
    assert viewer.get(f"/jobs/{stand.job}").status == 200
    board = stand.dashboard.process
    board.send_signal(signal.SIGSTOP)
    try:
        made = run("submit", str(stand.folder / "job.yaml"), "--master", stand.address)
        assert made.returncode == 0, made
        stand.master.kill()
    finally:
        board.send_signal(signal.SIGCONT)
    newer = made.stdout.strip()
    try:
        # Until a call has failed, the last look may be of just before.
        until(lambda: viewer.get("/").status == 503, "the master is missed")
        known, unknown = viewer.get(f"/jobs/{stand.job}"), viewer.get(f"/jobs/{newer}")
    finally:
        stand.restart_master()
    assert known.status == 503
    assert re.match(r"state of \d\d:\d\d:\d\d: master unreachable since", known.told)
    assert known.text.count('<polyline class="line"') == 2
    assert (unknown.status, unknown.headers["refresh"]) == (503, "5")
    words = rf"the master is away; by the state of \S+, no such job: {newer}; there are {stand.job}"
    assert re.fullmatch(words, unknown.told)
    until(lambda: viewer.get(f"/jobs/{newer}").status == 200, "the master's return")
    assert run("cancel", newer, "--master", stand.address).returncode == 0


def test_a_job_is_there_as_soon_as_it_is_submitted(stand: Stand, viewer: Visitor) -> None:
    for _ in range(3):
        assert viewer.get("/").status == 200
        made = run("submit", str(stand.folder / "job.yaml"), "--master", stand.address)
        page = viewer.get(f"/jobs/{made.stdout.strip()}")
        assert run("cancel", made.stdout.strip(), "--master", stand.address).returncode == 0
        assert page.status == 200, page.told


def test_a_state_is_dated_while_the_master_is_silent(tmp_path: Path) -> None:
    """Before any call of it has failed, too."""
    process, address = start_master(tmp_path / "state")
    try:
        with Dashboard(tmp_path, "--master", address) as dashboard:
            visitor = dashboard.visitor()
            assert (visitor.get("/").status, visitor.get("/").told) == (200, "")
            process.send_signal(signal.SIGSTOP)
            until(lambda: "state of" in visitor.get("/").told, "a date")
            assert visitor.get("/").status == 503
            process.send_signal(signal.SIGCONT)
            until(lambda: visitor.get("/").status == 200, "the next answer")
            assert visitor.get("/").told == ""
    finally:
        process.send_signal(signal.SIGCONT)
        end(process)


def test_the_first_page_has_what_happened_to_the_cluster(stand: Stand, viewer: Visitor) -> None:
    shown = plain(viewer.get("/").text)
    assert re.search(r"What happened \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S", shown)
    assert f"{stand.job} submitted" in shown

    def submit() -> None:
        made = run("submit", str(stand.folder / "job.yaml"), "--master", stand.address)
        assert made.returncode == 0, made

    newer = f"demo-{len(stand.client.jobs()) + 1}"
    assert seen(viewer, "/", "events", lambda told: f"{newer} submitted" in told, submit)
    stand.restart_master()
    until(lambda: viewer.get("/").status == 200, "the master's return")
    stand.client.cancel(newer)
    order = rf"{newer} cancelled .*the master started .*{newer} submitted"
    until(lambda: re.search(order, plain(viewer.get("/").text)), "the events of both masters")


def test_events_of_tokens_are_for_log_ins_of_operators(tmp_path: Path) -> None:
    """Whatever the certificate of the dashboard may read."""
    master = Secured(tmp_path)
    try:
        master.token("--role", "agent", "--name", "new-node")
        options = ("--master", master.address, "--credentials", str(master.operator))
        with Dashboard(tmp_path, *options) as dashboard:
            for role, may_read in (("operator", True), ("viewer", False)):
                page = dashboard.visitor(role).get("/")
                assert page.status == 200
                assert "the master started" in page.text
                assert ("agent new-node was made by" in page.text) == may_read
                assert ("token" in plain(page.text).partition("What happened")[2]) == may_read
    finally:
        end(master.process)


def test_the_lines_of_a_job_go_on_when_the_master_was_restarted(
    stand: Stand, viewer: Visitor
) -> None:
    path = f"/jobs/{stand.job}"

    def newest(html: str) -> int:
        found = re.search(r"Loss by step, from step 1 to (\d+);", html)
        assert found, html
        return int(found[1])

    before = newest(viewer.get(path).text)
    with viewer.watching(path) as changes:
        stand.restart_master()
        deadline = time.monotonic() + PATIENCE_S
        for id, html in changes:
            if id == "charts" and newest(html) > before + 100:
                break
            assert time.monotonic() < deadline
    assert stand.client.job(stand.job).state == "running"


# ---- what is done


def test_an_operator_drains_a_node_and_takes_it_back(stand: Stand, operator: Visitor) -> None:
    def state() -> str:
        return next(node.state for node in stand.client.nodes() if node.node == "n3")

    assert 'href="nodes/n3/drain"' in operator.get("/").text
    assert "Drain n3?" in operator.get("/nodes/n3/drain").text
    done = operator.send("/nodes/n3/drain", reason="a new fan")
    assert done.status == 200
    assert re.search(r"n3 is drain(ing|ed): a new fan", done.told), done.told
    until(lambda: state() == "drained", "the drain")
    done = operator.send("/nodes/n3/undrain")
    assert re.match("n3 is live", done.told), done.told
    unknown = operator.send("/nodes/n9/drain")
    assert (unknown.status, unknown.told.partition(";")[0]) == (404, "no node 'n9'")


def test_what_a_viewer_may_not_do(stand: Stand, viewer: Visitor) -> None:
    for path in ("nodes/n1/drain", "nodes/n1/undrain", f"jobs/{stand.job}/cancel"):
        sent = viewer.send(f"/{path}")
        assert (sent.status, sent.told.partition(";")[0].split(" ")[:4]) == (
            403,
            ["a", "viewer", "may", "not"],
        )
        assert viewer.get(f"/{path}").status == 403
    assert viewer.send(f"/jobs/{stand.job}/timeline", steps="1").status == 403
    assert {node.state for node in stand.client.nodes()} == {"live"}


def test_a_timeline_is_a_file(tmp_path: Path) -> None:
    trace = '{"traceEvents": []}'
    answers = {
        "ListNodes": lambda _: pb.ListNodesReply(),
        "ListJobs": lambda _: pb.ListJobsReply(),
        "GetTimeline": lambda _: pb.TimelineReply(trace=trace),
    }
    with (
        answering(**answers) as address,
        Dashboard(tmp_path, "--master", address) as dashboard,
    ):
        found = dashboard.visitor("operator").send("/jobs/demo-1/timeline", steps="3")
    assert (found.status, found.text) == (200, trace)
    assert found.headers["content-type"] == "application/json"
    told = 'attachment; filename="demo-1-timeline.json"'
    assert found.headers["content-disposition"] == told


def test_what_is_not_possible_is_refused(stand: Stand, operator: Visitor) -> None:
    assert operator.send(f"/jobs/{stand.job}/timeline", steps="0000000019999").status == 400
    bad = operator.send(f"/jobs/{stand.job}/timeline", steps="0")
    assert (bad.status, bad.told) == (400, "steps: '0' is not 1 to 100")
    saved = operator.send(f"/jobs/{stand.job}/checkpoint")
    assert (saved.status, saved.told.partition(":")[0]) == (
        409,
        f"job {stand.job} takes no checkpoints",
    )


# ---- who may come in


def test_tokens_sessions_and_cookies(stand: Stand) -> None:
    visitor = Visitor(stand.dashboard.address)
    assert visitor.get("/").status == 401
    assert visitor.get("/live/").status == 401
    wrong = visitor.log_in("eyJ9.abc")
    assert (wrong.status, wrong.told.partition(";")[0]) == (
        403,
        "this is not a token of this dashboard",
    )
    token = stand.dashboard.token()
    assert visitor.log_in(token, f"/jobs/{stand.job}").text.count('<svg class="chart"') == 2
    again = Visitor(stand.dashboard.address).log_in(token)
    assert (again.status, again.told.partition(";")[0]) == (403, "this token was used")
    assert visitor.get("/").status == 200
    out = visitor.send("/logout")
    assert (out.status, visitor.get("/").status) == (200, 401)
    forgetful = Visitor(stand.dashboard.address, keeps_cookies=False)
    kept = forgetful.log_in(stand.dashboard.token())
    assert (kept.status, kept.told) == (
        400,
        "this browser keeps no cookies; allow them for 127.0.0.1",
    )
    away = Visitor(stand.dashboard.address)
    assert (
        away.post("/login", {"token": stand.dashboard.token(), "next": "//evil.example"}).status
        == 200
    )


def test_a_cookie_is_for_a_path_that_no_other_port_knows(stand: Stand) -> None:
    visitor = stand.dashboard.visitor()
    (told,) = visitor.told_cookies
    name, _, rest = told.partition("=")
    assert {"HttpOnly", f"Path={visitor.base}/", "SameSite=lax"} <= set(rest.split("; "))
    assert len(visitor.base) > 20
    # The path alone is nobody's, and so is a cookie that came out in another path.
    thief = Visitor(stand.dashboard.address)
    thief.base = visitor.base
    assert thief.get("/").status == 401
    other = stand.dashboard.visitor("operator")
    assert other.get("/").status == 200
    other.base, other.cookies = visitor.base, {name: next(iter(other.cookies.values()))}
    assert other.get("/").status == 401
    visitor.base = ""
    page = visitor.get(f"/jobs/{stand.job}")
    assert (page.status, page.told) == (401, ""), "an address without the path is for nobody"
    assert '<base href="/">' in page.text
    assert "static/session.js" in page.text, "it finds the way back"


def test_a_session_ends_on_the_open_page_too(stand: Stand, tmp_path: Path) -> None:
    with Dashboard(tmp_path, "--master", stand.address, "--session", "10s") as dashboard:
        visitor = dashboard.visitor()
        with visitor.watching("/") as changes:
            told = dict(changes)
        assert told["end"] == "this session has expired; log in again"
        page = visitor.get(f"/jobs/{stand.job}")
        assert (page.status, page.told) == (401, "this session has expired; log in again")
        assert f'name="next" value="/jobs/{stand.job}"' in page.text


def test_forms_of_other_sites_and_other_names_are_refused(stand: Stand, operator: Visitor) -> None:
    form = {"csrf": operator.get("/").csrf, "reason": "evil"}
    cross = [
        operator.post("/nodes/n1/drain", form | {"csrf": "guessed"}),
        operator.post("/nodes/n1/drain", form, Origin="https://evil.example"),
        operator.post("/nodes/n1/drain", form, Origin="null"),
        operator.post("/nodes/n1/drain", form, Sec_Fetch_Site="cross-site"),
    ]
    assert [answer.status for answer in cross] == [403] * 4
    named = operator.get("/", Host="evil.example")
    assert named.status == 421
    assert named.text == "'evil.example' is no name of this dashboard; its --host NAME allows one\n"
    port = stand.dashboard.address.rpartition(":")[2]
    assert operator.get("/", Host=f"localhost:{port}").status == 200
    assert operator.get("/", Host=f"10.1.2.3:{port}").status == 421
    large = operator.post("/nodes/n1/drain", form | {"reason": "x" * 20_000})
    assert large.status == 413


def test_a_proxy_in_front_may_have_the_certificate(stand: Stand) -> None:
    dashboard = stand.dashboard
    visitor = Visitor(dashboard.address)
    form = {"token": dashboard.token(), "next": "/"}
    page = visitor.post("/login", form, Origin=f"https://{dashboard.address}")
    assert (page.status, page.told) == (200, "")
    assert "; Secure" in visitor.told_cookies[0]


def test_browsers_are_told_to_run_nothing_but_its_own(stand: Stand, viewer: Visitor) -> None:
    page = viewer.get(f"/jobs/{stand.job}")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    assert page.headers["cache-control"] == "no-store"
    assert not re.search(r"<script(?![^>]* src=\"static/)|<style| style=|\son\w+=", page.text)
    shown = re.findall(r"<base href=\"([^\"]*)\"", page.text)
    assert shown == [f"{viewer.base}/"]
    others = page.text.replace(f'<base href="{shown[0]}"', "")
    assert not re.search(r"(href|src|action)=\"(/|#|[\w.+-]*:)", others), "all are below the base"
    for name in ("live.js", "session.js", "chart.js", "style.css", "icon.svg"):
        assert viewer.get(f"/static/{name}").status == 200
    assert viewer.get("/static/../command.py").status == 404


def test_what_others_write_is_shown_as_text(tmp_path: Path) -> None:
    evil = "<img src=//evil.example onerror=alert(1)>\x1b[2J"
    node = pb.NodeInfo(node="n1", state="live", reason=evil, worker_slots=1)
    job = pb.JobStatus(job_id="demo-1", state="running", steps=5, reason=evil, last_incident=evil)
    line = pb.LogLine(node="n1", line=evil, time="2026-01-01T00:00:00.000000+00:00")
    record = {"event": "failed", "id": 1, "time": 1.0, "reason": evil}
    answers = {
        "ListNodes": lambda _: pb.ListNodesReply(nodes=[node], problem=evil),
        "ListJobs": lambda _: pb.ListJobsReply(jobs=[job], problem=evil),
        "Metrics": lambda _: iter(()),
        "Events": lambda _: iter([pb.EventRecord(json=json.dumps(record))]),
        "Logs": lambda _: iter([line]),
    }
    with answering(**answers) as address, Dashboard(tmp_path, "--master", address) as dashboard:
        visitor = dashboard.visitor()
        for path in ("/", "/jobs/demo-1", "/jobs/demo-1/logs"):
            text = visitor.get(path).text
            assert "&lt;img src=//evil.example onerror=alert(1)&gt;\\x1b[2J" in text
            assert "<img" not in text
            assert "\x1b" not in text
        asked = visitor.get("/jobs/demo-1/logs?having=%22%3E%3Cimg%3E&node=%3Cb%3E").text
        assert "<img" not in asked
        assert "<b>" not in asked


def test_what_is_not_there(stand: Stand, viewer: Visitor) -> None:
    job = viewer.get("/jobs/nope-1")
    names = ", ".join(one.job_id for one in stand.client.jobs()[-5:])
    assert (job.status, job.told) == (404, f"no such job: nope-1; there are {names}")
    page = viewer.get("/nothing")
    assert (page.status, page.told) == (404, "there is no page /nothing")
    assert 'href="./javascript:x#main"' in viewer.get("/javascript:x").text
    method = viewer.post("/", {})
    assert method.status == 405


def test_the_masters_word_is_above_an_operators_session(tmp_path: Path) -> None:
    """Of a dashboard with a viewer's certificate; it serves https with one of its own."""
    master = Secured(tmp_path)
    try:
        folder = tmp_path / "eve"
        issue = (
            "pki",
            "issue",
            "eve",
            "--role",
            "viewer",
            "--dir",
            str(master.pki),
            "--out",
            str(folder),
        )
        assert run(*issue).returncode == 0
        options = ("--master", master.address, "--credentials", str(folder))
        pair = (str(master.pki / name) for name in ("master.crt", "master.key"))
        tls = chain(*zip(("--certificate", "--key"), pair, strict=True))
        with Dashboard(tmp_path, *options, *tls) as dashboard:
            visitor = dashboard.visitor("operator")
            page = visitor.get("/")
            assert page.status == 200
            # It would hold for every port of the host.
            assert "strict-transport-security" not in page.headers
            assert set(visitor.cookies) == {f"__Secure-oobleck-{visitor.base[2:]}"}
            sent = visitor.send("/nodes/n1/drain")
            assert sent.status == 403
            assert sent.told == "denied: viewer eve may not call DrainNodes; operator may"
    finally:
        end(master.process)


# ---- bad usage


def test_bad_usage_is_told_in_a_line(stand: Stand, tmp_path: Path) -> None:
    folder = ("--dir", str(tmp_path / "d"))

    def told(*arguments: str, code: int = 2) -> str:
        return refused(run("dashboard", *arguments, *folder), code)

    taken = told("--listen", stand.dashboard.address)
    assert "--listen" in taken
    assert "Address already in use" in taken
    assert "--certificate and --key" in told("--listen", "0.0.0.0:0")
    assert "give both, or neither" in told("--certificate", "c.pem")
    pair = told("--certificate", str(tmp_path / "c"), "--key", str(tmp_path / "k"))
    assert "No such file" in pair
    assert "is not HOST:PORT" in told("--listen", "here")
    assert "needs credentials" in told("--master", "192.0.2.1:4600")
    (tmp_path / "d" / "secret").chmod(0o644)
    assert "others may read it" in told()
    assert "others may read it" in told("token")
