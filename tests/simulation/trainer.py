"""A simulated worker process: the life of `oobleck.worker.session` without tensors.

It enters generations, draws the real agreement from everyone's state (`worker.rejoin`), moves
layers, trains, votes, takes checkpoints and finishes. Of each layer it knows only which share of
it stands at which step. What it does is checked against the job's ledger.
"""

import asyncio
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from simulation.clockwork import Process
from simulation.ear import Ear
from simulation.gathering import Gathering
from simulation.watch import GONE

from oobleck.core.ids import Generation, Incarnation, WorkerId
from oobleck.core.messages import (
    Acknowledged,
    Alive,
    Ask,
    Assign,
    CheckpointSaved,
    Committed,
    Evaluated,
    Failed,
    Finished,
    FromWorker,
    Handed,
    Launch,
    LinkMeasured,
    Measure,
    Measured,
    PeerLost,
    PhaseReached,
    Ready,
    Restored,
    Save,
    SaveFailed,
    StepRecord,
    Stop,
)
from oobleck.core.plan import Plan
from oobleck.core.profile import LinkMeasurement
from oobleck.core.routes import LayerLost, Shard
from oobleck.planner.programs.transfer import plan_transfers
from oobleck.worker.recovery.rejoin import Agreement, Held, RecoveryState, agree, is_whole
from oobleck.worker.runtime.errors import Superseded, TransportError, Unreached
from oobleck.worker.state.progress import Position
from support.jobs import evaluation, record
from support.scenario import measurement

if TYPE_CHECKING:
    from simulation.world import World


class _Exit(BaseException):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


#: What a worker says of its host.
DISK_ERROR = "cannot read the data: input/output error"
_NO_GENERATION = Generation(0)


@dataclass(slots=True, kw_only=True)
class Progress(Position):
    """As `oobleck.worker.state.progress` has it, and the layers."""

    layers: dict[int, Held] = field(default_factory=dict)
    former: dict[int, Held] = field(default_factory=dict)

    def join(self, agreement: Agreement, generation: Generation) -> None:
        """The vote is told only where somebody rolls forward by it."""
        self.committed, self.lineage, self.joined = agreement.step, agreement.lineage, generation
        if self.voted > agreement.step:
            self.voted, self.voted_generation = 0, _NO_GENERATION
        if agreement.vote_holder is not None:
            self.voted, self.voted_generation = agreement.step, agreement.voted_generation


