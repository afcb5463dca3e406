"""Pipeline templates: the stage partition of the whole model over n nodes (Oobleck §4.1)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTemplate:
    """Contiguous layers on `gpus` workers of the template's node number `node`."""

    first_layer: int
    #: Inclusive.
    last_layer: int
    #: 0-based position of the node inside the template.
    node: int
    gpus: int
    #: One micro-batch through all layers of the stage.
    forward_s: float
    backward_s: float

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.last_layer + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTemplate:
    """The whole model cut into stages for `nodes` nodes; not yet on any concrete node."""

    nodes: int
    gpus_per_node: int
    stages: tuple[StageTemplate, ...]
    #: T1 + T2 + T3 with Nb = 4 * stages micro-batches (Oobleck §4.1.2).
    iteration_s: float

    def __post_init__(self) -> None:
        used = [0] * self.nodes
        next_layer, node = 0, 0
        for stage in self.stages:
            if stage.first_layer != next_layer or stage.last_layer < stage.first_layer:
                raise ValueError(f"stages are not contiguous at layer {next_layer}")
            if stage.node < node or stage.gpus < 1:
                raise ValueError("stages must follow the node order and have at least one GPU")
            next_layer, node = stage.last_layer + 1, stage.node
            used[stage.node] += stage.gpus
        if any(gpus != self.gpus_per_node for gpus in used):
            raise ValueError(f"every GPU must be used; used per node: {used}")

    @property
    def layer_count(self) -> int:
        return self.stages[-1].last_layer + 1
