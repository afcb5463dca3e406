"""Values of a job's records for other programs: numbers by name, and a line of text. Pure."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from oobleck.cli.output.events import sentence

#: Keys that identify an evaluation; they are not results.
_OF_NO_INTEREST = ("step", "time", "generation", "samples", "seconds")


def of_step(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the step's numbers by name, without those that are not finite."""
    found = {
        "train/loss": record["loss"],
        "train/grad_norm": record["grad_norm"],
        "train/tokens": record["tokens"],
        "train/step_seconds": record["step_seconds"],
        "train/generation": record["generation"],
        "train/skipped_steps": record.get("skipped_steps", 0),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def of_evaluation(record: Mapping[str, Any]) -> dict[str, float]:
    results = {key: value for key, value in record.items() if key not in _OF_NO_INTEREST}
    return dict(_numbers("evaluation", results))


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        match value:
            case Mapping():
                yield from _numbers(f"{prefix}/{key}", value)
            case int() | float() if math.isfinite(value):
                yield f"{prefix}/{key}", float(value)
            case _:
                pass  # not a number, so nothing to draw


def of_event(record: Mapping[str, Any]) -> str:
    """Format an event as a line that begins with its number among the job's events."""
    return f"{record['id']}: {sentence(dict(record))}"
