"""What each answer to the loss of one worker costs: steps in slots, links free.

    python -m bench.policies

A slot is what one stage's forward takes, its input gradient, or its weight gradient. P pipelines of
S equal stages compute M micro-batches each, and one worker is lost.

- `no loss`: before it.
- `templates`: the hit pipeline goes on with S - 1 stages, the layers spread over them, and the
  micro-batches are shared anew (in the best way).
- `re-routed`: the hole's micro-batches go through the equal stages of the other pipelines, with
  whole backwards or split ones; from the best to the worst lost stage. Each worker has room for S
  micro-batches, which is what 1F1B needs on the first stage; `2x` says for twice as many.
- `dropped`: the other pipelines compute everything (ZB-H1).
- `bound`: all work shared evenly by the workers that are left.
- `seconds`: of a processor, that a re-routed plan and its list schedule took, split, on average.

A line has two losses of one stage: re-routed, and with a stage moved behind that (`normalised`).
Another one has processor seconds for a thousand workers: what the master does, and what each does.
Further tables have answers to slow workers (`bench.uneven`), and what it costs and saves to compute
forwards ahead of time (`bench.redundant`).
"""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from bench import redundant, uneven
from bench.support.slots import bound, dropped, equal_pipelines, no_loss, replanned, slot
from oobleck.core.ids import Generation, WorkerId
from oobleck.core.plan import Plan
from oobleck.core.routes import Listing
from oobleck.core.schedules import Schedule
from oobleck.planner.programs.compiler.own import compile_own
from oobleck.planner.programs.compiler.proof import prove
from oobleck.planner.programs.listing.passes import visits_of
from oobleck.planner.programs.listing.schedule import (
    least_makespan,
    list_schedule,
    listed_routes,
    planned,
)
from oobleck.planner.recovery.moves import Moves
from oobleck.planner.recovery.normalise import MOST_SCHEDULED
from oobleck.planner.recovery.reroute import layer_count, reroute

#: Pipelines, stages, micro-batches of each.
CASES = (
    (3, 4, 4),
    (3, 4, 6),
    (3, 4, 8),
    (3, 4, 16),
    (3, 4, 32),
    (2, 4, 8),
    (8, 4, 4),
    (16, 8, 16),
    (16, 8, 32),
)
#: Example of the ReCycle paper.
EXAMPLE = (3, 4, 6)
MANY_LOSSES = (16, 8, 32)
TWO_LOSSES = (3, 4, 8)
THOUSAND = (125, 8, 32)


# ---- re-routed


@dataclass(frozen=True, kw_only=True)
class Rerouted:
    #: Slots of a step, by lost stage.
    slots: tuple[int, ...]
    mean_s: float

    def __str__(self) -> str:
        least, most = min(self.slots), max(self.slots)
        return f"{least}" if least == most else f"{least}-{most}"


def rerouted(pipelines: int, stages: int, microbatches: int, *, split: bool, kept: int) -> Rerouted:
    """Return the slots after the loss of each worker of the last pipeline in turn."""
    whole = equal_pipelines(pipelines, stages, microbatches)
    started = time.process_time()
    slots = tuple(
        rerouted_slots(whole, lost.workers, split=split, kept=kept)
        for lost in whole.pipelines[-1].stages
    )
    return Rerouted(slots=slots, mean_s=(time.process_time() - started) / stages)


def rerouted_slots(whole: Plan, lost: Collection[WorkerId], *, split: bool, kept: int) -> int:
    plan = reroute(whole, lost, generation=Generation(2))
    return list_schedule(plan, slot, dict.fromkeys(plan.workers, kept), split=split).makespan


def least_slots(whole: Plan, lost_stage: int, *, split: bool, kept: int) -> int:
    """Return a lower bound of the slots, for any order of compute."""
    lost = whole.pipelines[-1].stages[lost_stage].workers
    plan = reroute(whole, lost, generation=Generation(2))
    room = dict.fromkeys(plan.workers, kept)
    routes = tuple(range(len(plan.routes)))
    return least_makespan(visits_of(plan, slot, room, split=split, routes=routes))


def normalised_slots(whole: Plan, lost: Collection[WorkerId], *, kept: int) -> int:
    """Return the slots after the best move of a stage to a least loaded worker."""
    plan = reroute(whole, lost, generation=Generation(2))
    moves = Moves(whole, plan, layer_count)
    behind = [moves.behind(move.taken) for move in moves.by_load(MOST_SCHEDULED)[:MOST_SCHEDULED]]
    moved = [replace(plan, holds=holds, routes=routes) for holds, routes in behind]
    room = dict.fromkeys(plan.workers, kept)
    return min(list_schedule(each, slot, room, split=True).makespan for each in moved)


