"""Token files: a flat array of token ids, and beside it a JSON file that describes them.

`F` has only the ids, as little-endian unsigned integers; `F.json` has their type, number, highest
id and origin. So a job need not give the type, and a model whose vocabulary is too small is refused
before it trains. A file appears when it is whole. Must not know the use of tokens.
"""

import contextlib
import fcntl
import glob
import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from oobleck.core.codec import decode, encode
from oobleck.host.system.files import open_regular, read_regular, sync_directory

#: Most bytes of a description, which has a dozen fields.
_MOST_INFO_BYTES = 1 << 20

Dtype = Literal["uint8", "uint16", "uint32"]

#: Ids per part that `look_through` reads; each part starts at a multiple of `_PERIOD` ids.
_LOOKED_AT, _PERIOD = 1 << 16, 4
#: Fewest ids that allow a verdict; and highest usual value of an id's high half, as in uint32 ids
#: below 2**20 and uint16 ids below 2**12.
_FEW, _HIGH = 32, 15
#: Larger than any vocabulary.
_VOCABULARY = 1 << 22


class DataError(ValueError):
    """Error in the requested data; the text names the file or key and the fix."""


class CannotWrite(DataError):
    """Error of writing to the disk; the data have no fault."""


class TokenFileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the token file `F`, stored in `F.json`."""

    format: int = 1
    dtype: Dtype
    #: Number of ids in the file.
    tokens: int
    #: Highest id in the file.
    highest: int
    #: Size of the tokenizer's vocabulary: ids are 0 to `vocabulary` - 1.
    vocabulary: int
    #: Either `bytes` or the name of the tokenizer's file, with the SHA-256 (hex) of that file.
    tokenizer: str
    tokenizer_sha256: str = ""
    #: Ids after every document.
    separator: tuple[int, ...] = ()
    documents: int
    #: SHA-256 (hex) of the token file.
    sha256: str

    def __post_init__(self) -> None:
        for name in ("tokens", "highest", "documents", "vocabulary"):
            if not 0 <= getattr(self, name) < 1 << 62:
                raise ValueError(f"{name}: {getattr(self, name)} makes no sense")

    @property
    def width(self) -> int:
        """Bytes per id."""
        return np.dtype(self.dtype).itemsize

    def check_token(self, token: int, where: str) -> None:
        """Raise DataError where the file has a token that its description leaves out."""
        if token > self.highest:
            raise DataError(
                f"{where} has token {token}, and the file's description names {self.highest} as "
                "the highest: one of them was replaced; make both anew with 'oobleck data prepare'"
            )

    def check_vocabulary(self, vocabulary: int, where: str) -> None:
        """Raise DataError where a model of so many tokens cannot take the file's."""
        if self.highest >= vocabulary:
            raise DataError(
                f"{where}: has token {self.highest}, which is not below model.vocabulary "
                f"({vocabulary}); set model.vocabulary to {self.vocabulary}, the size of the "
                f"vocabulary of its tokenizer ({self.tokenizer})"
            )


def info_path(path: str | Path) -> Path:
    return Path(f"{path}.json")


def read_info(path: str | Path) -> TokenFileInfo | None:
    """Read the description beside token file `path`; None if there is none. Raises DataError if it
    is broken or describes another file."""
    beside = info_path(path)
    try:
        info = decode(TokenFileInfo, read_regular(beside, _MOST_INFO_BYTES))
        size = os.stat(path).st_size
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read {beside}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(
            f"{beside} does not describe a token file ({error}); make both anew with "
            "'oobleck data prepare', or remove it and set data.dtype"
        ) from error
    if info.format != 1:
        raise DataError(f"{beside} has format {info.format}, and this version reads format 1")
    if size != info.tokens * info.width:
        raise DataError(
            f"{path} has {size} bytes, and {beside.name} speaks of {info.tokens} {info.dtype} "
            f"tokens ({info.tokens * info.width} bytes): one of them was cut off or replaced; "
            "make both anew with 'oobleck data prepare'"
        )
    return info


