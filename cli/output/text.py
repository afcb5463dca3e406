"""Jobs, nodes, times and forms of output as text for a terminal, and as JSON or YAML. Pure."""

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from google.protobuf.message import Message

from oobleck.cli.output.table import Column, cut, folded, listing, table
from oobleck.core.units import count, format_bytes
from oobleck.host.display import inline
from oobleck.host.versions import Versions, described, differences
from oobleck.proto import control_pb2 as pb

#: Final states of a job.
ENDED = ("succeeded", "failed", "cancelled")
#: States of a node without an agent.
GONE = ("lost", "left")
#: The only ASCII character that JSON leaves unescaped although it is not printable.
_DELETE = "\x7f"


def plain(message: Message) -> dict[str, Any]:
    """Return a message as JSON values: all fields by name, integers as numbers, null if absent."""
    return {
        field.name: None
        if field.has_presence and not message.HasField(field.name)
        else _plain_value(getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }


def _plain_value(value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, str | int | float | bool):
        return value
    return [_plain_value(item) for item in value]


def dump(value: object) -> str:
    """Format JSON in ASCII, without characters that a terminal obeys."""
    return json.dumps(value, indent=2).replace(_DELETE, r"\u007f")


def dump_line(value: object) -> str:
    """Format JSON likewise, on one line."""
    return json.dumps(value, separators=(",", ":")).replace(_DELETE, r"\u007f")


def seconds(span_s: float) -> str:
    """Format a duration: `0.412 s`, `12.3 s`, `4 min 10 s`, `2 h 05 min`."""
    if round(span_s, 3) < 10:
        return f"{span_s:.3f} s"
    if round(span_s, 1) < 60:
        return f"{span_s:.1f} s"
    return _minutes(span_s)


def about(span_s: float) -> str:
    """Format a forecast, in whole seconds."""
    return f"{span_s:.0f} s" if round(span_s) < 60 else _minutes(span_s)


def _age(span_s: float) -> str:
    return f"{span_s:.1f} s" if span_s < 10 else about(span_s)


def _minutes(span_s: float) -> str:
    """Format minutes or hours; rounded before it is split, so that no part is 60."""
    minutes, left_s = divmod(round(span_s), 60)
    if minutes < 60:
        return f"{minutes} min {left_s:02d} s"
    hours, minutes = divmod(round(span_s / 60), 60)
    return f"{hours} h {minutes:02d} min"


def moment(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix)) if unix else "-"


def short_moment(unix: float) -> str:
    """Format a moment of today without its date."""
    full = moment(unix)
    today = time.strftime("%Y-%m-%d ")
    return full.removeprefix(today)


def ago(unix: float) -> str:
    """Format the age of a moment; 0 if the other clock is ahead of this one."""
    return f"{about(max(0.0, time.time() - unix))} ago"


def minute(unix: float) -> str:
    """Format a moment of this year, for tables."""
    return time.strftime("%m-%d %H:%M", time.localtime(unix)) if unix else "-"


# ---- tables


def done(job: pb.JobStatus) -> str:
    """Format the committed share of the job's steps; rounded down, so that 100% means all."""
    return f"{100 * job.committed_step // job.steps if job.steps else 0}%"


def redoing(job: pb.JobStatus) -> str:
    """Return which steps are repeated from a checkpoint, and the current one; empty: none."""
    if not job.HasField("redo"):
        return ""
    at = min(job.redo.committed_step + 1, job.redo.last_step)
    return f"redoing {job.redo.first_step}-{job.redo.last_step}, at {at}"


def why_so(job: pb.JobStatus, *, with_incident: bool = False) -> str:
    """Return the remarks beside the job's state; `with_incident`: `incident` is shown too."""
    reason = "" if with_incident and _paces(job) else job.reason
    parts = (redoing(job), reason, unsaved(job), _exposed(job))
    return "; ".join(part for part in parts if part)


def incident(job: pb.JobStatus) -> str:
    """Return the newest incident in a line: of an open slowdown the paces, which are newer."""
    return _paces(job) or job.last_incident.partition("\n")[0]


