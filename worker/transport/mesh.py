"""Small sums over all workers, where few enough are all connected with each other.

Everyone sends its share to everyone and adds up what comes, in the order of the ranks, so the
result is the same to the last bit on all. One message's time, where a ring or a tree takes several;
and once a worker's share is out, the others need nothing more of it. Must not know what is summed.
"""

from collections.abc import Sequence

import torch

from oobleck.worker.transport.peer_connections import PeerConnections

#: Workers of a mesh; the messages grow with the square of their number.
MOST_WORKERS = 16
#: Of one share.
MOST_BYTES = 64 << 10

#: No message of a program or a transfer has it.
_TAG = -1


class MeshSum:
    """One sum under way, in place of `tensor`."""

    def __init__(
        self, connections: PeerConnections, tensor: torch.Tensor, rank: int, size: int
    ) -> None:
        """All of `size` ranks begin their sums in the same order. Raises TransportError."""
        self._tensor = tensor
        share = tensor.clone()
        self._shares = [share if peer == rank else torch.empty_like(share) for peer in range(size)]
        others = [peer for peer in range(size) if peer != rank]
        self._sends = [connections.send(share, peer, _TAG) for peer in others]
        self._receives = [connections.receive(self._shares[peer], peer, _TAG) for peer in others]

    def wait(self) -> None:
        for receive in self._receives:
            receive.wait()
        for send in self._sends:
            send.wait()
        _add_up(self._tensor, self._shares)


def _add_up(tensor: torch.Tensor, shares: Sequence[torch.Tensor]) -> None:
    tensor.copy_(shares[0])
    for share in shares[1:]:
        tensor.add_(share)
