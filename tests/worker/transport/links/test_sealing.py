"""What is sealed opens once, in its place, as it was; whatever else comes ends the link."""

import contextlib
import random
import select
import socket
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from oobleck.worker.transport.links import greeting
from oobleck.worker.transport.links.greeting import KEY_BYTES, TAG_BYTES, Seal, Seals
from oobleck.worker.transport.links.link import Early, Link
from oobleck.worker.transport.links.wire import HEADER, MOST_BYTES, PIECE_BYTES, Kind, Label
from support.waiting import until

HERE, THERE = b"h" * KEY_BYTES, b"t" * KEY_BYTES
LABEL = Label(Kind.MESSAGE, 7, 0)


def sealed(seal: Seal, piece: bytes) -> bytes:
    room = bytearray(len(piece) + TAG_BYTES)
    seal.close(memoryview(piece), memoryview(room))
    return bytes(room)


def opened(seal: Seal, piece: bytes) -> bytes:
    room = bytearray(len(piece) - TAG_BYTES)
    seal.open(memoryview(piece), memoryview(room))
    return bytes(room)


def test_what_is_sealed_opens_at_the_other_end_in_its_order() -> None:
    close, open_ = Seal(HERE), Seal(HERE)
    pieces = [bytes([number]) * number for number in range(100)]
    through = [sealed(close, piece) for piece in pieces]
    assert all(piece not in out for piece, out in zip(pieces[4:], through[4:], strict=True))
    assert [opened(open_, piece) for piece in through] == pieces


@pytest.mark.parametrize("at", range(10 + TAG_BYTES))
def test_a_piece_with_any_byte_changed_does_not_open(at: int) -> None:
    piece = bytearray(sealed(Seal(HERE), bytes(10)))
    piece[at] ^= 1
    with pytest.raises(ConnectionError, match="changed on its way"):
        opened(Seal(HERE), bytes(piece))