def _paces(job: pb.JobStatus) -> str:
    """Return the job's reason if it tells the paces of an open slowdown, else an empty string."""
    slow = [f"{worker.node}/{worker.slot} computes at" for worker in job.slow_workers]
    return job.reason if slow and all(one in job.reason for one in slow) else ""


def unsaved(job: pb.JobStatus) -> str:
    """Return why the last checkpoint, or the output, of a job that goes on could not be written;
    empty: it could."""
    going = job.save_failure and job.state not in ENDED
    return f"not saved: {job.save_failure}" if going else ""


def _exposed(job: pb.JobStatus) -> str:
    """Return a warning if the workers' messages are not encrypted, else an empty string."""
    return "DATA PLANE IN THE CLEAR" if job.data_plane == "clear" and job.state not in ENDED else ""


def ready(node: pb.NodeInfo) -> int:
    """Return how many workers of the node are ready."""
    return sum(bool(worker.card) for worker in node.workers)


def heard(node: pb.NodeInfo) -> str:
    return f"{'> ' if node.heard_before else ''}{_age(node.last_heard_s)} ago"


def pace(node: pb.NodeInfo) -> str:
    """Return the rates of slow workers, relative to the others, and the reasons; '-': none."""
    slow = [w for w in node.workers if 0 < w.rate < 1]
    alone = len(node.workers) == 1
    told = [
        (f"{worker.rate:.2f}" if alone else f"{node.node}/{worker.slot}: {worker.rate:.2f}")
        + (f" ({worker.hindrance})" if worker.hindrance else "")
        for worker in slow
    ]
    return ", ".join(told) or "-"


def _versions(node: pb.NodeInfo) -> str:
    """Return the versions of Oobleck, of torch, and of the GPUs' libraries if there are any."""
    versions = node.versions
    numbers = {"protocol": node.protocol, "engine": versions.engine}
    spoken = ", ".join(f"{name} {number}" for name, number in numbers.items() if number)
    named = {
        "oobleck": f"{versions.oobleck} ({spoken})" if spoken else versions.oobleck,
        "torch": versions.torch,
        "CUDA": versions.cuda,
        "NCCL": versions.nccl,
        "driver": versions.driver,
    }
    return ", ".join(f"{name} {version}" for name, version in named.items() if version) or "-"


_JOB_COLUMNS = (
    Column("JOB", lambda job: job.job_id),
    Column("STATE", lambda job: job.state),
    Column("STEP", lambda job: f"{job.committed_step}/{job.steps}"),
    Column("DONE", done, spare=True),
    Column("LOSS", lambda job: f"{job.loss:.4f}" if job.HasField("loss") else "-"),
    Column("TOKENS/S", lambda job: f"{job.tokens_per_s:,.0f}" if job.tokens_per_s else "-"),
    Column("GENERATION", lambda job: job.generation or "-", wide=True),
    Column(
        "CHECKPOINT", lambda job: ago(job.checkpoint_at) if job.checkpoint_at else "-", wide=True
    ),
    Column("SUBMITTED", lambda job: minute(job.submitted_at)),
    Column("REASON", why_so),
)
_NODE_COLUMNS = (
    Column("NODE", lambda node: node.node),
    Column("STATE", lambda node: node.state),
    Column("WORKERS", lambda node: f"{ready(node)}/{node.worker_slots}"),
    Column("RACK", lambda node: node.rack or "-", wide=True),
    Column("DEVICE", lambda node: node.device, wide=True),
    Column("MEMORY/WORKER", lambda node: format_bytes(node.memory_per_worker_bytes), wide=True),
    Column("ADDRESS", lambda node: node.address, wide=True),
    Column("VERSIONS", _versions, wide=True),
    Column("PID", lambda node: node.pid, wide=True),
    Column("JOB", lambda node: node.job_id or "-"),
    Column("GENERATION", lambda node: node.generation or "-", wide=True),
    Column("PACE", pace),
    Column("HEARD", heard),
    Column("REASON", lambda node: node.reason),
)


