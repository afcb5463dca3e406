"""Data sets that are installed with Oobleck: rows in files of arrays, and Hugging Face's folders.

data: {plugin: arrays, arguments: {path: /data/digits, inputs: images, targets: labels}}
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import safe_open

#: One name, or several, whose values are returned as a dict.
Names = str | Sequence[str]
#: Target of a token that is not learned, as in transformers.
IGNORED = -100


class Rows(Protocol):
    """Map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Any, Any]: ...


class _Columns:
    """Samples from columns of equal length."""

    def __init__(self, columns: dict[str, Any], inputs: Names, targets: Names) -> None:
        self._columns = columns
        self._inputs, self._targets = inputs, targets
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"columns are of unequal length: {lengths}; cut them alike")
        (self._length,) = set(lengths.values())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if not 0 <= index < self._length:
            raise IndexError(f"{index} is not one of {self._length} rows")
        row = {name: column[index] for name, column in self._columns.items()}
        return _of(row, self._inputs), _of(row, self._targets)


def shifted(labels: Any) -> Any:
    """Return targets (T,) for labels (T,): the label of the next token, and -100 at the end.

    In data sets for transformers a token's label is the token itself, since those models shift
    internally. A model by `architecture` does not shift. Raises ValueError.
    """
    found = np.asarray(labels)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(
            f"labels of a row are {found.dtype} {list(found.shape)}, and must be whole numbers, "
            "one for each token"
        )
    return np.append(found[1:].astype(np.int64), IGNORED)


class _Shifted:
    """Samples whose targets are `shifted` labels."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        inputs, labels = self._rows[index]
        return inputs, shifted(labels)


def arrays(
    path: str, inputs: Names = "inputs", targets: Names | None = None, labels: str | None = None
) -> Rows:
    """Return rows of the arrays NAME.npy in the directory `path`, or of a .safetensors file there
    or at `path`. They are memory-mapped, so they may be larger than memory.

    `targets`: the names to learn, "targets" by default. `labels`: a name to give `shifted` instead.
    """
    aims = _aims(targets, labels, "targets")
    names = _all(inputs, aims)
    folder = Path(path)
    columns: dict[str, Any] = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r")
        for name in names
        if (folder / f"{name}.npy").is_file()
    }
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    for file in files:
        opened: Any = safe_open(file, framework="np")
        stored = set(opened.keys())
        columns |= {n: _Slice(opened, n) for n in names if n in stored and n not in columns}
    missing = [name for name in names if name not in columns]
    if missing:
        has = sorted({entry.name for entry in folder.iterdir()}) if folder.is_dir() else []
        raise FileNotFoundError(
            f"{path} has no {missing[0]}.npy and no safetensors file with {missing[0]}; "
            f"it has {', '.join(has[:8]) or 'nothing'}"
        )
    rows = _Columns(columns, inputs, aims)
    return rows if labels is None else _Shifted(rows)


class _Slice:
    """Tensor of a safetensors file, by row."""

    def __init__(self, file: Any, name: str) -> None:
        self._slice = file.get_slice(name)

    def __len__(self) -> int:
        return int(self._slice.get_shape()[0])

    def __getitem__(self, index: int) -> Any:
        return self._slice[index : index + 1][0]


def huggingface(
    path: str, inputs: Names = "input_ids", targets: Names | None = None, labels: str | None = None
) -> Rows:
    """Return rows of a Hugging Face data set that `save_to_disk` wrote to the directory `path`.
    Rows must be of one length: cut and pad them before.

    `targets`: the columns to learn, "labels" by default, unshifted. `labels`: a column to give
    `shifted` instead.
    """
    from datasets import load_from_disk

    found = load_from_disk(path).with_format("numpy")
    if not hasattr(found, "column_names") or isinstance(found.column_names, dict):
        raise ValueError(f"{path} has several splits; name the folder of one of them")
    aims = _aims(targets, labels, "labels")
    missing = [name for name in _all(inputs, aims) if name not in found.column_names]
    if missing:
        has = ", ".join(found.column_names)
        raise ValueError(f"{path} has no column {missing[0]}; it has {has}")
    rows = _Examples(found, inputs, aims)
    return rows if labels is None else _Shifted(rows)


class _Examples:
    """Samples from rows that are read whole."""

    def __init__(self, found: Any, inputs: Names, targets: Names) -> None:
        self._found, self._inputs, self._targets = found, inputs, targets

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = self._found[index]
        return _of(row, self._inputs), _of(row, self._targets)


def _of(row: dict[str, Any], names: Names) -> Any:
    if isinstance(names, str):
        return np.asarray(row[names])
    return {name: np.asarray(row[name]) for name in names}


def _aims(targets: Names | None, labels: str | None, usual: str) -> Names:
    """Return the names to read targets from. Raises ValueError if both are given."""
    if targets is not None and labels is not None:
        raise ValueError(
            "targets and labels are both given; give labels where a token's label is the token "
            "itself, as in data sets for transformers, else targets"
        )
    return labels or targets or usual


def _all(*groups: Names) -> list[str]:
    return [name for group in groups for name in ([group] if isinstance(group, str) else group)]
