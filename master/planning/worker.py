"""Process that makes plans for a master: one request after the other, from standard input.

    python -m oobleck.master.planning.worker < socket

It ends with the channel. After a first plan, and while no request waits, it prepares for likely
requests.
"""

import logging
import os
import select
import socket
import sys

from oobleck.host import log as host_log
from oobleck.host.ipc.channel import Channel
from oobleck.master.planning.requests import Broken, NextPlanRequest, PlanReply, PlanRequest
from oobleck.master.planning.solve import rehearse, work_out

log = logging.getLogger(__name__)

#: Seconds without a request after which the master is taken to be idle.
_IDLE_S = 1.0


def reply(request: PlanRequest) -> PlanReply:
    """Return the reply of `work_out`, or `Broken` after an internal error.

    The same request would fail again, also in the next process. Only the master knows the
    alternatives (`oobleck.master.planning.client`).
    """
    try:
        return work_out(request)
    except Exception as error:
        wanted = request.wanted if isinstance(request, NextPlanRequest) else "first plan"
        log.exception("planning failed", extra={"wanted": wanted})
        return Broken(error=repr(error))


def main() -> None:
    host_log.configure()
    channel: Channel[PlanRequest] = Channel(socket.socket(fileno=os.dup(0)), PlanRequest)
    if not select.select([channel], [], [], _IDLE_S)[0]:
        # For placement: this import takes half a second, which a recovery cannot spare.
        import scipy.optimize  # noqa: F401
    while (request := channel.receive()) is not None:
        answered = reply(request)
        try:
            channel.send(answered)
        except OSError:  # the master is gone
            sys.exit(1)
        for _ in rehearse(request, answered):
            if select.select([channel], [], [], 0)[0]:
                break


if __name__ == "__main__":
    main()
