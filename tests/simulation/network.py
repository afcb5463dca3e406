"""The streams between agents and the master, as gRPC has them, over a network that misbehaves.

A stream keeps its order and loses nothing while it lives; where a direction is cut, what is on
the way waits. Either end finds out by its own keepalive, at a time of its own, that the other one
does not answer, so half-open streams occur. Must not know what the messages mean.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
from simulation.clockwork import Process

from oobleck.master.api.agent_service import ControlService
from oobleck.proto import control_pb2 as pb

if TYPE_CHECKING:
    from simulation.machines import MasterHost
    from simulation.world import World

#: When an end finds out that the other one does not answer.
KEEPALIVE_S = (3.0, 7.0)


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details=details)


class Aborted(Exception):
    """The service refused a call."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code, self.details = code, details


class Context:
    """What a service sees of a call."""

    def __init__(self, write: Callable[[Any], None] = lambda _: None) -> None:
        self._write = write

    def auth_context(self) -> dict[str, list[bytes]]:
        """In the clear: nobody shows a certificate."""
        return {}

    async def write(self, message: Any) -> None:
        self._write(message)

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        raise Aborted(code, details)


class Wire:
    """Both directions of the network between a node and the master."""

    def __init__(self) -> None:
        self.up = True
        self.down = True
        #: The head that it leads to; None: the one that is at the address.
        self.head: MasterHost | None = None
        self.streams: list[Stream] = []

    @property
    def whole(self) -> bool:
        return self.up and self.down

    def set(self, *, up: bool, down: bool) -> None:
        self.up, self.down = up, down
        for stream in list(self.streams):
            stream.looked_over()

    def turn(self) -> None:
        """It leads elsewhere from now on, and nobody tells either end of its streams."""
        for stream in list(self.streams):
            stream.turned()


class _Direction:
    """Delivers in order, after a delay, while its way is open."""

    def __init__(
        self, world: "World", to: Callable[[], Process | None], is_open: Callable[[], bool]
    ) -> None:
        self._world = world
        self._to = to
        self._is_open = is_open
        self._free_at = 0.0
        self._waiting: deque[tuple[Callable[[], None], bool]] = deque()

    def send(self, deliver: Callable[[], None], *, to_kernel: bool = False) -> None:
        """`to_kernel`: it is not for the process, which may be dead or not known yet."""
        loop = self._world.loop
        self._free_at = max(self._free_at, loop.clock + self._world.delay_s())
        self._waiting.append((deliver, to_kernel))
        loop.call_at(self._free_at, self.flush)

    def flush(self) -> None:
        """One delivery; all that is due where the way has just opened."""
        if not self._waiting or not self._is_open():
            return
        deliver, to_kernel = self._waiting.popleft()
        if to_kernel:
            deliver()
        elif (process := self._to()) is not None and process.alive:
            process.call(deliver)

    def flush_all(self) -> None:
        while self._waiting and self._is_open():
            self.flush()


class _Requests:
    """What the service reads; None ends it."""

    def __init__(self, queue: asyncio.Queue[pb.AgentMessage | None]) -> None:
        self._queue = queue

    def __aiter__(self) -> AsyncIterator[pb.AgentMessage]:
        return self

    async def __anext__(self) -> pb.AgentMessage:
        if (message := await self._queue.get()) is None:
            raise StopAsyncIteration
        return message


