"""What the documentation names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FILE = re.compile(
    r"\b(?:planner|host|proto|master|agent|worker|cli|bench|deploy|tests)/[\w/]+\.(?:py|proto|txt)\b"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = set(_FILE.findall(page.read_text()))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
