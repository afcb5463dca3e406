"""JSON text of the planner's types and back; checked against the types on the way in."""

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def encode(value: object) -> bytes:
    """The JSON text of a dataclass or Struct (or anything that consists of such).

    Equal values built the same way give the same text: mappings keep their order.
    """
    return msgspec.json.encode(value)


def choose(kind: type[Any], tree: Any) -> Any:
    """What msgspec's decoders need as `dec_hook`: of a type that several dataclasses extend, which
    `tree`, decoded text, is. Raises ValueError."""
    if kind is object:  # anything
        return tree
    if not isinstance(tree, dict) or not hasattr(kind, "from_tree"):
        raise ValueError(f"is no {kind.__name__}")
    return kind.from_tree(tree)


def decode(kind: type[T], text: bytes | str) -> T:
    """The `kind` that `text` describes; raises ValueError where the text does not fit the type."""
    try:
        return msgspec.json.decode(text, type=kind, dec_hook=choose)
    except (ValueError, RecursionError) as error:  # all of msgspec's and of UTF-8 are the former
        raise ValueError(f"not a valid {kind.__name__}: {error}") from error
