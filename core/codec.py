"""JSON text of dataclasses and Structs, and back; decoding checks the types."""

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def encode(value: object) -> bytes:
    """Return the JSON text of a dataclass or Struct (or of a collection of them). Equal values
    built the same way give the same text: mappings keep their order."""
    return msgspec.json.encode(value)


def choose(kind: type[Any], tree: Any) -> Any:
    """Decode `tree` as the subclass of `kind` that its fields name, for msgspec's decoders
    (`dec_hook`). Raises ValueError."""
    if kind is object:  # anything
        return tree
    if not isinstance(tree, dict) or not hasattr(kind, "from_tree"):
        raise ValueError(f"is no {kind.__name__}")
    return kind.from_tree(tree)


def decode(kind: type[T], text: bytes | str) -> T:
    """Decode `text` as a `kind`; raises ValueError where it does not fit the type."""
    try:
        return msgspec.json.decode(text, type=kind, dec_hook=choose)
    except (ValueError, RecursionError) as error:  # msgspec's and UTF-8's errors are ValueErrors
        raise ValueError(f"not a valid {kind.__name__}: {error}") from error
