"""A job's steps as lines to draw, in bounded memory however long it trains.

The whole is kept in buckets of equal numbers of steps, which are merged in pairs when there are too
many; the last steps are kept as they are. Pure.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Buckets of the whole. Fewer than half of them are there only at the beginning.
MOST_BUCKETS = 400
#: Steps that are kept as they are.
MOST_RECENT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Point of a curve, for some steps in a row: one, or a bucket."""

    first: int
    last: int
    #: Mean, lowest and highest of those that have one; None: no loss was finite.
    loss: float | None
    low: float | None
    high: float | None
    #: Over the time since the commit before, so that standstills are in it.
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
        """`before`: Unix time of the commit before; None: it is not known."""
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
        # A calendar may be put back.
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
    """Fed with lines of metrics.jsonl in order."""

    def __init__(self) -> None:
        self._buckets: list[_Bucket] = []
        self._recent: deque[_Bucket] = deque(maxlen=MOST_RECENT)
        #: Steps of a bucket.
        self._stride = 1
        #: Seconds of all steps, and when the first of them began.
        self._trained_s = 0.0
        self._since: float | None = None

    @property
    def last_step(self) -> int:
        return self._recent[-1].last if self._recent else 0

    def add(self, record: Mapping[str, Any]) -> None:
        """The next step; one that is told again counts once."""
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
        """Share of the time from the first step to the Unix time `until` that went into steps that
        were kept, as the master's metric of that name; None: there is no step."""
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
