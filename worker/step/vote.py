"""Vote that ends a step for all workers or for none, and the commit that follows from it.

The vote is one small all-reduce. Its vector sums the loss, its weight and the squared gradient
norm. It also sums each worker's view of a pending plan change, of checkpoints and of its transport,
and flags of parameters with a gradient. Its ledger has, for every position of the global batch, a
count and the digest of the token row, from the worker that loaded the row. So all workers know that
every sample was used once, and make the same record of the step.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from oobleck.core.ids import Generation
from oobleck.core.job.spec import JobSpec, TrainingSpec
from oobleck.core.messages import StepRecord
from oobleck.worker.data.dataset import samples_digest
from oobleck.worker.runtime.errors import InvariantViolation, JobError
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.optimizer import clip_scale
from oobleck.worker.state.progress import Omissions, TrainingProgress, parameters_of

_LOSS, _WEIGHT, _SQUARED_NORM, _PENDING, _PENDING_SQUARED = range(5)
_SAVE_DUE, _SAVE_WISH, _SAVE_WISH_SQUARED, _SAVING, _SAVE_FAILED = range(5, 10)
_CONNECTED, _LEDGER = range(10, 12)
#: SHA-256 digest as eight 32-bit numbers: exact in a float64, also after adding zeros.
_WORDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveVote:
    """Share of one worker in a vote on checkpoints."""

    #: True if a checkpoint is due after this step.
    due: bool = False
    #: Number of the newest wish that has arrived and is not served; 0: none.
    wish: int = 0
    #: True if it is still writing the last checkpoint.
    busy: bool = False
    #: True if it could not write its part of the last one.
    failed: bool = False


_NOTHING = SaveVote()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveVerdict:
    """Outcome of a vote for checkpoints, the same on all workers."""

    #: True if a checkpoint is due, or a wish has reached all workers.
    due: bool
    #: That wish; 0: none.
    wish: int
    #: Number of workers that still write the last one.
    busy: int
    #: True if any could not write its part.
    failed: bool


class Checkpoints(Protocol):
    """Checkpoints of this worker, on which the votes decide."""

    def intent(self, step: int) -> SaveVote:
        """Return this worker's share in the vote on `step`."""

    def committed(self, step: int, verdict: SaveVerdict) -> None:
        """Note that `step` is applied, with the `verdict` of its vote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of the vote on a step, the same on every worker."""

    #: Sum of the global batch's losses divided by the sum of its weights; 0 if all weights are 0.
    loss: float
    #: Sum of the rows' weights; their number if each weighs 1.
    weight: float
    #: Factor by which the summed gradients, which are of the mean over rows, become those of
    #: `loss`.
    factor: float
    #: Norm of the gradient of `loss`, before clipping.
    grad_norm: float
    samples_digest: str
    #: The boundary change that every worker is ready to enter after this step.
    switch_to: Generation | None
    saving: SaveVerdict
    #: True if the transport of every worker is connected (`Transport.connected`).
    connected: bool
    #: For each parameter that the step may leave out: True if any worker has a gradient of it.
    used: tuple[bool, ...] = ()

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def ballot_length(global_batch: int, parameters: int = 0) -> int:
    """Return the length of a ballot. `parameters`: number of those that the step may leave out."""
    return _LEDGER + global_batch * (1 + _WORDS) + parameters


def ballot(
    *,
    global_batch: int,
    loss_sum: float,
    weight: float,
    squared_norm: float,
    pending: Generation | None,
    row_digests: Mapping[int, bytes],
    saving: SaveVote = _NOTHING,
    connected: bool = True,
    used: Sequence[bool] = (),
) -> torch.Tensor:
    """Return one worker's share of the vote, in float64.

    - loss_sum, weight: over the micro-batches whose loss it computed;
    - row_digests: SHA-256 of each token row that it loaded as input, by position in the global
      batch;
    - connected: True if its transport is connected;
    - used: for each parameter that the step may leave out, True if the worker has a gradient of it.
    """
    vector = np.zeros(ballot_length(global_batch, len(used)))
    vector[_LOSS] = loss_sum
    vector[_WEIGHT] = weight
    vector[_SQUARED_NORM] = squared_norm
    if pending is not None:
        vector[_PENDING] = pending
        vector[_PENDING_SQUARED] = float(pending) ** 2
    vector[_SAVE_DUE] = saving.due
    vector[_SAVE_WISH] = saving.wish
    vector[_SAVE_WISH_SQUARED] = float(saving.wish) ** 2
    vector[_SAVING] = saving.busy
    vector[_SAVE_FAILED] = saving.failed
    vector[_CONNECTED] = connected
    end = ballot_length(global_batch)
    vector[end:] = used
    ledger = vector[_LEDGER:end].reshape(global_batch, 1 + _WORDS)
    for position, digest in row_digests.items():
        ledger[position, 0] = 1
        ledger[position, 1:] = np.frombuffer(digest, dtype="<u4")
    return torch.from_numpy(vector)


