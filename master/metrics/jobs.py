"""Metrics of jobs, read from the state and from counts. A job that the master has forgotten is in
none of them. Must not know nodes' facts."""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import get_args

from oobleck.host.metrics import Family, Reading, single
from oobleck.master.api.view import is_moving, mfu, step_age_s, tokens_per_s
from oobleck.master.metrics.tally import JobTally, Tally
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import ENDED, Job, JobState

_JOB = ("job_id",)


def _gauge(name: str, help_text: str) -> Family:
    return Family("gauge", f"oobleck_job_{name}", help_text, _JOB)


def _counter(name: str, help_text: str) -> Family:
    return Family("counter", f"oobleck_job_{name}_total", help_text, _JOB)


JOBS = Family("gauge", "oobleck_jobs", "Jobs by state.", ("state",))
SUBMITTED = Family("counter", "oobleck_jobs_submitted_total", "Submitted jobs.")
INFO = Family("gauge", "oobleck_job_info", "1; the job's name.", ("job_id", "name"))
STATE = Family("gauge", "oobleck_job_state", "1 for the job's state.", ("job_id", "state"))

STEPS = _gauge("target_steps", "Steps to train.")
COMMITTED = _gauge("committed_step", "Newest step that the workers have committed.")
GENERATION = _gauge("generation", "Newest plan's number.")
NODES = _gauge("nodes", "Live nodes of the newest plan.")
PIPELINES = _gauge("pipelines", "Pipelines of the newest plan.")
TOLERANCE = _gauge("fault_tolerance", "Lost nodes that the job wants to survive.")
CAN_LOSE = _gauge("can_lose_nodes", "Nodes that it can lose now.")
SLOW = _gauge("slow_workers", "Slow workers.")
SUBMITTED_AT = _gauge("submitted_timestamp_seconds", "Unix time of the submission.")
STARTED_AT = _gauge("started_timestamp_seconds", "Unix time of the job's first turn.")
FINISHED_AT = _gauge("finished_timestamp_seconds", "Unix time of the job's end.")

LOSS = _gauge("loss", "Training loss of the newest step.")
GRADIENT = _gauge("gradient_norm", "Norm of the gradient in the newest step.")
STEP_S = _gauge("step_seconds", "Median of the last ten steps.")
STEP_AGE = _gauge("last_step_age_seconds", "Time since the newest step of an unfinished job.")
SPEED = _gauge("tokens_per_second", "Tokens per second of the last ten steps.")
MFU = _gauge("mfu_ratio", "Share of its GPUs' peak; absent where unknown.")
EVALUATED = _gauge("evaluation_loss", "Loss of the newest evaluation.")
CHECKPOINT = _gauge("checkpoint_step", "Step of the newest checkpoint, or 0.")
SAVES_FAIL = _gauge("save_failing", "1 while an unfinished job's newest checkpoint failed.")
LOST = _gauge("records_lost", "Steps that metrics.jsonl lacks.")
GOODPUT = _gauge(
    "goodput_ratio",
    "Share of time in kept steps, since the first one counted.",
)

SKIPPED = _counter("skipped_steps", "Steps skipped as gradients were not finite.")
CHANGES = _counter("reconfigurations", "Plans after the first one.")
INCIDENTS = _counter("incidents", "Failures and slowdowns, open ones too.")
TRAINED = _counter("training_seconds", "Time of kept steps, each counted once.")
COUNTED = _counter("steps", "Committed steps, each counted once.")
TOKENS = _counter("tokens", "Tokens of these steps.")
PHASES = Family(
    "counter",
    "oobleck_job_recovery_phase_seconds_total",
    "Time of recoveries, by phase.",
    ("job_id", "phase"),
)
RECOVERIES = _counter("recoveries", "Finished changes of plan.")
STALL = _counter("stall_seconds", "Time without a commit in recoveries, less one step.")
MOVED = _counter("recovery_received_bytes", "State received in recoveries.")
REDONE = _counter("redone_steps", "Steps done again.")
SALVAGED = _counter("salvaged_microbatches", "Micro-batches of these that were kept.")
WORKERS_LOST = _counter("workers_lost", "Workers lost on live nodes.")
SAVED = _counter("checkpoints", "Published checkpoints.")
SAVED_BYTES = _counter("checkpoint_bytes", "Bytes of these checkpoints.")
SAVED_S = _counter("checkpoint_seconds", "Time from each step's end to its checkpoint.")
SAVE_FAILURES = _counter("save_failures", "Failed checkpoints and outputs.")

PLANS = Family(
    "counter",
    "oobleck_plans_total",
    "Plans by cause and policy.",
    ("cause", "policy"),
)
RECONFIGURATION = Family(
    "histogram",
    "oobleck_reconfiguration_seconds",
    "From the first evidence to the answering plan's first step.",
    ("cause",),
)


