"""The player of transcripts, against the decisions of the master alone.

A transcript is a text: `TIME COMMAND` lines say what happens, `>` lines what is decided (with the
time in front where it was decided later than the command, at a wake-up), `=` lines what the
operator sees of the job after it. The player makes the `>` and `=` lines from the commands; a
test compares the whole text. `cd tests && python -m support.scenario FILE` rewrites one.

Connected nodes send heartbeats by themselves. The journal is kept, and after every command a
second state is made from it, which must equal the durable part of the first. After every event the
state is validated.
"""

import copy
import shlex
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from oobleck.agent.connection.reports import newest_plan
from oobleck.core.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.core.messages import (
    Assign,
    CheckpointSaved,
    Failed,
    LinkMeasured,
    Measured,
    PeerLost,
    PhaseReached,
    Rendezvous,
    Restored,
    SaveFailed,
)
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.profile import LayerProfile, LinkMeasurement, Measurement, Profile
from oobleck.core.routes import Hold
from oobleck.host.detection import Detection
from oobleck.host.versions import ENGINE, Versions
from oobleck.master.config import Retention
from oobleck.master.events.jobs import (
    CheckpointPublished,
    CheckpointRequested,
    FirstStepCommitted,
    FollowUpDropped,
    JobCancelRequested,
    JobCaughtUp,
    JobFailed,
    JobPutBack,
    JobRestored,
    JobSubmitted,
    JobWaiting,
    MeasuringStarted,
    PlanMade,
    ProfileChosen,
    RateChanged,
    RecordsLost,
    SaveProblem,
)
from oobleck.master.events.nodes import (
    NodeCleared,
    NodeDrained,
    NodeDrainRequested,
    NodeForgotten,
    NodeKept,
    NodeLeftOut,
    NodeLost,
    NodeQuarantined,
    NodeRegistered,
    NodeReleased,
    NodeReset,
    NodeUndrained,
    WorkerLost,
)
from oobleck.master.events.unions import (
    AgentRefused,
    EvaluationReceived,
    JournalCut,
    Journaled,
    MasterStarted,
    NodesIdle,
    Observed,
    ProfilesFound,
    RecordsReceived,
    RecordsWait,
    RestoreReceived,
    StatusReceived,
    StreamClosed,
    StreamOpened,
    Tick,
    WorkerReported,
)
from oobleck.master.planning.requests import Machines, profile_on
from oobleck.master.rules.admission import Refusal, admit
from oobleck.master.rules.reconcile import reconcile
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.job_observed import JobSeen
from oobleck.master.state.node import NodeSeen
from oobleck.master.state.reducer.apply import apply, follow
from oobleck.master.state.validate import validate
from oobleck.master.storage import snapshot
from oobleck.master.storage.event_lines import lines_of
from oobleck.planner.cost.estimate import computing_by_layer_s
from oobleck.planner.profile.estimate import estimate_profile
from oobleck.proto.types import (
    Assignment,
    Happening,
    Hung,
    NodeFacts,
    NodeStatus,
    WorkerExited,
    WorkerStatus,
)
from support.agent import Agent, facts
from support.jobs import evaluation, job_spec, record

UNIX = 1_700_000_000.0
#: Round numbers, far apart, so that transcripts tell which of them something waited for.
TIMING = Detection(lease_s=5.0, hang_s=20.0, stall_s=30.0)


def measurement(forward_s: float) -> Measurement:
    """Return a measurement of `job_spec`'s model in which every layer takes equally long."""
    layers = estimate_profile(
        job_spec("any"), gpus_per_node=1, memory_per_worker_bytes=1 << 30
    ).layers
    kinds = tuple(
        LayerProfile(
            name=name,
            forward_s={1: forward_s},
            backward_s={1: 2 * forward_s},
            parameter_bytes=layer.parameter_bytes,
            state_bytes=layer.state_bytes,
            activation_bytes=layer.activation_bytes,
            output_bytes=layer.output_bytes,
        )
        for name, layer in zip(
            ("embedding", "block", "head"), (*layers[:2], layers[-1]), strict=True
        )
    )
    return Measurement(kinds=kinds, device="abacus", torch="2")


def check_desired(state: ClusterState, now: float, unix: float) -> None:
    """Check that the last event was followed for every node whose assignment it changes."""
    before = {name: (node.desired, node.seen.assigned_at) for name, node in state.nodes.items()}
    follow(state, MasterStarted(start="00000001"), now, unix)
    after = {name: (node.desired, node.seen.assigned_at) for name, node in state.nodes.items()}
    assert before == after, "what is desired of nodes was not followed"


class ScenarioAgent(Agent):
    """An agent of a transcript: its session, and the data that its next workers read."""

    def __init__(self, there: NodeFacts) -> None:
        super().__init__(there)
        self.session = 0
        self.silent = False
        self.data = "same"


