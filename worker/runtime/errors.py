"""How a worker's step can end early. Each is handled in one place: the session loop."""

from collections.abc import Sequence
from typing import Literal

import torch

from oobleck.planner.ids import Generation, WorkerId


class TransportError(Exception):
    """An operation with a peer failed: its process or the way to it is gone. Recoverable."""


class Unreached(TransportError):
    """There is no way to a member of a rendezvous that is known to be there."""

    def __init__(self, text: str, rank: int | None = None, worker: WorkerId | None = None) -> None:
        """`rank`: the member's; None: that of the host of the meeting. `worker`: who that is."""
        super().__init__(text)
        self.rank = rank
        self.worker = worker

    def of(self, members: Sequence[WorkerId]) -> "Unreached":
        """The same with the worker's name; `members` are in rank order."""
        worker = members[self.rank] if self.rank is not None else None
        return Unreached(str(self), self.rank, worker)


class Unmapped(TransportError):
    """What another process of this host shares of its GPU's memory cannot be mapped: the process
    has ended, or the host does not let it."""


class CalledOff(TransportError):
    """A newer meeting than this one is wanted, as another member knows already."""


class LayersGone(TransportError):
    """Nobody in the generation has some layer at the agreed step, of which the master did not know
    when it planned. It now waits, or finds who has the layer."""


class Superseded(Exception):
    """A newer generation was pushed; what this one was doing is no longer wanted."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(f"superseded by generation {generation}")
        self.generation = generation


class JobError(ValueError):
    """The job is at fault: it asks for what cannot be done. The text names the key or path, and the
    fix."""


class NodeError(ValueError):
    """This node alone cannot do what the job asks for; the text names what it lacks, and the
    fix."""


class HelperLost(Exception):
    """A process that works for this worker has ended, or one whose end has spoilt its device. The
    worker ends too, and is replaced as one that was killed itself."""


class InvariantViolation(Exception):
    """Ours: a state that must not exist. The worker crashes with it rather than train on."""


def for_want_of_memory(error: BaseException) -> bool:
    """Whether it was raised since there is too little memory."""
    if type(error) is not RuntimeError:  # as torch says it of a CPU; others may have no text
        return isinstance(error, MemoryError | torch.OutOfMemoryError)
    return "can't allocate memory" in str(error).partition("\n")[0]


def whose_fault(error: torch.AcceleratorError) -> Literal["user", "node"]:
    """A kernel that checks what it is given, as an index into a table, fails on every GPU; all else
    is taken for the GPU's own fault, or its driver's."""
    return "user" if "device-side assert" in str(error) else "node"


def of_the_device(error: BaseException) -> bool:
    """Whether it says something of the device, and nothing of the code that ran there."""
    if isinstance(error, torch.AcceleratorError):
        return whose_fault(error) == "node"
    return for_want_of_memory(error)
