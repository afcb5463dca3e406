"""The plan: pipelines on concrete nodes and their shares of the batch, for one generation."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from oobleck.planner.ids import Generation, NodeName, WorkerId
from oobleck.planner.programs.shards import Shard, ShardTable
from oobleck.planner.programs.template import PipelineTemplate
from oobleck.planner.schedules import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Contiguous layers of one pipeline and the workers (of one node) that hold them."""

    first_layer: int
    #: Inclusive.
    last_layer: int
    workers: tuple[WorkerId, ...]
    #: Of several workers: each keeps the weights that it has gathered, and its gradients of the
    #: whole layers, for a step, since there is room (`oobleck.planner.profile.sharing`).
    resident: bool = False

    def __post_init__(self) -> None:
        if not self.workers:
            raise ValueError("a stage needs at least one worker")
        if self.last_layer < self.first_layer:
            raise ValueError(f"last_layer: {self.last_layer} is below {self.first_layer}")

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.last_layer + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A template put on concrete nodes: one replica of the model.

    It computes micro-batches first_microbatch .. first_microbatch + microbatches - 1 of the
    global batch in every step.
    """

    #: In template order: nodes[k] is the template's node number k.
    nodes: tuple[NodeName, ...]
    stages: tuple[Stage, ...]
    first_microbatch: int
    microbatches: int

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a pipeline needs at least one stage")
        if self.microbatches < 1:
            raise ValueError("a pipeline needs at least one micro-batch")
        if len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"a node stands twice in one pipeline: {self.nodes}")


def place(
    template: PipelineTemplate,
    nodes: tuple[NodeName, ...],
    *,
    first_microbatch: int,
    microbatches: int,
) -> Pipeline:
    """Put `template` on `nodes`; the GPUs of a node go to its stages in slot order."""
    if len(nodes) != template.nodes:
        raise ValueError(f"a template of {template.nodes} nodes needs as many, got {len(nodes)}")
    next_slot = dict.fromkeys(range(template.nodes), 0)
    stages = []
    for stage in template.stages:
        slot = next_slot[stage.node]
        next_slot[stage.node] = slot + stage.gpus
        workers = tuple(WorkerId(nodes[stage.node], slot + gpu) for gpu in range(stage.gpus))
        stages.append(
            Stage(first_layer=stage.first_layer, last_layer=stage.last_layer, workers=workers)
        )
    return Pipeline(
        nodes=nodes,
        stages=tuple(stages),
        first_microbatch=first_microbatch,
        microbatches=microbatches,
    )


class _Derived:
    """What follows from a plan and is asked for again and again: worked out once, when it first is.

    No fields of the plan, so neither compared nor written anywhere.
    """

    __slots__ = ("_hash", "_nodes", "_shards", "_workers")
    _hash: int
    _nodes: tuple[NodeName, ...]
    _shards: ShardTable
    _workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(_Derived):
    """Who holds which layer and computes which micro-batches in one generation.

    The order of `pipelines` is the order of their micro-batch shares, which cover
    0 .. microbatches - 1 without gap or overlap. Ranks are positions in `workers`.
    """

    generation: Generation
    pipelines: tuple[Pipeline, ...]
    schedule: Schedule = "1f1b"

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise ValueError("a plan needs at least one pipeline")
        next_microbatch = 0
        for pipeline in self.pipelines:
            if pipeline.first_microbatch != next_microbatch:
                raise ValueError(f"the batch shares have a gap at micro-batch {next_microbatch}")
            next_microbatch += pipeline.microbatches
        nodes = [node for pipeline in self.pipelines for node in pipeline.nodes]
        if len(set(nodes)) != len(nodes):
            raise ValueError(f"a node stands in two pipelines: {sorted(nodes)}")
        if len({pipeline.stages[-1].last_layer for pipeline in self.pipelines}) > 1:
            raise ValueError("the pipelines disagree on the number of layers")

    @property
    def microbatches(self) -> int:
        return sum(pipeline.microbatches for pipeline in self.pipelines)

    @property
    def layer_count(self) -> int:
        return self.pipelines[0].stages[-1].last_layer + 1

    @property
    def nodes(self) -> tuple[NodeName, ...]:
        try:
            return self._nodes
        except AttributeError:
            found = tuple(sorted(node for pipeline in self.pipelines for node in pipeline.nodes))
            object.__setattr__(self, "_nodes", found)
            return found

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """All workers of the plan in rank order (sorted)."""
        try:
            return self._workers
        except AttributeError:
            stages = (stage for pipeline in self.pipelines for stage in pipeline.stages)
            found = tuple(sorted(worker for stage in stages for worker in stage.workers))
            object.__setattr__(self, "_workers", found)
            return found

    @property
    def shards(self) -> ShardTable:
        """What each worker holds: worker p of d of a stage the p-th d-th of each of its layers'
        state. Equal sets are one object."""
        try:
            return self._shards
        except AttributeError:
            found = {}
            for stage in (stage for pipeline in self.pipelines for stage in pipeline.stages):
                parts = len(stage.workers)
                for part, worker in enumerate(stage.workers):
                    found[worker] = _shards(stage.first_layer, stage.last_layer, part, parts)
            object.__setattr__(self, "_shards", MappingProxyType(found))
            return self._shards

    def __hash__(self) -> int:
        """Of a thousand nodes it takes milliseconds, and whatever is remembered asks for it."""
        try:
            return self._hash
        except AttributeError:
            found = hash((self.generation, self.pipelines, self.schedule))
            object.__setattr__(self, "_hash", found)
            return found

    def holdings(self) -> Mapping[WorkerId, range]:
        """The layers that each worker holds."""
        return {
            worker: stage.layers
            for pipeline in self.pipelines
            for stage in pipeline.stages
            for worker in stage.workers
        }

    def stage_of(self, worker: WorkerId) -> Stage:
        """The stage that `worker` is in. Raises ValueError where it is in none."""
        for pipeline in self.pipelines:
            for stage in pipeline.stages:
                if worker in stage.workers:
                    return stage
        raise ValueError(f"worker {worker} is not in the plan of generation {self.generation}")

    def owners(self, layer: int) -> tuple[WorkerId, ...]:
        """The workers that hold `layer`, sorted."""
        return tuple(sorted(w for w, layers in self.holdings().items() if layer in layers))


@lru_cache(maxsize=1024)
def _shards(first_layer: int, last_layer: int, part: int, parts: int) -> frozenset[Shard]:
    return frozenset(Shard(layer, part, parts) for layer in range(first_layer, last_layer + 1))
