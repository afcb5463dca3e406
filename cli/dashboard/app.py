"""The application: the address of each page, and its run until it is told to end.

A page's stream of changes is at its address below /live. All addresses of a session are below its
own path, /~ID, which `SessionPath` removes.

uvicorn waits without limit for an incomplete request. Here such a connection is closed: otherwise a
few hundred silent ones would exclude all browsers.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from oobleck.cli.dashboard.actions import Actions, PlanPage
from oobleck.cli.dashboard.hub import Hub, until
from oobleck.cli.dashboard.pages import ClusterPage, IncidentPage, JobPage, LogsPage
from oobleck.cli.dashboard.parts import MOST_STREAMS, Problem, Rendering, Streams
from oobleck.cli.dashboard.sessions import Session, Sessions
from oobleck.cli.dashboard.web import AGAIN_S, Guard, Page, SessionPath, Site, Web
from oobleck.cli.view.feeds import Connect

_STATIC = Path(__file__).parent / "static"
#: Longest wait of a page for its first content.
_PATIENCE_S = 1.5

#: Maker of a page from the parameters in a request's path and query.
Make = Callable[[Site, Session, Mapping[str, str]], Page]

PAGES: Mapping[str, Make] = {
    "/": lambda site, session, asked: ClusterPage(site, session),
    "/jobs/{job}": lambda site, session, asked: JobPage(
        site, session, asked["job"], asked.get("span", "")
    ),
    "/jobs/{job}/incidents/{number}": lambda site, session, asked: IncidentPage(
        site, session, asked["job"], asked["number"]
    ),
    "/jobs/{job}/logs": lambda site, session, asked: LogsPage(
        site, session, asked["job"], asked.get("node", ""), asked.get("having", "")
    ),
}


def make_app(site: Site) -> Starlette:
    web = Web(site)
    actions, plan = Actions(web), PlanPage(web)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        reaping = asyncio.get_running_loop().create_task(site.hub.reap())
        try:
            yield
        finally:
            reaping.cancel()
            actions.close()
            plan.close()
            site.hub.close()

    return Starlette(
        routes=[
            Route("/login", web.login_page),
            Route("/login", web.log_in, methods=["POST"]),
            Route("/login/done", web.logged_in),
            Route("/logout", web.log_out, methods=["POST"]),
            Mount("/static", StaticFiles(directory=_STATIC)),
            *actions.routes(),
            Route("/jobs/{job}/plan", plan.show),
            *(Route(f"/live{path}", _live(web, make)) for path, make in PAGES.items()),
            *(Route(path, _page(web, make)) for path, make in PAGES.items()),
        ],
        middleware=[Middleware(SessionPath), Middleware(GZipMiddleware, minimum_size=2000)],
        exception_handlers={Problem: web.problem, HTTPException: web.http_problem},
        lifespan=lifespan,
    )


Handler = Callable[[Request], Awaitable[Response]]


def _page(web: Web, make: Make) -> Handler:
    async def show(request: Request) -> Response:
        session = web.reader(request)
        await web.site.hub.look(request.path_params.get("job", ""))
        page = make(web.site, session, _asked(request))
        page.touch()
        await until(page.is_ready, _PATIENCE_S)
        is_old = web.site.hub.is_old()
        query = f"?{request.url.query}" if request.url.query else ""
        message, session.message = session.message, ""
        return web.html(
            request,
            page.template,
            503 if is_old else 200,
            session=session,
            page=page,
            rendering=web.site.render(page),
            live=f"live{request.url.path}{query}",
            message=message,
            asks_again_s=AGAIN_S if is_old else 0,
        )

    return show


def _live(web: Web, make: Make) -> Handler:
    async def stream(request: Request) -> Response:
        session = web.reader(request)
        if web.site.streams.open >= MOST_STREAMS:
            return PlainTextResponse("too many pages are open; close some\n", 503)
        await web.site.hub.look(request.path_params.get("job", ""))
        page = make(web.site, session, _asked(request))
        seen = web.site.renderings.known(request.query_params.get("seen", ""))

        def look() -> Rendering:
            web.reader(request)
            return web.site.render(page)

        return StreamingResponse(
            web.site.streams.follow(seen, look), media_type="text/event-stream"
        )

    return stream


def _asked(request: Request) -> Mapping[str, str]:
    """Return the request's parameters; those in the path override the query's."""
    return {**request.query_params, **request.path_params}


# ---- server


#: Interval of checks; a client that completes no request between two of them is disconnected.
REQUEST_S = 10.0


class Connection(H11Protocol):
    _looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        self._looking = self.loop.call_later(REQUEST_S, self._look, self.cycle)

    def _look(self, before: object) -> None:
        """Check the connection. `before`: newest request at the last check."""
        is_waited_for = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if is_waited_for and self.cycle is before:
            self.transport.abort()
        else:
            self._look_again()


#: Most connections; a further browser is asked to retry.
MOST_CONNECTIONS = 500
_LONGEST_END_S = 3


class _Server(uvicorn.Server):
    """Server that first ends the streams of open pages, which are otherwise endless."""

    def __init__(self, config: uvicorn.Config, streams: Streams) -> None:
        super().__init__(config)
        self._streams = streams

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._streams.closing.set()
        await super().shutdown(sockets)


def run(
    listening: socket.socket,
    *,
    connect: Connect,
    master: str,
    key: bytes,
    folder: Path,
    session_s: float,
    names: Sequence[str],
    tls: tuple[Path, Path] | None,
) -> None:
    """Serve until the end. `folder`: folder of the secret; `tls`: files of certificate and key."""
    host = listening.getsockname()[0]

    async def serving() -> None:
        site = Site(
            master=master,
            connect=connect,
            hub=Hub(connect),
            sessions=Sessions(key, folder, lasts_s=session_s),
            is_tls=tls is not None,
            streams=Streams(),
        )
        config = uvicorn.Config(
            Guard(make_app(site), listen_host=host, names=names),
            access_log=False,
            date_header=False,
            http=Connection,
            limit_concurrency=MOST_CONNECTIONS,
            log_level="warning",
            proxy_headers=False,
            server_header=False,
            ssl_certfile=tls[0] if tls else None,
            ssl_keyfile=tls[1] if tls else None,
            timeout_graceful_shutdown=_LONGEST_END_S,
            ws="none",
        )
        await _Server(config, site.streams).serve(sockets=[listening])

    asyncio.run(serving())
