"""Several workers' links within this process, which meet again and again."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.hub import Links

T = TypeVar("T")
SECRET = b"s" * 32
#: Whether links are sealed where a test does not say it.
SEALED = True


class Party:
    """`count` processes' links, and their transports in the present meeting."""

    def __init__(self, count: int, *, silence_s: float = 5.0, sealed: bool | None = None) -> None:
        self._silence_s = silence_s
        self._sealed = SEALED if sealed is None else sealed
        self.links = [self.newcomer() for _ in range(count)]
        self.transports: list[LinkTransport] = []
        #: What each has heard in the present meeting.
        self.heard: list[list[bytes]] = []
        self._pool = ThreadPoolExecutor(count)
        self._epoch = 0

    def __enter__(self) -> "Party":
        return self

    def __exit__(self, *_: object) -> None:
        for links in self.links:
            links.close()
        self._pool.shutdown()

    def newcomer(self) -> Links:
        """One more process's, which is not among `links`."""
        return Links("127.0.0.1", silence_s=self._silence_s, sealed=self._sealed)

    def meet(
        self,
        near: Callable[[int, int], set[int]] | None = None,
        *,
        secret: bytes = SECRET,
        on_lost: Callable[[int, str], None] = lambda rank, why: None,
        members: Sequence[Links] | None = None,
        host: int = 0,
        along_tree: bool = False,
    ) -> list[LinkTransport]:
        """Enter the next meeting, which the rank `host` hosts; each says its rank.

        Each gets links to those that `near` says of its rank and the size; to all, where it is not
        given. `along_tree`: all know where the others listen.
        """
        self._epoch += 1
        present = self.links if members is None else members
        size = len(present)
        self.transports = [
            LinkTransport(
                each, self._epoch, secret, rank, size, on_lost=lambda why, r=rank: on_lost(r, why)
            )
            for rank, each in enumerate(present)
        ]

        cards = {rank: each.card for rank, each in enumerate(present)} if along_tree else {}

        def meet(transport: LinkTransport) -> list[bytes]:
            rank = transport.rank
            whom = near(rank, size) if near else set(range(size)) - {rank}
            return transport.meet(present[host].card, whom, b"%d" % rank, lambda: None, cards)

        self.heard = self.everywhere(meet)
        return self.transports

    def everywhere(self, run: Callable[[LinkTransport], T]) -> list[T]:
        """What each one's `run` returns, all at once."""
        return list(self._pool.map(run, self.transports))
