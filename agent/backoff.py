"""Back-off before a process that keeps ending is started again. Pure: the time is an argument."""

from dataclasses import dataclass

#: A process that lives shorter than this counts as one that ends quickly.
QUICK_S = 10.0
#: Quick ends in a row from which on the next start waits.
FREE_STARTS = 3
LONGEST_S = 30.0


@dataclass(slots=True)
class StartBudget:
    """Back-off of one process: the first starts are free, then the wait doubles from one second to
    half a minute."""

    quick_ends: int = 0
    not_before: float = 0.0

    def ended(self, *, started_at: float, now: float) -> float:
        """Take note of an end; the seconds until the next start."""
        self.quick_ends = self.quick_ends + 1 if now - started_at < QUICK_S else 0
        excess = self.quick_ends - FREE_STARTS
        wait_s = min(LONGEST_S, 2.0**excess) if excess >= 0 else 0.0
        self.not_before = now + wait_s
        return wait_s
