"""Initial weights on disk: a directory as Hugging Face saves a model, in safetensors files.

Owns the places of tensors, and checks that the files are whole and stay unchanged. It reads headers
and samples of each tensor, so that the command line can check before a job is sent. No pickle is
read. Must not know the meaning of tensors.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from oobleck.host.display import inline
from oobleck.host.system.files import open_regular, read_regular

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
#: Most bytes of a header; a file of the largest models has a tenth of it. The format's own limit,
#: 100 MB, takes half a minute and gigabytes to read.
_MOST_HEADER_BYTES = 10 << 20
_MOST_INDEX_BYTES = 64 << 20
_MOST_CONFIG_BYTES = 16 << 20
#: Bits of one value; for other types the offsets decide.
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 8),
}
#: Types in numpy, which lacks BF16; its bits are the upper half of an F32's.
_NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}
#: Bytes of each sample for the fingerprint: at begin, middle and end of each tensor.
_BLOCK_BYTES = 4096
#: Keys of a config that describe the origin or storage of a model, and not its computation.
_OF_NO_EFFECT = ("_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype")
#: Size and time of change of a file, in nanoseconds. Not the inode: file systems without inodes
#: make up changing ones.
_Stamp = tuple[int, int]


class WeightsError(ValueError):
    """Error of unusable initial weights; the text names the file or tensor and the fix."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of one tensor."""

    path: str
    #: Name in safetensors, such as `F32` or `BF16`.
    dtype: str
    shape: tuple[int, ...]
    #: Stamp of the file when it was opened.
    stamp: _Stamp


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Directory whose files are whole, as far as headers and sizes tell."""

    directory: str
    tensors: Mapping[str, StoredTensor]
    #: 32 bytes, equal for equal models: over all headers, a part of each tensor and the config.
    fingerprint: bytes


def open_weights(directory: str) -> WeightFiles:
    """Read all headers in `directory`, and samples of the tensors. Raises WeightsError."""
    folder = Path(directory)
    if not folder.is_dir():
        what = "is not a directory" if folder.exists() else "does not exist"
        raise WeightsError(
            f"{directory} {what}; give the directory of a saved Hugging Face model, the same on "
            "all nodes"
        )
    index = _read_index(folder)
    names = [_ONE] if index is None else sorted(set(index.values()))
    tensors: dict[str, StoredTensor] = {}
    digest = hashlib.sha256()
    for name in names:
        found = _read_header(folder / name, digest)
        tensors.update((t, w) for t, w in found.items() if index is None or index.get(t) == name)
    for tensor, name in (index or {}).items():
        if tensor not in tensors:
            raise WeightsError(
                f"{folder / name} has no tensor {tensor}, which {_INDEX} lists; copy the model anew"
            )
    digest.update(_config(folder))
    return WeightFiles(directory, tensors, digest.digest())


def check_unchanged(read: Iterable[StoredTensor]) -> None:
    """Raise WeightsError if a file has changed since it was opened. Call it after copying the
    tensors `read`: until then their data may be a memory map of the file."""
    for path, stamp in sorted({(stored.path, stored.stamp) for stored in read}):
        try:
            now = _stamp(os.stat(path))
        except OSError as error:
            raise WeightsError(f"cannot read {path}: {error.strerror}; put it back") from error
        if now != stamp:
            raise WeightsError(
                f"{path} was changed since this job began, and other nodes have the file as it was "
                "before; put that back"
            )


def read_tensor(files: WeightFiles, name: str) -> NDArray[Any]:
    """Read the numbers of one tensor; BF16 as F32. Raises WeightsError."""
    stored = files.tensors.get(name)
    if stored is None or stored.dtype not in _NUMPY:
        has = "no tensor" if stored is None else f"{stored.dtype} in"
        raise WeightsError(f"{files.directory} has {has} {name}; restore the original model there")
    try:
        with open_regular(Path(stored.path)) as file:
            length = int.from_bytes(file.read(8), "little")
            entry = _ENTRY.decode(msgspec.json.decode(file.read(length), type=_Header)[name])
            begin, end = entry.data_offsets
            file.seek(8 + length + begin)
            found = np.frombuffer(file.read(end - begin), _NUMPY[stored.dtype])
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(f"cannot read {name} in {stored.path}: {error}; copy it anew") from error
    if stored.dtype == "BF16":
        found = (found.astype("<u4") << 16).view("<f4")
    return found.reshape(stored.shape)


def _read_index(folder: Path) -> dict[str, str] | None:
    """Read the file name of each tensor; None if one file has them all."""
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
        content = read_regular(path, _MOST_INDEX_BYTES)
        index = msgspec.json.decode(content, type=_Index).weight_map
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}; copy the model anew") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is no index of safetensors; copy the model anew") from error
    if not all(_is_file_name(name) for name in index.values()):
        raise WeightsError(f"{path} names files outside of its directory; copy the model anew")
    return index


def _config(folder: Path) -> bytes:
    """Return the keys of config.json that affect the model's computation, as JSON; empty if there
    is no such file. Raises WeightsError."""
    path = folder / _CONFIG
    try:
        keys = json.loads(read_regular(path, _MOST_CONFIG_BYTES))
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}; copy the model anew") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is no JSON; copy the model anew") from error
    if isinstance(keys, dict):
        keys = {key: value for key, value in keys.items() if key not in _OF_NO_EFFECT}
    return json.dumps(keys, sort_keys=True).encode()


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_size, status.st_mtime_ns


def _is_file_name(name: str) -> bool:
    return os.path.basename(name) == name not in ("", ".", "..") and name.isprintable()


def _read_header(path: Path, digest: "hashlib._Hash") -> dict[str, StoredTensor]:
    """Return the tensors of one file; add its header and samples of each tensor to `digest`."""
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            length = int.from_bytes(file.read(8), "little")
            _check_length(length, size, str(path))
            header = file.read(length)
            digest.update(f"{path.name}\0{size}\0".encode())
            digest.update(header)
            found = _parse_header(header, str(path), size)
            for begin, end in sorted(entry.data_offsets for entry in found.values()):
                _sample(file, 8 + length + begin, 8 + length + end, digest)
    except OSError as error:
        raise WeightsError(
            f"cannot read {path}: {error.strerror}; put it there, the same on all nodes"
        ) from error
    return {
        name: StoredTensor(str(path), entry.dtype, tuple(entry.shape), _stamp(status))
        for name, entry in found.items()
    }


def _sample(file: BinaryIO, begin: int, end: int, digest: "hashlib._Hash") -> None:
    """Add samples of the bytes from `begin` to `end`, enough to detect almost any change."""
    last = max(begin, end - _BLOCK_BYTES)
    for place in sorted({begin, (begin + last) // 2, last}):
        file.seek(place)
        digest.update(file.read(min(_BLOCK_BYTES, end - place)))


def check_content(content: bytes, most_header_bytes: int) -> None:
    """Raise WeightsError if `content` is not a whole safetensors file, or its header is too long.
    Call it before a library makes objects of it."""
    length = int.from_bytes(content[:8], "little")
    _check_length(length, len(content), "it", most_header_bytes)
    _parse_header(content[8 : 8 + length], "it", len(content))


class _Entry(msgspec.Struct):
    """Tensor, as a header describes it."""

    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=8)]
    #: Begin and end in the data after the header.
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]

    @property
    def is_whole(self) -> bool:
        """True if its data has as many bytes as its shape and dtype need."""
        begin, end = self.data_offsets
        bits = _BITS.get(self.dtype)
        return begin <= end and (bits is None or (end - begin) * 8 == math.prod(self.shape) * bits)


class _Index(msgspec.Struct):
    #: File names by tensor.
    weight_map: dict[str, str]


_Header = dict[str, msgspec.Raw]
_ENTRY = msgspec.json.Decoder(_Entry)


def _check_length(length: int, size: int, path: str, most: int = _MOST_HEADER_BYTES) -> None:
    if size < 8 or length > size - 8:
        raise WeightsError(f"{path} is truncated or no safetensors file; copy it anew")
    if length > most:
        raise WeightsError(
            f"{path} has a header of {length} bytes, more than {most}: it is damaged; copy it "
            "anew, or save the model in more files"
        )


def _parse_header(header: bytes, path: str, size: int) -> dict[str, _Entry]:
    """Return the tensors of a file of `size` bytes."""
    try:
        raw = msgspec.json.decode(header, type=_Header)
        raw.pop("__metadata__", None)
        tensors = {name: _ENTRY.decode(entry) for name, entry in raw.items()}
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} has a damaged header; copy it anew") from error
    for name, entry in tensors.items():
        if not entry.is_whole:
            raise WeightsError(
                f"{path} has a damaged header: the data of {inline(name[:80])} is not of its "
                "shape; copy it anew"
            )
    data = 8 + len(header)
    end = data + max((entry.data_offsets[1] for entry in tensors.values()), default=0)
    if end != size:
        raise WeightsError(
            f"{path} is truncated or damaged: its tensors end at byte {end}, and it has {size}; "
            "copy it anew"
        )
    return tensors
