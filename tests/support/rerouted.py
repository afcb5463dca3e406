"""Plans with shadows and around lost workers, and real workers that lose their peers."""

import dataclasses
import os
import signal
from contextlib import suppress

from oobleck.core.ids import Generation, WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import PhaseReached
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.core.routes import Hold
from oobleck.planner.cost.listed import with_listing
from oobleck.planner.profile.estimate import estimate_profile
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.recovery.reroute import reroute
from support.director import Director, worker_named


def held(first: int, last: int, *names: str) -> Hold:
    workers = tuple(map(worker_named, names))
    return Hold(first_layer=first, last_layer=last, workers=workers)


def with_holds(plan: Plan, *more: Hold) -> Plan:
    return dataclasses.replace(plan, holds=(*plan.holds, *more))


def profile_of(job: JobSpec) -> Profile:
    """As a master that has not measured has it."""
    return estimate_profile(job, gpus_per_node=2, memory_per_worker_bytes=1 << 30)


def rerouted(plan: Plan, job: JobSpec, *nodes: str, helpers: int | None = None) -> Plan:
    """Without the workers of these nodes, in the next generation."""
    lost = {worker for worker in plan.workers if worker.node in nodes}
    around = reroute(plan, lost, generation=Generation(plan.generation + 1), helpers=helpers)
    return with_listing(around, profile_of(job)) if listed_routes(around) else around


def workers_of(plan: Plan, *nodes: str) -> list[WorkerId]:
    return [worker for worker in plan.workers if worker.node in nodes]


def wait_lost(cluster: Director, plan: Plan, *nodes: str) -> None:
    """Until a worker of each of these nodes has been killed; then all others of it are, too."""
    for node in nodes:
        mates = workers_of(plan, node)
        lives = [cluster.workers[worker] for worker in mates]
        cluster.wait(lambda lives=lives: any(live.gone for live in lives), "a kill")
        for live in lives:
            with suppress(ProcessLookupError):  # its own fault has just killed it
                if not live.gone:
                    os.kill(live.pid, signal.SIGKILL)
        cluster.wait(lambda lives=lives: all(live.gone for live in lives), "all of the node")


def moved_bytes(cluster: Director, plan: Plan) -> set[int]:
    """What workers received before the plan's first step."""
    return {
        said.received_bytes
        for worker in plan.workers
        for said in cluster.said(worker, PhaseReached, plan.generation)
        if isinstance(said, PhaseReached) and said.phase == "transferred"
    }
