"""A connection of a browser, or of something else that reaches the port.

uvicorn waits without end for a request that has begun, or never does. Here such a connection ends:
else a few hundred silent ones would keep all browsers out.
"""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

#: From one look to the next: who sends no whole request from one to the next is cut off.
REQUEST_S = 10.0


class Connection(H11Protocol):
    _looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        self._looking = self.loop.call_later(REQUEST_S, self._look, self.cycle)

    def _look(self, before: object) -> None:
        """`before`: the request that was the newest at the last look."""
        is_waited_for = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if is_waited_for and self.cycle is before:
            self.transport.abort()
        else:
            self._look_again()
