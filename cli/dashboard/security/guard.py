"""Checks of every request: its host name, its size, and the browser's restrictions.

Must not know who is logged in.
"""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse

from oobleck.host.address import is_loopback, is_number, own_hostname

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Most bytes of a form.
MOST_BODY_BYTES = 16 << 10

#: With no-referrer, browsers would not name the site of a form. Strict-Transport-Security would
#: apply to all ports of the host, such as Grafana's.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'self'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Guard:
    """Middleware that checks every request."""

    def __init__(self, app: App, *, listen_host: str, names: Iterable[str]) -> None:
        """Wrap `app`. `names`: allowed host names besides this host's own."""
        self._app = app
        self._local = is_loopback(listen_host)
        own = () if self._local else (own_hostname(), own_hostname().partition(".")[0])
        self._names = {name.lower() for name in (*names, *own, "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
                message["headers"] = headers.raw
            await send(message)

        refusal = self._refusal(Headers(scope=scope))
        await (refusal or self._app)(scope, receive, guarded)

    def _refusal(self, headers: Headers) -> PlainTextResponse | None:
        host = headers.get("host", "")
        if not self._is_own(_without_port(host).lower()):
            told = f"{host[:100]!r} is no name of this dashboard; its --host NAME allows one\n"
            return PlainTextResponse(told, 421)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MOST_BODY_BYTES:
            return PlainTextResponse(f"a form has at most {MOST_BODY_BYTES} bytes\n", 413)
        return None

    def _is_own(self, host: str) -> bool:
        """Return whether `host` names this dashboard.

        Otherwise a site whose own name resolves to here could read it through a browser on this
        host.
        """
        if host in self._names:
            return True
        return is_number(host) and (not self._local or is_loopback(host))


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host
