"""The metrics that a daemon serves, as Prometheus would read them."""

import re
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from oobleck.host.metrics import Family

_SERVED = re.compile(r"metrics are served address=(\S+)")


class Scraped:
    def __init__(self, address: str) -> None:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=240) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
        #: Also of those without a value.
        self.names = {f"{f.name}_total" if f.type == "counter" else f.name for f in families}
        self._values = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    def __call__(self, family: Family, end: str = "", **labels: str) -> float:
        """0: there is none."""
        key = family.name + end, tuple(sorted(labels.items()))
        return self._values.get(key, 0.0)


def address_of(log: Path) -> str:
    """Where the daemon that started last of those with this log serves them."""
    return _SERVED.findall(log.read_text())[-1]
