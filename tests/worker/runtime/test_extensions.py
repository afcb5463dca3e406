"""Waits for extensions of torch: they last as long as somebody compiles, and no longer."""

import threading
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import NodeError

STALE_S = 0.2


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileBaton, "wait", FileBaton.wait)  # put back
    monkeypatch.setattr(code, "STALE_S", STALE_S)
    monkeypatch.setattr(code, "_LOOK_S", 0.01)
    code.bound_waits()


def _after(seconds: float, then: object) -> threading.Timer:
    timer = threading.Timer(seconds, then)  # type: ignore[arg-type]
    timer.start()
    return timer


def test_a_process_that_compiles_is_waited_for(tmp_path: Path) -> None:
    holder = FileBaton(str(tmp_path / "lock"))
    assert holder.try_acquire()
    started = time.monotonic()
    timer = _after(4 * STALE_S, holder.release)
    FileBaton(str(tmp_path / "lock")).wait()
    assert time.monotonic() - started > 3 * STALE_S
    timer.join()


def test_one_of_another_host_is_waited_for_while_files_change(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    timers = [
        _after(part * STALE_S / 2, (tmp_path / f"{part}.o").touch) for part in range(1, 6)
    ] + [_after(3 * STALE_S, lock.unlink)]
    FileBaton(str(lock)).wait()
    assert not lock.exists()
    for timer in timers:
        timer.join()


def test_a_lock_of_nobody_is_named_with_what_removes_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    with pytest.raises(NodeError, match=rf"{lock} is the lock of .* killed .* rm {lock}, and"):
        FileBaton(str(lock)).wait()
