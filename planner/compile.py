"""From a plan to one program per worker, by lowering passes.

Owns the order of compute (1F1B) and where the communication stands in it. Each pass takes and
gives instruction lists: compute schedule -> with tokens, sends and receives -> with gradient sync,
vote and optimizer step. Must not know times: `oobleck.planner.simulate` judges the result.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from oobleck.planner.ids import WorkerId
from oobleck.planner.plan import Pipeline, Plan
from oobleck.planner.program import (
    Backward,
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
    SyncGradient,
    Vote,
)


def compile_programs(plan: Plan, *, tied: bool) -> Mapping[WorkerId, Program]:
    """The program of every worker of `plan`, in rank order; `tied`: the head shares layer 0's
    token embedding."""
    bodies: dict[WorkerId, list[Instruction]] = {}
    for number, pipeline in enumerate(plan.pipelines):
        for stage in range(len(pipeline.stages)):
            worker = _stage_worker(pipeline, stage)
            if worker in bodies:
                raise ValueError(f"worker {worker} stands in more than one stage")
            bodies[worker] = list(
                add_communication(one_forward_one_backward(number, pipeline, stage), pipeline)
            )
    buckets = gradient_buckets(plan, tied=tied)
    layers = plan.holdings()
    return {w: _finish(w, layers[w], bodies[w], buckets) for w in plan.workers}


def _stage_worker(pipeline: Pipeline, stage: int) -> WorkerId:
    workers = pipeline.stages[stage].workers
    if len(workers) != 1:
        raise ValueError(
            f"stage {stage} stands on {len(workers)} workers; stages of several workers are not "
            "supported yet: plan with a profile that has times for 1 GPU only"
        )
    return workers[0]


# ---- pass 1: compute


def one_forward_one_backward(
    number: int, pipeline: Pipeline, stage: int
) -> Iterator[Forward | Backward]:
    """1F1B: as many forwards ahead as stages follow, then alternate, then the rest backward."""
    microbatches = range(
        pipeline.first_microbatch, pipeline.first_microbatch + pipeline.microbatches
    )
    warm_up = min(len(pipeline.stages) - 1 - stage, len(microbatches))
    for microbatch in microbatches[:warm_up]:
        yield Forward(pipeline=number, stage=stage, microbatch=microbatch)
    for ahead, microbatch in enumerate(microbatches[warm_up:]):
        yield Forward(pipeline=number, stage=stage, microbatch=microbatch)
        yield Backward(pipeline=number, stage=stage, microbatch=microbatches[ahead])
    for microbatch in microbatches[len(microbatches) - warm_up :]:
        yield Backward(pipeline=number, stage=stage, microbatch=microbatch)


# ---- pass 2: tokens, sends and receives


def add_communication(
    schedule: Iterator[Forward | Backward], pipeline: Pipeline
) -> Iterator[Instruction]:
    """Receives stand right before their use, sends right after what they send."""
    last = len(pipeline.stages) - 1
    for step in schedule:
        number, stage, microbatch = step.pipeline, step.stage, step.microbatch
        before = _stage_worker(pipeline, stage - 1) if stage > 0 else None
        after = _stage_worker(pipeline, stage + 1) if stage < last else None
        if isinstance(step, Forward):
            if before is None or after is None:
                yield LoadTokens(pipeline=number, stage=stage, microbatch=microbatch)
            if before is not None:
                yield ReceiveActivation(
                    pipeline=number, stage=stage, microbatch=microbatch, peer=before
                )
            yield step
            if after is not None:
                yield SendActivation(
                    pipeline=number, stage=stage, microbatch=microbatch, peer=after
                )
        else:
            if after is not None:
                yield ReceiveGradient(
                    pipeline=number, stage=stage, microbatch=microbatch, peer=after
                )
            yield step
            if before is not None:
                yield SendGradient(pipeline=number, stage=stage, microbatch=microbatch, peer=before)


# ---- pass 3: gradient sync, vote, optimizer step


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parts that are summed over the same workers in one go."""

    owners: tuple[WorkerId, ...]
    parts: tuple[LayerPart, ...]


def gradient_buckets(plan: Plan, *, tied: bool) -> tuple[Bucket, ...]:
    """One bucket for each distinct set of owners, highest layers first; the index is the number.

    A part is in a bucket exactly when its owners are the bucket's, so every owner holds every
    `own` part of it. The tied part is one part with two places: its owners are the holders of
    layer 0 and of the head, and each syncs what it holds of it.
    """
    holders: dict[int, set[WorkerId]] = {layer: set() for layer in range(plan.layer_count)}
    for worker, layers in plan.holdings().items():
        for layer in layers:
            holders[layer].add(worker)
    by_owners: dict[tuple[WorkerId, ...], list[LayerPart]] = defaultdict(list)
    for layer, workers in holders.items():
        by_owners[tuple(sorted(workers))].append(LayerPart(layer=layer, part="own"))
    if tied:
        ends = sorted({0, plan.layer_count - 1})
        owners = tuple(sorted(set().union(*(holders[layer] for layer in ends))))
        by_owners[owners].extend(LayerPart(layer=layer, part="tied") for layer in ends)
    # No two owner sets share an own part's layer, so only the tied bucket can need the tie-break.
    order = sorted(
        by_owners, key=lambda owners: (-max(part.layer for part in by_owners[owners]), owners)
    )
    return tuple(Bucket(owners=owners, parts=tuple(by_owners[owners])) for owners in order)


def _finish(
    worker: WorkerId, layers: range, body: list[Instruction], buckets: tuple[Bucket, ...]
) -> Program:
    syncs: list[SyncGradient] = []
    norm: list[LayerPart] = []
    for number, bucket in enumerate(buckets):
        if worker not in bucket.owners:
            continue
        parts = tuple(part for part in bucket.parts if part.layer in layers)
        syncs.append(SyncGradient(bucket=number, parts=parts, owners=bucket.owners))
        if worker == bucket.owners[0]:  # one counts for all; the two places of tied are one part
            norm += [part for part in parts if part.part == "own"]
            norm += [part for part in parts if part.part == "tied"][:1]
    return (*body, *syncs, Vote(norm_parts=tuple(sorted(norm))), OptimizerStep())
