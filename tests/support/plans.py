"""Plans for tests, cut as the test says."""

from collections.abc import Mapping, Sequence

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.plan import Pipeline, PipelineTemplate, Plan, place
from oobleck.core.routes import Hold, Hop, Route
from oobleck.core.schedules import Schedule

#: Layers of a stage, or (layers, GPUs).
Cut = int | tuple[int, int]


def plan_of_cuts(*pipelines: tuple[Sequence[Cut], int], schedule: Schedule = "1f1b") -> Plan:
    """Each pipeline: its stages, every one on a node of its own, and its micro-batches."""
    made, node = [], 0
    for cuts, microbatches in pipelines:
        stages, nodes, layer = [], [], 0
        for cut in cuts:
            layers, gpus = (cut, 1) if isinstance(cut, int) else cut
            name = NodeName(f"n{node}")
            node += 1
            nodes.append(name)
            workers = tuple(WorkerId(name, slot) for slot in range(gpus))
            stages.append(Hold(first_layer=layer, last_layer=layer + layers - 1, workers=workers))
            layer += layers
        made.append(
            Pipeline(
                nodes=tuple(nodes),
                stages=tuple(stages),
                microbatches=microbatches,
            )
        )
    return Plan.of_pipelines(made, generation=Generation(1), schedule=schedule)


def plan_of_templates(
    templates: Mapping[int, PipelineTemplate], *pipelines: tuple[int, int]
) -> Plan:
    """Each pipeline: nodes and micro-batches."""
    made, node = [], 0
    for size, microbatches in pipelines:
        nodes = tuple(NodeName(f"n{n}") for n in range(node, node + size))
        made.append(place(templates[size], nodes, microbatches=microbatches))
        node += size
    return Plan.of_pipelines(made, generation=Generation(1))


def worker(number: int, slot: int = 0) -> WorkerId:
    """The worker of the stage on node number `number`."""
    return WorkerId(NodeName(f"n{number}"), slot)


def hop(first: int, last: int, *workers: WorkerId) -> Hop:
    return Hop(first_layer=first, last_layer=last, workers=workers)


def hold(first: int, last: int, *workers: WorkerId) -> Hold:
    return Hold(first_layer=first, last_layer=last, workers=workers)


def route(*hops: Hop, microbatches: int = 1) -> Route:
    return Route(hops=hops, microbatches=microbatches)
