"""From a plan to one program per worker, by lowering passes.

Owns where the communication stands in the order of compute, which
`oobleck.planner.programs.schedule` gives. Each pass takes and gives instruction lists: compute
schedule -> with tokens, sends and receives -> with gradient sync, vote and optimizer step. Must not
know times, nor whether anybody waits for ever: `oobleck.planner.programs.proof` does.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from oobleck.planner.ids import WorkerId
from oobleck.planner.programs.gradients import gradient_buckets, syncs_by_worker
from oobleck.planner.programs.instructions import (
    WHOLE,
    Backward,
    BackwardInput,
    Compute,
    Forward,
    Instruction,
    LayerPart,
    LoadTokens,
    OptimizerStep,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Share,
    SyncGradient,
    Vote,
)
from oobleck.planner.programs.plan import Pipeline, Plan
from oobleck.planner.programs.schedule import compute_order
from oobleck.planner.programs.work import Work
from oobleck.planner.schedules import Schedule

#: Micro-batches of a pipeline in one round of an evaluation.
EVALUATION_ROUND = 8


def compile_programs(
    plan: Plan,
    *,
    tied: bool,
    layer_bytes: Sequence[int] | None = None,
    work: Work | None = None,
) -> Mapping[WorkerId, Program]:
    """The program of every worker of `plan`, in rank order, for the plan's shares or for `work`.

    `tied`: the head shares layer 0's token embedding; `layer_bytes`: of each layer's gradient, to
    have sums of large ones split.
    """
    bodies: dict[WorkerId, list[Instruction]] = {}
    lowest = {} if work is None else work.lowest
    for number, pipeline in enumerate(plan.pipelines):
        first = pipeline.first_microbatch
        share: Sequence[int] = range(first, first + pipeline.microbatches)
        if work is not None:
            share = work.microbatches[number]
        for position, stage in enumerate(pipeline.stages):
            compute = [
                step
                for step in stage_compute(plan.schedule, number, pipeline, position, share)
                if isinstance(step, Forward) or lowest.get(step.microbatch, 0) <= stage.last_layer
            ]
            for member, worker in enumerate(stage.workers):
                if worker in bodies:
                    raise ValueError(f"worker {worker} stands in more than one stage")
                bodies[worker] = list(add_communication(compute, pipeline, member, lowest))
    syncs = syncs_by_worker(gradient_buckets(plan, tied=tied, layer_bytes=layer_bytes), plan)
    return {worker: add_sync(worker, bodies[worker], syncs[worker]) for worker in sorted(bodies)}


def compile_evaluation(plan: Plan, microbatches: int) -> Mapping[WorkerId, tuple[Program, ...]]:
    """What every worker of `plan` does to have micro-batches 0 to `microbatches` - 1 evaluated.

    Only forward; each pipeline takes a share like that of the batch. In rounds: at the end of each
    a worker waits until its sends have arrived, so that no stage runs far ahead of the next one.
    """
    whole = sum(pipeline.microbatches for pipeline in plan.pipelines)
    rounds: dict[WorkerId, tuple[Program, ...]] = {}
    for number, pipeline in enumerate(plan.pipelines):
        first = pipeline.first_microbatch
        share = range(
            microbatches * first // whole,
            microbatches * (first + pipeline.microbatches) // whole,
        )
        pieces = [
            share[at : at + EVALUATION_ROUND] for at in range(0, len(share), EVALUATION_ROUND)
        ]
        for position, stage in enumerate(pipeline.stages):
            for member, worker in enumerate(stage.workers):
                rounds[worker] = tuple(
                    tuple(
                        add_communication(
                            [Forward(pipeline=number, stage=position, microbatch=m) for m in piece],
                            pipeline,
                            member,
                            lowest={},
                        )
                    )
                    for piece in pieces
                )
    return rounds


# ---- pass 1: compute


def stage_compute(
    schedule: Schedule, number: int, pipeline: Pipeline, stage: int, share: Sequence[int]
) -> Iterator[Compute]:
    """The compute of one stage, the same on all its workers, over the micro-batches `share`."""
    order = compute_order(
        schedule, stages=len(pipeline.stages), stage=stage, microbatches=len(share)
    )
    for kind, index in order:
        yield kind(pipeline=number, stage=stage, microbatch=share[index])


# ---- pass 2: tokens, sends and receives


def add_communication(
    compute: Iterable[Compute], pipeline: Pipeline, member: int, lowest: Mapping[int, int]
) -> Iterator[Instruction]:
    """Receives stand right before their use, sends right after what they send.

    `member`: which worker of the stage it is; between stages of different numbers of workers each
    talks to those that hold the same rows. Gradients go no further than to the stage of layer
    `lowest` of their micro-batch, by default layer 0.
    """
    last = len(pipeline.stages) - 1
    peers: dict[tuple[int, int], list[tuple[WorkerId, Share]]] = {}
    for step in compute:
        number, stage, microbatch = step.pipeline, step.stage, step.microbatch
        for side in (stage - 1, stage + 1):
            if (stage, side) not in peers:
                peers[stage, side] = list(_peers(pipeline, stage, member, side))
        before, after = peers[stage, stage - 1], peers[stage, stage + 1]
        if isinstance(step, Forward):
            if stage in (0, last):
                yield LoadTokens(pipeline=number, stage=stage, microbatch=microbatch)
            for peer, share in before:
                yield ReceiveActivation(
                    pipeline=number, stage=stage, microbatch=microbatch, peer=peer, share=share
                )
            yield step
            for peer, share in after:
                yield SendActivation(
                    pipeline=number, stage=stage, microbatch=microbatch, peer=peer, share=share
                )
        elif isinstance(step, Backward | BackwardInput):
            for peer, share in after:
                yield ReceiveGradient(
                    pipeline=number, stage=stage, microbatch=microbatch, peer=peer, share=share
                )
            yield step
            if pipeline.stages[stage].first_layer <= lowest.get(microbatch, 0):
                continue
            for peer, share in before:
                yield SendGradient(
                    pipeline=number, stage=stage, microbatch=microbatch, peer=peer, share=share
                )
        else:
            yield step


def _peers(
    pipeline: Pipeline, stage: int, member: int, neighbour: int
) -> Iterator[tuple[WorkerId, Share]]:
    """Who of stage `neighbour` holds rows that worker `member` of `stage` holds, and which."""
    if not 0 <= neighbour < len(pipeline.stages):
        return
    workers = pipeline.stages[neighbour].workers
    own = len(pipeline.stages[stage].workers)
    if own == len(workers):
        yield workers[member], WHOLE if own == 1 else Share(member, member + 1, own)
        return
    of = math.lcm(own, len(workers))
    start, stop = member * of // own, (member + 1) * of // own
    width = of // len(workers)
    cuts = sorted({start, stop, *(cut for cut in range(0, of, width) if start < cut < stop)})
    for begin, end in pairwise(cuts):
        yield workers[begin // width], Share(begin, end, of)


# ---- pass 3: gradient sync, vote, optimizer step


def add_sync(
    worker: WorkerId, body: Iterable[Instruction], syncs: Iterable[SyncGradient]
) -> Program:
    """The sums stand after the stage's last weight gradient, when all its layers are ready; the
    executor starts each as soon as its own layers are."""
    syncs = tuple(syncs)
    norm: list[LayerPart] = []
    for sync in syncs:
        # One counts for all, in turns: everybody waits for the last. The own parts are the same on
        # all owners; the two places of tied are one part.
        own = [part for part in sync.parts if part.part == "own"]
        norm += own[sync.owners.index(worker) :: len(sync.owners)]
        if worker == sync.owners[0]:
            norm += [part for part in sync.parts if part.part == "tied"][:1]
    return (*body, *syncs, Vote(norm_parts=tuple(sorted(norm))), OptimizerStep())
