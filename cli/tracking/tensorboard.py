"""Copy of a job for TensorBoard: one event file, which only grows.

The file itself shows its position, so nothing can disagree with it: however the writing process
ended, the next one cuts off an incomplete last record and continues. The process locks the file,
because two writers would duplicate everything. Needs the package tensorboard, and neither
TensorFlow nor torch.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from oobleck.cli.tracking.track import (
    Item,
    Written,
    evaluation_numbers,
    event_text,
    open_locked,
    step_numbers,
)

#: TensorBoard recognises its files by this prefix.
FILE = "events.out.tfevents.0.oobleck"
_EVENTS = "events"
#: Head of a record: the number of bytes and its checksum. The bytes' checksum follows them.
_HEAD, _FOOT_BYTES = struct.Struct("<QI"), 4


class TensorBoard:
    def __init__(self, folder: Path, job_id: str) -> None:
        """Open or make the file. Raise CommandFailed or OSError."""
        self._file = open_locked(folder / job_id / FILE)
        self.written = _recover(self._file)
        self._writer = RecordWriter(self._file)
        if self._file.tell() == 0:
            self._put(event_pb2.Event(file_version="brain.Event:2"))

    def write(self, item: Item) -> None:
        record = item.record
        match item.kind:
            case "step":
                self._scalars(record, step_numbers(record))
            case "evaluation":
                self._scalars(record, evaluation_numbers(record))
            case "event":
                self._text(item)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _scalars(self, record: dict[str, Any], numbers: dict[str, float]) -> None:
        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=number)
            for name, number in numbers.items()
        ]
        event = event_pb2.Event(wall_time=record["time"], step=record["step"])
        event.summary.value.extend(values)
        self._put(event)

    def _text(self, item: Item) -> None:
        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING,
            string_val=[event_text(item.record).encode()],
            tensor_shape=tensor_shape_pb2.TensorShapeProto(
                dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)]
            ),
        )
        kind = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        value = summary_pb2.Summary.Value(
            tag=_EVENTS, tensor=tensor, metadata=summary_pb2.SummaryMetadata(plugin_data=kind)
        )
        event = event_pb2.Event(wall_time=item.record["time"], step=item.step)
        event.summary.value.append(value)
        self._put(event)

    def _put(self, event: event_pb2.Event) -> None:
        self._writer.write(event.SerializeToString())


def _recover(file: BinaryIO) -> Written:
    """Cut off an incomplete last record, and return the file's position."""
    last = {"step": 0, "evaluation": 0, "event": 0}
    whole = 0
    for event, end in _events(file):
        whole = end
        for value in event.summary.value[:1]:  # all of one event are of one kind
            if value.tag == _EVENTS:
                last["event"] = int(value.tensor.string_val[0].partition(b":")[0])
            elif value.tag.startswith("evaluation/"):
                last["evaluation"] = event.step
            else:
                last["step"] = event.step
    file.truncate(whole)
    file.seek(0, os.SEEK_END)
    return Written(**last)


def _events(file: BinaryIO) -> Iterator[tuple[event_pb2.Event, int]]:
    """Yield the complete events, and where each ends."""
    file.seek(0)
    end = 0
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        size, checksum = _HEAD.unpack(head)
        if masked_crc32c(head[:8]) != checksum:
            return
        rest = file.read(size + _FOOT_BYTES)
        if len(rest) < size + _FOOT_BYTES:
            return
        end += len(head) + len(rest)
        yield event_pb2.Event.FromString(rest[:size]), end
