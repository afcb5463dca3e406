"""The page of `oobleck top` on a terminal of a given size that is not drawn."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from textual.pilot import Pilot

from oobleck.cli.top.feed import Feed
from oobleck.cli.top.page import Page
from oobleck.host.ipc.endpoint import Endpoint, choose_endpoint
from support.waiting import PATIENCE_S


class Shown:
    """What stands on the page, and the keys that are pressed."""

    def __init__(self, page: Page, pilot: Pilot[int]) -> None:
        self.page = page
        self._pilot = pilot

    @property
    def lines(self) -> list[str]:
        strips = self.page.screen._compositor.render_strips()
        return ["".join(segment.text for segment in strip).rstrip() for strip in strips]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    async def press(self, *keys: str) -> None:
        await self._pilot.press(*keys)
        await self._pilot.pause()

    async def resize(self, width: int, height: int) -> None:
        await self._pilot.resize_terminal(width, height)
        await self._pilot.pause()

    async def see(self, *wanted: str) -> None:
        """Until all of it stands there."""
        await self.until(lambda: all(text in self.text for text in wanted), str(wanted))

    async def until(self, condition: Callable[[], object], what: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while not condition():
            assert loop.time() < deadline, f"waited in vain for {what}:\n{self.text}"
            await self._pilot.pause(0.05)


@asynccontextmanager
async def shown(
    master: str | Endpoint, job_id: str | None = None, size: tuple[int, int] = (80, 24)
) -> AsyncIterator[Shown]:
    endpoint = choose_endpoint(master, None, insecure=True) if isinstance(master, str) else master
    with Feed(endpoint, job_id, every_s=0.1) as feed:
        page = Page(feed, endpoint.address)
        async with page.run_test(size=size) as pilot:
            yield Shown(page, pilot)
