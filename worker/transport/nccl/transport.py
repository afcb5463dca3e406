"""NCCL between GPUs: messages of a program, sums of gradients, and exchanges of shared stages.

There is one communicator per set of owners, for sums, one per shared stage, for exchanges, and one
per link (a sender and a receiver). A link has its own communicator and stream, and its messages go
one way, so they arrive in the order in which they are sent. Everything else goes over the `host`
transport: host tensors (votes, recovery states) and layer state. Layer state between workers that
the program connects uses their link, and two workers with much to send get one more until it has
moved.

The exchanges of a stage run in the order in which its workers ask for them, which is the same for
all (`oobleck.worker.step.exchange`). An example is the next layer's weights, and then this layer's
gradients. That order causes no deadlock. Asking never waits, and waiting for one exchange has
always meant waiting for all workers of the stage, each of which has a part of the layer.

An operation is launched when all participants are about to launch it (`Line`), and a message when
the device has computed it, too. The asking thread launches it if they are ready by then, else a
thread of this transport's own does, whatever the training thread does meanwhile. On the device it
follows the work that was queued before it was asked for.

An abort ends kernels that wait for a peer, and leaves garbage in their tensors. So every call
raises after an abort, and the host waits for each receive and exchange. Otherwise gradients
computed from garbage would count as a part of the step. Waits poll the operation, so an abort and
NCCL's own errors end them. Sums, which are not used before the vote, and sends are different:
`Pending.wait` only orders later device work after the result, and `complete` is where the host
checks them. torch has no watchdog of its own (`oobleck.host.gpu.devices.worker_environment`).

Communicators outlive the transport (`connect`), and new ones connect in a thread of their own
(`connect`). Until all members begin to use them, at one point of training, their traffic goes over
`host`, too.

A transport that is given up launches nothing more, and operations launched at all members end by
themselves. A thread waits for that up to a limit (`_let_end`), and then aborts the communicators
that are not whole. None is aborted before: that might wait for the kernels of the others, and block
Python.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from oobleck.planner.programs.communicators import Name
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import Released
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.nccl.communicator import (
    Arriving,
    Communicator,
    Key,
    Line,
    Operation,
    Part,
    held,
    part_of,
)
from oobleck.worker.transport.nccl.connect import LIMIT_S, Communicators, Connecting
from oobleck.worker.transport.nccl.group import Mark, use_device
from oobleck.worker.transport.transport import Group, Pending, Transport

log = logging.getLogger(__name__)

#: Time that a wait polls without a pause, and the pause after it.
_EAGER_S = 0.0005
_PAUSE_S = 0.0001
#: Interval at which the own thread looks whether the device has computed a message.
_COMPUTED_S = 0.0002
#: The same for connecting without other events.
_LOOK_S = 1.0
#: Time for launched operations to end when the transport is given up. A message takes milliseconds.
#: An operation whose peer is gone, or has not launched it, never ends.
END_S = 0.2


class NcclTransport:
    """Operations of one generation on one GPU per rank."""

    def __init__(
        self,
        links: LinkTransport,
        host: Transport,
        communicators: Communicators,
        names: Sequence[Name],
        stamps: Sequence[Collection[bytes]],
        *,
        at_once: bool = True,
        late: bool = False,
        moves_state: bool = False,
        limit_s: float = LIMIT_S,
    ) -> None:
        """Connect the transport.

        Of the communicators `names` with this rank, those that not all members have are connected
        and used once, in this order, which all share. `stamps`: all workers', by rank. `at_once`,
        the same for all ranks: they are in use when this returns; else `use_connected` begins their
        use. `late`: connecting took some rank too long the last time. `moves_state`: some are for
        state alone. `links`: those of the host; `host`: carries everything else over them.

        Raises TransportError when one cannot be connected within `limit_s`, or the meeting of
        `links` is over meanwhile; then the caller must end `host`.
        """
        self.rank = links.rank
        self.size = links.size
        self.links = links
        self._host = host
        self._moves_state = moves_state
        self._kept = communicators
        self._device = communicators.device
        self.has_queue = self._device.type == "cuda"
        #: Held while NCCL is asked for an operation's state, which may wait for an abort with
        #: Python's lock.
        self._asking = threading.Lock()
        self._aborted = False
        #: Held while launching, which also keeps the order of a line.
        self._launching = communicators.launching
        #: All and only those in use, each with its line.
        self._communicators: dict[Name, Communicator] = {}
        self._lines: dict[Name, Line] = {}
        self._news = threading.Event()
        #: Error of the own thread in launching, for waiting threads.
        self._failure: Exception | None = None
        #: Operations that were asked for and whose end was not seen yet: their tensors stay as long
        #: as something may run.
        self._asked: set[Operation] = set()
        #: The sums and sends among these.
        self._under_way: deque[Operation] = deque()
        #: Communicators that are not in use yet; None: there are none.
        self._connecting: Connecting | None = None
        self._thread = threading.Thread(target=self._launch_all, name="nccl", daemon=True)
        keys = {name: _key(name, links) for name in names if self.rank in name[1]}
        kept = communicators.keep({key: name[1] for name, key in keys.items()}, stamps)
        communicators.aborts.settle(links.check)  # frees the memory of those that are not kept
        communicators.begin_use()
        self._communicators = {name: kept[key] for name, key in keys.items() if key in kept}
        #: Number of kept communicators.
        self.kept = len(self._communicators)
        try:
            with links.links.lock:
                links.links.press(+1)  # read peers' notes during other work
            for name in self._communicators:
                self._lines[name] = Line(links, name, part_of(name, self.rank), self._news.set)
            if new := {name: key for name, key in keys.items() if key not in kept}:
                log.info("connecting", extra={"kept": self.kept, "count": len(new)})
                self._connecting = Connecting(
                    new,
                    links,
                    communicators,
                    self._news.set,
                    self._is_idle,
                    limit_s,
                    needed=at_once or not late,
                )
                if at_once:
                    self._connecting.wait()
                    self.use_connected()
        except BaseException:
            self._give_up()
            raise
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._connecting is None or self._connecting.done

    @property
    def failure(self) -> Exception | None:
        connecting = self._connecting
        return self._failure or (connecting.failure if connecting is not None else None)

    def use_connected(self) -> None:
        with held(self._launching, self.check):
            connecting = self._connecting
            if connecting is not None:
                assert connecting.done, "all members are"
                self._communicators = self._communicators | connecting.made
                self._lines |= connecting.lines
                self._connecting = None  # last: `_let_end` may look at both
                log.info("connected", extra={"count": len(connecting.made)})

    def communicator(self, purpose: str, members: Group) -> Communicator:
        return self._communicators[purpose, members]

    # ---- launching

    def _launch_behind(
        self, communicator: Communicator, part: Part, asked: Mark, tensors: Sequence[Tensor]
    ) -> Work:
        """Launch an operation that follows the work queued before the mark, whichever thread this
        is."""
        if not isinstance(asked, torch.Event):
            return communicator.launch(part, tensors)
        if communicator.behind is None:
            communicator.behind = torch.Stream(self._device)
        with communicator.behind:
            communicator.behind.wait_event(asked)
            return communicator.launch(part, tensors)

    def _ask(self, name: Name, *tensors: Tensor) -> Operation:
        line, communicator, asked = self._lines[name], self._communicators[name], self._kept.mark()
        launch = partial(self._launch_behind, communicator, part_of(name, self.rank), asked)
        operation = Operation(self, communicator, line.peers, tensors, launch)
        with held(self._launching, self.check):
            self.check()
            self._asked.add(operation)
            line.want(operation.launch, asked.query)
            if line.advance():
                self._news.set()
        return operation

    def seen_to_end(self, operation: Operation) -> None:
        self._asked.discard(operation)

    def advance(self) -> bool:
        """Launch operations that are ready. Return whether one waits for the device alone."""
        with held(self._launching, self.check):
            self.check()
            waiting = [line.advance() for line in self._lines.values()]
        return any(waiting)

    def _launch_all(self) -> None:
        """Launch operations until the end, in a thread of its own."""
        try:
            use_device(self._device)
            while not self._aborted:
                self._news.clear()
                if self.advance():
                    self._news.wait(_COMPUTED_S)
                else:
                    self._news.wait(None if self.connected else _LOOK_S)
        except Exception as error:  # noqa: BLE001  # handed on
            # Last resort of the thread: waits for NCCL or the host raise it.
            if not self._aborted:
                self._failure = error
                self._host.abort()

    @contextmanager
    def unaborted(self) -> Iterator[None]:
        """Keep an abort from beginning inside. Raises TransportError after one."""
        with self._asking:
            self.check()
            yield

    def _is_idle(self) -> bool:
        """Return whether everything that was launched is seen to have ended."""
        with self._asking:
            used = self._communicators.values()
            return not self._aborted and all(each.is_whole() for each in used)

    # ---- waits

    def check(self) -> None:
        """Raise TransportError after an abort, and the errors of launching or connecting."""
        if self._failure is not None:
            raise self._failure
        if self._aborted:
            raise Released("the groups were aborted")
        if (connecting := self._connecting) is not None:
            connecting.check()

    def wait_until(self, done: Callable[[], bool], peers: Collection[int] = ()) -> None:
        """Wait until the device has `done` something with `peers`. Raises TransportError after an
        abort, or when one of them leaves and it is not done soon, and the errors of `done`."""
        eager_until, left_until = time.monotonic() + _EAGER_S, math.inf
        with pulse.WAITING:
            while True:
                self.check()
                if done():
                    break
                if (now := time.monotonic()) > eager_until:
                    self.links.check_there(peers if now > left_until else ())
                    if left_until == math.inf and self.links.any_left(peers):
                        left_until = now + END_S  # a peer that has launched its part may leave
                    time.sleep(_PAUSE_S)
                else:
                    time.sleep(0)  # gives Python's lock to the thread that it may wait for
        self.check()  # after an abort the result is garbage

    # ---- messages and sums

    def _on_device(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def _way(self, sender: int, receiver: int) -> Name:
        """Return the name of the line for messages; until all state has moved, that for state if
        there is one."""
        way = sender, receiver
        return ("state", way) if ("state", way) in self._lines else ("link", way)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        name = self._way(self.rank, peer)
        if name not in self._lines or not self._on_device(tensor):
            return self._host.send(tensor, peer, tag)
        sent = self._ask(name, tensor)
        while self._under_way and self._under_way[0].has_ended():
            self._under_way.popleft()
        self._under_way.append(sent)
        return sent

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        name = self._way(peer, self.rank)
        if name not in self._lines or not self._on_device(tensor):
            return self._host.receive(tensor, peer, tag)
        return Arriving(self, self._ask(name, tensor))

    def all_reduce(self, tensor: Tensor, group: Group, shares: Sequence[Tensor] = ()) -> Pending:
        name = "owners", group
        if name not in self._lines or not self._on_device(tensor):
            return self._host.all_reduce(tensor, group, shares)
        if shares:
            torch.cat(list(shares), out=tensor)
        added = self._ask(name, tensor)
        self._under_way.append(added)
        return added

    def exchange(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], group: Group, tag: int
    ) -> Pending:
        name = "stage", group
        if name not in self._lines or not all(map(self._on_device, (*sent, *received))):
            return self._host.exchange(sent, received, group, tag)
        return Arriving(self, self._ask(name, *received, *sent))

    # ---- gatherings

    def gather(self, word: bytes) -> list[bytes]:
        return self._host.gather(word)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._host.all_gather(tensor)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._host.broadcast(tensor, root)

    # ---- the end

    def end_moving(self) -> None:
        if not self._moves_state:
            return
        # Meet first: an abort here could disturb operations that others still wait for.
        self._host.gather(b"")
        with held(self._launching, self.check):
            self._moves_state = False
            ended = [each for name, each in self._communicators.items() if name[0] == "state"]
            used = {n: each for n, each in self._communicators.items() if n[0] != "state"}
            self._communicators = used
            self._lines = {name: line for name, line in self._lines.items() if name in used}
        self._kept.end(ended)
        # Wait before any other launch: an abort might wait for its kernels; and a step needs the
        # memory.
        self._kept.aborts.settle(self.links.check)

    def complete(self) -> None:
        while self._under_way:
            operation = self._under_way.pop()
            self.wait_until(operation.is_launched, operation.peers)
            self.wait_until(operation.has_ended, operation.peers)
        self.wait_until(self._kept.mark().query)
        self._host.complete()

    def abort(self) -> None:
        # Mark the abort before ending kernels, so that no result after that is used.
        self._give_up()
        self._host.abort()

    def dispose(self) -> None:
        """Give up. Communicators stay, or are aborted, but are never closed, which would need their
        other members."""
        self._give_up()
        self._host.dispose()

    def _give_up(self) -> None:
        with self._asking:
            first, self._aborted = not self._aborted, True
        if first:
            self._news.set()
            threading.Thread(target=self._let_end, name="end", daemon=True).start()

    def _let_end(self) -> None:
        """Let operations under way end, then end the communicators that are not whole. No other
        thread queries NCCL meanwhile: a transport that was given up raises before."""
        connecting = self._connecting
        left = set(connecting.give_up() if connecting is not None else ())
        left.update(self._communicators.values())
        try:
            use_device(self._device)
            end_at = time.monotonic() + END_S
            # A launching thread may be held up by a kernel that only an abort ends.
            if self._launching.acquire(timeout=END_S):
                self._launching.release()
                stay = {each for each in left if each.connected and self._is_complete(each)}
                while time.monotonic() < end_at:
                    if all(each.is_whole() or each.failed for each in stay):
                        break
                    time.sleep(_PAUSE_S)
                left -= {each for each in stay if each.is_whole()}
            else:
                self._kept.aborts.wait_for(self._thread)
        finally:
            self._kept.end(left)
            self._kept.end_use()

    def _is_complete(self, communicator: Communicator) -> bool:
        """Return whether no member of the communicator is known to be gone."""
        own = self.links.links.identity
        return all(
            process == own or self.links.links.linked(process)
            for process in communicator.key.processes
        )


def _key(name: Name, links: LinkTransport) -> Key:
    purpose, ranks = name
    processes = links.identities(ranks)
    return Key(purpose, tuple(sorted(processes)) if purpose == "owners" else processes)
