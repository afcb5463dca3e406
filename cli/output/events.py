"""Sentences about the records of events.jsonl. Pure."""

from typing import Any

from oobleck.cli.output.incident import clock
from oobleck.cli.output.table import folded
from oobleck.cli.output.text import lost_records, seconds
from oobleck.core.units import count, format_bytes
from oobleck.host.display import inline
from oobleck.host.versions import described
from oobleck.proto import control_pb2 as pb


def event_line(record: dict[str, Any], width: int | None = None) -> str:
    """Format a record of events.jsonl as one readable line, folded at `width`."""
    at = clock(float(record.get("time", 0.0)))
    return folded(f"{at}  {inline(sentence(record))}", width, indent=len(at) + 2)


def sentence(record: dict[str, Any]) -> str:
    match record:
        case {"event": "started", "generation": generation, "pipelines": pipelines}:
            nodes = {stage["node"] for pipeline in pipelines for stage in pipeline}
            return (
                f"started generation {generation}: {count(len(pipelines), 'pipeline')} on "
                f"{count(len(nodes), 'node')}, can lose {record.get('can_lose')}"
            )
        case {"event": "rate_changed", "node": node, "slot": slot}:
            return f"{node} worker {slot} {_pace(record)}"
        case {"event": "node_joined", "node": node}:
            return f"node {node} joined"
        case {"event": "versions_differ", "versions": found}:
            return f"versions differ among the job's nodes: {described(found)}"
        case {"event": "node_left_out", "node": node, "reason": reason}:
            return f"node {node} is left out: {reason}"
        case {"event": "node_draining", "node": node, "reason": reason}:
            return f"node {node} is to be drained" + (f": {reason}" if reason else "")
        case {"event": "node_kept", "node": node, "reason": reason}:
            return f"node {node} is kept for now: {reason}"
        case {"event": "node_drained", "node": node, "abrupt": abrupt}:
            how = "; the job must go on without it" if abrupt else ""
            return f"node {node} is drained{how}"
        case {"event": "node_quarantined", "node": node, "reason": reason, "seconds": span_s}:
            return f"node {node} is quarantined for {seconds(span_s)}: {reason}"
        case {"event": "node_released", "node": node, "reason": reason}:
            return f"node {node} may take part again: {reason}"
        case {"event": "node_undrained", "node": node}:
            return f"node {node} may take part again"
        case {"event": "node_lost", "node": node, "cause": "left", "reason": reason}:
            return f"node {node} left: {reason}"
        case {"event": "node_reset", "node": node, "reason": reason}:
            return f"workers of {node} are restarted: {reason}"
        case {"event": "node_lost", "node": node, "reason": reason, "detect_s": detect_s}:
            return f"node {node} lost: {reason} (known after {seconds(detect_s)})"
        case {"event": "worker_lost", "node": node, "slot": slot, "reason": reason}:
            return f"worker {node}/{slot} lost: {reason}"
        case {"event": "worker_late", "node": node, "slot": slot, "reason": reason}:
            return f"worker {node}/{slot} is left out: {reason}"
        case {"event": "put_back", "instead": instead}:
            return f"{instead} runs meanwhile"
        case {"event": "waiting", "reason": reason}:
            return f"waiting for nodes: {reason}"
        case {"event": "reconfigured"}:
            return _reconfigured(record)
        case {"event": "incident", "incident": number, "summary": summary}:
            return f"incident {number}: {summary}"
        case {"event": "profiling", "workers": workers}:
            why = record.get("passed_over")
            over = f" (the stored profile is passed over: {why})" if why else ""
            return f"profiling: {count(len(workers), 'worker')} measure the model{over}"
        case {"event": "profile", "source": source, "reason": reason}:
            return f"profile: {source} ({reason})"
        case {"event": "checkpoint_saved", "step": step, "path": path}:
            size, span = format_bytes(record["bytes"]), seconds(record["seconds"])
            return f"checkpoint of step {step}: {path} ({size} in {span})"
        case {"event": "checkpoint_failed", "step": step, "reason": reason}:
            return f"no checkpoint of step {step}: {reason}; training continues"
        case {"event": "output_failed", "reason": reason}:
            return f"the result is kept, and writing it is retried: {reason}"
        case {"event": "resumed" | "restored"}:
            return _restored(record)
        case {"event": "records_lost", "first": first, "last": last, "why": why}:
            lost = pb.LostRecords(first_step=first, last_step=last)
            return f"{lost_records(lost)}: {why}"
        case {"event": "failed", "reason": reason}:
            return f"failed: {reason}"
        case {"event": "journal_cut", "reason": reason}:
            return str(reason)
        case {"event": "submitted" | "succeeded" | "cancelled" as event}:
            return str(event)
        case _:
            left_out = ("event", "id", "time")
            rest = " ".join(f"{k}={v}" for k, v in record.items() if k not in left_out)
            return f"{record.get('event')} {rest}"


def _restored(record: dict[str, Any]) -> str:
    if record["event"] == "resumed":
        parts = [f"resumed after step {record['step']} from {record['path']}"]
    elif not record["path"]:
        again = count(record["lost_steps"], "step")
        parts = [f"all restart at step 1 ({again} again): the state was lost"]
    else:
        again = count(record["lost_steps"], "step")
        parts = [f"all went back to step {record['step']} ({again} again): {record['path']}"]
    parts += [f"passed over: {why}" for why in record.get("passed_over", ())]
    return "; ".join(parts)


def _pace(record: dict[str, Any]) -> str:
    if not record["steps"] and not record.get("alone"):
        return "is a new process; its pace is not known yet"
    if record["rate"] == 1:
        return "computes at the others' pace again"
    per_step = f"{seconds(record['step_s'])} a step instead of {seconds(record['usual_s'])}"
    why = f" ({record['hindrance']})" if record.get("hindrance") else ""
    return f"computes at {record['rate']:.2f} of the others' pace{why}, {per_step}"


def _reconfigured(record: dict[str, Any]) -> str:
    lost = [*record.get("nodes_lost", []), *record.get("workers_lost", [])]
    joined = record.get("nodes_joined", [])
    cause = " ".join([str(record["cause"]), *(lost or joined)])
    if lost and joined:
        cause += f"; joined: {' '.join(joined)}"
    spans: dict[str, float] = record.get("phases", {})
    phases = ", ".join(f"{name} {s:.3f}" for name, s in spans.items() if s or name != "waiting")
    parts = [
        f"reconfigured to generation {record['to_generation']} by {record['rule']} ({cause})",
        f"in {seconds(record['total_s'])} ({phases})",
    ]
    if record.get("redo_step") is not None:
        again = f"step {record['redo_step']} done again"
        if salvaged := record.get("salvaged_microbatches"):
            again += f" but for {salvaged} of its micro-batches"
        parts.append(again)
    if record.get("rolled_forward"):
        parts.append("rolled forward")
    if record.get("received_bytes"):
        moved = f"{format_bytes(record['received_bytes'])} of state moved"
        if fed := record.get("fed_bytes"):
            moved += f", {format_bytes(fed)} of it before the switch"
        parts.append(moved)
    if record.get("stall_s") is not None:
        parts.append(f"training stood still for {seconds(record['stall_s'])}")
    if record.get("superseded_by") is not None:
        parts.append(f"superseded by generation {record['superseded_by']}")
    return ", ".join(parts)
