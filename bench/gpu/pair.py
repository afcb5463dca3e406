"""Two processes with a device each that do a task together, and how each of them ends.

Two processes may share one GPU: NCCL takes each for a host of its own (NCCL_HOSTID), and so does
not refuse the second one. They talk over sockets and take turns on the GPU, so rates mean nothing;
everything else is real.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from bench.gpu.communicators import Folder, Member
from oobleck.host.system.process import with_parent
from oobleck.worker.transport.nccl.group import NcclMaker, use_device

_LIMIT_S = 50.0
_END_S = 5.0
_KILLED_S = 1.0
#: The longest that `pair` takes.
PAIR_S = _LIMIT_S + 2 * (_END_S + _KILLED_S)
_SHARED = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "=lo",
}
#: A member's part. Returns the line that the first member passes on.
Task = Callable[[Member], str]


def is_shared(devices: Sequence[str]) -> bool:
    """Return whether two processes have the same device."""
    return len(devices) > 1 and devices[0] == devices[1]


def own_host(name: str) -> dict[str, str]:
    """Return the variables by which NCCL takes a process for the host `name`."""
    return {**_SHARED, "NCCL_HOSTID": name}


def pair(
    task: str, devices: Sequence[str], *, as_hosts: bool = True
) -> tuple[str, list[int | None]]:
    """Run both members. Return the first one's last line, and both exit codes; None: it did not end
    though it was killed. `as_hosts`: NCCL takes those of one GPU for a host each."""
    apart = as_hosts and is_shared(devices)
    with tempfile.TemporaryDirectory(prefix="oobleck-gpu-") as folder:
        command = [*with_parent("bench.gpu"), "member", task]
        members = [
            subprocess.Popen(
                [*command, str(rank), devices[rank], folder],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **(own_host(f"r{rank}") if apart else {})},
            )
            for rank in range(2)
        ]
        try:
            output, _ = members[0].communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            output = f"no answer within {_LIMIT_S:.0f} s"
        for each in members:
            with suppress(subprocess.TimeoutExpired):
                each.wait(_END_S)
            each.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver may hold it
                each.wait(_KILLED_S)
            if each.stdout is not None:
                each.stdout.close()
    lines = output.strip().splitlines()
    return (lines[-1] if lines else ""), [each.poll() for each in members]


def run_member(arguments: Sequence[str], tasks: Mapping[str, Task]) -> None:
    """Run one member. `arguments`: task, rank, device, folder."""
    task, rank, device, folder = arguments
    place = torch.device(device)
    use_device(place)
    torch.zeros(1, device=place)
    words = tasks[task](Member(int(rank), place, NcclMaker(place), Folder(Path(folder))))
    if rank == "0":
        sys.stdout.write(words + "\n")
        sys.stdout.flush()
    # Groups hold up the end of a process whose peer is gone.
    os._exit(0)
