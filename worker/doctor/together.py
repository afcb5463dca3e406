"""Checks of two processes, with a GPU each or (for a CPU) over gloo: sums, aborts, lost peers."""

import fcntl
import os
import signal
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import permutations
from pathlib import Path

import torch
import torch.distributed as dist

from oobleck.core.finding import Finding
from oobleck.planner.profile.machine import GPUS, machine_of
from oobleck.worker.doctor.pair import END_S, SMALL, pair

#: Numbers of a sum.
_SUM = 1 << 26
_NETWORK = (
    "see NCCL_DEBUG=INFO; on one host try NCCL_P2P_DISABLE=1, which tells whether GPUs reach each "
    "other's memory (IOMMU and ACS in the BIOS keep them from it), and look at /dev/shm"
)


def peers(devices: Sequence[str]) -> Iterator[Finding]:
    """Check whether GPUs reach each other's memory, and how fast."""
    numbers = [torch.device(device).index for device in devices]
    apart = [
        f"{a}-{b}"
        for a, b in permutations(numbers, 2)
        if not torch.cuda.can_device_access_peer(a, b)
    ]
    if apart:
        what = f"no direct way between GPUs {', '.join(apart)}: messages go through the host"
        fix = "look at 'nvidia-smi topo -p2p r', and switch IOMMU and ACS off in the BIOS"
        yield Finding(check="peers", level="slow", what=what, fix=fix)
        return
    block = torch.empty(1 << 28, dtype=torch.uint8, device=devices[0])
    there = torch.empty_like(block, device=devices[1])
    there.copy_(block)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(8):
        there.copy_(block)
    torch.cuda.synchronize()
    rate = 8 * block.numel() / (time.perf_counter() - began)
    yield of_peers(torch.cuda.get_device_name(devices[0]), rate)


def of_peers(name: str, rate: float) -> Finding:
    """`name`: of the board; `rate`: bytes/s."""
    what = f"GPUs reach each other's memory, at {rate / 1e9:.0f} GB/s"
    machine = machine_of(f"cuda {name}")
    if machine.name in GPUS and rate < 0.5 * machine.intra_node_bytes_per_s:
        fix = "look at its NVLinks (nvidia-smi nvlink --status, nvidia-smi topo -m)"
        return Finding(check="peers", level="slow", what=what, fix=fix)
    return Finding(check="peers", level="pass", what=what)


def sums(devices: Sequence[str]) -> Iterator[Finding]:
    """A sum of two processes: right, connected how soon, and how fast."""
    words, codes = pair("sum", devices)
    if codes != [0, 0]:
        yield Finding(check="sums", level="fail", what=f"a sum of two fails: {words}", fix=_NETWORK)
        return
    connect_s, rate = map(float, words.split())
    what = f"two connect in {connect_s:.1f} s, and a sum is right, at {rate / 1e9:.3g} GB/s"
    yield Finding(check="sums", level="pass", what=what)


def aborts(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that a receive whose peer was killed can be given up, and its GPU goes on."""
    words, codes = pair("lost", devices)
    if codes[0] != 0:
        what = f"a receive from a killed peer cannot be given up: {words or 'it hangs'}"
        fix = "update the driver and NCCL: every recovery needs that"
        yield Finding(check="aborts", level="fail", what=what, fix=fix)
        return
    what = f"a receive from a killed peer is given up in {float(words):.2f} s, and its GPU goes on"
    yield Finding(check="aborts", level="pass", what=what)


def sum_of_two(place: torch.device, rank: int, folder: Path, connect_s: float) -> str:
    """Seconds until they were connected, and bytes of a sum per second."""
    numbers = torch.ones(_SUM if place.type == "cuda" else SMALL, device=place)
    began = time.perf_counter()
    for _ in range(4):
        dist.all_reduce(numbers)
    assert float(numbers[0]) == 16.0, "the sum is wrong"
    rate = 4 * numbers.numel() * 4 / (time.perf_counter() - began)
    dist.barrier()
    return f"{connect_s} {rate}"


def lose(place: torch.device, rank: int, folder: Path, connect_s: float) -> str:
    """Rank 1 is killed while rank 0 waits for what it sends: seconds until that is given up."""
    numbers = torch.ones(SMALL, device=place)
    posted = folder / "posted"
    with (folder / "alive").open("w") as alive:
        if rank == 1:
            fcntl.flock(alive, fcntl.LOCK_EX)  # until it ends
        # NCCL connects a pair at its first message, which takes both.
        _exchange(numbers, rank)
        if rank == 1:
            while not posted.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.irecv(numbers, 1)
        assert work is not None
        posted.touch()
        fcntl.flock(alive, fcntl.LOCK_EX)
    began = time.monotonic()
    if place.type == "cuda":
        dist.distributed_c10d._abort_process_group()  # not public
        torch.cuda.synchronize()
    else:
        try:
            work.wait(timedelta(seconds=END_S))
        except RuntimeError:  # what gloo says of a lost peer
            pass
        else:
            raise AssertionError("a receive from a killed peer has ended well")
    spent_s = time.monotonic() - began
    assert float(torch.ones(8, 8, device=place).sum()) == 64.0, "the device computes no more"
    return str(spent_s)


def _exchange(numbers: torch.Tensor, rank: int) -> None:
    """A message each way."""
    for sender in (0, 1):
        if rank == sender:
            dist.send(numbers, 1 - rank)
        else:
            dist.recv(numbers, sender)
    if numbers.is_cuda:
        torch.cuda.synchronize()
