"""Tokenizers: text to token ids, as bytes or by a Hugging Face `tokenizers` file.

Owns a tokenizer's identity and the token that ends a document. Loads the `tokenizers` library only
when such a file is read.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oobleck.host.data.documents import Piece
from oobleck.host.data.token_file import DataError
from oobleck.host.system.files import read_regular

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
        """Raise DataError where a model of so many tokens cannot take all ids. Text may use only
        few bytes: each one is checked when it is used."""


class FileTokenizer:
    """Tokenizer described by a `tokenizer.json`, without the tokens that it puts around single
    texts.
    """

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
