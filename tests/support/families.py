"""Models of the families, from their configs."""

from dataclasses import asdict

from oobleck.core.job.families import FAMILIES, Kind
from oobleck.core.job.family import Config, encode_config
from oobleck.core.job.model import ModelSpec


def family_model(
    kind: Kind, config: Config, *, sequence_length: int, weights: str | None = None
) -> ModelSpec:
    """Return the model of a config, as transformers would build it; raises ConfigError."""
    family = FAMILIES[kind]
    complete = family.complete(config)
    return ModelSpec(
        kind=kind,
        config=encode_config(complete),
        sequence_length=sequence_length,
        weights=weights,
        **asdict(family.numbers(complete)),
    )
