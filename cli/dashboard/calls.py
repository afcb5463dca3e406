"""Single calls of the master for requests of browsers, a few at a time, in threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from oobleck.cli import options
from oobleck.cli.client import MasterClient
from oobleck.cli.dashboard.following import Connect
from oobleck.cli.dashboard.problem import Problem
from oobleck.host.command import CommandFailed

T = TypeVar("T")

#: HTTP status by the command line's exit code.
_STATUS = {
    options.USAGE: 409,
    options.NO_SUCH_THING: 404,
    options.UNREACHABLE: 503,
    options.DENIED: 403,
}
#: Interval of checks that the browser is still connected.
_LOOK_S = 1.0


class Calls:
    def __init__(self, connect: Connect, *, at_once: int) -> None:
        self._connect = connect
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="call")

    async def ask(self, request: Request, what: Callable[[MasterClient], T]) -> T:
        """Call the master; cancel when the browser disconnects. Raise Problem."""
        try:
            client = self._connect()
        except (CommandFailed, ValueError) as error:
            raise Problem(503, str(error), "Not done") from error
        with client:
            asked = asyncio.get_running_loop().run_in_executor(self._threads, what, client)
            while not (await asyncio.wait({asked}, timeout=_LOOK_S))[0]:
                if await request.is_disconnected():
                    asked.cancel()
                    raise Problem(499, "the browser has disconnected")
            try:
                return asked.result()
            except CommandFailed as failed:
                status = _STATUS.get(failed.exit_code, 500)
                raise Problem(status, str(failed), "Not done") from failed

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
