"""Data that agent and master send whole, as bytes: the JSON text of a Struct, compressed.

A field added to such a Struct is carried, checked against its type and kept within bounds without a
change here or in the .proto file. Must not know the meaning of the data.
"""

import zlib
from typing import TypeVar

from oobleck.core.codec import decode, encode
from oobleck.proto.bounds import MOST_BYTES, check_bounds

T = TypeVar("T")

#: Fast; it shrinks a plan of a thousand nodes to a fifteenth.
_LEVEL = 1
#: Largest ratio of the text to its compressed data. A plan's is 10 to 15.
_MOST_RATIO = 64
#: Bytes of a text that are always allowed.
_SMALL = 1 << 20


def pack(value: object) -> bytes:
    """Compress a value for `unpack`, which reads it if it is within bounds."""
    return zlib.compress(encode(value), _LEVEL)


def unpack(kind: type[T], data: bytes) -> T:
    """Decode packed data. Raises ValueError if they are no `kind`, or break a bound. A text that is
    far larger than honest data of that size is refused undecoded."""
    most = min(MOST_BYTES, _SMALL + _MOST_RATIO * len(data))
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(data, most)
    except zlib.error as error:
        raise ValueError("the data are not compressed") from error
    if not unpacking.eof or unpacking.unused_data:
        raise ValueError(
            f"the data are cut off, have bytes after their end, or hold more than {most}"
        )
    value = decode(kind, text)
    check_bounds(value)
    return value
