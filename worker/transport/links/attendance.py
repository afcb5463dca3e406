"""Attendance at meetings: who comes and who leaves, as each tells all others.

Meetings follow each other, and not all hear of the next at the same time. What members say of a
later one than the present is remembered until this worker comes to it. Used with the links' lock
held. Must not know links, nor what members say."""

from typing import TypeVar

from oobleck.worker.transport.links.frame import Kind

T = TypeVar("T")

#: So many later meetings of each member: the newest, as a member that comes to one has left all
#: before it.
_MOST_AHEAD = 4


class Attendance:
    def __init__(self) -> None:
        #: Who has left the present meeting, and how.
        self.left: dict[bytes, int] = {}
        #: What those have said who have come to a later one, by epoch and then by who they are.
        self._ahead: dict[int, dict[bytes, bytes]] = {}
        #: How those have left who have left a later one already, by epoch as well.
        self._left_ahead: dict[int, dict[bytes, int]] = {}

    def begin(self, epoch: int) -> dict[bytes, bytes]:
        """Begin this meeting: it is the present one from now on. Returns who has come to it
        already, and what they have said."""
        self.left = self._left_ahead.pop(epoch, {})
        self._left_ahead = {e: left for e, left in self._left_ahead.items() if e > epoch}
        ahead = self._ahead.pop(epoch, {})
        self._ahead = {later: said for later, said in self._ahead.items() if later > epoch}
        return ahead

    def is_ahead(self, peer: bytes) -> bool:
        """Return whether `peer` says that it has come to a later meeting than the present one."""
        return any(peer in said for said in self._ahead.values())

    def keep(self, peer: bytes, epoch: int, kind: int, content: bytes) -> None:
        """Keep what `peer` says of a later meeting than the present one."""
        if kind == Kind.STANDING:
            self._ahead.setdefault(epoch, {})[peer] = content
            _keep_newest(self._ahead, peer)
        else:
            self._left_ahead.setdefault(epoch, {})[peer] = kind
            _keep_newest(self._left_ahead, peer)


def _keep_newest(by_epoch: dict[int, dict[bytes, T]], peer: bytes) -> None:
    epochs = sorted(epoch for epoch, told in by_epoch.items() if peer in told)
    for epoch in epochs[:-_MOST_AHEAD]:
        del by_epoch[epoch][peer]
        if not by_epoch[epoch]:
            del by_epoch[epoch]
