"""Search for the master that this user runs on this host, and for its authority.

A master with an authority answers at an abstract Unix socket, named after its user and its address.
The kernel ends that name with the master, and keeps it in the network namespace of the master's
port. So no name is left behind, and none leads to another master. Both ends ask the kernel for the
other's user (SO_PEERCRED). The answer is a path and no secret: the mode of the authority's folder
keeps others out, such as containers that share the host's network.

A proxy or a tunnel leads to a master by another port. There the caller knows the master by its
certificate, which that authority has signed. Must not know gRPC.
"""

import contextlib
import json
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from oobleck.host.address import addresses, is_loopback, joined, split_address
from oobleck.host.security.credentials import AUTHORITY, MASTER_NAME, OPERATOR

_ANSWER_S = 5.0
_MOST_BYTES = 16 << 10
#: Pause after a caller of another user, so that many of them take no processor from the master.
_STRANGER_S = 0.01
_WAITING = 128
#: Addresses that mean all addresses of a host.
_EVERYWHERE = ("0.0.0.0", "::")
_CREDENTIALS = struct.Struct("3i")
_NAMES = Path("/proc/net/unix")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMaster:
    """Master that runs as this process's user."""

    #: Folder of its authority.
    pki: Path
    #: True if it listens on this host alone.
    private: bool

    @property
    def operator(self) -> Path:
        """Folder of the first operator's credentials."""
        return self.pki / OPERATOR

    def node(self, name: str) -> Path:
        """Return the folder of the credentials of an agent that this user starts beside
        the master."""
        return self.pki / "nodes" / name


def find(address: str) -> OwnMaster | None:
    """Return the master of this user at `address`, or None. Raises ValueError if that is not
    HOST:PORT."""
    hosts = addresses(address)
    here = any(map(is_loopback, hosts))
    _, port = split_address(address)
    for host in (*hosts, *(_EVERYWHERE if here else ())):
        if (own := _known_by(_name(host, port))) is not None:
            return own
    return _behind(address) if here else None


def _behind(address: str) -> OwnMaster | None:
    """Return the master of this user whose certificate is shown at `address`."""
    until = time.monotonic() + _ANSWER_S
    try:
        lines = _NAMES.read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    for name in sorted({"\0" + line.rpartition(" @")[2] for line in lines}):
        if name.startswith(_prefix()) and time.monotonic() < until:
            own = _known_by(name)
            if own is not None and _shows_certificate(address, own.pki / AUTHORITY):
                return own
    return None


def _shows_certificate(address: str, authority: Path) -> bool:
    """Return whether a master's certificate of that authority is shown at `address`."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(authority)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(split_address(address), _ANSWER_S) as connection,
            context.wrap_socket(connection, server_hostname=MASTER_NAME),
        ):
            return True
    except OSError:
        return False


def _known_by(name: str) -> OwnMaster | None:
    """Return the master of this user that answers at the socket."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        answer = json.loads(_ask(name))
        return OwnMaster(pki=Path(answer["pki"]), private=answer["private"] is True)
    return None


def _ask(name: str) -> bytes:
    """Return the answer of a process of this user at the socket. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(_ANSWER_S)
        asking.connect(name)
        if _user_of(asking) != os.geteuid():
            raise PermissionError("another user has taken the name")
        said = b""
        while (part := asking.recv(_MOST_BYTES)) and len(said) < _MOST_BYTES:
            said += part
        return said


@contextlib.contextmanager
def announced(address: str, own: OwnMaster) -> Iterator[None]:
    """Let processes of this user find the master that listens at `address`, within this context.
    Raises OSError if a name is taken, as another user of the host may do."""
    host, port = split_address(address)
    answer = json.dumps({"pki": str(own.pki), "private": own.private}).encode()
    with contextlib.ExitStack() as stack:
        for number in addresses(address) or [host]:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stack.callback(listening.close)
            listening.bind(_name(number, port))
            listening.listen(_WAITING)
            answering = threading.Thread(target=_answer, args=(listening, answer), daemon=True)
            answering.start()
            stack.callback(answering.join)
            stack.callback(listening.shutdown, socket.SHUT_RDWR)  # which ends accept()
        yield


def _answer(listening: socket.socket, answer: bytes) -> None:
    while True:
        try:
            calling, _ = listening.accept()
        except OSError:
            return
        with calling, contextlib.suppress(OSError):
            if _user_of(calling) == os.geteuid():
                calling.send(answer)  # small enough for one send
            else:
                time.sleep(_STRANGER_S)


def _name(host: str, port: int) -> str:
    return _prefix() + joined(host, port)


def _prefix() -> str:
    return f"\0oobleck/{os.geteuid()}/"


def _user_of(peer: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    told = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1])
