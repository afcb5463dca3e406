"""The job file: YAML or JSON text to a JobSpec and back.

Owns the file's keys, and the errors about wrong ones. msgspec reads the types of
`oobleck.core.job.spec` with their limits. Its errors become one line with the place and the fix.
Paths are not resolved: the caller knows what they are relative to.
"""

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from oobleck.core.errors import InvalidJob
from oobleck.core.job.checks import MOST
from oobleck.core.job.document import Document, Path, describe, read_document
from oobleck.core.job.families import FAMILIES
from oobleck.core.job.model import OWN_KEYS, ModelSpec, OwnModelSpec
from oobleck.core.job.model_file import PRESETS, ReadText, expand_model
from oobleck.core.job.spec import JobSpec
from oobleck.core.units import parse_bytes

T = TypeVar("T")

#: Keys of byte counts: the file's name has no unit, since the value may carry one.
FILE_KEYS = {"memory_per_worker_bytes": "memory_per_worker"}
_MAPPING = "a mapping (key: value lines)"
#: A step of the path in msgspec's errors.
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_LACKING = re.compile(r"Object missing required field `(\w+)`")


def parse_job(
    text: str,
    *,
    overrides: Sequence[str] = (),
    source: str = "job file",
    read: ReadText | None = None,
) -> JobSpec:
    """Return the job that `text` describes; raises InvalidJob.

    `overrides` are `key.path=value`, applied in order before the checks. `source` precedes the line
    numbers in messages. `read` returns the text of a file that the job names, such as a model's
    config.json; without it such a job is refused.
    """
    file = read_document(text, source)
    for entry in overrides:
        file.override(entry)
    expand_model(file, read)
    job = _read(JobSpec, file, file.tree, ())
    if job.checkpoint is not None and (why := job.checkpoint.why_not_reportable()):
        place = file.place(("checkpoint", "path"))
        raise InvalidJob(f"{place}: checkpoint.path: {why}; name another place")
    return job


def format_job(job: JobSpec, *, defaults: bool = True) -> str:
    """Return `job` as normalised JSON that `parse_job` reads back equal.

    `defaults`: write every key. Otherwise leave out keys with their default value, which another
    release may not know.
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


@cache
def fields_of(kind: type) -> Mapping[str, inspect.Field]:
    """Return the fields of a section by their keys in the file."""
    found = cast(inspect.DataclassType, inspect.type_info(kind)).fields
    return {FILE_KEYS.get(field.name, field.name): field for field in found}


def inner(kind: inspect.Type) -> inspect.Type:
    """Return the type of a value that may also be null, if there is only one."""
    if not isinstance(kind, inspect.UnionType):
        return kind
    kinds = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
    return kinds[0] if len(kinds) == 1 else kind


def is_section(field: inspect.Field) -> bool:
    """Return whether the field is a section that may be left out, or null, for its defaults."""
    return isinstance(field.type, inspect.DataclassType) and not field.required


def _read(kind: type[T], file: Document, content: object, path: Path) -> T:
    """Build a section of the file, and all below it."""
    tree = _tree(kind, file, content, path)
    try:
        return msgspec.convert(tree, kind, dec_hook=lambda _, made: made)
    except msgspec.ValidationError as error:
        raise _refusal(error, kind, file, content, path) from error


def _dotted(path: Path) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def _inside(path: Path) -> str:
    return f" in {_dotted(path)}" if path else ""


def _mistaken(file: Document, path: Path, wanted: str, content: object) -> InvalidJob:
    name = _dotted(path) or "the job"
    return InvalidJob(f"{file.place(path)}: {name} must be {wanted}, not {describe(content)}")


def _tree(kind: type, file: Document, content: object, path: Path) -> dict[str, object]:
    """Return a section as msgspec reads it. Raises InvalidJob at an unknown key."""
    if not isinstance(content, dict):
        raise _mistaken(file, path, _MAPPING, content)
    fields, tree = fields_of(kind), {}
    for key, value in content.items():
        below = (*path, key)
        if key not in fields:
            hint = _hint(key, kind, fields, _dotted(path))
            what = f"unknown key {key!r}{_inside(path)}"
            raise InvalidJob(f"{file.place(below)}: {what}; {hint}")
        field = fields[key]
        if value is not None or not is_section(field):
            tree[field.name] = _part(field, file, value, below)
    return tree


def _part(field: inspect.Field, file: Document, content: object, path: Path) -> object:
    """Return the value of a key as msgspec reads it; expands the short forms that the file
    allows."""
    match inner(field.type):
        case inspect.CustomType():
            own = isinstance(content, dict) and any(key in content for key in OWN_KEYS)
            return _read(OwnModelSpec if own else ModelSpec, file, content, path)
        case inspect.DataclassType(cls=kind) if content is not None:
            return _tree(kind, file, content, path)
        case inspect.VarTupleType() if isinstance(content, str):
            return (content,)
        case inspect.Metadata():
            return _json(file, content, path)
        case _:
            pass
    if field.name in FILE_KEYS and isinstance(content, str):
        try:
            return parse_bytes(content)
        except ValueError as error:
            raise InvalidJob(f"{file.place(path)}: {_dotted(path)}: {error}") from error
    return content


def _json(file: Document, content: object, path: Path) -> str:
    """Return a mapping, or the JSON text of one, as JSON text."""
    if isinstance(content, str):
        try:
            if isinstance(json.loads(content or "{}"), dict):
                return content
        except (ValueError, RecursionError):
            pass
    if not isinstance(content, dict):
        raise _mistaken(file, path, "a mapping", content)
    return json.dumps(content)


def _refusal(
    error: msgspec.ValidationError, kind: type, file: Document, content: Any, path: Path
) -> InvalidJob:
    """Return msgspec's error about a section as one line with the place in the file and the fix."""
    text = str(error)
    own = str(error.__cause__) if error.__cause__ is not None else None
    at = text.rpartition(" - at `$")[2].removesuffix("`") if text != own else ""
    wanted: inspect.Type = inspect.type_info(kind)
    for name, number in _STEP.findall(at):
        wanted = inner(wanted)
        if isinstance(wanted, inspect.DataclassType):
            key = FILE_KEYS.get(name, name)
            wanted, path = fields_of(wanted.cls)[key].type, (*path, key)
            content = content.get(key) if isinstance(content, dict) else None
        elif isinstance(wanted, inspect.VarTupleType) and isinstance(content, list):
            wanted, path, content = wanted.item_type, (*path, int(number)), content[int(number)]
    if own is not None:
        return _named(own, file, content, path)
    wanted = inner(wanted)
    if (lacking := _LACKING.match(text)) and isinstance(wanted, inspect.DataclassType):
        key = FILE_KEYS.get(lacking[1], lacking[1])
        added = _expected(fields_of(wanted.cls)[key].type)
        where = f"missing key '{key}'{_inside(path)}"
        return InvalidJob(f"{file.place(path)}: {where}; add it ({added})")
    refusal = _mistaken(file, path, _expected(wanted), content)
    return InvalidJob(f"{refusal}{_fix(wanted, content, _dotted(path))}")