class Player:
    def __init__(self, timing: Detection | None = None) -> None:
        self.timing = timing or TIMING
        self.retention = Retention()
        self.state = ClusterState()
        self.journal: list[tuple[float, Journaled]] = []
        #: What follows from so many events of the journal alone.
        self._follower, self._followed = ClusterState(), 0
        self.now = 0.0
        self.agents: dict[str, ScenarioAgent] = {}
        #: The last one of each name that was refused.
        self.rivals: dict[str, ScenarioAgent] = {}
        self.lives = 0
        self.wake_at: float | None = None
        self.seen: list[str] = []
        self.written: list[str] = []
        self.event_lines: dict[JobId, list[dict]] = {}
        self.profiles: dict[str, Profile] = {}
        self.swapped: dict[WorkerId, WorkerStatus] = {}
        self.forked_at: dict[WorkerId, float] = {}

    # ---- playing

    def play(self, text: str) -> str:
        for line in text.splitlines():
            if line.startswith((">", "=")):
                continue
            self.written.append(line)
            if not line.strip() or line.startswith("#"):
                continue
            moment, *words = shlex.split(line)
            if words[0] == "late":
                self.now = float(moment)
            else:
                self._advance(float(moment))
            getattr(self, f"do_{words[0]}")(*words[1:])
            self._settle("")
            self._check_replay()
        assert durable(self._replayed()) == durable(self.state)
        return "\n".join(self.written) + "\n"

    def _advance(self, until: float) -> None:
        assert until >= self.now, f"time runs backwards at {until}"
        while self.wake_at is not None and self.wake_at <= until:
            self.now = max(self.now, self.wake_at)
            self._heartbeats()
            self._settle(f"{self.now:.2f} ")
        self.now = until
        self._heartbeats()

    def _heartbeats(self) -> None:
        for name, agent in sorted(self.agents.items()):
            node = self.state.nodes.get(NodeName(name))
            if node and node.connected and not agent.silent and agent.session:
                self._observe(StatusReceived(node=NodeName(name), status=agent.status))

    def _settle(self, prefix: str) -> None:
        for _ in range(100):
            before = copied(self.state)
            decision = reconcile(
                self.state, self.now, self.timing, nonce="nonce", retain=self.retention
            )
            assert self.state == before, "reconcile changed the state"
            self.wake_at = decision.wake_at
            if not decision.actions:
                break
            for event in decision.actions:
                self.written.append(f"> {prefix}{told(event)}")
                self._journal(event)
        else:
            raise AssertionError(f"decisions do not end: {decision}")
        if self.wake_at is not None and self.wake_at <= self.now:
            raise AssertionError(f"wakes in the past: {decision}")
        if (job := self.state.job) is not None and job.seen.why_idle != decision.why_idle:
            self._observe(NodesIdle(job_id=job.id, why=decision.why_idle))
        self._tell_assignments()
        seen = [
            f"= {j.id} {j.state}{': ' + j.reason if j.reason else ''}"
            for j in self.state.jobs.values()
        ]
        self.written += [line for line in seen if line not in self.seen]
        self.seen = seen

    def _tell_assignments(self) -> None:
        for name, agent in self.agents.items():
            node = self.state.nodes.get(NodeName(name))
            if node is not None and node.connected and node.seen.session == agent.session:
                assignment = self.state.assignment(node)
                agent.running = newest_plan(agent.running, assignment)

    @property
    def job(self) -> Job:
        """Active job."""
        job = self.state.job
        assert job is not None
        return job

    def _journal(self, event: Journaled, unix: float | None = None) -> None:
        unix = UNIX + self.now if unix is None else unix
        for job_id, line in lines_of(self.state, event, unix):
            self.event_lines.setdefault(job_id, []).append(line)
        self.journal.append((unix, event))
        apply(self.state, event, now=self.now, unix=unix)
        validate(self.state)
        check_desired(self.state, self.now, unix)

    def _observe(self, event: Observed) -> None:
        apply(self.state, event, now=self.now, unix=UNIX + self.now)
        validate(self.state)

    def _replayed(self) -> ClusterState:
        state = ClusterState()
        for unix, event in self.journal:
            apply(state, event, now=self.now, unix=unix)
        return state

    def _check_replay(self) -> None:
        new = self.journal[self._followed :]
        for unix, event in new:
            apply(self._follower, event, now=self.now, unix=unix)
        self._followed = len(self.journal)
        assert durable(self._follower) == durable(self.state)
        if not new:
            return
        restored, *_ = snapshot.restore(snapshot.take(self.state, {}, ()), self.now)
        assert durable(restored) == durable(self.state)

    # ---- commands

    def do_forget_after(self, seconds: str) -> None:
        """Forget lost nodes after so long, from now on."""
        self.retention = Retention(node_s=float(seconds))

    def do_submit(self, name: str, *options: str) -> None:
        values = {key: int(value) for key, value in (o.split("=") for o in options)}
        profile_only = bool(values.pop("profile_only", 0))
        job_id = JobId(f"{name}-{len(self.state.jobs) + 1}")
        self._journal(
            JobSubmitted(
                job_id=job_id,
                request_id=job_id,
                spec=job_spec(name, **values),
                profile_only=profile_only,
            )
        )

    def do_cancel(self, job_id: str) -> None:
        self._journal(JobCancelRequested(job_id=JobId(job_id), request_id="cancel"))

    def do_register(self, *names: str) -> None:
        """Start agents; NAME:SLOTS for more than one worker, NAME@VERSION for one of torch, NAME^N
        for engine N, NAME/cuda for one with GPUs, NAME%RACK for one in a rack."""
        for word in names:
            rest, _, rack = word.partition("%")
            rest, _, device = rest.partition("/")
            rest, _, engine = rest.partition("^")
            rest, _, torch = rest.partition("@")
            name, _, slots = rest.partition(":")
            self.lives += 1
            there = facts(
                name,
                incarnation=Incarnation(f"{self.lives:04x}"),
                hostname=f"host-{name}",
                address="10.0.0.1",
                pid=1000 + self.lives,
                worker_slots=int(slots or 1),
                device=device or "cpu",
                versions=Versions(torch=torch, engine=engine or ENGINE),
                rack=rack,
            )
            agent = ScenarioAgent(there)
            if self._admit(agent):
                self.agents[name] = agent
            else:
                self.rivals[name] = agent

    def do_retry(self, name: str) -> None:
        """Have the agent that was refused try again."""
        if self._admit(self.rivals[name]):
            self.agents[name] = self.rivals[name]

    def do_reconnect(self, *names: str) -> None:
        for name in names:
            self.agents[name].silent = False
            self._admit(self.agents[name])

    def do_claim(self, name: str, generation: str, what: str, *nodes: str) -> None:
        """The agent comes back and tells of a plan of one pipeline over `nodes` that no master has
        made, which is `what`: whole, or without processes."""
        job = self.job
        layers = job.spec.model.layer_count
        cuts = [round(k * layers / len(nodes)) for k in range(len(nodes) + 1)]
        stages = tuple(
            Hold(first_layer=first, last_layer=last - 1, workers=(WorkerId(NodeName(node), 0),))
            for first, last, node in zip(cuts, cuts[1:], nodes, strict=False)
        )
        pipeline = Pipeline(
            nodes=tuple(map(NodeName, nodes)),
            stages=stages,
            microbatches=job.spec.training.microbatches,
        )
        plan = Plan.of_pipelines([pipeline], generation=Generation(int(generation)))
        meeting = Rendezvous(host=f"{name}:4000", prefix="claimed")
        agent = self.agents[name]
        agent.running = Assignment(
            version=1,
            job_id=job.id,
            assign=Assign(plan=plan, rendezvous=meeting, boundary=False),
            worker_incarnations=()
            if what == "nameless"
            else tuple(worker.incarnation for worker in agent.status.workers),
        )
        self.do_reconnect(name)

    def _admit(self, agent: ScenarioAgent) -> bool:
        verdict = admit(self.state, agent.registration(), self.now, self.timing)
        if isinstance(verdict, Refusal):
            kind = "refused for now" if verdict.temporary else "refused"
            self.written.append(f"> {kind}: {verdict.reason}")
            self._observe(AgentRefused(node=agent.facts.node, incarnation=agent.facts.incarnation))
            return False
        for event in verdict:
            self.written.append(f"> {told(event)}")
            self._journal(event)
        self.lives += 1
        agent.session = self.lives
        name = agent.facts.node
        opened = StreamOpened(
            node=name, session=agent.session, status=agent.status, running=agent.running
        )
        self._observe(opened)
        return True

    def do_close(self, *names: str) -> None:
        for name in names:
            session = self.agents[name].session
            self._observe(StreamClosed(node=NodeName(name), session=session))

    def do_silent(self, *names: str) -> None:
        for name in names:
            self.agents[name].silent = True

    def do_ready(self, *names: str) -> None:
        """Start workers in every slot, for the job that the node is assigned to; they are up."""
        for name in names:
            agent = self.agents[name]
            job_id = self.state.nodes[NodeName(name)].desired.job_id
            agent.change(job_id=job_id, generation=Generation(0), workers=())
            for slot in range(agent.facts.worker_slots):
                self._fresh(agent, slot)
            self._tell(agent)

    def do_starts(self, *names: str) -> None:
        """Start workers as `ready` does; they are not up yet."""
        for name in names:
            self.do_ready(name)
            for worker in self.agents[name].status.workers:
                self.agents[name].worker(worker.slot, card="", data="")
            self._tell(self.agents[name])

    def do_data(self, name: str, data: str) -> None:
        """Set the data that the node's next workers read."""
        self.agents[name].data = data

    def do_bare(self, *names: str) -> None:
        """Have the agents end their workers."""
        for name in names:
            self.agents[name].status = NodeStatus(leaving=self.agents[name].status.leaving)
            self._tell(self.agents[name])

    def _fresh(self, agent: ScenarioAgent, slot: int) -> None:
        self.lives += 1
        agent.worker(
            slot,
            incarnation=Incarnation(f"{self.lives:04x}"),
            pid=2000 + self.lives,
            card=f"{agent.facts.node}:{4000 + slot}",
            data=agent.data,
            generation=Generation(0),
            also_entered=(),
            committed_step=-1,
            stepped=Generation(0),
            compute_steps=0,
            compute_s=0.0,
            finished=False,
            up_s=0.0,
        )
        self.forked_at[WorkerId(agent.facts.node, slot)] = self.now

    def _tell(self, agent: ScenarioAgent) -> None:
        self._observe(StatusReceived(node=agent.facts.node, status=agent.status))

    def do_enter(self, generation: str, *names: str) -> None:
        """Report all phases of the workers on their way into the generation."""
        for phase in ("aborted", "joined", "transferred"):
            self.do_phase(phase, generation, *names)
        for name in names:
            agent = self.agents[name]
            agent.change(generation=Generation(int(generation)))
            for worker in agent.status.workers:
                before = () if worker.generation == Generation(0) else (worker.generation,)
                agent.worker(
                    worker.slot,
                    generation=Generation(int(generation)),
                    also_entered=(*worker.also_entered, *before),
                    finished=False,
                )
            self._tell(agent)

    def do_phase(self, phase: str, generation: str, *words: str) -> None:
        """PHASE GENERATION N1 N2 [bytes=100]: report a phase, `transferred` with received bytes."""
        names = [word for word in words if not word.startswith("bytes=")]
        received = next((word[6:] for word in words if word not in names), "100")
        step = self.job.seen.steps.committed_step
        for name in names:
            reached = PhaseReached(
                generation=Generation(int(generation)),
                phase=phase,  # type: ignore[arg-type]
                committed_step=step if phase == "joined" else None,
                redo=phase == "joined" and step > 0,
                received_bytes=int(received) if phase == "transferred" else 0,
            )
            self.report(WorkerId(NodeName(name), 0), reached)

    def do_received(self, generation: str, layers: str, name: str) -> None:
        """Report layers that the worker holds on its way into the generation, as `0-2,5`."""
        spans = [[int(end) for end in span.split("-")] for span in layers.split(",")]
        reached = PhaseReached(
            generation=Generation(int(generation)),
            phase="received",
            layers=tuple(layer for span in spans for layer in range(span[0], span[-1] + 1)),
        )
        self.report(WorkerId(NodeName(name), 0), reached)

    def do_joined(self, generation: str, step: str, *names: str) -> None:
        """Report that the workers have met and agreed on the step."""
        for name in names:
            number = Generation(int(generation))
            reached = PhaseReached(generation=number, phase="joined", committed_step=int(step))
            self.report(WorkerId(NodeName(name), 0), reached)

    def do_steps(self, first: str, last: str, generation: str, seconds: str = "0.1") -> None:
        # Records of steps that were recorded before do not come again.
        since = max(int(first), self.job.seen.steps.committed_step + 1)
        records = tuple(
            record(step, int(generation), UNIX + self.now, float(seconds))
            for step in range(since, int(last) + 1)
        )
        self._observe(RecordsReceived(job_id=self.job.id, records=records))

    def do_behind_gap(self, waiting: str) -> None:
        """Say whether records wait for those of earlier steps: `yes`, or `no` longer."""
        self._observe(RecordsWait(job_id=self.job.id, waiting=waiting == "yes"))

    def do_stepped(self, generation: str, *names: str) -> None:
        """Tell in statuses that the workers have committed a step in the generation."""
        for name in names:
            agent = self.agents[name]
            for worker in agent.status.workers:
                kept = tuple(g for g in worker.also_entered if g >= int(generation))
                agent.worker(worker.slot, stepped=Generation(int(generation)), also_entered=kept)
            self._tell(agent)

    def do_compute(self, seconds: str, steps: str, *paces: str) -> None:
        """Train so many steps in each of so many seconds, each in the time that the profile says;
        N1/0=2: in twice that, N1/0=nothing: without a word of it, 0-3=1.5: the profile is wrong
        about these layers."""
        job = self.job
        made = job.current.made
        assert made is not None
        members = [self.state.nodes[name] for name in job.current.members]
        profile = profile_on(job.spec, Machines.of(job, members))
        factors = dict(pace.split("=") for pace in paces)
        spent = computing_by_layer_s(made.plan, profile)
        for _ in range(int(seconds)):
            self._advance(self.now + 1)
            for worker, layers in spent.items():
                step_s = sum(_wrong(factors, layer) * s for layer, s in layers.items())
                self._computed(worker, int(steps), step_s, factors.get(str(worker), "1"))
            self._settle(f"{self.now:.2f} ")

    def _computed(self, worker: WorkerId, steps: int, step_s: float, pace: str) -> None:
        """Tell of so many steps more of the worker in the newest generation."""
        agent, generation = self.agents[worker.node], self.job.current.generation
        known = agent.status.worker(worker.slot)
        if known is None or agent.silent:
            return
        told = known.compute_steps, known.compute_s
        before, spent_s = told if known.stepped == generation else (0, 0.0)
        if pace == "nothing":
            agent.worker(worker.slot, stepped=generation, compute_steps=0, compute_s=0.0)
        else:
            agent.worker(
                worker.slot,
                stepped=generation,
                compute_steps=before + steps,
                compute_s=spent_s + steps * step_s * float(pace),
            )
        self._tell(agent)

    def do_alone(self, attempt: str, *paces: str) -> None:
        """Report what workers that stand by have measured; N1/0=2: twice the profile's times."""
        job = self.job
        members = [self.state.nodes[name] for name in job.current.members]
        layers = profile_on(job.spec, Machines.of(job, members)).layers
        embedding_s, block_s, head_s = (
            layer.forward_s[1] + layer.backward_s[1] for layer in (*layers[:2], layers[-1])
        )
        for pace in paces:
            name, factor = pace.split("=")
            worker = worker_id(name)
            node = self.state.nodes[worker.node]
            asked = self.state.assignment(node).measure
            assert asked is not None
            assert asked.alone, f"{worker} was not asked to measure"
            times = float(factor)
            found = Measured(
                attempt=int(attempt),
                measurement=None,
                alone_s=(times * embedding_s, times * block_s, times * head_s),
            )
            self.report(worker, found)

    def do_evaluated(self, step: str, generation: str) -> None:
        found = evaluation(int(step), int(generation), UNIX + self.now)
        self._observe(EvaluationReceived(job_id=self.job.id, record=found))

    def do_unreached(self, generation: str, peer: str, *workers: str) -> None:
        """Report that no worker reaches the peers (a/0,b/0), or the host: HOST."""
        for worker in workers:
            self._peer_lost(worker, generation, peer)

    def do_peer_lost(self, worker: str, generation: str, gone: str = "") -> None:
        """Report that the worker lost a peer; `gone`: which one has left."""
        self._peer_lost(worker, generation, "", detail=f"{gone} has left" if gone else "")

    def do_short_of_memory(self, worker: str, generation: str) -> None:
        """Report that the worker left the others for lack of memory, to meet them again."""
        self._peer_lost(worker, generation, "", left=f"{worker} was out of memory")

    def _peer_lost(
        self, worker: str, generation: str, unreached: str, *, left: str = "", detail: str = ""
    ) -> None:
        lost = PeerLost(
            generation=Generation(int(generation)),
            step=1,
            detail=left or detail or ("no answer" if unreached else "socket closed"),
            left=bool(left),
            unreached=tuple(map(worker_id, unreached.split(","))) if "/" in unreached else (),
            host_unreached=unreached == "HOST",
        )
        self.report(worker_id(worker), lost)

    def report(self, worker: WorkerId, what: Happening, of: Incarnation | None = None) -> None:
        """Report about a process; None: the one in the worker's slot."""
        process = self._process(worker) if of is None else of
        self._observe(
            WorkerReported(worker=worker, job_id=self.job.id, incarnation=process, what=what)
        )

    def _process(self, worker: WorkerId) -> Incarnation:
        """Return the process in its slot, as its agent said last."""
        agent = self.agents.get(worker.node)
        told = agent.status.worker(worker.slot) if agent is not None else None
        return told.incarnation if told is not None else Incarnation("none")

    def do_exit(self, worker: str) -> None:
        """Report that the process was killed; the agent's status still lists it."""
        self._exit(worker, exit_code=None, signum=9)

    def do_empty(self, worker: str) -> None:
        """Tell in a status that the slot is empty."""
        at = worker_id(worker)
        agent = self.agents[at.node]
        left = tuple(w for w in agent.status.workers if w.slot != at.slot)
        agent.change(workers=left)
        self._tell(agent)

    def do_fork(self, *workers: str) -> None:
        """Put new processes into their slots; they are not up yet."""
        for worker in workers:
            at = worker_id(worker)
            self._fresh(self.agents[at.node], at.slot)
            self.agents[at.node].worker(at.slot, card="", data="")
            self._tell(self.agents[at.node])

    def do_up(self, *workers: str) -> None:
        """Tell that the processes in the slots are up."""
        for worker in workers:
            at = worker_id(worker)
            agent = self.agents[at.node]
            up_s = self.now - self.forked_at[at]
            agent.worker(at.slot, card=f"{at.node}:{4000 + at.slot}", data=agent.data, up_s=up_s)
            self._tell(agent)

    def do_broken(self, worker: str) -> None:
        """Report that the process has ended by itself."""
        self._exit(worker, exit_code=1, signum=None)

    def _exit(self, worker: str, exit_code: int | None, signum: int | None) -> None:
        at = worker_id(worker)
        process = self.agents[at.node].status.worker(at.slot)
        assert process is not None
        exited = WorkerExited(
            pid=process.pid, exit_code=exit_code, signal=signum, log_tail="last words"
        )
        self.report(at, exited)

    def do_hang(self, worker: str, seconds: str) -> None:
        """Report that the agent has killed it for a hang; the process is still there."""
        hung = Hung(reason="its training thread hangs (forward)", seconds=float(seconds))
        self.report(worker_id(worker), hung)

    def do_at(self, worker: str, beats: str, doing: str, waiting: str = "") -> None:
        """Tell the state of its training thread: N1/0 7 forward, or N1/0 8 vote waiting."""
        at = worker_id(worker)
        agent = self.agents[at.node]
        agent.worker(at.slot, beats=int(beats), doing=doing, waiting=bool(waiting))
        self._tell(agent)

    def do_replace(self, worker: str) -> None:
        at = worker_id(worker)
        self._fresh(self.agents[at.node], at.slot)
        self._tell(self.agents[at.node])

    def do_swap(self, worker: str) -> None:
        """Put another process into the slot while the agent has no session to tell it."""
        at = worker_id(worker)
        before = self.agents[at.node].status.worker(at.slot)
        assert before is not None
        self.swapped[at] = before
        self._fresh(self.agents[at.node], at.slot)

    def do_swapped(self, worker: str) -> None:
        """Report the end of the process that was swapped."""
        at = worker_id(worker)
        before = self.swapped[at]
        exited = WorkerExited(pid=before.pid, exit_code=None, signal=9, log_tail="last words")
        self.report(at, exited, before.incarnation)

    def do_fail(self, worker: str, kind: str, message: str) -> None:
        self.report(worker_id(worker), Failed(kind=kind, message=message))  # type: ignore[arg-type]

    def do_stale(self, worker: str, what: str, *words: str) -> None:
        """Run the command `what` for the process that was in the slot before this one."""
        at = worker_id(worker)
        agent = self.agents[at.node]
        status = agent.status
        agent.worker(at.slot, incarnation=next(reversed(self.job.lineage.replaced)))
        getattr(self, f"do_{what}")(*words)
        agent.status = status

    def do_measured(self, *words: str) -> None:
        """N1/0 N2/0 ATTEMPT: report 0.1 s for each of the workers' layers; ATTEMPT!: a failure."""
        *workers, attempt = words
        failed = attempt.endswith("!")
        for word in workers:
            measured = Measured(
                attempt=int(attempt.removesuffix("!")),
                measurement=None if failed else measurement(0.1),
                problem="out of memory" if failed else "",
            )
            self.report(worker_id(word), measured)

    def do_link(self, worker: str, attempt: str) -> None:
        """Report 1 GB/s from the first worker of a meeting between nodes."""
        link = LinkMeasurement(scope="inter_node", latency_s=1e-4, bytes_per_s=1e9)
        measured = LinkMeasured(attempt=int(attempt), scope="inter_node", link=link)
        self.report(worker_id(worker), measured)

    def do_stored(self, *keys: str) -> None:
        """Store the chosen profiles of these jobs, under their keys; no job: none."""
        self.profiles = {}
        for job_id in keys:
            chosen = self.state.jobs[JobId(job_id)].profiling.chosen
            assert chosen is not None
            assert chosen.profile is not None
            self.profiles[chosen.key] = chosen.profile
        self._observe(ProfilesFound(profiles=self.profiles))

    def do_stored_of(self, job_id: str, *changes: str) -> None:
        """Store JOB's profile with changes: JOB layers=3 microbatch=4 gpus_per_node=2 several=1."""
        chosen = self.state.jobs[JobId(job_id)].profiling.chosen
        assert chosen is not None
        profile = chosen.profile
        assert profile is not None
        values = {key: int(value) for key, _, value in (word.partition("=") for word in changes)}
        if layers := values.pop("layers", 0):
            profile = replace(profile, layers=profile.layers[:layers])
        if values.pop("several", 0):
            shared = {"forward_s": {2: 0.1}, "backward_s": {2: 0.1}}
            layers_shared = tuple(replace(layer, **shared) for layer in profile.layers)
            profile = replace(profile, layers=layers_shared)
        self.profiles = {chosen.key: replace(profile, **values)}
        self._observe(ProfilesFound(profiles=self.profiles))

    def do_unreadable(self, job_id: str) -> None:
        """Make the file of JOB's stored profile unreadable."""
        chosen = self.state.jobs[JobId(job_id)].profiling.chosen
        assert chosen is not None
        self.profiles = {}
        self._observe(ProfilesFound(profiles={}, unusable={chosen.key: "it is not JSON text"}))

    def do_checkpoint(self) -> None:
        """Request a checkpoint of the active job."""
        job = self.job
        number = job.saves.requested + 1
        request_id = f"save {number}"
        self._journal(CheckpointRequested(job_id=job.id, request_id=request_id, number=number))

    def do_saved(self, step: str, request: str = "0") -> None:
        saved = CheckpointSaved(
            step=int(step), path=f"/saved/{step}", bytes=1000, seconds=0.5, request=int(request)
        )
        self._report_save(saved)

    def do_save_failed(self, what: str, step: str, reason: str, request: str = "0") -> None:
        self._report_save(
            SaveFailed(what=what, step=int(step), reason=reason, request=int(request))  # type: ignore[arg-type]
        )

    def do_restored(self, step: str, generation: str, *names: str) -> None:
        """Report that the workers have loaded the step's checkpoint on their way into the
        generation; step 0: that they begin anew."""
        for name in names:
            path = f"/saved/{step}" if int(step) else ""
            restored = Restored(generation=Generation(int(generation)), step=int(step), path=path)
            self._observe(RestoreReceived(job_id=self.job.id, restored=restored))
            for phase in ("aborted", "joined", "transferred"):
                reached = PhaseReached(
                    generation=Generation(int(generation)),
                    phase=phase,  # type: ignore[arg-type]
                    committed_step=int(step) if phase == "joined" else None,
                )
                self.report(WorkerId(NodeName(name), 0), reached)
            agent = self.agents[name]
            agent.change(generation=Generation(int(generation)))
            self.do_progress(step, generation, name)

    def do_progress(self, step: str, generation: str, *names: str) -> None:
        """Tell of a committed step in statuses."""
        for name in names:
            agent = self.agents[name]
            for worker in agent.status.workers:
                agent.worker(
                    worker.slot, generation=Generation(int(generation)), committed_step=int(step)
                )
            self._tell(agent)

    def _report_save(self, what: CheckpointSaved | SaveFailed) -> None:
        made = self.job.current.made
        assert made is not None
        self.report(made.plan.workers[0], what)

    def do_finish(self, *names: str) -> None:
        for name in names:
            for worker in self.agents[name].status.workers:
                self.agents[name].worker(worker.slot, finished=True)
            self._tell(self.agents[name])

    def do_tear(self, since: str) -> None:
        """Restart on a journal that lost everything from its last event of that name on."""
        names = [type(event).__name__ for _, event in self.journal]
        last = len(names) - 1 - names[::-1].index(since)
        kept = self.journal[:last]
        self.state, self.journal, self.event_lines = ClusterState(), [], {}
        self._follower, self._followed = ClusterState(), 0
        for unix, event in kept:
            self._journal(event, unix)
        self._journal(JournalCut(bytes=1, kept_as="journal.cut-1", records={}))
        self.do_restart()

    def do_restart(self) -> None:
        """Replay the journal in a new master process; every stream is gone."""
        steps = {job.id: tuple(job.seen.steps.recent) for job in self.state.jobs.values()}
        self.state = self._replayed()
        self._journal(MasterStarted(start="00000001"))
        self._observe(ProfilesFound(profiles=self.profiles))
        for job_id, records in steps.items():
            self._observe(RecordsReceived(job_id=job_id, records=records))

    def do_down(self, seconds: str) -> None:
        """Restart after so many seconds."""
        self.now += float(seconds)
        self.do_restart()

    def do_drain(self, *names: str) -> None:
        """Request the drain of nodes at once; `force` after them."""
        self.lives += 1
        for name in names:
            if name != "force":
                wish = NodeDrainRequested(
                    node=NodeName(name),
                    request_id=f"request-{self.lives}/{name}",
                    reason="new memory",
                    force="force" in names,
                )
                self._journal(wish)

    def do_undrain(self, name: str) -> None:
        self.lives += 1
        request_id, known = f"request-{self.lives}", self.state.nodes[NodeName(name)]
        event = NodeUndrained(node=NodeName(name), request_id=request_id, excused=known.troubles)
        self._journal(event)

    def do_leave(self, *names: str) -> None:
        """Tell that the agents are to end."""
        for name in names:
            self.agents[name].change(leaving=True)
            self._tell(self.agents[name])

    def do_end(self, *names: str) -> None:
        """Tell that the agents end at once, with their workers, which are no longer listed."""
        for name in names:
            self.agents[name].change(ending=True, workers=())
            self._tell(self.agents[name])

    def do_trouble(self, name: str, failed_starts: str, trouble: str = "") -> None:
        self.agents[name].change(failed_starts=int(failed_starts), trouble=trouble)
        self._tell(self.agents[name])

    def do_sick(self, name: str, *troubles: str) -> None:
        """Tell the troubles that NVML has with the node's GPUs; none: they are well."""
        self.agents[name].change(sick="\n".join(troubles))
        self._tell(self.agents[name])

    def do_hindered(self, name: str, why: str) -> None:
        """Tell what holds back the GPU of the node's first worker, by NVML."""
        self.agents[name].worker(0, hindrance=why)
        self._tell(self.agents[name])

    def do_late(self, seconds: str) -> None:
        """Stop the master until now: nothing has been read since the command before."""
        late_s = float(seconds)
        self._observe(Tick(late_s=late_s, cut=late_s >= self.timing.ping_timeout_s))

    def do_look(self) -> None:
        pass

    def do_incidents(self) -> None:
        """Write down the incidents so far, as events.jsonl has them."""
        for job_id, told in self.event_lines.items():
            for incident in told:
                if incident["event"] == "incident":
                    self.written += [f"> {line}" for line in incident_text(job_id, incident)]

    def do_rates(self) -> None:
        """Write down which workers are known to be slow."""
        rates = " ".join(f"{worker}={rate:g}" for worker, rate in sorted(self.job.rates.items()))
        self.written.append(f"> rates: {rates or 'all the same'}")

    def do_assigned(self, *names: str) -> None:
        """Write down the assignments of the nodes."""
        for name in names:
            desired = self.state.nodes[NodeName(name)].desired
            plan = f" generation {desired.generation}" if desired.generation else ""
            save = f" save {desired.save}" if desired.save else ""
            save += " drained" if desired.drained else ""
            self.written.append(f"> {name}: {desired.job_id or 'no job'}{plan}{save}")


