"""What must hold at every moment of a simulated run, whatever has failed."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oobleck.agent.connection import outbox as outboxes
from oobleck.agent.connection.records import LIMIT
from oobleck.host.ipc.messages import Assign, StepRecord
from oobleck.master.events.jobs import JobCancelled, JobFailed, JobRestored, JobSucceeded
from oobleck.master.events.plans import FirstStepCommitted, PlanMade
from oobleck.master.events.unions import Journaled, MasterStarted
from oobleck.master.state.desired import follow
from oobleck.planner.errors import LayerLost
from oobleck.planner.ids import Generation, Incarnation, JobId
from oobleck.planner.programs.shards import Shard, require_holders
from oobleck.worker.recovery.rejoin import Agreement

if TYPE_CHECKING:
    from simulation.clockwork import Process
    from simulation.machines import Agent
    from simulation.trainer import Trainer
    from simulation.world import World


#: What a job says that fails for want of its state.
GONE = "nor can any node that is away bring it back"
#: What grows slowly is looked at only so often.
_LOOK_S = 1.0
#: What struck is found, answered and over in this time.
_CALM_S = 30.0


class Broken(AssertionError):
    """An invariant does not hold."""


class Ledger:
    """What the workers of one job have really done."""

    def __init__(self, job_id: JobId, world: "World") -> None:
        self.job_id = job_id
        self._world = world
        #: The furthest committed step, by the generation in which all went back to a checkpoint.
        self.furthest: dict[int, int] = {0: 0}
        self.checkpoint = 0
        #: The records beside it.
        self.beside: tuple[StepRecord, ...] = ()
        #: The newest generation that any worker has agreed in.
        self._agreed, self._agreed_step = Generation(0), 0
        #: Steps that any worker has committed.
        self.steps: set[int] = set()
        #: Generations since the last of them whose workers found a layer to be with nobody.
        self._forsaken: set[Generation] = set()
        #: The agents whose workers have made the record of each step.
        self._keepers: dict[int, list[Process]] = {}
        #: Agents were told that records up to this step are on disk, and these steps' had to be.
        self._stored_step = 0
        self._stored: set[int] = set()

    def recorded(self, step: int, keeper: "Process") -> None:
        self._keepers.setdefault(step, []).append(keeper)

    def acknowledged(self, step: int) -> None:
        """The records up to this step are on disk, or nobody has them."""
        steps = range(self._stored_step + 1, step + 1)
        self._stored |= {each for each in steps if self._is_kept(each)}
        self._stored_step = max(self._stored_step, step)

    def may_lack(self, step: int) -> bool:
        """Whether everybody who had its record was gone before it was on disk."""
        return step not in self._stored and not self._is_kept(step)

    def _is_kept(self, step: int) -> bool:
        return any(keeper.alive for keeper in self._keepers.get(step, ()))

    def committed(self, step: int, lineage: int, trainer: "Trainer") -> None:
        """Committed steps follow each other, and none is left out."""
        if trainer.entered < self._agreed and step > self._agreed_step:
            return  # it was cut off, and the others go on without it
        world = trainer.world
        before = self.furthest.get(lineage, 0)
        if step > before + 1:
            world.watch.broken(f"step {step} of {self.job_id} follows step {before}")
        self.furthest[lineage] = max(before, step)
        self.steps.add(step)
        self._forsaken.clear()

    def forsaken(self, generation: Generation, world: "World") -> None:
        """The master may not have been told yet what those who are lost have committed with the
        others; once these say so it must not count on what has become out of date again."""
        self._forsaken.add(generation)
        if len(self._forsaken) > 1:
            world.watch.broken(f"{self.job_id}: in generations {sorted(self._forsaken)} no layer")

    def agreed(self, generation: Generation, agreement: Agreement, world: "World") -> None:
        """No step that anyone has committed is lost, unless all go back to a checkpoint. One that
        only a worker outside of this plan has seen the vote of is done again, by all."""
        if generation < self._agreed:
            return  # one that was stopped meanwhile; nobody goes on with it
        self._agreed, self._agreed_step = generation, agreement.step
        if not self._is_known(agreement.step + 1, world):
            self.furthest = {
                lineage: min(step, agreement.step) for lineage, step in self.furthest.items()
            }
            self.steps = {step for step in self.steps if step <= agreement.step}
        newest = max(self.furthest)
        furthest = self.furthest[newest] - 1
        if agreement.lineage == newest and agreement.step < furthest:
            world.watch.broken(
                f"{self.job_id} goes on after step {agreement.step} in generation {generation}, "
                f"though step {furthest} was committed"
            )
        if agreement.lineage < newest and agreement.step < furthest:
            world.watch.broken(f"{self.job_id} forgot that it went back in generation {newest}")

    def _is_known(self, step: int, world: "World") -> bool:
        """Whether anyone who is left has been told of the step. With can_lose nodes gone and one
        more, and no word of it to the master, there is nothing to go by."""
        master = world.master
        assert master is not None
        job = master.core.state.jobs[self.job_id]
        told = [job.seen.steps.committed_step, job.seen.steps.furthest_step]
        trainers = [t for t in world.trainers() if t.job_id == self.job_id and world.counts(t)]
        own = [t.progress.committed for t in trainers]
        return max(*told, *own) >= step

    def went_back(self, step: int, lineage: int) -> None:
        self.furthest.setdefault(lineage, step)

    def saved(self, step: int, records: Sequence[StepRecord]) -> None:
        """A checkpoint of the state after `step` is there, and these records beside it."""
        if step >= self.checkpoint:
            self.checkpoint, self.beside = step, tuple(records)


class Watch:
    """Checks the invariants as things happen; the first that is broken ends the run."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.problem: Broken | None = None
        #: How many events all masters have journaled.
        self.sequence = 0
        #: What was journaled: the plan of each generation, and how each job ended.
        self.plans: dict[tuple[JobId, Generation], PlanMade] = {}
        self._made_at: dict[tuple[JobId, Generation], float] = {}
        self.ends: dict[JobId, Journaled] = {}
        self._versions: dict[str, int] = {}
        #: Newest generation that each start of an agent was told of.
        self._told: dict[tuple[Incarnation, JobId], int] = {}
        #: Jobs that go back to a checkpoint or begin anew, until their next step.
        self._anew: set[JobId] = set()
        #: The newest checkpoint that each job went back to.
        self.restored: dict[JobId, int] = {}
        #: How many events of each kind were journaled.
        self.facts: Counter[str] = Counter()
        self._look_at = 0.0
        self._looked_at = (0, 0)
        self._counted: set[tuple[JobId, Generation, int]] = set()

    def broken(self, text: str) -> None:
        self._world.note(f"BROKEN: {text}")
        if self.problem is None:
            self.problem = Broken(text)

    def journaled(self, event: Journaled) -> None:
        """One plan per generation and one end per job, over all lives of the master, of which
        one decides at a time."""
        self.sequence += 1
        self.facts[type(event).__name__] += 1
        self._world.note_decision(event)
        match event:
            case PlanMade(job_id=job_id, plan=plan):
                key = job_id, plan.generation
                if key in self.plans:
                    self.broken(f"a second plan of generation {plan.generation} of {job_id}")
                newest = max((g for job, g in self.plans if job == job_id), default=0)
                if plan.generation <= newest:
                    self.broken(f"generation {plan.generation} of {job_id} after {newest}")
                if job_id in self.ends:
                    self.broken(f"a plan for {job_id}, which has ended")
                if event.restore:
                    self._check_begins_anew(job_id)
                self.plans[key] = event
                self._made_at[key] = self._world.loop.clock
            case JobSucceeded() | JobFailed() | JobCancelled():
                if event.job_id in self.ends:
                    self.broken(f"{event.job_id} ends again")
                self.ends[event.job_id] = event
                if isinstance(event, JobFailed) and GONE in event.reason:
                    self._check_gone(event.job_id, "fails")
                    self._check_exception(event.job_id)
            case FirstStepCommitted(job_id=job_id):
                self._anew.discard(job_id)
            case JobRestored(job_id=job_id, restored=restored):
                self.restored[job_id] = max(restored.step, self.restored.get(job_id, 0))
            case _:
                pass

    def _check_begins_anew(self, job_id: JobId) -> None:
        """Plans until the next step say so again."""
        master = self._world.master
        assert master is not None
        if job_id not in self._anew and not master.core.state.jobs[job_id].has_checkpoint:
            self._check_gone(job_id, "begins anew")
        self._anew.add(job_id)

    def _check_gone(self, job_id: JobId, what: str) -> None:
        """What a job fails or begins anew for want of is with nobody, whether the master hears of
        him or not."""
        master = self._world.master
        assert master is not None
        state = master.core.state
        workers = [
            trainer
            for agent in self._world.all_agents()
            # What a liar has counts only while it is believed, and of two agents of one name the
            # one counts that came last.
            if agent.name != self._world.liar
            and (
                (node := state.nodes.get(agent.name)) is None
                or node.facts.incarnation == agent.incarnation
            )
            for trainer in agent.trainers.values()
            if trainer.job_id == job_id and trainer.entered
        ]
        if self._world.have_all(state.jobs[job_id], workers):
            self.broken(f"{job_id} {what} for want of what its workers have")

    def _check_exception(self, job_id: JobId) -> None:
        if self._world.tells_of_an_exception(job_id):
            self.broken(f"the model of {job_id} has raised an exception, and it fails of another")

    def assigned(self, agent: "Agent", desired: Any) -> None:
        """Agents are told only of what is journaled, and of nothing older than before."""
        assign = desired.assign
        if assign is not None:
            key = agent.incarnation, desired.job_id
            before = self._told.get(key, 0)
            self._told[key] = desired.generation
            if desired.generation < before:
                self.broken(f"{agent.name} was told of a plan that {before} had come after")
            made = self.plans.get((desired.job_id, desired.generation))
            if made is None or made.assign != assign:
                self.broken(f"{agent.name} was told of a plan that was not made")

    def entering(self, trainer: "Trainer", assign: Assign) -> None:
        """A worker enters generations that were made, for its own process, and in their order."""
        generation = assign.plan.generation
        made = self.plans.get((trainer.job_id, generation))
        if made is None or made.plan != assign.plan:
            self.broken(f"{trainer.worker} enters generation {generation}, which was not made")
        elif trainer.incarnation not in (*made.incarnations, *made.leaving_incarnations):
            self.broken(f"{trainer.worker} enters a plan that is not for this process")
        if generation <= trainer.entered:
            self.broken(f"{trainer.worker} goes back to generation {generation}")

    def redone(self, trainer: "Trainer", assign: Assign) -> None:
        """A planned change, as a drain is, takes place between steps."""
        made = self.plans.get((trainer.job_id, assign.plan.generation))
        if made is None or not assign.boundary or self._world.in_trouble or self._world.hung:
            return
        if made.cause in ("node drained", "node joined") and self.calm(made):
            self.broken(f"{trainer.worker} redoes a step in {assign.plan.generation}: {made.cause}")

    def calm(self, made: PlanMade) -> bool:
        """Whether nothing struck for long before and after the plan was made."""
        return self._made_at[made.job_id, made.plan.generation] > self._world.peace_at + _CALM_S

    # ---- between events

    def look(self) -> None:
        """After all that happens at one moment."""
        now, master = self._world.loop.clock, self._world.master
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self.bounded_outboxes()
        if master is None or not master.process.alive:
            return
        at = id(master), master.core.state.sequence
        # Nobody is told of what a full disk has not taken.
        if at != self._looked_at and not master.journal.is_behind:
            self._looked_at = at
            self.versions_grow()
            self.desired_follows()
        self.enough_holders()

    def bounded_outboxes(self) -> None:
        """What waits for a master that is away has its limits."""
        for agent in self._world.agents.values():
            if len(agent.outbox._reports) > outboxes.REPORT_LIMIT + 64:
                self.broken(f"{agent.name} keeps {len(agent.outbox._reports)} reports")
            if len(agent.outbox._records) > LIMIT:
                self.broken(f"{agent.name} keeps {len(agent.outbox._records)} records")

    def versions_grow(self) -> None:
        """What a node shall do never becomes older, also over restarts of the master."""
        assert self._world.master is not None
        for name, node in self._world.master.core.state.nodes.items():
            version = node.desired.version
            if version < self._versions.get(name, 0):
                self.broken(f"the assignment of {name} went back to version {version}")
            self._versions[name] = version

    def desired_follows(self) -> None:
        """Events are followed for the nodes that they change something for: no other lacks it."""
        assert self._world.master is not None
        state = self._world.master.core.state
        before = {name: node.desired for name, node in state.nodes.items()}
        follow(state, MasterStarted(), self._world.loop.clock, unix=0.0)
        if before != {name: node.desired for name, node in state.nodes.items()}:
            self.broken("what is desired of nodes was not followed")

    def enough_holders(self) -> None:
        """Where all workers of the plan are in it, it can lose as many nodes as it claims."""
        assert self._world.master is not None
        job = self._world.master.core.state.job
        if job is None or job.current.made is None or job.state != "running" or job.current.losses:
            return
        plan, made = job.current.made.plan, job.current.made
        key = job.id, plan.generation, job.seen.steps.furthest_step
        if key in self._counted or job.current.stepped != plan.generation:
            return
        live = {t.incarnation: t for t in self._world.trainers()}
        workers = [live.get(process) for process in made.incarnations]
        if any(w is None or w.entered != plan.generation for w in workers):
            return
        self._counted.add(key)
        holders = [0] * plan.layer_count
        for node in plan.nodes:
            held = {
                worker.worker: frozenset(
                    Shard(layer, share.part, share.parts)
                    for layer, share in worker.progress.layers.items()
                )
                for worker in workers
                if worker is not None and worker.node == node
            }
            missing: tuple[int, ...] = ()
            try:
                require_holders(held, plan.layer_count)
            except LayerLost as lost:
                missing = lost.layers
            for layer in range(plan.layer_count):
                holders[layer] += layer not in missing
        fewest = min(holders)
        if made.can_lose > fewest - 1:
            self.broken(
                f"{job.id} claims that it can lose {made.can_lose} nodes, and a layer has "
                f"{fewest} holders"
            )
