"""Jobs that ended long ago are forgotten, and what is on disk of them is not."""

import asyncio
from pathlib import Path

import pytest
from scenario import job_spec

from oobleck.host.detection import Detection
from oobleck.master import retention
from oobleck.master.config import MasterConfig
from oobleck.master.journal import Journal
from oobleck.master.loop import Master

LIMIT_S = 60.0


async def run(state_dir: Path, jobs: range) -> Master:
    """A master on that directory, which these jobs were submitted to and cancelled."""
    config = MasterConfig(listen="127.0.0.1:0", state_dir=state_dir, timing=Detection())
    master = Master(config, Journal(state_dir / "journal.log"))
    running = asyncio.create_task(master.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            for number in jobs:
                job_id = await master.requests.submit(f"request {number}", job_spec("demo"))
                assert job_id == f"demo-{number}"
                await master.requests.cancel(f"cancel {number}", job_id)
    finally:
        running.cancel()
        master.close()
    return master


def test_the_last_jobs_that_ended_are_known_and_all_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MOST_ENDED", 2)
    first = asyncio.run(run(tmp_path, range(1, 5)))
    assert list(first.state.jobs) == ["demo-3", "demo-4"]
    assert set(first.state.requests) == {"request 3", "request 4"}
    again = asyncio.run(run(tmp_path, range(5, 6)))
    assert list(again.state.jobs) == ["demo-4", "demo-5"]
    for number in range(1, 6):
        events = (tmp_path / "jobs" / f"demo-{number}" / "events.jsonl").read_text()
        assert [line.count('"event":') for line in events.splitlines()] == [1, 1, 1]
