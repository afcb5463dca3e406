"""What earlier releases have written and said is read, and means what it did."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from oobleck.cli.client import MasterClient
from oobleck.core.codec import decode, encode
from oobleck.host.versions import ENGINE
from oobleck.master.events.unions import Journaled
from oobleck.master.storage.journal import FORMAT
from oobleck.proto.protocol import NEWEST
from support.folders import ROOT
from support.masters import master
from support.release import RELEASES, kept_messages, readers, state_of
from support.scenario import durable

FOLDERS = sorted(RELEASES.iterdir())


def lost(told: Any, read: Any) -> Any:
    """What was told and is not in what was read; a later release may add keys."""
    if isinstance(told, dict) and isinstance(read, dict):
        return {
            key: below
            for key, value in told.items()
            if (below := lost(value, read.get(key, "nothing"))) != {}
        }
    if isinstance(told, list) and isinstance(read, list) and len(told) == len(read):
        parts = [below for pair in zip(told, read, strict=True) if (below := lost(*pair)) != {}]
        return parts or {}
    return {} if told == read else (told, read)


def test_something_of_every_release_is_kept() -> None:
    assert [folder.name for folder in FOLDERS] == ["0.1.0"]
    assert (FORMAT, NEWEST, ENGINE) == (1, 1, "1"), "numbers begin with 0.1.0"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_messages_are_read(folder: Path) -> None:
    found = kept_messages(folder)
    assert {kind for kind, _, _ in found} == set(readers())
    for kind, message, means in found:
        assert lost(means, decode(object, encode(readers()[kind](message)))) == {}, kind


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_events_are_read(folder: Path) -> None:
    kinds = set()
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = decode(Journaled, line)  # type: ignore[arg-type]  # a union
        kinds.add(type(event))
        assert lost(json.loads(line), decode(object, encode(event))) == {}
    assert len(kinds) == 46
    assert kinds <= {*get_args(Journaled)}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_master_goes_on_from_a_state_directory(folder: Path, tmp_path: Path) -> None:
    """Its journal begins with a snapshot; another one has all events that led there."""
    for name in ("state", "events"):
        shutil.copytree(folder / name, tmp_path / name)
    whole = state_of(tmp_path / "events" / "journal.log")
    assert durable(state_of(tmp_path / "state" / "journal.log")) == durable(whole)
    with master(tmp_path / "state") as running, MasterClient(running.address) as client:
        assert {job.job_id for job in client.jobs()} == {*whole.jobs}


def test_the_program_that_writes_them_starts_as_the_page_says() -> None:
    subprocess.run([sys.executable, "-c", "import support.release"], cwd=ROOT / "tests", check=True)
