"""Template generation: the cheapest way to cut the model for n nodes (Oobleck §4.1.2).

Minimises T1 + T2 + T3 exactly, for Nb = 4S micro-batches. With the slowest stage k* (the last one
on ties) taking t*, and S stages, that is

    T = sum of the stages before k* + (3S + k* + 1) t* + 2 (sum of the stages after k*)

so a cut is a prefix whose stages take at most t*, the slowest stage, and a suffix whose stages
take less. Of prefixes and suffixes that end at the same layer and GPU only those matter that no
other beats in both their slowest stage and their sum. Memory counts S - s micro-batches in flight
at stage s: for suffixes that is the distance from the end, so they are shared by all sizes.

Of cuts with equal T the one with fewest stages is taken, then the one that keeps the smallest sum
of squared stage times (the more even one) among those that the search tells apart, then the one
whose slowest stage and cuts come first.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Optional

from oobleck.planner.cost import StageCosts, seconds
from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.profile import Profile
from oobleck.planner.template import PipelineTemplate, StageTemplate


class Cut(NamedTuple):
    """Some stages in a row; `rest` are those further from where `first`..`stop` joins them."""

    slowest: int
    total: int
    squares: int
    first: int
    stop: int
    gpus: int
    rest: Optional["Cut"]

    def stages(self) -> Iterator[tuple[int, int, int]]:
        cut: Cut | None = self
        while cut is not None and cut.gpus:
            yield cut.first, cut.stop, cut.gpus
            cut = cut.rest


#: Where stages end or begin: (layer, GPUs used on that side) -> cuts that none other beats, with
#: slowest rising and total falling.
Front = dict[tuple[int, int], list[Cut]]


def generate_templates(profile: Profile, sizes: range) -> Mapping[int, PipelineTemplate]:
    """The best template for each number of nodes in `sizes`; raises PlanInfeasible."""
    search = _Search(profile)
    templates = {}
    for nodes in sizes:
        template = search.best(nodes)
        if template is None:
            raise PlanInfeasible(f"no template of {nodes} nodes fits the memory")
        templates[nodes] = template
    return templates


def feasible_sizes(profile: Profile, most: int) -> tuple[int, ...]:
    """All numbers of nodes up to `most` that some template fits, ascending.

    Goes from the last stage to the first: what is in flight depends on that distance alone.
    """
    costs, per_node = StageCosts(profile), profile.gpus_per_node
    reached = {(costs.layer_count, 0)}
    found: set[int] = set()
    for in_flight in range(1, costs.layer_count + 1):
        front = set()
        for stop, used in reached:
            for gpus in _fitting(costs, per_node, used):
                if used + gpus > most * per_node:
                    break
                for first in range(stop - 1, -1, -1):
                    if not costs.allowed(first, stop, gpus, in_flight):
                        break
                    front.add((first, used + gpus))
        found.update(used // per_node for first, used in front if not (first or used % per_node))
        reached = front
    return tuple(sorted(found))


def _fitting(costs: StageCosts, per_node: int, used: int) -> Iterator[int]:
    """The numbers of GPUs for a stage that keep it on the node that is partly used."""
    return (gpus for gpus in costs.gpu_choices if used % per_node + gpus <= per_node)


def _extend(cut: Cut, first: int, stop: int, gpus: int, time: int) -> Cut:
    return Cut(
        max(cut.slowest, time),
        cut.total + time,
        cut.squares + time * time,
        first,
        stop,
        gpus,
        cut,
    )


def _keep_best(cuts: list[Cut]) -> list[Cut]:
    """Those that none other beats in both slowest and total."""
    kept: list[Cut] = []
    for cut in sorted(cuts, key=lambda c: c[:3]):
        if not kept or cut.total < kept[-1].total:
            kept.append(cut)
    return kept


class _Search:
    def __init__(self, profile: Profile) -> None:
        self._per_node = profile.gpus_per_node
        self._costs = StageCosts(profile)
        end = Cut(-1, 0, 0, 0, 0, 0, None)
        #: By number of stages after the slowest.
        self._suffixes: list[Front] = [{(self._costs.layer_count, 0): [end]}]

    def best(self, nodes: int) -> PipelineTemplate | None:
        best: tuple[int, int, tuple[tuple[int, int, int], ...]] | None = None
        most = min(self._costs.layer_count, nodes * self._per_node)
        for stages in range(nodes, most + 1):
            for candidate in self._join(stages, nodes * self._per_node, best and best[0]):
                if best is None or candidate[:2] < best[:2]:
                    best = candidate
        return None if best is None else self._template(nodes, best[0], best[2])

    def _suffix(self, stages: int) -> Front:
        while len(self._suffixes) <= stages:
            in_flight = len(self._suffixes)
            fresh: Front = {}
            for (stop, used), cuts in self._suffixes[-1].items():
                for gpus in _fitting(self._costs, self._per_node, used):
                    for first in range(stop - 1, -1, -1):
                        if not self._costs.allowed(first, stop, gpus, in_flight):
                            break
                        time = self._costs.time(first, stop, gpus)
                        fresh.setdefault((first, used + gpus), []).extend(
                            _extend(cut, first, stop, gpus, time) for cut in cuts
                        )
            self._suffixes.append({key: _keep_best(cuts) for key, cuts in fresh.items()})
        return self._suffixes[stages]

    def _grow_prefix(
        self, front: Front, in_flight: int, gpus_left: int, limit: int | None
    ) -> Front:
        """All prefixes of one stage more; those whose slowest stage alone reaches `limit` go."""
        fresh: Front = {}
        for (first, used), cuts in front.items():
            for gpus in _fitting(self._costs, self._per_node, used):
                if used + gpus > gpus_left:
                    break
                for stop in range(first + 1, self._costs.layer_count):
                    if not self._costs.allowed(first, stop, gpus, in_flight):
                        break
                    time = self._costs.time(first, stop, gpus)
                    if limit is not None and time > limit:
                        break
                    fresh.setdefault((stop, used + gpus), []).extend(
                        _extend(cut, first, stop, gpus, time) for cut in cuts
                    )
        return {key: _keep_best(cuts) for key, cuts in fresh.items()}

    def _join(
        self, stages: int, gpus_total: int, known: int | None
    ) -> Iterator[tuple[int, int, tuple[tuple[int, int, int], ...]]]:
        """(T, sum of squares, stages) of every prefix + slowest stage + suffix worth a look."""
        # T >= 3S t*, so no stage of a better cut is slower than this.
        limit = None if known is None else known // (3 * stages)
        front: Front = {(0, 0): [Cut(-1, 0, 0, 0, 0, 0, None)]}
        for before in range(stages):
            suffixes = self._suffix(stages - 1 - before)
            for (first, used), prefixes in front.items():
                for gpus in _fitting(self._costs, self._per_node, used):
                    rest = gpus_total - used - gpus
                    for stop in range(first + 1, self._costs.layer_count + 1):
                        if not self._costs.allowed(first, stop, gpus, stages - before):
                            break
                        time = self._costs.time(first, stop, gpus)
                        if limit is not None and time > limit:
                            break
                        prefix = _cheapest(prefixes, time + 1)
                        suffix = _cheapest(suffixes.get((stop, rest), ()), time)
                        if prefix is None or suffix is None:
                            continue
                        total = prefix.total + (3 * stages + before + 1) * time + 2 * suffix.total
                        if known is not None and total > known:
                            continue
                        known = total
                        limit = known // (3 * stages)
                        cut = (
                            *reversed(tuple(prefix.stages())),
                            (first, stop, gpus),
                            *suffix.stages(),
                        )
                        yield total, prefix.squares + time * time + suffix.squares, cut
            front = self._grow_prefix(front, stages - before, gpus_total, limit)

    def _template(
        self, nodes: int, total: int, cut: tuple[tuple[int, int, int], ...]
    ) -> PipelineTemplate:
        stages = []
        used = 0
        for first, stop, gpus in cut:
            stages.append(
                StageTemplate(
                    first_layer=first,
                    last_layer=stop - 1,
                    node=used // self._per_node,
                    gpus=gpus,
                    forward_s=seconds(self._costs.forward(first, stop, gpus)),
                    backward_s=seconds(self._costs.backward(first, stop, gpus)),
                )
            )
            used += gpus
        return PipelineTemplate(
            nodes=nodes,
            gpus_per_node=self._per_node,
            stages=tuple(stages),
            iteration_s=seconds(total),
        )


def _cheapest(cuts: list[Cut] | tuple[()], below: int) -> Cut | None:
    """The one with the smallest total among those whose slowest stage takes less than `below`."""
    found = None
    for cut in cuts:  # slowest rises, total falls
        if cut.slowest >= below:
            break
        found = cut
    return found
