"""Calls for links go to somebody on the way instead of to whom they are for.

As a program (Python code behind it) it runs that in a process whose calls do. Must not import any
other module of the tests, which such a process has not.
"""

import contextlib
import runpy
import socket
import sys
from collections.abc import Iterator
from unittest import mock

#: Of this host, as 127.0.0.1 is.
TAP = "127.0.0.9"


@contextlib.contextmanager
def calls_diverted() -> Iterator[None]:
    """Those over IPv4 loopback that do not wait, to the same port of `TAP`. Whoever calls believes
    that it is connected to where it called."""
    connect = socket.socket.connect_ex

    def connect_ex(self: socket.socket, address: tuple[str, int]) -> int:
        host, port = address
        return connect(self, (TAP if host == "127.0.0.1" else host, port))

    with mock.patch.object(socket.socket, "connect_ex", connect_ex):
        yield


if __name__ == "__main__":
    _, _, _, module, *arguments = sys.argv  # python -m MODULE ...
    sys.path.pop(0)  # this folder
    sys.argv = [module, *arguments]
    with calls_diverted():
        runpy.run_module(module, run_name="__main__", alter_sys=True)
