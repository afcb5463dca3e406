"""Requests and answers: the site, checks of requests, sessions, forms, the frame of pages.

Must not know the pages.
"""

import re
import time
from collections.abc import (
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from oobleck.cli.dashboard.hub import Hub
from oobleck.cli.dashboard.parts import (
    Part,
    Problem,
    Rendering,
    Renderings,
    Streams,
    Templates,
    rendering,
)
from oobleck.cli.dashboard.sessions import BadToken, Session, Sessions
from oobleck.cli.output import text
from oobleck.cli.view.feeds import Connect, Snapshot
from oobleck.host.address import is_loopback, is_number, own_hostname, without_port

# ---- site: the state that all pages share, and the protocol of a live page


_NO_ANSWER = "No answer from the master"


class Page(Protocol):
    """Page that stays up to date while it is open."""

    #: Identifies everything that the page depends on and that is fixed while it is open.
    key: Hashable
    title: str
    template: str
    #: Name of its entry in the navigation.
    active: str

    def version(self) -> Hashable:
        """Return a value that differs whenever the page may differ."""

    def parts(self) -> Sequence[Part]:
        """Return its current parts."""

    def touch(self) -> None:
        """Note that a browser still shows the page."""

    def is_ready(self) -> bool:
        """Return whether the first content is complete."""


@dataclass(frozen=True, kw_only=True)
class Site:
    #: The master's address, for display.
    master: str
    connect: Connect
    hub: Hub
    sessions: Sessions
    #: Whether it serves https.
    is_tls: bool
    streams: Streams
    templates: Templates = field(default_factory=Templates)
    renderings: Renderings = field(default_factory=Renderings)

    def snapshot(self) -> Snapshot:
        """Return the master's last answer. Raise Problem if it has never answered."""
        found, trouble = self.hub.cluster.snapshot, self.hub.cluster.trouble
        if found is None:
            problem = trouble.line if trouble is not None else "the master has not answered yet"
            raise Problem(503, problem, _NO_ANSWER)
        return found

    def missing(self, problem: str, heading: str) -> Problem:
        """Return the error that something is not in the master's last answer. If that is old, the
        thing may be in the next one, so the error is temporary."""
        if not self.hub.is_old():
            return Problem(404, problem, heading)
        at = text.short_moment(self.snapshot().at)
        return Problem(503, f"the master is away; by the state of {at}, {problem}", _NO_ANSWER)

    def render(self, page: Page) -> Rendering:
        page.touch()
        version = page.version(), self.hub.is_old()
        found = self.renderings.newest(page.key, version)
        if found is None:
            found = rendering([self._of_master(), *page.parts()])
            self.renderings.add(page.key, version, found)
        return found

    def _of_master(self) -> Part:
        """Return the part of every page that reports trouble with the master."""
        feed = self.hub.cluster
        return self.templates.part(
            "master",
            "parts/master.html",
            trouble=feed.trouble,
            state_of=feed.snapshot.at if feed.snapshot is not None and self.hub.is_old() else None,
            problem=feed.snapshot.problem if feed.snapshot is not None else "",
        )


# ---- checks of every request: its host name, its size, and the browser's restrictions


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
        if not self._is_own(without_port(host).lower()):
            problem = f"{host[:100]!r} is no name of this dashboard; its --host NAME allows one\n"
            return PlainTextResponse(problem, 421)
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


# ---- sessions, forms and answers


#: Time after which a browser retries an unavailable page.
AGAIN_S = 5
_EXPIRED = "this session has expired; log in again"


#: Key in a request's scope of the session id from its path.
_ID = "session_id"
_SESSION_PATH = re.compile(r"/~([\w-]{1,64})(/.*)", re.ASCII)


class SessionPath:
    """Middleware that removes the session's path prefix from a request's path."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = _SESSION_PATH.fullmatch(scope.get("path", ""))
        if found is not None:
            scope = {**scope, _ID: found[1], "path": found[2]}
        await self._app(scope, receive, send)


class Web:
    def __init__(self, site: Site) -> None:
        self.site = site

    # ---- sessions of requests

    def session(self, request: Request) -> Session | None:
        """Return the request's session; None if nobody is logged in."""
        return self.site.sessions.find(_id(request), self._shown(request), time.time())

    def reader(self, request: Request) -> Session:
        """Return the request's session. Raise Problem if nobody is logged in."""
        session = self.session(request)
        if session is None:
            raise Problem(401, _EXPIRED if self._shown(request) else "")
        return session

    async def form(self, request: Request) -> tuple[Session, Mapping[str, str]]:
        """Return the form's session and fields. Raise Problem unless a page of the session sent
        it."""
        session = self.reader(request)
        self._check_origin(request)
        form = await _read_form(request)
        if not session.proves(form.get("csrf", "")):
            problem = "this form is not from a page of this session; load the page again"
            raise Problem(403, problem, "Refused")
        return session, form

    def _check_origin(self, request: Request) -> None:
        """Raise Problem for a form of another site."""
        origin, host = request.headers.get("origin"), request.headers.get("host")
        # Behind a proxy that has the certificate, browsers use https although this server does not.
        schemes = ("https",) if self.site.is_tls else ("http", "https")
        own = origin is None or origin in {f"{scheme}://{host}" for scheme in schemes}
        if not own or request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            raise Problem(403, "this form is from another site", "Refused")

    def _shown(self, request: Request) -> str:
        return request.cookies.get(_cookie(_id(request), secure=self.site.is_tls), "")

    # ---- sessions

    async def login_page(self, request: Request) -> Response:
        return self._login(request, 200, "", "/")

    async def log_in(self, request: Request) -> Response:
        self._check_origin(request)
        form = await _read_form(request)
        after = inside(form.get("next"))
        try:
            id, shown = self.site.sessions.log_in(form.get("token", ""), time.time())
        except BadToken as error:
            return self._login(request, 403, str(error), after)
        response = redirect(f"/login/done?{urlencode({'next': after})}", id)
        response.set_cookie(
            _cookie(id, secure=self.site.is_tls),
            shown,
            path=_base(id),
            httponly=True,
            samesite="lax",
            secure=self.site.is_tls or request.headers.get("origin", "").startswith("https:"),
        )
        return response

    async def logged_in(self, request: Request) -> Response:
        """Redirect a browser with its new session; show the log-in again if it kept no cookie."""
        after = inside(request.query_params.get("next"))
        session = self.session(request)
        if session is None:
            problem = f"this browser keeps no cookies; allow them for {request.url.hostname}"
            return self._login(request, 400, problem, after)
        return redirect(after, session.id)

    async def log_out(self, request: Request) -> Response:
        await self.form(request)
        id = _id(request)
        self.site.sessions.log_out(id, self._shown(request))
        response = self._login(request, 200, "", "/")
        # Browsers ignore cookies named __Secure- in answers that are not secure.
        secure = self.site.is_tls
        response.delete_cookie(_cookie(id, secure=secure), path=_base(id), secure=secure)
        return response

    # ---- answers

    def html(
        self,
        request: Request,
        template: str,
        status: int = 200,
        *,
        session: Session | None,
        **values: object,
    ) -> Response:
        page = values.get("page")
        query = f"?{request.url.query}" if request.url.query else ""
        known = {
            **{name: getattr(page, name, "") for name in ("title", "active", "job_id", "span")},
            "base": _base(session.id if session is not None else ""),
            "here": f"./{request.url.path.lstrip('/')}{query}",
            "live": "",
            "asks_again_s": 0,
            "rendering": None,
            "master": self.site.master,
            "session": session,
        }
        return HTMLResponse(self.site.templates.page(template, **{**known, **values}), status)

    def _login(self, request: Request, status: int, problem: str, after: str) -> Response:
        values = {"title": "Log in", "problem": problem, "next": after}
        return self.html(request, "login.html", status, session=None, **values)

    async def problem(self, request: Request, error: Exception) -> Response:
        """Return the page of a Problem; the log-in page if a log-in is needed."""
        assert isinstance(error, Problem)
        if request.url.path.startswith("/live"):
            return PlainTextResponse(f"{error or 'log in first'}\n", error.status)
        if error.status == 401:
            here = request.url.path if request.method == "GET" else "/"
            query = f"?{request.url.query}" if request.url.query else ""
            return self._login(request, 401, str(error), inside(here + query))
        heading = error.heading or "Error"
        response = self.html(
            request,
            "error.html",
            error.status,
            session=self.session(request),
            title=heading,
            heading=heading,
            problem=str(error),
        )
        if error.status == 503 and request.method == "GET":
            response.headers["Refresh"] = str(AGAIN_S)
        return response

    async def http_problem(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem = (
            f"there is no page {request.url.path}" if error.status_code == 404 else error.detail
        )
        return await self.problem(request, Problem(error.status_code, problem, error.detail))


async def _read_form(request: Request) -> dict[str, str]:
    """Return the form's fields. Raise Problem."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise Problem(413, f"a form has at most {MOST_BODY_BYTES} bytes", "Too large")
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=100))
    except (UnicodeDecodeError, ValueError) as error:
        raise Problem(400, "this is not a valid form", "Refused") from error


def _id(request: Request) -> str:
    """Return the id of the session in the request's path; empty: none."""
    found: str = request.scope.get(_ID, "")
    return found


def _base(id: str) -> str:
    """Return the path of a session's pages and cookie; that of the log-in if `id` is empty."""
    return f"/~{id}/" if id else "/"


def _cookie(id: str, *, secure: bool) -> str:
    return f"{'__Secure-' if secure else ''}oobleck-{id}"


def redirect(where: str, id: str) -> Response:
    """Redirect after a form to a page of the session; reloading does not resend the form."""
    return Response(status_code=303, headers={"Location": _base(id) + where.removeprefix("/")})


def inside(path: str | None) -> str:
    """Return `path` if it is an address of this site, otherwise the first page."""
    if not path or not path.startswith("/") or path.startswith(("//", "/\\", "/live", "/login")):
        return "/"
    return path if path.isascii() and path.isprintable() else "/"
