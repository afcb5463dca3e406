"""Map of a plan: a row for each pipeline or route, a place for each stage. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from oobleck.cli.output.colour import Tone, tone, worst
from oobleck.proto import control_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Stage on workers of one node."""

    node: str
    #: Slots of its workers on the node.
    slots: tuple[int, ...]
    first_layer: int
    last_layer: int
    #: Its share of the model's layers, 0 to 1.
    share: float
    state: str
    #: Rate of the slowest worker, relative to the others.
    rate: float
    tone: Tone

    @property
    def layers(self) -> str:
        if self.first_layer == self.last_layer:
            return f"layer {self.first_layer}"
        return f"layers {self.first_layer} to {self.last_layer}"

    @property
    def workers(self) -> str:
        """`n1`, or `n1/0,1` if it has other workers than the first."""
        slots = ",".join(map(str, self.slots))
        return self.node if slots == "0" else f"{self.node}/{slots}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    #: Micro-batches of a step, or another remark.
    share: str
    places: tuple[Place, ...]
    #: Whether the places lead from the first layer to the last.
    is_through: bool = True


def rows(plan: pb.Plan, nodes: Iterable[pb.NodeInfo]) -> tuple[Row, ...]:
    """Return pipelines in order, or routes if the plan has these; then shadows."""
    known = {node.node: node for node in nodes}
    through: Sequence[pb.Pipeline | pb.Route] = plan.routes or plan.pipelines
    layers = max((stage.last_layer + 1 for one in through for stage in _stages(one)), default=1)
    kind = "route" if plan.routes else "pipeline"
    found = [
        Row(
            name=f"{kind} {number}",
            share=f"{one.microbatches} micro-batch{'' if one.microbatches == 1 else 'es'}",
            places=tuple(_place(stage, layers, known) for stage in _stages(one)),
        )
        for number, one in enumerate(through)
    ]
    if plan.shadows:
        held = tuple(_place(stage, layers, known) for stage in plan.shadows)
        found.append(Row(name="shadows", share="held, not run", places=held, is_through=False))
    return tuple(found)


def _stages(through: pb.Pipeline | pb.Route) -> Iterable[pb.Stage]:
    return through.hops if isinstance(through, pb.Route) else through.stages


def _place(stage: pb.Stage, layers: int, known: Mapping[str, pb.NodeInfo]) -> Place:
    name = stage.workers[0].node
    slots = tuple(worker.slot for worker in stage.workers)
    node = known.get(name)
    rates = [w.rate for w in node.workers if w.slot in slots and w.rate] if node else []
    rate = min(rates, default=1.0)
    state = node.state if node else "unknown"
    return Place(
        node=name,
        slots=slots,
        first_layer=stage.first_layer,
        last_layer=stage.last_layer,
        share=(stage.last_layer - stage.first_layer + 1) / layers,
        state=state,
        rate=rate,
        tone=worst(tone(state), "warn") if rate < 1 else tone(state),
    )
