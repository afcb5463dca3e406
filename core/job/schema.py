"""The JSON Schema of the job file, made by msgspec from the types that the file is read into.

Editors use it for completion and checks. It covers each key alone; combinations of keys are checked
when the file is parsed (`oobleck.core.job.file`).
"""

from typing import Any

import msgspec
from msgspec import inspect

from oobleck.core.job.families import FAMILIES
from oobleck.core.job.file import fields_of, inner, is_section
from oobleck.core.job.model import OWN_KEYS, ModelSpec, OwnModelSpec
from oobleck.core.job.presets import PRESETS
from oobleck.core.job.spec import JobSpec

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
    """Return the schema of a model; a user's model is told by a key that no other has."""
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