class Trainer:
    def __init__(
        self, world: "World", launch: Launch, incarnation: Incarnation, process: Process
    ) -> None:
        self.world = world
        self.worker: WorkerId = launch.worker
        self.node = launch.worker.node
        self.incarnation = incarnation
        self.process = process
        self.job_id = launch.job_id
        self._training = launch.job.training
        self._job = launch.job
        self._ledger = world.ledger(launch.job_id)
        self.ear = Ear()
        self.progress = Progress()
        self.endpoint = f"{self.node}:{world.next_pid()}"
        #: Generation whose layers it has come to hold, and when it did.
        self.entered, self.entered_at = Generation(0), 0.0
        self.report: Any = None
        self._saved = 0
        #: By step, records that the master has not acknowledged.
        self._records: dict[int, StepRecord] = {}
        #: Newest generation that it has committed a step in.
        self._trained = Generation(0)
        #: What its training thread tells of itself, and whether it has got stuck.
        self._beats, self._doing, self._waiting = 0, "begin", False
        self.stuck = False
        self._gathering: Gathering | None = None
        #: The plan that it prepares, the first step after which it is ready, and the step at which
        #: it has left the plan before for that one.
        self._preparing, self._ready_at = Generation(0), 0
        self._switched: tuple[Generation, int] | None = None
        process.on_end.append(self._ended)

    def _ended(self) -> None:
        if self._gathering is not None:
            self._gathering.leave(self, "connection closed by peer")

    # ---- from the agent

    def hear(self, message: object) -> None:
        match message:
            case Assign():
                self.ear.accept(message)
            case Measure():
                self.ear.wish(message)
            case Save(number=number):
                self.ear.save_wish = max(self.ear.save_wish, number)
            case Acknowledged(step=step):
                self._records = {s: r for s, r in self._records.items() if s > step}
            case Ask():
                files = self._doing in ("restore", "write")
                self.say(
                    Alive(beats=self._beats, doing=self._doing, waiting=self._waiting, files=files)
                )
            case Stop():
                self.world.end_worker(self, exit_code=0)

    def lost_peer(
        self, generation: Generation, detail: str, *, host_unreached: bool = False
    ) -> None:
        self.say(
            PeerLost(
                generation=generation,
                step=self.progress.begun,
                detail=detail,
                host_unreached=host_unreached,
            )
        )

    def say(self, message: FromWorker) -> None:
        if not self.process.alive:
            return
        self.report(message)
        if isinstance(message, PhaseReached):
            self.world.reached(message.phase, message.generation)

    async def _work(self, doing: str, seconds: float) -> None:
        """What it does by itself, in which it may get stuck."""
        self._beats, self._doing, self._waiting = self._beats + 1, doing, False
        await asyncio.sleep(seconds)
        if self.stuck:
            await asyncio.Event().wait()

    async def _exchange(self, gathering: Gathering, name: str, share: object) -> Any:
        """What it waits for others in."""
        self._beats, self._doing, self._waiting = self._beats + 1, name, True
        return await gathering.exchange(self, name, share)

    # ---- its life

    async def live(self) -> None:
        draw = self.world.draw
        await asyncio.sleep(draw.uniform(0.02, 0.4))
        self.say(Ready(pid=1, card=self.endpoint, data="5a"))
        while isinstance(wish := await self._begin(), Measure):
            await self._measure(wish)
        while True:
            wish = await self._enter(wish)

    async def _next(self, generation: Generation) -> Assign:
        self._beats, self._doing, self._waiting = self._beats + 1, "wait for the plan", True
        return await self.ear.wait_next(generation)

    async def _begin(self) -> Assign | Measure:
        self._beats, self._doing, self._waiting = self._beats + 1, "wait", True
        return await self.ear.wait_begin()

    async def _measure(self, wish: Measure) -> None:
        await self._work("measure", self.world.draw.uniform(0.1, 1.0))
        attempt = wish.attempt
        self.say(Measured(attempt=attempt, measurement=measurement(0.001)))
        for pair in wish.meetings:
            if pair.workers[0] == self.worker:
                await asyncio.sleep(0.05)
                link = LinkMeasurement(scope=pair.scope, latency_s=1e-4, bytes_per_s=1e9)
                self.say(LinkMeasured(attempt=attempt, scope=pair.scope, link=link))

    async def _enter(self, assign: Assign) -> Assign:
        generation = assign.plan.generation
        self.world.watch.entering(self, assign)
        detail = ""
        try:
            self.say(PhaseReached(generation=generation, phase="aborted"))
            if assign.handover:
                members = tuple(sorted({*assign.plan.workers, *assign.leaving}))
                gathering = await self._meet(assign, members, "/handover")
                self._take_over(assign, gathering)
                await self._hand_over(assign.plan, gathering)
                self._leave("goodbye", orderly=True)
            if self.worker in assign.leaving:
                return await self._next(generation)
            gathering = await self._meet(assign, assign.plan.workers)
            self._take_over(assign, gathering)
            await self._settle_in(assign, gathering)
            return await self._train(assign, gathering)
        except TransportError as error:
            detail = str(error)
            self.lost_peer(generation, detail, host_unreached=isinstance(error, Unreached))
        except Superseded:
            detail = "left for a newer generation"
        finally:
            self._leave(detail or "connection closed by peer")
        return await self._next(generation)

    async def _meet(
        self, assign: Assign, members: tuple[WorkerId, ...], meeting: str = ""
    ) -> Gathering:
        self.ear.check_newest(assign.plan.generation)
        gathering = self._gathering = self.world.gathering(assign, members, meeting)
        self._beats, self._doing, self._waiting = self._beats + 1, "rendezvous", True
        await gathering.meet(self)
        self.ear.on_newer(None)
        return gathering

    def _leave(self, detail: str, *, orderly: bool = False) -> None:
        self.ear.on_newer(None)
        self.ear.on_abrupt(None)
        if self._gathering is not None and orderly:
            self._gathering.leave_in_peace(self)
        elif self._gathering is not None:
            self._gathering.leave(self, detail)
        self._gathering = None

    # ---- into a generation

    def _take_over(self, assign: Assign, gathering: Gathering) -> None:
        """Hold some of the layers that it has been fed, where others have left a plan for this one
        by a vote; a newcomer learns from them where they stand."""
        generation, progress = assign.plan.generation, self.progress
        steps = {
            member._switched[1]
            for member in gathering.members.values()
            if member._switched is not None and member._switched[0] == generation
        }
        if len(steps) != 1 or not assign.boundary:
            return
        (step,) = steps
        running = self._switched is not None and self._switched[0] == generation
        if running != (progress.committed == step and bool(progress.layers)) or step == 0:
            return
        have = {Shard(i, h.part, h.parts) for i, h in progress.layers.items()}
        needed = sorted(gathering.shards.get(self.worker, frozenset()) - have)
        fed = [shard for shard in needed if self.world.draw.random() < 0.7]
        for shard in fed:
            self._hold(shard, step)
        if fed and not running:
            giver = next(m for m in gathering.members.values() if m._switched is not None)
            progress.committed, progress.lineage = step, giver.progress.lineage
            progress.joined = giver.progress.joined
            progress.voted = giver.progress.voted
            progress.voted_generation = giver.progress.voted_generation
        if fed:
            self._tell_received(assign.plan)

    def _tell_received(self, plan: Plan) -> None:
        """As `oobleck.worker.recovery.recover` does it."""
        held = {Shard(i, h.part, h.parts) for i, h in self.progress.layers.items()}
        layers = tuple(sorted(s.layer for s in held & plan.shards.get(self.worker, frozenset())))
        self.say(PhaseReached(generation=plan.generation, phase="received", layers=layers))

    def _hold(self, shard: Shard, step: int) -> None:
        progress = self.progress
        before = progress.layers.get(shard.layer)
        if step > 0 and before is not None and before.version == step:
            known = [before, *filter(None, [progress.former.get(shard.layer)])]
            progress.former[shard.layer] = min(known, key=lambda held: held.parts)
        progress.layers[shard.layer] = Held(step, shard.part, shard.parts)

    async def _settle_in(self, assign: Assign, gathering: Gathering) -> None:
        plan, progress = assign.plan, self.progress
        states = await self._exchange(gathering, "states", self.recovery_state(plan.layer_count))
        agreement = agree(states)
        if await self._restore(assign, agreement, gathering):
            return
        self._ledger.agreed(plan.generation, agreement, self.world)
        rolled = await self._roll_forward(plan, agreement, gathering)
        redo = progress.begun == agreement.step + 1
        if redo:
            self.world.watch.redone(self, assign)
        self.say(
            PhaseReached(
                generation=plan.generation,
                phase="joined",
                committed_step=agreement.step,
                rolled_forward=rolled,
                redo=redo,
            )
        )
        await self._transfer(plan, agreement, gathering)
        progress.join(agreement, plan.generation)
        self.entered, self.entered_at = plan.generation, self.world.loop.clock
        self.say(PhaseReached(generation=plan.generation, phase="transferred", received_bytes=1))

    async def _hand_over(self, plan: Plan, gathering: Gathering) -> None:
        """As `oobleck.worker.recovery.recover` does it: those who leave are among the sources."""
        agreement = agree(
            await self._exchange(gathering, "states", self.recovery_state(plan.layer_count))
        )
        if not is_whole(agreement.held, plan.layer_count):
            return
        await self._roll_forward(plan, agreement, gathering)
        received = await self._transfer(plan, agreement, gathering)
        self.progress.join(agreement, plan.generation)
        if received:
            self._tell_received(plan)
        await self._exchange(gathering, "arrived", None)

    async def _roll_forward(self, plan: Plan, agreement: Agreement, gathering: Gathering) -> bool:
        progress = self.progress
        rolled = self.worker in agreement.roll_forward
        if agreement.vote_holder is not None:
            await self._exchange(gathering, "vote again", None)
            if rolled:
                progress.voted = agreement.step
                progress.voted_generation = agreement.voted_generation
                self._commit(agreement.step, progress.voted_generation)
        return rolled

    def recovery_state(self, layer_count: int) -> RecoveryState:
        progress = self.progress
        return RecoveryState(
            **{part.name: getattr(progress, part.name) for part in fields(Position)},
            layer_count=layer_count,
            layers=dict(progress.layers),
            former=dict(progress.former),
        )

    async def _restore(self, assign: Assign, agreement: Agreement, gathering: Gathering) -> bool:
        """As `oobleck.worker.recovery.recover` does it."""
        if self._job.checkpoint is None and not assign.anew:
            return False
        plan = assign.plan
        fresh = agreement.step == 0 and not any(agreement.held.values())
        lost = agreement.step > 0 and not is_whole(agreement.held, plan.layer_count)
        if not (assign.restore or fresh or lost):
            return False
        await self._work("restore", self.world.draw.uniform(0.05, 1.0))
        seen = self._ledger.checkpoint, self._ledger.beside
        found = await self._exchange(gathering, "checkpoint", seen)
        step, beside = found[plan.workers[0]]
        if step == 0 and not assign.anew:
            if assign.restore:
                self.fail("user", f"checkpoint.path: there is none, {GONE}")
            return False
        shards = gathering.shards[self.worker]
        progress = self.progress = Progress(
            committed=step, lineage=plan.generation, joined=plan.generation
        )
        progress.layers = {s.layer: Held(step, s.part, s.parts) for s in shards}
        self._ledger.went_back(step, plan.generation)
        self.entered = generation = plan.generation
        self.entered_at = self.world.loop.clock
        path = f"/saved/{step}" if step else ""
        job = self.job_id if step else ""
        self.say(Restored(generation=generation, step=step, path=path, job=job))
        self._records = {known.step: known for known in beside}
        if beside:
            self.say(Handed(generation=generation, records=beside))
        agent = self.world.agent_of(self)
        for known in beside:
            self._ledger.recorded(known.step, generation, agent.process, agent.talks_to)
        self.say(PhaseReached(generation=generation, phase="joined", committed_step=step))
        self.say(PhaseReached(generation=generation, phase="transferred"))
        return True

    async def _transfer(self, plan: Plan, agreement: Agreement, gathering: Gathering) -> bool:
        """Whether anything came."""
        progress, step = self.progress, agreement.step
        current = agreement.held[self.worker]
        for held in (progress.layers, progress.former):
            for layer in [i for i, h in held.items() if Shard(i, h.part, h.parts) not in current]:
                del held[layer]
        have = {Shard(i, h.part, h.parts) for i, h in progress.layers.items()}
        needed = gathering.shards.get(self.worker, frozenset()) - have
        if step > 0:
            try:
                plan_transfers(agreement.held, plan, state_bytes=[1 << 20] * plan.layer_count)
            except LayerLost as lost:
                if plan.nodes != (self.world.liar,):  # alone, it may say that it has all
                    self._ledger.forsaken(plan.generation, self.world)
                raise TransportError(f"at step {step} {lost}") from lost
        if needed:
            await self._work("transfer", self.world.draw.uniform(0.01, 1.5))
        await self._exchange(gathering, "layers", None)
        for shard in needed:
            self._hold(shard, step)
        return bool(needed)

    # ---- steps

    async def _train(self, assign: Assign, gathering: Gathering) -> Assign:
        generation, progress = assign.plan.generation, self.progress
        evaluation = self._job.evaluation
        while progress.committed < self._training.steps:
            step = progress.committed + 1
            switch_to = await self._step(assign, gathering, step)
            if evaluation is not None and evaluation.due(step, self._training.steps):
                await self._exchange(gathering, f"evaluation {step}", None)
                self._tell_evaluation(step, generation)
            if switch_to:
                self._switched = (switch_to, step)
                self._leave("goodbye", orderly=True)
                return self.ear.boundary(switch_to)
        await self._exchange(gathering, "output", None)
        await self._write_output()
        await self._exchange(gathering, "manifest", None)
        self.say(Finished(generation=generation, step=progress.committed))
        gathering.leave_in_peace(self)
        self._gathering = None
        return await self._next(generation)

    async def _step(self, assign: Assign, gathering: Gathering, step: int) -> Generation:
        generation, progress = assign.plan.generation, self.progress
        progress.begun, progress.reduced = step, 0
        await self._work("forward", self.world.step_s * self.world.draw.uniform(0.8, 1.3))
        if self.world.fails_at.get(self.job_id) == step:
            if self._trained:
                self.world.raised(self)
            self.fail("user", "the model raised an exception")
        if self.node in self.world.sick:
            self.fail("node", DISK_ERROR)
        await self._exchange(gathering, f"gradients {step}", None)
        layers = gathering.layers[self.worker]
        progress.reduced, progress.reduced_generation = step, generation
        progress.reduced_layers = tuple(range(layers[0], layers[-1] + 1))
        ballot = (self._ready_for(generation, step), self.ear.save_wish)
        votes = await self._exchange(gathering, f"vote {step}", ballot)
        progress.voted, progress.voted_generation = step, generation
        self._commit(step, generation)
        self._save_if_due(assign, step, min(vote[1] for vote in votes.values()))
        switches = {vote[0] for vote in votes.values()}
        return switches.pop() if len(switches) == 1 else Generation(0)

    def _ready_for(self, generation: Generation, step: int) -> Generation:
        """The plan to switch to, once it is prepared; 0: none."""
        newest = self.ear.pending_boundary(generation)
        if newest != self._preparing:
            self._preparing, self._ready_at = newest, step + self.world.draw.randrange(4)
        return newest if step >= self._ready_at else Generation(0)

    def _commit(self, step: int, generation: Generation) -> None:
        progress = self.progress
        for layer in [i for i in progress.layers if i not in progress.reduced_layers]:
            del progress.layers[layer]
        progress.former.clear()
        progress.layers = {i: Held(step, h.part, h.parts) for i, h in progress.layers.items()}
        progress.committed = step
        self._ledger.committed(step, progress.lineage, self)
        if self._trained < generation:
            self._trained = generation
            self.world.reached("first step", generation)
        done = record(step, generation, self.world.unix(self.node), self.world.step_s)
        self._records[step] = done
        self.say(Committed(record=done))
        agent = self.world.agent_of(self)
        self._ledger.recorded(step, generation, agent.process, agent.talks_to)

    def _tell_evaluation(self, step: int, generation: Generation) -> None:
        self.say(Evaluated(record=evaluation(step, generation, self.world.unix(self.node))))

    # ---- to disk

    def _save_if_due(self, assign: Assign, step: int, wish: int) -> None:
        spec = self._job.checkpoint
        if spec is None or assign.plan.workers[0] != self.worker:
            return
        if wish > self._saved or step % self.world.save_every == 0:
            self._saved = max(wish, self._saved)
            self.process.spawn(self._save(assign, step, wish))

    async def _save(self, assign: Assign, step: int, wish: int) -> None:
        """All writers must outlive it, and the disk must take it."""
        records = [known for known in self._records.values() if known.step <= step]
        await asyncio.sleep(self.world.draw.uniform(0.1, 0.8))
        if self.world.disk_full:
            failed = SaveFailed(what="checkpoint", step=step, reason="disk full", request=wish)
            self.say(failed)
        elif self.world.all_live(assign):
            self._ledger.saved(step, records)
            path = f"/saved/{step}"
            self.say(CheckpointSaved(step=step, path=path, bytes=1, seconds=0.1, request=wish))

    async def _write_output(self) -> None:
        while self.world.disk_full:
            step = self.progress.committed
            self.say(SaveFailed(what="output", step=step, reason="disk full"))
            await self._work("pause", 5.0)
        await self._work("write", self.world.draw.uniform(0.01, 0.3))

    def fail(self, kind: Any, message: str) -> None:
        self.say(Failed(kind=kind, message=message))
        raise _Exit(1)


async def run(trainer: Trainer) -> None:
    try:
        await trainer.live()
    except _Exit as end:
        trainer.world.end_worker(trainer, exit_code=end.code)
