"""Tokenising of files to one token file: read, tokenise, separate, write, in bounded memory."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from oobleck.host.data.documents import Piece, read_documents
from oobleck.host.data.token_file import DataError, TokenFileInfo, TokenWriter
from oobleck.host.data.tokenizer import Tokenizer

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
    for piece, read_bytes in _pieces(paths, field):
        batch.append(piece)
        size += len(piece.content)
        if size >= BATCH_BYTES or len(batch) >= _BATCH_PIECES:
            yield batch, read_bytes
            batch, size = [], 0
    if batch:
        yield batch, read_bytes


def _pieces(paths: Sequence[str], field: str) -> Iterator[tuple[Piece, int]]:
    before = 0
    for path in paths:
        last = 0
        for piece in read_documents(path, field):
            last = piece.read_bytes
            # An empty text is no document, but its end may be that of a text in pieces.
            if piece.content or piece.offset:
                yield piece, before + last
        before += last
