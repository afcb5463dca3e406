"""Pipelines: templates put on concrete nodes."""

from dataclasses import dataclass

from oobleck.planner.ids import NodeName, WorkerId
from oobleck.planner.programs.routes import Hold
from oobleck.planner.programs.template import PipelineTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A template put on concrete nodes: one replica of the model."""

    #: In template order: nodes[k] is the template's node number k.
    nodes: tuple[NodeName, ...]
    stages: tuple[Hold, ...]
    #: How many of the global batch it computes in every step.
    microbatches: int

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a pipeline needs at least one stage")
        if self.microbatches < 1:
            raise ValueError("a pipeline needs at least one micro-batch")
        if len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"a node stands twice in one pipeline: {self.nodes}")


def place(
    template: PipelineTemplate, nodes: tuple[NodeName, ...], *, microbatches: int
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
            Hold(first_layer=stage.first_layer, last_layer=stage.last_layer, workers=workers)
        )
    return Pipeline(nodes=nodes, stages=tuple(stages), microbatches=microbatches)
