"""NCCL between GPUs: the messages of a program and the sums of gradients.

There is one process group per set of owners, for sums, and one per link (a sender and a receiver).
A link has its own communicator and stream, and its messages go one way, so they arrive in the order
in which they are sent. Everything else goes over the `host` transport: host tensors (votes,
recovery states), and layer state between workers that the program does not connect.

An operation is launched when all who take part are about to launch it (`lines`): by the thread that
asks for it, where they are by then, else by a thread of this transport's own, whatever the training
thread does or waits for meanwhile. On the device it comes behind what was queued when it was asked
for.

An abort ends kernels that wait for a peer, and what they leave in the tensors means nothing. So
every call raises after an abort, and the host waits for each receive: else gradients computed from
garbage would count as a part of the step. Waits look at the operation again and again, so an abort
and NCCL's own errors end them. For sums, of which nothing is computed before the vote, and for
sends, `Pending.wait` only orders what is queued on the device later behind the result; `complete`
is where the host learns whether everything has happened. torch's own watchdog must leave errors
alone (`oobleck.host.device.worker_environment`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, Work

from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.nccl.aborts import Aborts
from oobleck.worker.transport.nccl.connect import (
    LIMIT_S,
    abandonable,
    begin_groups,
    connect_group,
)
from oobleck.worker.transport.nccl.failures import peers_may_fail
from oobleck.worker.transport.nccl.group import (
    Identifiers,
    MakeGroup,
    ProcessGroup,
    make_nccl_group,
    use_device,
)
from oobleck.worker.transport.nccl.lines import Line, Name, Part
from oobleck.worker.transport.transport import Group, Pending, Transport

#: A wait looks without a pause for so long, and then now and then.
_EAGER_S = 0.0005
_PAUSE_S = 0.0001


class _Operation:
    """One operation, from when it is asked for; keeps its tensor until its end is seen."""

    def __init__(
        self,
        transport: "NcclTransport",
        peers: Collection[int],
        tensor: Tensor,
        begin: Callable[[Tensor], Work],
    ) -> None:
        """`begin`: queues it on the device."""
        self._transport = transport
        self.peers = peers
        self._tensor: Tensor | None = tensor
        self._begin = begin
        self._work: Work | None = None
        self._ended = False

    def launch(self) -> None:
        assert self._tensor is not None, "it has not ended"
        with peers_may_fail():
            self._work = self._begin(self._tensor)

    def is_launched(self) -> bool:
        self._transport.advance()
        return self._work is not None

    def has_ended(self) -> bool:
        """Raises TransportError where it has failed."""
        if self._work is None or self._ended:
            return self._ended
        with peers_may_fail(), self._transport.unaborted():
            if not self._work.is_completed():
                return False
            if (error := self._work.exception()) is not None:
                raise error
        self._ended, self._tensor = True, None
        return True

    def wait(self) -> None:
        """On the device: what is queued from now on comes behind it."""
        self._transport.wait_until(self.is_launched, self.peers)
        assert self._work is not None, "it is launched"
        with peers_may_fail():
            self._work.wait()
        self._transport.check()  # it ends by an abort, too, where no device has a queue


class _Arriving:
    """A receive, whose end the host waits for."""

    def __init__(self, transport: "NcclTransport", operation: _Operation, peer: int) -> None:
        self._transport = transport
        self._operation = operation
        self._peer = peer

    def wait(self) -> None:
        self._transport.advance()
        self._transport.wait_until(self._operation.has_ended, [self._peer])
        # In the queue of what is computed now, which this does not hold up: it has ended.
        self._operation.wait()


class NcclTransport:
    """Groups of one generation on one GPU per rank."""

    def __init__(
        self,
        links: LinkTransport,
        host: Transport,
        device: torch.device,
        aborts: Aborts,
        names: Sequence[Name],
        *,
        make_group: MakeGroup = make_nccl_group,
        limit_s: float = LIMIT_S,
    ) -> None:
        """`names`: those that have this rank are connected here and used once in this order, which
        all have in common, so that the first message of a step need not wait until its peer comes
        to it. `links`: those of the host; `host`: what carries everything else over them.

        Raises TransportError when a group cannot be connected within `limit_s`, or the meeting of
        `links` is over meanwhile; then `host` is the caller's to end.
        """
        self.rank = links.rank
        self.size = links.size
        self.links = links
        self._host = host
        self._device = device
        self._aborts = aborts
        #: Whoever asks NCCL how an operation is has the lock: it may wait for an abort then, and
        #: Python for it.
        self._asking = threading.Lock()
        self._aborted = False
        self._groups: dict[Name, ProcessGroup] = {}
        #: Whoever launches has the lock, so that operations of a line are launched in their order.
        self._launching = threading.RLock()
        self._lines: dict[Name, Line] = {}
        self._news = threading.Event()
        #: Raised where the own thread launches something, for whoever waits.
        self._failure: Exception | None = None
        #: Sums and sends whose end was not seen yet.
        self._under_way: deque[_Operation] = deque()
        #: By which operations of a group come behind what was queued when they were asked for.
        self._streams: dict[Name, torch.cuda.Stream] = {}
        names = [name for name in names if self.rank in name[1]]
        members = {rank for _, group in names for rank in group} - {self.rank}
        try:
            with links.links.lock:
                links.links.press(+1)  # what peers say is read while this one does something else
            for name in names:
                self._lines[name] = Line(links, name, self._part(name), self._news.set)

            def given_up(call: Callable[[], None]) -> None:
                abandonable(call, partial(links.check_there, members), aborts.wait_for, limit_s)

            def make(name: Name, identifiers: Identifiers) -> None:
                keep = partial(self._keep, name)
                given_up(
                    partial(connect_group, make_group, name, self.rank, identifiers, device, keep)
                )

            begin_groups(names, links, make)
            # Only when all have come as far: nobody can give up a group that waits for another one.
            host.gather(b"")
            given_up(partial(self._try_all, names))
        except BaseException:
            self._abort_groups()
            raise
        threading.Thread(target=self._launch_all, name="nccl", daemon=True).start()

    def _keep(self, name: Name, group: ProcessGroup) -> None:
        """From the thread that makes it. Raises TransportError where it was given up before."""
        with self._asking:
            if not self._aborted:
                self._groups[name] = group
                return
        self._aborts.begin([group])
        raise TransportError("the groups were aborted")

    def _part(self, name: Name) -> Part:
        if name[0] == "owners":
            return "sum"
        return "send" if self.rank == name[1][0] else "receive"

    def _try_all(self, names: Sequence[Name]) -> None:
        """Use each group once; in that order."""
        use_device(self._device)
        for name in names:
            probe = torch.zeros(1, device=self._device)
            operation = _Operation(self, (), probe, self._beginner(name))
            operation.launch()
            while not operation.has_ended():
                time.sleep(_PAUSE_S)

    # ---- launching

    def _mark(self) -> torch.cuda.Event | None:
        """What is queued on the device by now."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # no types
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _beginner(self, name: Name) -> Callable[[Tensor], Work]:
        """Queues an operation of that group behind what is queued by now, whoever calls it."""
        part, group = self._part(name), self._groups[name]
        asked = self._mark()
        if asked is None:
            return partial(_begin, part, group)
        if (stream := self._streams.get(name)) is None:
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # no types
            self._streams[name] = stream

        def begin(tensor: Tensor) -> Work:
            with torch.cuda.stream(stream):
                stream.wait_event(asked)
                return _begin(part, group, tensor)

        return begin

    def _ask(self, name: Name, tensor: Tensor) -> _Operation:
        line = self._lines[name]
        operation = _Operation(self, line.peers, tensor, self._beginner(name))
        with self._launching:
            self.check()
            line.want(operation.launch)
            line.advance()
        return operation

    def advance(self) -> None:
        """Launch what may be."""
        with self._launching:
            self.check()
            for line in self._lines.values():
                line.advance()

    def _launch_all(self) -> None:
        """The own thread: until the end."""
        try:
            use_device(self._device)
            while not self._aborted:
                self._news.wait()
                self._news.clear()
                self.advance()
        except Exception as error:  # noqa: BLE001  # handed on
            # The boundary of the thread: whoever waits, for NCCL or the host, raises it.
            if not self._aborted:
                self._failure = error
                self._host.abort()

    @contextmanager
    def unaborted(self) -> Iterator[None]:
        """No abort begins within. Raises TransportError after one."""
        with self._asking:
            self.check()
            yield

    # ---- waits

    def check(self) -> None:
        """Raises TransportError after an abort, and what launching something has raised."""
        if self._failure is not None:
            raise self._failure
        if self._aborted:
            raise TransportError("the groups were aborted")

    def wait_until(self, done: Callable[[], bool], peers: Collection[int] = ()) -> None:
        """Until the device has `done` something with `peers`. Raises TransportError after an abort,
        or when one of them leaves, and what `done` raises."""
        eager_until = time.monotonic() + _EAGER_S
        with pulse.WAITING:
            while True:
                self.check()
                if done():
                    break
                if time.monotonic() > eager_until:
                    self.links.check_there(peers)
                    time.sleep(_PAUSE_S)
        self.check()  # an abort ends it, too, and what is there then means nothing

    # ---- messages and sums

    def _on_device(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        name = "link", (self.rank, peer)
        if name not in self._lines or not self._on_device(tensor):
            return self._host.send(tensor, peer, tag)
        sent = self._ask(name, tensor)
        while self._under_way and self._under_way[0].has_ended():
            self._under_way.popleft()
        self._under_way.append(sent)
        return sent

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        name = "link", (peer, self.rank)
        if name not in self._lines or not self._on_device(tensor):
            return self._host.receive(tensor, peer, tag)
        return _Arriving(self, self._ask(name, tensor), peer)

    def all_reduce(self, tensor: Tensor, group: Group) -> Pending:
        name = "owners", group
        if name not in self._lines or not self._on_device(tensor):
            return self._host.all_reduce(tensor, group)
        added = self._ask(name, tensor)
        self._under_way.append(added)
        return added

    # ---- gatherings

    def gather(self, word: bytes) -> list[bytes]:
        return self._host.gather(word)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._host.all_gather(tensor)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._host.broadcast(tensor, root)

    # ---- the end

    def complete(self) -> None:
        while self._under_way:
            operation = self._under_way.pop()
            self.wait_until(operation.is_launched, operation.peers)
            self.wait_until(operation.has_ended, operation.peers)
        if (event := self._mark()) is not None:
            self.wait_until(event.query)
        self._host.complete()

    def abort(self) -> None:
        # First the mark, then the kernels: whoever sees a result after this does not use it.
        self._abort_groups()
        self._host.abort()

    def _abort_groups(self) -> None:
        with self._asking:
            first, self._aborted = not self._aborted, True
        if first:
            self._aborts.begin(self._groups.values())
            self._news.set()

    def dispose(self) -> None:
        """Communicators are aborted, not closed, which would be a talk with their other members. At
        once: after a step's last vote nothing is under way on any of them."""
        self._abort_groups()
        self._host.dispose()


def _begin(part: Part, group: ProcessGroup, tensor: Tensor) -> Work:
    if part == "sum":
        return group.allreduce([tensor], AllreduceOptions())
    return group.send([tensor], 1, 0) if part == "send" else group.recv([tensor], 0, 0)
