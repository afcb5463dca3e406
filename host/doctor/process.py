"""Process that examines this host for a daemon (`oobleck.host.doctor`).

It is started with the first order, killed if it does not answer, and ended when idle for a while. A
check that hangs does so in that process. Must not know the meaning of orders.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from oobleck.core.orders import About, Answer, Asked, Order, Unable
from oobleck.host.system.process import with_parent

MODULE = "oobleck.host.doctor"
#: Time-out of an answer: longer than those of the examining threads.
ANSWER_S = 50.0
#: Time after which an idle process ends: longer than between two orders of one examination.
_IDLE_S = 60.0
_END_S = 1.0
#: Training has priority, even over Python's start-up.
_NICE = 10
_MOST_BYTES = 1 << 20


class Doctor:
    """Process that examines the host, one order at a time; `close` it."""

    def __init__(self, about: Callable[[], About], environment: Mapping[str, str] | None) -> None:
        """Make a doctor. `environment`: the process's variables; None: those of this process."""
        self._about = about
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def ask(self, order: Order) -> Answer:
        async with self._turn:
            if self._idle is not None:
                self._idle.cancel()
            try:
                return await self._answer(order)
            finally:
                self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self._kill)

    async def _answer(self, order: Order) -> Answer:
        try:
            async with asyncio.timeout(ANSWER_S):
                process = self._process or await self._start()
                assert process.stdin is not None
                assert process.stdout is not None
                asked = Asked(order=order, about=self._about())
                process.stdin.write(msgspec.json.encode(asked) + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
            if not line:
                raise ConnectionError("it has ended")
            answer: Answer = msgspec.json.decode(line, type=Answer)
            return answer
        except TimeoutError:
            self._kill()
            return Unable(reason=f"the examining process has not answered for {ANSWER_S:.0f} s")
        except (OSError, ValueError) as error:
            self._kill()
            return Unable(reason=f"the examining process: {error}")
        except BaseException:
            self._kill()
            raise

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *with_parent(MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
            limit=_MOST_BYTES,
        )
        with suppress(OSError):  # the process has ended, or is as nice already
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)
        return self._process

    def _kill(self) -> None:
        """Kill the process without waiting for it: the kernel may hold it for long."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            reaping = asyncio.create_task(_reap(process))
            self._ending.add(reaping)
            reaping.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._kill()
        if self._ending:
            await asyncio.wait(self._ending, timeout=_END_S)


async def _reap(process: asyncio.subprocess.Process) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await process.communicate()
