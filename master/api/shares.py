"""The share of the master that each holder of certificates has: calls at a time, bytes on their
way, and turns of the event loop.

A holder may have many connections with many calls each, and none of gRPC's limits counts over
connections. So the calls of each are counted here. They wait for each other: only few of one holder
are looked at in one turn of the event loop, however many have something to do. Must not know what
the calls do.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from oobleck.master.api.access import Context, caller
from oobleck.master.api.limits import MOST_OF_HOLDER, MOST_RECEIVING, MOST_SENDING
from oobleck.master.inbox import Turns

_UNBOUNDED = 1 << 30


class TooMany(Exception):
    """A holder has as many calls as it may; the text says the fix."""


@dataclass(slots=True, eq=False)
class Share:
    """The calls of one holder."""

    open: int = 0
    #: Of those, such that send more than one message.
    sending: int = 0
    #: Held while the first message of a call is received.
    receiving: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_RECEIVING))
    turns: Turns = field(default_factory=Turns)


class Shares:
    def __init__(self, denied: Callable[[str], Awaitable[None]]) -> None:
        """`denied` is told of the peers of calls that are too many, and returns when one may be
        answered."""
        self._denied = denied
        #: Of holders that have calls, by their names in certificates.
        self._of: dict[str, Share] = {}
        #: Of whoever calls in the clear: all agents of a host may be one.
        self._free = Share(receiving=asyncio.Semaphore(_UNBOUNDED), turns=Turns(_UNBOUNDED))

    @asynccontextmanager
    async def hold(self, context: Context, *, sends: bool) -> AsyncIterator[Share]:
        """Count a call while it lasts. `sends`: more than one message. Raises TooMany."""
        who = caller(context)
        if who is None:
            yield self._free
            return
        share = self._of.setdefault(who.uri, Share())
        if share.open >= MOST_OF_HOLDER or (sends and share.sending >= MOST_SENDING):
            await self._denied(context.peer())
            raise TooMany(f"{who.uri} has too many calls at a time; end some, and try again")
        share.open += 1
        share.sending += sends
        try:
            await share.turns.take()
            yield share
        finally:
            share.open -= 1
            share.sending -= sends
            if not share.open:
                del self._of[who.uri]
