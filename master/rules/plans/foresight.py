"""Plans that may be wanted next: made while nobody waits for them.

Owns which they are: for the loss of any one node of a job that trains. Must not know how plans are
made, nor what becomes of them.
"""

import logging
from dataclasses import replace

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, JobId
from oobleck.master.planning.requests import PlanReply, PlanRequest, StillPlanning
from oobleck.master.planning.solve import AtOnce
from oobleck.master.rules.decision import Context
from oobleck.master.rules.nodes import draining
from oobleck.master.rules.plans.boundary import undisturbed

log = logging.getLogger(__name__)

#: With more nodes each plan takes so long that there is not one for each before the next loss.
_MOST_NODES = 64


class _Asked(AtOnce):
    """A planner that has no reply, so that the request is known."""

    def reply(self, request: PlanRequest) -> PlanReply:
        raise StillPlanning(request)


class Foresight:
    """Looks again only where something has changed that such plans hang on."""

    def __init__(self) -> None:
        #: Job and generation that they are of, and what else they hang on.
        self._of: tuple[JobId, Generation] | None = None
        self._seen: object = None
        self._found: tuple[PlanRequest, ...] = ()

    def look(self, context: Context) -> tuple[PlanRequest, ...]:
        """The requests that follow from the loss of each node by itself, as they were when nothing
        disturbed the job last: with the first signs of a loss they must not be gone."""
        state, job = context.state, context.state.job
        if job is None or job.current.made is None or len(job.current.members) > _MOST_NODES:
            return ()
        if job.current.losses or job.current.on_the_way or not undisturbed(state, job):
            return self._found if self._of == (job.id, job.newest_known) else ()
        live = [node for node in state.candidates(job) if state.is_ready(node, job)]
        names = tuple((node.facts.node, node.facts.memory_per_worker_bytes) for node in live)
        seen = (
            (job.id, job.newest_known, names),
            (job.profiling.chosen, job.current.base, tuple(sorted(job.rates.items()))),
        )
        if seen != self._seen:
            self._of, self._seen, self._found = (job.id, job.newest_known), seen, ()
            asking = replace(context, planner=_Asked())
            for name in job.current.members:
                left = [node for node in live if node.facts.node != name]
                try:
                    draining.plan_without_drained(asking, job, left)
                except StillPlanning as still:
                    self._found += (still.request,)
                except PlanInfeasible:
                    pass  # that takes no time to find
                except Exception:
                    # Nothing hangs on it yet; where the loss comes, the rules meet it again.
                    log.exception("what a loss would ask for is not known", extra={"node": name})
        return self._found
