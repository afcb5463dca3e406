"""Port on which this process listens: its peers, and a filter of those that the kernel refuses.

Netlink (sock_diag(7)) lists the connected peers, accepted or not, in a few messages. A filter of
the listening socket (SO_ATTACH_FILTER in socket(7)) drops the connection attempts of others at no
cost to this process. Needs no rights. Linux only. Must not know the protocol there.
"""

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterator

#: Connected peer: the address, four bytes or sixteen, and the port.
Peer = tuple[bytes, int]

_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ERROR, _DONE = 2, 3
#: nlmsghdr
_HEADER = struct.Struct("=IHHII")
#: inet_diag_req_v2: family, protocol, extensions, states, port; then a pattern that fits any
#: connection.
_REQUEST = struct.Struct("=BBBxI2s2x36x8s")
#: inet_diag_msg, up to its addresses: family, the other end's port and address.
_ANSWER = struct.Struct("=B5x2s16x16s")
#: ESTABLISHED; and CLOSE_WAIT, where the other end has closed and this process not yet.
_STATES = 1 << 1 | 1 << 8
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_ANY_COOKIE = b"\xff" * 8
_RECEIVED_BYTES = 256 << 10
#: The kernel answers in milliseconds; this bounds the wait if it does not.
_ANSWER_S = 5.0
#: Prefix of an IPv4 address on IPv6 sockets.
_MAPPED = bytes(10) + b"\xff\xff"
#: Bytes of an IPv6 address that count; an IPv4 address has fewer.
_NETWORK_BYTES = 8

_ATTACH_FILTER, _DETACH_FILTER = 26, 27
#: Begin of the packet's network header, with its version and the sender's address.
_NETWORK = 0xFFF00000
_SENDER_4, _SENDER_6 = _NETWORK + 12, _NETWORK + 8
_LOAD, _LOAD_BYTE, _SHIFT_RIGHT, _IF_EQUAL, _GO, _RETURN = 0x20, 0x30, 0x74, 0x15, 0x05, 0x06
_ALL_BYTES = 0xFFFFFFFF

#: Code, instructions to skip if true, if false, operand.
_Instruction = tuple[int, int, int, int]
_TAKE: _Instruction = (_RETURN, 0, 0, _ALL_BYTES)
_DROP: _Instruction = (_RETURN, 0, 0, 0)
#: Share of connection attempts that pass a partial refusal, as 1 of so many.
ONE_OF = 4
#: The data for the filter of a TCP socket begins with the TCP header.
_TCP_FLAGS, _SYN, _SYN_OR_ACK = 13, 0x02, 0x12
_RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
_AND, _IF_GREATER = 0x54, 0x25


def _drop_most_calls(one_of: int) -> tuple[_Instruction, ...]:
    """Return a filter that passes a random one in `one_of` connection attempts, and all other
    packets."""
    return (
        (_LOAD_BYTE, 0, 0, _TCP_FLAGS),
        (_AND, 0, 0, _SYN_OR_ACK),
        (_IF_EQUAL, 0, 2, _SYN),
        (_LOAD, 0, 0, _RANDOM),
        (_IF_GREATER, 1, 0, _ALL_BYTES // one_of),
        _TAKE,
        _DROP,
    )


class Port:
    """Listening sockets of this process on a port; use it as a context."""

    def __init__(self, port: int) -> None:
        """Find the sockets; raises OSError if the kernel does not answer."""
        self._port = port
        self._diag = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)
        self._diag.settimeout(_ANSWER_S)
        #: By descriptor. The sockets belong to others: they are neither closed nor kept open here.
        self._families = _listening(port)

    def __enter__(self) -> "Port":
        return self

    def __exit__(self, *_: object) -> None:
        """Lift all refusals, which would otherwise outlive the port."""
        self._diag.close()
        with contextlib.suppress(OSError):  # the sockets are closed
            self.refuse(())

    def peers(self) -> list[Peer]:
        """Return all connected peers, accepted or not. Raises OSError."""
        return [peer for family in {*self._families.values()} for peer in self._ask(family)]

    def _ask(self, family: int) -> Iterator[Peer]:
        port = self._port.to_bytes(2)
        body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _STATES, port, _ANY_COOKIE)
        header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _DUMP, 0, 0)
        self._diag.send(header + body)
        while True:
            data = self._diag.recv(_RECEIVED_BYTES)
            offset = 0
            while offset < len(data):
                length, kind, *_ = _HEADER.unpack_from(data, offset)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    (code,) = struct.unpack_from("=i", data, offset + _HEADER.size)
                    raise OSError(-code, os.strerror(-code))
                if kind == _SOCK_DIAG_BY_FAMILY:
                    yield _peer(data, offset + _HEADER.size)
                offset += (length + 3) & ~3

    def refuse(self, networks: Collection[bytes], partly: Collection[bytes] = ()) -> None:
        """Refuse new connections from `networks`: IPv4 addresses, or the first eight bytes of IPv6
        addresses. Of those also in `partly`, accept one attempt in `ONE_OF`. Raises OSError."""
        program = _program(networks, partly)
        for descriptor in self._families:
            with _lent(descriptor) as listening:
                if networks:
                    _attach(listening, program)
                else:
                    let_all_in(listening)

    def close(self, peers: Collection[Peer]) -> None:
        """Shut down the connections to these peers; the code that reads them sees their end."""
        for descriptor in _open_files():
            with contextlib.suppress(OSError):  # another kind of file, or closed meanwhile
                # A duplicate: the owner may close its descriptor now, and the number be reused.
                copy = os.dup(descriptor)
                try:
                    with _lent(copy) as connection:
                        if self._peer_of(connection) in peers:
                            connection.shutdown(socket.SHUT_RDWR)
                finally:
                    os.close(copy)

    def _peer_of(self, connection: socket.socket) -> Peer | None:
        """Return the peer of a connection to the port; None for any other socket. Raises
        OSError."""
        if connection.family not in _FAMILIES or connection.getsockname()[1] != self._port:
            return None
        host, port, *_ = connection.getpeername()
        return packed(host), port


