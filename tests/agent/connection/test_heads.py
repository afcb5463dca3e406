"""Which of several heads an agent calls, and what it knows of them after a restart."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from oobleck.agent.connection.heads import Heads
from support import loops


class Ports:
    """Loopback addresses at which something takes connections, or nothing does."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def dead(self) -> str:
        probe = self._stack.enter_context(socket.socket())
        probe.bind(("127.0.0.1", 0))  # bound, and not listening: refused, and nobody else's
        return f"127.0.0.1:{probe.getsockname()[1]}"

    def alive(self) -> str:
        return f"127.0.0.1:{self.listening().getsockname()[1]}"

    def listening(self) -> socket.socket:
        return self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def silent(self) -> str:
        """One whose queue is full, so that the kernel answers no more."""
        server = self._stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            waiting = self._stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def ports() -> Iterator[Ports]:
    with ExitStack() as stack:
        yield Ports(stack)


def seek(heads: Heads, *, pass_over: bool = False) -> bool:
    return loops.run(heads.seek(pass_over=pass_over))


def test_the_first_that_takes_a_connection_is_called_and_stays(ports: Ports) -> None:
    first, second, third = ports.dead(), ports.alive(), ports.alive()
    heads = Heads([first, second, third], None)
    assert heads.current == first
    assert seek(heads)
    assert heads.current == second
    assert seek(heads)
    assert heads.current == second
    assert seek(heads, pass_over=True)
    assert heads.current == third
    assert seek(heads, pass_over=True)
    assert heads.current == second


def test_a_host_that_does_not_answer_and_a_name_that_leads_nowhere_are_passed_over(
    ports: Ports,
) -> None:
    alive = ports.alive()
    heads = Heads([ports.silent(), "nowhere.invalid:4600", alive], None)
    assert seek(heads)
    assert heads.current == alive


def test_where_nothing_answers_it_is_said_and_the_search_goes_on(ports: Ports) -> None:
    later = ports.listening()
    address = f"127.0.0.1:{later.getsockname()[1]}"
    heads = Heads([ports.dead(), ports.dead()], None)
    assert not seek(heads)
    heads = Heads([ports.dead(), address], None)
    assert seek(heads, pass_over=True)
    assert heads.current == address


def test_one_address_alone_is_not_asked(ports: Ports) -> None:
    heads = Heads([ports.dead()], None)
    assert seek(heads)
    assert seek(heads, pass_over=True)


def test_what_a_head_tells_is_known_after_a_restart(tmp_path: Path) -> None:
    heads = Heads(["a:1", "b:2"], tmp_path)
    heads.learn(["b:2", "c:3"])
    assert heads.addresses == ("a:1", "b:2", "c:3")
    again = Heads(["a:1"], tmp_path)
    assert again.addresses == ("a:1", "b:2", "c:3")
    assert str(again) == "a:1, b:2, c:3"
    again.learn([])  # of a head that knows of none
    again.learn(["d:4"])
    assert Heads(["a:1"], tmp_path).addresses == ("a:1", "d:4")


def test_without_credentials_nothing_is_learned() -> None:
    heads = Heads(["127.0.0.1:1"], None)
    heads.learn(["10.0.0.1:1"])
    assert heads.addresses == ("127.0.0.1:1",)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"nonsense", b"a:1\n" * 10_000, b""])
def test_a_file_that_is_damaged_is_passed_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "heads").write_bytes(content)
    assert Heads(["a:1"], tmp_path).addresses == ("a:1",)
