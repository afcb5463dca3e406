"""A dashboard that follows a job for long keeps no more of it than at first."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from oobleck.proto import control_pb2 as pb
from support.operators_master import answering
from support.visitor import Dashboard
from support.waiting import PATIENCE_S

pytestmark = pytest.mark.soak

_STEPS, _AT_A_TIME = 300_000, 500
_EVENTS = 3_000
#: Steps after which all that is bounded is full; and what may still be added.
_FULL = 60_000
_MOST_BYTES = 10 << 20


def step_line(step: int) -> str:
    told = {"step": step, "loss": 1 / step, "tokens": 64, "step_seconds": 0.01}
    return json.dumps({**told, "time": 1e9 + step / 100, "generation": 1 + step // 1000})


def event_line(number: int) -> str:
    incident = {"event": "incident", "incident": number, "outcome": "recovered", "opened_at": 1e9}
    change = {"event": "reconfigured", "to_generation": number, "cause": "c", "rule": "r"}
    told = incident if number % 2 else change
    more = {"total_s": 1.0, "phases": {"plan": 1.0}, "summary": "x" * 200}
    return json.dumps({**told, **more, "id": number, "time": 1e9})


def test_memory_does_not_grow_with_a_job(tmp_path: Path) -> None:
    told, measured, over = 0, threading.Event(), threading.Event()

    def metrics(_: pb.MetricsRequest) -> Iterator[pb.MetricsLines]:
        nonlocal told
        for first in range(1, _STEPS, _AT_A_TIME):
            yield pb.MetricsLines(json=map(step_line, range(first, first + _AT_A_TIME)))
            told = first
            if told > _FULL:
                measured.wait(PATIENCE_S)
        over.wait(PATIENCE_S)

    def events(_: pb.EventsRequest) -> Iterator[pb.EventRecord]:
        for number in range(1, _EVENTS + 1):
            yield pb.EventRecord(json=event_line(number))
        over.wait(PATIENCE_S)

    job = pb.JobStatus(job_id="demo-1", state="running", steps=10**7)
    answers = {
        "ListNodes": lambda _: pb.ListNodesReply(),
        "ListJobs": lambda _: pb.ListJobsReply(jobs=[job]),
        "Metrics": metrics,
        "Events": events,
    }
    with (
        answering(at_once=8, **answers) as address,
        Dashboard(tmp_path, "--master", address) as dashboard,
    ):
        process = psutil.Process(dashboard.process.pid)
        visitor = dashboard.visitor()
        full = 0
        with visitor.watching("/jobs/demo-1") as changes:
            for _ in changes:
                if full == 0 and told > _FULL:
                    full = process.memory_info().rss
                    measured.set()
                if told >= _STEPS - _AT_A_TIME:
                    break
        grown = process.memory_info().rss - full
        over.set()
    assert grown < _MOST_BYTES
