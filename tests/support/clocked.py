"""What a step takes, by the slowest of ways: all programs of a plan, each worker on its own clock.

The judge of `oobleck.planner.cost.replay`, which knows neither programs nor workers. Whoever can do
something does it, until nobody can. Messages do not get in each other's way. A gradient sum begins
when its last owner has come to it; what a worker sums passes its link one after the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from oobleck.core.ids import WorkerId
from oobleck.core.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    LayerPart,
    Message,
    OptimizerStep,
    Program,
    ReceiveActivation,
    SendActivation,
    SendGradient,
    SyncGradient,
    Vote,
)
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile, all_reduce_s, message_s
from oobleck.planner.cost.stages import StageCost, stage_cost

#: Of a vote.
VOTE_BYTES = 64


@dataclass
class Worker:
    id: WorkerId
    program: Program
    cost: StageCost
    position: int = 0
    clock_s: float = 0.0
    busy_s: float = 0.0
    computed_s: float = 0.0
    kept: int = 0
    peak_kept: int = 0
    #: Each sum that it has come to, and when.
    sums: list[tuple[SyncGradient, float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Step:
    step_s: float
    bubble: float
    busy_s: Mapping[WorkerId, float]
    computed_s: Mapping[WorkerId, float]
    peak_bytes: Mapping[WorkerId, int]


class Clocked:
    def __init__(
        self,
        programs: Mapping[WorkerId, Program],
        profile: Profile,
        plan: Plan,
    ) -> None:
        self.profile, self.plan = profile, plan
        self.workers = {
            worker: Worker(worker, programs[worker], cost_of(stage, profile))
            for pipeline in plan.pipelines
            for stage in pipeline.stages
            for worker in stage.workers
        }
        self.arrived: dict[object, float] = {}

    def run(self) -> Step:
        workers = list(self.workers.values())
        while any(self.advance(worker) for worker in workers):
            pass
        assert all(isinstance(w.program[w.position], Vote) for w in workers), "they wait for ever"
        links = self.profile.links
        vote_s = all_reduce_s(VOTE_BYTES, workers=len(workers), same_node=False, links=links)
        voted_s = max(max(w.clock_s, self.summed_s(w)) for w in workers) + vote_s
        for worker in workers:
            assert isinstance(worker.program[worker.position + 1], OptimizerStep)
            worker.clock_s = voted_s + worker.cost.update_s
            worker.busy_s += worker.cost.update_s
        step_s = max(worker.clock_s for worker in workers)
        busy = sum(worker.busy_s for worker in workers)
        return Step(
            step_s=step_s,
            bubble=1.0 - busy / (step_s * len(workers)) if step_s else 0.0,
            busy_s={w.id: w.busy_s for w in workers},
            computed_s={w.id: w.computed_s for w in workers},
            peak_bytes={
                w.id: w.cost.worker_bytes(w.peak_kept, replicas=len(self.plan.pipelines))
                for w in workers
            },
        )

    def advance(self, worker: Worker) -> bool:
        """Do the worker's next instruction; False: it cannot."""
        step = worker.program[worker.position]
        match step:
            case Vote():
                return False
            case SyncGradient():
                worker.sums.append((step, worker.clock_s))
            case SendActivation() | SendGradient():
                key = worker.id, step.peer, step.microbatch, type(step), step.share
                self.arrived[key] = worker.clock_s + self.message_s(worker, step)
            case Message():
                kind = SendActivation if isinstance(step, ReceiveActivation) else SendGradient
                key = step.peer, worker.id, step.microbatch, kind, step.share
                if key not in self.arrived:
                    return False
                worker.clock_s = max(worker.clock_s, self.arrived.pop(key))
            case Forward() | Backward() | BackwardInput() | BackwardWeight():
                return self.compute(worker.id, step)
        worker.position += 1
        return True

    def compute(self, worker: WorkerId, step: Compute) -> bool:
        """The workers of a hop begin together."""
        members = [
            self.workers[member] for member in self.plan.hold_of(worker, step.first_layer).workers
        ]
        if any(member.program[member.position] != step for member in members):
            return False
        begun_s = max(member.clock_s for member in members)
        for member in members:
            cost = member.cost
            taken_s = {
                Forward: cost.forward_s,
                Backward: cost.backward_s,
                BackwardInput: cost.backward_input_s,
                BackwardWeight: cost.backward_weight_s,
            }[type(step)]
            if isinstance(step, Forward):
                member.kept += 1
            elif not isinstance(step, BackwardInput):
                member.kept -= 1
            member.peak_kept = max(member.peak_kept, member.kept)
            member.clock_s = member.computed_s = begun_s + taken_s
            member.busy_s += taken_s
            member.position += 1
        return True

    def message_s(self, worker: Worker, step: Message) -> float:
        """Both directions carry the output of the stage before the cut, or its gradient."""
        _, _, boundary, _ = step.content
        return message_s(
            step.share.of_bytes(self.profile.layers[boundary].output_bytes),
            same_node=worker.id.node == step.peer.node,
            links=self.profile.links,
        )

    def summed_s(self, worker: Worker) -> float:
        """When the last sum of the worker is over."""
        end = 0.0
        ready = [(self.ready_s(sync), self.sum_s(sync)) for sync, _ in worker.sums]
        for ready_s, taken_s in sorted(ready):
            end = max(end, ready_s) + taken_s
        return end

    def ready_s(self, sync: SyncGradient) -> float:
        return max(
            begun_s
            for owner in sync.owners
            for other, begun_s in self.workers[owner].sums
            if other.bucket == sync.bucket
        )

    def sum_s(self, sync: SyncGradient) -> float:
        layers = self.profile.layers
        tied_bytes = min(layers[0].parameter_bytes, layers[-1].parameter_bytes)
        ends = {0, len(layers) - 1} if self.is_tied() else set()

        def own_bytes(part: LayerPart) -> int:
            whole = layers[part.layer].parameter_bytes
            return part.share.of_bytes(whole - tied_bytes * (part.layer in ends))

        tied = [p.share.of_bytes(tied_bytes) for p in sync.parts if p.part == "tied"]
        return all_reduce_s(
            # A worker that holds both places of the tied weight adds them up before.
            sum(own_bytes(p) for p in sync.parts if p.part == "own") + max(tied, default=0),
            workers=len(sync.owners),
            same_node=len({owner.node for owner in sync.owners}) == 1,
            links=self.profile.links,
        )

    def is_tied(self) -> bool:
        return any(
            part.part == "tied"
            for worker in self.workers.values()
            for sync, _ in worker.sums
            for part in sync.parts
        )


def cost_of(stage, profile: Profile) -> StageCost:  # type: ignore[no-untyped-def]
    return stage_cost(
        profile,
        stage.first_layer,
        stage.last_layer,
        len(stage.workers),
        resident=stage.resident,
    )


def run_clocked(
    programs: Mapping[WorkerId, Program],
    profile: Profile,
    *,
    plan: Plan,
) -> Step:
    """Return what a step takes. Raises AssertionError where the programs wait for ever; see
    `oobleck.planner.programs.compiler.proof` for who waits for what."""
    return Clocked(programs, profile, plan).run()
