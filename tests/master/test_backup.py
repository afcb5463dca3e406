"""Copies of a state directory that a master writes to, made at random moments, are whole."""

import asyncio
import random
import subprocess
from contextlib import suppress
from pathlib import Path

from oobleck.host.storage.backup import read_summary
from support import commands
from support.busy_head import EAGER, busy, check, numbers
from support.crowd import run
from support.fake_agent import MasterProcess, master

_COPIES = 12
_SEED = 7
#: Files that stand in for others until they are whole, so `cp` may find them gone.
_PASSING = ("journal.log.new", "journal.old.new", ".partial", "code/coming-")


def _cp(state: Path, copy: Path) -> None:
    done = subprocess.run(["cp", "-a", str(state), str(copy)], capture_output=True, text=True)
    others = [
        line for line in done.stderr.splitlines() if not any(name in line for name in _PASSING)
    ]
    assert others == []


def _backup(address: str, copy: Path) -> None:
    done = commands.run("backup", str(copy), "--master", address)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{copy}: ")


def _at_random_moments(tmp_path: Path, make: str) -> list[Path]:
    """Return the copies, each of which has what was promised when it was begun."""
    moments, copies, snapshots = random.Random(_SEED), [], set[float]()
    state = tmp_path / "state"

    async def test(running: MasterProcess) -> None:
        async with busy(running.address) as load:
            for number in range(_COPIES):
                await load.until(moments.randrange(6))
                await asyncio.sleep(moments.uniform(0, 0.05))
                promised, copy = load.promised(), tmp_path / str(number)
                if make == "cp":
                    await asyncio.to_thread(_cp, state, copy)
                else:
                    await asyncio.to_thread(_backup, running.address, copy)
                with suppress(FileNotFoundError):  # before the first
                    snapshots.add((state / "journal.old").stat().st_mtime)
                await asyncio.to_thread(check, copy, promised)
                copies.append(copy)

    with master(state, *EAGER) as running:
        run(test(running))
    assert len(snapshots) > 1, ("the", snapshots)  # " journal was compacted between the copies"
    return copies


def test_a_live_state_directory_may_be_copied_by_cp(tmp_path: Path) -> None:
    for copy in _at_random_moments(tmp_path, "cp"):
        for folder in (copy / "jobs").iterdir():
            found = numbers(folder / "events.jsonl", "id")
            assert found == sorted(set(found)), folder


def test_a_backup_is_one_consistent_point_under_load(tmp_path: Path) -> None:
    for copy in _at_random_moments(tmp_path, "backup"):
        summary = read_summary(copy)
        for folder in (copy / "jobs").iterdir():
            found = numbers(folder / "events.jsonl", "id")
            assert found == list(range(1, len(found) + 1)), folder
            assert '"journal_cut"' not in (folder / "events.jsonl").read_text()
        assert summary.sequence > 0
