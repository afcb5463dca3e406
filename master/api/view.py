"""The state as messages for operators. Reads, never writes.

A job's reason also has observations that are in no journaled event, such as a stream that has just
closed or a silent agent.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from statistics import fmean, median

from oobleck.core.ids import JobId, NodeName, WorkerId
from oobleck.core.messages import StepRecord
from oobleck.core.redact import redact
from oobleck.core.units import comma_separated, count
from oobleck.host.address import is_loopback
from oobleck.master.config import MasterConfig
from oobleck.master.planning import client
from oobleck.master.rules import jobs, questions, stalls
from oobleck.master.rules.adoption import is_queued, ways_on
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.incident_summary import headline_of, slowdown_headline
from oobleck.master.state.job import ENDED, Job
from oobleck.master.state.job_observed import JobSeen
from oobleck.master.state.node import Drain, Node
from oobleck.planner.report.speed import utilization
from oobleck.proto import control_pb2 as pb
from oobleck.proto.assignments import head_message
from oobleck.proto.checks import message_of
from oobleck.proto.plans import plan_message, worker_message
from oobleck.proto.protocol import NEWEST
from oobleck.proto.status import code_message

#: Seconds after which a worker that has not left its generation is mentioned.
_SLOW_ANSWER_S = 5.0
#: Seconds, and number of usual steps, without a step after which a job shows no speed.
_STILL_S = 2.0
_STILL_STEPS = 5
_WAY_BACK = "; put that right, then 'oobleck node undrain' it or start its agent anew"


def job_status(state: ClusterState, job: Job, config: MasterConfig, now: float) -> pb.JobStatus:
    seen = job.seen
    training = job.spec.training
    rate = tokens_per_s(tuple(seen.steps.recent))
    moving = job.state in ("running", "reconfiguring") and is_moving(job, now)
    message = pb.JobStatus(
        job_id=job.id,
        name=job.spec.name,
        state=job.state,
        reason=_reason(state, job, config, now),
        generation=job.current.generation,
        committed_step=job.committed_step,
        recorded_step=seen.steps.recorded_step,
        steps=training.steps,
        tokens_per_s=rate if moving or job.state == "succeeded" else 0.0,
        submitted_at=job.submitted_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        reconfigurations=job.lineage.reconfigurations,
        directory=str(config.job_directory(job.id)),
        data_plane=_data_plane(state, job),
    )
    if job.spec.checkpoint is not None:
        message.checkpoint_path = redact(job.spec.checkpoint.path)
    if job.saves.checkpoint is not None:
        message.checkpoint = redact(job.saves.checkpoint.path)
        message.checkpoint_step = job.saves.checkpoint.step
        message.checkpoint_at = job.saves.checkpoint_at
    message.save_failure = job.saves.failure
    message.policy = job.spec.recovery.policy
    message.journal_cut_at = job.journal_cut_at
    _fill_incident(message, job)
    _tell_redo(message, job)
    if job.profiling.chosen is not None:
        message.profile = job.profiling.chosen.source
    elif job.spec.profile == "estimate":
        message.profile = "estimate"
    if seen.steps.recent and (loss := seen.steps.recent[-1].loss) is not None:
        message.loss = loss
    if seen.steps.recent:
        message.skipped_steps = seen.steps.recent[-1].skipped_steps
    message.records_lost = job.lost.steps
    for lost in job.lost.last:
        message.lost_records.add(first_step=lost.first, last_step=lost.last, why=lost.why)
    if seen.steps.evaluation is not None:
        message.evaluation.CopyFrom(message_of(pb.Evaluation, seen.steps.evaluation))
    if job.current.made is not None and not job.current.put_back:
        message.plan.CopyFrom(plan_message(job.current.made.plan))
        message.plan_policy, message.then = job.current.made.policy, job.current.made.then
        if job.state not in ENDED:
            message.can_lose = job.current.can_lose
            message.memory.extend(_memory(state, job))
            message.outlook.CopyFrom(_outlook(state, job, now))
    if (share := mfu(state, job, message.tokens_per_s)) is not None:
        message.mfu = share
    if (age_s := step_age_s(seen, now)) is not None and job.state not in ENDED:
        message.last_step_age_s = age_s
    if rate > 0 and moving:
        recent = tuple(seen.steps.recent)
        # The mean is used: if labels choose the learned tokens, their number differs by step.
        step_tokens = fmean(record.tokens for record in recent[1:] or recent)
        message.eta_s = (training.steps - job.committed_step) * step_tokens / rate
    return message


def _outlook(state: ClusterState, job: Job, now: float) -> pb.Outlook:
    losses, prior_s = state.losses_until(job.seen.unix(now)), job.spec.recovery.mtbf_s
    per_node_s = losses.per_node_s(prior_s)
    return pb.Outlook(
        losses_per_node_day=per_node_s * 86_400,
        next_loss_s=1 / (per_node_s * max(1, len(job.current.members))),
        prior_mtbf_s=prior_s,
        seen=losses.seen,
        back_s=losses.median_back_s or 0.0,
    )


def _data_plane(state: ClusterState, job: Job) -> str:
    """Return the kind of data plane between the nodes of the plan; without a plan, between all
    nodes."""
    # Nodes of a job that has ended may be forgotten.
    members = [state.nodes[name] for name in job.current.members if name in state.nodes]
    nodes = [node.facts for node in members or state.nodes.values()]
    local = bool(nodes) and all(is_loopback(node.address) for node in nodes)
    if local and job.spec.data_plane != "sealed":
        return "loopback"
    if not job.spec.seals_links(on_loopback=False):
        return "clear"
    gpus = bool(nodes) and all(node.device == "cuda" for node in nodes)
    return "nccl" if gpus and job.spec.resources.transport == "auto" else "sealed"


def _fill_incident(message: pb.JobStatus, job: Job) -> None:
    """Fill in the newest incident, whether it is over or not."""
    message.incidents = job.incidents
    last, failure, slowdown = job.last_incident, job.incident, job.slowdown
    if last is not None and last.number == job.incidents:
        message.last_incident, message.last_incident_at = last.summary, last.at
    elif failure is not None and failure.number == job.incidents:
        message.last_incident = headline_of(failure)
    elif slowdown is not None:
        message.last_incident = slowdown_headline(slowdown)
        message.slow_workers.extend(worker_message(one.worker) for one in slowdown.workers)


def _tell_redo(message: pb.JobStatus, job: Job) -> None:
    restored = job.rollback.restored
    if restored is None or not job.rollback.redo_until or job.state in ENDED:
        return
    message.redo.first_step = restored.step + 1
    message.redo.last_step = job.redone_until
    message.redo.committed_step = max(restored.step, job.seen.steps.furthest_step)


def _memory(state: ClusterState, job: Job) -> Iterator[pb.WorkerMemory]:
    """Yield predicted and measured memory of the plan's workers, without those on lost nodes."""
    members = [state.nodes[name] for name in job.current.members]
    measured = {
        WorkerId(node.facts.node, worker.slot): worker
        for node in members
        for worker in node.seen.status.workers
        if node.seen.status.job_id == job.id and worker.generation == job.current.generation
    }
    for worker, predicted in client.predicted_bytes(job, members).items():
        message = pb.WorkerMemory(worker=worker_message(worker), predicted_bytes=predicted)
        if status := measured.get(worker):
            message.peak_bytes = max(0, status.peak_memory_bytes - status.base_memory_bytes)
        yield message