#: Width of the labels of one node's facts.
_NODE_LABEL = 16


def jobs_table(
    jobs: Iterable[pb.JobStatus], *, width: int | None = None, wide: bool = False
) -> str:
    listed = listing(_JOB_COLUMNS, list(jobs), width=width, wide=wide)
    return listed or "no jobs; queue one with 'oobleck submit JOB.yaml'"


def nodes_table(
    nodes: Iterable[pb.NodeInfo], *, width: int | None = None, wide: bool = False
) -> str:
    listed = listing(_NODE_COLUMNS, list(nodes), width=width, wide=wide)
    return listed or (
        "no nodes; start one with 'oobleck-agent --master HOST:PORT --token-file FILE' ('oobleck "
        "pki token --out FILE' makes the token)"
    )


def node_text(node: pb.NodeInfo, width: int | None = None) -> str:
    """Format all facts of one node."""
    lines = (
        f"{column.head.lower():<{_NODE_LABEL}}{inline(str(column.cell(node))) or '-'}"
        for column in _NODE_COLUMNS
    )
    return "\n".join(folded(line, width, indent=_NODE_LABEL) for line in lines)


def versions_note(nodes: Iterable[pb.NodeInfo]) -> str:
    """Return how versions differ between connected nodes; empty if they do not."""
    live = (node for node in nodes if node.state not in GONE)
    found = differences((node.node, Versions(**plain(node.versions))) for node in live)
    return f"versions differ: {inline(described(found))}" if found else ""


# ---- one job


#: Width of the labels of one job's facts.
_LABEL = 12


def last_step(job: pb.JobStatus, before: str = "") -> str:
    """Return the age of the last step, after `before`, if the job does not progress; else empty."""
    if job.tokens_per_s or not job.HasField("last_step_age_s"):
        return ""
    return f"{before}{_age(job.last_step_age_s)} ago"


def job_text(job: pb.JobStatus, width: int | None = None) -> str:
    """Format all facts of one job, plan included."""
    tables = [draw(job.plan, width)] if job.HasField("plan") else []
    if job.memory:
        tables.append(memory_table(job.memory, width))
    lines = (f"{label:<{_LABEL}}{value}" for label, value in job_facts(job))
    facts = "\n".join(folded(inline(line), width, indent=_LABEL) for line in lines)
    return "\n\n".join([facts, *tables])


def job_facts(job: pb.JobStatus) -> Iterator[tuple[str, str]]:
    """Yield label and value of all facts of one job, except its plan."""
    yield "job", job.job_id
    yield (
        "state",
        job.state + (f": {inline(why)}" if (why := why_so(job, with_incident=True)) else ""),
    )
    last = last_step(job, ", the last ")
    yield "step", f"{job.committed_step} of {job.steps} ({done(job)}){last}"
    if job.HasField("loss"):
        yield "loss", f"{job.loss:.6f}"
    if job.skipped_steps:
        yield "skipped", f"{count(job.skipped_steps, 'step')} with non-finite gradients"
    for lost in job.lost_records:
        yield "lost", f"{lost_records(lost)}: {lost.why}"
    if job.HasField("evaluation"):
        yield "held out", evaluation(job.evaluation)
    if job.tokens_per_s:
        eta = f", about {about(job.eta_s)} to go" if job.eta_s else ""
        share = f" ({100 * job.mfu:.0f}% of the GPUs' peak)" if job.HasField("mfu") else ""
        yield "speed", f"{job.tokens_per_s:,.0f} tokens/s{share}{eta}"
    yield from _moments(job)
    yield from _files(job)
    if job.last_incident:
        at = moment(job.last_incident_at) if job.last_incident_at else "not over"
        yield "incident", f"{job.incidents}, {at}: {inline(incident(job))}"
    if job.journal_cut_at:
        when = moment(job.journal_cut_at)
        yield "journal", f"{when}: its end was missing when the master read it; see the events"
    if job.policy:
        yield "policy", job.policy
    if job.HasField("plan"):
        made = f" by policy {job.plan_policy}" if job.plan_policy else ""
        then = f", then {job.then} at a step boundary" if job.then else ""
        so_far = f"{count(job.reconfigurations, 'reconfiguration')} so far"
        yield "generation", f"{job.generation}{made}{then}; {so_far}"
        yield "schedule", job.plan.schedule
        if job.state not in ENDED:
            yield "can lose", can_lose(job)
        if job.HasField("outlook"):
            yield "next loss", outlook(job)


