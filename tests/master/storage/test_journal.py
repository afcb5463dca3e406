"""What the journal has taken is there after any end, and what is damaged is told or refused."""

import base64
import contextlib
import errno
import os
import random
import resource
import shutil
import stat
import zlib
from pathlib import Path

import msgspec
import pytest

from oobleck.core.ids import JobId
from oobleck.master.events.jobs import JobCancelRequested, JobWaiting
from oobleck.master.events.trust import CredentialIssued
from oobleck.master.events.unions import Journaled
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.reducer.apply import apply
from oobleck.master.storage import journal
from oobleck.master.storage import snapshot as snapshots
from oobleck.master.storage.disk import StorageFailed
from oobleck.master.storage.journal import Cut, Journal, JournalUnusable, Snapshot
from support.folders import ROOT
from support.scenario import Player, durable

SCENARIO = ROOT / "tests/master/scenarios/overtaken.txt"
#: Events per commit of `filled`.
COMMITS = (1, 3, 1, 2, 5, 1, 1, 4)
MANY = sum(COMMITS)


def numbered(count: int, first: int = 0) -> list[Journaled]:
    return [
        JobWaiting(job_id=JobId("j"), causes=(str(first + i), "x" * (i * 7 % 60)))
        for i in range(count)
    ]


def filled(path: Path) -> list[int]:
    """A journal with all of `numbered(MANY)`; where its commits end."""
    events = iter(numbered(MANY))
    ends = []
    with contextlib.closing(Journal(path)) as journal:
        for count in COMMITS:
            for _ in range(count):
                journal.append(next(events), 1.0)
            journal.commit()
            ends.append(path.stat().st_size)
    return ends


def opened(path: Path, *, salvage: bool = False) -> tuple[list[Journaled | Snapshot], Cut | None]:
    with contextlib.closing(Journal(path, salvage=salvage)) as journal:
        return [event for _, event in journal.replay()], journal.cut


def goes_on(path: Path, before: int) -> None:
    """One more event is taken and stays."""
    with contextlib.closing(Journal(path)) as journal:
        journal.append(JobCancelRequested(job_id=JobId("j"), request_id="c"), 2.0)
        journal.commit()
    events, cut = opened(path)
    assert (len(events), cut) == (before + 1, None)


def test_every_kind_of_event_comes_back_as_it_went_in(tmp_path: Path) -> None:
    player = Player()
    player.play(SCENARIO.read_text())
    with contextlib.closing(Journal(tmp_path / "journal.log")) as journal:
        for unix, event in player.journal:
            journal.append(event, unix)
        journal.commit()
    state = ClusterState()
    with contextlib.closing(Journal(tmp_path / "journal.log")) as journal:
        for unix, event in journal.replay():
            assert not isinstance(event, Snapshot)
            apply(state, event, now=0.0, unix=unix)
    assert durable(state) == durable(player.state)


def test_what_was_not_committed_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    events = numbered(3)
    with contextlib.closing(Journal(tmp_path / "live" / "journal.log")) as journal:
        journal.append(events[0], 1.0)
        journal.commit()
        journal.append(events[1], 2.0)
        journal.append(events[2], 3.0)
        shutil.copytree(tmp_path / "live", tmp_path / "crashed")  # as the disk is at a kill -9
    assert opened(tmp_path / "crashed" / "journal.log") == (events[:1], None)


def test_cut_at_any_byte_it_recovers_to_the_last_whole_event_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    ends = filled(path)
    content, events = path.read_bytes(), numbered(MANY)
    first = content.index(b"\n") + 1
    for size in [*range(0, ends[-2], 29), *range(ends[-2], ends[-1] + 1)]:
        for left in tmp_path.iterdir():
            left.unlink()
        path.write_bytes(content[:size])
        whole = max(0, content[:size].count(b"\n") - 1)
        found, cut = opened(path)
        assert found == events[:whole]
        rest = content[content[:size].rfind(b"\n") + 1 : size] if size >= first else content[:size]
        if not rest and size:
            assert cut is None
        elif rest:
            assert cut == Cut(len(rest), whole, "journal.log.cut-1")
            assert (tmp_path / "journal.log.cut-1").read_bytes() == rest
    goes_on(path, MANY)


