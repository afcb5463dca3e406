"""The health of a node's GPUs, from recorded samples to what the master is told."""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from oobleck.agent.connection.reports import status_of
from oobleck.agent.events import GpusRead
from oobleck.agent.health import GpuHealth
from oobleck.agent.processes.gpu_watch import watch
from oobleck.agent.state import NodeState
from oobleck.host.gpu.sample import Sample, Xid
from oobleck.planner.ids import NodeName
from oobleck.proto.status import read_status, status_message
from oobleck.proto.types import NodeStatus
from support.agents import Node
from support.folders import SUPPORT

RECORDED = SUPPORT / "gpu_samples.jsonl"
WELL, HOT, MENDED, LOST = (
    msgspec.json.decode(line, type=Sample) for line in RECORDED.read_bytes().splitlines()
)
FIRST, SECOND = (board.bus for board in WELL.gpus)


def status(*samples: Sample, places: tuple[str, ...] = (FIRST, SECOND)) -> NodeStatus:
    """As the master reads it."""
    state = NodeState(node=NodeName("n1"), slot_count=2, health=GpuHealth(places=places))
    for sample in samples:
        state.apply(GpusRead(sample=sample), 0.0)
    return read_status(status_message(status_of(state)))


def test_of_gpus_that_are_well_nothing_is_told() -> None:
    assert status(WELL, HOT) == NodeStatus()


def test_what_is_mended_is_a_concern_and_a_lost_one_makes_the_node_sick() -> None:
    mended = status(WELL, MENDED)
    assert mended.sick == ""
    assert mended.concern.startswith(f"GPU {FIRST}: a bad row of memory is replaced with the next")
    assert f"GPU {FIRST}: Xid 94, memory error that hit one program alone; reset" in mended.concern
    lost = status(MENDED, LOST)
    assert lost.sick == (
        f"GPU {SECOND}: GPU is lost; restart the host; "
        f"GPU {SECOND}: Xid 79, it has fallen off the bus; restart the host"
    )
    assert "Xid 94" in lost.concern, "errors are remembered"


def test_other_gpus_of_the_host_are_none_of_the_nodes() -> None:
    assert status(LOST, places=(FIRST,)) == NodeStatus()
    assert status(LOST, places=()) == NodeStatus()
    nobody = Sample(xids=(Xid(bus="", code=79),))
    assert status(nobody, places=(FIRST,)).sick.startswith("GPU unknown: Xid 79")


def test_what_is_told_has_an_end() -> None:
    storm = Sample(xids=tuple(Xid(bus=FIRST, code=code) for code in (*range(46, 160),) * 3))
    assert len(status(storm).sick) <= 1000


def test_what_holds_a_worker_back_is_in_its_status() -> None:
    node = Node().with_worker()
    node.state.health = GpuHealth(places=(FIRST,))
    for sample in (WELL, HOT, HOT):
        node.state.apply(GpusRead(sample=sample), node.now)
    (worker,) = read_status(status_message(status_of(node.state))).workers
    assert worker.hindrance == "too hot, 1200 of 1980 MHz, 89 °C"


def watched(command: list[str]) -> list[Sample]:
    """What is told until its process has ended, or it gives up."""
    told: list[Sample] = []

    async def until_it_ends() -> None:
        over = asyncio.Event()

        def tell(sample: Sample) -> None:
            told.append(sample)
            if sample.problem:
                over.set()

        watching = asyncio.create_task(watch(os.environ, tell, command))
        ended = asyncio.create_task(over.wait())
        await asyncio.wait({watching, ended}, return_when=asyncio.FIRST_COMPLETED)
        for task in (watching, ended):
            task.cancel()
        await asyncio.gather(watching, ended, return_exceptions=True)

    asyncio.run(until_it_ends())
    return told


def test_each_sample_is_told_and_that_no_more_come() -> None:
    *told, last = watched(["cat", str(RECORDED)])
    assert told == [WELL, HOT, MENDED, LOST]
    assert last == Sample(problem="the process that asks NVML has ended")
    found = status(*told, last)
    assert found.concern.endswith("is not known: the process that asks NVML has ended")


@pytest.mark.parametrize("text", ["no sample\n", "x" * (2 << 20)])
def test_words_that_are_no_sample_are_told_as_such(tmp_path: Path, text: str) -> None:
    (tmp_path / "words").write_text(text)
    (told,) = watched(["cat", str(tmp_path / "words")])
    assert told.problem.startswith("what NVML says is not understood: ")


def test_without_a_driver_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert watched([]) == []
    assert "the health of GPUs is not watched" in caplog.text
