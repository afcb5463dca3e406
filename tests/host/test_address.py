"""A name that stays on this host is called by the number that was looked at."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from oobleck.agent.connection.enrol import choose_way
from oobleck.host.address import is_loopback
from oobleck.host.ipc.endpoint import choose_endpoint


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names stand for, each time that they are looked up."""
    answers: dict[str, Iterator[str]] = {}
    told: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def look_up(host: str, *others: Any, **options: Any) -> list[Any]:
        if host not in told:
            return list(real(host, *others, **options))
        if host not in answers:
            answers[host] = iter(told[host])
        return list(real(next(answers[host]), *others, **options))

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return told


@pytest.mark.parametrize("insecure", [True, False])
@pytest.mark.parametrize(
    ("name", "number", "called"),
    [("head", "127.0.0.2", "127.0.0.2:4600"), ("six", "::1", "[::1]:4600")],
)
def test_a_name_may_stand_for_another_host_later(
    names: dict[str, list[str]], insecure: bool, name: str, number: str, called: str
) -> None:
    names[name] = [number, number, "192.0.2.1"]
    assert choose_endpoint(f"{name}:4600", None, insecure=insecure).address == called
    names[f"{name}2"] = [number, number, "192.0.2.1"]
    holder = choose_way(f"{name}2:4600", "n1", None, None, insecure=insecure)
    assert holder.endpoint.address == called


def test_localhost_and_what_does_not_resolve_stay() -> None:
    for address in ("localhost:4600", "127.0.0.1:4600", "nowhere.invalid:4600"):
        assert choose_endpoint(address, None, insecure=False).address == address


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("head", False),
        ("", False),
    ],
)
def test_what_is_not_plainly_this_host_is_taken_for_another(host: str, here: bool) -> None:
    assert is_loopback(host) == here
