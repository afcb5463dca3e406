"""Data sets of a job on this node: their opening, samples held out, and reading a step ahead.

A data set is windows of tokens, or the result of a function of the user's. Held-out samples are
always the same ones, and never trained on. Must not know plans, programs or the model.
"""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from oobleck.core.job.model import ModelSpec, OwnModelSpec
from oobleck.core.job.spec import DataSpec, EvaluationSpec, JobSpec, TrainingSpec
from oobleck.host.token_file import DataError
from oobleck.worker.data.dataset import Dataset, Tokens, row_digest
from oobleck.worker.data.objective import inputs_and_targets
from oobleck.worker.data.own import Loaders, OwnDataset
from oobleck.worker.data.samples import Samples
from oobleck.worker.models.tree import Tree
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.random import RowKeys

DATA, EVALUATION = "data", "evaluation.data"


def start_loaders(job: JobSpec) -> dict[str, Loaders]:
    """Start the processes that read samples; return them by the key of their data set.

    Called before any code of the user runs here, so that they inherit nothing that it opens or
    starts.
    """
    specs = {DATA: job.data, EVALUATION: job.evaluation.data if job.evaluation else None}
    return {
        key: Loaders(spec.code, wide=_is_wide(job), key=key, processes=spec.workers)
        for key, spec in specs.items()
        if spec is not None and spec.code is not None and spec.workers
    }


def open_dataset(
    job: JobSpec,
    spec: DataSpec,
    loaders: Mapping[str, Loaders],
    *,
    held_out: float = 0.0,
    key: str = DATA,
) -> Dataset | OwnDataset:
    """Open the data set of `spec`.

    `loaders`: running loader processes. `held_out`: share of the samples that are not for training.
    `key`: key of `spec` in the job file. Raise DataError, JobError or NodeError.
    """
    if spec.code is not None:
        wide = _is_wide(job)
        return OwnDataset(
            spec.code, wide=wide, held_out=held_out, key=key, loaders=loaders.get(key)
        )
    model = job.model
    assert isinstance(model, ModelSpec | OwnModelSpec), "there are two kinds"
    assert model.sequence_length is not None, "a job with tokens has it"
    return Dataset(spec, model.sequence_length, model.tokens, held_out=held_out, key=key)


def first_row(job: JobSpec, dataset: Dataset | OwnDataset) -> tuple[Tree, Tree]:
    """Return inputs and targets of the first training row (1, ...). Raise DataError or JobError."""
    keys = RowKeys(seed=job.training.seed, step=1, positions=(0,))
    rows = dataset.rows(keys.seed, keys.step, keys.positions, job.training.global_batch)
    if isinstance(rows, Samples):
        return rows.inputs, rows.targets
    return inputs_and_targets(job.model, torch.from_numpy(rows), keys)


def _is_wide(job: JobSpec) -> bool:
    return job.training.precision == "fp64"


class HeldOut:
    """Held-out rows of a job, in micro-batches."""

    def __init__(
        self,
        job: JobSpec,
        evaluation: EvaluationSpec,
        training: Dataset | OwnDataset,
        loaders: Mapping[str, Loaders],
    ) -> None:
        """Open the data for evaluations.

        `training`: the job's training data. `loaders`: running loader processes, by key. Raise
        DataError, JobError or NodeError.
        """
        self._dataset = training
        if evaluation.data is not None:
            self._dataset = open_dataset(
                job, evaluation.data, loaders, held_out=1.0, key=EVALUATION
            )
        self._spec = evaluation
        self._steps = job.training.steps
        self._microbatch = job.training.microbatch
        #: Numbers of samples and of micro-batches in an evaluation; the last one may be shorter.
        self.samples = min(evaluation.samples, self._dataset.order.held_out)
        self.microbatches = -(-self.samples // self._microbatch)
        #: 32 bytes, equal on nodes with equal data for training and evaluation.
        self.fingerprint = training.fingerprint
        if evaluation.data is not None:
            both = training.fingerprint + self._dataset.fingerprint
            self.fingerprint = hashlib.sha256(both).digest()

    def due(self, step: int) -> bool:
        """Return whether the state after `step` is evaluated."""
        return self._spec.due(step, self._steps)

    def positions(self, microbatch: int) -> range:
        """Return the positions, among the held-out rows, of those in `microbatch`."""
        start = microbatch * self._microbatch
        return range(start, min(start + self._microbatch, self.samples))

    def rows(self, microbatch: int) -> Tokens | Samples:
        """Return token rows (n, sequence_length + 1), or samples. Raise DataError or JobError."""
        return self._dataset.held_out_rows(self.positions(microbatch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Data sets of a job on this node."""

    dataset: Dataset | OwnDataset
    #: Rows for evaluations; None: the job has none.
    held_out: HeldOut | None

    @property
    def fingerprint(self) -> bytes:
        """32 bytes, equal on nodes with equal data for training and evaluation."""
        return self.held_out.fingerprint if self.held_out else self.dataset.fingerprint


# ---- Reader of rows and their digests, a step ahead, in a thread, while the worker computes.
#
# Rows are a function of (seed, step, positions), so prefetched rows stay valid when the plan
# changes. With loader processes, several threads wait for them. Threads die with the process.
# Must not know programs, stages or plans.


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
        """Return rows that `begin` has requested. They are kept until it begins a later step.

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
