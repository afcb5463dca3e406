"""What a backup has of files that change while it is made."""

import contextlib
import itertools
from pathlib import Path

from oobleck.core.ids import JobId, NodeName, WorkerId
from oobleck.master.events.jobs import JobWaiting
from oobleck.master.storage.archive import LogStore
from oobleck.master.storage.backup import Capture, Part
from oobleck.master.storage.journal import Journal

_DEMO = JobId("demo-1")


def commit(journal: Journal, *causes: str) -> None:
    for cause in causes:
        journal.append(JobWaiting(job_id=_DEMO, causes=(cause,)), 1.0)
    journal.commit()


def files_of(parts: list[Part]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    name = ""
    for part in parts:
        name = part.path or name
        found[name] = found.get(name, b"") + part.data
    return found


def test_a_journal_that_was_compacted_meanwhile_is_looked_at_again(tmp_path: Path) -> None:
    with (
        contextlib.closing(Journal(tmp_path / "journal.log")) as journal,
        contextlib.closing(Capture(tmp_path, output=True)) as capture,
    ):
        commit(journal, "a", "b")
        capture.look()
        journal.compact("all so far", 1.0)
        commit(journal, "c")
        assert not capture.fix()
        capture.look()
        commit(journal, "d")
        assert capture.fix()
        there = (tmp_path / "journal.log").read_bytes()
        journal.compact("all of it", 1.0)
        commit(journal, "e")
        assert files_of(list(capture.parts())) == {"journal.log": there}


def test_events_are_no_newer_than_the_journal_and_all_ends_with_a_line(tmp_path: Path) -> None:
    job = tmp_path / "jobs/demo-1"
    job.mkdir(parents=True)
    with (
        contextlib.closing(Journal(tmp_path / "journal.log")) as journal,
        contextlib.closing(Capture(tmp_path, output=True)) as capture,
    ):
        commit(journal, "a")
        (job / "events.jsonl").write_bytes(b"1\n2\n3 is not wh")
        capture.look()
        (job / "events.jsonl").write_bytes(b"1\n2\n3 is not whole\n4\n")
        assert capture.fix()
        (job / "metrics.jsonl").write_bytes(b"1\n2")
        found = files_of(list(capture.parts()))
    assert found["jobs/demo-1/events.jsonl"] == b"1\n2\n"
    assert found["jobs/demo-1/metrics.jsonl"] == b"1\n"


def test_a_wheel_that_goes_with_its_job_is_in_the_backup(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/aa.whl").write_bytes(b"x" * (3 << 20))
    with (
        contextlib.closing(Journal(tmp_path / "journal.log")),
        contextlib.closing(Capture(tmp_path, output=True)) as capture,
    ):
        capture.look()
        (tmp_path / "code/bb.whl").write_bytes(b"")
        assert capture.fix()
        (tmp_path / "code/aa.whl").unlink()
        parts = list(capture.parts())
    assert max(len(part.data) for part in parts) == 1 << 20
    assert files_of(parts) | {"journal.log": b""} == {
        "journal.log": b"",
        "code/aa.whl": b"x" * (3 << 20),
        "code/bb.whl": b"",
    }


def test_output_that_is_put_aside_meanwhile_is_there_once(tmp_path: Path) -> None:
    store, worker = LogStore(tmp_path, most_bytes=1), WorkerId(NodeName("n1"), 0)
    store.append(_DEMO, worker, ["first"], 1.0)
    with (
        contextlib.closing(Journal(tmp_path / "journal.log")),
        contextlib.closing(Capture(tmp_path, output=True)) as capture,
    ):
        capture.look()
        assert capture.fix()
        store.append(_DEMO, worker, ["second"], 2.0)
        parts = capture.parts()
        some = list(itertools.takewhile(lambda part: not part.path.endswith("n1-0.log"), parts))
        store.append(_DEMO, worker, ["third"], 3.0)
        rest = files_of(list(parts))
    assert "logs" not in "".join(part.path for part in some)
    assert [content.split()[-1] for content in rest.values()] == [b"first"]
    with contextlib.closing(Capture(tmp_path, output=False)) as capture:
        capture.look()
        assert capture.fix()
        assert list(files_of(list(capture.parts()))) == ["journal.log"]
