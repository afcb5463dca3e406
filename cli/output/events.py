"""Records of events.jsonl as sentences, and an incident as a block for a terminal. Pure."""

import time
from collections.abc import Collection, Iterator
from typing import Any

from oobleck.cli.output.table import folded, grouped, longest_word, wrapped
from oobleck.cli.output.text import lost_records, moment, seconds
from oobleck.core.units import comma_separated, count, format_bytes
from oobleck.host.display import inline
from oobleck.host.versions import described
from oobleck.proto import control_pb2 as pb


def event_line(record: dict[str, Any], width: int | None = None) -> str:
    """Format a record of events.jsonl as one readable line, folded at `width`."""
    at = _began(record)
    return folded(f"{at}  {inline(sentence(record))}", width, indent=len(at) + 2)


def _began(record: dict[str, Any]) -> str:
    """Return the time to show for the event; for an incident, that of its begin."""
    return clock(float(record["opened_at" if "opened_at" in record else "time"]))


def cluster_line(record: dict[str, Any], width: int | None = None) -> str:
    """Format an event of the cluster as one readable line, folded at `width`."""
    at = moment(float(record["time"]))
    return folded(f"{at}  {inline(cluster_sentence(record))}", width, indent=len(at) + 2)


def cluster_sentence(record: dict[str, Any]) -> str:
    """Return the sentence of an event of the cluster."""
    match record:
        case {"event": "master_started"}:
            return "the master started"
        case {"event": "term_began", "number": number, "reason": reason}:
            return f"the master began term {number}: {reason}"
        case {"event": "token_created", "token": token, "role": role, "name": name, "by": maker}:
            whom = f"{role} {name}" if name else f"any {role}"
            until = moment(record["expires_at"])
            return f"token {token} for {whom} was made by {maker}, good until {until}"
        case {"event": "token_revoked", "token": token}:
            return f"token {token} was revoked"
        case {"event": "certificate_issued", "role": role, "name": name, "token": token}:
            until = moment(record["expires_at"])
            return f"{role} {name} got a certificate for token {token}, good until {until}"
        case {"event": "certificates_revoked", "role": role, "name": name}:
            return f"the certificates of {role} {name} were revoked"
        case {"event": "node_forgotten", "node": node}:
            return f"node {node} is forgotten"
        case {"job": job}:
            return f"{job} {sentence(record)}"
        case _:
            return sentence(record)


def sentence(record: dict[str, Any]) -> str:
    match record:
        case {"event": "started", "generation": generation, "pipelines": pipelines}:
            nodes = {stage["node"] for pipeline in pipelines for stage in pipeline}
            return (
                f"started generation {generation}: {count(len(pipelines), 'pipeline')} on "
                f"{count(len(nodes), 'node')}, can lose {record.get('can_lose')}"
            )
        case {"event": "rate_changed", "node": node, "slot": slot}:
            return f"worker {node}/{slot} {_pace(record)}"
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
            verb = "measures" if len(workers) == 1 else "measure"
            return f"profiling: {count(len(workers), 'worker')} {verb} the model{over}"
        case {"event": "profile", "source": source, "reason": reason}:
            return f"profile: {source} ({reason})"
        case {"event": "checkpoint_saved", "step": step, "path": path}:
            size, span = format_bytes(record["bytes"]), seconds(record["seconds"])
            return f"checkpoint of step {step}: {path} ({size} in {span})"
        case {"event": "checkpoint_failed", "step": step, "reason": reason}:
            return f"no checkpoint of step {step}: {reason}; the job goes on"
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
        case {"event": "adopted", "nodes": nodes}:
            return f"adopted with {count(len(nodes), 'node')}, which trained it for another master"
        case {"event": "records_differ", "step": step, "nodes": nodes, "fields": fields}:
            sentence = f"{' and '.join(nodes)} report different values of step {step}"
            return f"{sentence}: {', '.join(fields)}"
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
    parts = [f"generation {record['to_generation']} by {record['rule']}: {_change(record)}"]
    if not record.get("boundary"):
        spans: dict[str, float] = record.get("phases", {})
        phases = ", ".join(f"{name} {s:.3f}" for name, s in spans.items() if s)
        parts.append(f"in {seconds(record['total_s'])} ({phases})")
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
    if record.get("superseded_by") is not None:
        parts.append(f"superseded by generation {record['superseded_by']}")
    stood_s = record.get("stall_s")
    if stood_s is not None and round(stood_s, 1):
        parts.append(f"training stood still for {seconds(stood_s)}")
    no_pause = stood_s is not None and record.get("boundary") and not round(stood_s, 1)
    return ", ".join(parts) + ("; no pause" if no_pause else "")


