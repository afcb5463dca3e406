"""Agent's part in `oobleck doctor`: forwards the master's orders to a process that examines the
host, and its answers back.

The process does everything that may hang or take time. Only the clock is read here, at once. Must
not know what is examined, nor streams.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from oobleck.agent.config import AgentConfig
from oobleck.core.orders import About, Answer, Clock, Order, Place, ReadClock, Unable
from oobleck.host.address import split_addresses
from oobleck.host.doctor.process import Doctor
from oobleck.host.system.environment import Environment
from oobleck.host.timeline import boot_id
from oobleck.proto import control_pb2 as pb
from oobleck.proto.examinations import read_order

logger = logging.getLogger(__name__)

#: Orders that wait; a master has one examination at a time, and few orders of it.
_MOST_WAITING = 16
#: Prefixes of the variables to report: they set how NCCL and Gloo communicate.
_REPORTED = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_")
#: Links of a worker that a cluster of a few dozen nodes has.
_LINKS_EACH = 64


class Examiner:
    def __init__(
        self,
        config: AgentConfig,
        environment: Environment,
        answer: Callable[[int, Answer], None],
        credentials: Path | None,
    ) -> None:
        """Prepare to examine this host. `answer` sends to the master; `credentials`: this node's
        folder, which its agent renews."""
        self._config = config
        self._unix = environment.unix
        self._answer = answer
        self._credentials = credentials
        #: Address by which others reach this node's workers; empty: not known yet.
        self._address = config.address or ""
        self._doctor = Doctor(self._about, config.environment)
        self._orders: asyncio.Queue[tuple[int, Order]] = asyncio.Queue(_MOST_WAITING)

    def reached_from(self, address: str) -> None:
        self._address = address

    def take(self, message: pb.Examine) -> None:
        try:
            order = read_order(message)
        except ValueError as error:
            reason = f"its agent does not understand the order: {error}"
            self._answer(message.number, Unable(reason=reason))
            return
        if isinstance(order, ReadClock):
            self._answer(message.number, Clock(unix=self._unix(), boot=boot_id()))
            return
        try:
            self._orders.put_nowait((message.number, order))
        except asyncio.QueueFull:
            self._answer(message.number, Unable(reason="too many orders wait there"))

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            while True:
                number, order = await self._orders.get()
                answer = await self._doctor.ask(order)
                if isinstance(answer, Unable):
                    logger.warning("could not be looked at", extra={"reason": answer.reason})
                self._answer(number, answer)
        finally:
            await self._doctor.close()

    def _about(self) -> About:
        config = self._config
        home = config.environment.get("HOME", os.path.expanduser("~"))
        own = [Place(path=config.environment.get("TMPDIR", "/tmp"), use="own")]
        own.append(Place(path=os.path.join(home, ".cache", "oobleck"), use="own"))
        if self._credentials is not None:
            own.append(Place(path=str(self._credentials), use="own"))
        return About(
            address=self._address,
            master=split_addresses(config.master)[0],
            workers=config.worker_slots,
            memory_per_worker_bytes=config.memory_per_worker_bytes,
            device=config.device,
            gpus=tuple(dict.fromkeys(gpu.bus for gpu in config.gpus)),
            connections=_LINKS_EACH,
            places=tuple(own),
            credentials=str(self._credentials or ""),
            variables={
                name: value
                for name, value in config.environment.items()
                if name.startswith(_REPORTED)
            },
        )
