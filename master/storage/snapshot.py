"""Snapshots: the durable state as text, and back.

The text has all fields of the state's dataclasses except the observed ones (`seen`); a new field
needs no change here. Must not know where the text is kept.
"""

import base64
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from oobleck.core.codec import choose
from oobleck.core.ids import JobId, NodeName
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.job_observed import JobSeen
from oobleck.master.state.node import Node, NodeSeen
from oobleck.master.storage.cluster_log import Numbered

#: Fields left out: observations, stored profiles, and values that the text has elsewhere.
_LEFT_OUT: Mapping[type, tuple[str, ...]] = {
    ClusterState: (
        "profiles",
        "unusable_profiles",
        "nodes",
        "jobs",
        "began_term",
        "behind",
        "superseded",
    ),
    Node: ("seen",),
    Job: ("seen",),
}
#: Fast compression; most of a state repeats.
_LEVEL = 1


class _Text(msgspec.Struct, frozen=True, kw_only=True):
    #: Encoded fields of the state, its nodes and its jobs.
    state: dict[str, msgspec.Raw]
    nodes: dict[str, dict[str, msgspec.Raw]]
    jobs: dict[str, dict[str, msgspec.Raw]]
    #: Number of lines in each job's events.jsonl from earlier events.
    records: dict[JobId, int]
    #: The cluster's newest events; an earlier release kept none.
    events: Sequence[Numbered] = ()


def take(state: ClusterState, lines: Mapping[JobId, int], events: Sequence[Numbered]) -> str:
    """Return the text of all durable parts of `state`, of the number of event lines in each job's
    log, and of the cluster's newest events."""
    text = _Text(
        state=_parts(state),
        nodes={name: _parts(node) for name, node in state.nodes.items()},
        jobs={job_id: _parts(job) for job_id, job in state.jobs.items()},
        records=dict(lines),
        events=events,
    )
    return base64.b64encode(zlib.compress(msgspec.msgpack.encode(text), _LEVEL)).decode()


def restore(content: str, now: float) -> tuple[ClusterState, dict[JobId, int], Sequence[Numbered]]:
    """Restore the arguments of `take`, without observations. Raises ValueError."""
    try:
        packed = zlib.decompress(base64.b64decode(content))
        text = msgspec.msgpack.decode(packed, type=_Text)
        state = _whole(ClusterState, text.state)
        for name, parts in text.nodes.items():
            node = _whole(Node, parts, seen=NodeSeen(last_heard=now))
            state.nodes[NodeName(name)] = node
        for job_id, parts in text.jobs.items():
            state.jobs[JobId(job_id)] = _whole(Job, parts, seen=JobSeen())
        return state, text.records, text.events
    except (msgspec.DecodeError, TypeError, ValueError, zlib.error) as error:
        raise ValueError(f"a snapshot that this release does not know ({error})") from error


def _parts(value: Any) -> dict[str, msgspec.Raw]:
    """Encode the fields of one dataclass, and of the groups in it."""
    parts = {}
    kind: Any = type(value)
    for name, hint in _kept(kind).items():
        part = getattr(value, name)
        content = _parts(part) if is_dataclass(hint) else _listed(part)
        parts[name] = msgspec.Raw(msgspec.msgpack.encode(content))
    return parts


def _whole(kind: Any, parts: Mapping[str, msgspec.Raw], **observed: object) -> Any:
    hints = _kept(kind)
    values: dict[str, Any] = dict(observed)
    bounded: dict[str, Any] = {}
    for name, text in parts.items():
        if name not in hints:
            raise ValueError(f"{kind.__name__} has no {name}")
        hint = hints[name]
        if is_dataclass(hint):
            values[name] = _whole(hint, msgspec.msgpack.decode(text, type=dict[str, msgspec.Raw]))
        elif get_origin(hint) is deque:
            bounded[name] = _decoded(text, list[get_args(hint)[0]])  # type: ignore[misc]
        else:
            values[name] = _decoded(text, hint)
    made = kind(**values)
    for name, items in bounded.items():  # a deque's bound is in the default of its field
        getattr(made, name).extend(items)
    return made


def _decoded(text: msgspec.Raw, hint: Any) -> Any:
    return msgspec.msgpack.decode(text, type=hint, dec_hook=choose)


@cache
def _kept(kind: type) -> dict[str, Any]:
    """Return the types of those fields of a dataclass that a snapshot holds, by name."""
    assert is_dataclass(kind)
    hints, left_out = get_type_hints(kind), _LEFT_OUT.get(kind, ())
    # Fields that are left out of comparisons are caches.
    kept = (field.name for field in fields(kind) if field.compare)
    return {name: hints[name] for name in kept if name not in left_out}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, deque) else value
