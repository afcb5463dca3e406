"""Connects the groups of a generation, all at once.

No group waits for another one: first a worker begins those of which it is the first member, and
tells the others what NCCL's identifier is; then it begins the others as their identifiers come. So
the longest row of workers that wait for each other is two, however the groups overlap. Then each
group is used once, so that the first step finds it ready: one after the other in an order that all
workers have, since each use takes up a part of the GPU until the others come.

No call of NCCL's is waited for in the thread that leaves a generation: each is made in one of its
own, which is left behind where it does not return.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.nccl.group import Identifiers
from oobleck.worker.transport.nccl.lines import Name, key_of

#: NCCL finds out about the machines' wires while it makes a communicator.
LIMIT_S = 60.0
_POLL_S = 0.01
#: Of the message with an identifier, whose size both ends must know: NCCL's has 128 bytes.
_ROOM = 1024


def begin_groups(
    names: Sequence[Name],
    links: LinkTransport,
    make: Callable[[Name, Identifiers], None],
) -> None:
    """Begin to connect the groups `names`, all of which this rank is in. `make`: begins one; what
    its first member makes writes the identifiers, which the others are given. Raises TransportError
    when a member is lost, and what `make` raises."""
    rank, told = links.rank, []
    arriving = []
    for name in names:
        if name[1][0] != rank:
            room = torch.zeros(_ROOM, dtype=torch.uint8, device="cpu")
            arriving.append((name, room, links.receive(room, name[1][0], key_of(name))))
    for name in names:
        members = name[1]
        if members[0] == rank:
            identifiers = Identifiers()
            make(name, identifiers)
            word = _packed(identifiers.written)
            told += [links.send(word, member, key_of(name)) for member in members[1:]]
    for name, room, pending in arriving:
        pending.wait()
        make(name, Identifiers(_unpacked(room)))
    for sent in told:
        sent.wait()


def abandonable(
    call: Callable[[], None],
    check: Callable[[], None],
    leave: Callable[[threading.Thread], None],
    limit_s: float = LIMIT_S,
) -> None:
    """Run `call` in a thread of its own, since NCCL may wait for ever for one who never comes.

    Raises what it raises, TransportError where it takes longer than `limit_s`, and what `check`
    raises, which is asked meanwhile; the thread is left to `leave` then.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # handed on
            # The boundary of the thread: whoever waits for it raises it.
            errors.append(error)

    thread = threading.Thread(target=run, name="connect", daemon=True)
    thread.start()
    end_at = time.monotonic() + limit_s
    try:
        while thread.is_alive():
            check()
            if time.monotonic() > end_at:
                raise TransportError(f"NCCL's groups did not connect in {limit_s:g} s")
            with pulse.WAITING:
                thread.join(_POLL_S)
    except BaseException:
        leave(thread)
        raise
    if errors:
        raise errors[0]


def _packed(written: Mapping[str, bytes]) -> torch.Tensor:
    text = msgspec.msgpack.encode(dict(written))
    assert len(text) <= _ROOM - 2, f"{len(text)} bytes are no identifier of NCCL's"
    room = bytearray(_ROOM)
    room[:2] = len(text).to_bytes(2)
    room[2 : 2 + len(text)] = text
    return torch.frombuffer(room, dtype=torch.uint8)


def _unpacked(room: torch.Tensor) -> dict[str, bytes]:
    """Raises TransportError where the bytes are none."""
    told = bytes(room.numpy())
    try:
        return msgspec.msgpack.decode(told[2 : 2 + int.from_bytes(told[:2])], type=dict[str, bytes])
    except msgspec.DecodeError as error:
        raise TransportError(f"what came from a peer is no identifier: {error}") from error
