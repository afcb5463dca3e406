"""Jobs, and the records of their steps, as tests of the master and of agents make them up."""

from oobleck.core.ids import Generation
from oobleck.core.job.file import format_job
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import (
    CheckpointSpec,
    DataSpec,
    EvaluationSpec,
    JobSpec,
    RecoverySpec,
    ResourceSpec,
    TrainingSpec,
)
from oobleck.core.messages import EvaluationRecord, StepRecord
from oobleck.worker.runtime.records import RecordLog


def job_spec(
    name: str,
    *,
    steps: int = 100,
    f: int = 1,
    min_nodes: int = 2,
    measure: int = 0,
    checkpoint: int = 0,
    evaluate: int = 0,
    memory: int | None = None,
    mixed: int = 0,
    restart: int = 0,
    reroute: int = 0,
    morph: int = 0,
    mtbf_s: int = 30 * 86_400,
    templates: int = 0,
    uneven: int = 0,
    wait: int = 0,
    shadows: int = 1,
    hidden: int = 32,
    sequence: int = 16,
    batch: int = 16,
) -> JobSpec:
    """Return a small job; `evaluate`: an evaluation of ten steps' samples after so many steps."""
    return JobSpec(
        name=name,
        model=ModelSpec(layers=6, hidden=hidden, heads=2, sequence_length=sequence),
        data=DataSpec(text=("/nowhere/*.py",)),
        training=TrainingSpec(steps=steps, global_batch=batch, microbatch=2),
        fault_tolerance=f,
        resources=ResourceSpec(min_nodes_per_pipeline=min_nodes, memory_per_worker_bytes=memory),
        allow_mixed_versions=bool(mixed),
        profile="measure" if measure else "estimate",
        checkpoint=CheckpointSpec(path="/saved", every="auto" if checkpoint > 1 else 100)
        if checkpoint
        else None,
        evaluation=EvaluationSpec(every=evaluate, fraction=0.1, samples=160) if evaluate else None,
        on_state_lost="restart" if restart else "fail",
        recovery=RecoverySpec(
            policy="reroute"
            if reroute
            else "morph"
            if morph
            else "templates"
            if templates
            else "uneven"
            if uneven
            else "wait"
            if wait
            else "auto",
            shadows="auto" if shadows else "none",
            mtbf=f"{mtbf_s}s",
        ),
    )


def job_text(steps: int = 20) -> str:
    """Return a small job as the text of a job file."""
    return format_job(job_spec("demo", steps=steps, shadows=0, evaluate=2))


def record(
    step: int, generation: int = 1, at: float = 0.0, step_seconds: float = 0.1
) -> StepRecord:
    return StepRecord(
        step=step,
        loss=1.0 / step,
        grad_norm=1.0,
        tokens=256,
        samples_digest=f"{step:064x}",
        generation=Generation(generation),
        step_seconds=step_seconds,
        time=at,
    )


def evaluation(step: int, generation: int = 1, at: float = 0.0) -> EvaluationRecord:
    return EvaluationRecord(
        step=step,
        loss=1.0 / step,
        samples=160,
        generation=Generation(generation),
        seconds=0.1,
        time=at,
    )


def recorded(step: int) -> RecordLog:
    """Return the log of a worker that has committed `step` steps."""
    log = RecordLog()
    for number in range(1, step + 1):
        log.add(record(number, 1, float(number)))
    return log