@pytest.mark.parametrize("seed", range(30))
def test_flipped_bits_in_the_last_commit_cost_what_comes_after_them_alone(
    tmp_path: Path, seed: int
) -> None:
    path, draw = tmp_path / "journal.log", random.Random(seed)
    ends = filled(path)
    content = bytearray(path.read_bytes())
    places = [draw.randrange(ends[-2], ends[-1]) for _ in range(draw.choice((1, 1, 5)))]
    for place in places:
        content[place] ^= 1 << draw.randrange(8)
    whole = content[: min(places)].count(b"\n") - 1
    path.write_bytes(content)
    found, cut = opened(path)
    assert found == numbered(MANY)[: len(found)]
    assert len(found) >= whole
    assert cut is not None or bytes(content) == path.read_bytes()
    goes_on(path, len(found))


@pytest.mark.parametrize("seed", range(20))
def test_damage_before_the_last_commit_is_refused_and_can_be_salvaged(
    tmp_path: Path, seed: int
) -> None:
    path, draw = tmp_path / "journal.log", random.Random(seed)
    ends = filled(path)
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(b"oobleck-journal 1\n"), ends[-2] - 1)
    content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    whole = content[:place].count(b"\n") - 1
    with pytest.raises(JournalUnusable, match="with --salvage-journal to go on from event"):
        Journal(path)
    assert path.read_bytes() == content
    found, cut = opened(path, salvage=True)
    assert found == numbered(MANY)[:whole]
    assert cut is not None
    assert path.read_bytes() + (tmp_path / cut.kept_as).read_bytes() == content
    goes_on(path, whole)


@pytest.mark.parametrize(
    "content", [b"this is something else\n" * 20, b"oobleck-journal x\n", b"SQLite format 3\0" * 9]
)
def test_a_file_that_is_no_journal_is_refused_and_left_alone(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "journal.log"
    path.write_bytes(content)
    with pytest.raises(JournalUnusable, match="is not a journal of Oobleck"):
        Journal(path)
    assert path.read_bytes() == content


def test_a_journal_of_an_earlier_format_is_read_and_then_refused_by_earlier_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.log"
    filled(path)
    events = path.read_bytes().removeprefix(b"oobleck-journal 1\n")
    with monkeypatch.context() as later:
        later.setattr(journal, "FORMAT", 2)
        later.setattr(journal, "_HEADER", b"oobleck-journal 2\n")
        found, cut = opened(path)
        assert (found, cut) == (numbered(MANY), None)
        assert path.read_bytes() == b"oobleck-journal 2\n" + events
        assert opened(path)[0] == found
    content = path.read_bytes()
    with pytest.raises(
        JournalUnusable,
        match=r"later release \(format 2; this one reads up to 1\): start the release that wrote",
    ):
        Journal(path)
    assert path.read_bytes() == content


def test_an_entry_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    filled(path)
    body = b'= [%d,1.0,{"type":"SomethingNew"}]' % (MANY + 1)
    with path.open("ab") as file:
        file.write(b"%08x %b\n" % (zlib.crc32(body), body))
    with pytest.raises(
        JournalUnusable, match=r"that this release does not know .*: start the release"
    ):
        opened(path)


def compacted(path: Path) -> list[Journaled]:
    """A journal with a snapshot and some events behind it; those events."""
    filled(path)
    later = numbered(3, first=100)
    with contextlib.closing(Journal(path)) as journal:
        journal.compact("anything", 5.0)
        for event in later:
            journal.append(event, 6.0)
            journal.commit()
    return later


def test_a_snapshot_stands_for_the_events_before_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    later = compacted(path)
    (snapshot, *events), cut = opened(path)
    assert isinstance(snapshot, Snapshot)
    assert snapshot.content == "anything"
    assert (events, cut) == (later, None)
    assert opened(tmp_path / "journal.old")[0] == numbered(MANY)
    goes_on(path, 4)


def test_without_its_snapshot_it_has_the_events_that_led_to_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    later = compacted(path)
    content = bytearray(path.read_bytes())
    content[40] ^= 4
    path.write_bytes(content)
    found, cut = opened(path)
    assert found == [*numbered(MANY), *later]
    assert cut is not None
    assert (tmp_path / cut.kept_as).read_bytes() == content
    goes_on(path, MANY + 3)


def test_a_snapshot_that_is_not_known_to_stay_is_written_behind_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "the folder takes nothing")

    path = tmp_path / "journal.log"
    filled(path)
    with contextlib.closing(Journal(path)) as journal:
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StorageFailed):
            journal.compact("anything", 5.0)
        monkeypatch.undo()
        (event,) = numbered(1, first=100)
        journal.append(event, 6.0)
        journal.commit()
    (*before, last), cut = opened(path)
    assert isinstance(before[0], Snapshot) or before == numbered(MANY)
    assert (last, cut) == (event, None)


