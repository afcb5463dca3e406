"""What a test leaves running fails the test if it fails."""

import asyncio

import pytest

from support import loops


async def fails_when_it_ends() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise LookupError


#: Tasks that are left: nothing else keeps one that waits for ever from being collected.
LEFT: list[asyncio.Task[object]] = []


async def main(error: Exception | None = None) -> str:
    LEFT.append(asyncio.create_task(asyncio.Event().wait()))
    LEFT.append(asyncio.create_task(fails_when_it_ends()))
    await asyncio.sleep(0)
    if error is not None:
        raise error
    return "done"


def test_what_a_task_raises_that_is_left_is_raised() -> None:
    with pytest.raises(LookupError):
        loops.run(main())


def test_but_for_what_the_test_itself_raises() -> None:
    with pytest.raises(ArithmeticError):
        loops.run(main(ArithmeticError()))
