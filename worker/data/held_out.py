"""The held-out samples of a job: always the same ones, never trained on.

Must not know plans, programs or the model.
"""

import hashlib
from collections.abc import Mapping

from oobleck.core.job.spec import EvaluationSpec, JobSpec
from oobleck.worker.data.dataset import Dataset, Tokens
from oobleck.worker.data.loaders import Loaders
from oobleck.worker.data.opening import EVALUATION, open_dataset
from oobleck.worker.data.own import OwnDataset
from oobleck.worker.data.samples import Samples


class HeldOut:
    """The held-out rows of a job, in micro-batches."""

    def __init__(
        self,
        job: JobSpec,
        evaluation: EvaluationSpec,
        training: Dataset | OwnDataset,
        loaders: Mapping[str, Loaders],
    ) -> None:
        """Open the data of evaluations. `training`: the job's data; `loaders`: the started ones, by
        key. Raises DataError, JobError, NodeError."""
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
        """Return the numbers of the held-out rows that are those of `microbatch`."""
        start = microbatch * self._microbatch
        return range(start, min(start + self._microbatch, self.samples))

    def rows(self, microbatch: int) -> Tokens | Samples:
        """Return token rows (n, sequence_length + 1), or samples. Raises DataError, JobError."""
        return self._dataset.held_out_rows(self.positions(microbatch))
