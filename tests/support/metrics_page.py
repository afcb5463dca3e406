"""Lists of metrics in docs/metrics.md.

    cd tests && python -m support.metrics_page

writes them again from the families that master and agents define.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from oobleck.agent import metrics as of_agent
from oobleck.host.metrics import Family
from oobleck.master import metrics as of_master

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
_LISTS = {"master": of_master.FAMILIES, "agents": of_agent.FAMILIES}


def _list(families: Iterable[Family]) -> str:
    """Format a line per family; a name in `_total` is a counter, one without a mark a gauge."""
    lines = []
    for family in families:
        labels = f"{{{','.join(family.labels)}}}" if family.labels else ""
        mark = " (histogram)" if family.kind == "histogram" else ""
        lines.append(f"- `{family.name}{labels}`{mark}: {family.help}")
    return "\n".join(lines)


def with_lists(page: str) -> str:
    """Return the page with each list between its marks written again."""
    for name, families in _LISTS.items():
        begin, end = f"<!-- metrics of the {name} -->\n", "\n<!-- end -->"
        pattern = re.compile(f"({re.escape(begin)}).*?({re.escape(end)})", re.DOTALL)
        lines = _list(families)
        page, found = pattern.subn(lambda m, lines=lines: m[1] + lines + m[2], page)
        assert found == 1, f"the page has no place for the metrics of the {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_lists(PAGE.read_text()))
