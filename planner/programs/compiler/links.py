"""A lowering pass: every link becomes first-in-first-out, as NCCL needs it.

A link is all messages from one worker to another, activations and gradients alike. Where routes
share workers, a receiver may need a message before others that were sent earlier. It then receives
the earlier ones first, although nothing needs them yet.

This causes no deadlock. Let all compute be in an order that each worker follows and in which each
piece comes after its inputs, such as by the begins of a schedule. A message is sent right after its
compute. A receive that is moved is before a piece C of compute which needs a later message of the
link. The piece that sends this later one is before C, and the sender computes the piece of the
moved one before that. So each message awaited before C was sent by a piece before C in the order,
and by induction that piece has run. Must not know times.
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
    """Return the programs with receives in the order of the sends of each link. Each receive is as
    late as possible: before the first instruction that needs it or a message sent after it.

    Receives must be right before the instruction that needs them, and sends right after their
    compute. All else stays as it is, including a receive without a send (the dry run reports it).
    """
    #: By receiver and sender: position of each message among those sent.
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
    #: By sender: receives that are not in the result yet.
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
        # The next one to be received is last.
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
