"""Data sets of a job on this node: their opening, and the samples held out for evaluations.

A data set is windows of tokens, or the result of a function of the user's. Held-out samples are
always the same ones, and never trained on. Must not know plans, programs or the model.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from oobleck.core.job.model import ModelSpec, OwnModelSpec
from oobleck.core.job.spec import DataSpec, EvaluationSpec, JobSpec
from oobleck.worker.data.dataset import Dataset, Tokens
from oobleck.worker.data.loaders import Loaders
from oobleck.worker.data.objective import inputs_and_targets
from oobleck.worker.data.own import OwnDataset
from oobleck.worker.data.samples import Samples
from oobleck.worker.models.tree import Tree
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
