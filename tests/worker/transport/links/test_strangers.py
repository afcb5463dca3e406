"""Who does not belong to a meeting gets nowhere, costs little, and is in nobody's way."""

import contextlib
import os
import resource
import socket
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bench.support.preloaded import Preloaded
from oobleck.host.ipc import port
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links import door, greeting
from oobleck.worker.transport.links.calls import Card
from oobleck.worker.transport.links.door import GREETING_LIMIT_S, MOST_CALLERS, Door
from oobleck.worker.transport.links.hub import Links
from support.leftovers import opened
from support.meeting import SECRET, Party
from support.script import talking_script
from support.waiting import until


def call(card: Card) -> socket.socket:
    return socket.create_connection((card.host, card.port))


@contextlib.contextmanager
def crowd(card: Card, count: int, said: bytes) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stranger = stack.enter_context(call(card))
            with contextlib.suppress(OSError):  # it was dropped at once
                stranger.sendall(said)
        yield


def talk(transport: LinkTransport) -> list[float]:
    return [float(each) for each in transport.all_gather(torch.tensor(float(transport.rank)))]


@pytest.mark.parametrize("said", [b"", b"12345678", bytes(greeting.CALL_BYTES), b"GET / HTTP/1.1"])
def test_a_crowd_costs_a_bounded_number_of_descriptors_and_holds_nobody_up(said: bytes) -> None:
    with Party(3) as party:
        party.meet(near=lambda rank, size: set())
        before, _ = opened()
        count = 3 * MOST_CALLERS
        with crowd(party.links[0].card, count, said):
            until(
                lambda: opened()[0] <= before + count + MOST_CALLERS, "all but the newest dropped"
            )
            assert party.everywhere(talk) == [[0.0, 1.0, 2.0]] * 3


FULL = """
import contextlib, resource, socket, sys, threading
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.calls import Card
from oobleck.worker.transport.links.hub import Links

here = Links("127.0.0.1", silence_s=5)
transport = LinkTransport(here, 1, b"s" * 32, 0, 2)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
print(here.card.text, flush=True)
sys.stdin.readline()
transport.meet(here.card, {1}, b"", lambda: None)
print(transport.gather(b"here"), flush=True)
sys.stdin.readline()
"""


def test_where_descriptors_run_out_strangers_lose_theirs_first(preloaded: Preloaded) -> None:
    with talking_script(preloaded, FULL) as (to, told):
        card = Card.read(told.readline().strip())
        links = Links("127.0.0.1", silence_s=5)
        transport = LinkTransport(links, 1, b"s" * 32, 1, 2)
        with crowd(card, 400, b""):
            print(file=to, flush=True)
            transport.meet(card, {0}, b"", lambda: None)
            assert transport.gather(b"there") == [b"here", b"there"]
            assert told.readline() == "[b'here', b'there']\n"
        links.close()


RECOVERS = """
import resource, sys
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.hub import Links

here = Links("127.0.0.1", silence_s=5)
pages = open("/proc/self/statm")  # while there are descriptors
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
print(here.card.text, flush=True)
for epoch in range(1, 9):
    sys.stdin.readline()
    transport = LinkTransport(here, epoch, b"s" * 32, 0, 2)
    transport.meet(here.card, {1}, b"", lambda: None)
    transport.gather(b"here")
    pages.seek(0)
    print(int(pages.read().split()[1]) * resource.getpagesize() >> 10, flush=True)
"""


def test_thousands_of_strangers_hold_up_no_recovery_and_take_no_memory(
    preloaded: Preloaded,
) -> None:
    """20,000 that come and go and 400 that stay and say nothing, while a worker with few
    descriptors meets one after the other that takes the place of the last."""
    with talking_script(preloaded, RECOVERS) as (to, told):
        card = Card.read(told.readline().strip())
        came, resident_kib, waited_s = 0, [], []

        def come_and_go() -> None:
            nonlocal came
            while came < 20_000:
                with contextlib.suppress(OSError), call(card) as stranger:
                    stranger.sendall(bytes(came % greeting.CALL_BYTES))
                came += 1

        def recover(epoch: int) -> None:
            begun = time.monotonic()
            links = Links("127.0.0.1", silence_s=5)
            transport = LinkTransport(links, epoch, b"s" * 32, 1, 2)
            print(file=to, flush=True)
            transport.meet(card, {0}, b"", lambda: None)
            assert transport.gather(b"there") == [b"here", b"there"]
            resident_kib.append(int(told.readline()))
            waited_s.append(time.monotonic() - begun)
            transport.stand_down()
            links.close()

        with crowd(card, 400, b""), ThreadPoolExecutor(1) as pool:
            coming = pool.submit(come_and_go)
            for epoch in range(1, 8):
                recover(epoch)
                until(lambda at=epoch: came >= 20_000 * at // 7, "strangers")
            coming.result()
            recover(8)
    # As long as a stranger is kept nobody waits.
    assert max(waited_s) < GREETING_LIMIT_S
    assert resident_kib[-1] - resident_kib[0] < 8 << 10


def from_(source: str, card: Card) -> socket.socket:
    """A call that is under way."""
    calling = socket.socket()
    calling.setblocking(False)
    calling.bind((source, 0))
    calling.connect_ex((card.host, card.port))
    return calling


def test_where_strangers_come_faster_than_they_are_heard_members_are_let_in_and_a_part_of_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "_CROWD_S", 1.0)
    monkeypatch.setattr(door, "_CROWD", 100)
    monkeypatch.setattr(door, "_TURN", 50)
    let_in: list[Collection[str]] = []
    favour = port.favour

    def note(listening: socket.socket, hosts: Collection[str], one_of: int) -> None:
        let_in.append(hosts)
        favour(listening, hosts, one_of)

    monkeypatch.setattr(port, "favour", note)
    with Party(2) as party, contextlib.ExitStack() as stack:
        host, late = party.links
        with host.lock:  # so nobody is heard
            for _ in range(400):
                stack.enter_context(from_("127.0.0.2", host.card))
        until(lambda: host._door._crowd_until, "they are a crowd")
        assert not let_in[0]  # nobody is known yet
        host.favour(1, [late.card])  # as a plan comes
        assert let_in[-1] == {"127.0.0.1"}
        party.meet()
        assert party.everywhere(talk) == [[0.0, 1.0]] * 2
        # Who calls from an address that no card has is let in too, sooner or later, and then known.
        for _ in range(40):
            stack.enter_context(from_("127.0.0.3", host.card))
        until(lambda: any(g.trust == door._STRANGE for g in host._door._guests.values()), "a part")
        until(lambda: not host._door._crowd_until, "nobody crowds any more")
        assert late.linked(host.identity)


