"""What the journal has taken is there after any end; what is damaged is refused."""

import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from scenario import Player, durable

from oobleck.master.apply import apply
from oobleck.master.events import JobCancelRequested, JobWaiting
from oobleck.master.journal import Journal, JournalUnusable
from oobleck.master.state import ClusterState
from oobleck.planner.ids import JobId

SCENARIO = Path(__file__).with_name("scenarios") / "overtaken.txt"


def replayed(path: Path) -> list:
    journal = Journal(path)
    try:
        return [event for _, event in journal.replay()]
    finally:
        journal.close()


def numbered(count: int) -> list[JobWaiting]:
    return [JobWaiting(job_id=JobId("j"), causes=(str(i), "x" * 100)) for i in range(count)]


def test_every_kind_of_event_comes_back_as_it_went_in(tmp_path: Path) -> None:
    player = Player()
    player.play(SCENARIO.read_text())
    journal = Journal(tmp_path / "journal.db")
    for unix, event in player.journal:
        journal.append(event, unix)
    journal.commit()
    journal.close()

    state = ClusterState()
    journal = Journal(tmp_path / "journal.db")
    for unix, event in journal.replay():
        apply(state, event, now=0.0, unix=unix)
    journal.close()
    assert durable(state) == durable(player.state)


def test_what_was_not_committed_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    journal = Journal(tmp_path / "live" / "journal.db")
    events = numbered(3)
    journal.append(events[0], 1.0)
    journal.commit()
    journal.append(events[1], 2.0)
    journal.append(events[2], 3.0)
    shutil.copytree(tmp_path / "live", tmp_path / "crashed")  # as the disk is at a kill -9
    journal.close()
    assert replayed(tmp_path / "crashed" / "journal.db") == events[:1]


@pytest.mark.parametrize("kept", [0.0, 0.2, 0.5, 0.8, 0.99])
def test_a_torn_write_ahead_log_loses_only_its_end(tmp_path: Path, kept: float) -> None:
    (tmp_path / "live").mkdir()
    journal = Journal(tmp_path / "live" / "journal.db")
    events = numbered(40)
    for event in events:
        journal.append(event, 1.0)
        journal.commit()
    crashed = tmp_path / "crashed"
    shutil.copytree(tmp_path / "live", crashed)
    journal.close()
    log = crashed / "journal.db-wal"
    os.truncate(log, int(log.stat().st_size * kept))

    found = replayed(crashed / "journal.db")
    assert found == events[: len(found)]
    assert len(found) < len(events)
    journal = Journal(crashed / "journal.db")  # and it goes on from there
    journal.append(JobCancelRequested(job_id=JobId("j"), request_id="c"), 2.0)
    journal.commit()
    journal.close()
    assert len(replayed(crashed / "journal.db")) == len(found) + 1


def filled(path: Path) -> None:
    journal = Journal(path)
    for event in numbered(200):
        journal.append(event, 1.0)
    journal.commit()
    journal.close()


def test_a_damaged_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    filled(path)
    content = bytearray(path.read_bytes())
    content[4096 : 4096 + 3000] = b"\xa5" * 3000
    path.write_bytes(content)
    with pytest.raises(JournalUnusable, match="move this one away to start anew"):
        replayed(path)


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_text("this is not a database, and long enough to be none " * 20)
    with pytest.raises(JournalUnusable, match="cannot be read"):
        Journal(path)


def test_a_gap_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    filled(path)
    database = sqlite3.connect(path)
    database.execute("DELETE FROM events WHERE sequence = 7")
    database.commit()
    database.close()
    with pytest.raises(JournalUnusable, match="1 events are missing"):
        Journal(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    filled(path)
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version=9")
    database.close()
    with pytest.raises(JournalUnusable, match="has format 9"):
        Journal(path)
