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
- `seconds`: what a re-routed plan and its list schedule took, split, on average.

A line has two losses of one stage: re-routed, and with a stage moved behind that (`normalised`).
Another table has answers to slow workers (`bench.uneven`).
"""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from bench import uneven
from oobleck.planner.ids import Generation, NodeName, WorkerId
from oobleck.planner.programs.instructions import BackwardWeight, Forward
from oobleck.planner.programs.listing.bound import least_makespan
from oobleck.planner.programs.listing.schedule import list_schedule
from oobleck.planner.programs.listing.visits import visits_of
from oobleck.planner.programs.pipeline import Pipeline
from oobleck.planner.programs.plan import Plan
from oobleck.planner.programs.routes import Hold, Hop
from oobleck.planner.programs.schedule import compute_order, splits_backward
from oobleck.planner.programs.ticks import HopTicks
from oobleck.planner.recovery.moves import Moves
from oobleck.planner.recovery.normalise import MOST_SCHEDULED
from oobleck.planner.recovery.reroute import layer_count, reroute
from oobleck.planner.schedules import Schedule

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
#: ReCycle's.
EXAMPLE = (3, 4, 6)
MANY_LOSSES = (16, 8, 32)
TWO_LOSSES = (3, 4, 8)


# ---- pipelines by their closed forms


def ticks_of(schedule: Schedule, *, stages: int, microbatches: int, slot: int = 1) -> int:
    """A step of one pipeline, where a slot takes so many ticks: each stage keeps its order."""
    orders = [
        list(compute_order(schedule, stages=stages, stage=stage, microbatches=microbatches))
        for stage in range(stages)
    ]
    clocks, done = [0] * stages, [0] * stages
    forward: dict[tuple[int, int], int] = {}
    backward: dict[tuple[int, int], int] = {}
    while any(done[stage] < len(orders[stage]) for stage in range(stages)):
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                kind, m = order[done[stage]]
                arrived: int | None = 0
                if kind is Forward:
                    arrived = forward.get((stage - 1, m)) if stage else 0
                elif kind is not BackwardWeight:
                    last = stage == stages - 1
                    arrived = forward.get((stage, m)) if last else backward.get((stage + 1, m))
                if arrived is None:
                    break
                whole = not (splits_backward(schedule) and stage > 0)
                slots = 2 if kind is not Forward and whole else 1
                clocks[stage] = max(clocks[stage], arrived) + slots * slot
                done[stage] += 1
                if kind is not BackwardWeight:
                    (forward if kind is Forward else backward)[stage, m] = clocks[stage]
    return max(clocks)


def no_loss(schedule: Schedule, stages: int, microbatches: int) -> float:
    return ticks_of(schedule, stages=stages, microbatches=microbatches)


def replanned(
    schedule: Schedule, pipelines: int, stages: int, microbatches: int, *, hits: int = 1
) -> float:
    """Some pipelines with a stage less; a slot there takes S / (S - 1) of one elsewhere."""
    best = None
    for hit in range(1, microbatches + 1):
        others = -(-(pipelines * microbatches - hits * hit) // (pipelines - hits))
        found = max(
            ticks_of(schedule, stages=stages, microbatches=others, slot=stages - 1),
            ticks_of(schedule, stages=stages - 1, microbatches=hit, slot=stages),
        )
        best = found if best is None else min(best, found)
    assert best is not None
    return best / (stages - 1)


def dropped(schedule: Schedule, pipelines: int, stages: int, microbatches: int) -> float:
    return no_loss(schedule, stages, -(-pipelines * microbatches // (pipelines - 1)))


def bound(pipelines: int, stages: int, microbatches: int) -> float:
    return 3 * pipelines * stages * microbatches / (pipelines * stages - 1)


# ---- re-routed


def equal_pipelines(pipelines: int, stages: int, microbatches: int) -> Plan:
    made = []
    for pipeline in range(pipelines):
        nodes = tuple(NodeName(f"p{pipeline}s{stage}") for stage in range(stages))
        holds = tuple(
            Hold(first_layer=stage, last_layer=stage, workers=(WorkerId(node, 0),))
            for stage, node in enumerate(nodes)
        )
        made.append(Pipeline(nodes=nodes, stages=holds, microbatches=microbatches))
    return Plan.of_pipelines(made, generation=Generation(1))


@dataclass(frozen=True, kw_only=True)
class Rerouted:
    #: By lost stage.
    slots: tuple[int, ...]
    mean_s: float

    def __str__(self) -> str:
        least, most = min(self.slots), max(self.slots)
        return f"{least}" if least == most else f"{least}-{most}"


def slot(hop: Hop) -> HopTicks:
    return HopTicks(
        forward=1, backward_input=1, backward_weight=1, message=0, kept_bytes=1, deferred_bytes=1
    )


def rerouted(pipelines: int, stages: int, microbatches: int, *, split: bool, kept: int) -> Rerouted:
    """A worker of the last pipeline is lost, each in its turn."""
    whole = equal_pipelines(pipelines, stages, microbatches)
    started = time.perf_counter()
    slots = tuple(
        rerouted_slots(whole, lost.workers, split=split, kept=kept)
        for lost in whole.pipelines[-1].stages
    )
    return Rerouted(slots=slots, mean_s=(time.perf_counter() - started) / stages)


def rerouted_slots(whole: Plan, lost: Collection[WorkerId], *, split: bool, kept: int) -> int:
    plan = reroute(whole, lost, generation=Generation(2))
    return list_schedule(plan, slot, dict.fromkeys(plan.workers, kept), split=split).makespan


def least_slots(whole: Plan, lost_stage: int, *, split: bool, kept: int) -> int:
    """No order of compute takes less."""
    lost = whole.pipelines[-1].stages[lost_stage].workers
    plan = reroute(whole, lost, generation=Generation(2))
    room = dict.fromkeys(plan.workers, kept)
    routes = tuple(range(len(plan.routes)))
    return least_makespan(visits_of(plan, slot, room, split=split, routes=routes))


def normalised_slots(whole: Plan, lost: Collection[WorkerId], *, kept: int) -> int:
    """Of the moves of a stage with the least load the best one."""
    plan = reroute(whole, lost, generation=Generation(2))
    moves = Moves(whole, plan, layer_count)
    behind = [moves.behind(move.taken) for move in moves.by_load(MOST_SCHEDULED)[:MOST_SCHEDULED]]
    moved = [replace(plan, holds=holds, routes=routes) for holds, routes in behind]
    room = dict.fromkeys(plan.workers, kept)
    return min(list_schedule(each, slot, room, split=True).makespan for each in moved)


def two_losses(pipelines: int, stages: int, microbatches: int) -> str:
    """Of the same stage: by the stage."""
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
    print(f"\n{uneven.PIPELINES} x {uneven.STAGES} with {uneven.MICROBATCHES} and slow workers:")
    print("\n".join(uneven.table()))


if __name__ == "__main__":
    main()