def is_moving(job: Job, now: float) -> bool:
    """Return whether the last step is recent enough that the next one is not overdue."""
    recent, age_s = job.seen.steps.recent, _record_age_s(job.seen, now)
    if age_s is None or not recent:
        return False
    usual_s = median(record.step_seconds for record in recent)
    return age_s <= max(_STILL_S, _STILL_STEPS * usual_s)


def step_age_s(seen: JobSeen, now: float) -> float | None:
    """Return the age of the last committed step, seconds; None: none is known."""
    steps = seen.steps
    if steps.advanced_at is None or (steps.recent and steps.recent[-1].step == steps.furthest_step):
        return _record_age_s(seen, now)
    return max(0.0, now - steps.advanced_at)


def _record_age_s(seen: JobSeen, now: float) -> float | None:
    """Return the age of the last recorded step, seconds; None: there is none. A step that an
    earlier master recorded is dated by its Unix time."""
    if seen.steps.recorded_at is None:
        return None
    if seen.steps.recent and seen.steps.recent[-1].time < seen.since_unix:
        return max(0.0, seen.since_unix + (now - seen.since) - seen.steps.recent[-1].time)
    return max(0.0, now - seen.steps.recorded_at)


def tokens_per_s(recent: Sequence[StepRecord]) -> float:
    """Return the rate between the first and the last of the recent steps. A single step counts over
    its own time. 0: the steps took no time, or there are none."""
    if not recent:
        return 0.0
    first, *others = recent
    span_s = others[-1].time - first.time if others else first.step_seconds
    tokens = sum(record.tokens for record in others or recent)
    return tokens / span_s if span_s > 0 else 0.0


