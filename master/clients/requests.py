"""Operators' requests: jobs, checkpoints, drains, credentials, and the adoption of jobs.

Each request becomes one event and is answered when the event is on disk. A request that is repeated
with the same id gets the first answer again. The caller must still be trusted in the loop iteration
that decides, which is later than the call.

A job that nodes train and this master does not know is adopted while it trains. The agents provide
the job's text, its plan, their processes, its progress, and its wheel, if an operator wants the
job; then `oobleck.master.rules.adoption` takes over its plan. Must not know gRPC, nor permissions.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from oobleck.core.ids import JobId, NodeName
from oobleck.core.job.file import parse_job
from oobleck.core.job.spec import JobSpec
from oobleck.core.profile import Profile
from oobleck.host.system.environment import Environment
from oobleck.host.wheel import digest_of
from oobleck.master.clients.outbox import AgentSession, Questions
from oobleck.master.config import MasterConfig
from oobleck.master.events.jobs import (
    CheckpointRequested,
    JobAdopted,
    JobCancelRequested,
    JobStarted,
    JobSubmitted,
)
from oobleck.master.events.nodes import (
    NodeDrainRequested,
    NodeForgotten,
    NodeUndrained,
    UnknownJobEnded,
)
from oobleck.master.events.trust import CredentialsRevoked
from oobleck.master.events.unions import Journaled
from oobleck.master.inbox import Inbox
from oobleck.master.rules.admission import Refusal
from oobleck.master.rules.adoption import NotAdopted, check_adoptable, is_queued, nodes_of
from oobleck.master.rules.losses import why_not_forgotten
from oobleck.master.rules.questions import profile_of_adopted
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import ENDED
from oobleck.master.state.node import Drain, Node
from oobleck.master.state.trust import Decide, Denied, check_caller
from oobleck.master.storage.disk import StorageFailed
from oobleck.master.storage.ledger import Ledger
from oobleck.proto import control_pb2 as pb

if TYPE_CHECKING:
    from oobleck.host.security.pki import Identity

T = TypeVar("T")
#: Longest part of a job's name in its id.
_NAME_IN_ID = 48
#: Time-outs for all nodes to send the job's text, and for one of them to return its wheel.
_ANSWER_S, _WHEEL_S = 10.0, 120.0
_LOOK_S = 0.1
#: Losses of an adoption: no agent has these. Further losses follow from the step at which the job's
#: records resume.
LOST: tuple[str, ...] = (
    "other jobs, the queue, drains and join tokens of the master that had the job",
    "revocations: a certificate that was revoked is valid again; name it to 'oobleck pki revoke'",
    "the job's events and output so far, and its records that agents have not kept",
    "the job's profile: figures of its plans are estimates",
    "the way back: a master on the old --state-dir or a backup takes this job for lost from now on",
)


def node_request(request_id: str, node: str) -> str:
    """Return the id of one node's part in a request about several nodes."""
    return f"{request_id}/{node}"


