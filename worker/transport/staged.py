"""Transport of a device's tensors over a transport of host memory, by pinned buffers.

For workers that share a GPU, which NCCL refuses, and for traffic without NCCL groups. A copy out
waits for the device, since the transport below reads the buffer at once. A copy in is queued on the
device, and torch's allocator of pinned memory keeps the buffer until it is over.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from oobleck.worker.transport.transport import Group, Pending, Transport


class _Arrival:
    """Operation below whose results are copied into the caller's tensors."""

    def __init__(
        self, below: Pending, buffers: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> None:
        self._below = below
        self._buffers = buffers
        self._tensors = tensors

    def wait(self) -> None:
        self._below.wait()
        for buffer, tensor in zip(self._buffers, self._tensors, strict=True):
            if tensor is not buffer:
                tensor.copy_(buffer, non_blocking=True)


class StagedTransport(Transport):
    """Transport by the links `below`, for tensors on any device."""

    def __init__(self, below: Transport, *, everything: bool = False) -> None:
        """Make it. `everything`: host tensors are copied as well, so that a host without a device
        runs the same path."""
        self.rank = below.rank
        self.size = below.size
        self._below = below
        self._everything = everything

    def _buffer(self, tensor: Tensor) -> Tensor:
        """Return the buffer that `tensor` is received into: `tensor` itself, if it is in host
        memory."""
        if tensor.device.type == "cpu" and not self._everything:
            return tensor
        pinned = tensor.device.type != "cpu"
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)

    def _staged(self, tensor: Tensor) -> Tensor:
        """Return a host tensor with the contents of `tensor`."""
        buffer = self._buffer(tensor)
        return buffer if buffer is tensor else buffer.copy_(tensor)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        return self._below.send(self._staged(tensor), peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        buffer = self._buffer(tensor)
        return _Arrival(self._below.receive(buffer, peer, tag), [buffer], [tensor])

    def all_reduce(self, tensor: Tensor, group: Group, shares: Sequence[Tensor] = ()) -> Pending:
        if shares:
            torch.cat(list(shares), out=tensor)
        if len(group) == 1:
            return self._below.all_reduce(tensor, group)
        buffer = self._staged(tensor)
        return _Arrival(self._below.all_reduce(buffer, group), [buffer], [tensor])

    def exchange(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], group: Group, tag: int
    ) -> Pending:
        buffers = [self._buffer(each) for each in received]
        once = {id(each): self._staged(each) for each in sent}  # weights go to all alike
        staged = [once[id(each)] for each in sent]
        return _Arrival(self._below.exchange(staged, buffers, group, tag), buffers, received)

    def gather(self, word: bytes) -> list[bytes]:
        return self._below.gather(word)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        if self.size == 1:
            return [tensor]
        return [part.to(tensor.device) for part in self._below.all_gather(self._staged(tensor))]

    def broadcast(self, tensor: Tensor, root: int) -> None:
        buffer = self._staged(tensor)
        self._below.broadcast(buffer, root)
        if buffer is not tensor:
            tensor.copy_(buffer)

    def abort(self) -> None:
        self._below.abort()

    def dispose(self) -> None:
        self._below.dispose()
