"""The job file: YAML or JSON text to a JobSpec and back.

Owns the file's keys and their checks against the types of `oobleck.core.job.spec`. Every error
is one line with the place and the fix. Paths are kept as written; the reader of the file knows what
they are relative to.
"""

import dataclasses
import difflib
import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from oobleck.core.errors import InvalidJob
from oobleck.core.ids import check_name
from oobleck.core.job.code import Json
from oobleck.core.job.document import Value, override, read_document, read_override
from oobleck.core.job.model import AnyModel, ModelSpec
from oobleck.core.job.model_file import ReadText, expand_model, plain
from oobleck.core.job.own import OWN_KEYS, OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.core.units import parse_bytes

T = TypeVar("T")

#: Keys of byte counts: the file's name has no unit, since the value may carry one.
FILE_KEYS = {"memory_per_worker_bytes": "memory_per_worker"}
_KINDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}


def parse_job(
    text: str,
    *,
    overrides: Sequence[str] = (),
    source: str = "job file",
    read: ReadText | None = None,
) -> JobSpec:
    """Parse a job; raises InvalidJob.

    `overrides` are `key.path=value`, applied in order before the checks. `source` precedes the line
    numbers in messages. `read` returns the text of a file that the job names, such as a model's
    config.json; without it such a job is refused.
    """
    root = read_document(text, source)
    _mapping_of(root, "the job")
    for entry in overrides:
        keys, value = read_override(entry)
        root = override(root, keys, value)
    job = _build(JobSpec, expand_model(root, read), "")
    if job.checkpoint is not None and (why := job.checkpoint.why_untold()):
        raise InvalidJob(f"checkpoint.path: {why}; name another place")
    return job


def format_job(job: JobSpec, *, defaults: bool = True) -> str:
    """Return `job` as normalised JSON that `parse_job` reads back equal. Every key is written, or
    with `defaults` False only the keys that differ, since another release may not know the others.
    """
    tree = msgspec.to_builtins(job)
    if not defaults:
        tree = _without_defaults(job, tree)
    resources = tree.get("resources", {})
    for field, key in FILE_KEYS.items():
        if field in resources:
            resources[key] = resources.pop(field)
    config = tree["model"].pop("config", "")
    if config:
        tree["model"]["config"] = json.loads(config)
    return json.dumps(tree)