def _change(record: dict[str, Any]) -> str:
    """Describe which nodes leave, join or return, or else why the same nodes have a new plan."""
    lost, again = record.get("nodes_lost", []), record.get("nodes_again", [])
    before, after = {*lost}, {*record.get("nodes_joined", [])}
    if "pipelines_after" in record:
        before, after = _planned(record["pipelines_before"]), _planned(record["pipelines_after"])
    gone, new = before - after, after - before - {*again}
    back = (after - before) & {*again} | after & {*lost}
    workers = record.get("workers_lost", [])
    parts = []
    if gone or (workers and not lost):
        change = (
            f"without {comma_separated(gone)}"
            if gone
            else f"after {comma_separated(workers)} ended"
        )
        parts.append(f"goes on {change}" + (f", with {comma_separated(new)}" if new else ""))
    elif new:
        parts.append(f"{comma_separated(new)} {_takes(new)} part")
    if back:
        parts.append(f"{comma_separated(back)} {_takes(back)} part again")
    return "; ".join(parts) or f"{record['cause']}; {record.get('reason', '')}".rstrip("; ")


def _planned(pipelines: list[list[dict[str, Any]]]) -> set[str]:
    """Return the nodes of a plan's pipelines."""
    return {stage["node"] for pipeline in pipelines for stage in pipeline}


def _takes(nodes: Collection[str]) -> str:
    return "takes" if len(nodes) == 1 else "take"


# ---- incidents: cause, witnesses, answer and cost


