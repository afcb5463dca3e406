"""The data plane of one generation: workers meet at one of them, and exchange among all of them.

An exchange is complete when every member has put in its share and all can reach each other; each
gets the result at a time of its own, so a vote may be known to some and not to others when one
dies. Who leaves or dies breaks the gathering for the others, as far as they can be reached.
"""

import asyncio
from typing import TYPE_CHECKING, Any

from oobleck.core.ids import WorkerId
from oobleck.core.messages import Assign
from oobleck.worker.runtime.errors import Superseded, TransportError, Unreached

if TYPE_CHECKING:
    from simulation.trainer import Trainer
    from simulation.world import World

#: A host that does not answer is given up after this time.
STORE_S = 6.0


class Gathering:
    def __init__(self, world: "World", assign: Assign, members: tuple[WorkerId, ...]) -> None:
        self._world = world
        self.plan = assign.plan
        self.host = assign.rendezvous.host
        self.members: dict[WorkerId, Trainer] = {}
        self._size = len(members)
        self._nodes = {worker.node for worker in members}
        #: What each worker is to hold.
        self.shards = assign.plan.shards
        self.layers = {w: sorted(s.layer for s in held) for w, held in self.shards.items()}
        self._outcome = ""
        self._arrivals: dict[WorkerId, asyncio.Future[None]] = {}
        self._shares: dict[str, dict[WorkerId, Any]] = {}
        self._waiting: dict[str, dict[WorkerId, asyncio.Future[Any]]] = {}
        self.broken = False
        #: Who left, and how the others hear of it.
        self._gone: list[tuple[Trainer, str]] = []

    # ---- meeting

    async def meet(self, trainer: "Trainer") -> None:
        """Until all are here. Raises Superseded, TransportError."""
        if self._outcome == "called off":
            raise Superseded(self.plan.generation)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.members[trainer.worker] = trainer
        self._arrivals[trainer.worker] = future
        trainer.ear.on_newer(lambda: self._call_off(trainer))
        host = self._world.host_at(self.host)
        if host is None or not host.process.alive:
            await asyncio.sleep(self._world.delay_s())
            self.members.pop(trainer.worker, None)
            raise TransportError("connection refused by the host")
        trainer.process.later(STORE_S, self._check_store, trainer)
        self._go_on()
        await future

    def _call_off(self, trainer: "Trainer") -> None:
        if self._outcome == "":
            self._outcome = "called off"
            for worker, future in self._arrivals.items():
                self._tell(worker, future, Superseded(self.plan.generation))
        elif self._outcome == "called off" and trainer.worker in self._arrivals:
            self._tell(trainer.worker, self._arrivals[trainer.worker], Superseded(0))

    def _check_store(self, trainer: "Trainer") -> None:
        future = self._arrivals.get(trainer.worker)
        if self._outcome or future is None or future.done():
            return
        host = self._world.host_at(self.host)
        if host is not None and self._world.can_talk(host, trainer) and not host.process.stopped:
            trainer.process.later(STORE_S, self._check_store, trainer)
        else:
            self.members.pop(trainer.worker, None)
            future.set_exception(Unreached("the host does not answer"))

    def _tell(self, worker: WorkerId, future: asyncio.Future[Any], what: object) -> None:
        """Settle the future in its worker's process, some time from now."""

        def settle() -> None:
            if not future.done():
                if isinstance(what, Exception):
                    future.set_exception(what)
                else:
                    future.set_result(what)

        if (member := self.members.get(worker)) is not None:
            member.process.later(self._world.delay_s(), settle)

    # ---- exchanging

    async def exchange(self, trainer: "Trainer", name: str, share: object) -> dict[WorkerId, Any]:
        """What every member has put in under `name`. Raises Superseded, TransportError."""
        trainer.ear.check_wanted(self.plan.generation)
        if self.broken:
            raise TransportError("connection closed by peer")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._shares.setdefault(name, {})[trainer.worker] = share
        self._waiting.setdefault(name, {})[trainer.worker] = future
        generation = self.plan.generation

        def abrupt() -> None:
            if not future.done():
                future.set_exception(Superseded(generation))

        trainer.ear.on_abrupt(abrupt)
        self._go_on()
        result: dict[WorkerId, Any] = await future
        return result

    def _go_on(self) -> None:
        """Whatever can be completed now is."""
        if self.broken or len(self.members) < self._size:
            return
        if not self._world.all_can_talk(self._nodes):
            return
        if self._outcome == "":
            self._outcome = "go"
            for worker, future in self._arrivals.items():
                self._tell(worker, future, None)
        for name, shares in list(self._shares.items()):
            if len(shares) == self._size:
                del self._shares[name]
                for worker, future in self._waiting.pop(name).items():
                    self._tell(worker, future, shares)

    def reconnected(self) -> None:
        for gone, detail in self._gone:
            self._spread(gone, detail)
        self._go_on()

    # ---- ends

    def leave(self, trainer: "Trainer", detail: str) -> None:
        """The member is gone: by itself, or dead. The others hear of it if they can."""
        if self.members.pop(trainer.worker, None) is None:
            return
        if self._outcome == "":  # nobody is connected to it yet
            self._arrivals.pop(trainer.worker, None)
            return
        self.broken = True
        self._gone.append((trainer, detail))
        self._spread(trainer, detail)

    def _spread(self, trainer: "Trainer", detail: str) -> None:
        for other in list(self.members.values()):
            if self._world.can_talk(trainer, other):
                other.process.later(self._world.delay_s() * 3, self._lose, other, detail)

    def _lose(self, member: "Trainer", detail: str) -> None:
        if self.members.get(member.worker) is not member:
            return
        member.lost_peer(self.plan.generation, detail)
        for waiting in (*self._waiting.values(), self._arrivals):
            future = waiting.get(member.worker)
            if future is not None and not future.done():
                future.set_exception(TransportError(detail))

    def leave_in_peace(self, trainer: "Trainer") -> None:
        """Its end is no loss to the others, who are through as well."""
        self.members.pop(trainer.worker, None)
