"""Bounds how much one sender may have done in a time. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class Budget:
    """A token bucket: `burst` at once, and `per_s` more each second."""

    per_s: float
    burst: float
    _there: float = 0.0
    _at: float | None = None

    def take(self, amount: float, now: float) -> bool:
        """Take that much if it is there; returns whether it was."""
        self._fill(now)
        if self._there < amount:
            return False
        self._there -= amount
        return True

    def owe(self, amount: float, now: float) -> float:
        """Take that much at once; returns after how many seconds it will have been there. Nobody
        owes more than a burst."""
        self._fill(now)
        self._there = max(-self.burst, self._there - amount)
        return max(0.0, -self._there / self.per_s)

    def _fill(self, now: float) -> None:
        if self._at is None:
            self._there = self.burst
        else:
            self._there = min(self.burst, self._there + (now - self._at) * self.per_s)
        self._at = now
