"""Connections of `oobleck dashboard` that send no whole request end; a stream goes on."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("uvicorn")
import uvicorn
from uvicorn.server import ServerState

from oobleck.cli.dashboard import app as dashboard
from support import loops

_LONGEST_S = 30.0


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: a",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nb",
    ],
    ids=["silent", "half a head", "half a body"],
)
def test_what_sends_no_whole_request_is_cut_off(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "REQUEST_S", 0.05)

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        with contextlib.suppress(ConnectionResetError):
            await reader.read()

    loops.run(_served(visit))


def test_a_stream_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "REQUEST_S", 0.05)

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.read()).count(b"more") == 10

    loops.run(_served(visit))


async def _served(
    visit: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> None:
    config = uvicorn.Config(_stream, ws="none", lifespan="off", timeout_keep_alive=1)
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: dashboard.Connection(config, state, {}), "127.0.0.1", 0
    )
    async with server, asyncio.timeout(_LONGEST_S):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        await visit(reader, writer)
        writer.close()


async def _stream(
    scope: Any,
    receive: Callable[[], Awaitable[Any]],
    send: Callable[[Any], Awaitable[None]],
) -> None:
    """Reads what a form sends; then ten parts that take longer than a request may."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(10):
        await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": b"more", "more_body": True})
    await send({"type": "http.response.body", "body": b""})
