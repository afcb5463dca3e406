"""A YAML (or JSON) text as a tree of plain values, and the line of each.

Owns syntax: line numbers, duplicate keys, plain scalars, `key.path=value` overrides. Must not know
what the keys mean; `oobleck.core.job.file` does.
"""

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from oobleck.core.errors import InvalidJob

Scalar = str | int | float | bool | None
#: Keys of mappings and numbers of items, from the root.
Path = tuple[str | int, ...]

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


@dataclass(slots=True)
class Document:
    """Tree of dicts, lists and scalars, and the place of each in the file or on the command
    line."""

    tree: Any = None
    #: Such as `job.yaml:7` or `--set training.steps=5`, by path.
    places: dict[Path, str] = field(default_factory=dict)

    def place(self, path: Path) -> str:
        """Return the place of a value, or else of the nearest one around it."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places[path]

    def override(self, text: str) -> None:
        """Replace a value, as `key.path=value` (YAML) says; mappings on the way are made where
        they are missing. Raises InvalidJob."""
        path, equals, value = text.partition("=")
        keys = tuple(part.strip() for part in path.split("."))
        place = f"--set {text}"
        if not equals or not all(keys):
            raise InvalidJob(f"{place}: write it as key.path=value, such as training.steps=100")
        try:
            content = read_document(value, place).tree if value.strip() else None
        except InvalidJob as error:  # an override has no lines
            raise InvalidJob(str(error).replace(f"{place}:1:", f"{place}:")) from error
        below = self.tree
        for depth, key in enumerate(keys):
            if not isinstance(below, dict):
                raise InvalidJob(f"{place}: there are no keys below {describe(below)}")
            if depth == len(keys) - 1:
                below[key] = content
            elif below.get(key) is None:
                below[key] = {}
                self.places[keys[: depth + 1]] = place
            below = below[key]
        for old in [path for path in self.places if path[: len(keys)] == keys]:
            del self.places[old]
        self.places[keys] = place


def describe(content: object) -> str:
    """Return a value as an error message names it."""
    match content:
        case None:
            return "empty"
        case bool(flag):
            return str(flag).lower()
        case str(text):
            short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
            return f"the text {json.dumps(short, ensure_ascii=False)}"
        case int() | float():
            return str(content)
        case list():
            return "a list"
        case _:
            return "a mapping"


def read_document(text: str, source: str) -> Document:
    """Read a text; raises InvalidJob with the line on bad syntax or a repeated key."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        if isinstance(error, _NoJob):
            raise InvalidJob(f"{source}{line}: {error.problem}") from error
        problem = " ".join(filter(None, [error.context, error.problem]))
        fix = "check the indentation of this line and those above (spaces, no tabs), and quotes"
        raise InvalidJob(f"{source}{line}: not valid YAML: {problem}; {fix}") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise InvalidJob(f"{source}: not valid YAML: {reason}") from error
    if node is None:
        raise InvalidJob(f"{source}: it is empty; a job needs at least name, model, data, training")
    document = Document()
    document.tree = _Reader(source, document.places).convert(node, ())
    return document


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


class _Reader:
    """Converter of YAML nodes to values. It counts values and depth itself, since aliases can
    multiply nodes, nest deeply and refer to their own parents."""

    def __init__(self, source: str, places: dict[Path, str]) -> None:
        self._source = source
        self._places = places
        self._count = 0

    def _place(self, node: yaml.Node) -> str:
        return f"{self._source}:{node.start_mark.line + 1}"

    def convert(self, node: yaml.Node, path: Path) -> Any:
        self._count += 1
        place = self._place(node)
        if self._count > _MAX_NODES:
            raise InvalidJob(f"{place}: too many values for a job")
        if len(path) >= _MAX_DEPTH:
            raise InvalidJob(f"{place}: nested too deeply for a job")
        self._places.setdefault(path, place)  # that of its key, where it has one
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(item, (*path, n)) for n, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        return _scalar(node, place)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        entries: dict[str, Any] = {}
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
            below = (*path, key)
            if key in entries:
                raise InvalidJob(
                    f"{place}: key {key!r} is given a second time "
                    f"(first at {self._places[below]}); remove one"
                )
            self._places[below] = place
            entries[key] = self.convert(value_node, below)
        return entries


def _scalar(node: yaml.Node, place: str) -> Scalar:
    """Return the value of a scalar. Unlike in YAML 1.1, `3e-4` is a number, 010 is ten and 1:30 is
    a text."""
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
