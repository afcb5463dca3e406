"""Code that comes with jobs on a node: fetched once, checked, and unpacked for its user alone."""

import asyncio
import os
import pwd
import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from oobleck.agent import wheels
from oobleck.agent.processes.children import WorkerProcess
from oobleck.agent.wheels import NoCode, WheelCache
from oobleck.core.ids import Incarnation, JobId, NodeName, WorkerId
from oobleck.core.job.file import parse_job
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.messages import Launch, ToWorker
from oobleck.host.ipc.channel import Channel
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.wheel import Wheel, stored_as
from support import loops
from support.wheels import wheel_of

JOB = parse_job(
    'name: demo\nmodel: {python: "mine:make"}\ndata: {python: "mine:Data"}\n'
    "training: {steps: 1, global_batch: 4}\n"
)
CONTENT = wheel_of({"mine.py": "A = 1\n"})


def launch(content: bytes = CONTENT) -> Launch:
    return Launch(
        worker=WorkerId(NodeName("n1"), 0),
        job_id=JobId("demo-1"),
        job=replace(JOB, code=stored_as(Wheel(content).digest)),
        address="127.0.0.1",
        agent_pid=1,
        device_kind="cpu",
        allow_code=("elsewhere",),
    )


class Cache(WheelCache):
    """A cache whose master gives these bytes for any hash."""

    def __init__(self, folder: Path | None = None, content: bytes = CONTENT) -> None:
        super().__init__(lambda: Endpoint(address="127.0.0.1:1"), folder)
        self.content = content
        self.asked: list[str] = []

    async def fetch(self, digest: str) -> bytes:
        self.asked.append(digest)
        await asyncio.sleep(0)
        return self.content


def complete(cache: WheelCache, *launches: Launch) -> list[Launch]:
    async def all_at_once() -> list[Launch]:
        return await asyncio.gather(*map(cache.complete, launches))

    return loops.run(all_at_once())


def test_all_workers_of_a_node_get_one_folder_which_they_may_load_from(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "code"
    cache = Cache(folder)
    found = complete(cache, launch(), launch(), launch())
    place = folder / Wheel(CONTENT).digest
    assert cache.asked == [place.name]
    assert found == [found[0]] * 3
    assert isinstance(found[0].job.model, OwnModelSpec)
    assert (found[0].job.model.path, found[0].no_code) == (str(place), "")
    assert found[0].allow_code == ("elsewhere", str(place))
    assert [path.name for path in folder.iterdir()] == [place.name], "nothing else is left there"
    # Another agent, later.
    another = Cache(folder)
    assert complete(another, launch()) == found[:1]
    assert another.asked == []


def test_a_node_that_takes_none_says_the_flag(tmp_path: Path) -> None:
    (found,) = complete(WheelCache(None, tmp_path), launch())
    assert "start its agent with --accept-code" in found.no_code
    assert found.job == launch().job


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (wheel_of({"mine.py": "A = 2\n"}), "what the master sent is not the job's wheel"),
        (b"no wheel", "it is no wheel"),
    ],
)
def test_what_is_not_the_jobs_wheel_is_not_unpacked(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (found,) = complete(Cache(tmp_path / "code", content), launch())
    assert reason in found.no_code
    assert list((tmp_path / "code").iterdir()) == []


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    folder.chmod(0o777)
    (found,) = complete(Cache(folder), launch())
    assert "is not a folder that only the agent's user can write to" in found.no_code
    folder.rmdir()
    (tmp_path / "own").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "own")
    (found,) = complete(Cache(folder), launch())
    assert "is not a folder" in found.no_code


def test_why_there_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (found,) = complete(Cache(tmp_path / "file" / "code"), launch())
    assert found.no_code.startswith(f"code: {tmp_path}/file")


def test_an_agent_without_a_home_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    (found,) = complete(Cache(), launch())
    assert found.no_code.startswith("code: ~/.cache/oobleck/code: this process's user has no home")
    assert not list(tmp_path.iterdir()), "no folder called ~"


def test_what_the_master_says_is_the_reason(tmp_path: Path) -> None:
    class Without(Cache):
        async def fetch(self, digest: str) -> bytes:
            raise NoCode("code: the master has no such wheel")

    (found,) = complete(Without(tmp_path / "code"), launch())
    assert found.no_code == "code: the master has no such wheel"


def test_the_wheels_that_were_used_last_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "_MOST_KEPT", 2)
    for number in range(4):
        content = wheel_of({"mine.py": f"A = {number}\n"})
        cache = Cache(tmp_path / "code", content)
        (found,) = complete(cache, launch(content))
        assert found.no_code == ""
        assert (tmp_path / "code" / Wheel(content).digest / "mine.py").is_file()
    assert len(list((tmp_path / "code").iterdir())) == 2


class Listener:
    """Hears that a worker has its launch."""

    def __init__(self) -> None:
        self.fetched: list[Incarnation] = []

    def code_fetched(self, incarnation: Incarnation) -> None:
        self.fetched.append(incarnation)

    def channel_closed(self, incarnation: Incarnation) -> None: ...


def test_a_worker_has_as_long_to_get_ready_however_slowly_its_code_comes() -> None:
    waited_s, heard = 0.05, Listener()

    async def slowly(asked: Launch) -> Launch:
        await asyncio.sleep(waited_s)
        assert heard.fetched == []
        return asked

    async def run() -> Launch:
        process = WorkerProcess(WorkerId(NodeName("n1"), 0), Incarnation("a" * 16), heard)  # type: ignore[arg-type]
        worker: Channel[ToWorker]
        worker = Channel(socket.socket(fileno=os.dup(process.hand_over()[0])), ToWorker)
        process.close_theirs()
        asked = msgspec.structs.replace(launch(), ready_by=100.0)
        serving = asyncio.create_task(process.serve(asked, slowly))
        told = await asyncio.to_thread(worker.receive)
        worker.close()
        await serving
        process.release()
        assert heard.fetched == [process.incarnation]
        assert isinstance(told, Launch)
        return told

    told = loops.run(run())
    assert told.ready_by is not None
    assert told.ready_by >= 100.0 + 0.9 * waited_s
