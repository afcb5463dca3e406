"""The application: the address of each page.

A page's stream of changes is at its address below /live. All addresses of a session are below its
own path, /~ID, which `SessionPath` removes.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from oobleck.cli.dashboard.actions import Actions
from oobleck.cli.dashboard.hub import until
from oobleck.cli.dashboard.live import MOST_STREAMS
from oobleck.cli.dashboard.pages.cluster import ClusterPage
from oobleck.cli.dashboard.pages.incident import IncidentPage
from oobleck.cli.dashboard.pages.job import JobPage
from oobleck.cli.dashboard.pages.logs import LogsPage
from oobleck.cli.dashboard.pages.plan import PlanPage
from oobleck.cli.dashboard.parts import Rendering
from oobleck.cli.dashboard.problem import Problem
from oobleck.cli.dashboard.security.sessions import Session
from oobleck.cli.dashboard.site import Page, Site
from oobleck.cli.dashboard.web import SessionPath, Web

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
        await web.site.hub.look()
        page = make(web.site, session, _asked(request))
        page.touch()
        await until(page.is_ready, _PATIENCE_S)
        query = f"?{request.url.query}" if request.url.query else ""
        told, session.told = session.told, ""
        return web.html(
            request,
            page.template,
            session=session,
            page=page,
            rendering=web.site.render(page),
            live=f"live{request.url.path}{query}",
            told=told,
        )

    return show


def _live(web: Web, make: Make) -> Handler:
    async def stream(request: Request) -> Response:
        session = web.reader(request)
        if web.site.streams.open >= MOST_STREAMS:
            return PlainTextResponse("too many pages are open; close some\n", 503)
        await web.site.hub.look()
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
