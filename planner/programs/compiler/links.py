"""A lowering pass: every link becomes first-in-first-out, as NCCL needs it.

A link is all messages from one worker to another, activations and gradients alike. Where routes
share workers, a receiver may need a message before others that were sent earlier; those are then
received before it, although nothing needs them yet.

Nobody waits for ever by that. Let all compute be in an order in which each piece comes after all
that it needs and which each worker follows, as the begins of a schedule are. A message is sent
right after its compute. A receive that is moved stands before a piece C of compute which needs a
later message of the link. The piece that sends this later one is before C, and the sender computes
the piece of the moved one before that. So whatever is waited for before C was sent by something
before C in the order, and by induction that has run. Must not know times.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from oobleck.core.ids import WorkerId
from oobleck.core.instructions import (
    Content,
    Instruction,
    Message,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)

#: Receiver and sender.
_Link = tuple[WorkerId, WorkerId]


def receives_hoisted(
    programs: Mapping[WorkerId, Sequence[Instruction]],
) -> dict[WorkerId, list[Instruction]]:
    """The programs with their receives in the order of the sends of each link, each as late as that
    allows: before the first instruction that needs it or a message that is sent after it.

    Receives must stand right before what needs them, and sends right after what they send. All
    else stays as it is; so does a receive that nobody sends (the dry run tells it).
    """
    #: By receiver and sender: the place of each message among those that are sent.
    places: dict[_Link, dict[Content, int]] = defaultdict(dict)
    for worker, program in programs.items():
        for step in program:
            if isinstance(step, SendActivation | SendGradient):
                link = places[step.peer, worker]
                link[step.content] = len(link)
    return {worker: _hoisted(worker, program, places) for worker, program in programs.items()}


def _hoisted(
    worker: WorkerId, program: Sequence[Instruction], places: Mapping[_Link, Mapping[Content, int]]
) -> list[Instruction]:
    #: By sender: the receives that do not stand in the result yet.
    ordered: dict[WorkerId, list[tuple[int, Instruction]]] = defaultdict(list)
    steps: list[tuple[Instruction, int | None]] = []
    for step in program:
        place = None
        if isinstance(step, ReceiveActivation | ReceiveGradient):
            place = places.get((worker, step.peer), {}).get(step.content)
            if place is not None:
                ordered[step.peer].append((place, step))
        steps.append((step, place))
    for own in ordered.values():
        # The next one to be received stands last.
        own.sort(key=lambda receive: receive[0], reverse=True)
    found: list[Instruction] = []
    for step, place in steps:
        if place is None:
            found.append(step)
            continue
        assert isinstance(step, Message)
        left = ordered[step.peer]
        while left and left[-1][0] <= place:
            found.append(left.pop()[1])
    return found