def mfu(state: ClusterState, job: Job, speed: float) -> float | None:
    """Return the job's model FLOPs utilization at `speed` tokens per second, as a part of the peak
    of its plan's GPUs; None: not known."""
    if not speed or job.current.made is None or job.state in ENDED:
        return None
    workers = job.current.made.plan.workers
    kinds = [state.nodes[worker.node].facts.device_kind for worker in workers]
    return utilization(job.spec, speed, kinds)


def _reason(state: ClusterState, job: Job, config: MasterConfig, now: float) -> str:
    if job.state in ENDED:
        return job.reason
    timeline, silent = job.seen.timeline, job.unanswered()
    if timeline is not None and silent and now - timeline.pushed_at > _SLOW_ANSWER_S:
        return f"{job.reason}; no answer so far from {', '.join(map(str, silent))}"
    here = all(state.nodes[name].connected for name in job.current.members)
    if here and (again := stalls.next_rendezvous(job, config.timing, now)):
        return again
    if turn := jobs.outlook(state, job, config.gives_way_s, now):
        return f"{job.reason}; {turn}"
    return job.reason or _passing_reason(state, job)


def _passing_reason(state: ClusterState, job: Job) -> str:
    if job.state == "queued" and state.active is not None:
        return f"job {state.active} has its turn"
    if job.state == "profiling" and job.profiling.under_way is not None:
        left = len(job.profiling.under_way.workers) - len(job.seen.profiling.measured)
        return (
            f"the model is measured, {count(left, 'worker')} to go"
            if left
            else "the links are measured"
        )
    if job.state == "starting":
        return _start_reason(state, job)
    away = [name for name in job.current.members if not state.nodes[name].connected]
    if away:
        return f"not connected, and lost if that lasts: {', '.join(away)}"
    if job.state == "running" and job.current.made is not None and job.current.made.then:
        return f"a plan of {job.current.made.then} follows at a step boundary once one is possible"
    reason = "; ".join(str(change) for _, change in sorted(job.slow.items()))
    if names := sorted(job.standing_by):
        reason += f", so {comma_separated(names)} {'stands' if len(names) == 1 else 'stand'} by"
    return reason


def _start_reason(state: ClusterState, job: Job) -> str:
    unready = [node for node in state.candidates(job) if not state.is_ready(node, job)]
    # A process has no pid while the libraries that it is forked with are loading.
    loading = [n for n in unready if any(not worker.pid for worker in n.seen.status.workers)]
    if loading:
        return f"loading libraries on {_names(loading)}"
    return f"workers start on {_names(unready)}" if unready else "the first step is computed"


def _names(nodes: Iterable[Node]) -> str:
    return comma_separated(node.facts.node for node in nodes)