def _wrong(factors: Mapping[str, str], layer: int) -> float:
    """Return the factor by which the profile is wrong about the layer."""
    for name, factor in factors.items():
        first, _, last = name.partition("-")
        if first.isdigit() and int(first) <= layer <= int(last):
            return float(factor)
    return 1.0


def incident_text(job_id: JobId, told: dict[str, Any]) -> Iterator[str]:
    yield f"{job_id} incident {told['incident']} {told['outcome']}: {told['summary']}"
    for other in told["also_lost"]:
        kind = "a consequence" if other["consequence"] else "on its own"
        yield f"  also lost ({kind}): {other['summary']}"
    for slow in told.get("slow", ()):
        since, until = (slow[name] - told["opened_at"] for name in ("since", "until"))
        end = ", then well" if slow["well"] else ""
        yield (
            f"  {slow['worker']} from +{since:.2f} to +{until:.2f}: {slow['rate']:g}, "
            f"{slow['step_s']:.3f} s a step instead of {slow['usual_s']:.3f} s{end}"
        )
    for seen in told["witnesses"]:
        after_s = seen["time"] - told["opened_at"]
        about = f" of {seen['about']}" if seen["about"] else ""
        yield f"  +{after_s:.2f} {seen['by']} {seen['observer']}{about}: {seen['saw']}"
    for attempt in told["attempts"]:
        overtaken = attempt["superseded_by"]
        end = f", overtaken by {overtaken}" if overtaken else ""
        why = ""
        if "policy" in attempt:
            stall = "unknown" if attempt["stall_s"] is None else f"{attempt['stall_s']:.2f}"
            why = f" of {attempt['policy']}, stall {stall}: {attempt['reason']}"
        yield f"  generation {attempt['generation']} by {attempt['rule']}{end}{why}"
    spans = [f"{phase} {s:.2f}" for phase, s in told["phases"].items() if s >= 0.005]
    yield f"  seconds: {', '.join(spans) or 'none'}"
    if tail := told["root_cause"]["log_tail"]:
        yield f"  last words: {' | '.join(tail)}"


