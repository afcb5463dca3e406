"""Journal: every journaled event, in order, in one file that survives `kill -9`.

The file has lines, and is only appended to. After the header each line is

    CRC MARK PAYLOAD

CRC-32 (hex) of the rest of the line; `=` where a commit begins and `-` inside one; and the JSON
text `[sequence, unix, event]`. A commit is one write and one fdatasync, and the next one begins
after that. So a crash can tear only the last commit. On opening, an incomplete last commit is cut
off, kept in a file of its own, and reported (`cut`). A bad line that is followed by a commit is
damage rather than a crash: such a file is refused, and the error says the way out.

`compact` replaces events by a snapshot of the state. A new file whose first line is the snapshot
takes the place of the old one, which stays as `journal.old`.

It is not SQLite. Depending on where a database file was cut, SQLite refuses it as a whole or
silently reads a part. Here every line has its own checksum, so the loss is known exactly.

Must not know what events mean, nor what a snapshot holds.
"""

import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from oobleck.core.codec import decode, encode
from oobleck.host.system.files import sync_directory
from oobleck.master import process
from oobleck.master.events.unions import Journaled
from oobleck.master.storage.disk import append, storing

#: Format of events and snapshots. A master raises a lower format in a file to its own, and refuses
#: a higher one. Raise it when an earlier master would decide wrongly by the file.
FORMAT = 1
_HEADER = b"oobleck-journal %d\n" % FORMAT
_NUMBER = re.compile(rb"oobleck-journal ([1-9])\n")
THAT_RELEASE = "start the release that wrote it, or a later one"
_BEGINS, _GOES_ON = b"=", b"-"
#: CRC, space, mark, space.
_PREFIX = 11
#: Least bytes of events since the snapshot that are worth a new one.
_COMPACT_BYTES = 2 << 20
_COMPACT_SNAPSHOTS = 4


class JournalUnusable(Exception):
    """Failure to open the journal; the text is one line with the way out."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Snapshot of the state after all earlier events; its content is opaque here."""

    content: str


class Cut(NamedTuple):
    """Incomplete end of the journal file, cut off on opening it."""

    bytes: int
    #: Sequence number of the last whole event.
    last: int
    kept_as: str


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    unix: float
    event: Journaled | Snapshot


