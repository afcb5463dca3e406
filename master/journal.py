"""The journal: every journaled event, in order, in one SQLite file that survives `kill -9`.

WAL with synchronous=FULL: what `commit` has returned for is on disk. A write that was cut off is
rolled back by SQLite on the next start; a file that is damaged otherwise is refused with the way
out, never repaired by guessing. Must not know what the events mean.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from oobleck.master.events import Journaled
from oobleck.master.storage import storing
from oobleck.planner.codec import decode, encode

SCHEMA = 1


class JournalUnusable(Exception):
    """The journal cannot be opened; the text is one line with the way out."""


class Journal:
    def __init__(self, path: Path) -> None:
        """Open or create the journal at `path`. Raises JournalUnusable."""
        self._path = path
        self._database = sqlite3.connect(path, isolation_level=None)
        try:
            self._open()
        except sqlite3.Error as error:
            self.close()
            raise self._unusable(f"cannot be read ({error})") from error
        except JournalUnusable:
            self.close()
            raise

    def _open(self) -> None:
        execute = self._database.execute
        (schema,) = execute("PRAGMA user_version").fetchone()
        tables = [name for (name,) in execute("SELECT name FROM sqlite_master WHERE type='table'")]
        if tables != (["events"] if schema else []):
            raise self._unusable("is a database of something else")
        if schema not in (0, SCHEMA):
            raise self._unusable(
                f"has format {schema}, this version of Oobleck reads format {SCHEMA}"
            )
        execute("PRAGMA journal_mode=WAL")
        execute("PRAGMA synchronous=FULL")
        problems = [row[0] for row in execute("PRAGMA quick_check(1)")]
        if problems != ["ok"]:
            raise self._unusable(f"is damaged ({problems[0]})")
        if schema == 0:
            execute("BEGIN IMMEDIATE")
            execute(
                "CREATE TABLE events "
                "(sequence INTEGER PRIMARY KEY, time REAL NOT NULL, event TEXT NOT NULL) STRICT"
            )
            execute(f"PRAGMA user_version={SCHEMA}")
            execute("COMMIT")
        (last, count) = execute("SELECT max(sequence), count(*) FROM events").fetchone()
        self._last = last or 0
        if count != self._last:
            raise self._unusable(f"is damaged ({self._last - count} events are missing)")

    def _unusable(self, problem: str) -> JournalUnusable:
        return JournalUnusable(
            f"the journal {self._path} {problem}; "
            "choose another --state-dir, or move this one away to start anew"
        )

    def replay(self) -> Iterator[tuple[float, Journaled]]:
        """All events with their Unix times, oldest first. Raises JournalUnusable."""
        try:
            for sequence, unix, text in self._database.execute(
                "SELECT sequence, time, event FROM events ORDER BY sequence"
            ):
                try:
                    event: Journaled = decode(Journaled, text)  # type: ignore[arg-type]
                except ValueError as error:
                    raise self._unusable(f"is damaged (event {sequence}: {error})") from error
                yield unix, event
        except sqlite3.Error as error:
            raise self._unusable(f"cannot be read ({error})") from error

    def append(self, event: Journaled, unix: float) -> None:
        """Add `event`; nobody may act on it before `commit`. Both raise StorageFailed."""
        self._last += 1
        text = encode(event).decode()
        with storing(self._path):
            if not self._database.in_transaction:
                self._database.execute("BEGIN IMMEDIATE")
            self._database.execute("INSERT INTO events VALUES (?, ?, ?)", (self._last, unix, text))

    def commit(self) -> None:
        """Put all appended events on disk."""
        with storing(self._path):
            if self._database.in_transaction:
                self._database.execute("COMMIT")

    def close(self) -> None:
        self._database.close()
