"""The dashboard in a headless Chromium: what scripts do to open pages, and how soon.

Needs `pip install playwright` and a Chromium of the system (Debian: `apt-get install chromium`), so
it is of `make soak` alone. DASHBOARD_SHOTS names a folder for pictures of the pages.
`--log-cli-level=INFO` shows what was measured.
"""

import logging
import os
import re
import shutil
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oobleck.proto import control_pb2 as pb
from support.operators_master import answering
from support.visitor import Dashboard, Stand
from support.waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, ViewportSize

log = logging.getLogger(__name__)

pytestmark = pytest.mark.soak

DESK: "ViewportSize" = {"width": 1280, "height": 900}
PHONE: "ViewportSize" = {"width": 390, "height": 844}
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE_MS = 1000 * PATIENCE_S
#: As the issue of the dashboard has it.
LOSS_AGE_S = 2.0
THOUSAND_NODES_S = 1.0


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    api = pytest.importorskip("playwright.sync_api", reason="run: pip install playwright")
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium; run: apt-get install chromium")
    with api.sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu"]  # root has no sandbox
        launched = playwright.chromium.launch(executable_path=found, args=options)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    made = Stand(tmp_path_factory.mktemp("stand"))
    yield made
    made.end()


class Visit:
    """A page of one who is logged in, and what the browser complained of."""

    def __init__(self, browser: "Browser", dashboard: Dashboard, *, role: str = "viewer") -> None:
        self.address = f"http://{dashboard.address}"
        self.complaints: list[str] = []
        context = browser.new_context(viewport=DESK)
        context.set_default_timeout(_PATIENCE_MS)
        self.page: Page = context.new_page()
        self.page.goto(f"{self.address}/login")
        self.page.fill("#token", dashboard.token("--role", role))
        self.page.click("main button")
        self.page.wait_for_selector("#summary")
        #: The path of the session is part of it.
        self.address = self.page.url.rstrip("/")
        self.page.on("console", self._complained)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _complained(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def open(self, path: str, name: str = "") -> None:
        self.page.goto(self.address + path)
        if folder := os.environ.get("DASHBOARD_SHOTS"):
            self.page.wait_for_timeout(1000)
            self.page.screenshot(path=Path(folder, f"{name}.png"), full_page=True)


def test_pages_are_shown_and_the_browser_has_nothing_to_complain_of(
    browser: "Browser", stand: Stand
) -> None:
    visit = Visit(browser, stand.dashboard, role="operator")
    pages = (
        ("/", "#nodes-rows tr", "cluster"),
        (f"/jobs/{stand.job}", "svg.chart polyline", "job"),
        (f"/jobs/{stand.job}/plan?lose=n1", "table.map", "plan"),
        (f"/jobs/{stand.job}/logs", "#lines-rows li", "logs"),
        (f"/jobs/{stand.job}/timeline", "input[name=steps]", "timeline"),
        ("/nodes/n1/drain", "input[name=reason]", "drain"),
    )
    for path, selector, name in pages:
        visit.open(path, name)
        assert visit.page.locator(selector).count() > 0, path
    visit.page.set_viewport_size(PHONE)
    for path, _, name in pages:
        visit.open(path, f"{name}-phone")
        assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
    visit.page.set_viewport_size(DESK)
    visit.open(f"/jobs/{stand.job}")
    visit.page.hover("svg.chart", position={"x": 300, "y": 80})
    told = visit.page.text_content("svg.chart .pointer text")
    assert re.match(r"step [\d,]+: 0\.\d+", told or "")
    assert visit.complaints == []


def test_the_loss_on_an_open_page_is_young(browser: "Browser", stand: Stand) -> None:
    """How long ago the step was committed that the page shows, looked at 40 times."""
    visit = Visit(browser, stand.dashboard)
    visit.open(f"/jobs/{stand.job}")
    until(lambda: visit.page.get_attribute("body", "data-changed"), "the first change")
    ages_s = []
    for _ in range(40):
        drawn = visit.page.text_content("#charts svg.chart >> nth=0") or ""
        label = visit.page.get_attribute("#charts svg.chart >> nth=0", "aria-label") or drawn
        now = time.time()
        step = int(re.findall(r"to (\d+);", label)[0])
        (line,) = (
            line
            for line in stand.client.metrics(stand.job, follow=False, from_step=step)
            if f'"step":{step},' in line
        )
        committed_at = float(re.findall(r'"time":([\d.]+)', line)[0])
        ages_s.append(now - committed_at)
        visit.page.wait_for_timeout(100)
    log.info("loss: %.2f s old, at most %.2f s", statistics.median(ages_s), max(ages_s))
    assert statistics.median(ages_s) <= LOSS_AGE_S


def test_an_incident_appears_on_the_open_page(browser: "Browser", stand: Stand) -> None:
    visit = Visit(browser, stand.dashboard)
    visit.open(f"/jobs/{stand.job}")
    assert "None so far." in (visit.page.text_content("#incidents") or "")
    (worker,) = next(n for n in stand.client.nodes() if n.node == "n2").workers
    struck = time.monotonic()
    os.kill(worker.pid, signal.SIGKILL)
    visit.page.wait_for_selector("#incidents li.good")
    log.info("an incident: on the page %.2f s after the kill", time.monotonic() - struck)
    assert "was killed by SIGKILL" in (visit.page.text_content("#incidents") or "")
    assert visit.page.locator("#charts .mark").count() >= 2  # in both lines
    visit.page.click("#incidents a")
    visit.page.wait_for_selector("svg.phases rect")
    visit.open(visit.page.url.removeprefix(visit.address), "incident")
    assert visit.complaints == []


def test_an_open_page_says_that_the_dashboard_is_gone(
    browser: "Browser", stand: Stand, tmp_path: Path
) -> None:
    with Dashboard(tmp_path, "--master", stand.address) as dashboard:
        visit = Visit(browser, dashboard)
        visit.open("/")
        until(lambda: visit.page.get_attribute("body", "data-changed"), "the first change")
    visit.page.wait_for_selector("#connection:not([hidden])")
    assert "dashboard unreachable since" in (visit.page.text_content("#connection") or "")


def test_a_thousand_nodes(browser: "Browser", tmp_path: Path) -> None:
    nodes = [
        pb.NodeInfo(
            node=f"gpu-{number:04}",
            state="lost" if number % 100 == 7 else "live",
            reason="its stream closed" if number % 100 == 7 else "",
            worker_slots=8,
            device="cuda",
            memory_per_worker_bytes=80 << 30,
            address=f"10.0.{number // 250}.{number % 250}",
            workers=[pb.WorkerStatus(slot=slot, card="c", rate=1.0) for slot in range(8)],
        )
        for number in range(1000)
    ]
    answers = {
        "ListNodes": lambda _: pb.ListNodesReply(nodes=nodes),
        "ListJobs": lambda _: pb.ListJobsReply(),
        "Events": lambda _: iter(()),
    }
    with answering(**answers) as address, Dashboard(tmp_path, "--master", address) as dashboard:
        visit = Visit(browser, dashboard, role="operator")
        taken_s = []
        for _ in range(5):
            begun = time.monotonic()
            visit.open("/")
            visit.page.wait_for_selector("#node-gpu-0999")
            visit.page.evaluate("() => new Promise(requestAnimationFrame)")
            taken_s.append(time.monotonic() - begun)
        log.info("1,000 nodes: %s s", ", ".join(f"{span:.2f}" for span in taken_s))
        assert visit.page.locator("#nodes-rows tr").count() == 1000
        assert "gpu-0007" in (visit.page.text_content("#nodes-rows tr >> nth=0") or "")
        nodes[500].state = "draining"  # one row changes
        visit.page.wait_for_selector("#node-gpu-0500 .state.warn")
        assert statistics.median(taken_s) <= THOUSAND_NODES_S
