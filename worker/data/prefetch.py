"""Reader of rows and their digests, a step ahead, in a thread, while the worker computes.

Rows are a function of (seed, step, positions), so prefetched rows stay valid when the plan changes.
With loader processes, several threads wait for them. Threads die with the process. Must not know
programs, stages or plans.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from oobleck.core.job.spec import TrainingSpec
from oobleck.host.data.token_file import DataError
from oobleck.worker.data.dataset import Dataset, Tokens, row_digest
from oobleck.worker.data.own import OwnDataset
from oobleck.worker.data.samples import Samples
from oobleck.worker.runtime import pulse


@dataclass(frozen=True, slots=True)
class Loaded:
    """Micro-batch that has been loaded."""

    #: Positions in the global batch, one per row.
    positions: range
    #: (micro-batch, sequence_length + 1), or samples of the user's data set.
    rows: Tokens | Samples
    digests: tuple[bytes, ...]


class Prefetcher:
    """Prefetched rows of one job for one worker, across generations."""

    def __init__(
        self, dataset: Dataset | OwnDataset, training: TrainingSpec, threads: int = 1
    ) -> None:
        """Start the threads.

        `threads`: more than one only if the data set may be read concurrently.
        """
        self._dataset = dataset
        self._training = training
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="prefetch")
        #: Rows that are loading or loaded, by step and micro-batch.
        self._loads: dict[tuple[int, int], Future[Loaded]] = {}

    def begin(self, step: int, microbatches: Iterable[int], following: Iterable[int]) -> None:
        """Read `microbatches` of `step`, in this order, then `following` of the next step."""
        wanted = [(step, m) for m in microbatches]
        if step < self._training.steps:
            wanted += [(step + 1, m) for m in following]
        for key in self._loads.keys() - set(wanted):
            self._loads.pop(key).cancel()
        for key in wanted:
            if key not in self._loads:
                self._loads[key] = self._threads.submit(self._load, *key)

    def take(self, step: int, microbatch: int) -> Loaded:
        """Return rows that `begin` has requested; they stay until it is called for a later step.

        Raise DataError if they cannot be read.
        """
        try:
            with pulse.FILES:
                return self._loads[step, microbatch].result()
        except DataError as error:
            raise DataError(f"{error} (step {step})") from error

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _load(self, step: int, microbatch: int) -> Loaded:
        size = self._training.microbatch
        positions = range(microbatch * size, (microbatch + 1) * size)
        seed, global_batch = self._training.seed, self._training.global_batch
        rows = self._dataset.rows(seed, step, positions, global_batch)
        if isinstance(rows, Samples):
            return Loaded(positions, rows, rows.digests)
        return Loaded(positions, rows, tuple(map(row_digest, rows)))
