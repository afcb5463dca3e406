"""Type of a model family: a table of keys, and the numbers that follow from their values.

Must not know any family.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from oobleck.core.job.families.counts import Counts
from oobleck.core.job.families.keys import NO_EFFECT, Config, ConfigError, Key

Objective = Literal["causal", "masked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Numbers of a model that planning and data need, under the names of `ModelSpec`."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    tied: bool
    #: Largest dropout of the family's keys.
    dropout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Model family: a table of keys, and the numbers that follow from their values."""

    kind: str
    #: Class in transformers.
    architecture: str
    objective: Objective
    keys: Mapping[str, Key]
    #: Other names of keys that transformers accepts.
    aliases: Mapping[str, str]
    #: Keys of which only one value is supported.
    fixed: Mapping[str, Any]
    #: `ModelSpec`'s names to keys; `positions` is the largest sequence length.
    names: Mapping[str, str]
    dropouts: tuple[str, ...]
    #: Raises ConfigError where the values of a complete config contradict each other.
    check: Callable[[Config], None]
    #: Called with a complete config and the sequence length.
    count: Callable[[Config, int], Counts]
    #: Name in transformers of the list of blocks.
    blocks: str
    #: Name in transformers of a parameter of the embedding (True) or of the head. Called with our
    #: name, and whether the head shares the embedding's weight.
    outside: Callable[[bool, str, bool], str]

    @property
    def base_prefix(self) -> str:
        """Prefix that names in a base model's checkpoint leave out."""
        return self.blocks.partition(".")[0] + "."

    def foreign_name(self, layer: int, name: str, *, tied: bool) -> str:
        """Return transformers' name of parameter `name` of `layer`."""
        inner = name.removeprefix("block.")
        if inner != name:
            return f"{self.blocks}.{layer - 1}.{inner}"
        return self.outside(layer == 0, name, tied)

    def native(self, config: Config) -> dict[str, Any]:
        """Return only the keys that matter, under their own names and checked one by one.

        Raises ConfigError for a key that is unknown, given twice, or of a wrong value.
        """
        chosen: dict[str, Any] = {}
        for name, value in config.items():
            if name == "model_type":
                self._check_type(value)
                continue
            if name in self.fixed:
                if value not in (None, self.fixed[name]):
                    raise ConfigError(
                        name,
                        f"{value!r} is not supported; remove the key or set {self.fixed[name]!r}",
                    )
                continue
            key = self.aliases.get(name, name)
            if key not in self.keys:
                if name not in NO_EFFECT:
                    raise ConfigError(name, f"{self.kind} has no such key; {self._near(name)}")
                continue
            checked = self.keys[key].check(name, value)
            if chosen.setdefault(key, checked) != checked:
                raise ConfigError(
                    name, f"{value} here and {chosen[key]} under {key}'s other name; remove one"
                )
        return chosen

    def complete(self, config: Config) -> dict[str, Any]:
        """Return `config` with every key of the family, checked; raises ConfigError."""
        chosen = self.native(config)
        full = {name: chosen.get(name, key.default) for name, key in self.keys.items()}
        numbers = self.numbers(full)
        if numbers.hidden % numbers.heads:
            raise ConfigError(
                self.names["heads"],
                f"{numbers.heads} does not divide {self.names['hidden']} ({numbers.hidden}); "
                "choose a divisor of it",
            )
        for name in self.dropouts:
            if not full[name] < 1.0:
                raise ConfigError(name, f"{full[name]} is not in [0, 1)")
        self.check(full)
        return full

    def numbers(self, config: Config) -> Numbers:
        """Read the numbers from a complete config."""
        return Numbers(
            layers=config[self.names["layers"]],
            hidden=config[self.names["hidden"]],
            heads=config[self.names["heads"]],
            vocabulary=config[self.names["vocabulary"]],
            tied=config[self.names["tied"]],
            dropout=max(config[name] for name in self.dropouts),
        )

    def positions(self, config: Config) -> int:
        """Return the largest sequence length, from a complete config."""
        positions: int = config[self.names["positions"]]
        return positions

    def _check_type(self, model_type: object) -> None:
        if model_type != self.kind:
            raise ConfigError(
                "model_type", f"{model_type!r} is not the job's kind {self.kind}; correct either"
            )

    def _near(self, name: str) -> str:
        known = [*self.keys, *self.aliases]
        near = difflib.get_close_matches(name, known, n=1)
        return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(self.keys)}"