def lost_records(lost: pb.LostRecords) -> str:
    """Return which steps have no record."""
    if lost.first_step == lost.last_step:
        return f"the record of {lost.first_step} is lost"
    return f"records of {lost.first_step}-{lost.last_step} are lost"


def outlook(job: pb.JobStatus) -> str:
    """Return when the next loss is expected, and by what."""
    found = job.outlook
    known = f"{found.seen:.2g} seen lately" if round(found.seen, 1) else "none seen lately"
    back = f"; back after {about(found.back_s)}" if found.back_s else ""
    return (
        f"in about {_days(found.next_loss_s)}; one node: about every "
        f"{_days(86_400 / found.losses_per_node_day)} ({known}; recovery.mtbf is "
        f"{_days(found.prior_mtbf_s)}){back}"
    )


def _days(span_s: float) -> str:
    return f"{span_s / 86_400:.3g} days" if span_s >= 2 * 86_400 else about(span_s)


def can_lose(job: pb.JobStatus) -> str:
    """Return how many nodes a running job can still lose."""
    return f"{count(job.can_lose, 'more node')}, whichever, without losing a layer"


def _moments(job: pb.JobStatus) -> Iterator[tuple[str, str]]:
    yield "submitted", moment(job.submitted_at)
    if job.started_at:
        yield "started", moment(job.started_at)
    if job.finished_at:
        span = f" (after {seconds(job.finished_at - job.started_at)})" if job.started_at else ""
        yield "finished", f"{moment(job.finished_at)}{span}"


def _files(job: pb.JobStatus) -> Iterator[tuple[str, str]]:
    if job.checkpoint_path:
        age = f", {ago(job.checkpoint_at)}" if job.checkpoint_at else ""
        newest = f"step {job.checkpoint_step}{age}, {job.checkpoint}"
        none = "none" if job.state in ENDED else "none yet"
        yield "checkpoint", inline(newest if job.checkpoint else none)
    if job.save_failure and job.state in ENDED:
        yield "not saved", inline(job.save_failure)
    if job.profile:
        yield "profile", job.profile
    if job.data_plane == "clear":
        yield (
            "data plane",
            "IN THE CLEAR, as the job file asks: anybody on the network can read and change what "
            "workers send; without 'data_plane: clear' it is encrypted",
        )
    elif job.data_plane == "nccl":
        yield (
            "data plane",
            "encrypted, except for NCCL messages of GPUs, which cannot be: give it a network of "
            "its own (docs/security.md)",
        )
    elif job.data_plane:
        yield "data plane", job.data_plane
    if job.directory:
        yield "directory", job.directory


def memory_table(memory: Iterable[pb.WorkerMemory], width: int | None = None) -> str:
    """Format each worker's peak memory in training, and the plan's prediction."""
    rows = [
        (
            f"{found.worker.node}/{found.worker.slot}",
            format_bytes(found.peak_bytes) if found.peak_bytes else "-",
            format_bytes(found.predicted_bytes),
        )
        for found in memory
    ]
    return table(("WORKER", "PEAK MEMORY", "PREDICTED"), rows, width=width)


def evaluation(found: pb.Evaluation) -> str:
    """Format the held-out loss, and the step that it was measured at."""
    loss = f"{found.loss:.4f}" if found.HasField("loss") else "not finite"
    return f"{loss} (step {found.step})"


