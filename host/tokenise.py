"""Text to a token file: documents of files, tokenizers, and tokenising in bounded memory.

A text file is one document. In a `.jsonl` file every line is one: a JSON object with the text in
one of its fields. `.gz` after either name means compressed. Documents are read piece by piece, so
that a corpus may be larger than memory. A tokenizer is bytes, or a Hugging Face `tokenizers` file;
its library is loaded only when such a file is read.
"""

import gzip
import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from oobleck.host.system.files import open_regular, read_regular
from oobleck.host.token_file import DataError, TokenFileInfo, TokenWriter

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
    """Return where a piece may end: after a line end if possible, else before a word, as tokenizers
    split too; 0 if there is no such place yet."""
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


# ---- tokenizers


Ids = NDArray[np.uint32]

#: Most bytes of a tokenizer's file; the largest have a tenth of it.
_MOST_BYTES = 256 << 20

#: Tokens that end a document in common tokenizers, the commonest first.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class ByteTokenizer:
    """Tokenizer for which every byte is a token; documents are separated only on request."""

    #: Name for messages and descriptions, and SHA-256 (hex) of its definition.
    name = "bytes"
    sha256 = ""
    #: Number of ids.
    vocabulary = 256

    def encode(self, pieces: Sequence[Piece]) -> list[Ids]:
        """Return the ids of each piece. Raises DataError for a piece that is not text."""
        return [np.frombuffer(piece.content, dtype=np.uint8).astype(np.uint32) for piece in pieces]

    def separator(self, wanted: str | None) -> tuple[int, ...]:
        """Return the ids to put after each document: `wanted`, none for an empty text, the usual
        ones for None. Raises DataError if there is no such token."""
        return tuple((wanted or "").encode())

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raise DataError if a model with this vocabulary cannot take all ids. A text need not have
        all 256 bytes, so those are checked where they are used."""


class FileTokenizer:
    """Tokenizer of a `tokenizer.json`, without the tokens that it puts around texts."""

    def __init__(self, path: str) -> None:
        """Load the file; raises DataError."""
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise DataError(
                "a tokenizer file needs the package tokenizers: pip install 'tokenizers>=0.21'"
            ) from error
        where = Path(path)
        if where.is_dir():
            raise DataError(f"tokenizer: {path} is a directory; give the tokenizer.json in it")
        try:
            content = read_regular(where, _MOST_BYTES)
        except OSError as error:
            raise DataError(
                f"tokenizer: cannot read {path}: {error.strerror}; put the file there, readable, "
                "the same on all nodes"
            ) from error
        try:
            self._library: Any = Library.from_str(content.decode())
        except Exception as error:  # the library raises Exception itself
            raise DataError(
                f"tokenizer: {path} is no tokenizer file ({_line(error)}); give a tokenizer.json "
                "as the library tokenizers saves it"
            ) from error
        self._library.no_truncation()
        self._library.no_padding()
        self._path = path
        self.name = where.name
        self.sha256 = hashlib.sha256(content).hexdigest()
        ids = self._library.get_vocab(with_added_tokens=True).values()
        self.vocabulary = max(ids, default=-1) + 1
        if not self.vocabulary:
            raise DataError(f"tokenizer: {path} has no tokens; train it first")

    def encode(self, pieces: Sequence[Piece]) -> list[Ids]:
        texts = [piece.text() for piece in pieces]
        found = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in found]

    def separator(self, wanted: str | None) -> tuple[int, ...]:
        if wanted == "":
            return ()
        for token in END_TOKENS if wanted is None else (wanted,):
            if (found := self._library.token_to_id(token)) is not None:
                return (found,)
        what = f"no token {wanted!r}" if wanted else f"none of {', '.join(END_TOKENS)}"
        raise DataError(
            f"tokenizer: {self._path} has {what} to end a document with; name one of its tokens "
            "as separator, or '' for none"
        )

    def check_vocabulary(self, vocabulary: int) -> None:
        if self.vocabulary > vocabulary:
            raise DataError(
                f"tokenizer: {self._path} has {self.vocabulary} tokens, more than model.vocabulary "
                f"({vocabulary}); set model.vocabulary to {self.vocabulary}"
            )


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(path: str | None) -> Tokenizer:
    """Load the tokenizer of a file, or of bytes if there is none. Raises DataError."""
    return ByteTokenizer() if path is None else FileTokenizer(path)


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# ---- tokenising of files to one token file: read, tokenise, separate, write


#: Text that is tokenised at once, in parallel where the tokenizer can; and most pieces of it.
BATCH_BYTES = 1 << 23
_BATCH_PIECES = 1 << 14

#: Called with the bytes read of the files so far, and the tokens written.
Report = Callable[[int, int], None]


def tokenise(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    writer: TokenWriter,
    *,
    field: str,
    separator: tuple[int, ...],
    report: Report = lambda read, written: None,
) -> TokenFileInfo:
    """Write the documents of `paths`, in order, each followed by `separator`, and publish. Raises
    DataError for a file that cannot be used, for one without text, and for a full disk."""
    behind = np.asarray(separator, dtype=np.uint32)
    for batch, read_bytes in _batches(paths, field):
        parts = []
        for piece, ids in zip(batch, tokenizer.encode(batch), strict=True):
            parts.append(ids)
            if piece.ends_document:
                parts.append(behind)
                writer.documents += 1
        writer.add(np.concatenate(parts))
        report(read_bytes, writer.tokens)
    if not writer.tokens:
        raise DataError(f"{', '.join(paths[:3])}: no text in there; give files that have some")
    return writer.publish(
        vocabulary=tokenizer.vocabulary,
        tokenizer=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        separator=separator,
    )


def _batches(paths: Sequence[str], field: str) -> Iterator[tuple[list[Piece], int]]:
    """Yield pieces in batches, with the bytes of all files read so far."""
    batch: list[Piece] = []
    size = 0
    for piece, read_bytes in _all_pieces(paths, field):
        batch.append(piece)
        size += len(piece.content)
        if size >= BATCH_BYTES or len(batch) >= _BATCH_PIECES:
            yield batch, read_bytes
            batch, size = [], 0
    if batch:
        yield batch, read_bytes


def _all_pieces(paths: Sequence[str], field: str) -> Iterator[tuple[Piece, int]]:
    before = 0
    for path in paths:
        last = 0
        for piece in read_documents(path, field):
            last = piece.read_bytes
            # Skip an empty document, but not an empty last piece of a longer one.
            if piece.content or piece.offset:
                yield piece, before + last
        before += last
