"""The held-out samples of a job: always the same ones, never trained on.

Must not know plans, programs or the model.
"""

import hashlib
from collections.abc import Mapping

from oobleck.host.data.token_file import DataError
from oobleck.planner.job.spec import EvaluationSpec, JobSpec
from oobleck.worker.data.dataset import Dataset, Tokens
from oobleck.worker.data.loaders import Loaders
from oobleck.worker.data.opening import DATA, EVALUATION, open_dataset
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
        """`training`: the job's data; `loaders`: that were started. Raises DataError where there is
        not enough to evaluate."""
        self._dataset = training
        key = DATA
        if evaluation.data is not None:
            key = EVALUATION
            self._dataset = open_dataset(job, evaluation.data, loaders, held_out=1.0, key=key)
        self._spec = evaluation
        self._steps = job.training.steps
        self._microbatch = job.training.microbatch
        held_out = self._dataset.order.held_out
        self.microbatches = min(evaluation.samples, held_out) // self._microbatch
        if not self.microbatches:
            more = "" if evaluation.fraction is None else "raise evaluation.fraction, "
            rows, give = "samples", "give more"
            if isinstance(self._dataset, Dataset):
                rows = f"rows of {job.model.row_tokens + 1} tokens"
                give = "give more text or lower model.sequence_length"
            raise DataError(
                f"{key}: holds out {held_out} {rows}, too few for one micro-batch of "
                f"{self._microbatch}; {more}{give}"
            )
        #: Samples of an evaluation.
        self.samples = self.microbatches * self._microbatch
        #: 32 bytes, equal on nodes with equal data for training and evaluation.
        self.fingerprint = training.fingerprint
        if evaluation.data is not None:
            both = training.fingerprint + self._dataset.fingerprint
            self.fingerprint = hashlib.sha256(both).digest()

    def due(self, step: int) -> bool:
        """Whether the state after `step` is evaluated."""
        return self._spec.due(step, self._steps)

    def positions(self, microbatch: int) -> range:
        """Which of the held-out rows are those of `microbatch`."""
        return range(microbatch * self._microbatch, (microbatch + 1) * self._microbatch)

    def rows(self, microbatch: int) -> Tokens | Samples:
        """Token rows (micro-batch, sequence_length + 1), or samples. Raises DataError, JobError."""
        return self._dataset.held_out_rows(self.positions(microbatch))
