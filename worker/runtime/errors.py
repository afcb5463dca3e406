"""Errors that end a worker's step early. Each is handled in one place: the session loop.

Also owns the records of faults in a user's code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from oobleck.core.ids import Generation, WorkerId


class TransportError(Exception):
    """Failure of an operation with a peer: its process or the connection is gone. Recoverable."""


class Unreached(TransportError):
    """Failure to reach a known member of a rendezvous."""

    def __init__(self, text: str, rank: int | None = None, worker: WorkerId | None = None) -> None:
        """Make the error. `rank`: the member's; None: that of the host of the meeting. `worker`:
        its name.
        """
        super().__init__(text)
        self.rank = rank
        self.worker = worker

    def of(self, members: Sequence[WorkerId]) -> "Unreached":
        """Return the same error with the worker's name; `members` are in rank order."""
        worker = members[self.rank] if self.rank is not None else None
        return Unreached(str(self), self.rank, worker)


class Unmapped(TransportError):
    """Failure to map GPU memory that another process of this host shares: the process has ended, or
    the host does not allow the mapping."""


class Released(TransportError):
    """End of an operation because this worker leaves the others: it names no lost peer."""


class CalledOff(TransportError):
    """End of a meeting because another member already knows of a newer one."""


class LayersGone(TransportError):
    """Loss of a layer: no worker in the generation has it at the agreed step, unknown to the master
    when it planned. The master now waits, or finds a worker that has the layer."""


class Superseded(Exception):
    """Error raised when a newer generation was pushed: the work for this one is no longer
    wanted.
    """

    def __init__(self, generation: Generation) -> None:
        super().__init__(f"superseded by generation {generation}")
        self.generation = generation


class JobError(ValueError):
    """Fault of the job: it asks for something impossible. The text names the key or path, and the
    fix."""


class NodeError(ValueError):
    """Fault of this node alone: it cannot do what the job needs. The text names what the node
    lacks, and the fix."""


class HelperLost(Exception):
    """End of a helper process of this worker, or of one whose end has damaged its device. The
    worker ends too, and is replaced like a killed one."""


class InvariantViolation(Exception):
    """Bug of ours: a state that must not exist. The worker crashes with it rather than train on."""


def for_want_of_memory(error: BaseException) -> bool:
    """Return whether the error was raised because memory is short."""
    if type(error) is not RuntimeError:  # torch's type on a CPU
        return isinstance(error, MemoryError | torch.OutOfMemoryError)
    return "can't allocate memory" in str(error).partition("\n")[0]


def whose_fault(error: torch.AcceleratorError) -> Literal["user", "node"]:
    """Return whose fault the error is. A kernel that checks its input, such as an index into a
    table, fails on every GPU; any other error is attributed to the GPU or its driver."""
    return "user" if "device-side assert" in str(error) else "node"


def of_the_device(error: BaseException) -> bool:
    """Return whether the error is of the device, and not of the code that ran there."""
    if isinstance(error, torch.AcceleratorError):
        return whose_fault(error) == "node"
    return for_want_of_memory(error)


# ---- Records of faults of a user's model or data set.


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    #: One of model, a layer of it, loss, metrics or data.
    where: str
    #: Fault and fix.
    sentence: str
    #: True if the job may run as it is.
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.sentence}"


def as_problem(error: Exception) -> Problem:
    """Return the record of an error whose text begins with its place."""
    where, _, sentence = str(error).partition(": ")
    return Problem(where=where, sentence=sentence)