def test_all_who_wait_are_heard_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_TURN_S", 60.0)  # a busy machine takes longer than a turn may
    with Party(1) as party, contextlib.ExitStack() as stack:
        (host,) = party.links
        with host.lock:  # so nobody is heard but here
            for _ in range(100):
                stack.enter_context(from_("127.0.0.2", host.card))
            host._door.hear(host._door._listener.fileno())
            assert len(host._door._guests) == 100


def test_strangers_take_no_place_of_who_calls_from_a_members_address() -> None:
    with Party(2) as party, contextlib.ExitStack() as stack:
        party.meet()
        host = party.links[0]
        member = stack.enter_context(from_("127.0.0.1", host.card))
        until(lambda: len(host._door._guests) == 1, "it is heard")
        for _ in range(2 * MOST_CALLERS):
            stack.enter_context(from_("127.0.0.2", host.card))
        until(lambda: len(host._door._guests) == 1 + MOST_CALLERS, "the newest are kept")
        with pytest.raises(BlockingIOError):  # it would be closed else
            member.recv(1)


def test_a_member_that_is_dropped_in_a_crowd_calls_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it had said unread, so that its connection is reset."""
    dropped = 0

    def overlook(door: Door, guest: object) -> bool:
        nonlocal dropped
        dropped += 1
        return True if dropped < 5 else listen_to(door, guest)  # type: ignore[arg-type]  # private

    listen_to = Door._listen_to
    monkeypatch.setattr(Door, "_listen_to", overlook)
    with Party(2) as party:
        party.meet()
        assert dropped > 5
        assert party.everywhere(talk) == [[0.0, 1.0]] * 2


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(each) for each in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                stack.enter_context(open(os.devnull))
        yield


def test_strangers_give_their_descriptors_for_a_call() -> None:
    with Party(2) as party:
        caller = party.links[1]
        with crowd(caller.card, 20, b""):
            until(lambda: len(caller._door._guests) == 20, "they are let in")
            with no_descriptor_left():
                party.meet()
            assert party.everywhere(talk) == [[0.0, 1.0]] * 2


def greet(card: Card, secret: bytes, caller: bytes, serial: int) -> tuple[socket.socket, bytes]:
    """A call of the first meeting, and what is answered."""
    stranger = call(card)
    stranger.settimeout(120)
    said = greeting.make_call(1, serial, True, caller, bytes(32), greeting.fresh())
    stranger.sendall(said + greeting.prove(secret, b"call", card.digest, said))
    return stranger, stranger.recv(greeting.ANSWER_BYTES)


def test_who_has_another_secret_is_not_answered() -> None:
    with Party(2) as party:
        party.meet()
        stranger, answer = greet(party.links[0].card, b"t" * 32, party.links[1].identity, 9)
        assert answer == b""
        stranger.close()
        assert party.everywhere(talk) == [[0.0, 1.0]] * 2


def test_a_call_that_was_overheard_is_answered_and_takes_nobodys_place() -> None:
    with Party(2) as party:
        party.meet()
        # Its first message is what a member has said; it cannot answer to fresh bytes.
        stranger, answer = greet(party.links[0].card, SECRET, party.links[1].identity, 9)
        assert len(answer) == greeting.ANSWER_BYTES
        stranger.sendall(bytes(greeting.CONFIRM_BYTES))
        assert stranger.recv(1) == b""
        stranger.close()
        assert party.everywhere(talk) == [[0.0, 1.0]] * 2


def test_a_greeting_for_one_is_no_greeting_for_another() -> None:
    with Party(3) as party:
        party.meet()
        here, there = party.links[0].card, party.links[2].card
        said = greeting.make_call(1, 9, True, party.links[1].identity, bytes(32), greeting.fresh())
        with call(there) as stranger:
            stranger.sendall(said + greeting.prove(SECRET, b"call", here.digest, said))
            stranger.settimeout(120)
            assert stranger.recv(1) == b""
        assert party.everywhere(talk) == [[0.0, 1.0, 2.0]] * 3


def test_who_was_greeted_at_another_address_is_not_the_member_of_that_name() -> None:
    """A greeting has the cards of both ends in it, and a meeting has those of all."""
    with Party(2) as party:
        caller = party.links[1]
        calls, own = caller._door._calls, caller.card
        calls._own = Card(own.identity, "127.0.0.2", own.port)
        host, late = (LinkTransport(each, 1, SECRET, r, 2) for r, each in enumerate(party.links))

        def meet(transport: LinkTransport) -> str:
            try:
                transport.meet(party.links[0].card, set(), b"", lambda: None)
            except TransportError as error:
                transport.abort()
                return str(error)
            return "met"

        party.transports = [host, late]
        assert "another card" in party.everywhere(meet)[0]