class Requests:
    def __init__(
        self,
        config: MasterConfig,
        ledger: Ledger,
        inbox: Inbox,
        end_sessions: Callable[[NodeName, Refusal], None],
        caller: "Identity | None" = None,
    ) -> None:
        """Serve `caller`; None: somebody on this host, in the clear. `end_sessions`: ends those of
        an agent with a refusal. Methods raise Denied where the caller is no longer trusted, and
        StorageFailed."""
        self._config = config
        self._caller = caller
        self._ledger = ledger
        self._inbox = inbox
        self._end_sessions = end_sessions

    def of(self, caller: "Identity | None") -> "Requests":
        """Return these requests on behalf of `caller`."""
        return Requests(self._config, self._ledger, self._inbox, self._end_sessions, caller)

    def check(self) -> None:
        """Check that the caller is still trusted. Raises Denied."""
        if self._caller is not None:
            check_caller(self._ledger.state.trust, self._caller, self._ledger.unix())

    async def submit(
        self,
        request_id: str,
        spec: JobSpec,
        *,
        profile: Profile | None = None,
        profile_only: bool = False,
    ) -> JobId:
        """Record the job in the journal, and return its id. `profile`: from the file that the job
        names; `profile_only`: end once it is measured."""
        ledger = self._ledger
        if ledger.problem and request_id not in ledger.state.requests:
            raise StorageFailed(ledger.problem)

        def answer(_: float) -> JobId:
            known = ledger.state.requests.get(request_id)
            if known is not None:
                return known
            job_id = self._new_job_id(spec)
            ledger.find_profiles()
            submitted = JobSubmitted(
                job_id=job_id,
                request_id=request_id,
                spec=spec,
                profile=profile,
                profile_only=profile_only,
            )
            ledger.journal(submitted)
            return job_id

        return await self._ask(answer)

    async def adopt(self, request_id: str, job_id: JobId, spec: JobSpec) -> None:
        """Adopt a job that nodes train. Raises NotAdopted."""
        ledger = self._ledger

        def answer(_: float) -> NotAdopted | None:
            state = ledger.state
            if request_id in state.requests:
                return None
            try:
                newest = check_adoptable(state, job_id)
            except NotAdopted as why:
                return why
            ledger.find_profiles()
            everyone = tuple(node.facts.node for node in state.held[job_id])
            ledger.journal(
                JobAdopted(
                    job_id=job_id,
                    request_id=request_id,
                    spec=spec,
                    nodes=everyone,
                    generation=newest.plan.generation,
                )
            )
            ledger.journal(JobStarted(job_id=job_id))
            ledger.journal(profile_of_adopted(state, state.jobs[job_id], nodes_of(newest)))
            return None

        if (why := await self._ask(answer)) is not None:
            raise why

    async def end_unknown(self, job_id: JobId) -> tuple[NodeName, ...]:
        """End the workers of a job that this master does not know; return their nodes."""

        def answer(_: float) -> tuple[NodeName, ...]:
            held = self._ledger.state.held.get(job_id, [])
            nodes = () if is_queued(held) else tuple(node.facts.node for node in held)
            if nodes:
                self._ledger.journal(UnknownJobEnded(job_id=job_id, nodes=nodes))
            return nodes

        return await self._ask(answer)

    def _new_job_id(self, spec: JobSpec) -> JobId:
        """Return an id that neither a job nor a folder has: a folder may be of a job whose journal
        is lost."""
        jobs = {*self._ledger.state.jobs, *self._ledger.state.held}
        number = self._ledger.state.submissions + 1
        while True:
            job_id = JobId(f"{spec.name[:_NAME_IN_ID]}-{number}")
            if job_id not in jobs and not self._config.job_directory(job_id).exists():
                return job_id
            number += 1

    async def save(self, request_id: str, job_id: JobId) -> int:
        """Request a checkpoint of a known job, and return the request's number; 0: it has ended."""

        def answer(_: float) -> int:
            job = self._ledger.state.jobs.get(job_id)
            if job is None:
                return 0
            if (known := job.saves.numbers.get(request_id)) is not None:
                return known
            number = job.saves.requested + 1
            self._ledger.journal(
                CheckpointRequested(job_id=job_id, request_id=request_id, number=number)
            )
            return number

        return await self._ask(answer)

    async def cancel(self, request_id: str, job_id: JobId) -> None:
        """Request the cancellation of a known job."""

        def answer(_: float) -> None:
            job = self._ledger.state.jobs.get(job_id)  # a job that has ended may be forgotten
            if job is not None and job.state not in ENDED and not job.cancel_requested:
                self._ledger.journal(JobCancelRequested(job_id=job_id, request_id=request_id))

        await self._ask(answer)

    async def drain(
        self, request_id: str, nodes: Sequence[NodeName], reason: str, *, force: bool
    ) -> None:
        """Request the drain of known nodes, in one decision. Nodes that an operator already drains
        in this way are skipped."""

        def is_so(drain: Drain | None) -> bool:
            if drain is None or drain.by != "operator":
                return False
            return reason in ("", drain.reason) and drain.force >= force

        def event(known: Node) -> NodeDrainRequested | None:
            if is_so(known.drain):
                return None
            name = known.facts.node
            return NodeDrainRequested(
                node=name, request_id=node_request(request_id, name), reason=reason, force=force
            )

        await self._about_nodes({name: node_request(request_id, name) for name in nodes}, event)

    async def undrain(self, request_id: str, node: NodeName) -> None:
        """Make a known node take part again."""

        def event(known: Node) -> NodeUndrained:
            return NodeUndrained(node=node, request_id=request_id, excused=known.troubles)

        await self._about_nodes({node: request_id}, event)

    async def forget(self, request_id: str, node: NodeName) -> str:
        """Forget a lost node; return why it is kept; empty: it is forgotten."""

        def answer(_: float) -> str:
            state = self._ledger.state
            if request_id in state.node_requests or node not in state.nodes:
                return ""
            if not (why := why_not_forgotten(state, node)):
                self._ledger.journal(NodeForgotten(node=node, request_id=request_id))
            return why

        return await self._ask(answer)

    async def _about_nodes(
        self, asked: Mapping[NodeName, str], event: Callable[[Node], Journaled | None]
    ) -> None:
        """Journal the events about known nodes. `asked`: the id of each node's request; a request
        that was answered before changes nothing."""

        def answer(_: float) -> None:
            state = self._ledger.state
            answered = set(state.node_requests)
            for name, request_id in asked.items():
                # A lost node may be forgotten meanwhile.
                if name not in state.nodes or request_id in answered:
                    continue
                if (journaled := event(state.nodes[name])) is not None:
                    self._ledger.journal(journaled)

        await self._ask(answer)

    async def change_trust(self, decide: Decide[T]) -> T:
        """Decide on trust, journal the event, and return the answer. Raises errors of `decide`."""

        def answer(_: float) -> T:
            event, value = decide(self._ledger.state.trust, self._ledger.unix())
            if event is not None:
                self._ledger.journal(event)
            if isinstance(event, CredentialsRevoked) and event.role == "agent":
                refusal = Refusal(
                    reason="its certificate was revoked", temporary=False, revoked=True
                )
                self._end_sessions(NodeName(event.name), refusal)
            return value

        return await self._ask(answer)

    async def _ask(self, answer: Callable[[float], T]) -> T:
        """Run `answer` in the loop's next iteration and return its result. Raises Denied where the
        caller is no longer trusted by then, StorageFailed where nothing can be journaled."""
        if self._ledger.stuck:
            raise StorageFailed(self._ledger.problem)

        def handle(arrived_at: float) -> tuple[T] | Denied:
            try:
                self.check()
                return (answer(arrived_at),)
            except Denied as denied:
                return denied

        answered = await self._inbox.ask(handle, of_operator=True)
        if isinstance(answered, Denied):
            raise answered
        return answered[0]


