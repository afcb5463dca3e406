"""YAML (or JSON) text as a tree of values that know their place."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import yaml

from oobleck.core.errors import InvalidJob

Scalar = str | int | float | bool | None

_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_YES = frozenset({"true", "yes", "on"})
#: Most values of a document, counted after aliases are expanded; a job has far fewer.
_MAX_NODES = 10_000
#: Deepest nesting; a job nests three levels, and YAML's time grows with the square of the depth.
_MAX_DEPTH = 32
#: Tag that YAML gives to a plain `<<`.
_MERGE = "tag:yaml.org,2002:merge"
#: Characters of a text that a message repeats.
_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Value and its place, such as `job.yaml:7` or `--set training.steps=5`."""

    place: str
    content: "Scalar | tuple[Value, ...] | Mapping[str, KeyValue]"

    def describe(self) -> str:
        """Return the value as an error message names it."""
        match self.content:
            case None:
                return "empty"
            case bool(flag):
                return str(flag).lower()
            case str(text):
                short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
                return f"the text {json.dumps(short, ensure_ascii=False)}"
            case int() | float():
                return str(self.content)
            case tuple():
                return "a list"
            case _:
                return "a mapping"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue:
    """Entry `key: value` of a mapping; `place` is the key's."""

    place: str
    value: Value


def read_document(text: str, source: str) -> Value:
    """Parse `text` into a tree; raises InvalidJob with the line on bad syntax or a repeated key."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        if isinstance(error, _NoJob):
            raise InvalidJob(f"{source}{line}: {error.problem}") from error
        problem = " ".join(filter(None, [error.context, error.problem]))
        raise InvalidJob(f"{source}{line}: not valid YAML: {problem}") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise InvalidJob(f"{source}: not valid YAML: {reason}") from error
    if node is None:
        raise InvalidJob(f"{source}: it is empty; a job needs at least name, model, data, training")
    return _Reader(source).convert(node)


class _NoJob(yaml.MarkedYAMLError):
    """Refusal of a text that is valid YAML so far but cannot be a job."""


class _Loader(yaml.SafeLoader):
    """YAML loader that stops early on a text too large or too deep for a job."""

    _depth = 0
    _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._nodes += 1
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # of types-PyYAML
        if self._depth > _MAX_DEPTH:
            raise _NoJob(problem="nested too deeply for a job", problem_mark=mark)
        if self._nodes > 2 * _MAX_NODES:  # keys are nodes too
            raise _NoJob(problem="too many values for a job", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def read_override(text: str) -> tuple[tuple[str, ...], Value]:
    """Parse `key.path=value` into its path and its value (YAML)."""
    path, equals, value = text.partition("=")
    keys = tuple(part.strip() for part in path.split("."))
    place = f"--set {text}"
    if not equals or not all(keys):
        raise InvalidJob(f"{place}: write it as key.path=value, such as training.steps=100")
    if not value.strip():
        return keys, Value(place=place, content=None)
    try:
        return keys, _at_place(read_document(value, place), place)
    except InvalidJob as error:  # an override has no lines
        raise InvalidJob(str(error).replace(f"{place}:1:", f"{place}:")) from error


def override(root: Value, keys: tuple[str, ...], value: Value) -> Value:
    """Return `root` with the entry at `keys` replaced; missing mappings on the path are created."""
    if not keys:
        return value
    if not isinstance(root.content, Mapping):
        if root.content is not None:
            raise InvalidJob(f"{value.place}: there are no keys below {root.describe()}")
        root = Value(place=value.place, content={})
    assert isinstance(root.content, Mapping)
    entry = root.content.get(keys[0])
    below = entry.value if entry else Value(place=value.place, content=None)
    changed = KeyValue(place=value.place, value=override(below, keys[1:], value))
    return replace(root, content={**root.content, keys[0]: changed})


def _at_place(value: Value, place: str) -> Value:
    match value.content:
        case tuple(items):
            return Value(place=place, content=tuple(_at_place(item, place) for item in items))
        case Mapping():
            entries = {
                key: KeyValue(place=place, value=_at_place(entry.value, place))
                for key, entry in value.content.items()
            }
            return Value(place=place, content=entries)
        case _:
            return replace(value, place=place)


class _Reader:
    """Converter of YAML nodes to values. It counts values and depth itself, since aliases can
    multiply nodes, nest deeply and refer to their own parents."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._count = 0
        self._depth = 0

    def _place(self, node: yaml.Node) -> str:
        return f"{self._source}:{node.start_mark.line + 1}"

    def convert(self, node: yaml.Node) -> Value:
        self._count += 1
        place = self._place(node)
        if self._count > _MAX_NODES:
            raise InvalidJob(f"{place}: too many values for a job")
        if self._depth >= _MAX_DEPTH:
            raise InvalidJob(f"{place}: nested too deeply for a job")
        self._depth += 1
        content: Scalar | tuple[Value, ...] | Mapping[str, KeyValue]
        if isinstance(node, yaml.SequenceNode):
            content = tuple(self.convert(item) for item in node.value)
        elif isinstance(node, yaml.MappingNode):
            content = self._mapping(node)
        else:
            content = _scalar(node, place)
        self._depth -= 1
        return Value(place=place, content=content)

    def _mapping(self, node: yaml.MappingNode) -> Mapping[str, KeyValue]:
        entries: dict[str, KeyValue] = {}
        for key_node, value_node in node.value:
            place = self._place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise InvalidJob(f"{place}: a key must be a plain word")
            key = key_node.value
            if key_node.tag == _MERGE:
                raise InvalidJob(
                    f"{place}: job files merge no mappings; write the keys out in place of '<<', "
                    "or change single ones by --set"
                )
            if key in entries:
                raise InvalidJob(
                    f"{place}: key {key!r} is given a second time "
                    f"(first at {entries[key].place}); remove one"
                )
            entries[key] = KeyValue(place=place, value=self.convert(value_node))
        return entries


def _scalar(node: yaml.Node, place: str) -> Scalar:
    """Return the value of a scalar. Unlike in YAML 1.1, `3e-4` is a number, and 010 and 1:30 are
    kept as written.
    """
    text = str(node.value)
    plain = isinstance(node, yaml.ScalarNode) and node.style is None
    if plain and _INTEGER.fullmatch(text):
        try:
            return int(text)
        except ValueError as error:
            raise InvalidJob(f"{place}: the number is too long") from error
    if plain and _NUMBER.fullmatch(text):
        number = float(text.replace("_", ""))
        if not math.isfinite(number):
            raise InvalidJob(f"{place}: {text} is too large")
        return number
    if plain and _NOT_FINITE.fullmatch(text):
        raise InvalidJob(f"{place}: {text} is not finite; give a number, or quote it as a text")
    if node.tag == "tag:yaml.org,2002:null":
        return None
    if node.tag == "tag:yaml.org,2002:bool":
        return text.lower() in _YES
    try:  # JSON writes characters beyond 16 bits as two surrogates
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise InvalidJob(f"{place}: the text holds half a character (a lone surrogate)") from error