def favour(listening: socket.socket, hosts: Collection[str], one_of: int = ONE_OF) -> None:
    """Accept all calls from `hosts` (for IPv6: from their networks of 64 bits), and one in `one_of`
    of all other connection attempts, at random. Existing connections stay. Raises OSError."""
    networks = sorted({packed(host)[:_NETWORK_BYTES] for host in hosts})
    others = _drop_most_calls(one_of)
    _attach(listening, _program(networks, of_networks=(_TAKE,), of_others=others))


def let_all_in(listening: socket.socket) -> None:
    """Undo `favour`. May be repeated."""
    with contextlib.suppress(FileNotFoundError):  # there is no filter
        listening.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def _attach(listening: socket.socket, program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, filter_)


def packed(host: str) -> bytes:
    """Return the bytes of an address in text form. Raises ValueError."""
    return _plain(ipaddress.ip_address(host.partition("%")[0]).packed)


def _plain(address: bytes) -> bytes:
    return address[len(_MAPPED) :] if address.startswith(_MAPPED) else address


def _peer(data: bytes, offset: int) -> Peer:
    family, port, address = _ANSWER.unpack_from(data, offset)
    return _plain(address[:4] if family == socket.AF_INET else address), int.from_bytes(port)


@contextlib.contextmanager
def _lent(descriptor: int) -> Iterator[socket.socket]:
    """Yield the socket behind a descriptor, which stays open. Raises OSError if there is none."""
    found = socket.socket(fileno=descriptor)
    try:
        yield found
    finally:
        found.detach()


def _open_files() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _listening(port: int) -> dict[int, int]:
    """Return the families of the sockets that listen on the port, by descriptor."""
    found: dict[int, int] = {}
    for descriptor in _open_files():
        with contextlib.suppress(OSError), _lent(descriptor) as one:  # other open files
            if (
                one.family in _FAMILIES
                and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and one.getsockname()[1] == port
            ):
                found[descriptor] = one.family
    return found


def _program(
    networks: Collection[bytes],
    partly: Collection[bytes] = (),
    *,
    of_networks: tuple[_Instruction, ...] = (_DROP,),
    of_others: tuple[_Instruction, ...] = (_TAKE,),
) -> bytes:
    """Return a program in the language of bpf(4) that treats packets by their network: those of
    `networks`, with most calls of `partly` dropped, and all others."""
    of_four: list[_Instruction] = [(_LOAD, 0, 0, _SENDER_4)]
    of_six: list[_Instruction] = []
    for network in networks:
        does = _drop_most_calls(ONE_OF) if network in partly else of_networks
        if len(network) == 4:
            of_four += [(_IF_EQUAL, 0, len(does), int.from_bytes(network)), *does]
            continue
        of_six += [
            (_LOAD, 0, 0, _SENDER_6),
            (_IF_EQUAL, 0, 2 + len(does), int.from_bytes(network[:4])),
            (_LOAD, 0, 0, _SENDER_6 + 4),
            (_IF_EQUAL, 0, len(does), int.from_bytes(network[4:])),
            *does,
        ]
    version: list[_Instruction] = [
        (_LOAD_BYTE, 0, 0, _NETWORK),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_IF_EQUAL, 1, 0, 4),
        (_GO, 0, 0, len(of_four) + len(of_others)),
    ]
    whole = [*version, *of_four, *of_others, *of_six, *of_others]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in whole)
