"""Somebody on the way between workers, who hears and changes what they send: a proxy, as a switch
that is not to be trusted would be."""

import contextlib
from collections.abc import Iterator, Mapping

from oobleck.worker.transport.links.calls import Card
from support.diverted import TAP, calls_diverted
from support.proxy import Passes, Proxy


class Heard:
    """All that went over tapped connections; passes it on as it is. A `Passes`."""

    def __init__(self) -> None:
        self.all = bytearray()
        #: By whether it came from who called.
        self.by_way: Mapping[bool, bytearray] = {True: bytearray(), False: bytearray()}

    def __call__(self, outward: bool, at: int, data: bytes) -> bytes:
        self.all += data
        self.by_way[outward].extend(data)
        return data


class Changes:
    """Changes one byte of one direction, once. A `Passes`."""

    def __init__(self, outward: bool, at: int, by: int = 0x10) -> None:
        self._outward, self._at, self._by = outward, at, by
        self.done = False

    def __call__(self, outward: bool, at: int, data: bytes) -> bytes:
        within = self._at - at
        if self.done or outward != self._outward or not 0 <= within < len(data):
            return data
        self.done = True
        return data[:within] + bytes([data[within] ^ self._by]) + data[within + 1 :]


@contextlib.contextmanager
def tapped(*cards: Card, passes: Passes) -> Iterator[None]:
    """Whoever's calls are diverted, as this process's are meanwhile, and calls one of these comes
    by way of `passes`."""
    with contextlib.ExitStack() as stack:
        for card in cards:
            target = f"{card.host}:{card.port}"
            stack.enter_context(Proxy(target, at=(TAP, card.port), passes=passes))
        stack.enter_context(calls_diverted())
        yield