def problem_of(state: ClusterState, storage: str) -> str:
    """Return the problem of this master itself, for operators; empty: none. `storage`: the reason
    why it cannot store."""
    problems = [storage] if storage else []
    if state.superseded is not None:
        other, node = state.superseded
        problems.append(
            f"another head took this one's place: {node} follows {other}, and this one is in "
            f"{state.head}; end this master, or, if the other is lost for good, start this one on "
            "a copy of its --state-dir"
        )
    if state.behind is not None:
        (events, node), term = state.behind, state.history.term
        why = f" ({term.reason})" if term is not None and term.reason else ""
        problems.append(
            f"this master's journal lacks {count(events, 'event')} that {node} was told of{why}"
        )
    problems += [held_note(state, job_id) for job_id in state.held]
    return "; ".join(problems)


def held_note(state: ClusterState, job_id: JobId) -> str:
    """Describe which nodes train a job that this master does not know, or has in its queue, and the
    operator's choices."""
    nodes = state.held[job_id]
    steps = (worker.committed_step for node in nodes for worker in node.seen.status.workers)
    names, step = comma_separated(node.facts.node for node in nodes), max(steps, default=-1)
    upto = f" up to step {step}" if step >= 0 else ""
    verb = "train" if len(nodes) > 1 else "trains"
    since = min(node.held.since for node in nodes if node.held is not None)
    held = f"held since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if lost := [node for node in nodes if not node.registered]:
        held += f", {_names(lost)} lost meanwhile"
    what = _unknown(state, job_id)
    return f"{names} {verb} job {job_id}{upto}, {what} ({held}): {ways_on(state, job_id)}"


def _unknown(state: ClusterState, job_id: JobId) -> str:
    if is_queued(state.held[job_id]):
        return "which waits in this master's queue"
    known = job_id in state.jobs
    return "another than this master's" if known else "which this master does not know"


def head_status(state: ClusterState) -> pb.HeadStatus:
    """Return this master's identity, other heads that agents follow, and the jobs for which nodes
    are held."""
    message = pb.HeadStatus(behind=state.behind[0] if state.behind is not None else 0)
    if state.head is not None:
        message.head.CopyFrom(head_message(state.head))
    if state.superseded is not None:
        other, node = state.superseded
        message.superseded = f"{other}, by the word of {node}"
    for job_id, nodes in state.held.items():
        statuses = [node.seen.status for node in nodes]
        workers = [worker for status in statuses for worker in status.workers]
        message.held.add(
            job_id=job_id,
            nodes=[node.facts.node for node in nodes],
            committed_step=max((worker.committed_step for worker in workers), default=-1),
            generation=max((status.generation for status in statuses), default=0),
            since=min(node.held.since for node in nodes if node.held is not None),
        )
    return message


def node_info(state: ClusterState, node: Node, now: float, unix: float) -> pb.NodeInfo:
    facts, status = node.facts, node.seen.status
    heard_at = node.seen.heard_at
    return pb.NodeInfo(
        node=facts.node,
        state=node_state(node),
        reason="; ".join(part for part in (_node_reason(state, node, now), _unwell(node)) if part),
        hostname=facts.hostname,
        address=facts.address,
        pid=facts.pid,
        worker_slots=facts.worker_slots,
        device=facts.device,
        memory_per_worker_bytes=facts.memory_per_worker_bytes,
        # The last status of a lost node is out of date.
        job_id=(status.job_id or "") if node.registered else "",
        generation=status.generation if node.registered else 0,
        failures=node.failures.recent(unix),
        last_heard_s=max(0.0, now - (node.seen.last_heard if heard_at is None else heard_at)),
        heard_before=heard_at is None,
        versions=message_of(pb.Versions, facts.versions),
        protocol=min(facts.newest_protocol, NEWEST) if node.connected else 0,
        workers=_workers(state, node) if node.registered else [],
        code=code_message(facts.code),
        rack=facts.rack,
        kept=_kept(state, node),
    )


def _workers(state: ClusterState, node: Node) -> list[pb.WorkerStatus]:
    rates = state.job.rates if state.job is not None else {}
    return [
        message_of(
            pb.WorkerStatus,
            worker,
            # A secret of agent and master: any node that knew it could report for the process.
            incarnation="",
            rate=rates.get(WorkerId(node.facts.node, worker.slot), 1.0),
        )
        for worker in node.seen.status.workers
    ]