@pytest.mark.parametrize("size", [0, 5, 18, 19, 30, 60])
def test_cut_in_its_snapshot_it_has_the_events_of_before(tmp_path: Path, size: int) -> None:
    path = tmp_path / "journal.log"
    compacted(path)
    path.write_bytes(path.read_bytes()[:size])
    found, cut = opened(path)
    assert found == numbered(MANY)
    assert cut is not None
    goes_on(path, MANY)


def test_a_commit_that_the_disk_does_not_take_leaves_nothing_and_can_be_tried_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.log"
    filled(path)
    content = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.closing(Journal(path)) as journal:
        for event in numbered(2, first=MANY):
            journal.append(event, 1.0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) + 30, limits[1]))
        try:
            with pytest.raises(StorageFailed, match="cannot be written"):
                journal.commit()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == content
        journal.commit()
    assert len(opened(path)[0]) == MANY + 2


def test_a_state_comes_back_from_its_snapshot_with_all_who_are_trusted() -> None:
    player = Player()
    player.play(SCENARIO.read_text())
    issued = CredentialIssued(role="agent", name="n1", expires_at=5.0)
    apply(player.state, issued, now=player.now, unix=1.0)
    content = snapshots.take(player.state, {JobId("demo-1"): 7}, [(8, "{}")])
    restored, given, events = snapshots.restore(content, 0.0)
    assert durable(restored) == durable(player.state)
    assert (given, [*events]) == ({"demo-1": 7}, [(8, "{}")])
    with pytest.raises(ValueError, match="that this release does not know"):
        snapshots.restore("bm90aGluZw==", 0.0)


def test_a_field_that_a_part_of_a_job_lacks_is_of_another_version() -> None:
    player = Player()
    player.play(SCENARIO.read_text())
    packed = base64.b64decode(snapshots.take(player.state, {}, ()))
    text = msgspec.msgpack.decode(zlib.decompress(packed), type=dict[str, msgspec.Raw])
    jobs = msgspec.msgpack.decode(text["jobs"], type=dict[str, dict[str, msgspec.Raw]])
    saves = msgspec.msgpack.decode(jobs["demo-1"]["saves"])
    jobs["demo-1"]["saves"] = msgspec.Raw(msgspec.msgpack.encode(saves | {"novel": 1}))
    text["jobs"] = msgspec.Raw(msgspec.msgpack.encode(jobs))
    content = base64.b64encode(zlib.compress(msgspec.msgpack.encode(text))).decode()
    with pytest.raises(ValueError, match=r"that this release does not know \(Saves has no novel"):
        snapshots.restore(content, 0.0)
