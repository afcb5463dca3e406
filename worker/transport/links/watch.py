"""Watch over the hosts at the other ends of links, by their signs of life.

Must not know the consequences of a loss.
"""

import threading
import time
from collections.abc import Callable, Sequence

from oobleck.worker.transport.links.link import Link
from oobleck.worker.transport.links.silence import NO_WAY, Patience, answers


class Watch:
    """Watch over the hosts at the other ends of links. Used with the links' lock held, except by
    its own threads."""

    def __init__(
        self,
        silence_s: float,
        lock: threading.RLock,
        members: Callable[[], Sequence[Link]],
        unanswered: Callable[[Link, str], bool],
    ) -> None:
        """Make a watch.

        `silence_s`: silence after which a peer's host is gone; `members`: returns the links to
        members of the present meeting; `unanswered`: called with a link whose host was asked in
        vain, returns whether the link still exists.
        """
        self._lock = lock
        self._members = members
        self._tell_unanswered = unanswered
        self._patience = Patience(silence_s)
        #: Time of the next look at signs of life; hosts being asked; and hosts asked in vain.
        self._next_look = 0.0
        self._asked: set[bytes] = set()
        self._unanswered: set[bytes] = set()

    @property
    def every_s(self) -> float:
        """Interval in seconds at which `look` is needed."""
        return float(self._patience.every_s)

    def add(self, link: Link) -> None:
        self._patience.watch(link.socket)

    def begin(self) -> None:
        """Begin a new meeting."""
        self._unanswered.clear()

    def ended(self, link: Link, why: OSError) -> None:
        """Note the end of a link, if the peer's host did not answer."""
        if isinstance(why, TimeoutError) or why.errno in NO_WAY:
            self._unanswered.add(link.peer)

    def look(self) -> None:
        """Check each link, if it is time: ask hosts whose silence is doubtful."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self.every_s
        for link in self._members():
            if link.peer not in self._asked and self._patience.is_doubtful(link.socket):
                self._asked.add(link.peer)
                threading.Thread(target=self._ask, args=(link,), name="ask", daemon=True).start()

    def _ask(self, link: Link) -> None:
        """Ask a silent host for one more connection."""
        answered = answers(link.socket)
        with self._lock:
            self._asked.discard(link.peer)
            why = f"a peer's host does not answer for {self._patience.silence_s:.0f} s"
            if not answered and self._tell_unanswered(link, why):
                self._unanswered.add(link.peer)

    def silent(self) -> set[bytes]:
        """Return the members of this meeting whose hosts give no sign of life."""
        return self._unanswered | {
            link.peer for link in self._members() if self._patience.is_silent(link.socket)
        }
