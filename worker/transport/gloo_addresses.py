"""What gloo finds the members by while it builds a group, so that building can be called off.

Building a group is one native call: every member leaves its address in a store, waits for those of
the others, and connects to them one after the other; to some it calls, for the call of the others
it waits. A member that is gone, stopped or cut off keeps it waiting until the time-out. The store
is this one, whose waits end when they are to; and the calls that are waited for are made here
then, to the worker's own listener, so that gloo finds connections that are closed already.

What is left is a call to a host that has fallen silent since it was connected to a moment before:
that goes on, in a thread that nobody waits for, until the group's time-out. Must not know groups.
"""

import contextlib
import socket
import struct
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from oobleck.worker.runtime.errors import TransportError

#: How long a wait for a member's address may last before it looks whether it is still wanted.
_POLL = timedelta(milliseconds=50)
#: To the own host, of which the listener is there.
_DIAL_LIMIT_S = 1.0

_LENGTH = struct.Struct("@Q")
#: What a caller says first: which of the listener's pairs it is for.
_PAIR = struct.Struct("@q")


class AddressBook(Store):
    """A part of `store` that one group is built by; it must outlive the building."""

    def __init__(self, store: Store, is_given_up: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._is_given_up = is_given_up
        self._own = b""

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # bytes come from gloo
        self._check()
        self._own = value
        self._store.set(key, value)  # type: ignore[arg-type]  # stubs: str alone

    def get(self, key: str) -> bytes:
        self._check()
        return self._store.get(key)

    def wait(self, keys: Sequence[str], limit: timedelta) -> None:  # type: ignore[override]
        """Without end but for the giving up: gloo's time-out is for the slow, not for the dead."""
        while True:
            self._check()
            with contextlib.suppress(DistStoreError):  # nothing but the time-out
                return self._store.wait(list(keys), _POLL)

    def _check(self) -> None:
        if self._is_given_up():
            raise TransportError("the building of a group was given up")

    def end(self) -> None:
        """Have the building end soon, once it is given up. From any thread."""
        if not self._own:
            return
        address, pairs = _listener(self._own)
        for pair in pairs:
            # Where nobody listens any more, the building has ended.
            with (
                contextlib.suppress(OSError),
                socket.create_connection(address, _DIAL_LIMIT_S) as call,
            ):
                call.sendall(_PAIR.pack(pair))


def _listener(told: bytes) -> tuple[tuple[str, int], list[int]]:
    """The address that a member tells the others, and the numbers of its pairs.

    gloo/transport/tcp/context.cc, Rank::bytes: the host's name, a socket's address, and one number
    per member; name and address with their lengths before them.
    """
    (length,) = _LENGTH.unpack_from(told)
    start = _LENGTH.size + length
    (length,) = _LENGTH.unpack_from(told, start)
    start += _LENGTH.size
    family, port = (
        struct.unpack_from("@H", told, start)[0],
        struct.unpack_from("!H", told, start + 2)[0],
    )
    # struct sockaddr_in and sockaddr_in6: the address comes after the port, or after a flow label.
    v6 = family == socket.AF_INET6
    first, count = (8, 16) if v6 else (4, 4)
    host = socket.inet_ntop(family, told[start + first : start + first + count])
    numbers = told[start + length :]
    return (host, port), [number for (number,) in _PAIR.iter_unpack(numbers)]
