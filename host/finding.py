"""What a check of a host found: how bad it is, and what mends it."""

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

    def __str__(self) -> str:
        return f"{self.level.upper():4}  {self.check}: {self.what}" + (
            f"; {self.fix}" if self.fix else ""
        )
