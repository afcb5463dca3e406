"""Findings of a host's checks: how bad each is, and how to fix it."""

from collections.abc import Mapping
from typing import Literal

import msgspec

Level = Literal["pass", "slow", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    #: Name of what was looked at.
    check: str
    #: slow: it works, and takes longer than it should; warn: it may not, later; fail: it does not.
    level: Level
    what: str
    #: Empty: there is nothing to mend.
    fix: str = ""
    #: Where; empty: on this host.
    node: str = ""
    #: The node at the other end of what lies between two; empty: it is about one.
    other: str = ""
    #: What was measured, by names that say the unit.
    figures: Mapping[str, float] = {}

    def __str__(self) -> str:
        where = f"{self.node} - {self.other}" if self.other else self.node
        return (
            f"{self.level.upper():4}  {where}{': ' if where else ''}{self.check}: {self.what}"
            + (f"; {self.fix}" if self.fix else "")
        )