class Adoptions:
    def __init__(
        self,
        state: ClusterState,
        environment: Environment,
        session: Callable[[NodeName], AgentSession | None],
    ) -> None:
        """Adopt jobs. `session`: returns a node's newest session, if one is open."""
        self._state = state
        self._now = environment.now
        self._session = session
        self._questions = Questions[str]()
        #: Takes an agent's answer: the job's text, or nothing where it has no such job.
        self.job_told = self._questions.answered
        #: Hashes of wheels requested from nodes.
        self.wanted: set[str] = set()

    async def adopt(
        self,
        request_id: str,
        job_id: JobId,
        requests: Requests,
        has_wheel: Callable[[str], bool],
    ) -> Sequence[str]:
        """Adopt the job, and return its losses, a line each. `has_wheel`: returns whether the wheel
        with that hash is on disk. Raises NotAdopted, and the errors of `requests`, which are the
        caller's."""
        requests.check()
        if request_id in self._state.requests:
            return LOST
        nodes = sorted(nodes_of(check_adoptable(self._state, job_id)))
        spec = await asyncio.to_thread(_read, await self._texts(job_id, nodes))
        lost = LOST
        digest = digest_of(spec.code)
        if digest is not None and not await self._fetch(digest, nodes, has_wheel):
            lost += ("the job's wheel, so nodes that come later cannot take part",)
        await requests.adopt(request_id, job_id, spec)
        return lost

    async def _texts(self, job_id: JobId, nodes: Sequence[NodeName]) -> Mapping[NodeName, str]:
        """Return each node's text of the job. Raises NotAdopted where one does not answer."""

        def question(number: int) -> pb.MasterMessage:
            return pb.MasterMessage(tell_job=pb.TellJob(number=number, job_id=job_id))

        asked: dict[NodeName, asyncio.Future[str]] = {}
        try:
            for node in nodes:
                if (session := self._session(node)) is None:
                    raise NotAdopted(f"node {node} is not connected any more; ask again")
                asked[node] = self._questions.ask(session, question)
            await asyncio.wait(asked.values(), timeout=_ANSWER_S)
            if silent := [node for node, future in asked.items() if not future.done()]:
                names = ", ".join(silent)
                raise NotAdopted(
                    f"{names} did not say within {_ANSWER_S:g} s what job it is; ask again"
                )
            return {node: future.result() for node, future in asked.items()}
        finally:
            for future in asked.values():
                future.cancel()

    async def _fetch(
        self, digest: str, nodes: Sequence[NodeName], has_wheel: Callable[[str], bool]
    ) -> bool:
        """Have a node return the wheel, and return whether it is on disk."""
        self.wanted.add(digest)
        until = self._now() + _WHEEL_S
        try:
            for node in nodes:
                session = self._session(node)
                if session is None or has_wheel(digest):
                    continue
                session.ask(pb.MasterMessage(return_code=pb.ReturnCode(sha256=digest)))
                node_until = min(until, self._now() + _ANSWER_S)
                while self._now() < node_until:
                    if has_wheel(digest):
                        return True
                    await asyncio.sleep(_LOOK_S)
            return has_wheel(digest)
        finally:
            self.wanted.discard(digest)


def _read(texts: Mapping[NodeName, str]) -> JobSpec:
    """Parse the job's text. Raises NotAdopted where the nodes report different jobs."""
    if lacking := [node for node, text in texts.items() if not text]:
        raise NotAdopted(f"{', '.join(lacking)} has no such job any more")
    specs: dict[str, list[NodeName]] = {}
    for node, text in texts.items():
        specs.setdefault(text, []).append(node)
    if len(specs) > 1:
        groups = " and ".join(", ".join(nodes) for nodes in specs.values())
        raise NotAdopted(f"{groups} report different jobs; cancel it with --unknown")
    try:
        return parse_job(next(iter(specs)))
    except ValueError as error:
        raise NotAdopted(f"this release cannot read the job: {error}") from error
