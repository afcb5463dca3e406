"""Examinations: asks all nodes to examine their hosts and the links between them, for `oobleck
doctor`.

An examination is not journaled, and a master that restarts forgets it. There is one at a time, of
clocks, each host by itself, folders that nodes share, and links, a pair of nodes at a time. Nodes
that do not answer a phase are left out of the next ones. Every order has a time-out. While a job
trains only little is sent and written. Must not know gRPC.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from oobleck.core.ids import NodeName
from oobleck.core.job.spec import JobSpec
from oobleck.core.orders import (
    MARK,
    About,
    Answer,
    Call,
    Clock,
    Finding,
    FindMarks,
    Hush,
    Level,
    Listen,
    Listening,
    Look,
    Looked,
    Marks,
    Order,
    Place,
    ReadClock,
    RemoveMarks,
    Unable,
    Way,
)
from oobleck.host.address import split_address
from oobleck.host.doctor import together, ways
from oobleck.host.doctor.places import SHARED
from oobleck.host.doctor.process import ANSWER_S, Doctor
from oobleck.host.system.environment import Environment
from oobleck.host.versions import installed
from oobleck.master.clients.outbox import AgentSession, Questions
from oobleck.master.config import MasterConfig
from oobleck.master.rules.adoption import ways_on
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import ENDED
from oobleck.master.state.node import Node
from oobleck.proto import control_pb2 as pb
from oobleck.proto.examinations import examine_message

#: The agent's own process times out earlier; the rest covers the round trip.
_ORDER_S = ANSWER_S + 10.0
#: Shorter, since the agent itself reads the clock at once.
_CLOCK_S = 5.0
_CLOCK_READINGS = 3
#: Interval at which the node's session is checked.
_LOOK_S = 1.0
#: Bytes sent each way to measure the rate, and the longest time for that. The smaller number is
#: used while a job trains, if an operator asks for the measurement.
_MOST_BYTES, _FEW_BYTES = 64 << 20, 16 << 20
_SENDING_S = 0.5
#: Seconds after which no further round of pairs begins.
_PAIRS_S = 180.0
#: Time after which listeners end by themselves.
_LISTENING_S = _PAIRS_S + 120.0
#: Most paths of jobs and of the operator.
_MOST_PLACES = 64


class Busy(Exception):
    """Another examination is under way; the text says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    #: Nodes to examine; none: all.
    nodes: tuple[NodeName, ...] = ()
    #: Paths, besides those of jobs that have not ended.
    data: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    #: Measure the rate even while a job trains.
    pairs: bool = False
    #: Storage problem of the master; empty: none.
    problem: str = ""


class Examinations:
    def __init__(
        self,
        config: MasterConfig,
        state: ClusterState,
        environment: Environment,
        session: Callable[[NodeName], AgentSession | None],
    ) -> None:
        """Serve examinations. `session`: returns a node's newest session, if one is open."""
        self._config = config
        self._state = state
        self._environment = environment
        self._session = session
        self._orders = Questions[Answer]()
        #: Takes an agent's answer.
        self.take = self._orders.answered
        self._busy = False

    async def examine(self, wish: Wish) -> AsyncGenerator[Finding, None]:
        """Examine the nodes, and yield findings. `wish.nodes` are known. Raises Busy."""
        if self._busy:
            raise Busy("another examination is under way; try again when it has ended")
        self._busy = True
        head = Doctor(self._about_head, None)
        running = _Examination(
            wish, self._state, self._environment, ask=self._ask, send=self._send, head=head
        )
        try:
            async for finding in running.findings():
                yield finding
        finally:
            self._busy = False
            running.end()
            await head.close()

    def _about_head(self) -> About:
        config = self._config
        host = split_address(config.listen)[0]
        everywhere = host in ("0.0.0.0", "::")
        return About(
            address="" if everywhere else host,
            connections=len(self._state.nodes),
            places=(Place(path=str(config.state_dir), use="journal"),),
            credentials=str(config.pki or ""),
        )

    def _send(self, node: NodeName, order: Order) -> None:
        """Send an order without awaiting its answer, if the node has a session."""
        if (session := self._session(node)) is not None:
            self._orders.send(session, partial(_message, order))

    async def _ask(self, node: NodeName, order: Order, limit_s: float = _ORDER_S) -> Answer:
        session = self._session(node)
        if session is None:
            return Unable(reason="it is not connected")
        answer = self._orders.ask(session, partial(_message, order))
        until = self._environment.now() + limit_s
        try:
            while True:
                await asyncio.wait({answer}, timeout=min(_LOOK_S, limit_s))
                if answer.done():
                    return answer.result()
                if self._session(node) is not session:
                    return Unable(reason="its session has ended meanwhile")
                if self._environment.now() >= until:
                    return Unable(reason=f"its agent has not answered for {limit_s:.0f} s")
        finally:
            answer.cancel()


