"""Curves of a job's steps, in bounded memory however long it trains.

The whole is kept in buckets of equal numbers of steps, which are merged in pairs when they become
too many. The last steps are kept individually. Pure.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Most buckets of the whole. There are fewer than half only at the beginning.
MOST_BUCKETS = 400
#: Most steps kept individually.
MOST_RECENT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Point of a curve, for consecutive steps: one, or a bucket."""

    first: int
    last: int
    #: Mean, lowest and highest finite loss; None: no loss was finite.
    loss: float | None
    low: float | None
    high: float | None
    #: Over the time since the previous commit, so that standstills count.
    tokens_per_s: float
    #: Unix time of the last commit.
    time: float
    generation: int


class _Bucket:
    __slots__ = (
        "began",
        "finite",
        "first",
        "generation",
        "high",
        "last",
        "losses",
        "low",
        "s",
        "time",
        "tokens",
    )

    def __init__(self, record: Mapping[str, Any], before: float | None) -> None:
        """Make a bucket of one step. `before`: Unix time of the previous commit; None: unknown."""
        self.first = self.last = int(record["step"])
        loss = record.get("loss")
        self.finite = int(loss is not None)
        self.losses = self.low = self.high = 0.0 if loss is None else float(loss)
        self.tokens = int(record.get("tokens", 0))
        self.s = float(record.get("step_seconds", 0.0))
        self.time = float(record.get("time", 0.0))
        self.generation = int(record.get("generation", 0))
        self.began = self.time - self.s if before is None else before

    def merge(self, later: "_Bucket") -> None:
        self.last, self.time, self.generation = later.last, later.time, later.generation
        if later.finite:
            self.low = min(self.low, later.low) if self.finite else later.low
            self.high = max(self.high, later.high) if self.finite else later.high
            self.losses += later.losses
            self.finite += later.finite
        self.tokens += later.tokens
        self.s += later.s

    def point(self) -> Point:
        known = self.finite > 0
        # The clock may have been set back.
        span_s = self.time - self.began if self.time > self.began else self.s
        return Point(
            first=self.first,
            last=self.last,
            loss=self.losses / self.finite if known else None,
            low=self.low if known else None,
            high=self.high if known else None,
            tokens_per_s=self.tokens / span_s if span_s > 0 else 0.0,
            time=self.time,
            generation=self.generation,
        )


class Series:
    """Series of steps, fed with lines of metrics.jsonl in order."""

    def __init__(self) -> None:
        self._buckets: list[_Bucket] = []
        self._recent: deque[_Bucket] = deque(maxlen=MOST_RECENT)
        #: Steps per bucket.
        self._stride = 1
        #: Seconds of all steps, and when the first of them began.
        self._trained_s = 0.0
        self._since: float | None = None

    @property
    def last_step(self) -> int:
        return self._recent[-1].last if self._recent else 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the next step; a repeated one counts once."""
        before = self._recent[-1].time if self._recent else None
        step = _Bucket(record, before)
        if step.last <= self.last_step:
            return
        if self._since is None:
            self._since = step.time - step.s
        self._trained_s += step.s
        self._recent.append(step)
        newest = self._buckets[-1] if self._buckets else None
        if newest is not None and step.last // self._stride == newest.first // self._stride:
            newest.merge(step)
        else:
            self._buckets.append(_Bucket(record, before))
        if len(self._buckets) > MOST_BUCKETS:
            self._halve()

    def whole(self) -> Sequence[Point]:
        return [bucket.point() for bucket in self._buckets]

    def recent(self) -> Sequence[Point]:
        return [step.point() for step in self._recent]

    def goodput(self, until: float) -> float | None:
        """Return the share of time until `until` (Unix time) spent in steps that were kept. It
        equals the master's metric of that name. None: there is no step."""
        if self._since is None or until <= self._since:
            return None
        return min(1.0, self._trained_s / (until - self._since))

    def _halve(self) -> None:
        self._stride *= 2
        merged: list[_Bucket] = []
        for bucket in self._buckets:
            if merged and merged[-1].first // self._stride == bucket.first // self._stride:
                merged[-1].merge(bucket)
            else:
                merged.append(bucket)
        self._buckets = merged
