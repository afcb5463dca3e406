"""Conversion of one layer's state to the bytes of a safetensors file, and back.

Weights have the names of their parameters, moments `<parameter>.<moment>`. The flat state is in the
order of the file's data, so writing copies nothing. Must not know where files are.
"""

import json
from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from oobleck.core.checkpoint import MOST_LAYER_HEADER_BYTES, InvalidCheckpoint
from oobleck.host.storage.folder import Content
from oobleck.host.storage.weight_files import WeightsError, check_content
from oobleck.worker.state.layout import Layout

_DTYPES = {torch.float32: "F32", torch.float64: "F64"}
#: Alignment that the format requires of its data.
_ALIGNMENT = 8


def pack(
    snapshot: torch.Tensor, flat: Layout, moments: tuple[str, ...], metadata: Mapping[str, str]
) -> list[Content]:
    """Return the file of a layer's state (1 + moments, n), contiguous and in host memory.

    Its data is a view of `snapshot`, if the layout has no gap.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    width = snapshot.element_size()
    end = 0
    for moment in ("", *moments):
        for span in flat.parameters:
            begin, end = end, end + (span.end - span.offset) * width
            header[f"{span.name}.{moment}" if moment else span.name] = {
                "dtype": _DTYPES[snapshot.dtype],
                "shape": list(span.shape),
                "data_offsets": [begin, end],
            }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if end < snapshot.nbytes:  # safetensors allows no gaps
        spans = [snapshot[:, span.offset : span.end] for span in flat.parameters]
        snapshot = torch.cat(spans, dim=1)
    head = len(text).to_bytes(8, "little") + text
    if not snapshot.numel():  # a layer without parameters
        return [head]
    return [head, snapshot.cpu().numpy().data.cast("B")]


def unpack(
    content: bytes, flat: Layout, moments: tuple[str, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a layer's state (1 + moments, n) from its file. Raise InvalidCheckpoint."""
    try:
        check_content(content, MOST_LAYER_HEADER_BYTES)
        tensors = load(content)
    except (WeightsError, SafetensorError) as error:
        raise InvalidCheckpoint(f"is not a safetensors file: {error}") from error
    snapshot = torch.zeros(1 + len(moments), flat.size, dtype=dtype)
    for row, moment in enumerate(("", *moments)):
        for span in flat.parameters:
            name = f"{span.name}.{moment}" if moment else span.name
            tensor = tensors.get(name)
            if tensor is None:
                raise InvalidCheckpoint(f"holds no {name}")
            if tensor.shape != span.shape:
                raise InvalidCheckpoint(f"holds {name} as {tuple(tensor.shape)}, not {span.shape}")
            snapshot[row, span.offset : span.end] = tensor.reshape(-1)
    return snapshot
