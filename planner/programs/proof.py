"""Proof that nobody waits for ever in a plan's programs, before any worker sees the plan.

A plan is proven by dry runs (`oobleck.planner.programs.dryrun`) of small pieces of programs that
stand for it. They are remembered, so that a plan costs only what is new in it. A message names a
stage's worker by its place in the piece (p0s1/0: pipeline 0, stage 1). Why pieces are enough:

1. Pipelines meet in gradient sums and in the vote alone, and a program does not stop for a sum
   before the vote. So messages are proven pipeline by pipeline, and sums by themselves.
2. Until the vote a stage waits for the stage before it or after it. So if some waited for ever, two
   neighbours would wait for each other, whatever the others do. It is enough to run each two
   neighbours, while what comes from others is there.
3. The stages before a pair change only when it computes weight gradients, which nobody waits for,
   and whether there are any. The stages after it say how many forwards it is ahead. After those
   each further micro-batch is one more round of the same instructions, which leaves the links as it
   found them: what passes once passes always. So a pair is run with a few rounds.
4. The cuts of the pipelines say which sums there are, and in which order a worker comes to them.
   All pipelines of a cut join in the same sums, and layers that no cut separates are as one. So
   sums are proven by one pipeline of every cut, together.

Not proven here: what workers compile themselves. A step that is done again in part after a loss has
the order of a step, less what is left out on both ends of a link; an evaluation only goes forward.
Tests run both.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

from oobleck.planner.ids import Generation, NodeName, WorkerId
from oobleck.planner.programs.compile import add_communication, add_sync, stage_compute
from oobleck.planner.programs.dryrun import dry_run
from oobleck.planner.programs.gradients import gradient_buckets, syncs_by_worker
from oobleck.planner.programs.plan import Pipeline, Plan, Stage
from oobleck.planner.schedules import Schedule

#: Of each stage its first layer and its number of workers.
Cut = tuple[tuple[int, int], ...]

#: Micro-batches of a run beyond those that fill the stages.
_ROUNDS = 4


def prove(plan: Plan, *, tied: bool) -> None:
    """Raises ProgramDeadlock with who waits for what."""
    kinds = {
        (tuple((s.first_layer, len(s.workers)) for s in p.stages), p.microbatches)
        for p in plan.pipelines
    }
    for cut, microbatches in sorted(kinds):
        widths = [width for _, width in cut]
        for before in range(max(1, len(cut) - 1)):
            after = max(0, len(cut) - 2 - before)
            _prove_messages(
                plan.schedule,
                (*widths[:before][-1:], *widths[before : before + 2], *(1,) * after),
                min(before, 1),
                min(microbatches, after + _ROUNDS),
            )
    starts = sorted({first for cut, _ in kinds for first, _ in cut})
    place = {first: number for number, first in enumerate(starts)}
    cuts = {tuple((place[first], width) for first, width in cut) for cut, _ in kinds}
    _prove_sums(tuple(sorted(cuts)), tied)


@lru_cache(maxsize=4096)
def _prove_messages(
    schedule: Schedule, widths: tuple[int, ...], first: int, microbatches: int
) -> None:
    """Run stages number `first` and the next one of a pipeline of stages of these numbers of
    workers, where sends end at once and where they block."""
    plan = _plan([tuple(enumerate(widths))], len(widths), schedule, microbatches)
    (pipeline,) = plan.pipelines
    programs = {
        worker: tuple(
            add_communication(
                stage_compute(schedule, 0, pipeline, number, range(microbatches)),
                pipeline,
                member,
                lowest={},
            )
        )
        for number in range(first, min(first + 2, len(widths)))
        for member, worker in enumerate(pipeline.stages[number].workers)
    }
    for blocking in (False, True):
        dry_run(programs, plan, blocking_sends=blocking)


@lru_cache(maxsize=4096)
def _prove_sums(cuts: tuple[Cut, ...], tied: bool) -> None:
    """Run the sums of one pipeline of each cut."""
    layers = 1 + max(first for cut in cuts for first, _ in cut)
    plan = _plan(cuts, layers, "1f1b", 1)
    syncs = syncs_by_worker(gradient_buckets(plan, tied=tied), plan)
    dry_run({worker: add_sync(worker, (), syncs[worker]) for worker in plan.workers}, plan)


def _plan(cuts: Iterable[Cut], layers: int, schedule: Schedule, microbatches: int) -> Plan:
    """One pipeline of each cut, each stage on a node of its own."""
    pipelines = []
    for number, cut in enumerate(cuts):
        nodes = tuple(NodeName(f"p{number}s{stage}") for stage in range(len(cut)))
        ends = pairwise([*(first for first, _ in cut), layers])
        stages = tuple(
            Stage(
                first_layer=first,
                last_layer=stop - 1,
                workers=tuple(WorkerId(node, slot) for slot in range(width)),
            )
            for node, (first, stop), (_, width) in zip(nodes, ends, cut, strict=True)
        )
        pipelines.append(
            Pipeline(
                nodes=nodes,
                stages=stages,
                first_microbatch=number * microbatches,
                microbatches=microbatches,
            )
        )
    return Plan(generation=Generation(0), pipelines=tuple(pipelines), schedule=schedule)


def forget() -> None:
    """Prove everything anew."""
    _prove_messages.cache_clear()
    _prove_sums.cache_clear()