def draw(plan: pb.Plan, width: int | None = None) -> str:
    """Format a line per pipeline, or per route if the plan has routes.

    A line has its share of the batch, then each stage's node and layers. Shadows, which are held
    but not run, follow.
    """
    head = ("MICRO-BATCHES", "NODES [LAYERS]")
    if plan.routes:
        routes = [
            (f"route {number}", _share(route), _drawn(route.hops))
            for number, route in enumerate(plan.routes)
        ]
        shadows = [(f"shadow {n}", "-", _drawn([held])) for n, held in enumerate(plan.shadows)]
        return table(("ROUTE", *head), [*routes, *shadows], width=width)
    rows = [
        (f"pipeline {number}", pipeline.microbatches, _drawn(pipeline.stages))
        for number, pipeline in enumerate(plan.pipelines)
    ]
    return table(("PIPELINE", *head), rows, width=width)


def _share(route: pb.Route) -> str:
    """Return the route's micro-batches."""
    last = route.first_microbatch + route.microbatches - 1
    return f"{route.first_microbatch}" + (f"-{last}" if route.microbatches > 1 else "")


def _drawn(stages: Iterable[pb.Stage]) -> str:
    return " -> ".join(
        f"{holders(stage)} [{stage.first_layer}..{stage.last_layer}]" for stage in stages
    )


def holders(stage: pb.Stage) -> str:
    """Return `n1`, or `n1/0,1` if the stage has other workers there than the first."""
    node = stage.workers[0].node
    slots = ",".join(str(worker.slot) for worker in stage.workers)
    return node if slots == "0" else f"{node}/{slots}"


# ---- a job's progress in a line


#: Rank of a part that is never left out.
_MUST = 0


def progress_line(status: pb.JobStatus, width: int | None = None) -> str:
    """Return a line about the job's progress. If it exceeds `width`, leave out the least important
    parts, then cut it."""
    parts = list(_parts(status))
    while width is not None and len(_line(parts)) > width and max(parts)[0] > _MUST:
        parts.remove(max(parts))
    line = _line(parts)
    return line if width is None else cut(line, width)


def _parts(status: pb.JobStatus) -> Iterator[tuple[int, str]]:
    """Yield parts in the line's order, each with a rank: the highest rank is left out first."""
    yield _MUST, inline(status.state)
    yield _MUST, f"step {status.committed_step}/{status.steps}"
    if again := redoing(status):
        yield _MUST, again
    if status.HasField("loss"):
        yield 2, f"loss {status.loss:.4f}"
    if status.skipped_steps:
        yield 5, f"{status.skipped_steps} skipped"
    if status.HasField("evaluation"):
        yield 4, f"held out {evaluation(status.evaluation)}"
    if status.tokens_per_s:
        yield 3, f"{status.tokens_per_s:,.0f} tokens/s"
    if still := last_step(status, "last step "):
        yield 3, still
    if status.HasField("plan"):
        nodes = sum(len(pipeline.nodes) for pipeline in status.plan.pipelines)
        shape = " + ".join(str(len(pipeline.nodes)) for pipeline in status.plan.pipelines)
        yield 6, f"{count(nodes, 'node')} ({shape})"
        yield 7, f"generation {status.generation}"
    if status.eta_s and status.state not in ENDED:
        yield 1, f"~{about(status.eta_s)} to go"
    if status.reason:
        yield _MUST, f"({inline(status.reason)})"


def _line(parts: Iterable[tuple[int, str]]) -> str:
    return "  ".join(part for _, part in parts)


# ---- forms of a command's output


#: - `table`: columns that fit the terminal.
#: - `wide`: all columns.
Form = Literal["table", "wide", "json", "yaml"]


def is_data(form: Form) -> bool:
    """Return whether the form is for programs."""
    return form in ("json", "yaml")


def document(value: object, form: Form) -> str:
    """Format `value`, of JSON's types, as the whole output."""
    return dump(value) if form == "json" else _yaml(value).rstrip("\n")


def entry(value: object, form: Form) -> str:
    """Format `value` as one of several: a line of JSON, or a document of YAML."""
    return dump_line(value) if form == "json" else f"---\n{_yaml(value)}".rstrip("\n")


def _yaml(value: object) -> str:
    """Format the value as YAML in ASCII, as the JSON is."""
    import yaml

    return yaml.safe_dump(value, sort_keys=False, width=100)