_OF_A_JOB = (
    *(STEPS, COMMITTED, GENERATION, NODES, PIPELINES, TOLERANCE, CAN_LOSE, SLOW),
    *(SUBMITTED_AT, STARTED_AT, FINISHED_AT, LOSS, GRADIENT, STEP_S, STEP_AGE, SPEED),
    *(
        MFU,
        EVALUATED,
        CHECKPOINT,
        SAVES_FAIL,
        LOST,
        GOODPUT,
        SKIPPED,
        CHANGES,
        INCIDENTS,
        TRAINED,
        COUNTED,
    ),
    *(TOKENS, PHASES, RECOVERIES, STALL, MOVED, REDONE, SALVAGED, WORKERS_LOST, SAVED, SAVED_BYTES),
    *(SAVED_S, SAVE_FAILURES),
)


def read(state: ClusterState, tally: Tally, now: float, unix: float) -> Iterator[Reading]:
    jobs = list(state.jobs.values())
    states = [job.state for job in jobs]
    yield Reading(JOBS, {(one,): states.count(one) for one in get_args(JobState)})
    yield single(SUBMITTED, state.submissions)
    yield Reading(INFO, {(job.id, job.spec.name): 1 for job in jobs})
    yield Reading(STATE, {(job.id, job.state): 1 for job in jobs})
    columns: dict[Family, dict[tuple[str, ...], float]] = {family: {} for family in _OF_A_JOB}
    for job in jobs:
        counted = tally.jobs.get(job.id) or JobTally()
        of_steps = _of_steps(job, now)
        values = {
            **_of_plan(job),
            **of_steps,
            MFU: mfu(state, job, of_steps[SPEED] or 0.0),
            **_counted(counted),
            GOODPUT: _goodput(job, counted, unix),
        }
        for family, value in values.items():
            if value is not None:
                columns[family][job.id,] = value
        for phase, seconds in counted.phases.items():
            columns[PHASES][job.id, phase] = seconds
    for family, column in columns.items():
        yield Reading(family, column)
    yield Reading(PLANS, dict(tally.plans))
    took = tally.reconfigurations.items()
    yield Reading(RECONFIGURATION, {(cause,): durations.read() for cause, durations in took})


def _of_plan(job: Job) -> Mapping[Family, float | None]:
    made, over = job.current.made, job.state in ENDED
    return {
        STEPS: job.spec.training.steps,
        GENERATION: job.current.generation,
        NODES: 0 if over else len(job.current.members),
        PIPELINES: 0 if over or made is None else len(made.plan.pipelines),
        TOLERANCE: job.spec.fault_tolerance,
        CAN_LOSE: 0 if over else job.current.can_lose,
        SLOW: 0 if over else len(job.slow),
        SUBMITTED_AT: job.submitted_at,
        STARTED_AT: job.started_at or None,
        FINISHED_AT: job.finished_at or None,
        CHECKPOINT: job.saves.checkpoint.step if job.saves.checkpoint is not None else 0,
        SAVES_FAIL: not over and job.saves.failure != "",
        CHANGES: job.lineage.reconfigurations,
        INCIDENTS: job.incidents,
        LOST: job.lost.steps,
    }


def _of_steps(job: Job, now: float) -> Mapping[Family, float | None]:
    seen, over = job.seen.steps, job.state in ENDED
    values: dict[Family, float | None] = {
        COMMITTED: job.committed_step,
        STEP_AGE: None if over else step_age_s(job.seen, now),
        EVALUATED: seen.evaluation.loss if seen.evaluation is not None else None,
    }
    if not (recent := tuple(seen.recent)):
        return values | {SPEED: 0.0, SKIPPED: 0}
    moving = job.state in ("running", "reconfiguring") and is_moving(job, now)
    return values | {
        LOSS: recent[-1].loss,
        GRADIENT: recent[-1].grad_norm,
        STEP_S: median(record.step_seconds for record in recent),
        SPEED: tokens_per_s(recent) if moving else 0.0,
        SKIPPED: recent[-1].skipped_steps,
    }


def _counted(counted: JobTally) -> Mapping[Family, float]:
    return {
        TRAINED: counted.training_s,
        COUNTED: counted.steps,
        TOKENS: counted.tokens,
        RECOVERIES: counted.recoveries,
        STALL: counted.stall_s,
        MOVED: counted.received_bytes,
        REDONE: counted.redone_steps,
        SALVAGED: counted.salvaged_microbatches,
        WORKERS_LOST: counted.workers_lost,
        SAVED: counted.checkpoints,
        SAVED_BYTES: counted.checkpoint_bytes,
        SAVED_S: counted.checkpoint_s,
        SAVE_FAILURES: counted.save_failures,
    }


def _goodput(job: Job, counted: JobTally, unix: float) -> float | None:
    """Return the part of the time since the first counted step that was spent training; None: no
    step was counted. At most 1, even where hosts' clocks differ."""
    if counted.since is None:
        return None
    span_s = (job.finished_at or unix) - counted.since
    return min(1.0, counted.training_s / span_s) if span_s > 0 else None