class _Examination:
    """State of one examination, from its first finding to its last."""

    def __init__(
        self,
        wish: Wish,
        state: ClusterState,
        environment: Environment,
        *,
        ask: Callable[..., Awaitable[Answer]],
        send: Callable[[NodeName, Order], None],
        head: Doctor,
    ) -> None:
        self._wish = wish
        self._state = state
        self._now = environment.now
        self._unix = environment.unix
        self._ask, self._send, self._head = ask, send, head
        self._name = environment.token(8)
        self._secret = environment.token(32)
        names = wish.nodes or tuple(state.nodes)
        self._nodes: Mapping[NodeName, Node] = {name: state.nodes[name] for name in sorted(names)}
        #: Nodes that have answered all phases so far.
        self._answering: tuple[NodeName, ...] = ()
        self._listening: set[NodeName] = set()
        #: Lock for each host, by its boot id: its nodes examine it one at a time.
        self._looking: dict[str, asyncio.Lock] = {}
        #: By node, folders in which it has left a file.
        self._marked: dict[NodeName, tuple[str, ...]] = {}

    @property
    def _gently(self) -> bool:
        """True while a job uses the nodes."""
        return self._state.job is not None

    async def findings(self) -> AsyncIterator[Finding]:
        if self._wish.problem:
            fix = (
                "make room where --state-dir is, or mend its disk: nothing new is decided meanwhile"
            )
            yield _of_head(Finding(check="journal", level="fail", what=self._wish.problem, fix=fix))
        if self._state.superseded is not None:
            what = f"agents follow another head, in {self._state.superseded[0]}"
            fix = (
                "end this master, or, if the other is lost for good, start this one on a copy of "
                "its --state-dir"
            )
            yield _of_head(Finding(check="head", level="fail", what=what, fix=fix))
        for name, node in self._nodes.items():
            for finding in _of_state(self._state, node):
                yield msgspec.structs.replace(finding, node=name)
        for phase in (self._clocks, self._hosts, self._shared, self._pairs):
            async for finding in phase():
                yield finding

    def end(self) -> None:
        """Stop listening and remove marks, on the nodes that are still connected."""
        for name in self._listening:
            self._send(name, Hush())
        self._remove_marks()

    # ---- phases

    async def _clocks(self) -> AsyncIterator[Finding]:
        connected = [name for name, node in self._nodes.items() if node.connected]
        clocks = await asyncio.gather(*map(self._clock, connected))
        offsets: dict[str, float] = {}
        answering = []
        for name, clock in zip(connected, clocks, strict=True):
            if isinstance(clock, str):
                yield _no_answer(name, clock)
            else:
                answering.append(name)
                offsets[name] = clock
        self._answering = tuple(answering)
        for finding in together.of_clocks(offsets):
            yield finding

    async def _clock(self, name: NodeName) -> float | str:
        """Return the seconds by which the node's clock is ahead of this host's, from the quickest
        of some readings. Returns the reason as text where it is not known."""
        best = (float("inf"), 0.0)
        for _ in range(_CLOCK_READINGS):
            asked = self._now()
            answer = await self._ask(name, ReadClock(), _CLOCK_S)
            heard, unix = self._now(), self._unix()
            if not isinstance(answer, Clock):
                return answer.reason if isinstance(answer, Unable) else "its answer is another one"
            trip = heard - asked
            best = min(best, (trip, answer.unix - (unix - trip / 2)))
        # An offset within half the round trip may be zero.
        trip, offset = best
        return 0.0 if abs(offset) <= trip / 2 else offset

    async def _hosts(self) -> AsyncIterator[Finding]:
        versions = [(name, self._nodes[name].facts.versions) for name in self._answering]
        for finding in together.of_versions(versions, installed().oobleck):
            yield finding
        places, more = self._places()
        if more:
            what = f"{more} more paths of jobs are not looked at"
            yield Finding(check="folders", level="warn", what=what, fix="name them with --data")
        looked: dict[str, Looked] = {}
        looks = {
            asyncio.ensure_future(self._head.ask(Look(gently=self._gently))): together.HEAD,
            **{
                asyncio.ensure_future(self._look_alone(name, places)): name
                for name in self._answering
            },
        }
        try:
            while looks:
                done, _ = await asyncio.wait(looks, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    name, answer = looks.pop(each), each.result()
                    if not isinstance(answer, Looked):
                        yield _no_answer(name, _reason(answer))
                        continue
                    looked[name] = answer
                    for finding in answer.findings:
                        yield msgspec.structs.replace(finding, node=name)
        finally:
            for each in looks:
                each.cancel()
        looked.pop(together.HEAD, None)
        self._answering = tuple(name for name in self._answering if name in looked)
        self._marked = {name: _marked_in(looked[name]) for name in self._answering}
        for finding in (*together.of_packets(looked), *together.of_places(looked)):
            yield finding

    async def _look_alone(self, name: NodeName, places: tuple[Place, ...]) -> Answer:
        """Have the node examine its host, one node of a host at a time, since they share its
        disks."""
        boot = self._nodes[name].facts.boot or name
        async with self._looking.setdefault(boot, asyncio.Lock()):
            return await self._ask(name, self._look(name, places))

    def _look(self, name: NodeName, places: tuple[Place, ...]) -> Look:
        peers = (node.facts.address for other, node in self._nodes.items() if other != name)
        return Look(
            places=places,
            peers=tuple(dict.fromkeys(peers)),
            gently=self._gently,
            mark=f"{MARK}{self._name}-{name}",
        )

    def _places(self) -> tuple[tuple[Place, ...], int]:
        """Return the distinct paths that all nodes must have, and the number of those left out."""
        distinct = [Place(path=path, use="data") for path in self._wish.data]
        distinct += [Place(path=path, use="checkpoints") for path in self._wish.checkpoints]
        for job in self._state.jobs.values():
            if job.state not in ENDED:
                distinct += places_of(job.spec)
        unique = tuple({place.path: place for place in distinct}.values())
        return unique[:_MOST_PLACES], len(unique[_MOST_PLACES:])

    async def _shared(self) -> AsyncIterator[Finding]:
        """Check that files written by one node are visible to the others."""
        folders = sorted({folder for each in self._marked.values() for folder in each})
        marked = [name for name, each in self._marked.items() if each]
        if not folders:
            return
        orders = [
            self._ask(name, FindMarks(folders=self._marked[name], examination=self._name))
            for name in marked
        ]
        answers = dict(zip(marked, await asyncio.gather(*orders), strict=True))
        self._remove_marks()
        for folder in folders:
            marks: dict[str, tuple[str, ...]] = {
                name: answer.found[folder]
                for name, answer in answers.items()
                if isinstance(answer, Marks) and folder in answer.found
            }
            for finding in together.of_marks(folder, marks):
                yield finding

    def _remove_marks(self) -> None:
        for name, folders in self._marked.items():
            if folders:
                self._send(name, RemoveMarks(folders=folders, examination=self._name))
        self._marked = {}

    async def _pairs(self) -> AsyncIterator[Finding]:
        if len(self._answering) < 2:
            return
        ports = await self._listen()
        for name in self._answering:
            if isinstance(ports[name], str):
                what = f"nobody can listen at {self._nodes[name].facts.address}: {ports[name]}"
                fix = "start its agent with an --address of its host"
                yield Finding(check="ports", level="fail", what=what, fix=fix, node=name)
        names = [name for name in self._answering if isinstance(ports[name], int)]
        most = _MOST_BYTES if not self._gently else _FEW_BYTES if self._wish.pairs else 0
        if self._gently:
            amount = (
                f"at most {most >> 20} MiB are sent each way" if most else "next to nothing is sent"
            )
            what = f"a job uses the nodes, so {amount} between two of them"
            fix = "" if most else "--pairs sees how much gets through, by 16 MiB each way"
            yield Finding(check="pairs", level="pass", what=what, fix=fix)
        by_end: dict[ways.End, Way] = {}
        until = self._now() + _PAIRS_S
        for some in ways.rounds(names):
            if self._now() > until:
                break
            measured = await asyncio.gather(
                *(self._pair(NodeName(a), NodeName(b), ports, most) for a, b in some)
            )
            by_end |= {end: way for ends in measured for end, way in ends.items()}
        for finding in ways.conclude(by_end):
            yield finding
        for finding in ways.unmeasured(names, len({frozenset(end) for end in by_end})):
            yield finding

    async def _listen(self) -> dict[NodeName, int | str]:
        """Have each node listen; return its port, or the reason why it has none."""
        order = Listen(secret=self._secret, seconds=_LISTENING_S)
        self._listening = {*self._answering}
        answers = await asyncio.gather(*(self._ask(name, order) for name in self._answering))
        return {
            name: answer.port if isinstance(answer, Listening) else _reason(answer)
            for name, answer in zip(self._answering, answers, strict=True)
        }

    async def _pair(
        self, first: NodeName, second: NodeName, ports: Mapping[NodeName, int | str], most: int
    ) -> dict[ways.End, Way]:
        """Measure the link in both directions at once, then its rate, alone."""
        ends = ((first, second), (second, first))

        async def call(source: NodeName, target: NodeName, most_bytes: int) -> Way | None:
            address, port = self._nodes[target].facts.address, int(ports[target])
            order = Call(address=address, port=port, most_bytes=most_bytes, seconds=_SENDING_S)
            answer = await self._ask(source, order)
            # A node that does not answer says nothing about the link.
            return answer if isinstance(answer, Way) else None

        answers = await asyncio.gather(*(call(source, target, 0) for source, target in ends))
        measured: dict[ways.End, Way] = {
            end: way for end, way in zip(ends, answers, strict=True) if way is not None
        }
        if most and (first, second) in measured and not measured[first, second].problem:
            carried = await call(first, second, most)
            if carried is not None and not carried.problem:
                measured |= {end: ways.with_rates(way, carried) for end, way in measured.items()}
        return measured


def _message(order: Order, number: int) -> pb.MasterMessage:
    return pb.MasterMessage(examine=examine_message(number, order))


def places_of(spec: JobSpec) -> Iterator[Place]:
    """Yield the paths that a job's nodes read and write."""
    for path in (*spec.data.text, spec.data.tokens, spec.data.tokenizer):
        if path is not None:
            yield Place(path=path, use="data")
    if spec.checkpoint is not None:
        yield Place(path=spec.checkpoint.path, use="checkpoints")
    if spec.output is not None:
        yield Place(path=spec.output, use="output")


def _marked_in(looked: Looked) -> tuple[str, ...]:
    return tuple(sorted({seen.at for seen in looked.seen if seen.at and seen.use in SHARED}))


def _reason(answer: Answer) -> str:
    return answer.reason if isinstance(answer, Unable) else "its answer is another one"


def _no_answer(name: str, reason: str) -> Finding:
    fix = "look at its agent's log and at its host, and install the master's release there"
    return Finding(check="agent", level="fail", what=reason, fix=fix, node=name)


def _of_head(finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, node=together.HEAD)


def _of_state(state: ClusterState, node: Node) -> Iterator[Finding]:
    """Yield findings on the node from the master's own state."""

    def finding(level: Level, what: str, fix: str) -> Finding:
        return Finding(check="agent", level=level, what=what, fix=fix)

    status = node.seen.status
    if node.held is not None:
        job_id = node.held.job_id
        what = f"it trains job {job_id}, which this master does not know"
        yield finding("fail", what, ways_on(state, job_id))
    if node.left:
        fix = f"oobleck node forget {node.facts.node}, if it is not to come back"
        yield finding("pass", f"it was taken away: {node.reason}", fix)
        return
    if not node.registered:
        fix = "look at its host (power, network) and at its agent's log, and start that anew"
        yield finding("fail", f"it is lost: {node.reason}", fix)
    elif not node.connected:
        fix = "look at its host and at its agent's log"
        yield finding("fail", "it is not connected", fix)
    if node.registered and status.trouble:
        fix = "mend that, and undrain the node or start its agent anew"
        yield finding("fail", f"it can start no workers: {status.trouble}", fix)
    if node.connected and status.concern:
        what, _, fix = status.concern.partition("; ")
        yield finding("warn", what, fix or "look at the GPU (nvidia-smi -q)")
    for trouble in status.troubles if node.registered else ():
        what, _, fix = trouble.partition("; ")
        yield finding("fail", what, fix or "look at the GPU (nvidia-smi -q)")
    if node.drain is not None:
        how = "in quarantine" if node.is_quarantined else "drained"
        what = f"it is {how}: {node.drain.reason or 'an operator asked for that'}"
        yield finding("warn", what, f"oobleck node undrain {node.facts.node}, once that is mended")
