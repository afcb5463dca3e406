"""The tables of metrics in docs/operations.md.

    cd tests && python -m support.metrics_table

writes them anew from the families that master and agents define.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from oobleck.agent.metrics import collect as of_agent
from oobleck.host.metrics.families import Family
from oobleck.master.metrics import collect as of_master

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
_TABLES = {"master": of_master.FAMILIES, "agents": of_agent.FAMILIES}


def _table(families: Iterable[Family]) -> str:
    rows = ["| name | kind | labels | |", "|---|---|---|---|"]
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(rows)


def with_tables(page: str) -> str:
    """The page with each table between its marks made anew."""
    for name, families in _TABLES.items():
        begin, end = f"<!-- metrics of the {name} -->\n", "\n<!-- end -->"
        pattern = re.compile(f"({re.escape(begin)}).*?({re.escape(end)})", re.DOTALL)
        table = _table(families)
        page, found = pattern.subn(lambda m, table=table: m[1] + table + m[2], page)
        assert found == 1, f"the page has no place for the metrics of the {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