class Stream:
    """One call of `Session`, seen from the agent: what `grpc.aio` gives it."""

    def __init__(self, world: "World", wire: Wire, client: Process) -> None:
        self._world = world
        self._wire = wire
        self._client = client
        #: Whom it has got to.
        self.head: MasterHost | None = None
        self._server: Process | None = None
        self._astray = False
        self._up = _Direction(world, lambda: self._server, lambda: wire.up and not self._astray)
        self._down = _Direction(world, lambda: client, lambda: wire.down and not self._astray)
        self._requests: asyncio.Queue[pb.AgentMessage | None] = asyncio.Queue()
        self._replies: asyncio.Queue[Any] = asyncio.Queue()
        self._handler: asyncio.Task[None] | None = None
        #: How it ended for the agent.
        self._ended: tuple[grpc.StatusCode, str] | None = None
        self._over = asyncio.Event()
        self._server_ended = False
        self._suspected = False
        wire.streams.append(self)
        client.on_end.append(self._client_ended)
        self._up.send(self._connect, to_kernel=True)
        if not wire.whole:
            self._suspect()

    # ---- the agent's end

    async def write(self, message: pb.AgentMessage) -> None:
        await asyncio.sleep(0)
        if self._ended is not None:
            raise rpc_error(*self._ended)
        if self._client.alive:
            self._up.send(lambda: self._requests.put_nowait(message))

    async def read(self) -> Any:
        if self._ended is None or not self._replies.empty():
            message = await self._replies.get()
            if message is not None:
                return message
        assert self._ended is not None
        if self._ended[0] is grpc.StatusCode.OK:
            return grpc.aio.EOF  # type: ignore[attr-defined]
        raise rpc_error(*self._ended)

    async def done_writing(self) -> None:
        self._up.send(lambda: self._requests.put_nowait(None))

    async def code(self) -> grpc.StatusCode:
        await self._over.wait()
        assert self._ended is not None
        return self._ended[0]

    async def details(self) -> str:
        await self.code()
        assert self._ended is not None
        return self._ended[1]

    def cancel(self) -> None:
        if self._client.alive:
            self._end(grpc.StatusCode.CANCELLED, "cancelled")
            self._up.send(self._drop_handler)

    def _client_ended(self) -> None:
        """Its kernel closes the connection, unless the whole host is gone."""
        self._ended = self._ended or (grpc.StatusCode.CANCELLED, "the agent is dead")
        if not self._world.is_host_dead(self._client):
            self._up.send(self._drop_handler)
        else:
            self._suspect()

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        if self._ended is None:
            self._ended = code, details
            self._over.set()
            self._replies.put_nowait(None)
        self._forget()

    def _forget(self) -> None:
        if self._ended is not None and self._server_ended and self in self._wire.streams:
            self._wire.streams.remove(self)

    # ---- the master's end

    def _connect(self) -> None:
        master = self._wire.head or self._world.head
        if self._ended is not None:
            return  # the agent has given up
        if master is None or not master.process.alive:
            self._server_ended = True
            refused = grpc.StatusCode.UNAVAILABLE, "connection refused"
            self._down.send(lambda: self._end(*refused))
            return
        self.head, self._server = master, master.process
        service = ControlService(master.core)
        self._handler = master.process.spawn(self._serve(service))
        master.process.on_end.append(self._master_ended)

    async def _serve(self, service: ControlService) -> None:
        context = Context(self._write)
        end = grpc.StatusCode.OK, ""
        try:
            await service.Session(_Requests(self._requests), context)  # type: ignore[arg-type]
        except Aborted as aborted:
            end = aborted.code, aborted.details
        except asyncio.CancelledError:
            end = grpc.StatusCode.CANCELLED, "the stream broke"
        self._server_ended = True
        if self._server is not None and self._server.alive:
            self._down.send(lambda: self._end(*end))
        self._forget()

    def _write(self, message: pb.MasterMessage) -> None:
        if self._server is not None and self._server.alive:
            self._down.send(lambda: self._replies.put_nowait(message))

    def _drop_handler(self) -> None:
        if self._handler is not None:
            self._handler.cancel()
        self._server_ended = True
        self._forget()

    def _master_ended(self) -> None:
        self._server_ended = True
        self._down.send(lambda: self._end(grpc.StatusCode.UNAVAILABLE, "Socket closed"))
        if not self._wire.whole:
            self._suspect()
        self._forget()

    # ---- keepalive

    def turned(self) -> None:
        self._astray = True
        self._suspect()

    def looked_over(self) -> None:
        """The wire has changed, or one end stopped or went on."""
        self._up.flush_all()
        self._down.flush_all()
        if not self._answers():
            self._suspect()

    def _answers(self) -> bool:
        if self._astray or not self._wire.whole or self._world.is_host_dead(self._client):
            return False
        return not (self._client.stopped or (self._server is not None and self._server.stopped))

    def _suspect(self) -> None:
        if self._suspected:
            return
        self._suspected = True
        draw, loop = self._world.draw, self._world.loop
        loop.call_later(draw.uniform(*KEEPALIVE_S), self._client_gives_up)
        loop.call_later(draw.uniform(*KEEPALIVE_S), self._server_gives_up)

    def _client_gives_up(self) -> None:
        self._suspected = False
        if not self._answers() or self._server is None:
            self._client.call(self._end, grpc.StatusCode.UNAVAILABLE, "ping timeout")

    def _server_gives_up(self) -> None:
        self._suspected = False
        if not self._answers() and self._server is not None and self._server.alive:
            self._server.call(self._drop_handler)


class Stub:
    """What an agent calls in place of a `ControlStub`."""

    def __init__(self, world: "World", wire: Wire, client: Process) -> None:
        self._world, self._wire, self._client = world, wire, client
        #: The newest one.
        self.stream: Stream | None = None

    def Session(self) -> Stream:
        self.stream = Stream(self._world, self._wire, self._client)
        return self.stream
