"""Attendance at meetings: arrivals and departures, as each member sends them to all others.

Meetings follow each other, and members learn of the next one at different times. Words about a
later meeting are kept until this worker enters it. Used with the links' lock held. Must not know
links, nor the meaning of words.
"""

from typing import TypeVar

from oobleck.worker.transport.links.wire import Kind

T = TypeVar("T")

#: Later meetings that are kept for each member: the newest, as a member that enters one has left
#: all before it.
_MOST_AHEAD = 4


class Attendance:
    def __init__(self) -> None:
        #: Peers that have left the present meeting, and the kind of departure.
        self.left: dict[bytes, int] = {}
        #: Words of peers that have entered a later meeting, by epoch and identity.
        self._ahead: dict[int, dict[bytes, bytes]] = {}
        #: Departures of peers from a later meeting, by epoch likewise.
        self._left_ahead: dict[int, dict[bytes, int]] = {}

    def begin(self, epoch: int) -> dict[bytes, bytes]:
        """Make `epoch` the present meeting. Return the peers that have entered it already, with
        their words."""
        self.left = self._left_ahead.pop(epoch, {})
        self._left_ahead = {e: left for e, left in self._left_ahead.items() if e > epoch}
        ahead = self._ahead.pop(epoch, {})
        self._ahead = {later: words for later, words in self._ahead.items() if later > epoch}
        return ahead

    def is_ahead(self, peer: bytes) -> bool:
        """Return whether `peer` has announced that it has entered a later meeting than the present
        one.
        """
        return any(peer in words for words in self._ahead.values())

    def keep(self, peer: bytes, epoch: int, kind: int, content: bytes) -> None:
        """Keep a word of `peer` about a later meeting than the present one."""
        if kind == Kind.STANDING:
            self._ahead.setdefault(epoch, {})[peer] = content
            _keep_newest(self._ahead, peer)
        else:
            self._left_ahead.setdefault(epoch, {})[peer] = kind
            _keep_newest(self._left_ahead, peer)


def _keep_newest(by_epoch: dict[int, dict[bytes, T]], peer: bytes) -> None:
    epochs = sorted(epoch for epoch, peers in by_epoch.items() if peer in peers)
    for epoch in epochs[:-_MOST_AHEAD]:
        del by_epoch[epoch][peer]
        if not by_epoch[epoch]:
            del by_epoch[epoch]
