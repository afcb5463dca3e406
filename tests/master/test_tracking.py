"""Which copies of jobs the master has written, and that a copy that fails is nobody's trouble."""

import asyncio
import dataclasses
import logging
from pathlib import Path

from oobleck.core.ids import JobId
from oobleck.core.job.spec import JobSpec
from oobleck.host.address import own_address
from oobleck.master.events.jobs import JobCancelled, JobStarted, JobSubmitted
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.reducer.apply import apply
from oobleck.master.tracking import Tracking, last_line, wanted
from support import loops
from support.jobs import job_spec
from support.masters import running


def tracked(*programs: str) -> JobSpec:
    return dataclasses.replace(job_spec("demo"), track=programs)


def submit(state: ClusterState, job_id: str, *programs: str) -> None:
    event = JobSubmitted(job_id=JobId(job_id), request_id=job_id, spec=tracked(*programs))
    apply(state, event, now=0.0, unix=0.0)


def test_the_job_that_has_the_turn_comes_first_and_those_in_the_queue_wait() -> None:
    state = ClusterState()
    for number in (1, 2, 3):
        submit(state, f"demo-{number}", "tensorboard", "mlflow")
    assert wanted(state, ()) == []
    one, two = JobId("demo-1"), JobId("demo-2")
    apply(state, JobStarted(job_id=one), now=0.0, unix=0.0)
    assert wanted(state, ()) == [(one, "tensorboard"), (one, "mlflow")]
    apply(state, JobCancelled(job_id=one), now=0.0, unix=0.0)
    apply(state, JobStarted(job_id=two), now=0.0, unix=0.0)
    rest = [(one, "tensorboard"), (one, "mlflow")]
    assert wanted(state, ()) == [(two, "tensorboard"), (two, "mlflow"), rest[0]]
    assert wanted(state, {rest[0]}) == [(two, "tensorboard"), (two, "mlflow"), rest[1]]
    assert wanted(state, set(rest)) == [(two, "tensorboard"), (two, "mlflow")]


def test_a_master_that_listens_everywhere_is_asked_on_loopback() -> None:
    assert own_address("0.0.0.0", 4600) == "127.0.0.1:4600"
    assert own_address("[::]", 4600) == "[::1]:4600"
    assert own_address("10.0.0.1", 4600) == "10.0.0.1:4600"


def test_of_a_log_of_any_size_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"")
    assert last_line(path) == ""
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole, which takes no room on the disk
        file.seek(0, 2)
        file.write(b"\nfirst\nlast\n")
    assert last_line(path) == "last"


def test_a_copy_that_cannot_be_written_is_told_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "tracking").write_text("a file in the folder's place")
    told = asyncio.Event()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "the process that copies a job is restarted":
                told.set()

    async def run() -> None:
        async with running(tmp_path) as master:
            tracking = Tracking(master, lambda: ("--insecure",))
            task = asyncio.create_task(tracking.run("nowhere:1"))
            try:
                job_id = await master.requests.submit("r", tracked("mlflow"))
                await told.wait()
                await master.requests.cancel("c", job_id)
                assert not task.done()
            finally:
                task.cancel()
                await asyncio.wait((task,))
        assert task.cancelled()

    log, handler = logging.getLogger("oobleck.master.tracking"), Heard()
    log.addHandler(handler)
    try:
        loops.run(run())
    finally:
        log.removeHandler(handler)