def worker_id(text: str) -> WorkerId:
    node, slot = text.split("/")
    return WorkerId(NodeName(node), int(slot))


def durable(state: ClusterState) -> ClusterState:
    """Return the state without observations; shares all that is mutable."""
    return replace(
        state,
        profiles={},
        unusable_profiles={},
        nodes={
            name: replace(node, seen=NodeSeen(last_heard=0.0)) for name, node in state.nodes.items()
        },
        jobs={job_id: replace(job, seen=JobSeen()) for job_id, job in state.jobs.items()},
    )


@cache
def changeable(kind: type) -> tuple[str, ...]:
    """Return the attributes of a class that can change; none: it is frozen, or no dataclass."""
    if not is_dataclass(kind) or kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return ()
    return tuple(entry.name for entry in fields(kind))


#: Types of which no value can change, as far as `copied` has met them.
FIXED: set[type] = set()


def copied(value: Any) -> Any:
    """Copy all that can change; frozen parts, most of a state, are shared."""
    kind = type(value)
    if kind is dict:
        return {key: item if type(item) in FIXED else copied(item) for key, item in value.items()}
    if kind is list or kind is deque:
        return kind([copied(item) for item in value])
    if kind is set:
        return set(value)
    if not (names := changeable(kind)):
        FIXED.add(kind)
        return value
    copy_of = copy.copy(value) if hasattr(value, "__dict__") else object.__new__(kind)
    for name in names:
        item = getattr(value, name)
        setattr(copy_of, name, item if type(item) in FIXED else copied(item))
    return copy_of


