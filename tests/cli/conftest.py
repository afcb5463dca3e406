"""Real masters and the real command for the tests of this folder; workers without torch."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oobleck.cli.client import MasterClient
from support.commands import end, start_agent, start_master
from support.waiting import until

JOB = """\
name: {name}
model: {{kind: gpt, layers: 2, hidden: 8, heads: 2, sequence_length: 8}}
data: {{text: ["*.txt"]}}
training: {{steps: 20, global_batch: 4, seed: 20}}
"""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a master without nodes."""
    process, address = start_master(tmp_path_factory.mktemp("state"))
    yield address
    end(process)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """The address of a master with two agents, whose workers only pretend to train."""
    process, address = start_master(tmp_path / "state")
    agents = [start_agent(address, name) for name in ("n1", "n2")]
    with MasterClient(address) as asked:
        until(lambda: len(asked.nodes()) == len(agents), "the agents register")
    yield address
    for child in [*agents, process]:
        end(child)


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a job file (and the text that it names) and gives its path."""

    def write(name: str = "demo", extra: str = "") -> Path:
        (tmp_path / "data.txt").write_text("some text " * 100)
        path = tmp_path / "job.yaml"
        path.write_text(JOB.format(name=name) + extra)
        return path

    return write