class Journal:
    def __init__(self, path: Path, *, salvage: bool = False, compact_bytes: int = 0) -> None:
        """Open or create the journal at `path`. `salvage`: go on with the events before the damage;
        `compact_bytes`: least size for compaction, for tests. Raises JournalUnusable."""
        self._path = path
        self._compact_bytes = compact_bytes
        self._old = path.with_name("journal.old")
        self._descriptor = -1
        self._batch: list[bytes] = []
        #: Sequence number of the last event, committed or not.
        self._last = 0
        #: Bytes of the events since the snapshot, and of the snapshot.
        self._tail_bytes = self._snapshot_bytes = 0
        #: Compactions by this process.
        self.compactions = 0
        #: The end that was cut off; None: the file was whole.
        self.cut: Cut | None = None
        try:
            self._open(salvage)
        except OSError as error:
            self.close()
            raise self.unusable(f"cannot be read ({error.strerror or error})") from error
        except JournalUnusable:
            self.close()
            raise

    def _open(self, salvage: bool) -> None:
        if not self._path.exists():
            self._create([])
        if not self._path.is_file():
            raise self.unusable("is not a regular file")
        self._restore_snapshot()
        with open(self._path, "rb") as file:
            number = self._format_of(file.read(len(_HEADER)))
            end, damage = self._scan(file)
        if damage and not salvage:
            raise self.unusable(
                f"is damaged at byte {end}: the event after {self._last} cannot be read and later "
                "ones can; start oobleck-master with --salvage-journal to go on from event "
                f"{self._last} (the rest is kept beside it)"
            )
        if (size := self._path.stat().st_size) != end:
            kept_as = self._keep_aside(end)
            self.cut = Cut(size - end, self._last, kept_as)
            if end < len(_HEADER):
                self._create([])
            else:
                os.truncate(self._path, end)
        if number != FORMAT:
            self._raise_format()
        self._descriptor = self._open_to_append()
        os.fdatasync(self._descriptor)

    def _format_of(self, head: bytes) -> int:
        """Return the format of a file that begins with `head`. Raises JournalUnusable."""
        if _HEADER.startswith(head):
            return FORMAT
        match = _NUMBER.fullmatch(head)
        if match is None:
            raise self.unusable("is not a journal of Oobleck")
        if (number := int(match[1])) > FORMAT:
            raise self.unusable(
                f"is of a later release (format {number}; this one reads up to {FORMAT}): "
                f"{THAT_RELEASE}"
            )
        return number

    def _raise_format(self) -> None:
        """Write the new header in place. Only one digit differs, so a crash leaves one format or
        the other."""
        with open(self._path, "r+b") as file:
            file.write(_HEADER)
            file.flush()
            os.fdatasync(file.fileno())

    def _scan(self, file: IO[bytes]) -> tuple[int, bool]:
        """Return where the whole lines end, and whether a commit follows a bad line."""
        end = file.tell()
        if end < len(_HEADER):
            return 0, False
        good = True
        for line in file:
            payload = _payload(line)
            if good and payload is not None and self._follows(payload):
                end += len(line)
                continue
            good = False
            if payload is not None and line[_PREFIX - 2 : _PREFIX - 1] == _BEGINS:
                return end, True
        return end, False

    def _follows(self, payload: bytes) -> bool:
        """Return whether the payload is the next entry; if so, count it."""
        sequence = int(payload[1 : payload.index(b",")])
        is_snapshot = self._last == 0 and sequence > 0 and _is_snapshot(payload)
        if sequence != self._last + 1 and not is_snapshot:
            return False
        self._last = sequence
        if is_snapshot:
            self._snapshot_bytes = len(payload)
        else:
            self._tail_bytes += len(payload)
        return True

    def _restore_snapshot(self) -> None:
        """Replace an incomplete snapshot at the beginning of the file by the events from which it
        was made."""
        if not self._old.is_file():
            return
        content = self._path.read_bytes()
        first, newline, rest = content[len(_HEADER) :].partition(b"\n")
        head = content[: len(_HEADER)]
        known = _HEADER.startswith(head) or _NUMBER.fullmatch(head)
        if not known or _payload(first + newline):
            return
        kept_as = self._keep_aside(0)
        self._create([self._old.read_bytes()[len(_HEADER) :], rest])
        with open(self._path, "rb") as file:
            file.seek(len(_HEADER))
            self._scan(file)
        self.cut = Cut(len(first), self._last, kept_as)
        self._last = self._tail_bytes = self._snapshot_bytes = 0

    def _create(self, content: list[bytes]) -> None:
        """Put a new file in place, atomically."""
        fresh = self._path.with_name(self._path.name + ".new")
        with storing(fresh):
            try:
                with open(fresh, "wb") as file:
                    file.writelines([_HEADER, *content])
                    file.flush()
                    os.fsync(file.fileno())
                process.reach("snapshot-written")
                os.replace(fresh, self._path)
                sync_directory(self._path.parent)
            finally:
                fresh.unlink(missing_ok=True)
        process.reach("snapshot-placed")

    def _keep_aside(self, start: int) -> str:
        """Copy the file from `start` on, and return the name of the copy."""
        number = 1
        while (aside := self._path.with_name(f"{self._path.name}.cut-{number}")).exists():
            number += 1
        with storing(aside), open(self._path, "rb") as file:
            file.seek(start)
            aside.write_bytes(file.read())
        return aside.name

    def unusable(self, problem: str) -> JournalUnusable:
        """Return the error that states `problem` of this journal, with the way out."""
        return JournalUnusable(
            f"the journal {self._path} {problem}; choose another --state-dir, or move this one "
            "away to start anew"
        )

    # ---- reading

    def replay(self) -> Iterator[tuple[float, Journaled | Snapshot]]:
        """Yield all entries with Unix times; a snapshot is the first one. Raises
        JournalUnusable."""
        with open(self._path, "rb") as file:
            file.seek(len(_HEADER))
            for line in file:
                payload = line[_PREFIX:]
                try:
                    entry = decode(_Entry, payload)
                except ValueError as error:
                    text = f"has an entry that this release does not know ({error})"
                    raise self.unusable(f"{text}: {THAT_RELEASE}") from error
                yield entry.unix, entry.event
                if entry.sequence == self._last:
                    return

    # ---- writing

    def append(self, event: Journaled, unix: float) -> None:
        """Add `event`. Its effects must not be visible before `commit`."""
        self._last += 1
        mark = _GOES_ON if self._batch else _BEGINS
        line = _line(mark, encode(_Entry(self._last, unix, event)))
        self._batch.append(line)

    def commit(self) -> None:
        """Write all appended events to disk. Raises StorageFailed: then none of them is on disk,
        and the caller may retry."""
        if not self._batch:
            return
        data = b"".join(self._batch)
        with storing(self._path):
            append(self._descriptor, data, torn="journal-torn", sync=True)
        self._batch.clear()
        self._tail_bytes += len(data)

    @property
    def waits(self) -> bool:
        """True while an entry is still to be committed."""
        return bool(self._batch)

    @property
    def committed(self) -> int:
        """Sequence number of the last event on disk."""
        return self._last - len(self._batch)

    @property
    def size_bytes(self) -> int:
        return len(_HEADER) + self._snapshot_bytes + self._tail_bytes

    @property
    def wants_compaction(self) -> bool:
        least = max(
            self._compact_bytes or _COMPACT_BYTES, _COMPACT_SNAPSHOTS * self._snapshot_bytes
        )
        return self._tail_bytes > least

    def compact(self, content: str, unix: float) -> None:
        """Replace all events, which are committed, by the snapshot `content`. Raises StorageFailed;
        then the journal has either the events or the snapshot."""
        assert not self._batch, "only what is committed can be replaced"
        entry = encode(_Entry(self._last, unix, Snapshot(content=content)))
        with storing(self._old):
            spare = self._old.with_name(self._old.name + ".new")
            spare.unlink(missing_ok=True)
            os.link(self._path, spare)
            os.replace(spare, self._old)
        try:
            self._create([_line(_BEGINS, entry)])
        finally:
            # Also after a failure: the new file may be in place, though perhaps not durably.
            before, self._descriptor = self._descriptor, self._open_to_append()
            os.close(before)
        self._tail_bytes, self._snapshot_bytes = 0, len(entry)
        self.compactions += 1

    def _open_to_append(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _line(mark: bytes, payload: bytes) -> bytes:
    body = b"%b %b" % (mark, payload)
    return b"%08x %b\n" % (zlib.crc32(body), body)


def _payload(line: bytes) -> bytes | None:
    """Return the payload of a whole line; None: the line is not whole."""
    if len(line) <= _PREFIX or not line.endswith(b"\n"):
        return None
    body = line[9:-1]
    if line[:9] != b"%08x " % zlib.crc32(body):
        return None
    return body[2:]


def _is_snapshot(payload: bytes) -> bool:
    return b'{"type":"Snapshot"' in payload[:80]
