"""Metrics as data: their names, their values at one moment, and the text for Prometheus.

Names follow Prometheus' conventions: base units at the end, `_total` for counters. Must not know
the owner or the reader of metrics.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from prometheus_client import Metric

Kind = Literal["gauge", "counter", "histogram"]
_UNITS = ("seconds", "bytes", "ratio")
#: Upper bounds of buckets, in seconds: for work of a processor, for waits for a disk, a process or
#: a caller, and for work of many hosts.
SHORT_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
USUAL_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    60.0,
    600.0,
)
LONG_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(frozen=True, slots=True)
class Family:
    """Metric family: all series of one name."""

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind == "counter") != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: counters alone end with _total")

    @property
    def base(self) -> str:
        """Name in OpenMetrics."""
        return self.name.removesuffix("_total")

    @property
    def unit(self) -> str:
        """Unit in OpenMetrics; empty for a family that has none, such as a count."""
        last = self.base.rpartition("_")[2]
        return last if last in _UNITS else ""


class Distribution(NamedTuple):
    """Histogram of durations: a count per bucket between bounds, one more above the last bound, and
    the sum of all in seconds."""

    bounds_s: Sequence[float]
    counts: Sequence[int]
    sum_s: float


class Durations:
    """Counter of durations by their length."""

    def __init__(self, bounds_s: Sequence[float] = USUAL_S) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def read(self) -> Distribution:
        """Return the current distribution."""
        return Distribution(self._bounds_s, tuple(self._counts), self._sum_s)


#: By the values of the labels, a tuple of texts.
Values = Mapping[Any, float | Distribution]


class Reading(NamedTuple):
    """Values of a family at one moment."""

    family: Family
    values: Values


def families_of(*modules: ModuleType) -> tuple[Family, ...]:
    """Return all families that the modules define, in order. Raises ValueError if two have the same
    name in OpenMetrics, which ignores `_total`."""
    values = (value for module in modules for value in vars(module).values())
    families = tuple(value for value in values if isinstance(value, Family))
    twice = [name for name, n in Counter(family.base for family in families).items() if n > 1]
    if twice:
        raise ValueError(f"more than one family is called {twice[0]} in OpenMetrics; rename one")
    return families


def single(family: Family, value: float | Distribution) -> Reading:
    """Return the reading of a family without labels."""
    return Reading(family, {(): value})


def content_type(*, openmetrics: bool) -> str:
    """Return the content type of a page."""
    if openmetrics:
        return "application/openmetrics-text; version=1.0.0; charset=utf-8"
    return "text/plain; version=0.0.4; charset=utf-8"


def render(readings: Iterable[Reading], *, openmetrics: bool) -> bytes:
    """Render the page, with the kernel's metrics of this process. OpenMetrics, which newer readers
    request, adds units. Slow: not for an event loop that others wait for."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.openmetrics import exposition
    from prometheus_client.process_collector import ProcessCollector

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Read(readings))
    ProcessCollector(registry=registry)
    encode: Callable[[CollectorRegistry], bytes] = (
        exposition.generate_latest if openmetrics else generate_latest
    )
    return encode(registry)


class _Read:
    """Collector for the Prometheus library."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        self._readings = readings

    def collect(self) -> "Iterator[Metric]":
        return map(_metric, self._readings)


def _metric(reading: Reading) -> "Metric":
    from prometheus_client import Metric

    family = reading.family
    metric = Metric(family.base, family.help, family.kind, family.unit)
    for labels, value in reading.values.items():
        named = dict(zip(family.labels, labels, strict=True))
        if isinstance(value, Distribution):
            _add_buckets(metric, named, value)
        else:
            metric.add_sample(family.name, named, value)
    return metric


def _add_buckets(metric: "Metric", labels: dict[str, str], value: Distribution) -> None:
    total = 0
    for bound, count in zip((*map(str, value.bounds_s), "+Inf"), value.counts, strict=True):
        total += count
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, total)
    metric.add_sample(f"{metric.name}_count", labels, total)
    metric.add_sample(f"{metric.name}_sum", labels, value.sum_s)
