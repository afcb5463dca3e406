"""Plugin for pytest (`-p bench.gpu.real_nccl --device cuda:0 --transport nccl`): tests of worker
processes use real NCCL instead of a fake, with all workers on one GPU."""

import os
from typing import Any

from bench.gpu.pair import own_host
from oobleck.worker.transport.nccl.group import GroupMaker, NcclMaker


def make(device: str) -> GroupMaker:
    """Return the maker of a worker's groups, in that worker."""
    import torch

    os.environ.update(own_host(f"worker-{os.getpid()}"))  # before the first call of NCCL
    return NcclMaker(torch.device(device))


def pytest_sessionstart(session: Any) -> None:
    """Have workers make their groups by `make`."""
    from support.director import Director  # type: ignore[import-not-found]  # of tests/

    device = session.config.getoption("--device")

    def nccl(self: Director) -> tuple[str, str, str] | None:
        return (__name__, "make", device) if self.switch else None

    Director._fake = nccl
