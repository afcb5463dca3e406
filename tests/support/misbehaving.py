"""A worker that breaks the rules of links amid training, as whoever has its host could make it."""

from unittest import mock

from oobleck.worker.step.executor import Executor
from oobleck.worker.transport.links.link import Link, Outgoing
from oobleck.worker.transport.links.wire import HEADER, Kind

#: The worker of this node does it, once, within this step.
NODE, STEP = "b", 3
SAID = b"12345"


def begin() -> None:
    """Have every worker that is forked from now on send it, if it is that one."""
    run_forward = Executor._forward
    done = False

    def forward(self: Executor, step: object, instruction: object) -> None:
        run_forward(self, step, instruction)  # type: ignore[arg-type]  # as it was called
        nonlocal done
        context = self._context
        if context.worker.node != NODE or context.progress.begun != STEP or done:
            return
        done = True
        with context.links.lock:
            for link in context.links._links.values():
                send(link, context.links._epoch)
                context.links._traffic.poll_for(link)

    mock.patch.object(Executor, "_forward", forward).start()


def send(link: Link, epoch: int) -> None:
    """A GOODBYE that has a content."""
    frame = object.__new__(Outgoing)
    frame.epoch, frame.kind = epoch, Kind.MESSAGE
    frame.left = [memoryview(HEADER.pack(epoch, Kind.GOODBYE, 0, 0, len(SAID))), memoryview(SAID)]
    frame.started = frame.given_up = frame.done = False
    link._queues[0].append(frame)
    link.write()
