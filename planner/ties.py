"""Which of the cuts of least T become templates: those with the shortest replays.

T1 + T2 + T3 knows neither messages nor which stages beside the slowest are short, so many cuts
have the same T (in a model of equal blocks nearly always) though they take differently long.
Owns that choice. Sampling draws from a fixed seed: the same profile gives the same templates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oobleck.planner.partition import Bounds, Sweep
from oobleck.planner.profile import Profile
from oobleck.planner.replay import Timelines
from oobleck.planner.stagetable import Integers, StageTable
from oobleck.planner.template import PipelineTemplate
from oobleck.planner.trace import Stages, trace

#: Cuts that are drawn for each number of nodes, beside the one that the search has found.
_SAMPLES = 5
#: Micro-batches per stage of a replay: enough to fill, run and drain.
_MICROBATCHES = 2
#: Templates of a size, for the first plan to choose among.
_SHORTLISTED = 3


def tied_cuts(
    table: StageTable, fewest: Integers, found: Mapping[int, tuple[float, Stages]]
) -> Mapping[int, tuple[Stages, ...]]:
    """By number of nodes: the cut found for it, first, and others of the same T and the same
    slowest stage. `found` has T with its cut."""
    slowest = {n: max(table.stage_time(*stage) for stage in cut) for n, (_, cut) in found.items()}
    times = np.unique(list(slowest.values()))
    bounds = Bounds(low=times, high=times, after=times - 1)
    sweep = Sweep(table, fewest, bounds, nodes=max(found), least=min(found))
    sizes = np.repeat(np.array(sorted(found), dtype=np.int64), _SAMPLES)
    rows = np.searchsorted(times, [slowest[n] for n in sizes.tolist()])
    drawn = trace(sweep, rows, sizes, np.random.default_rng(0))
    ties = {n: {cut: None} for n, (_, cut) in found.items()}
    for number, total in enumerate(drawn.totals().tolist()):
        nodes = int(sizes[number])
        if total == found[nodes][0]:
            ties[nodes][drawn.stages(number)] = None
    return {nodes: tuple(cuts) for nodes, cuts in ties.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedTemplates:
    """A few templates of one size and of least T, one of them twice where it is best and first."""

    #: Its pipeline is done first with micro-batches for all its stages.
    quickest: PipelineTemplate
    #: The first one that the search has come upon.
    found: PipelineTemplate
    #: The next quickest.
    others: tuple[PipelineTemplate, ...] = ()

    @property
    def all(self) -> tuple[PipelineTemplate, ...]:
        return tuple(dict.fromkeys((self.quickest, self.found, *self.others)))


def shortlists(
    candidates: Sequence[Sequence[PipelineTemplate]], profile: Profile
) -> list[TiedTemplates]:
    """Of each group of templates, tied and of one size, those that are worth a closer look.

    Which one suits a plan hangs on its shares of the batch and on the other pipelines, too.
    """
    pipelines = [
        (template.stages, _MICROBATCHES * len(template.stages))
        for group in candidates
        if len(group) > 1
        for template in group
    ]
    times = iter(Timelines.finish_of(pipelines, profile))
    chosen = []
    for group in candidates:
        done = [max(next(times)) if len(group) > 1 else 0.0 for _ in group]
        order = [at for _, at in sorted(zip(done, range(len(group)), strict=True))]
        few = list(dict.fromkeys((order[0], 0, *order[1:])))[:_SHORTLISTED]
        chosen.append(
            TiedTemplates(
                quickest=group[order[0]],
                found=group[0],
                others=tuple(group[at] for at in few if at not in (order[0], 0)),
            )
        )
    return chosen
