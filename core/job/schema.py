"""The JSON Schema of the job file, made from the types that the file is parsed into.

Editors use it for completion and checks. It covers each key alone; combinations of keys are checked
when the file is parsed (`oobleck.core.job.file`).
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from oobleck.core.job.checks import Limits
from oobleck.core.job.code import Json
from oobleck.core.job.families import FAMILIES
from oobleck.core.job.file import FILE_KEYS
from oobleck.core.job.model import AnyModel, ModelSpec
from oobleck.core.job.own import OWN_KEYS, OwnModelSpec
from oobleck.core.job.presets import PRESETS
from oobleck.core.job.spec import TRACKERS, JobSpec

Schema = dict[str, Any]

_SCALARS: Mapping[type, str] = {int: "integer", float: "number", str: "string", bool: "boolean"}
_NULL = {"type": "null"}
#: Mapping, or its JSON text.
_MAPPING: Schema = {"type": ["object", "string"]}


def job_schema() -> Schema:
    """Return the schema of a job file, in JSON Schema, draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Oobleck job file",
        **_section(JobSpec),
    }


def _section(kind: type) -> Schema:
    """Return the schema of a mapping with the fields of a dataclass as keys."""
    hints = get_type_hints(kind)
    properties: dict[str, Schema] = {}
    required = []
    for field in dataclasses.fields(kind):
        key = FILE_KEYS.get(field.name, field.name)
        optional = _is_optional(field)
        made = _special(kind, key) or _value(hints[field.name])
        if (limits := getattr(kind, "LIMITS", {}).get(field.name)) is not None:
            made = {**made, **_limits(limits)}
        if isinstance(field.default, str | int | float | bool) and field.default != "":
            made = {**made, "default": _plain(field)}
        is_section = dataclasses.is_dataclass(hints[field.name])
        properties[key] = _or_null(made) if optional and is_section else made
        if not optional:
            required.append(key)
    if kind is ModelSpec:
        properties["preset"] = {"enum": [*PRESETS, None]}
        required = []  # a preset or a config has the numbers
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _limits(limits: Limits) -> Schema:
    """Return the limits as keywords that apply to numbers alone: values of other types satisfy
    them."""
    words = {
        "minimum": limits.at_least,
        "maximum": limits.at_most,
        "exclusiveMinimum": limits.above,
        "exclusiveMaximum": limits.below,
    }
    return {word: limit for word, limit in words.items() if limit is not None}


def _plain(field: "dataclasses.Field[Any]") -> object:
    """Return the field's default as written in the file."""
    return {} if field.default == "{}" else field.default


def _is_optional(field: "dataclasses.Field[Any]") -> bool:
    nothing = dataclasses.MISSING
    return field.default is not nothing or field.default_factory is not nothing


def _special(kind: type, key: str) -> Schema | None:
    """Return the schema of a key that is not determined by its type; None for any other key."""
    match kind.__name__, key:
        case "JobSpec", "track":
            one = {"enum": list(TRACKERS)}
            return {"anyOf": [one, {"type": "array", "items": one, "uniqueItems": True}]}
        case "ModelSpec", "config":
            return {"type": ["object", "string", "null"]}  # its keys, or a config.json
        case "ModelSpec", "kind":
            return {"enum": ["gpt", *FAMILIES, None]}
        case "ResourceSpec", "memory_per_worker":
            return {"type": ["integer", "string", "null"]}  # bytes, or a size such as 64MiB
        case _:
            return None


def _value(hint: Any) -> Schema:
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (option for option in get_args(hint) if option is not type(None))
        return _or_null(_value(inner))
    if hint is Json:
        return _MAPPING
    if hint is AnyModel:
        return _models()
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if get_origin(hint) is tuple:
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type), "hints are types"
        return _section(hint)
    return {"type": _SCALARS[hint]}


def _models() -> Schema:
    """Return the schema of a model; a key that no other model has marks a user's model."""
    own = [{"required": [key]} for key in OWN_KEYS]
    return {"if": {"anyOf": own}, "then": _section(OwnModelSpec), "else": _section(ModelSpec)}


def _or_null(schema: Schema) -> Schema:
    match schema:
        case {"type": str(one)} if schema.keys() == {"type"}:
            return {"type": [one, "null"]}
        case {"enum": list(values)}:
            return {"enum": [*values, None]}
        case _:
            return {"anyOf": [schema, _NULL]}