def _named(message: str, file: Document, content: object, path: Path) -> InvalidJob:
    """Place the error of a section's own checks (`__post_init__`) at the key that begins its
    message."""
    guilty = "name" if message.startswith("job name") else message.partition(":")[0]
    key = FILE_KEYS.get(guilty, guilty)
    path = _find(content, key, path) or path
    if path[-1:] == (key,):  # else the message still names the key
        message = message.removeprefix(f"{guilty}: ")
    return InvalidJob(f"{file.place(path)}: {_dotted(path) or 'job'}: {message}")


def _find(content: object, key: str, path: Path) -> Path | None:
    """Return the path of `key` below a value; None: it is not there."""
    if not isinstance(content, dict):
        return None
    if key in content:
        return (*path, key)
    below = (_find(value, key, (*path, name)) for name, value in content.items())
    return next(filter(None, below), None)


def _expected(kind: inspect.Type) -> str:
    """Describe the values of a type, for an error message."""
    match inner(kind):
        case inspect.IntType() as number:
            return _within("an integer", number)
        case inspect.FloatType() as number:
            return _within("a number", number)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "a text"
        case inspect.LiteralType(values=values):
            return " or ".join(map(str, values))
        case inspect.UnionType(types=types):
            return " or ".join(map(_expected, types))
        case inspect.VarTupleType(item_type=inspect.StrType()):
            return "a list of texts"
        case inspect.VarTupleType(item_type=item):
            return f"a list of {_expected(item)}"
        case _:
            return _MAPPING


def _within(what: str, number: inspect.IntType | inspect.FloatType) -> str:
    match number:
        case inspect.IntType(ge=least, le=int(most)) if most != MOST:
            return f"{what} from {least} to {most}"
        case inspect.FloatType(ge=0, lt=int(end)):
            return f"{what} from 0 to below {end}"
        case inspect.FloatType(gt=0, lt=int(end)):
            return f"{what} between 0 and {end}"
        case _ if number.ge is not None:
            return f"{what} of at least {number.ge}"
        case _:
            return what if number.gt is None else f"{what} above {number.gt}"


