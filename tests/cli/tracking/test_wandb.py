"""`oobleck track --to wandb`: what is in the offline run, also after a start that was killed."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import oobleck
from support.waiting import until

#: The file is a log as LevelDB has it: blocks of records, which may be in parts.
_FILE_HEAD, _BLOCK_BYTES, _HEAD = 7, 32768, struct.Struct("<IHB")
_FULL, _LAST = 1, 4


def records_of(data: bytes) -> Iterator[bytes]:
    at, whole = _FILE_HEAD, b""
    while at + _HEAD.size <= len(data):
        if _BLOCK_BYTES - at % _BLOCK_BYTES < _HEAD.size:  # nothing begins in so little
            at += _BLOCK_BYTES - at % _BLOCK_BYTES
            continue
        _, size, kind = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        whole += data[at : at + size]
        at += size
        if kind in (_FULL, _LAST):
            yield whole
            whole = b""


def rows(folder: Path) -> list[dict[str, Any]]:
    """Of the one run that is there."""
    from wandb.proto import wandb_internal_pb2  # a second of a core

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found: list[dict[str, Any]] = []
    for data in records_of(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("history"):
            found.append(
                {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    return found


def test_a_run_is_whole_after_a_start_that_was_killed(
    cluster: str, job_file: Callable[..., Path], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "oobleck.cli.main", "track", "--master", cluster]
    with oobleck.Client(cluster) as client:
        job = client.submit(job_file(), set=["training.steps=200"])
        command += ["--to", "wandb", "--directory", str(runs), job]
        with subprocess.Popen(command) as first:
            until(lambda: list(runs.glob("*/wandb/offline-run-*/*.wandb")), "the run's file")
            first.kill()
        client.wait(job)
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        found = rows(runs / job)
        steps = [row for row in found if "train/loss" in row]
        records = list(client.metrics(job))
        assert [row["_step"] for row in steps] == [record.step for record in records]
        assert [row["train/loss"] for row in steps] == [
            pytest.approx(record.loss) for record in records
        ]
        told = "\n".join(row["events"] for row in found if "events" in row).splitlines()
        events = list(client.events(job))
        assert [line.split(": ")[0] for line in told] == [str(event["id"]) for event in events]
        assert told[-1].endswith(": succeeded")