def node_state(node: Node) -> str:
    if not node.registered:
        return "left" if node.left else "lost"
    if not node.connected:
        return "disconnected"
    if node.held is not None:
        return "held"
    if node.is_quarantined:
        return "quarantined"
    if node.drain is not None:
        return "drained" if node.drain.done else "draining"
    return "live"


def _unwell(node: Node) -> str:
    """Describe GPU troubles of the node, unless they are the reason of its drain, which is shown
    anyway."""
    if not node.connected:
        return ""
    status, drain = node.seen.status, node.drain
    sick = "; ".join(status.troubles)
    is_drain_reason = drain is not None and drain.reason == sick
    return "; ".join(text for text in ("" if is_drain_reason else sick, status.concern) if text)


def _node_reason(state: ClusterState, node: Node, now: float) -> str:
    if not node.registered:
        drained = node.drain is not None and node.drain.by == "operator"
        return f"{node.reason}; drained, also when it is back" if drained else node.reason
    if node.held is not None:
        job_id = node.held.job_id
        return f"trains job {job_id}, {_unknown(state, job_id)}: {ways_on(state, job_id)}"
    if node.is_quarantined and node.drain is not None and node.seen.release_at is not None:
        left_s = max(0.0, node.seen.release_at - now)
        return f"back in {left_s:.0f} s at the latest: {node.drain.reason}"
    if node.drain is not None:
        why = node.drain.reason or "an operator wants it so"
        progress = _drain_progress(state, node, node.drain)
        return f"{why}; {progress}" if progress else why
    if node.seen.status.trouble:
        return node.seen.status.trouble
    if node.stale_workers:
        return "its workers of before are to end first"
    job, facts = state.job, node.facts
    if job is None:
        return ""
    if facts.node in job.left_out:
        return f"cannot join the job: {job.left_out[facts.node]}{_WAY_BACK}"
    slots = state.worker_slots(job)
    if facts.worker_slots != slots:
        return (
            f"kept idle: job {job.id} uses nodes with {slots} worker slots, "
            f"this one has {facts.worker_slots}"
        )
    member = job.current.has_member(facts.node)
    if not member and (why := node.why_not_in(job.spec, state.required_build(job))):
        return f"cannot join the job: {why}"
    if job.current.made is None:
        return ""
    if not member:
        if facts.node in job.standing_by:
            return _stands_by(job, facts.node, now)
        if state.is_ready(node, job):
            why = job.seen.why_idle
            return f"kept idle: {why}" if why else "ready to join the job"
        return "its workers start, to join the job"
    return client.idle_slots(job.current.made.plan, facts.worker_slots)


def _stands_by(job: Job, name: NodeName, now: float) -> str:
    slow = [(worker, rate) for worker, rate in sorted(job.slow.items()) if worker.node == name]
    left_s = max(questions.stands_by_until(job, worker) for worker, _ in slow) - now
    least = f", for {left_s:.0f} s at least" if left_s > 0 else ""
    return f"stands by{least}: {'; '.join(str(rate) for _, rate in slow)}"


def _kept(state: ClusterState, node: Node) -> str:
    """Return the reason why the node's drain waits; empty: it does not."""
    job, drain = state.job, node.drain
    if job is None or drain is None or drain.done or node.facts.node in job.current.leaving:
        return ""
    return drain.kept


def _drain_progress(state: ClusterState, node: Node, drain: Drain) -> str:
    job, name = state.job, node.facts.node
    if drain.done or job is None:
        return ""
    if name in job.current.leaving:
        return f"work of job {job.id} moves off it at a step boundary"
    if kept := _kept(state, node):
        forcing = f"; 'oobleck node drain {name} --force' drains it all the same"
        return f"kept so far: {kept}{forcing * (drain.by == 'operator' and not drain.force)}"
    if name in job.current.members and job.state != "running":
        return f"job {job.id} is {job.state}, and goes on without it after that if it can"
    return ""
