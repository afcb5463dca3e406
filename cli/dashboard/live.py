"""Stream of the changes of a page while it is open (server-sent events).

Nothing is queued: when a browser has received everything, it gets the differences from what it has.
A slow browser gets fewer changes and costs no more.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable

from oobleck.cli.dashboard.parts import Rendering, changes
from oobleck.cli.dashboard.problem import Problem

#: Interval of checks for changes, and longest silence of a stream.
TICK_S = 0.5
QUIET_S = 5.0
#: Most concurrent streams.
MOST_STREAMS = 200


class Streams:
    """Streams of live pages: counted, and ended with the dashboard."""

    def __init__(self) -> None:
        self.open = 0
        self.closing = asyncio.Event()

    async def follow(
        self,
        seen: Rendering | None,
        look: Callable[[], Rendering],
    ) -> AsyncIterator[str]:
        """Yield changes.

        `seen`: rendering that the browser has. `look`: makes the current one, and raises Problem
        when the stream must end, as at the end of the session.
        """
        self.open += 1
        quiet_since = time.monotonic()
        try:
            yield "retry: 2000\n\n"
            while not self.closing.is_set():
                try:
                    found = look()
                except Problem as problem:
                    yield _event("end", str(problem) or "you are logged out")
                    return
                if some := changes(seen, found):
                    yield _event("change", [change.data() for change in some])
                    quiet_since = time.monotonic()
                elif time.monotonic() - quiet_since > QUIET_S:
                    yield _event("alive", None)
                    quiet_since = time.monotonic()
                seen = found
                await self._pause()
        finally:
            self.open -= 1

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(TICK_S):
                await self.closing.wait()
        except TimeoutError:
            return


def _event(name: str, data: object) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
