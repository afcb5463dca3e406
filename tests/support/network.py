"""A host of its own on this machine: a network namespace with a link that can be cut.

What is sent over a cut link vanishes: no end of a connection is told of it, as when a host loses
its power or a switch its mind.
"""

import os
import socket
import subprocess
import time
from collections.abc import Sequence

import pytest

from bench.support.scratch import own_name


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


class Host:
    """A context manager; skips the test where this user may make no namespaces."""

    def __init__(self) -> None:
        self.name = f"{own_name()}-host"
        self._near, self._far = f"obl{os.getpid()}a", f"obl{os.getpid()}b"
        net = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        #: Of this side, as the host sees it, and of the host.
        self.near, self.far = f"{net}.1", f"{net}.2"

    @property
    def interface(self) -> str:
        """This side's end of the link."""
        return self._near

    @property
    def within(self) -> Sequence[str]:
        """What runs a command there."""
        return ("ip", "netns", "exec", self.name)

    def __enter__(self) -> "Host":
        try:
            _ip("netns", "add", self.name)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        try:
            _ip("link", "add", self._near, "type", "veth", "peer", self._far, "netns", self.name)
            _ip("address", "add", f"{self.near}/30", "dev", self._near)
            _ip("link", "set", self._near, "up")
            _ip("-n", self.name, "address", "add", f"{self.far}/30", "dev", self._far)
            _ip("-n", self.name, "link", "set", "lo", "up")
            self.join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _ip("netns", "delete", self.name)

    def cut(self) -> None:
        """Lose whatever is sent from now on, either way."""
        # This side goes on sending to where the host was: it would notice that nobody answers.
        _ip("-n", self.name, "link", "set", self._far, "down")
        assert not self._answers(), "the link is cut"

    def _answers(self) -> bool:
        """Whether what is sent to the host comes back, if only as a refusal."""
        with socket.socket() as probe:
            probe.settimeout(0.2)
            try:
                probe.connect((self.far, 9))
            except ConnectionRefusedError:
                return True
            except OSError:
                return False
        return True

    def join(self) -> None:
        _ip("-n", self.name, "link", "set", self._far, "up")
        far = _ip("-n", self.name, "-brief", "link", "show", self._far).split()[2]
        _ip("neighbour", "replace", self.far, "lladdr", far, "dev", self._near, "nud", "permanent")
        deadline = time.monotonic() + 30
        while not self._answers():
            assert time.monotonic() < deadline, "the link is there"