#: Longest list of witnesses, slow workers or plans; the others are counted.
_MOST_LISTED = 8
#: Phases in which most incidents spend no time.
_RARE = ("waiting", "redo")
#: Root causes whose consequences, a line for each node, are told in one.
_OF_MANY = ("head cut off", "site away")
_INDENT = " " * 14
_LABEL = 14
#: Columns before a value beside its label, and below it.
_VALUES = len(_INDENT) + _LABEL
_BELOW = 4
_BOLD, _RED, _GREEN, _YELLOW, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[0m"
_COLOURS = {
    "recovered": _GREEN,
    "succeeded": _GREEN,
    "failed": _RED,
    "cancelled": _YELLOW,
    "gone": _YELLOW,
}


def incident_block(
    record: dict[str, Any], *, colour: bool = False, width: int | None = None
) -> str:
    """Format the `incident` record as a headline and indented lines of label and value."""
    room = None if width is None else max(30, width - _VALUES)
    lines = [_headline(record, colour, width)]
    for label, value in _rows(record, room):
        lines += _labelled(label, inline(value), room)
    return "\n".join(lines)


def _labelled(label: str, value: str, room: int | None) -> Iterator[str]:
    """Yield the value beside its label, or below it if one of its words does not fit."""
    head, indent = f"{_INDENT}{label}", _VALUES
    if room is None or len(value) <= room:
        texts = [value]
    elif longest_word(value) <= room:
        texts = wrapped(value, room)
    else:
        yield head
        head, indent = "", _BELOW
        texts = wrapped(value, room + _VALUES - _BELOW)
    for text in texts:
        yield f"{head:<{indent}}{text}".rstrip()
        head = ""


def _headline(record: dict[str, Any], colour: bool, width: int | None) -> str:
    ended = inline(record["outcome"])
    how = how_it_ended(record, ended)
    number, cause = f"incident {record['incident']}", inline(record["root_cause"]["summary"])
    line = f"{_began(record)}  {number}: {cause};"
    fits = width is None or len(line) + 1 + len(how) <= width
    line = folded(line, width, indent=len(_INDENT))
    if colour:
        line = line.replace(number, f"{_BOLD}{number}{_PLAIN}", 1)
        how = f"{_COLOURS.get(ended, '')}{how}{_PLAIN}"
    return f"{line} {how}" if fits else f"{line}\n{_INDENT}{how}"


def how_it_ended(record: dict[str, Any], ended: str) -> str:
    if "slow" in record:
        after = f"after {record['closed_at'] - record['opened_at']:.1f} s"
        return f"{'recovered' if ended == 'recovered' else ended} {after}"
    total = f"{record['total_s']:.3f} s"
    return f"recovered in {total}" if ended == "recovered" else f"{ended} after {total}"


def _rows(record: dict[str, Any], room: int | None) -> Iterator[tuple[str, str]]:
    yield from _seen(record)
    yield from _phases(record, room)
    yield from _outcome(record)
    label = "last words"
    for line in record["root_cause"]["log_tail"]:
        for text in [line] if room is None else wrapped(inline(line), room - 2) or [""]:
            yield label, f"| {text}"
            label = ""


def facts(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield label and value of all but phases and last words; an empty label repeats the last."""
    yield from _seen(record)
    yield from _outcome(record)


def _seen(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    began = record["opened_at"]
    first, witnesses = record["first_seen"], record["witnesses"]
    if first is not None:
        yield "first seen", f"{_witness(first)}, {clock(first['time'])}"
    for number, seen in enumerate(witnesses[1 : _MOST_LISTED + 1]):
        yield (
            ("witnesses" if number == 0 else ""),
            f"{_after(seen['time'] - began)} {_witness(seen)}",
        )
    if len(witnesses) > _MOST_LISTED + 1:
        yield "", f"and {len(witnesses) - _MOST_LISTED - 1} more"
    others = record["also_lost"]
    if record["root_cause"].get("kind") in _OF_MANY:
        followed = [other for other in others if other["consequence"]]
        others = [other for other in others if not other["consequence"]]
        if followed:
            nodes = comma_separated({other["node"] for other in followed})
            others = [{**followed[0], "summary": f"{nodes} lost"}, *others]
    for number, other in enumerate(others):
        why = "because of that" if other["consequence"] else "a failure of its own"
        label = "also" if number == 0 else ""
        yield label, f"{_after(other['time'] - began)} {inline(other['summary'])} ({why})"
    if "slow" in record:
        yield from _slow(record)


def _outcome(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if cost := _cost(record):
        yield "cost", cost
    if record["to_generation"]:
        yield "generation", _generations(record)
    if record["outcome"] == "recovered":
        yield "can lose", f"{count(record['can_lose'], 'more node')}, whichever"


def _slow(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each slow worker with its pace and duration, and the newest plans in answer."""
    began, slow, answers = record["opened_at"], record["slow"], record["attempts"]
    for number, one in enumerate(slow[:_MOST_LISTED]):
        per_step = f"{one['step_s']:.3f} s a step instead of {one['usual_s']:.3f} s"
        facts = f"{one['worker']} at {one['rate']:.2f} of the others' pace, {per_step}"
        facts += f", for {one['until'] - one['since']:.1f} s" + ", then normal" * one["well"]
        yield ("slow" if number == 0 else ""), f"{_after(one['since'] - began)} {facts}"
    if len(slow) > _MOST_LISTED:
        yield "", f"and {len(slow) - _MOST_LISTED} more"
    if not answers:
        yield "answered", "with no plan"
    for number, answer in enumerate(answers[-_MOST_LISTED:]):
        line = f"generation {answer['generation']}, {answer['policy']}: {answer['reason']}"
        yield ("answered" if number == 0 else ""), line
    if len(answers) > _MOST_LISTED:
        yield "", f"and {len(answers) - _MOST_LISTED} before"


def _witness(seen: dict[str, Any]) -> str:
    observer = {
        "agent": f"agent of {seen['observer']}",
        "peer": f"peer {seen['observer']}",
        "worker": f"worker {seen['observer']} itself",
        "stream": "master",
        "lease": "master, by the lease",
        "progress": "master, by lack of progress",
    }.get(seen["by"], f"{seen['by']} {seen['observer']}")
    about = f"{seen['about']}: " if seen["by"] == "stream" else ""
    return f"{observer}: {about}{_one_line(seen['saw'])}"


def _one_line(text: str) -> str:
    first, _, rest = text.partition("\n")
    return inline(f"{first} ..." if rest else first)


def _after(span_s: float) -> str:
    return f"+{max(0.0, span_s):.3f} s"


def _phases(record: dict[str, Any], room: int | None) -> Iterator[tuple[str, str]]:
    """Yield a line of phase names over lines of seconds: each generation's, then the sums. A single
    generation has only the sums."""
    phases: dict[str, float] = {
        name: s for name, s in record["phases"].items() if s or name not in _RARE
    }
    attempts = [a for a in record["attempts"] if a["phases"] is not None]
    if not attempts:
        return
    spans = [(" all", [*phases.values(), sum(phases.values())])]
    if len(attempts) > 1:
        spans[:0] = [
            (
                f" generation {attempt['generation']}"[:_LABEL],
                [*(attempt["phases"].get(name, 0.0) for name in phases), attempt["total_s"]],
            )
            for attempt in attempts
        ]
    rows = [("seconds in", [*phases, "total"])]
    rows += [(label, [f"{span_s:.3f}" for span_s in of_label]) for label, of_label in spans]
    widths = [max(8, *map(len, column)) for column in zip(*(row for _, row in rows), strict=True)]
    most = sum(widths) + 2 * len(widths) if room is None else room
    for columns in grouped(widths, most, most):
        for label, row in rows:
            yield label, "  ".join(row[index].rjust(widths[index]) for index in columns)


def _cost(record: dict[str, Any]) -> str:
    parts = []
    if "slow" in record and record["total_s"]:
        parts.append(f"training stood still for {record['total_s']:.3f} s")
    if again := record["redo_steps"]:
        steps = ", ".join(map(str, again))
        parts.append(f"step {steps} done again")
        if salvaged := record["salvaged_samples"]:
            parts[-1] += f" but for {count(salvaged, 'sample')}"
    if (more := record["steps_redone"] - len(record["redo_steps"])) > 0:
        parts.append(f"{count(more, 'step')} done again from a checkpoint")
    if record["rolled_forward"]:
        parts.append("a survivor rolled forward")
    if record["received_bytes"]:
        parts.append(f"{format_bytes(record['received_bytes'])} of state moved")
    return ", ".join(parts)


def _generations(record: dict[str, Any]) -> str:
    rules = [f"{attempt['generation']} by {attempt['rule']}" for attempt in record["attempts"]]
    return " -> ".join([str(record["from_generation"]), *rules])


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"