def drawn(plan: Plan) -> str:
    return " | ".join(
        " ".join(f"{hop.workers[0]}:{hop.first_layer}-{hop.last_layer}" for hop in route.hops)
        + f" x{route.microbatches}"
        for route in plan.routes
    )


def told(event: Journaled) -> str:
    """Return one line for a decision."""
    name = type(event).__name__
    match event:
        case PlanMade():
            how = "at a boundary" if event.boundary else "at once"
            lost = [*event.nodes_lost, *map(str, event.workers_lost)]
            if event.restore:
                how += ", anew" if event.anew else ", from a checkpoint"
            how += ", handed over" if event.handover else ""
            out = f" leaving [{' '.join(map(str, event.leaving))}]" if event.leaving else ""
            behind = f", then {event.then}" if event.then else ""
            return (
                f"{name} generation {event.plan.generation} {how}, "
                f"{event.rule} ({event.cause}){behind}, "
                f"lost [{' '.join(lost)}] joined [{' '.join(event.nodes_joined)}]{out}, "
                f"can lose {event.can_lose}, host {event.rendezvous.host}: {drawn(event.plan)}"
            )
        case FirstStepCommitted():
            spans = event.transition.phases
            phases = " ".join(f"{k} {v:.2f}" for k, v in spans.items() if k != "waiting" or v)
            return (
                f"{name} generation {event.generation} step {event.step}: {phases}, "
                f"total {event.transition.total_s:.2f}, redo {event.transition.redo_step}"
            )
        case FollowUpDropped():
            return f"{name} generation {event.generation}: {event.reason}"
        case NodeQuarantined():
            ready = " or until it is ready" if event.until_ready else ""
            return f"{name} {event.node} for {event.seconds:.0f} s{ready}: {event.reason}"
        case NodeLeftOut() | NodeReset() | NodeKept() | NodeReleased():
            return f"{name} {event.node}: {event.reason}"
        case NodeLost():
            return f"{name} {event.node} ({event.cause}): {event.reason}"
        case WorkerLost():
            return f"{name} {event.worker}: {event.reason}"
        case NodeRegistered():
            stale = " with stale workers" if event.stale_workers else ""
            return f"{name} {event.facts.node}{stale}"
        case NodeDrainRequested():
            return f"{name} {event.node}: {event.reason}{', forced' if event.force else ''}"
        case NodeDrained():
            return f"{name} {event.node}" + (f", {event.job_id} loses it" if event.job_id else "")
        case NodeCleared() | NodeForgotten():
            return f"{name} {event.node}"
        case JobWaiting():
            return f"{name} {event.job_id}: {'; '.join(event.causes)}"
        case MeasuringStarted():
            links = [f"{m.scope} {m.workers[0]}-{m.workers[1]}" for m in event.wish.meetings]
            workers = [str(worker) for worker, _ in event.workers]
            return (
                f"{name} attempt {event.wish.attempt}: {' '.join(workers)}; "
                f"links {', '.join(links) or 'none'}"
                + (f"; passed over {event.passed_over}" if event.passed_over else "")
            )
        case ProfileChosen():
            times = event.profile.layers[1].forward_s if event.profile else "none"
            return f"{name} {event.source} ({event.reason}): {times}"
        case JobPutBack():
            return f"{name} {event.job_id} for {event.instead}"
        case JobFailed():
            return f"{name} {event.job_id}: {event.reason}"
        case CheckpointPublished():
            return f"{name} step {event.saved.step} request {event.saved.request}"
        case SaveProblem():
            return f"{name} {event.failed.what} step {event.failed.step}: {event.failed.reason}"
        case JobCaughtUp():
            return f"{name} step {event.step}"
        case RecordsLost():
            return f"{name} {event.first}-{event.last}: {event.why}"
        case RateChanged(alone=True):
            took = f"{event.step_s:.3f} s a step instead of {event.usual_s:.3f} s"
            return f"{name} {event.worker}: {event.rate:g}, {took}, alone"
        case RateChanged():
            why = f", {event.hindrance}" if event.hindrance else ""
            return (
                f"{name} {event.worker}: {event.rate:g}, {event.step_s:.3f} s a step instead of "
                f"{event.usual_s:.3f} s, {event.steps} steps in {event.seconds:g} s{why}"
            )
        case JobRestored():
            how = "resumed" if event.resumed else f"lost {event.lost_steps} steps"
            return f"{name} step {event.restored.step}, {how}"
        case _:
            return f"{name} {getattr(event, 'job_id', '')}".strip()


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        path.write_text(Player().play(path.read_text()))
