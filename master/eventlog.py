"""events.jsonl of every job: its records, numbered from 1, each written exactly once.

The lines follow from the journal, so the file is never ahead of it after a crash by more than a
cut-off line: on the start the lines of the whole journal are made again, and those that the file
lacks are appended.
"""

import os
from pathlib import Path

import msgspec

from oobleck.master.records import Record
from oobleck.planner.ids import JobId


class EventLog:
    def __init__(self, state_dir: Path) -> None:
        self._jobs = state_dir / "jobs"
        self._lines: dict[JobId, list[str]] = {}
        #: How many of a job's lines are in its file.
        self._written: dict[JobId, int] = {}

    def add(self, job_id: JobId, record: Record, unix: float) -> None:
        """Number the record; `write` puts it into the file."""
        lines = self._lines.setdefault(job_id, [])
        values = {"id": len(lines) + 1, "time": unix, **record}
        lines.append(msgspec.json.encode(values).decode())

    def lines(self, job_id: JobId) -> list[str]:
        return self._lines.get(job_id, [])

    def write(self) -> None:
        """Bring all files up to date."""
        for job_id, lines in self._lines.items():
            path = self._jobs / job_id / "events.jsonl"
            if job_id not in self._written:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._written[job_id] = _whole_lines(path)
            if (written := self._written[job_id]) < len(lines):
                with open(path, "a", encoding="utf-8") as file:
                    file.writelines(f"{line}\n" for line in lines[written:])
                self._written[job_id] = len(lines)


def _whole_lines(path: Path) -> int:
    """The number of whole lines, after a last one that was cut off is removed."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end != len(content):
        os.truncate(path, end)
    return content.count(b"\n", 0, end)
