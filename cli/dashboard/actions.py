"""Actions of operators: drain, undrain, cancel, checkpoint, timeline; and questions to the planner.

For an action the session must be an operator's, and the master demands the same of the dashboard's
certificate.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from oobleck.cli.client import MasterClient
from oobleck.cli.dashboard.gantt import Gantt, gantt
from oobleck.cli.dashboard.hub import Calls
from oobleck.cli.dashboard.parts import Problem
from oobleck.cli.dashboard.sessions import Session
from oobleck.cli.dashboard.web import Web, redirect
from oobleck.cli.output.text import ENDED
from oobleck.cli.view.state import plan_map
from oobleck.core.codec import encode
from oobleck.host.system.process import with_parent
from oobleck.planner.report.planning import Planning
from oobleck.proto import control_pb2 as pb
from oobleck.proto.plans import plan_message

_MOST_REASON = 200
_MOST_STEPS = 100
#: Concurrent calls that are answered at once, and that wait for steps.
_QUICK = 8
_LONG = 4


class Actions:
    def __init__(self, web: Web) -> None:
        self._web = web
        self._quick = Calls(web.site.connect, at_once=_QUICK)
        self._long = Calls(web.site.connect, at_once=_LONG)

    def close(self) -> None:
        self._quick.close()
        self._long.close()

    def routes(self) -> list[Route]:
        node, job = "/nodes/{node}", "/jobs/{job}"
        return [
            Route(f"{node}/drain", self._drain_page),
            Route(f"{node}/drain", self._drain, methods=["POST"]),
            Route(f"{node}/undrain", self._undrain_page),
            Route(f"{node}/undrain", self._undrain, methods=["POST"]),
            Route(f"{job}/cancel", self._cancel_page),
            Route(f"{job}/cancel", self._cancel, methods=["POST"]),
            Route(f"{job}/checkpoint", self._checkpoint, methods=["POST"]),
            Route(f"{job}/timeline", self._timeline_page),
            Route(f"{job}/timeline", self._timeline, methods=["POST"]),
        ]

    # ---- nodes

    async def _drain_page(self, request: Request) -> Response:
        return await self._question(request, "drain.html", "drain a node")

    async def _undrain_page(self, request: Request) -> Response:
        return await self._question(request, "undrain.html", "take a node back")

    async def _drain(self, request: Request) -> Response:
        form = await self._form(request, "drain a node")
        node, reason = request.path_params["node"], form.get("reason", "")[:_MOST_REASON]
        why = " ".join(reason.split()) or "by the dashboard"
        force = form.get("force") == "on"

        def drain(master: MasterClient) -> pb.NodeInfo:
            (found,) = master.drain(node, reason=why, force=force)
            return found

        return await self._of_node(request, drain)

    async def _undrain(self, request: Request) -> Response:
        await self._form(request, "take a node back")
        node = request.path_params["node"]
        return await self._of_node(request, lambda master: master.undrain(node))

    async def _of_node(
        self, request: Request, do: Callable[[MasterClient], pb.NodeInfo]
    ) -> Response:
        found = await self._quick.ask(request, do)
        message = f"{found.node} is {found.state}" + (f": {found.reason}" if found.reason else "")
        return self._done(request, message, "/")

    # ---- jobs

    async def _cancel_page(self, request: Request) -> Response:
        return await self._question(request, "cancel.html", "cancel a job")

    async def _cancel(self, request: Request) -> Response:
        await self._form(request, "cancel a job")
        job = request.path_params["job"]
        found = await self._quick.ask(request, lambda master: master.cancel(job))
        message = f"{job} is {found.state}" if found.state in ENDED else f"{job} is being cancelled"
        return self._done(request, message, f"/jobs/{quote(job)}")

    async def _checkpoint(self, request: Request) -> Response:
        await self._form(request, "have a checkpoint taken")
        job = request.path_params["job"]
        await self._quick.ask(request, lambda master: master.save_checkpoint(job))
        message = (
            "a checkpoint begins when the current step ends; the job's events report its result"
        )
        return self._done(request, message, f"/jobs/{quote(job)}")

    async def _timeline_page(self, request: Request) -> Response:
        return self._timeline_html(request, steps=1, drawn=None)

    def _timeline_html(self, request: Request, *, steps: int, drawn: Gantt | None) -> Response:
        session = self._web.reader(request)
        job = request.path_params["job"]
        return self._web.html(
            request,
            "timeline.html",
            session=session,
            title=f"Timeline of {job}",
            active="timeline",
            job_id=job,
            most=_MOST_STEPS,
            steps=steps,
            drawn=drawn,
        )

    async def _timeline(self, request: Request) -> Response:
        form = await self._form(request, "have steps recorded")
        job, steps = request.path_params["job"], form.get("steps", "1")
        if not steps.isdecimal() or len(steps) > 9 or not 1 <= int(steps) <= _MOST_STEPS:
            raise Problem(400, f"steps: {steps[:20]!r} is not 1 to {_MOST_STEPS}", "Not recorded")
        trace = await self._long.ask(request, lambda master: master.timeline(job, int(steps)))
        if form.get("as") == "page":
            drawn = await asyncio.to_thread(lambda: gantt(json.loads(trace)))
            return self._timeline_html(request, steps=int(steps), drawn=drawn)
        name = re.sub(r"[^\w.-]", "_", job, flags=re.ASCII)
        return Response(
            trace,
            media_type="application/json",
            headers={"Content-Disposition": f'attachment; filename="{name}-timeline.json"'},
        )

    # ---- shared

    async def _question(self, request: Request, template: str, what: str) -> Response:
        """Return a page that asks for confirmation before the action."""
        session = self._web.reader(request)
        _check_operator(session, what)
        named: Mapping[str, str] = request.path_params
        return self._web.html(
            request,
            template,
            session=session,
            title=what.capitalize(),
            job_id=named.get("job", ""),
            node=named.get("node", ""),
        )

    async def _form(self, request: Request, what: str) -> Mapping[str, str]:
        session, form = await self._web.form(request)
        _check_operator(session, what)
        return form

    def _done(self, request: Request, message: str, where: str) -> Response:
        """Redirect to the page that shows the change, and show `message` there."""
        session = self._web.reader(request)
        session.message = message
        return redirect(where, session.id)


def _check_operator(session: Session, what: str) -> None:
    """Raise Problem unless the session is an operator's."""
    if session.role != "operator":
        message = (
            f"a viewer may not {what}; log in with a token from "
            "'oobleck dashboard token --role operator'"
        )
        raise Problem(403, message, "Refused")


