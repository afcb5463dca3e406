"""Takes over a job that nodes train and this master does not know, while it trains on.

The agents have in memory what is needed: the job's text, its plan, their processes, how far it is,
and the wheel that it brought. They are asked when an operator wants the job, and not before. Once
the job is journaled, the rule of `oobleck.master.rules.plans.adoption` takes over its plan. Must
not know gRPC.
"""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence

from oobleck.core.ids import JobId, NodeName
from oobleck.core.job.file import parse_job
from oobleck.core.job.spec import JobSpec
from oobleck.core.job.wheel import digest_of
from oobleck.host.system.environment import Environment
from oobleck.master.clients.outbox import AgentSession
from oobleck.master.clients.requests import Requests
from oobleck.master.rules.plans.adoption import NotAdopted, check_adoptable, nodes_of
from oobleck.master.state.cluster import ClusterState
from oobleck.proto import control_pb2 as pb

#: For all its nodes to say what job it is; and for one of them to give the job's wheel back.
_ANSWER_S, _WHEEL_S = 10.0, 120.0
_LOOK_S = 0.1

#: What no agent has. Of the job itself, what is lost is said by the step that its records go on at.
LOST: tuple[str, ...] = (
    "other jobs, the queue, drains and join tokens of the master that had the job",
    "revocations: a certificate that was revoked is valid again; name it to 'oobleck pki revoke'",
    "the job's events and output so far, and its records that agents have not kept",
    "the job's profile: figures of its plans are estimates",
    "the way back: a master on the old --state-dir or a backup takes this job for lost from now on",
)


class Adoptions:
    def __init__(
        self,
        state: ClusterState,
        environment: Environment,
        session: Callable[[NodeName], AgentSession | None],
    ) -> None:
        """`session`: the newest one of a node, if one is open."""
        self._state = state
        self._now = environment.now
        self._session = session
        #: From anywhere, so that no answer to the master before is one to this.
        self._numbers = itertools.count(1 + secrets.randbits(32))
        #: By node and number of the question.
        self._asked: dict[tuple[NodeName, int], asyncio.Future[str]] = {}
        #: Hashes of wheels that nodes were asked for.
        self.wanted: set[str] = set()

    def job_told(self, node: NodeName, number: int, text: str) -> None:
        """Take an agent's answer: the job's text, or nothing where it has no such job."""
        asked = self._asked.pop((node, number), None)
        if asked is not None and not asked.done():
            asked.set_result(text)

    async def adopt(
        self,
        request_id: str,
        job_id: JobId,
        requests: Requests,
        has_wheel: Callable[[str], bool],
    ) -> Sequence[str]:
        """Take the job over, and return what is lost of it, a line each.

        `requests`: of the caller; `has_wheel`: whether the wheel with that hash is on disk. Raises
        NotAdopted, and what `requests` raises.
        """
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
        """Return the job's text by each node. Raises NotAdopted where one does not answer."""
        asked: dict[NodeName, asyncio.Future[str]] = {}
        try:
            for node in nodes:
                number = next(self._numbers)
                if (session := self._session(node)) is None:
                    raise NotAdopted(f"node {node} is not connected any more; ask again")
                asked[node] = self._asked[node, number] = asyncio.get_running_loop().create_future()
                question = pb.TellJob(number=number, job_id=job_id)
                session.ask(pb.MasterMessage(tell_job=question))
            await asyncio.wait(asked.values(), timeout=_ANSWER_S)
        finally:
            self._asked = {
                key: one for key, one in self._asked.items() if one not in asked.values()
            }
        if silent := [node for node, one in asked.items() if not one.done()]:
            raise NotAdopted(
                f"{', '.join(silent)} did not say within {_ANSWER_S:g} s what job it is; ask again"
            )
        return {node: one.result() for node, one in asked.items()}

    async def _fetch(
        self, digest: str, nodes: Sequence[NodeName], has_wheel: Callable[[str], bool]
    ) -> bool:
        """Have a node give the wheel back, and return whether it is on disk."""
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
    """Raises NotAdopted where the nodes do not tell one job."""
    if lacking := [node for node, text in texts.items() if not text]:
        raise NotAdopted(f"{', '.join(lacking)} has no such job any more")
    specs: dict[str, list[NodeName]] = {}
    for node, text in texts.items():
        specs.setdefault(text, []).append(node)
    if len(specs) > 1:
        told = " and ".join(", ".join(nodes) for nodes in specs.values())
        raise NotAdopted(f"{told} tell different jobs; cancel it with --unknown")
    try:
        return parse_job(next(iter(specs)))
    except ValueError as error:
        raise NotAdopted(f"this release cannot read the job: {error}") from error