def two_losses(pipelines: int, stages: int, microbatches: int) -> str:
    """Format the slots after two losses of the same stage, by stage."""
    case = pipelines, stages, microbatches
    whole = equal_pipelines(*case)
    lost = [
        [worker for pipeline in whole.pipelines[-2:] for worker in pipeline.stages[stage].workers]
        for stage in range(stages)
    ]
    by_stage = [rerouted_slots(whole, each, split=True, kept=stages) for each in lost]
    moved = [normalised_slots(whole, each, kept=stages) for each in lost]
    left = 3 * pipelines * stages * microbatches / (pipelines * stages - 2)
    return (
        f"{pipelines} x {stages} with {microbatches}, two losses of one stage, by stage: re-routed "
        f"{by_stage}, normalised {moved}; templates "
        f"{replanned('zb-h1', *case, hits=2):.4g}; bound {left:.1f}"
    )


def thousand(pipelines: int, stages: int, microbatches: int) -> str:
    """Format the processor seconds of each part of the way from a loss to programs, without
    caches."""
    whole = equal_pipelines(pipelines, stages, microbatches)
    lost = whole.pipelines[-1].stages[stages // 2].workers
    moments = [time.process_time()]
    routed = reroute(whole, lost, generation=Generation(2))
    moments.append(time.process_time())
    hops = tuple(tuple(slot(hop) for hop in route.hops) for route in routed.routes)
    room = (stages,) * len(routed.workers)
    plan = replace(routed, listing=Listing(hops=hops, room=room, split=True))
    planned(plan)
    moments.append(time.process_time())
    prove(plan)
    moments.append(time.process_time())
    compile_own(plan, plan.workers[0], tied=False)
    moments.append(time.process_time())
    routing, listing, proof, programs = (after - begin for begin, after in pairwise(moments))
    return (
        f"{pipelines} x {stages} with {microbatches}, a worker lost, {len(listed_routes(plan))} of "
        f"{len(plan.routes)} routes listed: re-routed in {routing:.3f} s, list-scheduled in "
        f"{listing:.3f} s, proven in {proof:.3f} s, together {routing + listing + proof:.3f} s; on "
        f"each worker the list schedule and its own program {listing + programs:.3f} s"
    )


# ---- the table


def row(pipelines: int, stages: int, microbatches: int) -> Iterator[str]:
    case = pipelines, stages, microbatches
    yield f"{pipelines}x{stages}, {microbatches}"
    for schedule in SHOWN:
        yield f"{no_loss(schedule, stages, microbatches):g}"
    for schedule in SHOWN:
        yield f"{replanned(schedule, *case):.4g}"
    split = rerouted(*case, split=True, kept=stages)
    yield str(rerouted(*case, split=False, kept=stages))
    yield str(split)
    yield str(rerouted(*case, split=False, kept=2 * stages))
    yield str(rerouted(*case, split=True, kept=2 * stages))
    yield f"{dropped('zb-h1', *case):g}"
    yield f"{bound(*case):.1f}"
    yield f"{split.mean_s:.3f}"


SHOWN: tuple[Schedule, ...] = ("1f1b", "zb-h1")
HEADS = (
    "", "no loss", "", "templates", "", "re-routed", "", "re-routed 2x", "", "dropped", "bound",
    "seconds",
)  # fmt: skip
BELOW = (
    "P x S, M", "1F1B", "ZB-H1", "1F1B", "ZB-H1", "fused", "split", "fused", "split", "ZB-H1", "",
    "",
)  # fmt: skip


def main() -> None:
    for line in (HEADS, BELOW):
        print("".join(f"{cell:>12}" for cell in line))
    for case in CASES:
        print("".join(f"{cell:>12}" for cell in row(*case)), flush=True)
    name, kept = "{} x {} with {}".format(*EXAMPLE), EXAMPLE[1]
    found = rerouted(*EXAMPLE, split=True, kept=kept)
    least = tuple(
        least_slots(equal_pipelines(*EXAMPLE), stage, split=True, kept=kept)
        for stage in range(EXAMPLE[1])
    )
    print(f"\nReCycle's example, {name}, split, by lost stage: {found.slots}; no less than {least}")
    pipelines, stages, microbatches = MANY_LOSSES
    whole = equal_pipelines(*MANY_LOSSES)
    lost = [
        worker
        for number, pipeline in enumerate(whole.pipelines)
        for worker in pipeline.stages[number % stages].workers
    ]
    slots = [rerouted_slots(whole, lost, split=True, kept=kept * stages) for kept in (1, 2)]
    left = 3 * pipelines * stages * microbatches / (len(whole.workers) - len(lost))
    print(
        f"{pipelines} x {stages} with {microbatches}, a worker of each pipeline lost, split: "
        f"{slots[0]}, with twice the memory {slots[1]}; bound {left:.1f}"
    )
    print(two_losses(*TWO_LOSSES))
    print(thousand(*THOUSAND))
    print(f"\n{uneven.PIPELINES} x {uneven.STAGES} with {uneven.MICROBATCHES} and slow workers:")
    print("\n".join(uneven.table()))
    print("\nForwards of the next stage computed ahead of time:")
    print("\n".join(redundant.table((stages, count) for _, stages, count in CASES)))


if __name__ == "__main__":
    main()
