"""Findings of a host's checks: severity and fix."""

from collections.abc import Mapping
from typing import Literal

import msgspec

Level = Literal["pass", "slow", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    #: Name of the check.
    check: str
    #: slow: it works, but slowly; warn: it may fail later; fail: it does not work.
    level: Level
    what: str
    #: Empty: there is nothing to fix.
    fix: str = ""
    #: Node of the finding; empty: this host.
    node: str = ""
    #: Other node of a finding between two; empty: it is about one.
    other: str = ""
    #: Measurements, by names with their unit.
    figures: Mapping[str, float] = {}

    def __str__(self) -> str:
        where = f"{self.node} - {self.other}" if self.other else self.node
        return (
            f"{self.level.upper():4}  {where}{': ' if where else ''}{self.check}: {self.what}"
            + (f"; {self.fix}" if self.fix else "")
        )
