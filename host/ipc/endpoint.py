"""Address of a master and the credentials to show there; decides whether a call is safe.

Without credentials a call is in the clear and readable by anyone, so it may not leave this host.

A master with an authority lets processes of its own user on this host find its operator's
credentials. It answers with their folder at an abstract Unix socket, named after user and address.
The kernel removes the name when the master ends, and shows it only in the master's network
namespace. Both ends ask the kernel for the other's user (SO_PEERCRED). The answer is a path and no
secret: the mode of the folder keeps others out. Behind a proxy or a tunnel, which has another port,
the caller recognises the master by its certificate, signed by that authority. Must not know gRPC.
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

from oobleck.host.address import (
    addresses,
    is_loopback,
    joined,
    leaves_host,
    pinned,
    split_address,
    split_addresses,
    stays_on_host,
)
from oobleck.host.security.credentials import (
    AUTHORITY,
    MASTER_NAME,
    OPERATOR,
    Credentials,
    read_credentials,
)

#: Address at which `oobleck local` listens, and the default of --master.
DEFAULT_MASTER = "127.0.0.1:4600"


# ---- the master that this user runs on this host


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
        """Return the folder of the credentials of this user's own agent."""
        return self.pki / "nodes" / name


def find_own_master(address: str) -> OwnMaster | None:
    """Return the master of this user at `address`, or None. Raises ValueError."""
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
        answer = b""
        while (part := asking.recv(_MOST_BYTES)) and len(answer) < _MOST_BYTES:
            answer += part
        return answer


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
    ucred = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(ucred)[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    #: HOST:PORT
    address: str
    #: None: in the clear.
    credentials: Credentials | None = None
    #: Further addresses where a head of the cluster may be.
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return all addresses, as --master takes them."""
        return ",".join(self.addresses)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses in the order of trying."""
        return (self.address, *self.others)


def endpoint_at(addresses: str, credentials: Credentials | None) -> Endpoint:
    """Return the endpoint of HOST:PORT,HOST:PORT,... Raises ValueError."""
    address, *others = split_addresses(addresses)
    return Endpoint(address=address, credentials=credentials, others=tuple(others))


def check_insecure(flag: str, address: str) -> None:
    """Raise ValueError if a call or a service in the clear at `address` could leave this host;
    `flag` is the option that asks for it."""
    if not stays_on_host(address):
        raise ValueError(
            f"{flag}: {address} is not an address of this host, and in the clear anybody in the "
            "network could command the cluster; use credentials instead"
        )


def choose_endpoint(addresses: str, credentials: Path | None, *, insecure: bool) -> Endpoint:
    """Return the master at `addresses`, with `credentials` or, for a master of this user, those of
    its operator. Raises ValueError with the flag and the fix."""
    each = split_addresses(addresses)
    if insecure:
        for address in each:
            check_insecure("--insecure", address)
        return endpoint_at(",".join(map(pinned, each)), None)
    if credentials is not None:
        try:
            return endpoint_at(addresses, read_credentials(credentials))
        except ValueError as error:
            raise ValueError(f"--credentials: {error}") from error
    away = [address for address in each if leaves_host(address)]
    each = [address if address in away else pinned(address) for address in each]
    for address in each:
        own = find_own_master(address)
        if own is not None and os.path.exists(own.operator):
            try:
                return endpoint_at(",".join(each), read_credentials(own.operator))
            except ValueError as error:
                raise ValueError(
                    f"--master {address}: runs as you, but its operator's credentials cannot be "
                    f"used: {error}"
                ) from error
    if away:
        raise ValueError(
            f"--master {away[0]}: is not on this host, so the call needs credentials; name their "
            "folder with --credentials or OOBLECK_CREDENTIALS ('oobleck pki init' makes the first "
            "operator's, 'oobleck pki join' makes others from a token)"
        )
    return endpoint_at(",".join(each), None)
