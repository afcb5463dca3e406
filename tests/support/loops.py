"""One event loop for all tests of a process.

gRPC's poller belongs to the process: what it still has to tell an earlier test comes to a loop
that is open.
"""

import asyncio
import atexit
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_RUNNER = asyncio.Runner()
atexit.register(_RUNNER.close)


def run(main: Coroutine[Any, Any, T], limit_s: float | None = None) -> T:
    """Run `main` as asyncio.run does, but leave the loop open; its tasks end with it. Raise what
    one of them raises then, unless `main` raises, and TimeoutError after `limit_s`."""
    return _RUNNER.run(_alone(main, limit_s), context=contextvars.copy_context())


async def _alone(main: Coroutine[Any, Any, T], limit_s: float | None) -> T:
    before = asyncio.all_tasks()
    try:
        async with asyncio.timeout(limit_s):
            result = await main
    except BaseException:
        await _end_all_but(before)
        raise
    for error in await _end_all_but(before):
        if isinstance(error, Exception):
            raise error
    return result


async def _end_all_but(before: set[asyncio.Task[Any]]) -> list[Any]:
    """Cancel the other tasks, and return what each returned or raised."""
    left = asyncio.all_tasks() - before
    for task in left:
        task.cancel()
    return await asyncio.gather(*left, return_exceptions=True)
