"""Errors that end a worker's step early. Each is handled in one place: the session loop."""

from collections.abc import Sequence
from typing import Literal

import torch

from oobleck.core.ids import Generation, WorkerId


class TransportError(Exception):
    """Failure of an operation with a peer: its process or the way to it is gone. Recoverable."""


class Unreached(TransportError):
    """Failure to reach a member of a rendezvous that is known to be there."""

    def __init__(self, text: str, rank: int | None = None, worker: WorkerId | None = None) -> None:
        """`rank`: the member's; None: that of the host of the meeting. `worker`: who that is."""
        super().__init__(text)
        self.rank = rank
        self.worker = worker

    def of(self, members: Sequence[WorkerId]) -> "Unreached":
        """Return the same error with the worker's name; `members` are in rank order."""
        worker = members[self.rank] if self.rank is not None else None
        return Unreached(str(self), self.rank, worker)


class Unmapped(TransportError):
    """Failure to map GPU memory that another process of this host shares: the process has ended, or
    the host does not let it be mapped."""


class CalledOff(TransportError):
    """End of a meeting because a newer one is wanted, as another member knows already."""


class LayersGone(TransportError):
    """Loss of a layer: no worker in the generation has it at the agreed step, and the master did
    not know when it planned. The master now waits, or finds a worker that has the layer."""


class Superseded(Exception):
    """Push of a newer generation: what this one was doing is no longer wanted."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(f"superseded by generation {generation}")
        self.generation = generation


class JobError(ValueError):
    """Fault of the job: it asks for what cannot be done. The text names the key or path, and the
    fix."""


class NodeError(ValueError):
    """Fault of this node alone: it cannot do what the job asks for. The text names what the node
    lacks, and the fix."""


class HelperLost(Exception):
    """End of a process that works for this worker, or of one whose end has spoilt its device. The
    worker ends too, and is replaced as one that was killed itself."""


class InvariantViolation(Exception):
    """Bug of ours: a state that must not exist. The worker crashes with it rather than train on."""


def for_want_of_memory(error: BaseException) -> bool:
    """Return whether the error was raised because memory is short."""
    if type(error) is not RuntimeError:  # as torch says it of a CPU; others may have no text
        return isinstance(error, MemoryError | torch.OutOfMemoryError)
    return "can't allocate memory" in str(error).partition("\n")[0]


def whose_fault(error: torch.AcceleratorError) -> Literal["user", "node"]:
    """Return whose fault the error is. A kernel that checks what it is given, such as an index into
    a table, fails on every GPU; all else is taken for the GPU's own fault, or its driver's."""
    return "user" if "device-side assert" in str(error) else "node"


def of_the_device(error: BaseException) -> bool:
    """Return whether the error tells of the device, and not of the code that ran there."""
    if isinstance(error, torch.AcceleratorError):
        return whose_fault(error) == "node"
    return for_want_of_memory(error)
