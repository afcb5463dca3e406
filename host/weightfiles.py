"""Initial weights on disk: a directory as Hugging Face saves a model, in safetensors files.

Owns which tensors lie where, and that the files are whole; reads their headers and no more, so the
command line can look before a job is sent. No pickle is read. Must not know what the tensors mean.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
#: The format's own limit.
_MOST_HEADER_BYTES = 100_000_000
#: A file's fingerprint covers this many blocks, evenly spaced, beside its header.
_BLOCKS = 64
_BLOCK_BYTES = 4096


class WeightsError(ValueError):
    """Initial weights that cannot be used; the text names the file or tensor and the fix."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one tensor is."""

    path: str
    #: As safetensors names it, such as `F32` or `BF16`.
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """A directory whose files are whole, as far as headers and sizes tell."""

    directory: str
    tensors: Mapping[str, Tensor]
    #: 32 bytes, equal for equal files: over all headers and a part of the content.
    fingerprint: bytes


def open_weights(directory: str) -> WeightFiles:
    """Look at the headers of all files in `directory`. Raises WeightsError."""
    folder = Path(directory)
    if not folder.is_dir():
        what = "is not a directory" if folder.exists() else "does not exist"
        raise WeightsError(
            f"{directory} {what}; give the directory of a saved Hugging Face model, the same on "
            "all nodes"
        )
    index = _read_index(folder)
    names = [_ONE] if index is None else sorted(set(index.values()))
    tensors: dict[str, Tensor] = {}
    digest = hashlib.sha256()
    for name in names:
        found = _read_header(folder / name, digest)
        tensors.update(found if index is None else _indexed(found, index, name))
    for tensor, name in (index or {}).items():
        if tensor not in tensors:
            raise WeightsError(
                f"{folder / name} has no tensor {tensor}, which {_INDEX} says is there; "
                "copy the model anew"
            )
    return WeightFiles(directory, tensors, digest.digest())


def _indexed(found: Mapping[str, Tensor], index: Mapping[str, str], name: str) -> dict[str, Tensor]:
    return {tensor: where for tensor, where in found.items() if index.get(tensor) == name}


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensors to file names; None where one file has them all."""
    if (folder / _ONE).is_file():
        return None
    path = folder / _INDEX
    if not path.is_file():
        if any((folder / name).exists() for name in _PICKLED):
            raise WeightsError(
                f"{folder} has only pickled weights (.bin), which may run code when they are read "
                "and are refused; save the model as safetensors: "
                "from_pretrained(DIR).save_pretrained(NEW)"
            )
        raise WeightsError(f"{folder} has neither {_ONE} nor {_INDEX}; give a saved model")
    try:
        index = json.loads(path.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{path} is no index of safetensors; copy the model anew") from error
    if not isinstance(index, dict) or not all(
        isinstance(name, str) and os.path.basename(name) == name for name in index.values()
    ):
        raise WeightsError(f"{path} names files outside of its directory; copy the model anew")
    return index


def _read_header(path: Path, digest: "hashlib._Hash") -> dict[str, Tensor]:
    """The tensors of one file; adds header and samples of the content to `digest`."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
                raise WeightsError(f"{path} is truncated or no safetensors file; copy it anew")
            header = file.read(length)
            digest.update(f"{path.name}\0{size}\0".encode())
            digest.update(header)
            for block in range(_BLOCKS):
                file.seek(8 + length + block * (size - 8 - length) // _BLOCKS)
                digest.update(file.read(_BLOCK_BYTES))
    except OSError as error:
        raise WeightsError(
            f"cannot read {path}: {error.strerror}; put it there, the same on all nodes"
        ) from error
    try:
        tensors, end = _parse_header(json.loads(header), str(path))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} has a damaged header; copy it anew") from error
    if end != size - 8 - length:
        raise WeightsError(
            f"{path} is truncated or damaged: its tensors end at byte {8 + length + end}, and it "
            f"has {size}; copy it anew"
        )
    return tensors


def _parse_header(header: dict[str, Any], path: str) -> tuple[dict[str, Tensor], int]:
    """The tensors, and how many bytes of data they need."""
    end = 0
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        _, stop = entry["data_offsets"]
        end = max(end, int(stop))
        tensors[name] = Tensor(path, str(entry["dtype"]), tuple(map(int, entry["shape"])))
    return tensors, end
