"""Progress of a job, in words and as a share of the whole. Pure."""

from dataclasses import dataclass

from oobleck.cli.output import text
from oobleck.cli.output.colour import Tone, tone
from oobleck.proto import control_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    #: Committed share of the job's steps, 0 to 1, and as text.
    done: float
    percent: str
    step: int
    steps: int
    #: Empty if unknown, here and below.
    loss: str
    #: Tokens per second; or the age of the last step if the job does not progress.
    speed: str
    eta: str
    #: Age and step of the newest checkpoint, or a remark that there is none; empty: none are taken.
    checkpoint: str
    #: How many more nodes it can lose.
    can_lose: str
    tone: Tone
    over: bool


def progress(job: pb.JobStatus) -> Progress:
    over = job.state in text.ENDED
    return Progress(
        done=job.committed_step / job.steps if job.steps else 0.0,
        percent=text.done(job),
        step=job.committed_step,
        steps=job.steps,
        loss=f"{job.loss:.4f}" if job.HasField("loss") else "",
        speed=_speed(job),
        eta=f"about {text.about(job.eta_s)} to go" if job.eta_s and not over else "",
        checkpoint=_checkpoint(job),
        can_lose=text.can_lose(job) if job.HasField("plan") and not over else "",
        tone=tone(job.state),
        over=over,
    )


def open_incident(job: pb.JobStatus) -> str:
    """Return the first line of an open failure or slowdown; empty: there is none."""
    if not job.last_incident or job.last_incident_at:
        return ""
    return job.last_incident.partition("\n")[0]


def _speed(job: pb.JobStatus) -> str:
    if job.tokens_per_s:
        share = f", MFU {100 * job.mfu:.0f}%" if job.HasField("mfu") else ""
        return f"{job.tokens_per_s:,.0f} tokens/s{share}"
    return text.last_step(job, "last step ")


def _checkpoint(job: pb.JobStatus) -> str:
    if not job.checkpoint:
        return "none yet" if job.checkpoint_path else ""
    age = f", {text.ago(job.checkpoint_at)}" if job.checkpoint_at else ""
    return f"step {job.checkpoint_step}{age}"
