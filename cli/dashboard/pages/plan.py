"""Page *Plan*: the planner's answer if some of a job's nodes were lost."""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from oobleck.cli.dashboard.calls import Calls
from oobleck.cli.dashboard.problem import Problem
from oobleck.cli.dashboard.web import Web
from oobleck.cli.view import places
from oobleck.core.codec import encode
from oobleck.host.system.process import with_parent
from oobleck.planner.report.planning import Planning
from oobleck.proto import control_pb2 as pb
from oobleck.proto.plans import plan_message

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
            before=_map(plan_message(planning.plan), nodes),
            after=_map(found.plan, nodes) if found is not None and found.plan is not None else None,
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
                told = f"the planner has no answer after {_LONGEST_S:.0f} s; ask about fewer nodes"
                raise Problem(503, told, "No answer") from error
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


def _map(plan: pb.Plan, nodes: Sequence[pb.NodeInfo]) -> Mapping[str, object]:
    rows = places.rows(plan, nodes)
    through = [row.places for row in rows if row.is_through]
    return {
        "rows": rows,
        "layers": through[0][-1].last_layer + 1 if through else 0,
        "generation": plan.generation,
        "schedule": plan.schedule,
    }
