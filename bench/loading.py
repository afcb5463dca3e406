"""How long a step waits for its token rows, read when they are needed or a step ahead.

    python -m bench.loading [--steps N]

A worker's share of a step (64 rows of 2049 tokens out of a file of 256 MiB, whose pages are dropped
from the kernel's cache before each step) beside computing of about 100 ms per step, in turns. Then
the same for 16 samples of a data set that takes 20 ms for each, by a thread and by processes.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch

from oobleck.core.job.code import NO_ARGUMENTS, Code
from oobleck.core.job.spec import DataSpec, TrainingSpec
from oobleck.worker.data.dataset import Dataset, row_digest
from oobleck.worker.data.opening import Prefetcher
from oobleck.worker.data.own import Loaders, OwnDataset

LENGTH, ROWS, MICROBATCH = 2048, 64, 4
FILE_BYTES = 1 << 28
SAMPLES, SAMPLE_S = 16, 0.02


class Slow:
    """Data set that takes a while for each sample, as over a network."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(SAMPLE_S)
        return torch.full((3, 64, 64), float(index)), index


def compute(seconds: float) -> None:
    """Compute for so long as a training step does: in torch, without the interpreter's lock."""
    a = torch.randn(256, 256)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        a = (a @ a).clamp_(-1, 1)


def drop_pages(path: str) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def wait_per_step(path: str, steps: int, take: Callable[[int, int], object]) -> list[float]:
    """Return the milliseconds that each step waits for rows."""
    waits = []
    for step in range(1, steps + 1):
        drop_pages(path)
        waited = 0.0
        for microbatch in range(ROWS // MICROBATCH):
            began = time.perf_counter()
            take(step, microbatch)
            waited += time.perf_counter() - began
            compute(0.1 * MICROBATCH / ROWS)
        waits.append(1e3 * waited)
    return waits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tokens.bin")
        rng = np.random.default_rng(0)
        with open(path, "wb") as file:
            for _ in range(FILE_BYTES >> 24):
                file.write(rng.integers(0, 50_000, 1 << 23, dtype=np.uint16).tobytes())
            os.fsync(file.fileno())
        dataset = Dataset(DataSpec(tokens=path, dtype="uint16"), LENGTH, 1 << 16)
        training = TrainingSpec(steps=10**9, global_batch=ROWS, microbatch=MICROBATCH)

        def read_now(step: int, microbatch: int) -> list[bytes]:
            first = microbatch * MICROBATCH
            rows = dataset.rows(0, step, range(first, first + MICROBATCH), ROWS)
            return [row_digest(row) for row in rows]

        prefetcher = Prefetcher(dataset, training)

        def take_ahead(step: int, microbatch: int) -> object:
            if microbatch == 0:
                microbatches = range(ROWS // MICROBATCH)
                prefetcher.begin(step, microbatches, microbatches)
            return prefetcher.take(step, microbatch)

        for name, take in (("when needed", read_now), ("a step ahead", take_ahead)):
            waits = wait_per_step(path, steps, take)[2:]
            print(
                f"read {name}: a step waits {statistics.median(waits):.2f} ms "
                f"(median; the longest {max(waits):.2f} ms)"
            )
        prefetcher.close()
    for processes in (0, 2, 4, 8):
        print(f"data.workers {processes}: {samples_per_second(processes, steps):.0f} samples/s")


def samples_per_second(processes: int, steps: int) -> float:
    """Return the samples per second of steps that compute for 100 ms."""
    code = Code(name="bench.loading:Slow", group=None, path=None, arguments=NO_ARGUMENTS, ours=True)
    loaders = None
    if processes:
        loaders = Loaders(code, wide=False, key="data", processes=processes)
    dataset = OwnDataset(code, wide=False, loaders=loaders)
    training = TrainingSpec(steps=10**9, global_batch=SAMPLES, microbatch=MICROBATCH)
    prefetcher = Prefetcher(dataset, training, threads=max(1, processes))
    microbatches = range(SAMPLES // MICROBATCH)
    began = 0.0
    for step in range(1, steps + 3):
        if step == 3:
            began = time.perf_counter()
        prefetcher.begin(step, microbatches, microbatches)
        for microbatch in microbatches:
            prefetcher.take(step, microbatch)
            compute(0.1 * MICROBATCH / SAMPLES)
    rate = steps * SAMPLES / (time.perf_counter() - began)
    prefetcher.close()
    dataset.close()
    return rate


if __name__ == "__main__":
    main()
