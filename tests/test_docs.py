"""What the documentation names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FILE = re.compile(
    r"\b(?:planner|host|proto|master|agent|worker|cli|bench|deploy|tests)/[\w/]+\.(?:py|proto|txt)\b"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = set(_FILE.findall(page.read_text()))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_each_attacker_that_the_security_page_names_is_played_by_a_test() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    table = page.split("| somebody who |")[1].split("\n\n")[0]
    rows = [line for line in table.splitlines()[2:] if line]
    known = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert len(rows) > 10
    assert all(named), "each row names a test"
    assert sorted({name for names in named for name in names} - known) == []
