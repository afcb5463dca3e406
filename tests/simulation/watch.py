"""What must hold at every moment of a simulated run, whatever has failed."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from simulation.books import Book

from oobleck.agent.connection import outbox as outboxes
from oobleck.agent.connection.outbox import LIMIT
from oobleck.core.ids import Generation, Incarnation, JobId
from oobleck.core.messages import Assign, StepRecord
from oobleck.core.routes import LayerLost, Shard, require_holders
from oobleck.master.events.jobs import (
    FirstStepCommitted,
    JobAdopted,
    JobCancelled,
    JobFailed,
    JobRestored,
    JobSubmitted,
    JobSucceeded,
    PlanMade,
)
from oobleck.master.events.nodes import UnknownJobEnded
from oobleck.master.events.unions import Journaled, MasterStarted
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.reducer.apply import follow
from oobleck.proto.types import Assignment, Head
from oobleck.worker.recovery.rejoin import Agreement

if TYPE_CHECKING:
    from simulation.clockwork import Process
    from simulation.machines import Agent, MasterHost
    from simulation.trainer import Trainer
    from simulation.world import World


#: What a job says that fails for want of its state.
GONE = "nor can any node that is away bring it back"
#: What grows slowly is looked at only so often.
_LOOK_S = 1.0
#: A worker's word that it holds its layers may be on its way for so long.
_WORD_S = 0.2
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
        #: Heads that were apart have each had some of the workers go on, so that there are two
        #: courses of the same steps.
        self.is_split = False
        #: Generations since the last of them whose workers found a layer to be with nobody.
        self._forsaken: set[Generation] = set()
        #: The steps whose records each agent keeps, with the plan whose workers may tell of them,
        #: and up to which step a head has told it that it need not.
        self._kept: dict[Process, dict[int, Generation]] = {}
        self._through: dict[tuple[Process, Book | None], int] = {}
        #: Agents were told that records up to this step are on that disk, and these steps' had to
        #: be.
        self._stored_step: dict[Book, int] = {}
        self._stored: dict[Book, set[int]] = {}

    def recorded(self, step: int, by: Generation, keeper: "Process", book: Book | None) -> None:
        """`by`: the plan whose workers may tell of it; `book`: of the head that the agent talks to.
        It keeps those of one job at a time."""
        for ledger in self._world.ledgers.values():
            if ledger is not self:
                ledger._kept.pop(keeper, None)
        if step > self._through.get((keeper, book), 0):
            self._kept.setdefault(keeper, {})[step] = by

    def acknowledged(self, step: int, book: Book, keeper: "Process") -> None:
        """The records up to this step are on that disk, or nobody has them. The agent keeps them
        no more, and may follow another head later."""
        before = self._stored_step.get(book, 0)
        stored = self._stored.setdefault(book, set())
        stored |= {each for each in range(before + 1, step + 1) if self._is_kept(each, book)}
        self._stored_step[book] = max(before, step)
        kept = self._kept.get(keeper, {})
        self._kept[keeper] = {each: made for each, made in kept.items() if each > step}
        self._through[keeper, book] = max(step, self._through.get((keeper, book), 0))

    def copied(self, book: Book) -> None:
        """A disk was copied, with what it was known to have."""
        assert book.parent is not None
        self._stored[book] = set(self._stored.get(book.parent, ()))
        self._stored_step[book] = self._stored_step.get(book.parent, 0)

    def may_lack(self, step: int, book: Book) -> bool:
        """Whether everybody who had its record was gone before it was on the disk. A record of a
        plan that the head of that directory does not know may be one that it does not take."""
        return step not in self._stored.get(book, ()) and not self._is_kept(step, book)

    def _is_kept(self, step: int, book: Book) -> bool:
        liar = f"agent {self._world.liar}"
        return any(
            keeper.alive and keeper.name != liar and (self.job_id, kept[step]) in book.plans
            for keeper, kept in self._kept.items()
            if step in kept
        )

    def committed(self, step: int, lineage: int, trainer: "Trainer") -> None:
        """Committed steps follow each other, and none is left out."""
        if trainer.entered < self._agreed and step > self._agreed_step:
            return  # it was cut off, and the others go on without it
        world = trainer.world
        before = self.furthest.get(lineage, 0)
        if step > before + 1 and not self.is_split:
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
        begins = not any(agreement.held.values()) and world.watch.begins(self.job_id, generation)
        if generation < self._agreed and not begins:
            return  # one that was stopped meanwhile; nobody goes on with it
        self._agreed, self._agreed_step = generation, agreement.step
        self.is_split |= world.watch.has_others(self.job_id, generation)
        if begins:
            # Its head goes on from before the job was trained.
            self.furthest, self.steps = {0: 0}, set()
        if not self._is_known(agreement.step + 1, generation, world):
            self.furthest = {
                lineage: min(step, agreement.step) for lineage, step in self.furthest.items()
            }
            self.steps = {step for step in self.steps if step <= agreement.step}
        if self.is_split:
            return
        newest = max(self.furthest)
        furthest = self.furthest[newest] - 1
        if agreement.lineage == newest and agreement.step < furthest:
            world.watch.broken(
                f"{self.job_id} goes on after step {agreement.step} in generation {generation}, "
                f"though step {furthest} was committed"
            )
        if agreement.lineage < newest and agreement.step < furthest:
            world.watch.broken(f"{self.job_id} forgot that it went back in generation {newest}")

    def _is_known(self, step: int, generation: Generation, world: "World") -> bool:
        """Whether anyone who is left has been told of the step. With can_lose nodes gone and one
        more, and no word of it to the master, there is nothing to go by."""
        state = world.watch.state_of(self.job_id, generation)
        job = state.jobs[self.job_id]
        told = [job.seen.steps.committed_step, job.seen.steps.furthest_step]
        trainers = [
            trainer
            for trainer in world.trainers()
            if trainer.job_id == self.job_id
            # One that is cut off may go on, all the same.
            and (node := state.nodes.get(trainer.node)) is not None
            and node.registered
            and node.held is None
        ]
        own = [t.progress.committed for t in trainers]
        return max(*told, *own) >= step

    def went_back(self, step: int, lineage: int) -> None:
        """A checkpoint has all steps before it, also those of nodes that followed another head."""
        self.furthest.setdefault(lineage, step)
        self.steps |= set(range(1, step + 1))

    def saved(self, step: int, records: Sequence[StepRecord]) -> None:
        """A checkpoint of the state after `step` is there, and these records beside it."""
        if step >= self.checkpoint:
            self.checkpoint, self.beside = step, tuple(records)


class Watch:
    """Checks the invariants as things happen; the first that is broken ends the run."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.problem: Broken | None = None
        #: The plan of each generation, whichever head made it; when, and the last that had it.
        self.plans: dict[tuple[JobId, Generation], PlanMade] = {}
        self._made_at: dict[tuple[JobId, Generation], float] = {}
        self._made_by: dict[tuple[JobId, Generation], Book] = {}
        #: The directory of the head that agents have acted on the word of, by history, term and who
        #: began that.
        self._acted_on: dict[tuple[str, int, str], Book] = {}
        #: Newest generation that each start of an agent was told of, by the head. Agents pass over
        #: what one of them tells that does not know of a newer one; see `entering`.
        self._told: dict[tuple[Incarnation, JobId, Book], int] = {}
        #: The newest checkpoint that each job went back to.
        self.restored: dict[JobId, int] = {}
        #: How many events of each kind were journaled.
        self.facts: Counter[str] = Counter()
        self._look_at = 0.0
        self._looked_at: dict[Book, tuple[int, int]] = {}
        self._counted: set[tuple[JobId, Generation, int]] = set()

    def broken(self, text: str) -> None:
        self._world.note(f"BROKEN: {text}")
        if self.problem is None:
            self.problem = Broken(text)

    def journaled(self, event: Journaled, book: Book) -> None:
        """One plan per generation, over all heads, and one end per job, over all lives of the
        master of one directory, of which one decides at a time."""
        book.sequence += 1
        self.facts[type(event).__name__] += 1
        self._world.note_decision(event)
        match event:
            case PlanMade(job_id=job_id, plan=plan):
                key = job_id, plan.generation
                # One that is adopted is the same plan. A directory that was put back numbers as
                # before where nobody is left who could tell.
                again = key in self.plans and self.plans[key].assign != event.assign
                if again and not (book.put_back and not self._is_known(*key)):
                    self.broken(f"a second plan of generation {plan.generation} of {job_id}")
                newest = book.newest.get(job_id, 0)
                if plan.generation <= newest:
                    self.broken(f"generation {plan.generation} of {job_id} after {newest}")
                if job_id in book.ends:
                    self.broken(f"a plan for {job_id}, which has ended")
                if event.restore:
                    self._check_begins_anew(job_id, book)
                self.plans[key] = event if again else self.plans.get(key, event)
                self._made_at.setdefault(key, self._world.loop.clock)
                self._made_by[key], book.newest[job_id] = book, plan.generation
                book.plans.add(key)
            case JobSucceeded() | JobFailed() | JobCancelled():
                if event.job_id in book.ends:
                    self.broken(f"{event.job_id} ends again")
                book.ends[event.job_id] = event
                if isinstance(event, JobFailed) and GONE in event.reason:
                    self._check_gone(event.job_id, "fails", book)
                    if self._world.tells_of_an_exception(event.job_id, book):
                        self.broken(f"the model of {event.job_id} raised, and it fails of another")
            case JobSubmitted(job_id=job_id) | JobAdopted(job_id=job_id):
                if job_id in book.jobs:
                    self.broken(f"{job_id} is submitted again")
                book.jobs.add(job_id)
            case UnknownJobEnded(job_id=job_id, nodes=nodes):
                book.ended |= {(job_id, node) for node in nodes}
            case FirstStepCommitted(job_id=job_id):
                book.anew.discard(job_id)
                book.trained.add(job_id)
            case JobRestored(job_id=job_id, restored=restored):
                self.restored[job_id] = max(restored.step, self.restored.get(job_id, 0))
            case _:
                pass

    def _is_known(self, job_id: JobId, generation: Generation) -> bool:
        """Return whether an agent or a worker has come to that generation."""
        trainers = (t.entered for t in self._world.trainers() if t.job_id == job_id)
        told = (agent.supervisor._state.desired for agent in self._world.all_agents())
        agents = (desired.generation for desired in told if desired.job_id == job_id)
        return max([0, *trainers, *agents]) >= generation

    def begins(self, job_id: JobId, generation: Generation) -> bool:
        """Whether a head trains the job from the beginning, and another one has trained it."""
        book = self._made_by.get((job_id, generation))
        return book is not None and book.parent is not None and job_id not in book.trained

    def has_others(self, job_id: JobId, generation: Generation) -> bool:
        """Whether workers go on without that plan, by the word of another head."""
        own, members = self._made_by[job_id, generation], self.plans[job_id, generation].plan.nodes
        return any(
            agent.follows is not own
            and agent.name not in members
            and any(t.job_id == job_id and t.entered for t in agent.trainers.values())
            for agent in self._world.all_agents()
        )

    def state_of(self, job_id: JobId, generation: Generation) -> ClusterState:
        """As the head has it that made the plan, or adopted it last."""
        return self._state(self._made_by[job_id, generation])

    def _state(self, book: Book) -> ClusterState:
        """As the newest head of that directory has it, or had it before it died."""
        return self._world.heads[book].core.state

    def _check_begins_anew(self, job_id: JobId, book: Book) -> None:
        """Plans until the next step say so again."""
        if job_id not in book.anew and not self._state(book).jobs[job_id].has_checkpoint:
            self._check_gone(job_id, "begins anew", book)
        book.anew.add(job_id)

    def _check_gone(self, job_id: JobId, what: str, book: Book) -> None:
        """What a job fails or begins anew for want of is with nobody, whether the master hears of
        him or not."""
        state, known = self._state(book), book.plans
        made = state.jobs[job_id].current.made
        if made is not None and made.plan.nodes == (self._world.liar,):
            return  # it says how far it came alone, and so that what others hold is out of date
        if any(
            trainer.job_id == job_id and trainer.entered and (job_id, trainer.entered) not in known
            for trainer in self._world.trainers()
        ):
            return  # it was adopted on its way, and its head cannot know the plan of before
        workers = [
            trainer
            for agent in self._world.all_agents()
            # What a liar has counts only while it is believed, and of two agents of one name the
            # one counts that came last. Who follows another head does not come back, nor does who
            # ends. A thread that hangs hands nothing over.
            if agent.name != self._world.liar
            and agent.follows is book
            and not agent.supervisor._state.shutting_down
            and (
                (node := state.nodes.get(agent.name)) is None
                or (
                    node.facts.incarnation == agent.incarnation
                    # An operator who drains the last holder by force gives the job up.
                    and not (node.drain is not None and node.drain.force and node.drain.done)
                )
            )
            for trainer in agent.trainers.values()
            if trainer.job_id == job_id and trainer.entered and not trainer.stuck
            if trainer.entered_at < self._world.loop.clock - _WORD_S
        ]
        if self._world.have_all(state.jobs[job_id], workers):
            self.broken(f"{job_id} {what} for want of what its workers have")

    def assigned(self, agent: "Agent", desired: Assignment) -> None:
        """Agents are told only of what is journaled, and of nothing older than before."""
        assert desired.head is not None
        book = agent.talks_to
        assert book is not None
        self._check_followed(agent, desired.head, book)
        before, agent.job_id = agent.job_id, desired.job_id
        agent.acted_on, agent.follows = desired.head, book
        for trainer in agent.trainers.values():
            job_id = trainer.job_id
            if job_id != before or not trainer.entered:
                continue  # it was ended before, or has just been started and holds nothing
            known = job_id in book.jobs or (job_id, agent.name) in book.ended
            if job_id != desired.job_id and not known:
                self.broken(f"{agent.name} ends workers of {job_id}, which {book.name} knows not")
        assign = desired.assign
        if assign is not None:
            assert desired.job_id is not None
            assert desired.generation is not None
            key = agent.incarnation, desired.job_id, book
            before = self._told.get(key, 0)
            self._told[key] = desired.generation
            if desired.generation < before:
                self.broken(f"{agent.name} was told of a plan that {before} had come after")
            made = self.plans.get((desired.job_id, desired.generation))
            if made is None or made.assign != assign:
                self.broken(f"{agent.name} was told of a plan that was not made")

    def _check_followed(self, agent: "Agent", head: Head, book: Book) -> None:
        """No agent acts on the word of a head of an earlier term than before, or of another head in
        the same; and no two heads have something acted on in one term. That a directory was put
        back can only be known by what agents tell: there, this holds for each of them."""
        before = agent.acted_on
        if before is not None and before.history == head.history:
            same = (head.term, head.begun_by) == (before.term, before.begun_by)
            if not same and head.term <= before.term:
                self.broken(f"{agent.name} follows {head} of {book.name} after {before}")
            if same and self.lacking(agent, book):
                self.broken(f"{agent.name} is told in {head} by {book.name}, which is behind")
        acted = self._acted_on.setdefault((head.history, head.term, head.begun_by), book)
        if acted is not book and not book.put_back:
            self.broken(f"{acted.name} and {book.name} have something acted on in {head}")

    def lacking(self, agent: "Agent | None", book: Book) -> int:
        """Return how many events the agent has heard that the directory does not have."""
        if agent is None or agent.acted_on is None or agent.follows is None:
            return 0
        shared = book.shared(agent.follows)
        return max(0, agent.acted_on.sequence - shared) if shared else 0

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
        now = self._world.loop.clock
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self.bounded_outboxes()
        for head in self._world.live_heads:
            # Nobody is told of what a full disk has not taken.
            at = head.core.state.sequence, head.lacks
            if at != self._looked_at.get(head.book) and not head.journal.is_behind:
                self._looked_at[head.book] = at
                self.versions_grow(head)
                self.desired_follows(head)
                self.names_what_it_lacks(head)
            self.enough_holders(head)

    def names_what_it_lacks(self, head: "MasterHost") -> None:
        """Events that an agent was told of and that are lost are those that the head names. It does
        not know when a copy of its own was made, and may name more. Of a directory that was put
        back it may name fewer after another start, but never none."""
        behind = head.core.state.behind
        told, lacks, book = behind[0] if behind is not None else 0, head.lacks, head.book
        copied = any(other.parent is book for other in self._world.heads)
        fewer = book.put_back and book.starts > 1
        if (told > lacks and not copied) or (told < lacks and not (fewer and told)):
            self.broken(f"{book.name} says that it lacks {told} events, not {lacks}")

    def bounded_outboxes(self) -> None:
        """What waits for a master that is away has its limits."""
        for agent in self._world.agents.values():
            if len(agent.outbox._reports) > outboxes.REPORT_LIMIT + 64:
                self.broken(f"{agent.name} keeps {len(agent.outbox._reports)} reports")
            if len(agent.outbox._records) > LIMIT:
                self.broken(f"{agent.name} keeps {len(agent.outbox._records)} records")

    def versions_grow(self, head: "MasterHost") -> None:
        """What a node shall do never becomes older, also over restarts of the master."""
        versions = head.book.versions
        for name, node in head.core.state.nodes.items():
            version = node.desired.version
            if version < versions.get(name, 0):
                self.broken(f"the assignment of {name} went back to version {version}")
            versions[name] = version

    def desired_follows(self, head: "MasterHost") -> None:
        """Events are followed for the nodes that they change something for: no other lacks it."""
        state = head.core.state
        before = {name: node.desired for name, node in state.nodes.items()}
        follow(state, MasterStarted(start="00000001"), self._world.loop.clock, unix=0.0)
        if before != {name: node.desired for name, node in state.nodes.items()}:
            self.broken("what is desired of nodes was not followed")

    def enough_holders(self, head: "MasterHost") -> None:
        """Where all workers of the plan are in it, it can lose as many nodes as it claims."""
        job = head.core.state.job
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
