"""Time of workers in a step, as spans, and the file that shows those of all workers.

Workers record spans (`oobleck.worker.runtime.timeline`), the master requests and gathers them. This
module owns the types of both and the Chrome trace format, which Perfetto and chrome://tracing open.
Must not know the origin of a recording.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from oobleck.core.ids import WorkerId
from oobleck.core.messages import Recording

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the id of this boot, in which processes share a clock; empty: unknown."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """Offset of a node's monotonic clock from that of the asking process."""

    #: Added to the node's times.
    offset_ns: int = 0
    #: Largest error of `offset_ns`: half of the fastest round trip's time.
    error_ns: int = 0


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """Recording of one worker, with its labels in the file."""

    worker: WorkerId
    #: As "pipeline 1, stage 0".
    title: str
    recording: Recording
    clock: Clock = Clock()


#: First thread number of devices; that of a worker is its slot's number.
DEVICE_THREADS = 1 << 16


def chrome_trace(tracks: Sequence[Track]) -> dict[str, Any]:
    """Return the JSON object format of the Trace Event Format: a process per node, a thread per
    worker and per device. Times are microseconds from the first span; sums, which overlap, are
    asynchronous."""
    nodes = sorted({track.worker.node for track in tracks})
    starts = [
        span.start_ns + track.clock.offset_ns for track in tracks for span in track.recording.spans
    ]
    origin_ns = min(starts, default=0)
    events: list[dict[str, Any]] = []
    for number, node in enumerate(nodes):
        events.append(_named("process_name", number, 0, node))
    for rank, track in enumerate(tracks):
        pid, tid = nodes.index(track.worker.node), track.worker.slot
        events.append(
            _named("thread_name", pid, tid, f"{track.worker} (rank {rank}): {track.title}")
        )
        events.extend(_events(track, pid, tid, origin_ns))
        if track.recording.device:
            tid += DEVICE_THREADS
            name = f"{track.worker} (rank {rank}), device: {track.title}"
            events.append(_named("thread_name", pid, tid, name))
            events.extend(_on_device(track, pid, tid, origin_ns))
    clocks = {
        track.worker.node: {
            "offset_us": track.clock.offset_ns / 1e3,
            "within_us": track.clock.error_ns / 1e3,
        }
        for track in tracks
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clocks": clocks}}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _on_device(track: Track, pid: int, tid: int, origin_ns: int) -> Iterator[dict[str, Any]]:
    shift = track.clock.offset_ns - origin_ns
    for span in track.recording.device:
        times = {"ts": (span.start_ns + shift) / 1e3, "dur": span.duration_ns / 1e3}
        event = {"name": span.name, "cat": "device", "ph": "X", "pid": pid, "tid": tid}
        yield {**event, **times}


def _events(track: Track, pid: int, tid: int, origin_ns: int) -> Iterator[dict[str, Any]]:
    shift = track.clock.offset_ns - origin_ns
    for number, span in enumerate(track.recording.spans):
        event = {
            "name": span.name,
            "cat": span.category,
            "pid": pid,
            "tid": tid,
            "ts": (span.start_ns + shift) / 1e3,
        }
        if span.category != "sum":
            yield {**event, "ph": "X", "dur": span.duration_ns / 1e3}
            continue
        same = f"{pid}/{tid}/{number}"
        yield {**event, "ph": "b", "id": same}
        yield {**event, "ph": "e", "id": same, "ts": (span.end_ns + shift) / 1e3}
