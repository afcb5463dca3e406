"""Two processes with a device each, that connect by NCCL or (on CPUs) gloo and do a task together.

Must not know the tasks.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from oobleck.host.system.process import with_parent

_LIMIT_S = 40.0
END_S = 5.0
_KILLED_S = 1.0
#: `pair` has ended after that.
PAIR_S = _LIMIT_S + 2 * (END_S + _KILLED_S)
#: Numbers of a tensor where its size plays no part.
SMALL = 1 << 10
#: What a member does, once both are connected: its device and rank, a folder of the two, and
#: seconds that it took to connect. Returns the line that is passed on of the first one.
Task = Callable[[torch.device, int, Path, float], str]


def pair(what: str, devices: Sequence[str]) -> tuple[str, list[int | None]]:
    """Two members: the last line that the first one says, and how each ended (None: it has not,
    though it was killed)."""
    with tempfile.TemporaryDirectory(prefix="oobleck-doctor-") as folder:
        command = [*with_parent("oobleck.worker.doctor"), "member", what]
        members = [
            subprocess.Popen(
                [*command, str(rank), devices[rank], folder],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said, _ = members[0].communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            said = f"no answer within {_LIMIT_S:.0f} s"
        for each in members:
            with suppress(subprocess.TimeoutExpired):
                each.wait(END_S)
            each.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver may hold it
                each.wait(_KILLED_S)
            if each.stdout is not None:
                each.stdout.close()
    lines = said.strip().splitlines()
    return (lines[-1] if lines else ""), [each.poll() for each in members]


def member(arguments: Sequence[str], tasks: Mapping[str, Task]) -> None:
    """Run one of the two members, as `arguments` say: task, rank, device, folder."""
    what, rank, device, folder = arguments
    place = torch.device(device)
    on_gpu = place.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(place)
    began = time.monotonic()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=int(rank),
        world_size=2,
        timeout=timedelta(seconds=_LIMIT_S),
    )
    first = torch.ones(SMALL, device=place)
    dist.all_reduce(first)
    assert float(first.sum()) == 2 * SMALL, "the sum is wrong"
    words = tasks[what](place, int(rank), Path(folder), time.monotonic() - began)
    if rank == "0":
        sys.stdout.write(words + "\n")
        sys.stdout.flush()
    # Groups hold up the end of a process whose peer is gone.
    os._exit(0)
