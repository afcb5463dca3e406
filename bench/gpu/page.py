"""The table of docs/cuda.md that says what is claimed of each check, and what was seen on a GPU."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.support.daemons import CHECKOUT
from oobleck.core.orders import Finding

PAGE = Path(CHECKOUT) / "docs" / "cuda.md"
HEAD = "| check | claimed | seen on a GPU |"
NOT_SEEN = "not seen"
#: Begins the line below the table that names the machine.
_SEEN_ON = "Seen on "
_LEVELS = ("pass", "slow", "warn", "fail")


def rows(page: str) -> list[list[str]]:
    """Return the cells of each row."""
    return [_cells(line) for line in _table(page)]


def filled(page: str, findings: Sequence[Finding]) -> str:
    """Return the page with what was seen. Rows of other checks stay."""
    seen = {name: _said(name, findings) for name in {finding.check for finding in findings}}
    for line in _table(page):
        name, claimed, _ = _cells(line)
        if name in seen:
            page = page.replace(line, f"| {name} | {claimed} | {seen[name]} |")
    machine = next((each.what for each in findings if each.check == "machine"), "")
    lines = page.splitlines(keepends=True)
    if machine:
        lines = [f"{_SEEN_ON}{machine}.\n" if _names_machine(line) else line for line in lines]
    return "".join(lines)


def _names_machine(line: str) -> bool:
    return line.startswith(_SEEN_ON)


def _said(name: str, findings: Iterable[Finding]) -> str:
    """Return the words of the worst finding of a check, and the number of all."""
    found = [finding for finding in findings if finding.check == name]
    worst = max(found, key=lambda finding: _LEVELS.index(finding.level))
    more = f" (the worst of {len(found)})" if len(found) > 1 else ""
    return f"{worst.level.upper()}: {worst.what}{more}".replace("|", "/").replace("\n", " ")


def _table(page: str) -> list[str]:
    lines = page[page.index(HEAD) :].splitlines()[2:]
    return lines[: next((n for n, line in enumerate(lines) if not line.startswith("|")), None)]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