def type_of(path: str | Path, info: TokenFileInfo | None, wanted: Dtype | None) -> Dtype:
    """Return the type of the ids in token file `path`, which must be known: most ids read in the
    wrong width look valid. Raises DataError if `info` and `wanted` differ, or both are None."""
    if info is None and wanted is None:
        raise DataError(
            f"the type of the ids in {path} is unknown: there is no "
            f"{info_path(path).name} beside it; set dtype to uint8, uint16 or uint32, or make the "
            "file with 'oobleck data prepare'"
        )
    if info is not None and wanted not in (None, info.dtype):
        raise DataError(
            f"{path} has {info.dtype} tokens, and dtype is {wanted}; leave that key out"
        )
    dtype = wanted if info is None else info.dtype
    assert dtype is not None, "one of them says it"
    return dtype


def read_tokens(path: str | Path, dtype: Dtype, count: int) -> list[int]:
    """Return up to `count` ids from the beginning of a token file. Raises DataError."""
    found: list[int] = _read_ids(path, dtype, 0, count).tolist()
    return found


def _read_ids(
    path: str | Path, dtype: Dtype, start: int, count: int
) -> NDArray[np.unsignedinteger]:
    """Return up to `count` ids from position `start`. Raises DataError."""
    kind = np.dtype(dtype).newbyteorder("<")
    try:
        with open_regular(path) as file:
            file.seek(start * kind.itemsize)
            raw = file.read(count * kind.itemsize)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return np.frombuffer(raw[: len(raw) // kind.itemsize * kind.itemsize], dtype=kind)


def look_through(path: str | Path, dtype: Dtype, vocabulary: int | None = None) -> str:
    """Return why the ids in `path` look like another type, and the fix; empty if they do not.

    Reads three parts of the file. In too narrow a type the high half of each id is an id of its
    own, near zero. In too wide a type two ids make one huge id. Raises DataError for a partial id
    at the end, and for an id not below `vocabulary` unless a wider type is found.
    """
    width, size = np.dtype(dtype).itemsize, os.stat(path).st_size
    if size % width:
        raise DataError(
            f"{path} has {size} bytes, no whole number of {dtype} ids; set dtype to what it holds"
        )
    last = max(0, size // width - _LOOKED_AT) // _PERIOD * _PERIOD
    starts = sorted({0, last // 2 // _PERIOD * _PERIOD, last})
    parts = {start: _read_ids(path, dtype, start, _LOOKED_AT) for start in starts}
    ids = np.concatenate([part[: len(part) // _PERIOD * _PERIOD] for part in parts.values()])
    for wider in (4, 2):
        period = wider // width
        if period < 2 or size % wider or len(ids) < _FEW:
            continue
        groups = ids.reshape(-1, period)
        low, high = groups[:, 0], groups[:, period // 2 :]
        if high.max() <= _HIGH and len(np.unique(low)) >= 4 * len(np.unique(high)):
            return (
                f"{path} does not look like {dtype}: in groups of {period} ids the high half "
                f"is at most {high.max()}, as if ids of uint{8 * wider} were read as {dtype}; set "
                f"dtype to uint{8 * wider}"
            )
    doubt = ""
    if width == 4 and len(ids) >= _FEW and np.median(ids) > _VOCABULARY:
        doubt = (
            f"{path} does not look like {dtype}: half of its ids are above {_VOCABULARY:,}, as "
            "if two ids of uint16 were read as one; set dtype to uint16"
        )
    for start, part in parts.items():
        if vocabulary is not None and part.max(initial=0) >= vocabulary:
            where = f"position {start + int(part.argmax())} of {path}"
            raise beyond_vocabulary(where, part, vocabulary)
    return doubt


def beyond_vocabulary(
    where: str, ids: NDArray[np.unsignedinteger], vocabulary: int, key: str = "dtype"
) -> DataError:
    """Return the error for the highest of `ids`. `key`: the job key of the ids' type."""
    fix = (
        "set model.vocabulary to more than the highest token, or check that the data's dtype is "
        f"right (they were read as {ids.dtype.name})"
    )
    if ids.itemsize == 4 and int(ids.view("<u2").max()) < vocabulary:
        fix = f"set {key} to uint16: read as {ids.dtype.name}, two ids of the file make one"
    return DataError(
        f"token {int(ids.max())} at {where} is not below model.vocabulary ({vocabulary}); {fix}"
    )


def narrowest(vocabulary: int) -> Dtype:
    """Return the smallest type that holds ids below `vocabulary`."""
    if vocabulary <= 1 << 8:
        return "uint8"
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


class TokenWriter:
    """Writer of a token file: a context that leaves a whole file or nothing. Raises DataError."""

    def __init__(self, path: str | Path, dtype: Dtype, temporary: str = "") -> None:
        """Make a writer. `temporary`: name of the file while it is being written, in the same
        directory."""
        self._path = Path(path)
        self._dtype: Dtype = dtype
        self._limit = int(np.iinfo(dtype).max)
        self._temporary = self._path.with_name(temporary or f".{self._path.name}.{os.getpid()}.tmp")
        self._sha256 = hashlib.sha256()
        self._highest = -1
        self.tokens = 0
        self.documents = 0
        #: Opened within the context, whose end removes the file after any interruption.
        self._file: BinaryIO | None = None

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Ignore errors of writing the rest, which nobody needs and may not fit on the disk.
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._temporary.unlink(missing_ok=True)

    def add(self, tokens: NDArray[np.unsignedinteger]) -> None:
        """Append `tokens`; raises DataError when one does not fit into the type."""
        if not len(tokens):
            return
        highest = int(tokens.max())
        if highest > self._limit:
            raise DataError(f"token {highest} does not fit into {self._dtype}; choose a wider type")
        raw = tokens.astype(np.dtype(self._dtype).newbyteorder("<")).tobytes()
        try:
            self._open().write(raw)
        except OSError as error:
            raise self._unwritable(error) from error
        self._sha256.update(raw)
        self._highest = max(self._highest, highest)
        self.tokens += len(tokens)

    def publish(
        self,
        *,
        vocabulary: int,
        tokenizer: str,
        tokenizer_sha256: str = "",
        separator: tuple[int, ...] = (),
    ) -> TokenFileInfo:
        """Put the file and its description in place, as the last call in the context."""
        info = TokenFileInfo(
            dtype=self._dtype,
            tokens=self.tokens,
            highest=self._highest,
            vocabulary=vocabulary,
            tokenizer=tokenizer,
            tokenizer_sha256=tokenizer_sha256,
            separator=separator,
            documents=self.documents,
            sha256=self._sha256.hexdigest(),
        )
        beside = info_path(self._path)
        temporary = self._temporary.with_name(f"{self._temporary.name}.json")
        try:
            content = self._open()
            content.flush()
            os.fsync(content.fileno())
            with open(temporary, "wb") as file:
                file.write(msgspec.json.format(encode(info), indent=2) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            # An old description must never be beside new tokens.
            beside.unlink(missing_ok=True)
            os.replace(self._temporary, self._path)
            os.replace(temporary, beside)
            sync_directory(self._path.parent)
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            temporary.unlink(missing_ok=True)
        return info

    def _open(self) -> BinaryIO:
        if self._file is None:
            self._file = open(self._temporary, "wb")  # noqa: SIM115 - closed by __exit__
            with contextlib.suppress(OSError):  # without locks nothing is swept
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self._file

    def _unwritable(self, error: OSError) -> DataError:
        return CannotWrite(
            f"cannot write {self._path}: {error.strerror}; make room there, make it writable, or "
            "name another place"
        )


def sweep(path: str | Path) -> None:
    """Remove files left behind by killed writers of `path`: their locks are free."""
    path = Path(path)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError), open(left, "rb") as file:  # another process was faster
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.with_name(f"{left.name}.json").unlink(missing_ok=True)
            left.unlink()
