"""Sums over links beside gloo's: how long they take, and how much of the processors.

For each number of workers, as many processes of this machine sum tensors of each size, by turns
over the one and over the other, so that whatever else the machine does hits both. The processor
time is that of all of them together.
"""

import argparse
import multiprocessing
import queue
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroupGloo, TCPStore

from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.calls import Card
from oobleck.worker.transport.links.hub import Links

SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20)
HOST = "127.0.0.1"
TURNS = 5
#: Bytes summed per turn, and bounds of the number of sums.
_TURN_BYTES, _LEAST, _MOST = 32 << 20, 2, 40

Sum = Callable[[torch.Tensor], None]


def over_gloo(rank: int, count: int, store: TCPStore) -> Sum:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # stubs call it Options
    options._timeout = timedelta(minutes=5)
    options._threads = 2
    options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
    group: Any = ProcessGroupGloo(store, rank, count, options)
    return lambda tensor: group.allreduce([tensor], AllreduceOptions()).wait()


def over_links(rank: int, count: int, store: TCPStore, *, sealed: bool = False) -> Sum:
    links = Links(HOST, silence_s=10, sealed=sealed)
    transport = LinkTransport(links, 1, b"bench", rank, count)
    if rank == 0:
        store.set("host", links.card.text)
    host = Card.read(store.get("host").decode())
    transport.meet(host, set(range(count)) - {rank}, b"", lambda: None)
    everyone = tuple(range(count))
    return lambda tensor: transport.all_reduce(tensor, everyone).wait()


KINDS: dict[str, Callable[[int, int, TCPStore], Sum]] = {"gloo": over_gloo, "links": over_links}


def work(rank: int, count: int, port: int, results: "multiprocessing.Queue[Any]") -> None:
    """Run one process; send the median wall and processor milliseconds of a sum, by kind and
    size."""
    torch.set_num_threads(1)
    store = TCPStore(HOST, port, is_master=rank == 0, wait_for_workers=False)
    sums = {kind: make(rank, count, store) for kind, make in KINDS.items()}
    figures: dict[tuple[str, int], tuple[float, float]] = {}
    for size in SIZES:
        tensor = torch.full((size // 4,), 1e-30)
        each = max(_LEAST, min(_MOST, _TURN_BYTES // size))
        for kind, add in sums.items():
            add(tensor)  # memory and connections
            figures[kind, size] = (0.0, 0.0)
        times: dict[str, list[float]] = {kind: [] for kind in sums}
        used = dict.fromkeys(sums, 0.0)
        for _ in range(TURNS):
            for kind, add in sums.items():
                before = time.process_time()
                for _ in range(each):
                    started = time.perf_counter()
                    add(tensor)
                    times[kind].append(time.perf_counter() - started)
                used[kind] += time.process_time() - before
        for kind in sums:
            processor_ms = 1e3 * used[kind] / (TURNS * each)
            figures[kind, size] = (1e3 * statistics.median(times[kind]), processor_ms)
    results.put((rank, figures))
    results.close()
    results.join_thread()
    time.sleep(3600)  # until it is killed: an earlier end would close others' links


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", default="2,4,8")
    parser.add_argument("--sealed", action="store_true", help="seal the links; gloo cannot")
    options = parser.parse_args()
    KINDS["links"] = partial(over_links, sealed=options.sealed)
    print("workers  bytes      gloo ms  links ms  ratio   gloo cpu ms  links cpu ms")
    for count in map(int, options.workers.split(",")):
        context = multiprocessing.get_context("fork")
        results: multiprocessing.Queue[Any] = context.Queue()
        with socket.create_server((HOST, 0)) as found:
            port: int = found.getsockname()[1]
        processes = [
            context.Process(target=work, args=(rank, count, port, results), daemon=True)
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        try:
            told = dict(results.get(timeout=600) for _ in range(count))
        except queue.Empty:
            raise SystemExit("a process did not come to its end; its error is above") from None
        for process in processes:
            process.kill()
        for size in SIZES:
            gloo, links = (told[0][kind, size][0] for kind in KINDS)
            of_all = (sum(told[r][kind, size][1] for r in told) for kind in KINDS)
            gloo_cpu, links_cpu = of_all
            print(
                f"{count:7}  {size:9}  {gloo:7.2f}  {links:8.2f}  {links / gloo:5.2f}"
                f"  {gloo_cpu:12.2f}  {links_cpu:12.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
