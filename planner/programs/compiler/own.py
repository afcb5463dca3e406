"""Part of one worker in a plan's programs, compiled without those of all others.

It is the worker's own program, and the order in which its neighbours exchange messages with it. So
entering a plan costs a worker time in proportion to its own routes, however many others there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oobleck.core.ids import WorkerId
from oobleck.core.instructions import Instruction, Message, Program
from oobleck.core.plan import Plan
from oobleck.core.ties import Ties
from oobleck.planner.programs.compiler.compile import (
    Work,
    add_sync,
    compile_bodies,
    compile_evaluation,
)
from oobleck.planner.programs.compiler.gradients import gradient_buckets, syncs_by_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProgram:
    """Program of one worker in a step or in a round of an evaluation."""

    program: Program
    #: By neighbour: its messages to and from this worker, in the neighbour's order.
    peers: Mapping[WorkerId, tuple[Message, ...]]

    @classmethod
    def of(
        cls, worker: WorkerId, programs: Mapping[WorkerId, Sequence[Instruction]]
    ) -> "OwnProgram":
        """Take the worker's part of `programs`, which must contain its own and those of its
        neighbours."""
        own = tuple(programs[worker])
        peers = sorted({step.peer for step in own if isinstance(step, Message)})
        return cls(
            program=own,
            peers={
                peer: tuple(
                    step
                    for step in programs[peer]
                    if isinstance(step, Message) and step.peer == worker
                )
                for peer in peers
            },
        )


def compile_own(
    plan: Plan,
    worker: WorkerId,
    *,
    tied: Ties,
    layer_bytes: Sequence[int] | None = None,
    work: Work | None = None,
) -> OwnProgram:
    """Compile the part of `worker` in the programs of `compile_programs`."""
    bodies = compile_bodies(plan, work, workers=_neighbourhood(plan, worker))
    buckets = gradient_buckets(plan, tied=tied, layer_bytes=layer_bytes)
    syncs = syncs_by_worker(buckets, plan, workers=[worker])[worker]
    return OwnProgram.of(worker, {**bodies, worker: add_sync(worker, bodies[worker], syncs)})


def compile_own_evaluation(
    plan: Plan, microbatches: int, worker: WorkerId
) -> tuple[OwnProgram, ...]:
    """Compile the part of `worker` in the programs of `compile_evaluation`, by round."""
    rounds = compile_evaluation(plan, microbatches, workers=_neighbourhood(plan, worker))
    return tuple(
        OwnProgram.of(
            worker,
            {
                member: programs[number] if number < len(programs) else ()
                for member, programs in rounds.items()
            },
        )
        for number in range(len(rounds[worker]))
    )


def _neighbourhood(plan: Plan, worker: WorkerId) -> set[WorkerId]:
    """Return `worker` and the workers of the hops before and after its own."""
    neighbourhood = {worker}
    for route in plan.routes:
        for position, hop in enumerate(route.hops):
            if worker in hop.workers:
                around = route.hops[max(0, position - 1) : position + 2]
                neighbourhood.update(member for near in around for member in near.workers)
    return neighbourhood
