"""docs/deploy/head-lost.md, line by line as a reader types it; the head's host is lost between two
of its sections. Heads alone get one more flag, so that no test waits a minute for lost records.

Each machine is a network namespace with a home and one shell of its own, as in
tests/cli/test_by_hand.py.
"""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from oobleck.core.checkpoint import MANIFEST, step_of
from support.clusters import FORGETFUL
from support.folders import ROOT
from support.reader import Machine, lines_of, machines_at
from support.waiting import all_gone, until

PAGE = ROOT / "docs/deploy/head-lost.md"
MACHINES = {"10.0.0.1": "head", "10.0.0.2": "spare", "10.0.0.3": "n1"}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    """By the page's address."""
    with machines_at(MACHINES, tmp_path) as found:
        yield found


def newest_saved(checkpoints: Path) -> int:
    return max(
        (step_of(found.parent.name) or 0 for found in checkpoints.glob(f"*/{MANIFEST}")), default=0
    )


@pytest.mark.cluster
@pytest.mark.usefixtures("quick_start")
@pytest.mark.parametrize(
    "section",
    [
        "## The volume is there",
        "## Restore a backup",
        "## Nothing is left",
        "## The authority is lost",
    ],
)
def test_who_follows_the_page_gets_the_head_back_and_training_goes_on(
    machines: dict[str, Machine], tmp_path: Path, section: str
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the head is lost " * 200)
    job = {
        "name": "tiny",
        "model": {"kind": "gpt", "layers": 2, "hidden": 16, "heads": 2, "sequence_length": 16},
        "data": {"text": [str(corpus)]},
        "training": {"steps": 100_000, "global_batch": 4, "microbatch": 1},
        "fault_tolerance": 0,
        "profile": "estimate",
        "checkpoint": {"path": str(tmp_path / "saved"), "every": 5},
    }
    by_name = {name: machines[address] for address, name in MACHINES.items()}
    spare, head = by_name["spare"], by_name["head"]
    (spare.folder / "job.yaml").write_text(json.dumps(job))

    def type_all(section: str) -> None:
        for machine, text in lines_of(PAGE, section):
            if "backup ~/" in text:
                until(lambda: status()["committed_step"] > 3, "it trains", poll_s=0.5)
            if "adopt" in text:
                until(lambda: "held" in spare.type("oobleck nodes"), "the node is held", poll_s=0.5)
            for address, other in machines.items():
                text = text.replace(address, other.home.name)
            by_name[machine].type(text.replace("oobleck-master", f"oobleck-master {FORGETFUL}"))

    def status() -> dict:
        told = spare.type("oobleck status tiny-1 --json")
        return json.loads(told[: told.rindex("}") + 1])

    type_all("## Before it is lost")
    before = status()
    lost = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "--state-dir" in (found := process.info["cmdline"] or [])
        and str(head.home / ".oobleck/master") in found
    ]
    assert lost
    for process in lost:
        process.send_signal(signal.SIGKILL)
    all_gone(lost)
    volume = spare.home / "volume" if "volume" in section else tmp_path / "gone"
    (head.home / ".oobleck/master").rename(volume)
    if "authority" in section:
        (spare.home / "authority").rename(tmp_path / "lost")

    known = before["committed_step"]
    if "authority" in section:
        until(lambda: newest_saved(tmp_path / "saved") >= known, "a save without the head")
    type_all(section)

    def trains_on() -> bool:
        now = status()
        return bool(now["state"] == "running" and now["committed_step"] > known)

    until(trains_on, "the head hears of steps", poll_s=0.5)
    if "authority" in section:
        events = spare.home / ".oobleck/master/jobs/tiny-1/events.jsonl"
        told = [json.loads(line) for line in events.read_text().splitlines()]
        (restored,) = (event for event in told if event["event"] == "restored")
        assert restored["step"] >= known, "what it trained meanwhile counts"
    else:
        assert status()["generation"] == before["generation"]
    spare.type("oobleck cancel tiny-1")