WRONG: dict[str, Callable[[list[bytes]], bytes]] = {
    "left out": lambda pieces: pieces[1],
    "cut short": lambda pieces: pieces[0][:-1],
    "lengthened": lambda pieces: pieces[0] + b"\0",
    "of the other direction": lambda pieces: sealed(Seal(THERE), b"first"),
    "in the clear": lambda pieces: b"first" + bytes(TAG_BYTES),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_piece_that_is_not_the_next_one_does_not_open(what: str) -> None:
    close = Seal(HERE)
    pieces = [sealed(close, b"first"), sealed(close, b"second")]
    with pytest.raises(ConnectionError):
        opened(Seal(HERE), WRONG[what](pieces))


def test_a_piece_opens_once() -> None:
    piece, open_ = sealed(Seal(HERE), b"once"), Seal(HERE)
    assert opened(open_, piece) == b"once"
    with pytest.raises(ConnectionError):
        opened(open_, piece)


def test_nothing_opens_behind_a_piece_that_did_not() -> None:
    """Else the piece after one that was left out would, if it were tried again."""
    close, open_ = Seal(HERE), Seal(HERE)
    _, second, third = (sealed(close, piece) for piece in (b"first", b"second", b"third"))
    for piece in (second, second, third):
        with pytest.raises(ConnectionError):
            opened(open_, piece)


def test_a_key_is_used_for_so_many_pieces_and_no_number_twice_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(greeting, "_PIECES_PER_KEY", 4)
    used: list[tuple[bytes, bytes]] = []

    cipher = greeting.AESGCM

    class Watched:
        def __init__(self, key: bytes) -> None:
            self._key, self._cipher = key, cipher(key)

        def encrypt_into(self, nonce: bytes, *rest: Any) -> int:
            used.append((self._key, nonce))
            return self._cipher.encrypt_into(nonce, *rest)

        def decrypt_into(self, nonce: bytes, *rest: Any) -> int:
            return self._cipher.decrypt_into(nonce, *rest)

    monkeypatch.setattr(greeting, "AESGCM", Watched)
    close, open_ = Seal(HERE), Seal(HERE)
    through = [sealed(close, b"%d" % number) for number in range(20)]
    assert len(set(used)) == len(used) == 20
    assert len({key for key, _ in used}) == 5
    assert [opened(open_, piece) for piece in through] == [b"%d" % n for n in range(20)]


def test_the_ends_have_the_same_keys_and_who_knows_the_secret_has_not() -> None:
    """Nor what was said, which anybody may have heard."""
    caller, called, nosy = (greeting.fresh() for _ in range(3))
    said = (b"secret", b"called", b"all that", b"was said")
    one = greeting.seals_of_caller(caller, public(called), *said)
    other = greeting.seals_of_called(called, public(caller), *said)
    first = sealed(one.outward, b"there")
    assert opened(other.inward, first) == b"there"
    assert opened(one.inward, sealed(other.outward, b"back")) == b"back"
    for guess in (
        greeting.seals_of_called(nosy, public(caller), *said),
        greeting.seals_of_called(called, public(caller), b"another", *said[1:]),
        greeting.seals_of_called(called, public(caller), *said[:-1], b"was never said"),
    ):
        with pytest.raises(ConnectionError):
            opened(guess.inward, first)


def public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def test_a_key_that_is_none_is_refused() -> None:
    with pytest.raises(PermissionError):
        greeting.seals_of_called(greeting.fresh(), bytes(32), b"secret", b"called")


# ---- links


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Of one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield near, far


def link_at(end: socket.socket, outward: bytes, inward: bytes) -> Link:
    return Link(b"peer", b"", 1, end, lambda epoch, label: None, Seals(Seal(outward), Seal(inward)))


def cut(content: bytes, at: list[int]) -> list[memoryview]:
    """As memory in several places."""
    ends = pairwise([0, *at, len(content)])
    return [memoryview(content[start:stop]) for start, stop in ends]


def carry(near: Link, far: Link) -> None:
    """What goes without waiting."""
    near.write()
    with contextlib.suppress(BlockingIOError):
        far.read(lambda *news: None)


def read_on(link: Link) -> None:
    """Until the connection is over."""
    while True:
        select.select([link.socket], [], [], 20)
        with contextlib.suppress(BlockingIOError):
            link.read(lambda *news: None)


def expect(link: Link, count: int) -> list[Early]:
    arriving = [Early() for _ in range(count)]
    for each in arriving:
        link.post(LABEL, each)
    return arriving


SIZES = [0, 1, 28, 29, 30, 45, 1000, 65_535, 65_536]
SIZES += [at * PIECE_BYTES + more for at in (1, 3) for more in (-1, 0, 1)]


@pytest.mark.parametrize("seed", range(5))
def test_frames_of_all_sizes_arrive_whole_and_in_order(
    ends: tuple[socket.socket, socket.socket], seed: int
) -> None:
    draw = random.Random(seed)
    near, far = link_at(ends[0], HERE, THERE), link_at(ends[1], THERE, HERE)
    said = [draw.randbytes(size) for size in draw.choices(SIZES, k=60)]
    arriving = expect(far, len(said))
    cuts = [sorted(draw.choices(range(len(each) + 1), k=draw.randrange(4))) for each in said]
    sent = [near.send(0, LABEL, *cut(each, at)) for each, at in zip(said, cuts, strict=True)]

    def all_there() -> bool:
        carry(near, far)
        return all(each.complete for each in arriving)

    until(all_there, "all frames", poll_s=0)
    assert [bytes(each.content) for each in arriving] == said
    assert all(frame.done for frame in sent)
    assert not near.blocked


def test_nothing_is_paced_within_a_host(ends: tuple[socket.socket, socket.socket]) -> None:
    link_at(ends[0], HERE, THERE)
    named = ends[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert named.rstrip(b"\0") == b"reno"


def test_what_is_dropped_costs_no_number_and_what_is_half_out_is_finished(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, far = link_at(ends[0], HERE, THERE), link_at(ends[1], THERE, HERE)
    content = bytearray(random.Random(1).randbytes(MOST_BYTES))
    frames = [near.send(0, LABEL, memoryview(content)) for _ in range(64)]
    half, *dropped = [frame for frame in frames if not frame.done]
    assert dropped
    near.raise_floor(1)
    assert near._writing is half
    assert sum(map(len, half.left)) <= HEADER.size + MOST_BYTES
    far.raise_floor(1)
    content[:] = bytes(len(content))  # the caller's own again
    arriving = expect(far, 1)
    near.send(1, LABEL, memoryview(b"of the next meeting"))

    def there() -> bool:
        carry(near, far)
        return arriving[0].complete

    until(there, "the next frame", poll_s=0)
    assert arriving[0].content == b"of the next meeting"
    assert not half.done
    assert not any(frame.done or frame.started for frame in dropped)


def stream(*contents: bytes) -> bytes:
    """What goes over the connection for these frames."""
    seal, out = Seal(HERE), b""
    for content in contents:
        out += sealed(seal, HEADER.pack(0, *LABEL, len(content)))
        if content:
            out += sealed(seal, content)
    return out


@pytest.mark.parametrize("at", range(len(stream(b"weights", b""))))
def test_any_byte_that_is_changed_ends_the_link_before_what_it_is_in_gets_anywhere(
    ends: tuple[socket.socket, socket.socket], at: int
) -> None:
    changed = bytearray(stream(b"weights", b""))
    changed[at] ^= 0x80
    far = link_at(ends[1], THERE, HERE)
    first, second = expect(far, 2)
    ends[0].sendall(changed)

    with pytest.raises(ConnectionError, match="changed on its way"):
        read_on(far)
    header, content = HEADER.size + TAG_BYTES, len(b"weights") + TAG_BYTES
    assert first.complete == (at >= header + content)
    assert not second.complete
    if at < header:
        assert not first.content, "no room was made for a size that nobody has said"


def test_a_connection_that_ends_within_a_piece_is_a_loss(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    far = link_at(ends[1], THERE, HERE)
    (arriving,) = expect(far, 1)
    ends[0].sendall(stream(b"weights")[:-1])
    ends[0].close()

    with pytest.raises(ConnectionError, match="closed by peer"):
        read_on(far)
    assert not arriving.complete
