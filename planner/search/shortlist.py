"""Choice of the cuts of least T that become templates: those with the shortest replays.

T1 + T2 + T3 ignores messages and which stages beside the slowest are short. So many cuts have the
same T (in a model of equal blocks nearly always) but different step times. Owns that choice.
Sampling draws from a fixed seed: the same profile gives the same templates.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from oobleck.core.plan import PipelineTemplate
from oobleck.core.profile import Profile
from oobleck.planner.cost.formula import PipelineCost, pipeline_cost
from oobleck.planner.cost.kinds import Cut, Kind, template_cut
from oobleck.planner.cost.replay import computed_s
from oobleck.planner.cost.stagetable import Floats, Integers, Stages, StageTable
from oobleck.planner.search.partition import Bounds, Sweep, swept_together
from oobleck.planner.search.trace import trace

#: Cuts that are drawn for each number of nodes, beside the one that the search found.
_SAMPLES = 5
#: Micro-batches per stage of a replay: enough to fill, run and drain.
_MICROBATCHES = 2
#: Templates of a size for the first plan to choose among.
_SHORTLISTED = 3


def equal_cuts(
    table: StageTable, fewest: Integers, found: Mapping[int, tuple[float, Stages]]
) -> Mapping[int, tuple[Stages, ...]]:
    """Return for each number of nodes the cut found for it, first, and others of the same T and the
    same slowest stage. `found` has T with its cut."""
    slowest = {n: max(table.stage_time(*stage) for stage in cut) for n, (_, cut) in found.items()}
    ties = {n: {cut: None} for n, (_, cut) in found.items()}
    sample = np.random.default_rng(0)
    sizes = np.array(sorted(found, key=lambda n: (slowest[n], n)), dtype=np.int64)
    while len(sizes):
        rows = np.array([slowest[n] for n in sizes.tolist()])
        count = swept_together(table, rows, sizes)
        for nodes, total, cut in _drawn(table, fewest, rows[:count], sizes[:count], sample):
            if total == found[nodes][0]:
                ties[nodes][cut] = None
        sizes = sizes[count:]
    return {nodes: tuple(cuts) for nodes, cuts in ties.items()}


def _drawn(
    table: StageTable,
    fewest: Integers,
    slowest: Floats,
    sizes: Integers,
    sample: np.random.Generator,
) -> Iterator[tuple[int, float, Stages]]:
    """Yield cuts of least T for each size and its slowest stage: number of nodes, T and cut."""
    times = np.unique(slowest)
    bounds = Bounds(low=times, high=times, after=times - 1)
    sweep = Sweep(table, fewest, bounds, nodes=int(sizes.max()), least=int(sizes.min()))
    queries = np.repeat(sizes, _SAMPLES)
    cuts = trace(sweep, np.repeat(np.searchsorted(times, slowest), _SAMPLES), queries, sample)
    for number, total in enumerate(cuts.totals().tolist()):
        yield int(queries[number]), total, cuts.stages(number)


class Costed:
    """Template with its costs, each computed once when first needed."""

    def __init__(self, template: PipelineTemplate, profile: Profile) -> None:
        self.template, self._profile = template, profile

    @cached_property
    def cost(self) -> PipelineCost:
        return pipeline_cost(self.template, self._profile)

    @cached_property
    def cut(self) -> Cut:
        return template_cut(self.template, self._profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortlist:
    """Templates of one size and of least T; `quickest` and `found` may be the same."""

    #: Template whose pipeline ends first with micro-batches for all its stages.
    quickest: Costed
    #: First template that the search found.
    found: Costed
    #: Next quickest ones.
    others: tuple[Costed, ...] = ()

    @property
    def all(self) -> tuple[Costed, ...]:
        return tuple(dict.fromkeys((self.quickest, self.found, *self.others)))


def shortlists(candidates: Sequence[Sequence[Costed]]) -> list[Shortlist]:
    """Return the templates of each group, of one size and of equal T, that are worth a closer look.

    Which one suits a plan also depends on its shares of the batch and on the other pipelines.
    """
    kinds = [
        [Kind(_MICROBATCHES * len(each.template.stages), each.cut) for each in group]
        if len(group) > 1
        else []
        for group in candidates
    ]
    times = computed_s(("1f1b", kind) for group in kinds for kind in group)
    chosen = []
    for group, own in zip(candidates, kinds, strict=True):
        done = [max(times["1f1b", kind]) for kind in own] or [0.0]
        order = [at for _, at in sorted(zip(done, range(len(group)), strict=True))]
        few = list(dict.fromkeys((order[0], 0, *order[1:])))[:_SHORTLISTED]
        chosen.append(
            Shortlist(
                quickest=group[order[0]],
                found=group[0],
                others=tuple(group[at] for at in few if at not in (order[0], 0)),
            )
        )
    return chosen