def _fix(wanted: inspect.Type, content: object, path: str) -> str:
    """Return the hint that ends an error about a value; empty: there is none."""
    wanted = inner(wanted)
    if path == "training.optimizer.name":
        return "; for another one name its class, as python: torch.optim:Adam, instead of name"
    if isinstance(wanted, inspect.LiteralType):
        near = difflib.get_close_matches(str(content).lower(), map(str, wanted.values), n=1)
        return f"; did you mean '{near[0]}'?" if near else ""
    if isinstance(content, str) and isinstance(wanted, inspect.IntType | inspect.FloatType):
        return "; remove the quotes" if content.strip().isdigit() else ""
    if isinstance(content, int) and abs(content) > MOST:
        return ", which is too large"
    return ""


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
#: Keys that programs add, never users; hints leave them out.
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
    if kind is ModelSpec and key in fields_of(OwnModelSpec):
        return f"it goes with one of {', '.join(OWN_KEYS)}; add that"
    places = sorted(_places(JobSpec, key, ""))
    if places := [place for place in places if place.startswith(f"{path}.")] or places:
        return f"it goes into {' or '.join(places)}"
    more = "; put arguments of your function into arguments" if kind is OwnModelSpec else ""
    return f"known keys: {', '.join(known)}{more}"


def _places(kind: type, key: str, path: str) -> Iterator[str]:
    """Yield the sections below `kind` that have the key."""
    for name, field in fields_of(kind).items():
        section = inner(field.type)
        if isinstance(section, inspect.DataclassType):
            below = f"{path}.{name}".lstrip(".")
            if key in fields_of(section.cls):
                yield below
            yield from _places(section.cls, key, below)


# ---- the JSON Schema of the job file, for editors; it covers each key alone, and no combinations


Schema = dict[str, Any]

_REF = "#/$defs/{name}"
_NULL = {"type": "null"}
#: Keys that are not read by their types alone.
_SPECIAL: dict[tuple[type, str], Schema] = {
    (ModelSpec, "config"): {"type": ["object", "string", "null"]},  # its keys, or a config.json
    (ModelSpec, "kind"): {"enum": ["gpt", *FAMILIES, None], "default": "gpt"},
}


def job_schema() -> Schema:
    """Return the schema of a job file, in JSON Schema, draft 2020-12."""
    kinds = (JobSpec, ModelSpec, OwnModelSpec)
    (top, *_), sections = msgspec.json.schema_components(
        kinds, schema_hook=_models, ref_template=_REF
    )
    for kind in set[type]().union(*map(_sections, kinds)):
        sections[kind.__name__] = _section(kind, sections[kind.__name__])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Oobleck job file",
        **top,
        "$defs": sections,
    }


def _models(_: type) -> Schema:
    """Return the schema of a model; a key that only users' models have selects the schema."""
    own = [{"required": [key]} for key in OWN_KEYS]
    then, otherwise = ({"$ref": _REF.format(name=k.__name__)} for k in (OwnModelSpec, ModelSpec))
    return {"if": {"anyOf": own}, "then": then, "else": otherwise}


def _sections(kind: type) -> set[type]:
    below = (inner(field.type) for field in fields_of(kind).values())
    found = [_sections(one.cls) for one in below if isinstance(one, inspect.DataclassType)]
    return {kind}.union(*found)


def _section(kind: type, made: Schema) -> Schema:
    """Return msgspec's schema of a section, changed for what the file takes."""
    keys = {
        key: _SPECIAL.get((kind, key)) or _value(field, made["properties"][field.name])
        for key, field in fields_of(kind).items()
    }
    if kind is ModelSpec:
        keys["preset"] = {"enum": [*PRESETS, None]}
    required = [] if kind is ModelSpec else made["required"]  # a preset or a config has the numbers
    schema = {"type": "object", "properties": keys, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _value(field: inspect.Field, schema: Schema) -> Schema:
    default: Schema = {}
    if isinstance(field.default, str | int | float | bool) and field.default != "":
        default = {"default": {} if field.default == "{}" else field.default}
    schema = {word: value for word, value in schema.items() if word != "default"}
    match inner(field.type):
        case inspect.VarTupleType(item_type=item):
            several = {**schema, "uniqueItems": isinstance(item, inspect.LiteralType)}
            schema = {"anyOf": [schema["items"], several]}
        case inspect.Metadata():  # a mapping, or its JSON text
            schema = {"type": ["object", "string"]}
        case _ if field.name == "memory_per_worker_bytes":  # or a size such as 64MiB
            schema = {"anyOf": [*schema["anyOf"], {"type": "string"}]}
        case _ if is_section(field):
            schema = {"anyOf": [schema, _NULL]}
        case _:
            pass
    return {**schema, **default}
