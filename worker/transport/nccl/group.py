"""Process group of NCCL, and the exchange of the identifier by which its members find each other.

NCCL's first member makes an identifier that the others must have. torch passes it on through a
store. Here that store is a table in memory, and the identifier travels over the links between
workers, which are sealed and can be given up.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, AllToAllOptions, Store, Work

from oobleck.worker.transport.transport import OPERATION_TIMEOUT

#: torch replaces an out-of-range priority by the nearest valid one.
_HIGHEST = -100


class ProcessGroup(Protocol):
    """Part of ProcessGroupNCCL that is used."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Begin to connect; returns before the others have arrived."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions) -> Work: ...

    def alltoall(
        self, received: list[Tensor], sent: list[Tensor], options: AllToAllOptions
    ) -> Work:
        """Send and receive a tensor per member; an empty tensor is not sent."""

    def abort(self) -> None: ...


class Identifiers(Store):
    """Identifiers that the first member of a group has written, for that group."""

    def __init__(self, written: Mapping[str, bytes] | None = None) -> None:
        """Make it. `written`: the first member's entries; None: this is the first member's own."""
        super().__init__()
        self.written = dict(written or {})

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch gives bytes
        self.written[key] = bytes(value)

    def get(self, key: str) -> bytes:
        """Return an entry. Raises KeyError at once: a missing one will never arrive."""
        return self.written[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.written for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if not self.check(keys):
            raise KeyError(f"nothing is known as {', '.join(keys)}")


class GroupMaker(Protocol):
    """Maker of process groups on one device."""

    def make(self, identifiers: Identifiers, rank: int, size: int, most_ctas: int) -> ProcessGroup:
        """Make a group. `rank`: this member's number, of `size`; `most_ctas`: most multiprocessors
        of an operation."""

    def take_stream(self) -> int:
        """Take the next stream of the groups' pool and return it. The next group that connects
        takes the one after it."""


class NcclMaker:
    """Maker of NCCL's process groups."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def make(self, identifiers: Identifiers, rank: int, size: int, most_ctas: int) -> ProcessGroup:
        """Make a group whose communicator is made without waiting for the other members."""
        from torch._C._distributed_c10d import ProcessGroupNCCL  # builds of torch for CPUs lack it

        options = ProcessGroupNCCL.Options()
        options._timeout = OPERATION_TIMEOUT
        options.config.blocking = 0
        # It determines channels and their buffers: many groups must fit into memory together.
        options.config.max_ctas = most_ctas
        # Streams of a pool that nothing else uses.
        options.is_high_priority_stream = True
        return ProcessGroupNCCL(identifiers, rank, size, options)  # type: ignore[return-value]  # stubs

    def take_stream(self) -> int:
        # The highest priority, which that pool has.
        return torch.cuda.Stream(self._device, priority=_HIGHEST).cuda_stream  # type: ignore[no-untyped-call]  # no types


def use_device(device: torch.device) -> None:
    """Have this thread use that GPU. Each thread begins with the first GPU, and allocates memory
    there with its first call of CUDA."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
