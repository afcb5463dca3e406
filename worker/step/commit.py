"""The commit of a step on one worker: counting its votes, applying it, and the step's record.

The executor commits its own votes, a rejoining worker those of others. Must not know peers or
programs.
"""

import math
import time

from oobleck.core.ids import Generation
from oobleck.core.job.spec import JobSpec, TrainingSpec
from oobleck.core.messages import StepRecord
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.optimizer import clip_scale
from oobleck.worker.state.progress import Omissions, TrainingProgress, parameters_of
from oobleck.worker.step import vote


def commit(
    state: ModelState, job: JobSpec, progress: TrainingProgress, result: vote.Result, step: int
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


def scale_of(result: vote.Result, training: TrainingSpec) -> float | None:
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
    job: JobSpec, generation: Generation, progress: TrainingProgress, result: vote.Result
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


def _tokens(job: JobSpec, result: vote.Result) -> int:
    """Return the step's tokens; only learned ones if the loss weighs rows by them."""
    if job.model.weighs_tokens:
        return round(result.weight) if math.isfinite(result.weight) else 0
    return job.training.global_batch * job.model.row_tokens
