"""A TCP proxy whose link can be slow, late, stuck or cut, for a machine without such a network.

One thread per direction of a connection: what comes is passed on after `delay_s`, at most
`bytes_per_s`, and not at all while the proxy is stalled, when both ends still believe that they are
connected. Chunks keep their order and none is lost: TCP would see to that as well.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

_CHUNK = 16 << 10
#: Is given a part of what goes from who called (True) or to it, and where in that direction of its
#: connection it stands, and returns what is passed on in its place.
Passes = Callable[[bool, int, bytes], bytes]
#: Closing so resets the connection.
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Passes connections on to `target` (HOST:PORT); a context manager."""

    def __init__(
        self, target: str, *, at: tuple[str, int] = ("127.0.0.1", 0), passes: Passes | None = None
    ) -> None:
        """`at`: where it listens; `passes`: None: all is passed on as it is."""
        self.delay_s = 0.0
        self._passes = passes
        self.bytes_per_s: float | None = None
        self._target = target
        self._flowing = threading.Event()
        self._flowing.set()
        self._ended = threading.Event()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(at)
        self.address = f"{at[0]}:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, name="proxy")]
        self._threads[0].start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._flowing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Nothing passes, and nobody is told."""
        self._flowing.clear()
        try:
            yield
        finally:
            self._flowing.set()

    def cut(self) -> int:
        """Reset all connections; how many there were."""
        pairs, self._pairs = self._pairs, []
        for end in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):  # it has ended already
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RD)  # wakes who reads here, and tells nobody
            end.close()
        return len(pairs)

    def _accept(self) -> None:
        host, _, port = self._target.rpartition(":")
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((host, int(port)))
            except OSError:
                near.close()
                continue
            self._pairs.append((near, far))
            for source, sink in ((near, far), (far, near)):
                way = (source, sink, source is near)
                thread = threading.Thread(target=self._pass_on, args=way, name="proxy")
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, outward: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if self._passes is not None:
                    data = self._passes(outward, passed, data)
                passed += len(data)
                late_s = self.delay_s
                if self.bytes_per_s is not None:
                    late_s += len(data) / self.bytes_per_s
                self._ended.wait(late_s)
                self._flowing.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
