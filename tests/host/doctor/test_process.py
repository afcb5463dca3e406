"""The process that looks at a host: what hangs in it, and what does not answer or ends."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from oobleck.core.orders import (
    About,
    Answer,
    Call,
    Done,
    Hush,
    Listen,
    Listening,
    Look,
    Looked,
    Order,
    Unable,
    Way,
)
from oobleck.host.doctor import process
from oobleck.host.doctor.__main__ import in_time
from oobleck.host.doctor.process import Doctor
from support import loops


def ask(*orders: Order) -> list[Answer]:
    async def one_after_the_other() -> list[Answer]:
        doctor = Doctor(lambda: About(address="127.0.0.1", workers=1), None)
        try:
            return [await doctor.ask(order) for order in orders]
        finally:
            await doctor.close()

    return loops.run(one_after_the_other())


def test_one_process_looks_listens_and_measures() -> None:
    looked, listening, hushed = ask(Look(), Listen(secret="00" * 32, seconds=30.0), Hush())
    assert isinstance(looked, Looked)
    assert {"names", "address", "memory", "files"} <= {f.check for f in looked.findings}
    assert looked.interface == "lo"
    assert isinstance(listening, Listening)
    assert listening.port > 0
    assert hushed == Done()


def test_an_end_that_nobody_listens_at_is_an_answer() -> None:
    call = Call(address="127.0.0.1", port=1, most_bytes=0, seconds=1.0)
    assert ask(call) == [Way(problem="connection refused")]


@pytest.mark.parametrize(
    ("module", "reason"), [("support.mute", "has not answered for"), ("this", "JSON is malformed")]
)
def test_one_that_hangs_or_says_something_else_is_replaced(
    monkeypatch: pytest.MonkeyPatch, module: str, reason: str
) -> None:
    """Other programs stand for it: one says nothing, one a poem."""
    monkeypatch.setattr(process, "MODULE", module)
    monkeypatch.setattr(process, "ANSWER_S", 0.5 if module == "support.mute" else 30.0)

    async def both() -> tuple[Answer, Answer]:
        tests = str(Path(__file__).parents[2])
        doctor = Doctor(About, {**os.environ, "PYTHONPATH": tests})
        try:
            first = await doctor.ask(Hush())
            monkeypatch.undo()
            return first, await doctor.ask(Hush())
        finally:
            await doctor.close()

    first, second = loops.run(both())
    assert isinstance(first, Unable)
    assert reason in first.reason
    assert second == Done()


def test_a_place_that_hangs_holds_up_no_other() -> None:
    forever = threading.Event()

    def gone() -> int:
        raise OSError("gone")

    def hangs() -> int:
        forever.wait(60)
        return 1

    tasks: dict[str, Callable[[], int]] = {"well": lambda: 2, "gone": gone, "hangs": hangs}
    assert in_time(tasks, 0.2) == {"well": 2}
    forever.set()
