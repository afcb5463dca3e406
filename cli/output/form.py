"""Forms of a command's output: for people, or as JSON or YAML. Pure."""

from typing import Literal

from oobleck.cli.output import text

#: - `table`: columns that fit the terminal.
#: - `wide`: all columns.
Form = Literal["table", "wide", "json", "yaml"]


def is_data(form: Form) -> bool:
    """Return whether the form is for programs."""
    return form in ("json", "yaml")


def document(value: object, form: Form) -> str:
    """Format `value`, of JSON's types, as the whole output."""
    return text.dump(value) if form == "json" else _yaml(value).rstrip("\n")


def entry(value: object, form: Form) -> str:
    """Format `value` as one of several: a line of JSON, or a document of YAML."""
    return text.dump_line(value) if form == "json" else f"---\n{_yaml(value)}".rstrip("\n")


def _yaml(value: object) -> str:
    """Format the value as YAML in ASCII, as the JSON is."""
    import yaml

    return yaml.safe_dump(value, sort_keys=False, width=100)
