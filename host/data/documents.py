"""Reader of documents from files, piece by piece, so that a corpus may be larger than memory.

A text file is one document. In a `.jsonl` file every line is one: a JSON object with the text in
one of its fields. `.gz` after either name means compressed. Must not know tokens.
"""

import gzip
import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

import msgspec

from oobleck.host.data.token_file import DataError
from oobleck.host.system.files import open_regular

#: Approximate bytes per piece of a long document.
PIECE_BYTES = 1 << 18
#: After so many pieces without a line end or a blank, a piece ends in the middle of a word.
_LONGEST_WORD_PIECES = 4
#: Most bytes of a document of JSON lines, which is in memory as a whole.
_MOST_LINE_BYTES = 64 << 20

_SPACE = b" \t\n\r\x0b\x0c"


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a document, or a whole one."""

    content: bytes
    #: Place of the content, for messages.
    where: str
    #: Byte offset of `content` in the (uncompressed) file; None: it is not a piece of the file.
    offset: int | None
    ends_document: bool
    #: Bytes of the file (as on the disk) read so far.
    read_bytes: int

    def text(self) -> str:
        """Return the text; raises DataError where it is not UTF-8."""
        try:
            return self.content.decode()
        except UnicodeDecodeError as error:
            at = "" if self.offset is None else f" at byte {self.offset + error.start}"
            raise DataError(
                f"{self.where} is not UTF-8 text{at}; convert it (as with iconv -t UTF-8), or "
                "leave the tokenizer out to train on its bytes"
            ) from error


def is_plain(path: str) -> bool:
    """Return whether the file's bytes are its document: neither compressed nor JSON lines."""
    return not path.endswith((".gz", ".jsonl"))


def read_documents(path: str, field: str, *, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Read the documents of file `path`; `field` is the key of the text in JSON lines. Raises
    DataError if the file is not of the type of its name."""
    try:
        with open_regular(path) as raw:
            opened = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
            stream = cast(BinaryIO, opened)
            if path.removesuffix(".gz").endswith(".jsonl"):
                yield from _lines(path, raw, stream, field)
            else:
                yield from _pieces(path, raw, stream, piece_bytes)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}); get it anew") from error
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}; correct the path or make it readable"
        ) from error


def _lines(path: str, raw: BinaryIO, stream: BinaryIO, field: str) -> Iterator[Piece]:
    for number in itertools.count(1):
        line = stream.readline(_MOST_LINE_BYTES + 1)
        if not line:
            return
        where = f"{path}:{number}"
        if len(line) > _MOST_LINE_BYTES:
            raise DataError(f"{where}: is longer than {_MOST_LINE_BYTES >> 20} MiB; cut it")
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"{where}: not a line of JSON ({error}); correct it") from error
        text = entry.get(field) if isinstance(entry, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(sorted(map(str, entry)))[:200] if isinstance(entry, dict) else "none"
            raise DataError(
                f"{where}: has no text under {field!r}; name the field that has it (there: {keys})"
            )
        yield Piece(text.encode(errors="surrogatepass"), where, None, True, raw.tell())


def _pieces(path: str, raw: BinaryIO, stream: BinaryIO, piece_bytes: int) -> Iterator[Piece]:
    rest, offset = b"", 0
    while block := stream.read(piece_bytes):
        rest += block
        if len(rest) > piece_bytes and (end := _cut(rest, piece_bytes)):
            yield Piece(rest[:end], path, offset, False, raw.tell())
            rest, offset = rest[end:], offset + end
    if rest or offset:
        yield Piece(rest, path, offset, True, raw.tell())


def _cut(content: bytes, piece_bytes: int) -> int:
    """Return the offset at which a piece may end: after a line end if possible, else before a word;
    0 if there is no such place yet.

    Tokenizers split there anyway, so that pieces have the tokens of the whole.
    """
    for end_of in (b"\n", b" "):
        at = content.rfind(end_of, 0, -1)
        while at >= 0:
            if content[at + 1] not in _SPACE:
                return at + 1 if end_of == b"\n" else at
            at = content.rfind(end_of, 0, at)
    if len(content) < _LONGEST_WORD_PIECES * piece_bytes:
        return 0
    end = len(content)
    while end and content[end - 1] & 0xC0 == 0x80:  # inside a character
        end -= 1
    return max(0, end - 1)
