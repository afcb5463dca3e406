"""Which of the cuts of least T becomes the template: the one with the shortest replay.

T1 + T2 + T3 knows neither messages nor which stages beside the slowest are short, so many cuts
have the same T (in a model of equal blocks nearly always) though they take differently long.
Owns that choice. Sampling draws from a fixed seed: the same profile gives the same templates.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from oobleck.planner.partition import Bounds, Sweep
from oobleck.planner.profile import Profile
from oobleck.planner.replay import Timelines
from oobleck.planner.stagetable import Integers, StageTable
from oobleck.planner.template import PipelineTemplate
from oobleck.planner.trace import Stages, trace

#: Cuts that are drawn for each number of nodes, to see whether there is another one, and then.
_FIRST_SAMPLES, _MORE_SAMPLES = 2, 8
#: Micro-batches per stage of a replay: enough to fill, run and drain.
_MICROBATCHES = 2


def tied_cuts(
    table: StageTable, fewest: Integers, found: Mapping[int, tuple[float, Stages]]
) -> Mapping[int, tuple[Stages, ...]]:
    """By number of nodes: the cut found for it, first, and others of the same T and the same
    slowest stage. `found` has T with its cut."""
    slowest = {n: max(table.stage_time(*stage) for stage in cut) for n, (_, cut) in found.items()}
    times = np.unique(list(slowest.values()))
    bounds = Bounds(low=times, high=times, after=times - 1)
    sweep = Sweep(table, fewest, bounds, nodes=max(found), least=min(found))
    generator = np.random.default_rng(0)
    ties = {n: {cut: None} for n, (_, cut) in found.items()}
    sizes = sorted(found)
    for samples in (_FIRST_SAMPLES, _MORE_SAMPLES):
        queries = np.repeat(np.array(sizes, dtype=np.int64), samples)
        rows = np.searchsorted(times, [slowest[n] for n in queries.tolist()])
        drawn = trace(sweep, rows, queries, generator)
        for number, total in enumerate(drawn.totals().tolist()):
            nodes = int(queries[number])
            if total == found[nodes][0]:
                ties[nodes][drawn.stages(number)] = None
        sizes = [n for n in sizes if len(ties[n]) > 1]
        if not sizes:
            break
    return {nodes: tuple(cuts) for nodes, cuts in ties.items()}


def quickest(
    candidates: Sequence[Sequence[PipelineTemplate]], profile: Profile
) -> list[PipelineTemplate]:
    """Of each group of templates, tied and of one size, the one whose pipeline is done first with
    micro-batches for all its stages; the first one on ties."""
    pipelines = [
        (template.stages, _MICROBATCHES * len(template.stages))
        for group in candidates
        if len(group) > 1
        for template in group
    ]
    times = Timelines.finish_of(pipelines, profile)
    chosen = []
    for group in candidates:
        if len(group) == 1:
            chosen.append(group[0])
            continue
        own, times = times[: len(group)], times[len(group) :]
        chosen.append(group[min(range(len(group)), key=lambda at: max(own[at]))])
    return chosen