def _without_defaults(value: Any, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `tree` that differ from their defaults; `tree` is the dataclass `value` as
    plain data."""
    kept = {}
    for field in dataclasses.fields(value):
        own, default = getattr(value, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is dataclasses.MISSING or own != default:
            part = tree[field.name]
            below = dataclasses.is_dataclass(own)
            kept[field.name] = _without_defaults(own, part) if below else part
    return kept


def _mapping_of(value: Value, what: str) -> Mapping[str, Any]:
    if not isinstance(value.content, Mapping):
        raise InvalidJob(
            f"{value.place}: {what} must be a mapping (key: value lines), not {value.describe()}"
        )
    return value.content


def _build(kind: type[T], value: Value, path: str) -> T:
    """Build a dataclass from a mapping with the same keys."""
    entries = _mapping_of(value, path or "the job")
    hints = get_type_hints(kind)
    fields = {
        FILE_KEYS.get(field.name, field.name): field
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]  # only dataclasses come in
    }
    where = f" in {path}" if path else ""
    arguments: dict[str, Any] = {}
    for key, entry in entries.items():
        if key not in fields:
            hint = _hint(key, kind, fields, path)
            raise InvalidJob(f"{entry.place}: unknown key {key!r}{where}; {hint}")
        if entry.value.content is None and _has_defaults(hints[fields[key].name], fields[key]):
            continue  # an empty section
        below = f"{path}.{key}" if path else key
        arguments[fields[key].name] = _convert(hints[fields[key].name], entry.value, below)
    for key, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and key not in entries:
            kind_name = _KINDS.get(hints[field.name], "a mapping")
            raise InvalidJob(f"{value.place}: missing key '{key}'{where}; add it ({kind_name})")
    try:
        if kind is JobSpec:
            check_name(arguments["name"], "job")
        return kind(**arguments)
    except ValueError as error:
        message = str(error)
        guilty = "name" if message.startswith("job name") else message.partition(":")[0]
        key = FILE_KEYS.get(guilty, guilty)
        place, full = _find(value, key, path)
        if f".{full}".endswith(f".{key}"):  # else the message still names the key
            message = message.removeprefix(f"{guilty}: ")
        raise InvalidJob(f"{place}: {full}: {message}") from error


#: Our keys by other frameworks' names for them.
_OTHER_WORDS = {
    "args": "arguments",
    "kwargs": "arguments",
    "batch_size": "global_batch",
    "dataset": "python",
    "function": "python",
    "learning_rate": "lr",
    "max_grad_norm": "clip",
    "max_steps": "steps",
    "num_workers": "workers",
}
#: Keys that only programs write.
_MADE = ("described",)


def _hint(key: str, kind: type, fields: Iterable[str], path: str) -> str:
    """Return a hint for a key that `kind`, at `path` of the file, does not have."""
    known = [field for field in fields if field not in _MADE]
    # A user's model without python, plugin or architecture is parsed as a ModelSpec.
    possible = [*known, *OWN_KEYS] if kind is ModelSpec else known
    word = _OTHER_WORDS.get(key.lower())
    near = [word] if word in possible else difflib.get_close_matches(key.lower(), possible, n=1)
    if near:
        return f"did you mean '{near[0]}'?"
    if kind is ModelSpec and key in get_type_hints(OwnModelSpec):
        return f"it goes with one of {', '.join(OWN_KEYS)}; add that"
    places = sorted(_places(JobSpec, key, ""))
    if places := [one for one in places if one.startswith(f"{path}.")] or places:
        return f"it goes into {' or '.join(places)}"
    more = "; put arguments of your function into arguments" if kind is OwnModelSpec else ""
    return f"known keys: {', '.join(known)}{more}"


def _places(kind: type, key: str, path: str) -> Iterator[str]:
    """Yield the sections below `kind` that have the key."""
    for field, hint in get_type_hints(kind).items():
        for section in get_args(hint) or (hint,):
            if isinstance(section, type) and dataclasses.is_dataclass(section):
                below = f"{path}.{field}".lstrip(".")
                if any(one.name == key for one in dataclasses.fields(section)):
                    yield below
                yield from _places(section, key, below)


def _has_defaults(hint: Any, field: "dataclasses.Field[Any]") -> bool:
    """Return whether the field is a section that may be omitted."""
    section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
    return section and field.default_factory is not dataclasses.MISSING


def _find(value: Value, key: str, path: str) -> tuple[str, str]:
    """Return the place and the path of `key` below `value`, or those of `value` itself if it has no
    such key."""
    if isinstance(value.content, Mapping):
        if key in value.content:
            return value.content[key].place, f"{path}.{key}" if path else key
        for name, entry in value.content.items():
            found = _find(entry.value, key, f"{path}.{name}" if path else name)
            if found[1].endswith(f".{key}"):
                return found
    return value.place, path or "job"


def _convert(hint: Any, value: Value, path: str) -> object:
    if path == "resources.memory_per_worker" and isinstance(value.content, str):
        try:
            return parse_bytes(value.content)
        except ValueError as error:
            raise InvalidJob(f"{value.place}: {path}: {error}") from error
    if get_origin(hint) in (Union, types.UnionType):
        if value.content is None:
            return None
        (hint,) = (option for option in get_args(hint) if option is not type(None))
    if hint is Json:
        return _json(value, path)
    if hint is AnyModel:
        own = isinstance(value.content, Mapping) and any(key in value.content for key in OWN_KEYS)
        return _build(OwnModelSpec if own else ModelSpec, value, path)
    if get_origin(hint) is Literal:
        return _choose(get_args(hint), value, path)
    if get_origin(hint) is tuple:
        return _texts(value, path)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _build(hint, value, path)
    return _plain(hint, value, path)


def _plain(kind: type, value: Value, path: str) -> object:
    content = value.content
    if kind is float and type(content) is int:
        try:
            return float(content)
        except OverflowError as error:
            raise InvalidJob(f"{value.place}: {path} is too large") from error
    if type(content) is not kind:
        hint = "; remove the quotes" if kind in (int, float) and _is_number(content) else ""
        raise InvalidJob(
            f"{value.place}: {path} must be {_KINDS[kind]}, not {value.describe()}{hint}"
        )
    if kind is int and not -(2**63) <= content < 2**63:  # type: ignore[operator]  # it is an int
        raise InvalidJob(f"{value.place}: {path} is too large")
    return content


def _is_number(content: object) -> bool:
    return isinstance(content, str) and content.strip().isdigit()


def _choose(choices: tuple[Any, ...], value: Value, path: str) -> object:
    if value.content in choices:
        return value.content
    near = difflib.get_close_matches(str(value.content).lower(), choices, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    if path == "training.optimizer.name":
        hint = "; for another one name its class, as python: torch.optim:Adam, instead of name"
    raise InvalidJob(
        f"{value.place}: {path} must be {' or '.join(choices)}, not {value.describe()}{hint}"
    )


def _json(value: Value, path: str) -> Json:
    """Return a mapping as JSON text; the file may also give that text itself."""
    content = value.content
    if isinstance(content, str):
        try:
            if isinstance(json.loads(content or "{}"), dict):
                return Json(content)
        except (ValueError, RecursionError):
            pass
    if not isinstance(content, Mapping):
        raise InvalidJob(f"{value.place}: {path} must be a mapping, not {value.describe()}")
    return Json(json.dumps(plain(value)))


def _texts(value: Value, path: str) -> tuple[str, ...]:
    """Return a list of texts; a single text counts as a list of one."""
    if isinstance(value.content, str):
        return (value.content,)
    if not isinstance(value.content, tuple):
        raise InvalidJob(f"{value.place}: {path} must be a list of texts, not {value.describe()}")
    items = []
    for number, item in enumerate(value.content):
        if not isinstance(item.content, str):
            raise InvalidJob(
                f"{item.place}: {path}[{number}] must be a text, not {item.describe()}"
            )
        items.append(item.content)
    return tuple(items)
