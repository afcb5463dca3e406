"""docs/deploy/by-hand.md, as a reader pastes it: the lines of a machine in one go.

Each machine is a network namespace with a home and one shell of its own. What is put in the places
of the page's own: addresses, which it says are the reader's; the virtual environment that its
`every$` lines make; the number of steps; and `scp`, which here copies into the home of the other
machine. The job is what `oobleck init` writes, which no node has before.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from bench.support.client import read_lines
from oobleck.host.security import pki
from oobleck.host.security.credentials import read_credentials
from support.folders import ROOT
from support.reader import Line, Machine, lines_of, machines_at

PAGE, SECTION = ROOT / "docs/deploy/by-hand.md", "## The lines"
MACHINES = {"10.0.0.1": "head", "10.0.0.2": "ops", "10.0.0.3": "n1"}
STEPS = 3
#: What this reader types below a line of the page: a copy of what no line is to change, and a
#: shorter job without a measurement.
BESIDE = {
    "oobleck pki init --dir ~/.oobleck/master/pki": "\n"
    "cp -rp ~/.oobleck/master/pki/operator ~/before",
    "oobleck init first": f"\nsed -i 's/^  steps: .*/  steps: {STEPS}/' first/job.yaml"
    "\necho 'profile: estimate' >> first/job.yaml",
}


def typed() -> list[Line]:
    return lines_of(PAGE, SECTION)


def of_node(line: Line, name: str, address: str) -> Line:
    """What the page says of n1, for another node."""
    machine, text = line
    of_n1, n1 = r"\bn1\b", next(number for number, name in MACHINES.items() if name == "n1")
    return re.sub(of_n1, name, machine), re.sub(of_n1, name, text).replace(n1, address)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    """By the page's address."""
    with machines_at(MACHINES, tmp_path) as found:
        yield found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_versions_are_those_that_are_tested() -> None:
    (installed,) = (text for _, text in typed() if "--index-url" in text)
    (pinned,) = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f" {pinned} " in installed


@pytest.mark.cluster
@pytest.mark.usefixtures("quick_start")
def test_who_follows_the_page_gets_a_cluster_that_trains(machines: dict[str, Machine]) -> None:
    by_name = {name: machines[address] for address, name in MACHINES.items()}
    head = by_name["head"]

    lines = typed()
    install = [text for machine, text in lines if machine == "every"]
    assert all("pip install" in text or "-m venv" in text for text in install)
    lines = lines[len(install) :]
    of_n1 = [line for line in lines if of_node(line, "x", "y") != line]
    rest = lines.index(of_n1[-1]) + 1
    # On the head too: in the shell that has exported the first operator's credentials.
    lines[rest:rest] = [of_node(line, "head", "10.0.0.1") for line in of_n1]

    told = ""
    for machine, pasted in groupby(lines, key=lambda line: line[0]):
        text = "\n".join(line + BESIDE.get(line, "") for _, line in pasted)
        for address, other in machines.items():
            text = text.replace(address, other.home.name)
        told = by_name[machine].type(text)

    assert "packed 1 file, " in told
    assert "succeeded" in told
    job = head.home / ".oobleck/master/jobs/my-model-1"
    assert len(read_lines(job / "metrics.jsonl")) == STEPS
    (started,) = (one for one in read_lines(job / "events.jsonl") if one["event"] == "started")
    assert {stage["node"] for hops in started["pipelines"] for stage in hops} == {"n1", "head"}
    assert contents(head.home / ".oobleck/master/pki/operator") == contents(head.home / "before")
    for name in ("n1", "head"):
        kept = read_credentials(by_name[name].home / ".oobleck/nodes" / name)
        assert pki.identity_of(kept.certificate).uri == f"oobleck://agent/{name}"