# ---- page Plan: the planner's answer if some of a job's nodes were lost


#: Most concurrent questions, and the time limit of one.
_AT_ONCE = 2
_LONGEST_S = 60.0
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Answer of the planner, as `WhatIf.data` returns it."""

    data: Mapping[str, Any]
    #: The resulting plan; None: there is none.
    plan: pb.Plan | None


class PlanPage:
    def __init__(self, web: Web) -> None:
        self._web = web
        self._calls = Calls(web.site.connect, at_once=_AT_ONCE)
        self._turn = asyncio.Semaphore(_AT_ONCE)

    def close(self) -> None:
        self._calls.close()

    async def show(self, request: Request) -> Response:
        session = self._web.reader(request)
        job = request.path_params["job"]
        planning = await self._calls.ask(request, lambda master: master.planning(job))
        lost = list(dict.fromkeys(request.query_params.getlist("lose")))
        found = await self._ask(request, planning, lost) if lost else None
        snapshot = await self._web.site.hub.look()
        nodes = snapshot.nodes if snapshot is not None else ()
        return self._web.html(
            request,
            "plan.html",
            session=session,
            title=f"Plan of {job}",
            active="plan",
            job_id=job,
            nodes=planning.plan.nodes,
            spare=sorted(set(planning.nodes) - set(planning.plan.nodes)),
            lost=lost,
            found=found,
            before=plan_map(plan_message(planning.plan), nodes),
            after=plan_map(found.plan, nodes)
            if found is not None and found.plan is not None
            else None,
        )

    async def _ask(self, request: Request, planning: Planning, lost: Sequence[str]) -> Found:
        """Return the planner's answer. Raise Problem."""
        question = json.dumps({"lost": lost}).encode() + b"\n" + encode(planning)
        async with self._turn:
            child = await asyncio.create_subprocess_exec(
                *with_parent("oobleck.cli.dashboard.plan_process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                asked = asyncio.ensure_future(child.communicate(question))
                async with asyncio.timeout(_LONGEST_S):
                    while not (await asyncio.wait({asked}, timeout=_LOOK_S))[0]:
                        if await request.is_disconnected():
                            raise Problem(499, "the browser has disconnected")
                answer, _ = asked.result()
            except TimeoutError as error:
                message = (
                    f"the planner has no answer after {_LONGEST_S:.0f} s; ask about fewer nodes"
                )
                raise Problem(503, message, "No answer") from error
            finally:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        head, _, plan = answer.partition(b"\n")
        if child.returncode != 0 or not head:
            raise Problem(500, "the planner failed; see the dashboard's standard error", "Error")
        data = json.loads(head)
        if "refused" in data:
            raise Problem(409, data["refused"], "No such question")
        return Found(data=data, plan=pb.Plan.FromString(plan) if plan else None)
