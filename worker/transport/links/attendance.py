"""Who comes to meetings and who leaves them, as each tells all others.

Meetings follow each other, and not all hear of the next at the same time: what members say of a
later one than the present is remembered until this worker comes to it. Used with the links' lock
held. Must not know links, nor what members say.
"""

from oobleck.worker.transport.links.frame import Kind

#: Members that come to a later meeting than the present one are remembered, so many of each.
_MOST_AHEAD = 4096


class Attendance:
    def __init__(self) -> None:
        #: Who has left the present meeting, and how.
        self.left: dict[bytes, int] = {}
        #: What those have said who have come to a later one, by epoch and then by who they are.
        self._ahead: dict[int, dict[bytes, bytes]] = {}
        #: How those have left who have left a later one already, by epoch as well.
        self._left_ahead: dict[int, dict[bytes, int]] = {}

    def begin(self, epoch: int) -> dict[bytes, bytes]:
        """This meeting is the present one from now on. Returns who has come to it already, and what
        they have said."""
        self.left = self._left_ahead.pop(epoch, {})
        self._left_ahead = {e: left for e, left in self._left_ahead.items() if e > epoch}
        ahead = self._ahead.pop(epoch, {})
        self._ahead = {later: said for later, said in self._ahead.items() if later > epoch}
        return ahead

    def keep(self, peer: bytes, epoch: int, kind: int, content: bytes) -> None:
        """What `peer` says of a later meeting than the present one."""
        if kind == Kind.STANDING:
            ahead = self._ahead.setdefault(epoch, {})
            if len(ahead) < _MOST_AHEAD:
                ahead[peer] = content
        else:
            left = self._left_ahead.setdefault(epoch, {})
            if len(left) < _MOST_AHEAD:
                left[peer] = kind