def count(vector: torch.Tensor, training: TrainingSpec, *, workers: int) -> Result:
    """Read the summed vector. Raises InvariantViolation when a sample of the global batch was not
    used exactly once."""
    sums = vector.numpy()
    end = ballot_length(training.global_batch)
    ledger = sums[_LEDGER:end].reshape(training.global_batch, 1 + _WORDS)
    wrong = np.flatnonzero(ledger[:, 0] != 1)
    if wrong.size:
        uses = {int(position): int(ledger[position, 0]) for position in wrong[:8]}
        raise InvariantViolation(f"samples not used exactly once (position: uses): {uses}")
    digests = ledger[:, 1:].astype("<u4")
    norm = math.sqrt(sums[_SQUARED_NORM]) if sums[_SQUARED_NORM] >= 0 else math.nan
    factor = _factor(float(sums[_WEIGHT]) / training.global_batch)
    switch_to = _common(float(sums[_PENDING]), float(sums[_PENDING_SQUARED]), workers)
    wish = _common(float(sums[_SAVE_WISH]), float(sums[_SAVE_WISH_SQUARED]), workers)
    return Result(
        loss=float(sums[_LOSS]) / training.microbatches * factor,
        weight=float(sums[_WEIGHT]),
        factor=factor,
        grad_norm=norm * factor,
        samples_digest=samples_digest(digest.tobytes() for digest in digests),
        switch_to=Generation(switch_to) if switch_to else None,
        saving=SaveVerdict(
            due=bool(sums[_SAVE_DUE] > 0) or wish > 0,
            wish=wish,
            busy=round(sums[_SAVING]),
            failed=bool(sums[_SAVE_FAILED] > 0),
        ),
        connected=round(sums[_CONNECTED]) == workers,
        used=tuple((sums[end:] > 0).tolist()),
    )


def _factor(mean_weight: float) -> float:
    """Return 1 / the mean weight of a row, or 0 if all weights are 0, since there is nothing to
    learn. A mean below 0 or not finite gives NaN, so that all workers skip the step."""
    if mean_weight == 0:
        return 0.0
    return 1 / mean_weight if 0 < mean_weight < math.inf else math.nan


def _common(total: float, total_of_squares: float, workers: int) -> int:
    """Return the number that all workers contributed; 0 if they differ."""
    # Cauchy-Schwarz: n * sum(x^2) = sum(x)^2 exactly when all x are the same.
    if total > 0 and workers * total_of_squares == total * total:
        return round(total / workers)
    return 0


# ---- The commit of a step on one worker: counting its votes, applying it, and the step's record.
#
# The executor commits its own votes, a rejoining worker those of others.


def commit(
    state: ModelState, job: JobSpec, progress: TrainingProgress, result: Result, step: int
) -> Omissions:
    """Apply step `step` to the layers with reduced gradients, and drop all others, which are out of
    date. Return what the update left out."""
    for layer in sorted(state.held()):
        if layer not in progress.reduced_layers:
            state.drop(layer)
    state.former.clear()  # only the newest shares have reduced gradients
    scale = scale_of(result, job.training)
    unused = parameters_of(job).unused(result.used)
    omitted = Omissions(unused=unused, missed=progress.missed)
    if scale is not None:
        state.apply(step, scale=scale, omitted=omitted)
    else:
        state.skip(step)
    progress.skipped = 0 if result.finite else progress.skipped + 1
    progress.committed, progress.missed = step, omitted.after()
    return omitted


def scale_of(result: Result, training: TrainingSpec) -> float | None:
    """Return the factor from summed gradients to clipped ones of the loss; None: skip the step."""
    if not result.finite:
        return None
    return clip_scale(result.grad_norm, training.clip) * result.factor


def check_skipped(training: TrainingSpec, progress: TrainingProgress) -> None:
    """Raise JobError if the limit of consecutive skipped steps is reached."""
    limit, skipped, step = training.max_skipped_steps, progress.skipped, progress.committed
    if limit is not None and skipped >= limit:
        raise JobError(
            f"the loss or the gradients of {skipped} consecutive steps ({step - skipped + 1} to "
            f"{step}) were not finite, so that no weight has changed since step {step - skipped}; "
            "lower training.optimizer.lr or training.clip, examine the data of these steps, or "
            "raise training.max_skipped_steps"
        )


def make_record(
    job: JobSpec, generation: Generation, progress: TrainingProgress, result: Result
) -> StepRecord:
    """Return the line of metrics.jsonl for the step that `progress` has committed."""
    return StepRecord(
        step=progress.committed,
        loss=result.loss if math.isfinite(result.loss) else None,
        grad_norm=result.grad_norm if math.isfinite(result.grad_norm) else None,
        tokens=_tokens(job, result),
        samples_digest=result.samples_digest,
        generation=generation,
        step_seconds=time.monotonic() - progress.begun_at,
        time=time.time(),
        skipped=not result.finite,
    )


def _tokens(job: JobSpec, result: Result) -> int:
    """Return the step's tokens; only learned ones if the loss weighs rows by them."""
    if job.model.weighs_tokens:
        return round(result.weight) if math.isfinite(result.weight) else 0
    return job.training.global_batch * job.model.row_tokens
