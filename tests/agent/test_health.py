"""The health of a node's GPUs, from recorded samples to what the master is told."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from oobleck.agent import gpus
from oobleck.agent.connection.reports import status_of
from oobleck.agent.events import GpusRead
from oobleck.agent.gpus import GpuHealth, watch
from oobleck.agent.state import NodeState
from oobleck.core.ids import NodeName
from oobleck.host.gpu.sample import Sample, Xid
from oobleck.proto.status import read_status, status_message
from oobleck.proto.types import NodeStatus
from support import loops
from support.agent_core import Node
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
    assert lost.troubles == (
        f"GPU {SECOND}: GPU is lost; restart the host",
        f"GPU {SECOND}: Xid 79, it has fallen off the bus; restart the host",
    )
    assert "Xid 94" in lost.concern, "errors are remembered"


def test_other_gpus_of_the_host_are_none_of_the_nodes() -> None:
    assert status(LOST, places=(FIRST,)) == NodeStatus()
    assert status(LOST, places=()) == NodeStatus()
    nobody = Sample(xids=(Xid(bus="", code=79),))
    told = status(nobody, places=(FIRST,))
    assert told.sick == ""
    assert told.concern.startswith("GPU unknown: Xid 79")


def test_one_that_nvml_does_not_show_any_more_is_sick() -> None:
    gone = replace(WELL, gpus=WELL.gpus[:1])
    assert status(gone) == NodeStatus(), "it has never shown it"
    reason = f"GPU {SECOND}: NVML does not show it any more; restart the host"
    assert status(WELL, Sample(problem="NVML is silent"), gone).sick == reason
    assert status(WELL, Sample(problem="NVML is silent")).sick == ""


def test_what_is_told_has_an_end() -> None:
    storm = Sample(xids=tuple(Xid(bus=FIRST, code=code) for code in (*range(46, 160),) * 3))
    told = status(storm)
    assert 900 < len(told.sick) <= 1000
    assert told.troubles[-1].endswith("replace it"), "each is whole"


def test_what_holds_a_worker_back_is_in_its_status() -> None:
    node = Node().with_worker()
    node.state.health = GpuHealth(places=(FIRST,))
    for sample in (WELL, HOT, HOT):
        node.state.apply(GpusRead(sample=sample), node.now)
    (worker,) = read_status(status_message(status_of(node.state))).workers
    assert worker.hindrance == "too hot, 1200 of 1980 MHz, 89 °C"


def watched(command: list[str], problems: int = 1) -> list[Sample]:
    """What is told until so many of its processes have ended, or it gives up."""
    told: list[Sample] = []

    async def until_it_ends() -> None:
        def tell(sample: Sample) -> None:
            told.append(sample)
            if sum(bool(each.problem) for each in told) == problems:
                watching.cancel()  # before another one is started

        watching = asyncio.create_task(watch(os.environ, tell, command))
        await asyncio.wait([watching])

    loops.run(until_it_ends())
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


def test_what_passes_is_told_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_AGAIN_S", 0.0)
    told = watched(["/no/such/program"], 2)
    assert told[0].problem == (
        "the process that asks NVML does not start: No such file or directory"
    )
    assert told == [told[0]] * 2
    failing = Sample(problem="NVML: Driver Not Loaded")
    assert watched(["echo", msgspec.json.encode(failing).decode()], 2) == [failing] * 2


def test_no_second_process_is_started_while_the_driver_holds_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not end: its output stays open in a process that it has left behind."""
    monkeypatch.setattr(gpus, "_AGAIN_S", 0.0)
    monkeypatch.setattr(gpus, "_END_S", 0.01)
    starts, left = tmp_path / "starts", tmp_path / "left"
    held = (
        f"echo start >> {starts}; [ $(wc -l < {starts}) = 2 ] && exit; "
        f"sleep 60 & echo $! > {left}; echo no sample; wait"
    )

    async def look() -> None:
        told = asyncio.Event()

        def tell(_: Sample) -> None:
            if told.is_set():
                watching.cancel()
            told.set()

        watching = asyncio.create_task(watch(os.environ, tell, ["sh", "-c", held]))
        await told.wait()
        await asyncio.sleep(0.2)
        assert starts.read_text() == "start\n"
        monkeypatch.setattr(gpus, "_END_S", 60.0)
        os.kill(int(left.read_text()), signal.SIGKILL)
        await asyncio.wait([watching])
        assert starts.read_text() == "start\nstart\n"

    loops.run(look())


def test_without_a_driver_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert watched([]) == []
    assert "the health of GPUs is not watched" in caplog.text
