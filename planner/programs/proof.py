"""Proof that nobody waits for ever for a message in a plan's programs, before any worker sees it.

A plan is proven by dry runs (`oobleck.planner.programs.dryrun`) of small pieces of programs that
stand for it. They are remembered, so that a plan costs only what is new in it. A message names a
stage's worker by its place in the piece (p0s1/0: stage 1). Why pieces are enough:

1. Pipelines meet in gradient sums and in the vote alone, and a program does not stop for a sum
   before the vote. So messages are proven pipeline by pipeline.
2. Until the vote a stage waits for the stage before it or after it. So if some waited for ever, two
   neighbours would wait for each other, whatever the others do. It is enough to run each two
   neighbours, at their places in the pipeline, while what comes from others is there.
3. The stages after a pair say how many forwards it is ahead. After those each further micro-batch
   is one more round of the same instructions, which leaves the links as it found them: what passes
   once passes always. So a pair is run with a few rounds.

Not proven here: sums of gradients, of which every worker has its part of one list in one order
(`oobleck.planner.programs.gradients`), though it starts those of other owners as they become ready;
and what workers compile themselves. A step that is done again in part after a loss has the order of
a step, less what is left out on both ends of a link; an evaluation only goes forward. Tests run
all of these.
"""

from collections.abc import Sequence
from functools import lru_cache

from oobleck.planner.ids import Generation, NodeName, WorkerId
from oobleck.planner.programs.compile import add_communication, stage_compute
from oobleck.planner.programs.dryrun import dry_run
from oobleck.planner.programs.plan import Pipeline, Plan, Stage
from oobleck.planner.schedules import Schedule

#: Micro-batches of a run beyond those that fill the stages.
_ROUNDS = 4


def prove(plan: Plan) -> None:
    """Raises ProgramDeadlock with who waits for what."""
    kinds = {(tuple(len(s.workers) for s in p.stages), p.microbatches) for p in plan.pipelines}
    for widths, microbatches in sorted(kinds):
        for before in range(max(1, len(widths) - 1)):
            pair = widths[before : before + 2]
            after = len(widths) - before - len(pair)
            _prove_messages(plan.schedule, pair, before, after, min(microbatches, after + _ROUNDS))


@lru_cache(maxsize=4096)
def _prove_messages(
    schedule: Schedule, pair: tuple[int, ...], before: int, after: int, microbatches: int
) -> None:
    """Run two neighbour stages of these numbers of workers, or the only one, with so many stages
    before and after them. Sends end at once."""
    widths = ((1,) * before, pair, (1,) * after)
    plan = _plan([width for part in widths for width in part], schedule, microbatches)
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
        for number in range(before, before + len(pair))
        for member, worker in enumerate(pipeline.stages[number].workers)
    }
    dry_run(programs, plan)


def _plan(widths: Sequence[int], schedule: Schedule, microbatches: int) -> Plan:
    """One pipeline, each stage a layer on a node of its own."""
    nodes = tuple(NodeName(f"p0s{number}") for number in range(len(widths)))
    stages = tuple(
        Stage(
            first_layer=number,
            last_layer=number,
            workers=tuple(WorkerId(node, slot) for slot in range(width)),
        )
        for number, (node, width) in enumerate(zip(nodes, widths, strict=True))
    )
    pipeline = Pipeline(nodes=nodes, stages=stages, first_microbatch=0, microbatches=microbatches)
    return Plan(generation=Generation(0), pipelines=(pipeline,), schedule=schedule)


def forget() -> None:
    """Prove everything anew."""
    _prove_messages.cache_clear()
